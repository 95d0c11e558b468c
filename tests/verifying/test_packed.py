"""What the packer writes is whole in the eyes of a verifier that shares nothing with it but the format."""

from __future__ import annotations

import json
import shutil
import warnings

import pytest
from PIL import Image

from shardkit.format.manifest import load_manifest
from shardkit.packing.run import pack
from shardkit.testing.damage import flip_byte
from shardkit.verifying.report import LEVELS
from shardkit.verifying.run import verify


@pytest.fixture(scope="module")
def packed(tmp_path_factory, photo_tree):
    path = tmp_path_factory.mktemp("packed") / "photos"
    pack(photo_tree, path, shard_samples=15, jobs=1)
    return path


@pytest.mark.parametrize("level", LEVELS)
def test_a_packed_tree_is_whole(packed, level):
    filters = list(warnings.filters)
    report = verify(packed, level)
    assert (report.counts, report.samples, report.shards) == ({}, 40, 3)
    assert report.generation == load_manifest((packed / "manifest.json").read_bytes()).generation
    assert warnings.filters == filters


def test_a_flipped_bit_in_a_photograph_is_found_and_named(packed):
    shard = next(packed.glob("*-000001.tar"))
    flip_byte(shard, 100_000, 64)
    (finding,) = verify(packed).findings
    flip_byte(shard, 100_000, 64)
    assert (finding.code, finding.shard, finding.region) == ("payload", shard.name, "payload")
    assert finding.key is not None
    assert finding.offset <= 100_000
    assert verify(packed).exit_code == 0


def numbers(tree, folder):
    lines = [f"{path},{i % 7}" for i, path in enumerate(sorted(tree.rglob("*.jpg")))]
    (folder / "list.csv").write_text("path,label\n" + "\n".join(lines) + "\n")
    return folder / "list.csv"


def named_with_metadata(tree, folder):
    paths = sorted(tree.rglob("*.jpg"))
    rows = [{"path": str(p), "label": p.parent.name, "caption": f"no. {i}", "box": [0, i]} for i, p in enumerate(paths)]
    (folder / "list.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder / "list.jsonl"


def flat(tree, folder):
    (folder / "flat").mkdir()
    for path in tree.rglob("*.jpg"):
        shutil.copy(path, folder / "flat")
    return folder / "flat"


def with_png(tree, folder):
    shutil.copytree(tree, folder / "tree")
    Image.new("RGB", (30, 20)).save(folder / "tree" / next(tree.iterdir()).name / "png.jpg", "PNG")
    return folder / "tree"


@pytest.mark.parametrize(
    ("source", "options"),
    [
        (lambda tree, _folder: tree, {}),
        (lambda tree, _folder: tree, {"align": 512}),
        (lambda tree, _folder: tree, {"align": 524288}),
        (lambda tree, _folder: tree, {"digest": "sha256"}),
        (lambda tree, _folder: tree, {"resize": 64, "labels": "none"}),
        (lambda tree, _folder: tree, {"key": "index", "shuffle": False}),
        (flat, {}),
        (numbers, {}),
        (named_with_metadata, {}),
        (named_with_metadata, {"labels": "none", "key": "stem"}),
        (with_png, {"check": "none"}),
        (with_png, {"convert": True}),
        (with_png, {}),
    ],
)
def test_whatever_is_packed_is_whole(tmp_path, photo_tree, source, options):
    manifest = pack(source(photo_tree, tmp_path), tmp_path / "ds", shard_samples=15, jobs=1, **options)
    report = verify(tmp_path / "ds", "decode", jobs=1)
    assert (report.counts, report.samples) == ({}, manifest.totals.samples)
    assert manifest.totals.samples in (40, 41)
