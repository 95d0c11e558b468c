from __future__ import annotations

import errno
import os
import resource
import stat
import tempfile
from pathlib import Path

import pytest

from shardkit.errors import ShardkitError, StorageError, TargetFullError
from shardkit.storage.atomic import BufferedFile, commit, fsync_dir, make_folders, remove, replace_file

ROOT_ONLY = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


def failing(number):
    def fail(*_arguments, **_options):
        raise OSError(number, os.strerror(number))

    return fail


@pytest.fixture
def path(tmp_path):
    return os.fsencode(tmp_path / "file")


@pytest.fixture
def umask():
    before = os.umask(0o002)
    yield 0o002
    os.umask(before)


@pytest.fixture
def nobody_s_folder():
    """A folder that everyone may write to and only root may list."""
    with tempfile.TemporaryDirectory() as parent:
        os.chmod(parent, 0o755)
        folder = Path(parent, "drop")
        folder.mkdir()
        folder.chmod(0o733)
        yield folder


@pytest.mark.parametrize("size", [0, 1, (1 << 20) - 1, 1 << 20, (1 << 20) + 1, 3 << 20])
def test_what_is_written_is_read_back(path, size):
    data = os.urandom(size)
    with BufferedFile(path) as file:
        for start in range(0, size, 700_001):
            piece = memoryview(data)[start : start + 700_001]
            assert file.write(piece) == len(piece)
    with open(path, "rb") as stored:
        assert stored.read() == data


def test_a_leftover_of_the_name_is_replaced_and_not_written_through(path, tmp_path):
    precious = tmp_path / "precious"
    precious.write_bytes(b"precious")
    os.link(precious, path)
    with BufferedFile(path) as file:
        file.write(b"new")
    assert precious.read_bytes() == b"precious"
    os.unlink(path)
    os.symlink(precious, path)
    with BufferedFile(path) as file:
        file.write(b"new")
    assert precious.read_bytes() == b"precious"
    assert not os.path.islink(path)


def test_the_mode_is_what_the_umask_leaves(path, umask):
    with BufferedFile(path):
        pass
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o666 & ~umask


def test_an_exception_in_the_block_leaves_no_file(path):
    def write_half():
        with BufferedFile(path) as file:
            file.write(b"half")
            raise KeyError

    with pytest.raises(KeyError):
        write_half()
    assert not os.path.exists(path)


@pytest.mark.parametrize(
    ("number", "kind"),
    [
        (errno.ENOSPC, TargetFullError),
        (errno.EDQUOT, TargetFullError),
        (errno.EIO, StorageError),
        (errno.EROFS, StorageError),
    ],
)
def test_a_failed_sync_is_raised_and_the_file_is_gone(path, monkeypatch, number, kind):
    file = BufferedFile(path)
    file.write(b"data")
    monkeypatch.setattr(os, "fsync", failing(number))
    with pytest.raises(kind, match=errno.errorcode[number]) as caught:
        file.close()
    assert caught.value.path == path
    assert not os.path.exists(path)


def test_a_file_that_cannot_be_unlinked_does_not_hide_why_it_failed(path, monkeypatch):
    file = BufferedFile(path)
    monkeypatch.setattr(os, "fsync", failing(errno.ENOSPC))
    monkeypatch.setattr(os, "unlink", failing(errno.EROFS))
    with pytest.raises(TargetFullError):
        file.close()


def test_a_folder_that_is_not_there_is_named(tmp_path):
    with pytest.raises(StorageError, match="nowhere/file"):
        BufferedFile(os.fsencode(tmp_path / "nowhere" / "file"))


def test_a_size_limit_is_a_full_target(path):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        file = BufferedFile(path)
        with pytest.raises(TargetFullError, match="EFBIG"):
            file.write(bytes(2 << 20))
        file.discard()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not os.path.exists(path)


def test_replace_file_changes_nothing_when_it_fails(path, monkeypatch):
    replace_file(path, b"old", path + b".tmp")
    monkeypatch.setattr(os, "fsync", failing(errno.EIO))
    with pytest.raises(StorageError):
        replace_file(path, b"new", path + b".tmp")
    with open(path, "rb") as stored:
        assert stored.read() == b"old"
    assert not os.path.exists(path + b".tmp")


def test_commit_names_the_file_that_failed(tmp_path):
    first, second = (os.fsencode(tmp_path / name) for name in ("first", "second"))
    for name in (first,):
        with open(name + b".tmp", "wb"):
            pass
    with pytest.raises(StorageError) as caught:
        commit([(first + b".tmp", first), (second + b".tmp", second)])
    assert caught.value.path == second


def test_commit_syncs_the_folder_after_the_last_rename(tmp_path, monkeypatch):
    log = []
    rename, fsync = os.rename, os.fsync
    monkeypatch.setattr(os, "rename", lambda *names: log.append("rename") or rename(*names))
    monkeypatch.setattr(os, "fsync", lambda fd: log.append(os.readlink(f"/proc/self/fd/{fd}")) or fsync(fd))
    names = [os.fsencode(tmp_path / name) for name in "ab"]
    for name in names:
        with open(name + b".tmp", "wb"):
            pass
    commit([(name + b".tmp", name) for name in names])
    assert log == ["rename", "rename", str(tmp_path)]


def test_a_file_system_that_syncs_no_folders_is_taken_as_it_is(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fsync", failing(errno.EINVAL))
    fsync_dir(os.fsencode(tmp_path))
    monkeypatch.setattr(os, "fsync", failing(errno.EIO))
    with pytest.raises(StorageError, match="sync a folder"):
        fsync_dir(os.fsencode(tmp_path))


def test_remove_takes_what_is_gone_and_tells_what_it_cannot(tmp_path):
    remove(os.fsencode(tmp_path / "nothing"))
    with pytest.raises(ShardkitError, match=tmp_path.name):
        remove(os.fsencode(tmp_path))


def test_folders_are_made_and_their_names_are_synced(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(os.readlink(f"/proc/self/fd/{fd}")))
    made = []
    make_folders(os.fsencode(tmp_path / "a" / "b" / "c"), made)
    assert made == [os.fsencode(tmp_path / part) for part in ("a", "a/b", "a/b/c")]
    assert synced == [str(tmp_path / part) for part in ("", "a", "a/b")]
    make_folders(os.fsencode(tmp_path / "a" / "b" / "c"), made)
    assert len(made) == 3


def test_folders_are_noted_before_they_are_made(tmp_path):
    made, names = [], ("a", "b", "c" * 300)
    with pytest.raises(OSError, match="long"):
        make_folders(os.fsencode(tmp_path.joinpath(*names)), made)
    assert made == [os.fsencode(tmp_path.joinpath(*names[:count])) for count in (1, 2, 3)]


@pytest.mark.timeout(10)
def test_a_system_that_does_not_know_what_is_there_is_believed(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "lstat", failing(errno.EIO))
    with pytest.raises(OSError, match="Input/output error"):
        make_folders(os.fsencode(tmp_path / "new"), [])


@ROOT_ONLY
def test_a_parent_that_may_not_be_listed_is_no_hindrance(nobody_s_folder):
    new = nobody_s_folder / "new"
    os.seteuid(65534)
    try:
        with pytest.raises(PermissionError):
            os.listdir(nobody_s_folder)
        make_folders(os.fsencode(new), made := [])
        assert made == [os.fsencode(new)]
    finally:
        os.seteuid(0)
    assert new.is_dir()
