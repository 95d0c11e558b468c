"""Every system call of a pack fails once, each in its turn: the code, the message, what is left, and going on."""

from __future__ import annotations

import itertools
import json
import re
import shutil

import pytest

import shardkit
from shardkit.testing.packs import contents

CODES = {"ENOSPC": 5, "EDQUOT": 5, "EFBIG": 5, "EIO": 6, "EMFILE": 6, "EINTR": 6, "EROFS": 6, "EACCES": 6, "EPERM": 6}
"""Error of the system to exit code."""

CALLS = {
    "mkdir": ("ENOSPC", "EDQUOT", "EIO", "EROFS", "EACCES"),
    "openat": ("ENOSPC", "EIO", "EDQUOT", "EROFS", "EACCES", "EMFILE", "EINTR"),
    "write": ("ENOSPC", "EDQUOT", "EIO", "EFBIG", "EINTR"),
    "pwrite64": ("ENOSPC", "EDQUOT", "EIO", "EFBIG", "EINTR"),
    "fsync": ("ENOSPC", "EIO", "EDQUOT", "EROFS", "EINTR"),
    "close": ("EIO", "ENOSPC", "EDQUOT"),
    "rename": ("EIO", "ENOSPC", "EROFS", "EACCES", "EPERM", "EINTR"),
    "unlink": ("EIO", "EROFS", "EACCES", "EPERM"),
    "rmdir": ("EIO", "EACCES"),
    "getdents64": ("EIO", "EACCES"),
    "flock": ("EIO",),
    "statfs": ("EIO",),
    "newfstatat": ("EIO", "EACCES"),
}


def is_complete(packing, target, done):
    """What must hold when a pack has overcome the fault."""
    assert (done.code, done.stderr) == (3, "")
    there = {name: data for name, data in contents(target).items() if not name.startswith(".shardkit")}
    if there == packing.whole:
        packing.resumes(target)  # also sweeps what could not be removed
    else:  # a source, or a folder of sources, could not be read
        assert shardkit.verify(target).exit_code == 0
        refused = [json.loads(line) for line in (target / "rejected.jsonl").read_text().splitlines()]
        assert {"unreadable", "no-class"} & {line["reason"] for line in refused}


def judge(packing, target, done, error):
    """What must hold after a pack that met `error` once."""
    assert "Traceback" not in done.stderr
    assert "bug" not in done.stderr
    if done.code == 3:
        is_complete(packing, target, done)
        return
    if done.code == 2 and "stat" in done.trace:  # what cannot be looked at is no folder
        assert re.search(rf"the source is n[a-z ]+: {packing.source}.*nothing was changed", done.stderr)
        return
    assert re.fullmatch(r"shardkit: error: [^\n]+\n", done.stderr), done.stderr
    if "standard output" in done.stderr:
        assert done.code == 6
    elif "error closing file" not in done.stderr:  # Arrow keeps the reason to itself
        assert done.code == CODES[error], done.stderr
        assert error in done.stderr
        assert str(target.parent) in done.stderr or str(packing.source) in done.stderr
        assert re.search("nothing was changed|are finished and kept|in its place", done.stderr), done.stderr
    packing.tells_no_lie(target)
    assert not any(name.endswith(".tmp") for name in contents(target))
    packing.resumes(target)


def events(trace, target):
    """What a traced pack did, in its order: the call, and the file below the target by its last name."""
    found = []
    for line in trace.splitlines():
        call = re.match(r"\d+ +(rename|fsync|write|pwrite64|unlink)\((.*)", line)
        if call and str(target) in line:
            paths = re.findall(rf"{re.escape(str(target))}([^\">]*)", call[2])
            found.append((call[1], paths[-1].rpartition("/")[2]))
    return found


