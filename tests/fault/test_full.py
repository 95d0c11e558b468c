"""Targets without room: bytes, inodes, file sizes; told at once, told late, and gone on with when there is room."""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import subprocess
import sys

import pytest

import shardkit
from shardkit.errors import ShardkitError, TargetFullError
from shardkit.testing.mounts import loop_mount, tmpfs
from shardkit.testing.packs import StopAfter, contents, tiny_tree

MIB = 1 << 20


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """6 MiB in 24 images."""
    return tiny_tree(tmp_path_factory.mktemp("tree") / "source", images=24, size=MIB // 4)


@pytest.fixture(scope="module")
def whole(source, tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole") / "dataset"
    shardkit.pack(source, folder, name="t", shards=6, jobs=1)
    return contents(folder)


def pack(source, target, *, jobs=1, **options):
    return shardkit.pack(source, target, **{"name": "t", "shards": 6, "jobs": jobs, **options})


def failure(source, target, **options):
    """Return the error of a pack without its traceback, which would keep files of the target open."""
    try:
        pack(source, target, **options)
    except ShardkitError as error:
        link = error
        while link is not None:
            link.__traceback__ = None
            link = link.__cause__ or link.__context__
        return error
    pytest.fail("it fits")


@pytest.mark.parametrize("state", ["absent", "empty"])
def test_too_little_space_is_told_before_anything_is_written(source, tmp_path, state):
    with tmpfs(tmp_path / "small", size=4 * MIB) as small:
        if state == "empty":
            (small / "dataset").mkdir()
        before = contents(small)
        with pytest.raises(TargetFullError, match=r"too little space.*bytes free.*nothing was changed") as caught:
            pack(source, small / "dataset")
        assert caught.value.exit_code == 5
        assert contents(small) == before


def test_too_few_inodes_are_told_before_anything_is_written(source, tmp_path):
    with tmpfs(tmp_path / "small", size=64 * MIB, inodes=16) as small:
        with pytest.raises(TargetFullError, match=r"too little space.*free inodes.*nothing was changed"):
            pack(source, small / "dataset")
        assert contents(small) == {}


def test_what_is_missing_must_fit_and_no_more(source, whole, tmp_path):
    with tmpfs(tmp_path / "small", size=9 * MIB) as small:
        with pytest.raises(StopAfter.Stop):
            pack(source, small / "dataset", progress=StopAfter(4))
        (small / "other").write_bytes(bytes(3 * MIB))
        with pytest.raises(TargetFullError, match=r"too little space.*nothing was changed"):
            pack(source, small / "dataset", resume=True)
        (small / "other").unlink()
        pack(source, small / "dataset", resume=True)
        assert contents(small / "dataset") == whole


def test_the_space_of_what_is_replaced_counts_as_free(source, tmp_path):
    with tmpfs(tmp_path / "small", size=9 * MIB) as small:
        shardkit.pack(source, small / "dataset", name="old", shards=2, jobs=1)
        old = contents(small / "dataset")
        (small / "other").write_bytes(bytes(2 * MIB - (64 << 10)))
        pack(source, small / "dataset", overwrite=True)
        (small / "more").write_bytes(bytes(512 << 10))
        assert shardkit.verify(small / "dataset").exit_code == 0
        large = tiny_tree(tmp_path / "large", images=30, size=MIB // 4)
        before = contents(small / "dataset")
        with pytest.raises(TargetFullError, match=r"of the dataset that would be replaced; nothing was changed"):
            shardkit.pack(large, small / "dataset", name="t", jobs=1, overwrite=True)
        assert contents(small / "dataset") == before != old


def test_a_file_system_that_states_no_size_is_tried(source, tmp_path, monkeypatch):
    """As some in user space and some across a network do."""
    real = os.statvfs
    nothing = {"f_blocks": 0, "f_bavail": 0, "f_bfree": 0, "f_files": 0, "f_favail": 0, "f_ffree": 0}

    class Silent:
        def __init__(self, path):
            self._real = real(path)

        def __getattr__(self, name):
            return nothing.get(name, getattr(self._real, name))

    monkeypatch.setattr(os, "statvfs", Silent)
    pack(source, tmp_path / "dataset")
    assert shardkit.verify(tmp_path / "dataset").exit_code == 0


class Fill:
    """Progress during which somebody else takes all the room, after some reports."""

    def __init__(self, path, reports):
        self.path = path
        self.left = reports

    def begin(self, samples, source_bytes):
        pass

    def advance(self, samples, source_bytes, refused):
        self.left -= 1
        if self.left == 0:
            with open(self.path, "wb", buffering=0) as file:
                try:
                    while True:
                        file.write(bytes(4096))
                except OSError:
                    pass


@pytest.mark.parametrize("jobs", [1, 2])
def test_room_that_others_take_meanwhile_ends_the_pack_and_keeps_what_is_finished(source, whole, tmp_path, jobs):
    with tmpfs(tmp_path / "small", size=12 * MIB) as small:
        target = small / "dataset"
        error = failure(source, target, jobs=jobs, progress=Fill(small / "other", 2))
        assert error.exit_code == 5
        assert re.search(r"ENOSPC.*shards are finished and kept.*--resume", str(error))
        left = contents(target)
        assert not [name for name in left if name.endswith(".tmp")]
        kept = int(error.kept.split()[0])
        assert 1 <= kept < 6
        for name, data in left.items():
            assert name.startswith(".shardkit/") or data == whole[name]
        (small / "other").unlink()
        pack(source, target, jobs=jobs, resume=True)
        assert contents(target) == whole


def test_images_that_grow_when_they_are_packed_run_out_of_room_in_the_middle(source, tmp_path):
    """With --resize nobody knows the size before; a shard that does not fit is told and leaves nothing."""
    with tmpfs(tmp_path / "small", size=128 << 10) as small:
        error = failure(source, small / "dataset", shards=1, resize=4, align=65536)
        assert isinstance(error, TargetFullError)
        assert re.search("ENOSPC.*0 of 1 shards are finished and kept", str(error))
        assert not list((small / "dataset").glob("*.tar"))
        assert not list((small / "dataset" / ".shardkit").glob("run-*"))


def test_a_limit_of_file_sizes_is_a_full_target(source, tmp_path):
    def limit():
        resource.setrlimit(resource.RLIMIT_FSIZE, (MIB // 2, MIB // 2))

    for jobs in ("1", "2"):
        target = tmp_path / jobs
        command = [sys.executable, "-m", "shardkit", "pack", source, target, "--shards", "6", "--jobs", jobs, "--json"]
        done = subprocess.run(command, preexec_fn=limit, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 5, done.stderr
        assert "EFBIG" in done.stderr
        assert "Traceback" not in done.stderr
        assert json.loads(done.stdout)["exit_code"] == 5
        assert not list(target.glob("*.tar"))
        shardkit.pack(source, target, shards=6, jobs=1, resume=True)
        assert shardkit.verify(target).exit_code == 0


def test_space_that_was_promised_and_is_not_there_fails_the_sync_and_no_file_gets_a_name(source, whole, tmp_path):
    """A thin disk: the file system believes in room that its device does not have."""
    with (
        tmpfs(tmp_path / "backing", size=64 * MIB) as backing,
        loop_mount(backing / "image", tmp_path / "mounted", "ext4", size=256 * MIB) as disk,
    ):
        os.sync()
        status = os.statvfs(backing)
        (backing / "other").write_bytes(bytes(status.f_bavail * status.f_frsize - 2 * MIB))
        target = disk.path / "dataset"
        error = failure(source, target)
        assert error.exit_code in (5, 6, 7)
        finals = {path.name for path in target.glob("*.*")}
        kept = int(error.kept.split()[0])
        assert kept < 6
        journalled = {f"t-{number:06d}.{extension}" for number in range(kept) for extension in ("tar", "arrow", "idx")}
        assert journalled <= finals
        assert "manifest.json" not in finals
        for name in finals & set(whole):
            assert (target / name).read_bytes() == whole[name]


def test_the_disk_has_any_number_of_inodes(packing, tmp_path):
    arguments = packing.arguments(tmp_path)[3:]
    codes = set()
    for inodes in range(2, 24):
        with tmpfs(tmp_path / "small", size=8 * MIB, inodes=inodes) as small:
            command = ["pack", str(packing.source), str(small / "dataset"), *arguments, "--resize", "4000"]
            done = packing.commands.run(*command)
            codes.add(done.code)
            assert done.code in (3, 5), done.stderr
            assert (small / "dataset" / "manifest.json").exists() == (done.code == 3)
    assert codes == {3, 5}


def test_the_disk_is_full_for_every_size_that_it_can_have(packing, target, tmp_path):
    """The limit falls into every step in turn: lock, plan, shard, index, journal, manifest."""
    arguments = packing.arguments(target)[3:]
    with tmpfs(tmp_path / "probe", size=8 * MIB) as probe:
        before = os.statvfs(probe).f_bfree
        assert packing.run(probe / "dataset").code == 3
        needed = before - os.statvfs(probe).f_bfree
    codes = set()
    for pages in range(1, needed + 12, 2):
        with tmpfs(tmp_path / "small", size=pages * 4096) as small:
            command = ["pack", str(packing.source), str(small / "dataset"), *arguments, "--resize", "4000"]
            done = packing.commands.run(*command)
            codes.add(done.code)
            assert done.code in (3, 5), done.stderr
            assert "Traceback" not in done.stderr
            if done.code == 5:
                assert not (small / "dataset" / "manifest.json").exists()
                shutil.copytree(small, tmp_path / "larger", dirs_exist_ok=True)
                command[2] = str(tmp_path / "larger" / "dataset")
                assert packing.commands.run(*command, "--resume").code == 3
            else:
                shutil.copytree(small, tmp_path / "larger")
            assert shardkit.verify(tmp_path / "larger" / "dataset").exit_code == 0
            shutil.rmtree(tmp_path / "larger")
    assert codes == {3, 5}
