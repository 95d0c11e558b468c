"""A repair that is killed at any system call, or has no room: the dataset stays, and the same command begins again."""

from __future__ import annotations

import os
import shutil

import pytest

import shardkit
from shardkit.testing.damage import cut, flip_byte
from shardkit.testing.mounts import tmpfs
from shardkit.testing.packs import contents, snapshot

CALLS = ["mkdir", "write", "pwrite64", "fsync", "rename", "unlink", "rmdir"]
MOST = 1000


@pytest.fixture(scope="module")
def damaged(packing, memory):
    """A dataset of three shards: one cut off, one with a wrong byte in an image, one whole."""
    folder = memory / "damaged"
    folder.mkdir()
    for name, data in packing.whole.items():
        (folder / name).write_bytes(data)
    shards = sorted(folder.glob("*.tar"))
    cut(shards[0], 9000)
    flip_byte(shards[1], 4200, 0xFF)
    return folder


@pytest.fixture(scope="module")
def undisturbed(commands, damaged, memory):
    out = memory / "undisturbed-repair"
    done = commands.run("repair", damaged, "--out", out)
    assert (done.code, done.stderr) == (3, "")
    assert shardkit.verify(out).exit_code == 0
    return contents(out)


@pytest.mark.parametrize("call", CALLS)
def test_a_repair_killed_at_any_call_lies_about_nothing_and_begins_again(commands, damaged, undisturbed, target, call):
    before = snapshot(damaged)
    for number in range(1, MOST):
        done = commands.run("repair", damaged, "--out", target, inject=[f"{call}:signal=KILL:when={number}"])
        assert snapshot(damaged) == before
        left = contents(target) if target.exists() else {}
        finals = {name: data for name, data in left.items() if not name.startswith(".shardkit")}
        assert {name: undisturbed.get(name) for name in finals} == finals
        if "manifest.json" in finals:
            assert finals == undisturbed
        if not done.injected:
            break
        again = commands.run("repair", damaged, "--out", target)
        assert (again.code, again.stderr) == (3, "") or "manifest.json" in finals
        assert contents(target) == undisturbed
        shutil.rmtree(target)
    assert 1 < number < MOST - 1
    assert contents(target) == undisturbed


@pytest.mark.parametrize("call", ["link", "rename", "unlink", "fsync", "write"])
def test_indexes_beside_the_shards_killed_at_any_call_are_finished_by_the_next_run(commands, packing, target, call):
    missing = [name for name in packing.whole if name.endswith(".idx") or name == "index.arrow"]
    for number in range(1, MOST):
        target.mkdir()
        for name, data in packing.whole.items():
            if name not in missing:
                (target / name).write_bytes(data)
        done = commands.run("repair", target, inject=[f"{call}:signal=KILL:when={number}"])
        finals = {name: data for name, data in contents(target).items() if not name.startswith(".shardkit")}
        assert {name: packing.whole[name] for name in finals} == finals
        if not done.injected:
            break
        assert commands.run("repair", target).code == 0
        assert contents(target) == packing.whole
        shutil.rmtree(target)
    assert number > 1 or call == "rename"  # which may replace a file, and so is not used here
    assert contents(target) == packing.whole


def test_the_disk_is_full_for_every_size_that_it_can_have(commands, damaged, undisturbed, tmp_path):
    before = snapshot(damaged)
    with tmpfs(tmp_path / "probe", size=8 << 20) as probe:
        free = os.statvfs(probe).f_bfree
        assert commands.run("repair", damaged, "--out", probe / "out").code == 3
        needed = free - os.statvfs(probe).f_bfree
    codes = set()
    for pages in range(1, needed + 14, 2):
        with tmpfs(tmp_path / "small", size=pages * 4096) as small:
            done = commands.run("repair", damaged, "--out", small / "out")
            codes.add(done.code)
            assert done.code in (3, 5), done.stderr
            assert "Traceback" not in done.stderr
            assert (small / "out" / "manifest.json").exists() == (done.code == 3)
            if done.code == 5:
                assert "free space" in done.stderr
                assert "--resume" not in done.stderr
                shutil.copytree(small, tmp_path / "larger", dirs_exist_ok=True)
                # The record of the interrupted run is of the same dataset, wherever its folder was moved.
                assert commands.run("repair", damaged, "--out", tmp_path / "larger" / "out").code == 3
                assert contents(tmp_path / "larger" / "out") == undisturbed
                shutil.rmtree(tmp_path / "larger")
    assert codes == {3, 5}
    assert snapshot(damaged) == before


@pytest.mark.parametrize("rule", ["fsync:error=EIO:when=1", "pwrite64:error=EIO:when=1", "rename:error=EIO:when=2"])
def test_a_failed_call_is_told_and_leaves_no_dataset(commands, damaged, undisturbed, target, rule):
    done = commands.run("repair", damaged, "--out", target, inject=[rule])
    assert done.code == 6, done.stderr
    assert "no file of the dataset was changed" in done.stderr or "nothing was changed" in done.stderr
    assert not (target / "manifest.json").exists()
    assert commands.run("repair", damaged, "--out", target).code == 3
    assert contents(target) == undisturbed


def test_ctrl_c_says_what_is_left(commands, damaged, undisturbed, target):
    done = commands.run("repair", damaged, "--out", target, inject=["rename:signal=INT:when=4"])
    assert done.code == 130
    assert "interrupted; no file of the dataset was changed; run again" in done.stderr
    assert commands.run("repair", damaged, "--out", target).code == 3
    assert contents(target) == undisturbed
