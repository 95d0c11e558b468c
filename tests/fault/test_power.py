"""The power fails: whatever the journal lists is whole when the file system is mounted again, and the pack goes on."""

from __future__ import annotations

import random
import re
import threading
import time

import pytest

import shardkit
from shardkit.errors import ShardkitError
from shardkit.testing.mounts import loop_mount
from shardkit.testing.packs import contents, tiny_tree

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


class CutPower:
    """Progress during which the power fails, after some shards."""

    def __init__(self, disk, reports):
        self.disk = disk
        self.left = reports

    def begin(self, samples, source_bytes):
        pass

    def advance(self, samples, source_bytes, refused):
        if self.left == 0:
            self.disk.cut_power()
        self.left -= 1


def pack_until_the_power_fails(source, target, progress, **options):
    """Return the error, or None when the pack was quicker."""
    try:
        shardkit.pack(source, target, **OPTIONS, **options, progress=progress)
    except ShardkitError as error:
        # Neither the traceback nor what it came from may keep files open.
        link = error
        while link is not None:
            link.__traceback__ = None
            link = link.__cause__ or link.__context__
        return error
    return None


def what_was_acknowledged_is_there(source, target, whole, acknowledged):
    survived = contents(target)
    for number in range(acknowledged):
        for extension in ("tar", "arrow", "idx"):
            name = f"t-{number:06d}.{extension}"
            assert survived[name] == whole[name]
    for name, data in survived.items():
        assert name.startswith(".shardkit/") or data == whole[name]
    if "manifest.json" not in survived:
        journal = survived.get(".shardkit/journal", b"")
        assert len([line for line in journal.split(b"\n") if line]) >= acknowledged
    shardkit.pack(source, target, **OPTIONS, resume=True)
    assert contents(target) == whole


@pytest.mark.parametrize("reports", range(SHARDS))
def test_what_was_acknowledged_outlives_a_power_cut(source, whole, disk, reports):
    target = disk.path / "new" / "dataset"
    error = pack_until_the_power_fails(source, target, CutPower(disk, reports))
    assert error.exit_code in (6, 7)
    assert f"{reports} of {SHARDS} shards are finished and kept" in str(error)
    disk.remount()
    what_was_acknowledged_is_there(source, target, whole, reports)


@pytest.mark.parametrize("seed", range(6))
def test_a_power_cut_at_any_moment_loses_nothing_that_was_acknowledged(source, whole, disk, seed):
    """Also in the middle of a write, or between a name and its sync."""
    start = time.monotonic()
    shardkit.pack(source, disk.path / "first", **OPTIONS)
    cut = threading.Timer(random.Random(seed).uniform(0, time.monotonic() - start), disk.cut_power)
    cut.start()
    error = pack_until_the_power_fails(source, disk.path / "dataset", None)
    cut.join()
    disk.remount()
    assert contents(disk.path / "first") == whole
    # A dead disk may hide even what is kept: then nothing is claimed.
    told = re.match(r"(\d) of|nothing|every", "every" if error is None else error.kept or "nothing")
    kept = int(told[1] or (0 if told[0] == "nothing" else SHARDS))
    if kept or (disk.path / "dataset").exists():
        what_was_acknowledged_is_there(source, disk.path / "dataset", whole, kept)


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
    pack_until_the_power_fails(source, target, CutPower(disk, reports), overwrite=True)
    disk.remount()
    assert not (target / "manifest.json").exists()
    shardkit.pack(source, target, **OPTIONS, resume=True)
    assert contents(target) == whole
