"""The power fails: whatever the journal lists is whole when the file system is mounted again, and the pack goes on."""

from __future__ import annotations

import random
import threading
import time

import pytest

import shardkit
from shardkit.testing.mounts import loop_mount
from shardkit.testing.packs import contents, tiny_tree

from .conftest import CutPower, pack_until_the_power_fails, told_as_kept, what_was_acknowledged_is_there

SHARDS = 5
OPTIONS = {"name": "t", "shards": SHARDS, "jobs": 1}
SIZES = {"ext4": 96 << 20, "xfs": 320 << 20}


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return tiny_tree(tmp_path_factory.mktemp("tree") / "source", images=15, size=60_000)


@pytest.fixture(scope="module")
def whole(source, tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole") / "dataset"
    shardkit.pack(source, folder, **OPTIONS)
    return contents(folder)


@pytest.fixture(params=sorted(SIZES))
def disk(request, tmp_path):
    with loop_mount(tmp_path / "image", tmp_path / "mounted", request.param, size=SIZES[request.param]) as mounted:
        yield mounted


@pytest.mark.parametrize("reports", range(SHARDS))
def test_what_was_acknowledged_outlives_a_power_cut(source, whole, disk, reports):
    target = disk.path / "new" / "dataset"
    error = pack_until_the_power_fails(source, target, progress=CutPower(disk, reports), **OPTIONS)
    assert error.exit_code in (6, 7)
    assert f"{reports} of {SHARDS} shards are finished and kept" in str(error)
    disk.remount()
    what_was_acknowledged_is_there(source, target, whole, reports, **OPTIONS)


@pytest.mark.parametrize("seed", range(6))
def test_a_power_cut_at_any_moment_loses_nothing_that_was_acknowledged(source, whole, disk, seed):
    """Also in the middle of a write, or between a name and its sync."""
    start = time.monotonic()
    shardkit.pack(source, disk.path / "first", **OPTIONS)
    cut = threading.Timer(random.Random(seed).uniform(0, time.monotonic() - start), disk.cut_power)
    cut.start()
    error = pack_until_the_power_fails(source, disk.path / "dataset", **OPTIONS)
    cut.join()
    disk.remount()
    assert contents(disk.path / "first") == whole
    kept = told_as_kept(error, SHARDS)
    if kept or (disk.path / "dataset").exists():
        what_was_acknowledged_is_there(source, disk.path / "dataset", whole, kept, **OPTIONS)


def test_a_finished_dataset_outlives_a_power_cut_right_after_the_pack(source, whole, disk):
    target = disk.path / "new" / "dataset"
    shardkit.pack(source, target, **OPTIONS)
    disk.cut_power()
    disk.remount()
    survived = contents(target)
    assert {name: data for name, data in survived.items() if not name.startswith(".shardkit/")} == whole
    shardkit.pack(source, target, **OPTIONS, resume=True)
    assert contents(target) == whole


@pytest.mark.parametrize("reports", [0, 2])
def test_a_dataset_that_is_being_replaced_is_never_half_there(source, whole, disk, reports):
    target = disk.path / "dataset"
    shardkit.pack(source, target, name="old", shards=9, jobs=1)
    pack_until_the_power_fails(source, target, progress=CutPower(disk, reports), overwrite=True, **OPTIONS)
    disk.remount()
    assert not (target / "manifest.json").exists()
    shardkit.pack(source, target, **OPTIONS, resume=True)
    assert contents(target) == whole
