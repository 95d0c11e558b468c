"""A foreign dataset's folder appears whole or not at all, and replaces only a dataset of its kind."""

from __future__ import annotations

import errno
import json
import os
import shutil
import sys
from pathlib import Path

import pytest

from shardkit.converting import whole_folder
from shardkit.converting.outputs import Output
from shardkit.converting.whole_folder import WholeFolder
from shardkit.errors import ConfigError, LockedError, ShardkitError, StorageError, TargetFullError, UnsafeError
from shardkit.storage.atomic import os_errors
from shardkit.storage.exchange import exchange

INDEX = {"version": 2, "shards": [{"format": "mds", "raw_data": {"basename": "shard.00000.mds"}, "zip_data": None}]}
CARD = "---\n---\n\nWritten by `shardkit convert`.\n"


def mds(folder, text="old"):
    folder.mkdir(parents=True)
    (folder / "index.json").write_text(json.dumps(INDEX))
    (folder / "shard.00000.mds").write_text(text)
    return folder


def target(path, kind="mds"):
    return WholeFolder(Output(kind, str(path)))


def make(path, *, overwrite=False, kind="mds", write=mds):
    """Write a new dataset as a conversion does."""
    folder = target(path, kind)
    with folder.hold(overwrite=overwrite):
        staged = Path(folder.staged)
        staged.rmdir()
        write(staged, "new") if write is mds else write(staged)
        folder.commit(overwrite=overwrite)


def text(folder):
    return (folder / "shard.00000.mds").read_text()


def many(folder):
    for number in range(30):
        (folder / str(number % 3)).mkdir(parents=True, exist_ok=True)
        (folder / str(number % 3) / f"{number}.jpg").write_bytes(b"x")


def test_every_file_and_folder_is_synced_before_it_gets_its_name(tmp_path, monkeypatch):
    monkeypatch.setattr(whole_folder, "_NAMES", 4)
    sync, synced = os.fsync, []

    def watched(fd):
        synced.append(os.path.relpath(os.readlink(f"/proc/self/fd/{fd}"), tmp_path))
        sync(fd)

    monkeypatch.setattr(os, "fsync", watched)
    make(tmp_path / "out", write=many, kind="tree")
    new = Path(".out.shardkit/new")
    expected = {str(new / str(n % 3) / f"{n}.jpg") for n in range(30)} | {str(new / str(n)) for n in range(3)}
    assert {path for path in synced if "/new/" in path} == expected
    assert len([path for path in synced if path.endswith(".jpg")]) == 30


def test_a_failed_sync_of_one_file_of_many_leaves_nothing(tmp_path, monkeypatch):
    sync = os.fsync

    def failing(fd):
        if os.readlink(f"/proc/self/fd/{fd}").endswith("/17.jpg"):
            raise OSError(errno.EIO, "Input/output error")
        sync(fd)

    monkeypatch.setattr(os, "fsync", failing)
    with pytest.raises(StorageError, match=r"cannot sync a file.*17\.jpg"):
        make(tmp_path / "out", write=many, kind="tree")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("there", [None, "empty", "dataset", "link"])
@pytest.mark.parametrize("can_exchange", [True, False])
def test_the_new_folder_takes_the_place_and_nothing_else_is_left(tmp_path, monkeypatch, there, can_exchange):
    if not can_exchange:
        monkeypatch.setattr(whole_folder, "exchange", lambda *_: False)
    path = tmp_path / "out"
    if there == "empty":
        path.mkdir()
    elif there == "dataset":
        mds(path)
    elif there == "link":
        path.symlink_to(mds(tmp_path / "real"))
    make(path, overwrite=there in ("dataset", "link"))
    assert text(path) == "new"
    assert sorted(os.listdir(tmp_path)) == (["out", "real"] if there == "link" else ["out"])


def test_two_folders_swap_their_names(tmp_path):
    for name in "ab":
        (tmp_path / name).mkdir()
        (tmp_path / name / name).touch()
    assert exchange(os.fsencode(tmp_path / "a"), os.fsencode(tmp_path / "b"))
    assert os.listdir(tmp_path / "a") == ["b"]
    with pytest.raises(ShardkitError, match="cannot exchange"):
        exchange(os.fsencode(tmp_path / "a"), os.fsencode(tmp_path / "gone"))


def stranger(folder):
    (mds(folder) / "notes.txt").write_text("mine")


def strange_part(folder):
    mds(folder / "train")
    (folder / "photos").mkdir()
    (folder / "photos" / "x.jpg").write_text("mine")


def other_index(folder):
    folder.mkdir()
    (folder / "index.json").write_text('{"shards": []}')


def leading_out(folder):
    mds(folder)
    shards = [{"format": "mds", "raw_data": {"basename": "../mine"}, "zip_data": None}]
    (folder / "index.json").write_text(json.dumps({"version": 2, "shards": shards}))
    (folder.parent / "mine").write_text("mine")


def a_link(folder):
    mds(folder / "val")
    (folder / "train").symlink_to(mds(folder.parent / "else"))


def shards_of_ours(folder):
    folder.mkdir()
    (folder / "manifest.json").write_text("{}")


STRANGE = [stranger, strange_part, other_index, leading_out, a_link, shards_of_ours]


@pytest.mark.parametrize("strange", STRANGE)
def test_what_is_no_such_dataset_is_never_replaced(tmp_path, strange):
    strange(tmp_path / "out")
    before = sorted(tmp_path.rglob("*"))
    for overwrite, message in ((False, "not empty.*--overwrite"), (True, "target (is no mds|holds what)")):
        with pytest.raises(ConfigError, match=message), target(tmp_path / "out").hold(overwrite=overwrite):
            pytest.fail("it was held")
    assert sorted(tmp_path.rglob("*")) == before


