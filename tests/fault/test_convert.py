"""A conversion into two parts, killed or failed at its calls: what stands is whole, and the rest can be resumed."""

from __future__ import annotations

import os
import shutil

import pytest

import shardkit
from shardkit.errors import ConfigError
from shardkit.testing.mounts import tmpfs
from shardkit.testing.packs import contents

PARTS = ("one", "two")
MOST = 1000


@pytest.fixture(scope="module")
def dataset(packing, memory):
    """What the pack of a tiny tree makes, as a dataset, and one foreign tar: the first of its shards elsewhere."""
    folder = memory / "converted"
    done = packing.run(folder / "in")
    assert done.code == 3
    (folder / "more").mkdir()
    shutil.copy(folder / "in" / "t-000000.tar", folder / "more" / "x.tar")
    return folder


@pytest.fixture(scope="module")
def convert(commands, dataset):
    """Return a function: converts both inputs into two parts of two shards each."""

    def run(target, *more, inject=None):
        given = [
            "--name",
            "t",
            "--shards",
            "2",
            "--split",
            "one=0.5,two=0.5",
            "--key",
            "index",
            "--shuffle",
            "--labels",
        ]
        (dataset / "labels").write_text("a\nb\nc\n")
        inputs = [dataset / "in", dataset / "more" / "x.tar"]
        arguments = ["convert", *inputs, target, *given, dataset / "labels", "--jobs", "1", *more]
        return commands.run(*map(str, arguments), inject=[inject] if inject else ())

    return run


@pytest.fixture(scope="module")
def whole(convert, dataset):
    done = convert(dataset / "whole")
    assert (done.code, done.stderr) == (0, "")
    found = contents(dataset / "whole")
    assert {name.partition("/")[0] for name in found} == set(PARTS)
    return found


def tells_no_lie(target, whole):
    """A final name is a whole file; a part with a manifest is all there."""
    there = {name: data for name, data in contents(target).items() if "/.shardkit/" not in name and name[-1] != "/"}
    assert all(whole[name] == data for name, data in there.items())
    for part in PARTS:
        if f"{part}/manifest.json" in there:
            files = {name for name in there if name.startswith(f"{part}/")}
            assert files == {name for name in whole if name.startswith(f"{part}/")}


@pytest.mark.parametrize("call", ["mkdir", "write", "pwrite64", "fsync", "rename", "unlink", "rmdir"])
def test_killed_at_any_call_it_lies_about_nothing_and_can_be_resumed(convert, whole, target, call):
    for number in range(1, MOST, 2):
        done = convert(target, inject=f"{call}:signal=KILL:when={number}")
        if target.exists():
            tells_no_lie(target, whole)
        if not done.injected:
            break
        done = convert(target, "--resume")
        assert (done.code, done.stderr) == (0, "")
        assert contents(target) == whole
        shutil.rmtree(target)
    assert 1 < number < MOST - 2


@pytest.mark.parametrize(
    ("call", "error", "code"), [("fsync", "EIO", 6), ("pwrite64", "ENOSPC", 5), ("rename", "EIO", 6)]
)
def test_a_call_that_fails_has_its_exit_code_and_the_rest_can_be_resumed(convert, whole, target, call, error, code):
    for number in range(1, MOST, 3):
        done = convert(target, inject=f"{call}:error={error}:when={number}")
        if not done.injected:
            break
        assert done.code in (0, code), done.stderr
        assert "Traceback" not in done.stderr
        if target.exists():
            tells_no_lie(target, whole)
        done = convert(target, "--resume")
        assert (done.code, done.stderr) == (0, "")
        assert contents(target) == whole
        shutil.rmtree(target)
    assert 1 < number < MOST - 3


def test_a_mount_is_no_target_for_what_is_renamed_to_it_at_the_end(packing, tmp_path):
    with tmpfs(tmp_path / "mount", size=4 << 20) as mount:
        with pytest.raises(ConfigError, match=r"where a file system is mounted.*nothing was changed; name a folder in"):
            shardkit.convert_to("tree", f"tree:{packing.source}", mount)
        assert os.listdir(tmp_path) == ["mount"]
        shardkit.convert_to("tree", f"tree:{packing.source}", mount / "out")
