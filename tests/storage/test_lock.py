from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import signal
import socket
import subprocess
import sys
import threading

import pytest

from shardkit.errors import CapabilityError, LockedError, UnsafeError
from shardkit.storage.lock import FolderLock

HOLDER = """
import sys, time
from shardkit.storage.lock import FolderLock
lock = FolderLock(sys.argv[1].encode())
lock.take()
print("held", flush=True)
time.sleep(60)
"""


@pytest.fixture
def path(tmp_path):
    return os.fsencode(tmp_path / "lock")


@pytest.fixture
def holder(path):
    """Another process that holds the lock."""
    process = subprocess.Popen([sys.executable, "-c", HOLDER, os.fsdecode(path)], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline() == "held\n"
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def test_the_second_holder_learns_who_the_first_one_is(path, tmp_path, holder):
    with pytest.raises(LockedError, match=f"process {holder.pid} on {socket.gethostname()}") as caught:
        FolderLock(path).take()
    assert caught.value.exit_code == 8
    assert caught.value.path == os.fsencode(tmp_path)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_dead_holder_holds_nothing(path, holder, number):
    holder.send_signal(number)
    holder.wait()
    with FolderLock(path), open(path) as word:
        assert word.read() == f"process {os.getpid()} on {socket.gethostname()}\n"


def test_a_shorter_word_leaves_nothing_of_a_longer_one(path):
    with open(path, "w") as word:
        word.write("process 123456789012345678901234567890 on " + "h" * 100 + "\n")
    with FolderLock(path), open(path) as word:
        assert word.read() == f"process {os.getpid()} on {socket.gethostname()}\n"


def test_letting_go_frees_the_lock_and_closes_the_file(path):
    lock = FolderLock(path)
    lock.take()
    before = len(os.listdir("/proc/self/fd"))
    lock.close()
    lock.close()
    assert len(os.listdir("/proc/self/fd")) == before - 1
    with FolderLock(path):
        pass


def test_a_refused_attempt_leaves_no_descriptor(path):
    with FolderLock(path):
        before = os.listdir("/proc/self/fd")
        for _ in range(3):
            with pytest.raises(LockedError):
                FolderLock(path).take()
        assert len(os.listdir("/proc/self/fd")) == len(before)


def test_a_child_does_not_inherit_the_lock(path):
    lock = FolderLock(path)
    lock.take()
    with subprocess.Popen(["sleep", "60"], close_fds=False) as child:
        lock.close()
        with FolderLock(path):
            child.kill()


def test_a_lock_on_an_unlinked_file_is_not_taken_for_the_lock(path, monkeypatch):
    """The holder unlinks its file and lets go, between our opening and our locking of it."""
    first = FolderLock(path)
    first.take()
    flock, calls = fcntl.flock, []

    def late(fd, how):
        if not calls:
            os.unlink(path)
            first.close()
        calls.append(os.fstat(fd).st_ino)
        flock(fd, how)

    monkeypatch.setattr(fcntl, "flock", late)
    with FolderLock(path):
        assert len(calls) == 2
        assert os.stat(path).st_ino == calls[1]
        with pytest.raises(LockedError):
            FolderLock(path).take()


def test_one_of_many_threads_wins(path):
    won, start = [], threading.Barrier(8)

    def attempt():
        start.wait()
        with contextlib.suppress(LockedError):
            lock = FolderLock(path)
            lock.take()
            won.append(lock)

    threads = [threading.Thread(target=attempt) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert len(won) == 1
    won[0].close()


def test_a_symbolic_link_is_not_followed(path, tmp_path):
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    os.symlink(victim, path)
    with pytest.raises(UnsafeError, match="lock"):
        FolderLock(path).take()
    assert victim.read_bytes() == b"precious"


@pytest.mark.timeout(20)
@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_what_is_no_file_is_refused_and_never_waited_for(path, make):
    make(path)
    with pytest.raises(UnsafeError, match="something else"):
        FolderLock(path).take()


def test_a_missing_folder_is_left_to_the_caller(tmp_path):
    with pytest.raises(FileNotFoundError):
        FolderLock(os.fsencode(tmp_path / "gone" / "lock")).take()


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_said(path, monkeypatch, number):
    def refuse(fd, how):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refuse)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(CapabilityError, match=r"has no locks.*mount it with locks"):
        FolderLock(path).take()
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_full_disk_does_not_keep_anyone_from_the_lock(path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", full)
    with FolderLock(path), pytest.raises(LockedError, match="an unnamed process"):
        FolderLock(path).take()
