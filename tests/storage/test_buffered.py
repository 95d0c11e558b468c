from __future__ import annotations

import errno
import gc
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from shardkit.errors import ConfigError, ShortReadError, StorageError
from shardkit.storage.buffered import BufferedReader, threads_for
from shardkit.storage.descriptors import DescriptorCache
from shardkit.storage.reader import PAGE_CACHE
from shardkit.storage.residency import cached_bytes
from shardkit.storage.threads import ReadThreads
from shardkit.testing.readers import ReaderContract
from shardkit.testing.reading import in_child, open_descriptors, read_extents
from shardkit.testing.rings import blocks, private_memory, read_for_ever


class TestBufferedReader(ReaderContract):
    def make_reader(self, paths):
        return BufferedReader(paths)


class TestBufferedReaderWithOneThread(ReaderContract):
    def make_reader(self, paths):
        return BufferedReader(paths, threads=1)


class TestBufferedReaderWithOneDescriptor(ReaderContract):
    def make_reader(self, paths):
        return BufferedReader(paths, threads=4, max_open=1)


@pytest.fixture
def data() -> bytes:
    return os.urandom(100_000)


@pytest.fixture
def path(tmp_path: Path, data: bytes) -> Path:
    path = tmp_path / "a.bin"
    path.write_bytes(data)
    return path


@pytest.mark.parametrize("most", [1, 7, 4096, 50_000])
def test_short_reads_are_continued(path, data, monkeypatch, most):
    real = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, offset: real(fd, [buffers[0][:most]], offset))
    reader = BufferedReader([path])
    assert read_extents(reader, [(0, 3, 30_000)]) == [data[3:30_003]]
    assert reader.counters == {PAGE_CACHE: 30_000}
    reader.close()


def fail_once(monkeypatch, function: str, number: int) -> list[int]:
    """Make one call of an os function fail as the system would; the list that comes back grows when it has."""
    real, failed = getattr(os, function), list[int]()

    def scripted(*arguments):
        if not failed:
            failed.append(number)
            raise OSError(number, os.strerror(number))
        return real(*arguments)

    monkeypatch.setattr(os, function, scripted)
    return failed


@pytest.mark.parametrize("function", ["preadv", "open"])
def test_a_stale_handle_is_opened_once_more_by_name(path, data, monkeypatch, function):
    reader = BufferedReader([path], threads=1)
    failed = fail_once(monkeypatch, function, errno.ESTALE)
    assert read_extents(reader, [(0, 10, 20)]) == [data[10:30]]
    assert failed == [errno.ESTALE]
    reader.close()


def test_a_file_that_stays_stale_is_an_error(path, monkeypatch):
    def stale(*_):
        raise OSError(errno.ESTALE, "Stale file handle")

    reader = BufferedReader([path], threads=1)
    monkeypatch.setattr(os, "preadv", stale)
    with pytest.raises(StorageError, match="ESTALE"):
        read_extents(reader, [(0, 10, 20)])
    reader.close()


def test_a_stale_file_of_another_size_is_an_error(path, data, monkeypatch):
    reader = BufferedReader([path], threads=1)
    assert read_extents(reader, [(0, 0, 20)]) == [data[:20]]
    path.write_bytes(data + b"more")
    fail_once(monkeypatch, "preadv", errno.ESTALE)
    with pytest.raises(StorageError, match=r"replaced or cut.* expected 100000 bytes.* found 100004 bytes"):
        read_extents(reader, [(0, 0, 20)])
    reader.close()


def test_other_errors_are_not_repeated(path, monkeypatch):
    reader = BufferedReader([path], threads=1)
    failed = fail_once(monkeypatch, "preadv", errno.EIO)
    with pytest.raises(StorageError, match=r"a\.bin:10; found EIO"):
        read_extents(reader, [(0, 10, 20)])
    assert failed == [errno.EIO]
    reader.close()


def test_a_replaced_file_is_read_to_its_end_under_the_old_name(path, data, tmp_path):
    reader = BufferedReader([path])
    assert read_extents(reader, [(0, 0, 9)]) == [data[:9]]
    (tmp_path / "new").write_bytes(b"x" * 10)
    os.replace(tmp_path / "new", path)
    assert read_extents(reader, [(0, 90_000, 10_000)]) == [data[90_000:]]
    with pytest.raises(ShortReadError, match="another file of 10 bytes has its name now"):
        read_extents(reader, [(0, 90_000, 10_001)])
    reader.close()