def test_a_card_of_somebody_elses_is_not_replaced(tmp_path):
    path = tmp_path / "out"
    path.mkdir()
    (path / "train-00000-of-00001.parquet").touch()
    (path / "README.md").write_text("# My data")
    with pytest.raises(ConfigError, match=r"README\.md"), target(path, "hf").hold(overwrite=True):
        pytest.fail("it was held")
    (path / "README.md").write_text(CARD)

    def write(folder):
        folder.mkdir()
        (folder / "train-00000-of-00002.parquet").touch()

    make(path, overwrite=True, kind="hf", write=write)
    assert os.listdir(path) == ["train-00000-of-00002.parquet"]


def test_parts_are_replaced_together(tmp_path):
    path = tmp_path / "out"
    for part in ("train", "val"):
        mds(path / part)
    make(path, overwrite=True)
    assert sorted(os.listdir(path)) == ["index.json", "shard.00000.mds"]
    assert os.listdir(tmp_path) == ["out"]


def test_an_error_leaves_the_target_as_it_was(tmp_path):
    mds(tmp_path / "out")
    for error in (StorageError("x"), KeyboardInterrupt()):
        with pytest.raises(type(error)), target(tmp_path / "out").hold(overwrite=True):  # noqa: PT012 - as it is used
            (tmp_path / ".out.shardkit" / "new" / "part").write_text("x")
            raise error
        assert text(tmp_path / "out") == "old"
        assert os.listdir(tmp_path) == ["out"]
    with pytest.raises(StorageError), target(tmp_path / "a" / "b" / "out").hold(overwrite=False):
        raise StorageError("x")
    assert os.listdir(tmp_path) == ["out"]


def test_a_second_run_into_one_target_is_refused(tmp_path):
    with target(tmp_path / "out").hold(overwrite=False):
        with pytest.raises(LockedError), target(tmp_path / "out").hold(overwrite=False):
            pytest.fail("it was held")
        assert (tmp_path / ".out.shardkit" / "new").is_dir()
    assert os.listdir(tmp_path) == []


def test_what_a_killed_run_left_is_removed_or_put_back(tmp_path):
    work, path = tmp_path / ".out.shardkit", tmp_path / "out"
    mds(work / "new")
    (work / "inputs.arrow.tmp").touch()
    make(path)  # killed while it wrote
    assert os.listdir(tmp_path) == ["out"]
    mds(work / "old", "older")
    with target(path).hold(overwrite=True):
        pass  # killed before it removed what was replaced
    assert text(path) == "new"
    assert os.listdir(tmp_path) == ["out"]
    work.mkdir()
    path.rename(work / "old")
    with pytest.raises(ConfigError, match="not empty"), target(path).hold(overwrite=False):
        pytest.fail("it was held")  # killed between two renames
    assert text(path) == "new"
    assert os.listdir(tmp_path) == ["out"]


def test_files_that_came_into_a_replaced_dataset_stay(tmp_path, monkeypatch):
    path = mds(tmp_path / "out")
    swap = whole_folder.exchange

    def late(one, other):
        (path / "notes.txt").write_text("mine")
        return swap(one, other)

    monkeypatch.setattr(whole_folder, "exchange", late)
    with pytest.raises(StorageError, match="the new dataset is in its place"):
        make(path, overwrite=True)
    assert text(path) == "new"
    assert (tmp_path / ".out.shardkit" / "old" / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("place", ["file", "work", "nowhere"])
def test_a_place_that_can_be_no_folder_is_refused(tmp_path, place):
    path = tmp_path / "out"
    if place == "file":
        path.touch()
    elif place == "work":
        (tmp_path / ".out.shardkit").symlink_to(tmp_path)
    else:
        path = tmp_path / "file" / "out"
        (tmp_path / "file").touch()
    with pytest.raises((ConfigError, UnsafeError)), target(path).hold(overwrite=True):
        pytest.fail("it was held")


CALLS = ("os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.scandir", "shutil.rmtree")


def killed(path, number):
    """Replace the dataset in a process that ends at its call `number`; return whether it came to that."""
    child = os.fork()
    if not child:
        left = number

        def count(event, _):
            nonlocal left
            left -= event in CALLS
            if not left:
                os._exit(9)

        sys.addaudithook(count)
        make(path, overwrite=True)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9


@pytest.mark.parametrize("parts", [(), ("train", "val")])
@pytest.mark.parametrize("kind", ["mds", "hf"])
def test_killed_at_any_call_it_is_one_of_both_and_the_next_run_goes_on(tmp_path, parts, kind):
    path = tmp_path / "out"
    for number in range(1, 200):
        for part in parts or ("",):
            mds(path / part)
        went_on = killed(path, number)
        assert not path.is_dir() or {file.read_text() for file in path.rglob("*.mds")} in ({"old"}, {"new"})
        assert len(list(path.rglob("*.mds"))) in (1, max(1, len(parts)))
        if kind == "hf":  # of another kind: it is told of what lies in the target, and of nothing else
            with pytest.raises(ConfigError) as told, target(path, kind).hold(overwrite=True):
                pytest.fail("it was held")
            assert ".shardkit" not in str(told.value)
        make(path, overwrite=True)
        assert text(path) == "new"
        assert os.listdir(tmp_path) == ["out"]
        shutil.rmtree(path)
        if not went_on:
            break
    assert 5 < number < 199


def test_a_full_disk_is_not_answered_with_an_option_that_means_nothing_here(tmp_path):
    full = OSError(errno.ENOSPC, "No space left on device")
    with pytest.raises(TargetFullError) as told, whole_folder.untouched(), os_errors("cannot write", b"x"):
        raise full
    assert "--resume" not in str(told.value)
    assert "free space" in str(told.value)