def test_a_commit_keeps_its_order(packing, target):
    """Data, sync, name, sync of the folder; the indexes the same way; the journal; last of all the manifest."""
    done = packing.commands.run(
        *packing.arguments(target), inject=["rename", "fsync", "write", "pwrite64", "unlink"]
    )  # fmt: skip
    assert done.code == 3
    seen = events(done.trace, target)
    folder = ("fsync", "")
    before = 0
    for number in range(3):
        name = f"t-{number:06d}"
        expected = [
            ("pwrite64", f"{name}.tar.tmp"), ("fsync", f"{name}.tar.tmp"),
            ("write", f"{name}.arrow.tmp"), ("fsync", f"{name}.arrow.tmp"),
            ("write", f"{name}.idx.tmp"), ("fsync", f"{name}.idx.tmp"),
            ("rename", f"{name}.tar"), folder, ("rename", f"{name}.arrow"), ("rename", f"{name}.idx"), folder,
            ("write", "journal"), ("fsync", "journal"),
        ]  # fmt: skip
        first = seen.index(expected[0], before)
        steps = [event for event in seen[first:] if event[0] != "unlink"]
        assert steps[: len(expected)] == expected
        before = first + len(expected)
    rest = []
    for name in ("rejected.jsonl", "index.arrow", "manifest.json"):
        rest += [("write", f"{name}.tmp"), ("fsync", f"{name}.tmp"), ("rename", name), folder]
    steps = [event for event in seen if event[0] != "unlink"]
    assert steps[-len(rest) :] == rest
    assert seen[-4:] == [("unlink", name) for name in ("plan.json", "journal", "plan.arrow", "lock")]
    plan = [("rename", "plan.arrow"), ("fsync", ".shardkit")]
    plan += [("write", "plan.json.tmp"), ("fsync", "plan.json.tmp"), ("rename", "plan.json"), ("fsync", ".shardkit")]
    first = steps.index(plan[0])
    assert steps[first : first + len(plan)] == plan
    assert first + len(plan) <= steps.index(("pwrite64", "t-000000.tar.tmp"))


def test_a_shard_whose_line_could_not_be_synced_is_not_claimed(packing, target):
    """The line can be read from the page cache; the disk may not have it."""
    done = packing.commands.run(*packing.arguments(target), inject=["fsync"])
    calls = re.findall(r"^\d+ +fsync\(\d+<([^>]*)>", done.trace, re.MULTILINE)
    journal = [number for number, path in enumerate(calls, 1) if path.endswith("/journal")]
    assert len(journal) == 3
    for shard, number in enumerate(journal):
        shutil.rmtree(target)
        done = packing.run(target, inject=f"fsync:error=EIO:when={number}")
        assert f"{shard} of 3 shards are finished and kept" in done.stderr
        packing.resumes(target)


@pytest.mark.parametrize("call", CALLS)
def test_a_call_that_fails_is_told_and_the_pack_can_go_on(packing, target, call):
    errors = itertools.cycle(CALLS[call])
    for number, error in zip(range(1, 1000), errors, strict=False):
        done = packing.run(target, inject=f"{call}:error={error}:when={number}")
        if not done.injected:
            break
        judge(packing, target, done, error)
        shutil.rmtree(target, ignore_errors=True)
    assert 1 < number < 999
    assert contents(target) == packing.whole


@pytest.mark.slow
@pytest.mark.parametrize(("call", "error"), [(call, error) for call, errors in CALLS.items() for error in errors])
def test_a_call_that_fails_in_any_way_is_told_and_the_pack_can_go_on(packing, target, call, error):
    for number in range(1, 1000):
        done = packing.run(target, inject=f"{call}:error={error}:when={number}")
        if not done.injected:
            break
        judge(packing, target, done, error)
        shutil.rmtree(target, ignore_errors=True)
    assert 1 < number < 999


@pytest.mark.slow
@pytest.mark.parametrize("call", CALLS)
def test_a_call_that_fails_from_some_time_on_for_ever_is_told_and_the_pack_can_go_on(packing, target, call):
    """As a full disk or a dead one does: what is tried to make good fails, too."""
    error = CALLS[call][0]
    for number in range(1, 1000):
        done = packing.run(target, inject=f"{call}:error={error}:when={number}+")
        if not done.injected:
            break
        assert "Traceback" not in done.stderr
        # Where not even /dev/null takes a write, the interpreter itself ends with 120.
        assert done.code in (2, 3, 5, 6, 7) or (call, done.code) == ("write", 120)
        if (target / "manifest.json").exists():
            assert shardkit.verify(target).exit_code == 0
        elif call == "newfstatat":  # other sources than there are: a pack of its own
            assert packing.run(target, "--overwrite").code == 3
            assert contents(target) == packing.whole
        else:
            packing.tells_no_lie(target)
            packing.resumes(target)
        shutil.rmtree(target, ignore_errors=True)
    assert 1 < number < 999