def test_a_file_replaced_by_one_of_another_size_between_two_openings_is_an_error(path, data, tmp_path):
    other = tmp_path / "b.bin"
    other.write_bytes(b"b" * 10)
    reader = BufferedReader([path, other], threads=1, max_open=1)
    assert read_extents(reader, [(0, 0, 9)]) == [data[:9]]
    assert read_extents(reader, [(1, 0, 9)]) == [b"b" * 9]  # closes the first
    path.write_bytes(data[:-1])
    with pytest.raises(StorageError, match=r"replaced or cut.* expected 100000 bytes.* found 99999 bytes"):
        read_extents(reader, [(0, 0, 9)])
    reader.close()


def test_a_file_that_vanished_under_the_reader_says_so_when_it_is_short(path):
    reader = BufferedReader([path])
    read_extents(reader, [(0, 0, 9)])
    path.unlink()
    with pytest.raises(ShortReadError, match=r"its name is gone \(ENOENT\)"):
        read_extents(reader, [(0, 0, 100_001)])
    reader.close()


def test_names_are_escaped_in_messages(tmp_path):
    reader = BufferedReader([tmp_path / "a\x1b[31m.bin"])
    with pytest.raises(StorageError, match=r"a\\x1b\[31m\.bin"):
        read_extents(reader, [(0, 0, 1)])
    reader.close()


def test_descriptors_stay_within_max_open(tmp_path):
    paths = [tmp_path / f"{number}" for number in range(20)]
    for path in paths:
        path.write_bytes(b"abc")
    before = len(open_descriptors())
    reader = BufferedReader(paths, threads=4, max_open=5)
    for _ in range(3):
        read_extents(reader, [(file, 0, 3) for file in range(20)])
        assert len(open_descriptors()) == before + 5
    reader.close()


def test_the_file_used_last_stays_open(tmp_path, monkeypatch):
    paths = [tmp_path / f"{number}" for number in range(4)]
    for path in paths:
        path.write_bytes(b"abc")
    opened, real = list[str](), os.open
    reader = BufferedReader(paths, threads=1, max_open=3)
    monkeypatch.setattr(os, "open", lambda path, flags: opened.append(Path(path).name) or real(path, flags))
    for file in (0, 1, 2, 0, 3, 0, 1):
        read_extents(reader, [(file, 0, 3)])
    assert opened == ["0", "1", "2", "3", "1"]
    reader.close()


def test_files_are_opened_for_reading_only_and_not_inherited(path):
    before = open_descriptors()
    reader = BufferedReader([path])
    read_extents(reader, [(0, 0, 9)])
    (descriptor,) = set(open_descriptors()) - set(before)
    flags = next(
        int(line.split()[1], 8)
        for line in Path(f"/proc/self/fdinfo/{descriptor}").read_text().splitlines()
        if line.startswith("flags:")
    )
    assert flags & os.O_ACCMODE == os.O_RDONLY
    assert flags & os.O_CLOEXEC
    reader.close()


def test_no_more_threads_than_asked_for_read(path):
    reader = BufferedReader([path], threads=3)
    before = threading.active_count()
    read_extents(reader, [(0, offset, 100) for offset in range(0, 90_000, 1000)])
    assert threading.active_count() <= before + 2
    reader.close()


@pytest.mark.parametrize(
    ("shares", "most", "processors", "expected"),
    [
        ([1.0], 8, 2, 2),
        ([1.0] * 9 + [0.0], 8, 4, 4),  # nine of ten
        ([1.0] * 8 + [0.0], 8, 4, 8),
        ([0.89], 8, 2, 8),
        ([0.0], 8, 2, 8),
        ([], 8, 2, 8),  # nobody knows
        ([1.0], 8, 1, 2),  # while one copies the other one prepares
        ([1.0], 1, 1, 1),
        ([1.0], 8, 64, 8),
        ([0.0], 1, 64, 1),
    ],
)
def test_what_is_in_memory_is_read_by_no_more_threads_than_processors(shares, most, processors, expected):
    assert threads_for(shares, most=most, processors=processors) == expected


@pytest.mark.parametrize("kernel", ["new", "old"])
def test_the_threads_of_a_call_follow_what_the_last_one_found(large_files, monkeypatch, kernel, request):
    """First nothing is cached, then the same is, then nothing of another file, through one reader."""
    if kernel == "old":
        request.getfixturevalue("without_cachestat")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    wanted = [[(file, offset, 90_000) for offset in range(0, 12_000_000, 100_000)] for file in (0, 1)]
    reader, real, asked = BufferedReader(large_files, threads=4), ReadThreads.run, list[int]()
    monkeypatch.setattr(
        ReadThreads, "run", lambda *given, threads: asked.append(threads) or real(*given, threads=threads)
    )
    for file in (0, 0, 0, 1, 1, 1):
        read_extents(reader, wanted[file], max_bytes=1)
    reader.close()
    assert asked == [4, 4, 2, 2, 4, 2]


