from __future__ import annotations

import errno
import fcntl
import mmap
import os
import random
import stat
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardkit.errors import CapabilityError, StorageError, TargetFullError
from shardkit.storage.clone import Place
from shardkit.storage.sequential_writer import SequentialWriter, new_buffers
from shardkit.testing.extents import shared_bytes
from shardkit.testing.mounts import NoMountsError, loop_mount, tmpfs

PAGE = 4096
SMALL = 4 * PAGE
"""Bytes of a buffer that is often full."""


def write_pieces(path, pieces, *, buffer_bytes=SMALL, buffers=3, seen=None):
    """Write `pieces` one after the other and return the file's size as the writer tells it."""
    writer = SequentialWriter(path, new_buffers(buffers, buffer_bytes), seen.append if seen is not None else len)
    try:
        for piece in pieces:
            writer.reserve(len(piece))
            writer.buffer[writer.position : writer.position + len(piece)] = piece
            writer.advance(len(piece))
        size = writer.offset
        writer.finish()
    except BaseException:
        writer.discard()
        raise
    return size


def stored(path):
    with open(path, "rb") as file:
        return file.read()


def writing_threads():
    return [thread for thread in threading.enumerate() if thread.name == "shardkit-write"]


@pytest.fixture
def path(tmp_path):
    return os.fsencode(tmp_path / "file")


@pytest.fixture(scope="module")
def memory(tmp_path_factory):
    """A file system in memory."""
    try:
        with tmpfs(tmp_path_factory.mktemp("mounts") / "memory", size=64 << 20) as folder:
            yield folder
    except NoMountsError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def sectors_of_8192(tmp_path_factory):
    """A file system whose direct writes must be aligned to more than a page."""
    folder = tmp_path_factory.mktemp("large")
    try:
        with loop_mount(folder / "image", folder / "xfs", "xfs", size=320 << 20, sector=8192) as mounted:
            yield mounted.path
    except NoMountsError as error:
        pytest.skip(str(error))


EDGES = [0, 1, 511, 512, PAGE - 1, PAGE, PAGE + 1, SMALL - 1, SMALL, SMALL + 1, 2 * SMALL, 5 * SMALL + 7]


@settings(max_examples=60)
@given(st.lists(st.one_of(st.sampled_from(EDGES), st.integers(0, 3 * SMALL)), max_size=12), st.integers(2, 4))
def test_the_file_holds_what_was_written_in_its_order(tmp_path_factory, sizes, buffers):
    path = os.fsencode(tmp_path_factory.mktemp("any") / "file")
    pieces = [os.urandom(size) for size in sizes]
    assert write_pieces(path, pieces, buffers=buffers) == sum(sizes)
    assert stored(path) == b"".join(pieces)


@pytest.mark.parametrize("size", EDGES)
def test_one_piece_of_any_size_arrives(path, size):
    data = os.urandom(size)
    write_pieces(path, [data])
    assert stored(path) == data


def test_a_piece_behind_another_is_not_torn_at_a_buffer_s_end(path):
    pieces = [os.urandom(SMALL - 100), os.urandom(300), os.urandom(10 * SMALL), os.urandom(1)]
    write_pieces(path, pieces)
    assert stored(path) == b"".join(pieces)


def test_the_bytes_are_shown_once_in_order_before_they_are_written(path):
    seen = bytearray()
    pieces = [random.Random(n).randbytes(n * 977) for n in range(30)]
    writer = SequentialWriter(path, new_buffers(2, SMALL), seen.extend)
    for piece in pieces:
        writer.reserve(len(piece))
        writer.buffer[writer.position : writer.position + len(piece)] = piece
        writer.advance(len(piece))
    writer.finish()
    assert bytes(seen) == b"".join(pieces) == stored(path)


def test_room_that_is_not_kept_leaves_no_trace(path):
    writer = SequentialWriter(path, new_buffers(2, SMALL), len)
    for number in range(50):
        writer.reserve(3 * PAGE)
        writer.buffer[writer.position : writer.position + 3 * PAGE] = b"x" * 3 * PAGE
        if number % 2:
            writer.buffer[writer.position : writer.position + 1000] = bytes([number]) * 1000
            writer.advance(1000)
    writer.finish()
    assert stored(path) == b"".join(bytes([number]) * 1000 for number in range(1, 50, 2))


