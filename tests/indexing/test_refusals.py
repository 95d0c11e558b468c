"""What `shardkit.index` refuses: samples and shards one by one, or all of it."""

from __future__ import annotations

import io
import json
import os
import random
import tarfile
from typing import TYPE_CHECKING

import pytest

import shardkit
from shardkit.errors import ConfigError, SourceError, TarFormatError, UnsafeError
from shardkit.indexing.refusals import REASONS
from shardkit.indexing.run import run_index
from shardkit.testing.datasets import tiny_jpeg
from shardkit.testing.foreign import foreign_files, write_tar

if TYPE_CHECKING:
    from pathlib import Path


def refusals(folder: Path) -> list[dict[str, str]]:
    path = folder / "rejected.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.mark.parametrize(
    ("spec", "error"),
    [
        ("pipe:touch {marker}", UnsafeError),
        ("https://example.com/a.tar", ConfigError),
        ("s3://bucket/{{0..9}}.tar", ConfigError),
        ("a-{{0..99999999999}}.tar", UnsafeError),
        ("{{0..999}}{{0..999}}{{0..999}}.tar", UnsafeError),
        ("{{a,b}}" * 40, UnsafeError),
        ("{{a," * 30 + "b" + "}}" * 30, UnsafeError),
        ("/dev/zero", UnsafeError),
        ("missing.tar", ConfigError),
        ("", ConfigError),
    ],
)
def test_what_is_no_local_file_is_refused_and_nothing_runs(tmp_path, spec, error):
    marker = tmp_path / "marker"
    with pytest.raises(error):
        shardkit.index(spec.format(marker=marker), out=tmp_path / "out")
    assert not marker.exists()
    assert not (tmp_path / "out").exists()


def test_a_fifo_is_refused_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "a.tar")
    with pytest.raises(UnsafeError, match="not a regular file"):
        shardkit.index(tmp_path / "a.tar")


def test_two_shards_of_one_name_are_refused(shards, tmp_path):
    with pytest.raises(ConfigError, match="given twice"):
        shardkit.index([shards, shards / "t-000.tar"])
    (tmp_path / "b").mkdir()
    (tmp_path / "b/t-000.tar").write_bytes((shards / "t-000.tar").read_bytes())
    with pytest.raises(ConfigError, match="one name"):
        shardkit.index([shards, tmp_path / "b"], out=tmp_path / "out")


def test_what_cannot_be_used_is_left_out_and_told_shard_by_shard(tmp_path):
    jpeg = tiny_jpeg(1)
    members = [
        ("good.jpg", jpeg), ("good.cls", b"1"),
        ("torn.jpg", jpeg), ("between.jpg", jpeg), ("torn.cls", b"1"),
        ("twice.jpg", jpeg), ("x.jpg", jpeg), ("twice.jpg", jpeg),
        ("same.jpg", jpeg), ("same.jpg", jpeg),
        ("text.txt", b"no image"),
        ("void.jpg", b""),
        ("word.jpg", jpeg), ("word.cls", b"cat"),
        ("../up.jpg", jpeg),
        ("/abs.jpg", jpeg),
    ]  # fmt: skip
    path = write_tar(tmp_path / "a.tar", members)
    with tarfile.open(path, "a") as tar:
        link = tarfile.TarInfo("link.jpg")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(link)
        tar.addfile(tarfile.TarInfo("bad\udcff.txt"))
        tail = tarfile.TarInfo("bad\udcff.jpg")
        tail.size = len(jpeg)
        tar.addfile(tail, io.BytesIO(jpeg))
    write_tar(tmp_path / "b.tar", {"fine.jpg": jpeg})
    result = run_index([tmp_path])
    with shardkit.open(tmp_path) as dataset:
        assert list(dataset.columns["key"][:]) == ["good", "between", "twice", "x", "fine"]
    told = [(line["path"], line["reason"]) for line in refusals(tmp_path)]
    assert told == [
        ("a.tar/torn", "not-adjacent"), ("a.tar/torn", "not-adjacent"), ("a.tar/twice", "duplicate-key"),
        ("a.tar/same", "duplicate-member"), ("a.tar/text", "no-image"), ("a.tar/void", "empty"),
        ("a.tar/word", "bad-label"), ("a.tar/../up.jpg", "parent-in-name"), ("a.tar//abs.jpg", "absolute-name"),
        ("a.tar/link.jpg", "link"), ("a.tar/bad%FF", "bad-key"),
    ]  # fmt: skip
    assert list(result.by_shard) == ["a.tar"]
    assert result.by_shard["a.tar"]["not-adjacent"] == 2
    assert result.manifest.totals.refused == len(told) == sum(result.refused.values())
    assert {reason for _, reason in told} <= set(REASONS)
    assert shardkit.verify(tmp_path).findings == ()
    with pytest.raises(SourceError, match=r"not-adjacent\): a\.tar/torn"):
        run_index([tmp_path], on_error="fail", overwrite=True)


def test_a_place_in_a_refusal_is_a_byte_of_the_shard(tmp_path):
    path = write_tar(tmp_path / "a.tar", {"a.jpg": tiny_jpeg(0), "b.txt": b""})
    shardkit.index(path)
    (line,) = refusals(tmp_path)
    at = int(line["detail"].rpartition("at byte ")[2])
    assert path.read_bytes()[at : at + 5] == b"b.txt"


@pytest.mark.parametrize("on_error", ["skip", "fail"])
@pytest.mark.parametrize("damage", ["cut", "flip", "gzip", "bomb"])
def test_a_shard_that_is_no_whole_tar_is_left_out_whole_or_ends_the_run(shards, damage, on_error):
    path = shards / "t-001.tar"
    data = bytearray(path.read_bytes())
    if damage == "cut":
        del data[-11_000:]
    elif damage == "flip":
        data[0] ^= 1
    elif damage == "gzip":
        data[:3] = b"\x1f\x8b\x08"
    else:  # GNU long name of 2 GiB
        info = tarfile.TarInfo("././@LongLink")
        info.type, info.size = b"L", 2 << 30
        data[:512] = info.tobuf(tarfile.GNU_FORMAT)
    path.write_bytes(data)
    kind = UnsafeError if damage == "bomb" else TarFormatError
    if on_error == "fail":
        with pytest.raises(kind) as caught:
            shardkit.index(shards, on_error="fail", jobs=1)
        assert str(path) in str(caught.value)
        return
    result = run_index([shards])
    assert [shard.name for shard in result.manifest.shards] == ["t-000.tar", "t-002.tar"]
    assert [(line["path"], line["reason"]) for line in refusals(shards)] == [
        ("t-001.tar", "unsafe-shard" if damage == "bomb" else "damaged-shard")
    ]
    assert str(shards) not in (shards / "rejected.jsonl").read_text()
    with pytest.raises(kind):
        shardkit.index(path, overwrite=True)


def test_random_bytes_and_flips_never_do_worse_than_a_refusal(tmp_path):
    rng = random.Random(7)
    whole = write_tar(tmp_path / "whole.tar", foreign_files(count=2), tarfile.PAX_FORMAT, mtime=1.5).read_bytes()
    for number in range(150):
        data = bytearray(whole)
        for _ in range(rng.randint(1, 4)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        path = tmp_path / str(number) / "a.tar"
        path.parent.mkdir()
        path.write_bytes(data[: rng.randrange(len(data))] if number % 3 == 0 else data)
        try:
            shardkit.index(path, jobs=1)
        except (TarFormatError, UnsafeError, SourceError):
            assert [entry.name for entry in path.parent.iterdir()] == ["a.tar"]
        else:
            assert shardkit.verify(path.parent, "structure").findings == ()