def test_as_many_threads_read_as_a_call_is_given(path):
    """All of them are inside a read at the same time, and no other one comes."""
    for count in (1, 2, 4):
        threads, together, names = ReadThreads(4), threading.Barrier(count), set[str]()

        class Meeting:
            def read(self, row, together=together, names=names):
                together.wait(20)
                names.add(threading.current_thread().name)
                return row[2]

            def end(self):
                pass

        assert threads.run([(0, 0, 1, memoryview(b""))] * (4 * count), Meeting, threads=count) == 4 * count
        threads.close()
        assert len(names) == count
        assert all(name.startswith("shardkit-read-") for name in names - {threading.current_thread().name})


def test_scattered_reads_read_nothing_else_and_others_read_ahead(large_files):
    cached = {}
    for path, random in zip(large_files, (True, False), strict=True):
        reader = BufferedReader([path], random=random)
        read_extents(reader, [(0, 0, 90_000)])  # from the start of a file, where the kernel expects more of the kind
        reader.close()
        with path.open("rb") as file:
            cached[random] = cached_bytes(file.fileno(), 0, 40 << 20)
    if cached[True] is None:
        pytest.skip("this kernel does not tell what is cached (Linux 6.5)")
    assert cached[True] in range(90_000, 90_000 + 2 * os.sysconf("SC_PAGE_SIZE"))
    assert cached[False] > 120_000


def test_a_file_system_that_takes_no_advice_is_read_all_the_same(path, data, monkeypatch):
    def refused(*_):
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(os, "posix_fadvise", refused)
    reader = BufferedReader([path])
    assert read_extents(reader, [(0, 0, 50)]) == [data[:50]]
    reader.close()


def test_a_run_of_ops_of_one_file_borrows_its_descriptor_once(path, tmp_path, monkeypatch):
    other = tmp_path / "b.bin"
    other.write_bytes(b"b" * 1000)
    borrowed, real = list[int](), DescriptorCache.borrow
    monkeypatch.setattr(DescriptorCache, "borrow", lambda self, file: borrowed.append(file) or real(self, file))
    reader = BufferedReader([path, other], threads=1)
    wanted = [(0, offset, 9) for offset in range(0, 5000, 100)] + [(1, offset, 9) for offset in range(0, 900, 100)]
    read_extents(reader, wanted)
    assert borrowed == [0, 1]
    reader.close()


def test_the_read_that_began_first_is_the_oldest(path, monkeypatch):
    began, go_on, real = threading.Semaphore(0), threading.Event(), os.preadv

    def slow(*arguments):
        began.release()
        go_on.wait(20)
        return real(*arguments)

    reader = BufferedReader([path], threads=1)
    monkeypatch.setattr(os, "preadv", slow)
    with ThreadPoolExecutor(3) as threads:
        reads = []
        for offset in (700, 500, 900):
            reads.append(threads.submit(read_extents, reader, [(0, offset, 10)]))
            began.acquire(timeout=20)
        oldest = reader.oldest()
        assert (oldest.path, oldest.offset) == (str(path), 700)
        assert 0 <= oldest.seconds < 20
        assert in_child(lambda: reader.oldest() is None)  # it has none of these threads
        go_on.set()
        for read in reads:
            read.result(timeout=20)
    assert reader.oldest() is None
    reader.close()


@pytest.mark.parametrize("wrong", [{"threads": 0}, {"max_open": 0}])
def test_less_than_one_thread_or_descriptor_is_refused(path, wrong):
    with pytest.raises(ConfigError, match="at least one"):
        BufferedReader([path], **wrong)


def test_close_returns_when_the_read_in_progress_has(path, monkeypatch):
    reading, go_on, real = threading.Event(), threading.Event(), os.preadv

    def slow(*arguments):
        reading.set()
        go_on.wait(20)
        return real(*arguments)

    reader = BufferedReader([path])
    monkeypatch.setattr(os, "preadv", slow)
    with ThreadPoolExecutor(2) as threads:
        read = threads.submit(read_extents, reader, [(0, 0, 10)])
        reading.wait(20)
        closed = threads.submit(reader.close)
        with pytest.raises(TimeoutError):
            closed.result(timeout=0.1)
        go_on.set()
        closed.result(timeout=20)
        assert len(read.result(timeout=20)[0]) == 10


