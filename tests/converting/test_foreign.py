"""Tars of other tools become datasets: their samples, what is none, and pictures of other formats."""

from __future__ import annotations

import io
import itertools
import json
import os
import tarfile
from pathlib import Path

import pytest
from PIL import Image

import shardkit
from shardkit.errors import ConfigError, UnsafeError
from shardkit.testing.datasets import tiny_jpeg
from shardkit.testing.packs import StopAfter, contents

from .conftest import content_of, members_of, order_of, refusals_of, rows_of, whole

# --- tars of other tools


@pytest.mark.parametrize("tar_format", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_foreign_tars_become_a_dataset_that_webdataset_reads_alike(write_tar, sample, tmp_path, tar_format):
    tariterators = pytest.importorskip("webdataset.tariterators")
    texts = [b'{ "b" : 1.50,\n "a": "\\u00e9" }', b'{"source":"elsewhere/7.png","class":9}', b"{}"]
    numbers = range(9)
    for number, shard in itertools.groupby(numbers, lambda n: n // 3):
        found = [
            m for n in shard for m in sample(n, label=n % 2, metadata=texts[n % 3], extension=["jpg", "JPEG"][n % 2])
        ]
        write_tar(f"in/x-{number:03d}.tar", found, tar_format)
    shardkit.convert(str(tmp_path / "in" / "x-{000..002}.tar"), tmp_path / "out", shards=2, jobs=1)
    assert whole(tmp_path / "out")
    read = []
    for shard in sorted((tmp_path / "out").glob("*.tar")):
        with shard.open("rb") as file:
            members = tariterators.tar_file_iterator(file)
            read += tariterators.group_by_keys(dict(member) | {"__url__": "x"} for member in members)
    assert [each["__key__"] for each in read] == [f"{n:06d}" for n in numbers]
    for number, each in enumerate(read):
        assert each["jpg"] == tiny_jpeg(number)
        assert each["cls"] == b"%d" % (number % 2)
        assert each["json"] == texts[number % 3]
    rows = rows_of(tmp_path / "out")
    assert rows["000000"]["source"] == "x-000.tar/000000.jpg"
    assert rows["000001"]["source"] == "elsewhere/7.png"
    dataset = shardkit.open(tmp_path / "out")
    assert dataset.by_key("000003").metadata == {"b": 1.5, "a": "é"}


def test_a_shard_of_webdatasets_own_writer_is_taken(tmp_path):
    webdataset = pytest.importorskip("webdataset")
    with webdataset.TarWriter(str(tmp_path / "w.tar")) as writer:
        for number in range(5):
            writer.write(
                {"__key__": f"n{number}/é {number}", "jpg": tiny_jpeg(number), "cls": number, "json": {"n": number}}
            )
    shardkit.convert(tmp_path / "w.tar", tmp_path / "out", jobs=1)
    assert whole(tmp_path / "out")
    assert [(s.label, s.jpeg, s.metadata) for s in shardkit.open(tmp_path / "out")] == [
        (number, tiny_jpeg(number), {"n": number}) for number in range(5)
    ]
    assert order_of(tmp_path / "out")[0] == "n0/-xC3-xA9-x200"


def test_a_shard_of_our_own_as_a_mere_tar_keeps_its_members(listed, tmp_path):
    shardkit.convert(str(listed / "*.tar"), tmp_path / "out", name="l", shards=3, jobs=1)
    assert members_of(tmp_path / "out") == members_of(listed)
    assert content_of(rows_of(tmp_path / "out")) == content_of(rows_of(listed))


def test_a_sample_without_label_and_metadata_gets_a_json_member_that_names_its_source(write_tar, sample, tmp_path):
    write_tar("in/x.tar", sample(1))
    shardkit.convert(tmp_path / "in" / "x.tar", tmp_path / "out", jobs=1)
    assert members_of(tmp_path / "out")["000001.json"] == b'{"source":"x.tar/000001.jpg"}'
    assert whole(tmp_path / "out")


@pytest.mark.parametrize("label", [None, 2])
@pytest.mark.parametrize("source", ["100% wool.jpg", "a%20b.jpg", "http://x/y.jpg", "caf\u00e9 \u4e2d", "", 5])
def test_what_foreign_metadata_calls_source_and_class_is_kept_and_verified(write_tar, sample, tmp_path, source, label):
    data = json.dumps({"class": "tabby", "source": source}).encode()
    write_tar("in/x.tar", sample(1, label=label, metadata=data))
    shardkit.convert(tmp_path / "in" / "x.tar", tmp_path / "out", jobs=1)
    assert members_of(tmp_path / "out")["000001.json"] == data
    assert whole(tmp_path / "out")
    shardkit.convert(tmp_path / "in" / "x.tar", tmp_path / "named", labels=["p", "q", "tabby"], jobs=1)
    assert whole(tmp_path / "named")


REFUSED = {
    "bad-label": [("1.jpg", tiny_jpeg()), ("1.cls", b"cat")],
    "bad-json": [("1.jpg", tiny_jpeg()), ("1.json", b"[1]")],
    "no-image": [("1.cls", b"1")],
    "not-adjacent": [("1.jpg", tiny_jpeg()), ("2.jpg", tiny_jpeg()), ("1.cls", b"1")],
    "duplicate-key": [
        ("1.jpg", tiny_jpeg()),
        ("1.cls", b"1"),
        ("2.cls", b"1"),
        ("2.jpg", tiny_jpeg()),
        ("1.jpg", b"x"),
    ],
    "duplicate-member": [("1.jpg", tiny_jpeg()), ("1.jpg", tiny_jpeg())],
    "empty": [("1.jpg", b""), ("1.cls", b"1")],
    "not-jpeg": [("1.png", b"\x89PNG\r\n\x1a\n"), ("1.cls", b"1")],
    "truncated": [("1.jpg", tiny_jpeg()[:-2]), ("1.cls", b"1")],
}


@pytest.mark.parametrize("reason", REFUSED)
def test_a_sample_that_is_none_is_refused_by_name(write_tar, sample, tmp_path, reason):
    write_tar("in/x.tar", [*REFUSED[reason], *sample(7, label=0)])
    shardkit.convert(tmp_path / "in" / "x.tar", tmp_path / "out", jobs=1)
    lines = refusals_of(tmp_path / "out")
    assert {line["reason"] for line in lines} == {reason}
    assert {line["path"] for line in lines} <= {"x.tar/1", "x.tar/2"}
    assert "000007" in rows_of(tmp_path / "out")
    assert whole(tmp_path / "out")


def test_a_link_in_a_sample_spoils_it_and_is_never_followed(tmp_path, sample):
    with tarfile.open(tmp_path / "x.tar", "w") as tar:
        for name, data in (*sample(1, label=0), *sample(2, label=0)):
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
        info = tarfile.TarInfo("000002.json")
        info.type, info.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(info)
    shardkit.convert(tmp_path / "x.tar", tmp_path / "out", jobs=1)
    assert [(line["path"], line["reason"]) for line in refusals_of(tmp_path / "out")] == [
        ("x.tar/000002", "refused-member"), ("x.tar/000002.json", "link"),
    ]  # fmt: skip
    assert order_of(tmp_path / "out") == ["000001"]


def test_a_tar_over_a_limit_is_unsafe(tmp_path, write_tar, sample):
    good = write_tar("good.tar", sample(1, label=0))
    with tarfile.open(tmp_path / "bomb.tar", "w", format=tarfile.PAX_FORMAT) as tar:
        info = tarfile.TarInfo("1.jpg")
        info.pax_headers = {"comment": "x" * (2 << 20)}
        tar.addfile(info)
    shardkit.convert([tmp_path / "bomb.tar", good], tmp_path / "out", jobs=1)
    assert [(line["path"], line["reason"]) for line in refusals_of(tmp_path / "out")] == [("bomb.tar", "unsafe-shard")]
    with pytest.raises(UnsafeError, match=r"bomb\.tar"):
        shardkit.convert([tmp_path / "bomb.tar", good], tmp_path / "fail", jobs=1, on_error="fail")


def test_numbers_that_json_does_not_have_and_lone_surrogates_are_bad_json(write_tar, sample, tmp_path):
    texts = [b'{"a": NaN}', b'{"source": "\\ud800"}', b"\xff", b'{"a":1,"a":2}', b'{"ok": "\\ud800"}']
    write_tar("x.tar", [m for n, text in enumerate(texts) for m in sample(n, label=0, metadata=text)])
    shardkit.convert(tmp_path / "x.tar", tmp_path / "out", jobs=1)
    assert [line["path"] for line in refusals_of(tmp_path / "out")] == [f"x.tar/{n:06d}" for n in range(4)]
    assert members_of(tmp_path / "out")["000004.json"] == texts[4]


def test_other_members_are_refused_or_dropped_and_counted(write_tar, sample, tmp_path):
    found = [*sample(1, label=0), ("000001.txt", b"a caption"), *sample(2, label=0), ("000002.TXT", b"x"),
             ("000002.seg.png", b"x")]  # fmt: skip
    write_tar("x.tar", found)
    with pytest.raises(ConfigError, match=r"found 2 \.txt, 1 \.seg\.png; .*--other-members drop"):
        shardkit.convert(tmp_path / "x.tar", tmp_path / "out", jobs=1)
    result = shardkit.convert(tmp_path / "x.tar", tmp_path / "out", jobs=1, other_members="drop")
    assert result.passed_over == {".txt members": 2, ".seg.png members": 1}
    assert set(members_of(tmp_path / "out")) == {f"00000{n}.{e}" for n in (1, 2) for e in ("jpg", "cls")}


# --- pictures


def picture(kind, size=(40, 30)):
    out = io.BytesIO()
    Image.linear_gradient("L").resize(size).convert("RGB").save(out, kind)
    return out.getvalue()


def test_other_formats_are_reencoded_when_asked(write_tar, sample, tmp_path):
    write_tar("x.tar", [("a.png", picture("PNG")), ("a.cls", b"3"), ("b.webp", picture("WEBP")), ("b.cls", b"4"),
                        *sample(1, label=5)])  # fmt: skip
    shardkit.convert(tmp_path / "x.tar", tmp_path / "out", jobs=1, convert=True)
    rows = rows_of(tmp_path / "out")
    assert {key: (row["label"], row["width"]) for key, row in rows.items()} == {
        "a": (3, 40), "b": (4, 40), "000001": (5, rows["000001"]["width"]),
    }  # fmt: skip
    assert members_of(tmp_path / "out")["000001.jpg"] == tiny_jpeg(1)
    assert whole(tmp_path / "out")


def test_large_images_are_scaled_down_and_small_ones_copied(write_tar, tmp_path):
    small = picture("JPEG", (30, 20))
    write_tar("x.tar", [("a.jpg", picture("JPEG", (300, 200))), ("a.cls", b"0"), ("b.jpg", small), ("b.cls", b"0")])
    shardkit.convert(tmp_path / "x.tar", tmp_path / "out", jobs=1, resize=50)
    rows = rows_of(tmp_path / "out")
    assert (rows["a"]["width"], rows["a"]["height"]) == (75, 50)
    assert members_of(tmp_path / "out")["b.jpg"] == small


def test_a_target_whose_name_is_no_utf_8_is_one_like_any_other(write_tar, sample, tmp_path):
    """What is found in tars is stored there and mapped; so is the plan of a run that goes on."""
    tar = write_tar("x.tar", [member for n in range(6) for member in sample(n, label=n % 2)])
    out = Path(os.fsdecode(os.fsencode(tmp_path) + b"/o\xff"))
    given = {"shards": 3, "jobs": 1, "name": "t"}
    with pytest.raises(StopAfter.Stop):
        shardkit.convert(tar, out, progress=StopAfter(2), **given)
    shardkit.convert(tar, out, resume=True, **given)
    shardkit.convert(tar, tmp_path / "whole", **given)
    assert contents(out) == contents(tmp_path / "whole")
