"""SIGKILL before every system call that a pack makes, one after the other."""

from __future__ import annotations

import shutil

import pytest

import shardkit
from shardkit.errors import ShardkitError
from shardkit.packing.write import BUFFER_BYTES
from shardkit.testing.packs import contents, tiny_tree

CALLS = ["mkdir", "openat", "write", "pwrite64", "fsync", "rename", "unlink", "rmdir", "flock", "getdents64"]
MOST = 1000
"""System calls of one kind; a sweep that gets there does not end."""


@pytest.mark.parametrize("call", CALLS)
def test_a_pack_killed_at_any_call_lies_about_nothing_and_can_be_resumed(packing, target, call):
    """The resume is killed half as far on its way, too."""
    for number in range(1, MOST):
        done = packing.run(target, inject=f"{call}:signal=KILL:when={number}")
        packing.tells_no_lie(target)
        if not done.injected:
            break
        packing.run(target, "--resume", inject=f"{call}:signal=KILL:when={1 + number // 2}")
        packing.tells_no_lie(target)
        packing.resumes(target)
        shutil.rmtree(target)
    assert 1 < number < MOST - 1
    assert contents(target) == packing.whole


@pytest.mark.parametrize("call", ["unlink", "rename", "write", "fsync", "mkdir"])
def test_an_overwrite_killed_at_any_call_leaves_the_old_dataset_or_a_pack_that_can_be_resumed(
    packing, target, memory, commands, call
):
    """The old one has another name and more shards than the new one."""
    old = memory / "old"
    if not old.exists():
        assert commands.run("pack", packing.source, old, "--name", "old", "--shards", "5", "--jobs", "1").code == 3
    before = contents(old)
    for number in range(1, MOST):
        shutil.copytree(old, target)
        done = packing.run(target, "--overwrite", inject=f"{call}:signal=KILL:when={number}")
        if not done.injected:
            break
        left = {name: data for name, data in contents(target).items() if not name.startswith(".shardkit/")}
        if left.get("manifest.json") == before["manifest.json"]:
            assert left == before
            assert packing.run(target, "--overwrite").code == 3
        elif "manifest.json" not in left:
            with pytest.raises(ShardkitError):
                shardkit.open(target)
            for name, data in left.items():
                assert data in (before.get(name), packing.whole.get(name))
            packing.resumes(target)
        else:
            packing.resumes(target)
        assert contents(target) == packing.whole
        shutil.rmtree(target)
    assert 1 < number < MOST - 1
    assert contents(target) == packing.whole


@pytest.mark.parametrize("call", ["unlink", "rename", "fsync"])
def test_a_second_start_from_scratch_after_a_kill_leaves_nothing_of_the_first(packing, target, call):
    """The first has more shards than the second."""
    for number in range(1, MOST, 3):
        done = packing.run(target, "--shards", "5", inject=f"{call}:signal=KILL:when={number}")
        if not done.injected:
            break
        assert packing.run(target, "--overwrite").code == 3
        assert contents(target) == packing.whole
        shutil.rmtree(target)
    assert 1 < number < MOST - 1


def test_a_pack_killed_at_any_write_of_a_large_shard_can_be_resumed(packing, commands, target, memory):
    """Two shards of three buffers each: the writing thread is killed, while it writes and between its writes."""
    source = tiny_tree(memory / "large", images=6, size=BUFFER_BYTES * 7 // 8)
    arguments = ["pack", source, target, "--name", "t", "--shards", "2", "--jobs", "1"]
    assert commands.run(*arguments).code == 3
    whole = contents(target)
    for number in range(1, MOST):
        shutil.rmtree(target)
        done = commands.run(*arguments, inject=[f"pwrite64:signal=KILL:when={number}"])
        if not done.injected:
            break
        assert not list(target.glob("*.tar"))
        assert list((target / ".shardkit").glob("run-*/t-000000.tar.tmp"))
        assert commands.run(*arguments, "--resume").code == 3
        assert contents(target) == whole
    assert number > 3
