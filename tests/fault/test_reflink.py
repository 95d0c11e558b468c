"""Packs that share blocks with their sources: killed, failing and without power, as those that copy."""

from __future__ import annotations

import dataclasses
import os
import random
import re
import shutil
import threading
import time

import pytest

import shardkit
from shardkit.testing.extents import shared_bytes
from shardkit.testing.mounts import loop_mount
from shardkit.testing.packs import contents, tiny_tree

from .conftest import CutPower, pack_until_the_power_fails, told_as_kept, what_was_acknowledged_is_there

SHARDS = 5
OPTIONS = {"name": "t", "shards": SHARDS, "jobs": 1, "reflink": "always"}
SHARED = 15 * (60_000 // 4096 * 4096)
MOST = 400


# --- killed, and failing


@pytest.fixture(scope="module")
def sharing(packing, folder_on):
    """What `packing` is, on XFS and with images that have blocks."""
    folder = folder_on("xfs")
    source = tiny_tree(folder / "source", size=20_000)
    undisturbed = dataclasses.replace(packing, source=source, whole={})
    done = undisturbed.run(folder / "undisturbed", "--reflink", "never")
    assert (done.code, done.stderr) == (3, "")
    return dataclasses.replace(undisturbed, whole=contents(folder / "undisturbed"))


@pytest.fixture
def place(folder_on):
    return folder_on("xfs") / "dataset"


@pytest.mark.parametrize("call", ["ioctl", "pwrite64", "ftruncate", "fsync", "rename"])
def test_a_pack_killed_at_any_call_lies_about_nothing_and_can_be_resumed(sharing, place, call):
    for number in range(1, MOST):
        done = sharing.run(place, "--reflink", "always", inject=f"{call}:signal=KILL:when={number}")
        sharing.tells_no_lie(place)
        if not done.injected:
            break
        sharing.resumes(place, "--reflink", ("auto", "always", "never")[number % 3])
        shutil.rmtree(place)
    assert 1 < number < MOST - 1
    assert contents(place) == sharing.whole


ERRORS = {"ENOSPC": 5, "EDQUOT": 5, "EIO": 6, "EPERM": 7, "EXDEV": 7}
"""Error of the system to exit code."""


@pytest.mark.parametrize(
    "errors", [tuple(ERRORS), *(pytest.param((error,), marks=pytest.mark.slow) for error in ERRORS)]
)
def test_a_call_that_shares_fails_once(sharing, place, errors):
    """In turn, each of ten calls with the next error; the slow ones, each call with each error."""
    met = 0
    for number in range(1, MOST):
        error = errors[met % len(errors)]
        done = sharing.run(place, "--reflink", "always", inject=f"ioctl:error={error}:when={number}")
        sharing.tells_no_lie(place)
        if not done.injected:
            break
        if done.code == 3:  # nobody was asked whether something is a terminal
            shutil.rmtree(place)
            continue
        met += 1
        assert done.code == ERRORS[error], done.stderr
        assert re.fullmatch(r"shardkit: error: [^\n]+\n", done.stderr), done.stderr
        assert error in done.stderr
        assert re.search("nothing was changed|are finished and kept", done.stderr), done.stderr
        sharing.resumes(place)
        shutil.rmtree(place)
    assert met == 10  # nine images, and one try before
    assert contents(place) == sharing.whole


@pytest.mark.parametrize("call", ["pwrite64", "ftruncate"])
def test_a_full_disk_between_the_blocks_that_are_shared(sharing, place, call):
    met = 0
    for number in range(1, MOST):
        done = sharing.run(place, "--reflink", "always", inject=f"{call}:error=ENOSPC:when={number}")
        sharing.tells_no_lie(place)
        if not done.injected:
            break
        if done.code == 3:  # a lock's file, which is no part of it
            shutil.rmtree(place)
            continue
        met += 1
        assert done.code == 5, done.stderr
        assert re.search("are finished and kept; free space", done.stderr), done.stderr
        sharing.resumes(place, "--reflink", "always")
        shutil.rmtree(place)
    assert met >= 3
    assert contents(place) == sharing.whole


@pytest.mark.parametrize("error", ["EOPNOTSUPP", "EINVAL", "ETXTBSY"])
def test_what_cannot_be_shared_is_copied_with_auto(sharing, place, error):
    done = sharing.run(place, "--reflink", "auto", inject=f"ioctl:error={error}:when=1+")
    assert (done.code, done.stderr) == (3, "")
    assert done.injected
    assert contents(place) == sharing.whole


def test_blocks_that_cannot_be_read_back_refuse_their_source(sharing, place):
    done = sharing.run(place, "--reflink", "always", inject="preadv2:error=EIO:when=1")
    assert done.code == 3
    assert shardkit.verify(place).exit_code == 0
    assert b'"unreadable"' in contents(place)["rejected.jsonl"]


# --- without power


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    shardkit.pack(
        tiny_tree(folder / "source", images=15, size=60_000), folder / "ds", **{**OPTIONS, "reflink": "never"}
    )
    return contents(folder / "ds")


@pytest.fixture
def disk(tmp_path):
    with loop_mount(tmp_path / "image", tmp_path / "mounted", "xfs", size=320 << 20) as mounted:
        yield mounted
    (tmp_path / "image").unlink()


def source_on(disk):
    source = tiny_tree(disk.path / "source", images=15, size=60_000)
    os.sync()
    return source


@pytest.mark.parametrize("reports", range(SHARDS))
def test_what_was_acknowledged_outlives_a_power_cut(whole, disk, reports):
    source, target = source_on(disk), disk.path / "new" / "dataset"
    error = pack_until_the_power_fails(source, target, progress=CutPower(disk, reports), **OPTIONS)
    assert error.exit_code in (6, 7)
    assert f"{reports} of {SHARDS} shards are finished and kept" in str(error)
    disk.remount()
    what_was_acknowledged_is_there(source, target, whole, reports, **OPTIONS)
    assert sum(shared_bytes(path) for path in target.glob("*.tar")) == SHARED


@pytest.mark.parametrize("seed", range(4))
def test_a_power_cut_at_any_moment_loses_nothing_that_was_acknowledged(whole, disk, seed):
    source, target = source_on(disk), disk.path / "dataset"
    start = time.monotonic()
    shardkit.pack(source, disk.path / "first", **OPTIONS)
    cut = threading.Timer(random.Random(seed).uniform(0, time.monotonic() - start), disk.cut_power)
    cut.start()
    error = pack_until_the_power_fails(source, target, **OPTIONS)
    cut.join()
    disk.remount()
    assert contents(disk.path / "first") == whole
    kept = told_as_kept(error, SHARDS)
    if kept or target.exists():
        what_was_acknowledged_is_there(source, target, whole, kept, **OPTIONS)


def test_a_dataset_outlives_a_power_cut_that_its_sources_do_not(whole, disk):
    """They were never synced: their blocks are, because the shards have them."""
    source, target = tiny_tree(disk.path / "source", images=15, size=60_000), disk.path / "dataset"
    shardkit.pack(source, target, **OPTIONS)
    disk.cut_power()
    disk.remount()
    assert {name: data for name, data in contents(target).items() if not name.startswith(".shardkit/")} == whole