def test_pieces_larger_than_a_buffer_wait_for_one_another(path):
    open_buffers, most = [], 0

    def slow(_run):
        nonlocal most
        time.sleep(0.01)
        most = max(most, sum(not buffer.closed for buffer in open_buffers))

    writer = SequentialWriter(path, new_buffers(2, 8192), slow)
    for number in range(20):
        writer.reserve(100_000)
        open_buffers.append(writer.buffer)
        writer.buffer[writer.position : writer.position + 100_000] = bytes([number]) * 100_000
        writer.advance(100_000)
    writer.finish()
    assert stored(path) == b"".join(bytes([number]) * 100_000 for number in range(20))
    assert most == 1


def test_a_buffer_is_filled_while_the_one_before_goes_to_the_disk(path):
    filled = threading.Event()
    writer = SequentialWriter(
        path, new_buffers(2, 8192), lambda _run: filled.wait(10) or pytest.fail("nothing overlaps")
    )
    writer.reserve(8192)
    writer.advance(8192)
    writer.reserve(4096)  # the first buffer is with the writing thread, which waits for us
    writer.advance(4096)
    filled.set()
    writer.finish()


def test_buffers_are_lent_from_file_to_file(path):
    buffers = new_buffers(2, SMALL)
    for number in range(5):
        writer = SequentialWriter(path, buffers, len)
        for _ in range(number * 3):
            writer.reserve(PAGE + 1)
            writer.buffer[writer.position : writer.position + PAGE + 1] = bytes([number]) * (PAGE + 1)
            writer.advance(PAGE + 1)
        writer.finish()
        assert stored(path) == bytes([number]) * (number * 3 * (PAGE + 1))
    for buffer in buffers:
        buffer.close()  # raises when anything still looks into it


def test_whole_pages_leave_past_the_page_cache(path, monkeypatch):
    flags, pwrite = [], os.pwrite

    def watched(fd, data, offset):
        flags.append((bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT), len(data) % PAGE == offset % PAGE == 0))
        return pwrite(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", watched)
    write_pieces(path, [os.urandom(3000) for _ in range(20)])
    assert stat.S_ISREG(os.stat(path).st_mode)
    assert flags[0] == (True, True)
    assert flags[-1] == (False, False)  # the tail that fills no page
    assert all(direct == whole for direct, whole in flags)


@pytest.mark.parametrize("refusal", [OSError(errno.EINVAL, "no direct I/O")])
def test_a_file_system_that_refuses_direct_i_o_at_open_is_written_through_the_cache(path, monkeypatch, refusal):
    real = os.open

    def refusing(name, flags, mode=0o777, **rest):
        if flags & os.O_DIRECT:
            real(name, flags & ~os.O_DIRECT, mode)  # some make the file before they refuse
            raise refusal
        return real(name, flags, mode, **rest)

    monkeypatch.setattr(os, "open", refusing)
    data = os.urandom(3 * SMALL + 5)
    write_pieces(path, [data])
    assert stored(path) == data


@pytest.mark.parametrize("at", [1, 2, 5])
def test_a_direct_write_that_is_refused_goes_through_the_cache(path, monkeypatch, at):
    calls, pwrite = [], os.pwrite

    def refusing(fd, data, offset):
        calls.append(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT)
        if len(calls) >= at and calls[-1]:
            raise OSError(errno.EINVAL, "Invalid argument")
        return pwrite(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", refusing)
    pieces = [os.urandom(SMALL - 9) for _ in range(8)]
    write_pieces(path, pieces)
    assert stored(path) == b"".join(pieces)
    assert sum(map(bool, calls)) == at  # asked once, and not again


def test_a_write_that_is_invalid_without_direct_i_o_too_is_an_error(path, monkeypatch):
    def invalid(fd, data, offset):
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(os, "pwrite", invalid)
    with pytest.raises(StorageError, match="EINVAL"):
        write_pieces(path, [os.urandom(SMALL)])


@pytest.mark.parametrize("most", [1, 511, 512, PAGE - 1, PAGE, PAGE + 1, 3 * PAGE])
def test_short_writes_are_completed(path, monkeypatch, most):
    pwrite = os.pwrite

    def short(fd, data, offset):
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT and most % PAGE:
            fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) & ~os.O_DIRECT)
        return pwrite(fd, data[:most], offset)

    monkeypatch.setattr(os, "pwrite", short)
    pieces = [os.urandom(size) for size in (5000, 200, 9000)]
    write_pieces(path, pieces)
    assert stored(path) == b"".join(pieces)


