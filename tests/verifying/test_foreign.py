"""Verification of shards that another tool made: consistency, and no alignment."""

from __future__ import annotations

import json

import pytest

import shardkit
from shardkit.format.checksum import hex_digest
from shardkit.testing.damage import append, cut, flip_byte
from shardkit.testing.foreign import foreign_files, write_tar

LEVELS = ("index", "structure", "checksum", "decode")


@pytest.fixture(params=["full", "none"])
def facts(request):
    return request.param


@pytest.fixture
def folder(tmp_path, facts):
    folder = tmp_path / "ds"
    folder.mkdir()
    write_tar(folder / "b.tar", foreign_files())
    write_tar(folder / "a.tar", foreign_files(count=5))  # keys that stand in the other shard, too
    (folder / "c.tar").write_bytes(b"no part of the dataset")
    shardkit.index([folder / "b.tar", folder / "a.tar"], facts=facts)
    return folder


def codes(folder, level="checksum"):
    return dict(shardkit.verify(folder, level).counts)


@pytest.mark.parametrize("level", LEVELS)
def test_a_whole_one_is_proven_at_every_level(folder, level, facts):
    report = shardkit.verify(folder, level)
    assert (report.exit_code, report.findings, report.samples) == (0, (), 12)
    assert report.checksums == (facts == "full")


def row(folder, number=3):
    with shardkit.open(folder) as dataset:
        return {name: dataset.columns[name][number] for name in ("offset", "size", "json_offset", "sample_offset")}


def test_a_flipped_bit_in_an_image_is_seen_where_there_are_checksums(folder, facts):
    flip_byte(folder / "b.tar", row(folder)["offset"] + 40)
    assert codes(folder, "structure") == {}
    report = shardkit.verify(folder)
    if facts == "none":
        assert report.findings == ()
        return
    assert [(f.code, f.key, f.offset) for f in report.findings] == [
        ("payload", "train/n0/00003", row(folder)["offset"])
    ]


def test_a_flipped_bit_in_a_caption_changes_the_digest(folder, facts):
    at = (folder / "b.tar").read_bytes().index(b"a caption")
    flip_byte(folder / "b.tar", at)
    assert codes(folder) == ({"shard-digest": 1} if facts == "full" else {})


def test_a_flipped_bit_in_a_header_is_seen_by_structure(folder):
    flip_byte(folder / "b.tar", row(folder)["offset"] - 512)
    report = shardkit.verify(folder, "structure")
    assert [(f.code, f.offset) for f in report.findings] == [("tar", row(folder)["offset"] - 512)]
    assert report.exit_code == 4


def test_another_label_is_seen_by_structure(folder):
    data = bytearray((folder / "b.tar").read_bytes())
    at = data.index(b"train/n0/00003.cls") + 512
    assert data[at : at + 2] == b"0\n"
    data[at : at + 1] = b"7"
    (folder / "b.tar").write_bytes(data)
    assert codes(folder, "structure") == {"members": 1}


def test_a_shard_of_other_samples_of_the_same_size_is_seen(folder):
    other = {name.replace("0000", "0100"): data for name, data in foreign_files().items()}
    write_tar(folder / "b.tar", other)
    assert codes(folder, "structure") == {"members": 7}


@pytest.mark.parametrize("change", [lambda path: cut(path, path.stat().st_size - 512), lambda path: append(path, b"x")])
def test_another_size_is_seen_at_every_level(folder, change):
    change(folder / "b.tar")
    for level in LEVELS:
        assert codes(folder, level) == {"shard-size": 1}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("b.tar", "missing-file"),
        ("b.arrow", "missing-file"),
        ("b.idx", "missing-file"),
        ("index.arrow", "missing-file"),
    ],
)
def test_a_missing_file_is_named(folder, name, expected):
    (folder / name).unlink()
    (finding,) = [one for one in shardkit.verify(folder).findings if one.code == expected]
    assert finding.file == name


def test_an_index_of_another_layout_is_another_ones(folder):
    """Its digest is right: the manifest was sealed over the lie."""
    path = folder / "b.arrow"
    data = path.read_bytes().replace(b"shardkit.layout", b"shardkit.lay0ut")
    path.write_bytes(data)
    manifest = json.loads((folder / "manifest.json").read_text())
    text = (folder / "manifest.json").read_text()
    old = manifest["shards"][0]["index"]["digest"]
    text = text.replace(old, hex_digest("xxh3-128", data))
    body = "".join(line for line in text.splitlines(keepends=True) if not line.startswith(' "digest":'))
    sealed = f' "digest": "xxh3-128:{hex_digest("xxh3-128", body.encode())}",\n'
    text = "".join(sealed if line.startswith(' "digest":') else line for line in text.splitlines(keepends=True))
    (folder / "manifest.json").write_text(text)
    assert codes(folder, "index") == {"index-header": 1}


def test_without_a_manifest_the_indexes_still_say_what_the_shards_are(folder):
    (folder / "manifest.json").unlink()
    (folder / "c.tar").unlink()
    (folder / "index.arrow").unlink()
    assert codes(folder) == {"no-manifest": 1, "missing-file": 1}


def test_every_bit_of_the_idx_and_the_arrow_is_covered(folder):
    for name in ("b.idx", "b.arrow", "index.arrow"):
        size = (folder / name).stat().st_size
        for at in range(0, size, max(size // 5, 1)):
            flip_byte(folder / name, at)
            assert codes(folder, "index")["file-digest"] == 1
            flip_byte(folder / name, at)
