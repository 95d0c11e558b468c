from __future__ import annotations

import json

import pytest

import shardkit
from shardkit.format.index import decode_dataset_index
from shardkit.indexing import notes
from shardkit.indexing.images import MAX_LABEL_BYTES
from shardkit.testing.datasets import tiny_jpeg
from shardkit.testing.foreign import write_tar


@pytest.mark.parametrize("image_bytes", [1000, 300_000])
@pytest.mark.parametrize("json_bytes", [20, 3000, 400_000])
def test_json_members_are_in_memory_a_megabyte_at_a_time(tmp_path, monkeypatch, image_bytes, json_bytes):
    """However many stand before the last header that is known: where images are large, some hundred."""
    members = {}
    for number in range(120):
        members[f"{number:04d}.jpg"] = tiny_jpeg(number, image_bytes)
        text = b'{"n":%d,"x":"%s"}' % (number, b"x" * json_bytes)
        members[f"{number:04d}.json"] = text if number % 50 else text[:-1]
    held, judge = [], notes.are_json_objects
    monkeypatch.setattr(notes, "are_json_objects", lambda texts: held.append(list(map(len, texts))) or judge(texts))
    path = write_tar(tmp_path / "a.tar", members)
    shardkit.index([path], out=tmp_path / "out", labels="none", facts="none", jobs=1, on_error="skip")
    assert max(map(sum, held)) <= max(1 << 20, json_bytes + 99)
    assert sum(map(len, held)) == 120
    assert json_bytes > 100_000 or len(held) < 60
    (rows,) = decode_dataset_index((tmp_path / "out" / "index.arrow").read_bytes())
    assert [size > 0 for size in rows.column("json_size").to_pylist()] == [number % 50 > 0 for number in range(120)]


@pytest.mark.parametrize("count", [1, 200])
def test_a_class_number_in_a_longer_text_than_is_read_is_none(tmp_path, count):
    """Whether members are looked at one by one or many together."""
    members = {}
    for number in range(count):
        members[f"{number:04d}.jpg"] = tiny_jpeg(number)
        members[f"{number:04d}.cls"] = b"7".rjust(MAX_LABEL_BYTES)
        members[f"{number:04d}x.jpg"] = tiny_jpeg(number)
        members[f"{number:04d}x.cls"] = b"7".rjust(MAX_LABEL_BYTES + 1)
        members[f"{number:04d}y.jpg"] = tiny_jpeg(number)
        members[f"{number:04d}y.cls"] = b""
    path = write_tar(tmp_path / "a.tar", members)
    result = shardkit.index([path], out=tmp_path / "out", facts="none", jobs=1, on_error="skip")
    assert result.totals.samples == count
    reasons = [json.loads(line)["reason"] for line in (tmp_path / "out" / "rejected.jsonl").read_text().splitlines()]
    assert reasons == ["bad-label"] * 2 * count