@pytest.mark.timeout(20)
def test_a_system_that_takes_nothing_is_not_asked_for_ever(path, monkeypatch):
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: 0)
    with pytest.raises(StorageError, match="EIO"):
        write_pieces(path, [os.urandom(SMALL)])


@pytest.mark.timeout(30)
@pytest.mark.parametrize(
    ("number", "kind"),
    [
        (errno.ENOSPC, TargetFullError),
        (errno.EFBIG, TargetFullError),
        (errno.EIO, StorageError),
        (errno.EACCES, StorageError),
    ],
)
@pytest.mark.parametrize("at", [1, 3])
@pytest.mark.parametrize("pieces", [4, 60])
def test_an_error_in_the_writing_thread_reaches_the_caller(path, monkeypatch, number, kind, at, pieces):
    """With few pieces the caller learns it when the file is finished, with many when it asks for more room."""
    calls, pwrite = [], os.pwrite

    def fail(fd, data, offset):
        calls.append(offset)
        if len(calls) >= at:
            raise OSError(number, os.strerror(number))
        return pwrite(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", fail)
    with pytest.raises(kind, match=errno.errorcode[number]) as caught:
        write_pieces(path, [os.urandom(SMALL - 1)] * pieces)
    assert caught.value.path == path
    assert not os.path.exists(path)
    assert len(calls) == at  # nothing is written behind a gap
    assert not writing_threads()


def test_an_error_of_who_looks_at_the_bytes_reaches_the_caller(path):
    def refuse(run):
        raise ZeroDivisionError

    writer = SequentialWriter(path, new_buffers(2, SMALL), refuse)
    writer.advance(1)
    with pytest.raises(ZeroDivisionError):
        writer.finish()
    assert not os.path.exists(path)
    assert not writing_threads()


@pytest.mark.parametrize("call", ["fsync", "close"])
def test_a_failed_sync_or_close_throws_the_file_away(path, monkeypatch, call):
    real, failed = getattr(os, call), []

    def fail(fd):
        if os.readlink(f"/proc/self/fd/{fd}") != os.fsdecode(path):
            return real(fd)
        failed.append(fd)
        if call == "close":
            real(fd)  # as the kernel does: the descriptor is gone, whatever close says
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, call, fail)
    with pytest.raises(TargetFullError):
        write_pieces(path, [b"data"])
    assert len(failed) == 1  # a second sync proves nothing, a second close hits another file
    assert not os.path.exists(path)
    assert not writing_threads()


def test_a_discarded_file_is_gone_with_its_thread_and_descriptor(path):
    before = len(os.listdir("/proc/self/fd"))
    writer = SequentialWriter(path, new_buffers(2, SMALL), len)
    writer.advance(100)
    assert len(writing_threads()) == 1
    writer.discard()
    writer.discard()
    assert not os.path.exists(path)
    assert not writing_threads()
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_thread_that_cannot_start_leaves_no_file(path, monkeypatch):
    def refuse(self):
        raise RuntimeError("can't start new thread")

    before = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(RuntimeError):
        SequentialWriter(path, new_buffers(2, SMALL), len)
    assert not os.path.exists(path)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_leftover_of_the_name_is_not_written_through(path, tmp_path):
    precious = tmp_path / "precious"
    precious.write_bytes(b"precious")
    os.symlink(precious, path)
    write_pieces(path, [b"new"])
    assert precious.read_bytes() == b"precious"
    assert stored(path) == b"new"


def test_a_file_in_memory_is_like_any_other(memory):
    path = os.fsencode(memory / "file")
    pieces = [os.urandom(size) for size in EDGES]
    write_pieces(path, pieces)
    assert stored(path) == b"".join(pieces)


