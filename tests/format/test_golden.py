"""The golden datasets never change: today's code reads them, and packs their sources into the same bytes."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
import runpy
from pathlib import Path

import pyarrow as pa
import pytest

import shardkit
from shardkit.format.checksum import crc32c, hex_digest
from shardkit.format.dali_index import parse_dali_index
from shardkit.format.index import FORMAT_VERSION, SampleRow, decode_dataset_index, decode_shard_index
from shardkit.format.jpeg import SUBSAMPLINGS, inspect_jpeg
from shardkit.format.keys import is_safe_key, key_from_path, path_from_source
from shardkit.format.layout import place_sample, shard_bytes
from shardkit.format.manifest import dump_manifest, load_manifest
from shardkit.format.media_type import MEDIA_TYPES
from shardkit.format.tar import BLOCK, encode_padding, parse_header

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "golden"
VERSIONS = [f"v{version}" for version in range(1, FORMAT_VERSION + 1)]


@pytest.fixture(params=VERSIONS)
def folder(request):
    return GOLDEN / request.param


@pytest.fixture
def manifest(folder):
    return load_manifest((folder / "manifest.json").read_bytes())


def rows_of(batch):
    return [SampleRow(**values) for values in batch.to_pylist()]


def test_every_file_is_the_one_of_its_provenance(folder):
    listed = re.findall(
        r"^\| `([^`]+)` \| (\d+) \| `([0-9a-f]{64})` \|$", (folder / "PROVENANCE.md").read_text(), re.MULTILINE
    )
    found = [
        (str(path.relative_to(GOLDEN)), str(path.stat().st_size), hashlib.sha256(path.read_bytes()).hexdigest())
        for part in (Path(f"{folder}-source"), folder)
        for path in sorted(part.rglob("*"))
        if path.is_file() and path.name != "PROVENANCE.md"
    ]
    assert found == listed
    assert len(listed) >= 10


def test_the_manifest_names_every_file_as_it_is(folder, manifest):
    records = {"index.arrow": manifest.index, "rejected.jsonl": manifest.rejected}
    for shard in manifest.shards:
        records |= {shard.name: shard, f"{shard.stem}.arrow": shard.index, f"{shard.stem}.idx": shard.dali_index}
    assert {p.name for p in folder.iterdir()} == {*records, "manifest.json", "PROVENANCE.md"}
    for name, record in records.items():
        data = (folder / name).read_bytes()
        assert (record.bytes, record.digest) == (len(data), hex_digest(manifest.digest_algorithm, data))


def test_every_byte_of_the_shards_follows_from_the_indexes(folder, manifest):
    """Rebuild each shard from its rows, its DALI index and its payloads."""
    for shard in manifest.shards:
        data = (folder / shard.name).read_bytes()
        index = decode_shard_index((folder / f"{shard.stem}.arrow").read_bytes())
        assert index.header.shard == shard.name
        assert index.header.digest == f"{manifest.digest_algorithm}:{shard.digest}"
        position = 0
        members = parse_dali_index((folder / f"{shard.stem}.idx").read_bytes())
        for row, parts in zip(rows_of(index.rows), members, strict=True):
            sizes = {part.extension: part.size for part in parts}
            place = place_sample(position, sizes.get("cls"), sizes.get("json"), sizes["jpg"], index.header.align)
            assert (row.sample_offset, row.sample_size) == (place.start, place.end - place.start)
            assert (row.offset, row.json_offset) == (place.payload_offset, place.json_offset)
            assert data[place.padding_offset :][: place.padding] == encode_padding(place.padding)
            for part in parts:
                header = parse_header(data[part.offset - BLOCK : part.offset])
                assert (
                    (header.name, header.size) == (part.name, part.size) == (f"{row.key}.{part.extension}", part.size)
                )
                assert not any(data[part.offset + part.size : part.offset + part.size + -part.size % BLOCK])
            position = place.end
        assert len(data) == shard.bytes == shard_bytes(position, index.header.align)
        assert not any(data[position:])


def test_every_row_says_what_its_image_is(folder, manifest):
    source_folder = Path(f"{folder}-source")
    for shard in manifest.shards:
        data = (folder / shard.name).read_bytes()
        for row in rows_of(decode_shard_index((folder / f"{shard.stem}.arrow").read_bytes()).rows):
            image = data[row.offset : row.offset + row.size]
            path = path_from_source(row.source)
            assert image == (source_folder / path.decode()).read_bytes()
            assert row.crc32c == crc32c(image)
            assert is_safe_key(row.key)
            assert row.key == key_from_path(path)
            facts = inspect_jpeg(image)
            names = ("width", "height", "sof", "components", "subsampling", "precision", "scans", "restart_interval",
                     "orientation", "adobe_transform", "media_type")  # fmt: skip
            assert {name: getattr(row, name) for name in names} == {name: getattr(facts, name) for name in names}
            assert manifest.classes[row.label] == row.source.split("/")[0]
            if row.json_size:
                text = json.loads(data[row.json_offset : row.json_offset + row.json_size])
                assert (text["source"], text["class"]) == (row.source, manifest.classes[row.label])


def test_the_rows_are_the_ones_that_were_written(folder):
    """By hand, so that a change of parser and packer together is noticed."""
    rows = {
        row.source: row
        for batch in decode_dataset_index((folder / "index.arrow").read_bytes())
        for row in rows_of(batch)
    }
    facts = {
        source: (
            row.label,
            row.width,
            row.height,
            row.sof,
            row.components,
            SUBSAMPLINGS[row.subsampling],
            row.orientation,
        )
        for source, row in rows.items()
    }
    assert facts == {
        "cat/baseline.jpg": (0, 40, 24, 0, 3, "4:2:0", 0),
        "cat/gray.jpg": (0, 33, 17, 0, 1, "gray", 0),
        "cat/progressive.jpeg": (0, 48, 32, 2, 3, "4:2:0", 0),
        "dog/full chroma.v2.JPG": (1, 31, 23, 0, 3, "4:4:4", 0),
        "dog/on its side.jpg": (1, 24, 40, 0, 3, "4:2:0", 6),
        "dog/restarts.jpg": (1, 64, 48, 0, 3, "4:2:0", 0),
    }
    assert {MEDIA_TYPES[row.media_type] for row in rows.values()} == {"jpeg"}
    assert rows["dog/full chroma.v2.JPG"].key == "dog/full-x20chroma-x2Ev2"
    assert [bool(row.restart_interval) for row in rows.values() if "restarts" in row.source] == [True]
    (refused,) = map(json.loads, (folder / "rejected.jsonl").read_text().splitlines())
    assert (refused["path"], refused["reason"]) == ("dog/really a screenshot.jpg", "not-jpeg")


def test_the_dataset_index_is_the_shards_indexes(folder, manifest):
    batches = decode_dataset_index((folder / "index.arrow").read_bytes())
    shards = [decode_shard_index((folder / f"{s.stem}.arrow").read_bytes()).rows for s in manifest.shards]
    assert [batch.to_pylist() for batch in batches] == [batch.to_pylist() for batch in shards]
    assert [batch.num_rows for batch in batches] == [s.samples for s in manifest.shards]


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    target = tmp_path_factory.mktemp("golden") / "dataset"
    runpy.run_path(str(ROOT / "scripts" / "make_golden.py"))["pack_golden"](target)
    return target


def test_packing_the_sources_again_gives_the_same_dataset(packed):
    """The shards, their DALI indexes and the manifest byte for byte; the Arrow files as tables."""
    folder = GOLDEN / VERSIONS[-1]
    golden = load_manifest((folder / "manifest.json").read_bytes())
    again = load_manifest((packed / "manifest.json").read_bytes())
    assert {p.name for p in packed.iterdir()} == {p.name for p in folder.iterdir()} - {"PROVENANCE.md"}
    for shard in golden.shards:
        for name in (shard.name, f"{shard.stem}.idx"):
            assert (packed / name).read_bytes() == (folder / name).read_bytes(), name
    for name in ("index.arrow", *(f"{shard.stem}.arrow" for shard in golden.shards)):
        assert arrow_table(packed / name).equals(arrow_table(folder / name), check_metadata=True), name
    refusals = [
        [{**json.loads(x), "detail": ""} for x in (p / "rejected.jsonl").read_text().splitlines()]
        for p in (packed, folder)
    ]
    assert refusals[0] == refusals[1]
    assert golden.options.items() <= again.options.items()
    # What may differ without a new format version: who packed, new options, Arrow's own bytes, a refusal's wording.
    expected = dataclasses.replace(
        golden, shardkit=shardkit.__version__, options=again.options, index=again.index, rejected=again.rejected,
        shards=[dataclasses.replace(s, index=new.index) for s, new in zip(golden.shards, again.shards, strict=True)],
    )  # fmt: skip
    assert dump_manifest(expected).encode() == (packed / "manifest.json").read_bytes()
    assert again.generation == golden.generation


def arrow_table(path):
    with pa.memory_map(str(path)) as file:
        return pa.ipc.open_file(file).read_all()


def test_verify_finds_no_fault_and_open_gives_every_source(folder, manifest):
    report = shardkit.verify(folder, level="decode")
    assert (report.samples, list(report.findings)) == (manifest.totals.samples, [])
    with shardkit.open(folder) as dataset:
        assert len(dataset) == manifest.totals.samples
        assert list(dataset.classes) == list(manifest.classes)
        for number in range(len(dataset)):
            source = path_from_source(dataset.columns["source"][number]).decode()
            assert bytes(dataset[number].jpeg) == (Path(f"{folder}-source") / source).read_bytes()
