from __future__ import annotations

import os
import resource
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from shardkit.errors import StorageError
from shardkit.storage.descriptors import DescriptorCache, Loan, default_max_open
from shardkit.testing.reading import in_child


@pytest.fixture
def cache(tmp_path):
    paths = [tmp_path / f"{number}" for number in range(3)]
    for number, path in enumerate(paths):
        path.write_bytes(b"%d" % number)
    cache = DescriptorCache(paths, flags=0, max_open=1)
    yield cache
    cache.close()


def test_a_descriptor_on_loan_outlives_the_cache_that_lets_go_of_it(cache):
    for let_go in (lambda: cache.discard(0), cache.close):
        loan = cache.borrow(0)
        let_go()
        assert len(cache) == 0
        assert os.pread(loan.number, 1, 0) == b"0"
        cache.give_back(loan)
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(loan.number)


def test_borrowers_share_a_descriptor(cache):
    first, second = cache.borrow(1), cache.borrow(1)
    assert first is second
    cache.give_back(first)
    cache.discard(1)
    assert os.pread(second.number, 1, 0) == b"1"
    cache.give_back(second)


def test_a_child_does_not_wait_for_loans_of_threads_that_it_does_not_have(cache):
    loan = cache.borrow(0)
    assert in_child(lambda: os.pread(cache.borrow(2).number, 1, 0) == b"2")
    assert os.pread(loan.number, 1, 0) == b"0"
    cache.give_back(loan)


def test_the_size_at_the_first_opening_is_kept(cache):
    assert cache.size_at_open(0) is None
    cache.give_back(cache.borrow(0))
    assert cache.size_at_open(0) == 1


def replaced(path, content, mtime_ns):
    """Put another file under a name."""
    new = path.with_name("new")
    new.write_bytes(content)
    os.utime(new, ns=(0, mtime_ns))
    os.replace(new, path)


@pytest.mark.parametrize(
    ("content", "same_time", "same"),
    [(b"x", False, False), (b"xx", True, False), (b"xx", False, False), (b"x", True, True)],
)
def test_a_file_is_the_same_by_its_size_and_by_its_inode_or_its_time(cache, content, same_time, same):
    """A network file system may number a file anew; a copy that replaces it has a time of its own."""
    path = Path(cache.paths[0])
    cache.give_back(cache.borrow(0))
    replaced(path, content, path.stat().st_mtime_ns if same_time else 5)
    cache.discard(0)
    if same:
        cache.give_back(cache.borrow(0))
    else:
        with pytest.raises(
            StorageError, match=rf"replaced or cut.*1 bytes, inode \d+.*found {len(content)} bytes, inode"
        ):
            cache.borrow(0)


def test_a_file_whose_time_alone_has_changed_is_the_same(cache):
    cache.give_back(cache.borrow(0))
    os.utime(cache.paths[0], ns=(5, 5))
    cache.discard(0)
    cache.give_back(cache.borrow(0))


def test_a_loan_holds_the_last_file_only(cache, monkeypatch):
    borrowed, real = list[int](), DescriptorCache.borrow
    monkeypatch.setattr(DescriptorCache, "borrow", lambda self, file: borrowed.append(file) or real(self, file))
    loan = Loan(cache)
    for file in (0, 0, 1, 1, 0):
        assert os.pread(loan.number(file), 1, 0) == b"%d" % file
    assert borrowed == [0, 1, 0]
    loan.give_back()
    loan.give_back()
    assert len(cache) == 1  # kept for the next, and no longer in use
    cache.discard(0)
    assert len(cache) == 0


def test_loans_of_two_threads_never_wait_for_each_other(cache):
    """Of a cache of one descriptor: each gives back before it borrows."""
    started = threading.Barrier(2)

    def work(files):
        loan = Loan(cache)
        started.wait(20)
        for _ in range(300):
            for file in files:
                assert os.pread(loan.number(file), 1, 0) == b"%d" % file
        loan.give_back()

    with ThreadPoolExecutor(2) as threads:
        for done in [threads.submit(work, files) for files in ((0, 1), (1, 0, 2))]:
            done.result(timeout=20)


def test_a_loan_opens_a_file_anew_on_demand(cache):
    loan = Loan(cache)
    before = os.fstat(loan.number(0)).st_ino
    path = Path(cache.paths[0])
    replaced(path, b"y", path.stat().st_mtime_ns)
    assert os.fstat(loan.number(0)).st_ino == before
    assert os.pread(loan.reopen(0), 1, 0) == b"y"
    loan.give_back()


def test_a_forbidden_file_is_a_matter_of_capability(tmp_path, monkeypatch):
    def forbidden(*_):
        raise PermissionError(13, "Permission denied")

    (tmp_path / "a").write_bytes(b"a")
    monkeypatch.setattr(os, "open", forbidden)  # root may open everything
    with pytest.raises(StorageError, match="EACCES"):
        DescriptorCache([tmp_path / "a"], flags=0, max_open=1).borrow(0)


@pytest.mark.parametrize(("soft", "kept"), [(20, 16), (1024, 512), (1 << 20, 4096), (resource.RLIM_INFINITY, 4096)])
def test_half_of_the_limit_is_for_readers(monkeypatch, soft, kept):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, soft))
    assert default_max_open() == kept


def test_who_may_not_wait_gets_nothing_while_every_descriptor_is_in_use(tmp_path):
    paths = [tmp_path / "a", tmp_path / "b"]
    for path in paths:
        path.write_bytes(b"abc")
    cache = DescriptorCache(paths, flags=0, max_open=1)
    first = cache.try_borrow(0)
    assert cache.try_borrow(1) is None
    assert cache.try_borrow(0) is first
    for _ in range(2):
        cache.give_back(first)
    second = cache.try_borrow(1)
    assert os.pread(second.number, 3, 0) == b"abc"
    cache.give_back(second)
    cache.close()


def test_each_descriptor_is_told_once_just_before_it_is_closed(tmp_path):
    paths = [tmp_path / str(number) for number in range(4)]
    for path in paths:
        path.write_bytes(b"abc")
    told = list[tuple[int, int]]()
    cache = DescriptorCache(
        paths, flags=0, max_open=2, closing=lambda number: told.append((number, os.fstat(number).st_size))
    )
    kept = cache.borrow(0)
    for file in (1, 2, 3):  # each pushes out the one before it
        cache.give_back(cache.borrow(file))
    assert len(told) == 2
    cache.discard(0)
    assert len(told) == 2  # somebody uses it
    cache.give_back(kept)
    assert told[-1] == (kept.number, 3)
    cache.close()
    assert len(told) == 4