def test_a_full_file_system_is_told_and_left_empty(memory):
    path = os.fsencode(memory / "full")
    with pytest.raises(TargetFullError, match=r"ENOSPC.*free space"):
        write_pieces(path, [bytes(1 << 20)] * 80, buffer_bytes=1 << 20)
    assert not os.path.exists(path)


def test_sectors_of_a_page_take_whole_pages(blocks_of_4096):
    path = os.fsencode(blocks_of_4096 / "file")
    pieces = [os.urandom(size) for size in EDGES]
    write_pieces(path, pieces)
    assert stored(path) == b"".join(pieces)


def test_sectors_larger_than_a_page_are_written_through_the_cache(sectors_of_8192):
    path = os.fsencode(sectors_of_8192 / "file")
    with open(path, "wb") as file, mmap.mmap(-1, PAGE) as page:
        fcntl.fcntl(file.fileno(), fcntl.F_SETFL, os.O_DIRECT)
        with pytest.raises(OSError, match="Invalid argument"):
            os.pwrite(file.fileno(), page, 0)
    pieces = [os.urandom(size) for size in EDGES]
    write_pieces(path, pieces)
    assert stored(path) == b"".join(pieces)


# --- blocks that are shared with another file


@pytest.mark.parametrize("kind", ["xfs", "btrfs"])
@pytest.mark.parametrize("seed", range(4))
def test_shared_and_written_runs_make_the_file_whatever_buffer_they_fall_into(folder_on, kind, seed):
    """Some are given up again, as a refused image is: what comes next takes their place."""
    folder, rng, seen = folder_on(kind), random.Random(seed), bytearray()
    source = folder / "source"
    source.write_bytes(rng.randbytes(40 * 4096))
    expected, shared = b"", 0
    writer = SequentialWriter(os.fsencode(folder / "file"), new_buffers(3, 8 * 4096), seen.extend)
    with open(source, "rb") as file:
        for _ in range(60):
            ahead = -writer.offset % 4096 + rng.choice((0, 4096))
            blocks, tail = rng.randrange(1, 14), rng.randrange(4096)
            first, data = rng.randrange(26), rng.randbytes(ahead + blocks * 4096 + tail)
            writer.reserve(len(data))
            writer.buffer[writer.position : writer.position + len(data)] = data
            wish = rng.choice(("share", "give up", "write"))
            if wish != "write":
                writer.share(Place(file.fileno(), first * 4096, os.fsencode(source)), ahead, blocks * 4096)
            start = writer.position + ahead
            if wish == "share":
                there = source.read_bytes()[first * 4096 : (first + blocks) * 4096]
                assert writer.buffer[start : start + len(there)] == there
                data = data[:ahead] + there + data[ahead + len(there) :]
                shared += len(there)
                writer.advance(len(data), (ahead, len(there)))
                expected += data
            elif wish == "write":
                writer.advance(len(data))
                expected += data
    writer.finish()
    assert (folder / "file").read_bytes() == expected == bytes(seen)
    assert shared_bytes(folder / "file") == shared > 0


def test_a_file_whose_blocks_were_all_given_up_ends_where_it_should(folder_on):
    folder = folder_on("xfs")
    (folder / "source").write_bytes(bytes(8192))
    writer = SequentialWriter(os.fsencode(folder / "file"), new_buffers(2, 16384), len)
    with open(folder / "source", "rb") as file:
        writer.reserve(8192)
        writer.share(Place(file.fileno(), 0, b"source"), 0, 8192)
    writer.buffer[:3] = b"end"
    writer.advance(3)
    writer.finish()
    assert (folder / "file").read_bytes() == b"end"


def test_blocks_that_cannot_be_shared_leave_the_file_as_it_was(folder_on):
    folder = folder_on("ext4")
    (folder / "source").write_bytes(bytes(8192))
    writer = SequentialWriter(os.fsencode(folder / "file"), new_buffers(2, 16384), len)
    writer.reserve(8192)
    with open(folder / "source", "rb") as file, pytest.raises(CapabilityError):
        writer.share(Place(file.fileno(), 0, b"source"), 0, 8192)
    writer.buffer[:5000] = b"x" * 5000
    writer.advance(5000)
    writer.finish()
    assert (folder / "file").read_bytes() == b"x" * 5000