def test_one_call_with_all_helpers_does_not_hold_up_another(path, data, monkeypatch):
    held, go_on, real = threading.Semaphore(0), threading.Event(), os.preadv

    def slow(descriptor, buffers, offset):
        if offset < 100:
            held.release()
            go_on.wait(20)
        return real(descriptor, buffers, offset)

    reader = BufferedReader([path], threads=3)
    monkeypatch.setattr(os, "preadv", slow)
    with ThreadPoolExecutor(2) as threads:
        stuck = threads.submit(read_extents, reader, [(0, offset, 1) for offset in (1, 3, 5)])
        for _ in range(3):
            held.acquire(timeout=20)
        free = threads.submit(read_extents, reader, [(0, offset, 9) for offset in (200, 300, 400)])
        assert free.result(timeout=20) == [data[200:209], data[300:309], data[400:409]]
        go_on.set()
        assert len(stuck.result(timeout=20)) == 3
    reader.close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # of one that meets a finaliser
@pytest.mark.parametrize("interrupts", [1, 3])
def test_ctrl_c_is_raised_when_no_thread_reads_any_more(path, data, monkeypatch, interrupts):
    main, real, ended, helped = threading.get_ident(), os.preadv, list[int](), threading.Event()

    def slow(descriptor, buffers, offset):
        if threading.get_ident() == main:
            helped.wait(20)
        else:
            helped.set()
            for _ in range(interrupts):
                signal.pthread_kill(main, signal.SIGINT)
                time.sleep(0.05)
            ended.append(offset)
        return real(descriptor, buffers, offset)

    old = signal.signal(signal.SIGINT, signal.default_int_handler)
    reader = BufferedReader([path], threads=2)
    try:
        read_extents(reader, [(0, 0, 9), (0, 50, 9)])  # starts the helper
        monkeypatch.setattr(os, "preadv", slow)
        for _ in range(5):
            helped.clear()
            with pytest.raises(KeyboardInterrupt):
                read_extents(reader, [(0, offset, 9) for offset in range(0, 9000, 1000)])
            assert len(ended) >= 1
            assert reader.oldest() is None
            ended.clear()
    finally:
        signal.signal(signal.SIGINT, old)
    monkeypatch.undo()
    assert read_extents(reader, [(0, 0, 9), (0, 50, 9)]) == [data[:9], data[50:59]]
    reader.close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # of one that meets a finaliser
def test_ctrl_c_at_any_step_leaves_no_thread_writing_and_the_reader_usable(tmp_path):
    """With many short reads it comes mostly while ops are shared out, between two steps of Python."""
    data = os.urandom(1 << 20)
    (tmp_path / "a").write_bytes(data)
    gc.collect()  # what other tests have dropped is closed now and not in between
    descriptors, running = open_descriptors(), len(os.listdir("/proc/self/task"))
    reader = BufferedReader([tmp_path / "a"], threads=3)
    memory = private_memory(len(data))
    few, many = blocks(memory, [0, 4096, 8192], 4096), blocks(memory, list(range(0, len(data), 4096)), 4096)

    def interrupt(*_) -> None:
        raise KeyboardInterrupt

    old, random = signal.signal(signal.SIGALRM, interrupt), np.random.default_rng(1)
    interrupted = 0
    try:
        for number, delay in enumerate(random.uniform(0.0002, 0.004, 300).tolist()):
            try:
                signal.setitimer(signal.ITIMER_REAL, delay, 0.5)  # again, since one that meets a finaliser is lost
                read_for_ever(reader, few if number % 3 else many)
            except KeyboardInterrupt:
                signal.setitimer(signal.ITIMER_REAL, 0)
                interrupted += 1
            memory[:] = b"\xa5" * len(data)
            time.sleep(0.001)
            assert memory[:] == b"\xa5" * len(data), "a thread has written after the read was given up"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)
    assert interrupted == 300
    assert reader.oldest() is None
    reader.read_into(many)
    assert memory[:] == data
    reader.close()
    assert open_descriptors() == descriptors
    until = time.monotonic() + 20
    while len(os.listdir("/proc/self/task")) > running:  # one that was starting when Ctrl-C came is not waited for
        assert time.monotonic() < until
        time.sleep(0.005)


def test_a_child_closes_a_reader_that_was_reading_when_it_was_made(path, data, monkeypatch):
    reading, go_on, real = threading.Event(), threading.Event(), os.preadv

    def slow(descriptor, buffers, offset):
        if offset == 77:
            reading.set()
            go_on.wait(20)
        return real(descriptor, buffers, offset)

    def read_and_close() -> bool:
        right = read_extents(reader, [(0, 5, 1), (0, 9, 1)]) == [data[5:6], data[9:10]]
        reader.close()
        return right

    reader = BufferedReader([path])
    monkeypatch.setattr(os, "preadv", slow)
    with ThreadPoolExecutor(1) as threads:
        read = threads.submit(read_extents, reader, [(0, 77, 1), (0, 79, 1)])
        reading.wait(20)
        assert in_child(read_and_close)
        go_on.set()
        assert read.result(timeout=20) == [data[77:78], data[79:80]]
    reader.close()
