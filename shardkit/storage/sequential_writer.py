"""A file written from front to back at the speed of the disk: one buffer is filled while the one before is written."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import queue
import threading
from typing import TYPE_CHECKING

from shardkit.errors import ShardkitError
from shardkit.extent import DIRECT_ALIGN, align_down, align_up
from shardkit.storage.atomic import os_errors, remove
from shardkit.storage.clone import Place, block_bytes, share_blocks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

__all__ = ["SequentialWriter", "new_buffers"]

_FAILED_WRITE = "cannot write"
_MODE = 0o666
"""Less the umask, as for any file: a group that shares a folder shares what is packed into it."""


def new_buffers(count: int, buffer_bytes: int) -> list[mmap.mmap]:
    """Return `count` page-aligned host buffers of `buffer_bytes` each, from anonymous memory."""
    return [mmap.mmap(-1, buffer_bytes) for _ in range(count)]


class SequentialWriter:
    """A new file filled in place: one buffer is filled by the caller while the one before goes to the disk.

    Ask for room with `reserve`, fill `buffer[position:]`, say with `advance` how much of it stays. Whole pages leave
    by O_DIRECT where the file system takes it, so that packing neither fills the page cache nor copies twice.
    One thread may use it; it runs one thread of its own.
    """

    def __init__(self, path: bytes, buffers: list[mmap.mmap], on_bytes: Callable[[memoryview], None]) -> None:
        """Create `path`.

        Args:
            path: temporary name; a leftover of that name is removed first.
            buffers: at least two, equally long, a whole number of pages each; borrowed until `finish` or `discard`.
            on_bytes: called in the writing thread with each run of bytes, in order, before it is written; must not
                retain it.

        Raises:
            ShardkitError: as `from_os_error` maps it.
        """
        self.path = path
        self._on_bytes = on_bytes
        self._free: queue.SimpleQueue[mmap.mmap] = queue.SimpleQueue()
        for spare in buffers[1:]:
            self._free.put(spare)
        self._capacity = len(buffers[0])
        self.buffer = buffers[0]
        """The buffer being filled."""
        self.position = 0
        """Where the next byte goes in `buffer`."""
        self._buffer_offset = 0  # of the buffer's first byte in the file
        self._error: BaseException | None = None
        self._work: queue.Queue[tuple[mmap.mmap, int, list[tuple[int, int]]] | None] = queue.Queue()
        self._there: list[tuple[int, int]] = []  # what of the buffer need not be written: first byte, end
        self._reading = -1  # a descriptor to read back what is shared
        remove(path)
        with os_errors(_FAILED_WRITE, path):
            self._fd = _open_new(path)
            self.block_bytes = block_bytes(self._fd)
            """Bytes of the blocks that the file can share with others."""
        self._thread = threading.Thread(target=self._drain, name="shardkit-write", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:  # no room for one more thread
            self._unlink()
            raise

    @property
    def offset(self) -> int:
        """Where the next byte goes in the file."""
        return self._buffer_offset + self.position

    def reserve(self, count: int) -> None:
        """Make `buffer[position : position + count]` writable in one piece.

        Raises:
            ShardkitError: an earlier write failed.
        """
        if self._error is not None:
            raise self._error
        if self.position + count <= len(self.buffer):
            return
        whole = align_down(self.position, DIRECT_ALIGN)
        carried = self.buffer[whole : self.position]
        # The bytes that do not fill a page move on: direct I/O takes whole pages only.
        needed = align_up(len(carried) + count, DIRECT_ALIGN)
        self._work.put((self.buffer, whole, self._there))
        self._there = []
        self.buffer = self._next_buffer(needed)
        self.buffer[: len(carried)] = carried
        self.position = len(carried)
        self._buffer_offset += whole

    def share(self, source: Place, ahead: int, length: int) -> None:
        """Let the file have blocks of another one where some bytes ahead go, and read them back to the buffer.

        They are kept when `advance` says so. Until then, what is written or shared next takes their place.

        Args:
            source: where they begin in the other file; opened for reading.
            ahead: bytes from `position` to where they go; that is where a block begins.
            length: of whole blocks, which `reserve` has made room for.

        Raises:
            OSError: they cannot be read.
            CapabilityError: the two files cannot share blocks.
            ShortReadError: the other file has become shorter.
            ShardkitError: as `share_blocks`.
        """
        share_blocks(source, Place(self._fd, self.offset + ahead, self.path), length)
        if self._reading < 0:
            with os_errors(_FAILED_WRITE, self.path):
                self._reading = _open_existing(self.path)
        start, offset = self.position + ahead, self.offset + ahead
        with memoryview(self.buffer) as view, view[start : start + length] as room:
            _read_all(self._reading, room, offset)

    def advance(self, count: int, there: tuple[int, int] = (0, 0)) -> None:
        """Keep the next `count` bytes of the buffer as the file's.

        Args:
            count: bytes.
            there: the blocks among them that are shared: bytes before them, and their own.
        """
        ahead, length = there
        if length:
            self._there.append((self.position + ahead, self.position + ahead + length))
        self.position += count

    def finish(self) -> None:
        """Write the rest, sync and close.

        Raises:
            ShardkitError: as `from_os_error` maps it; the file is then removed.
        """
        try:
            self._work.put((self.buffer, self.position, self._there))
            self._stop()
            if self._error is not None:
                raise self._error
            with os_errors(_FAILED_WRITE, self.path):
                if self._reading >= 0:
                    os.ftruncate(self._fd, self.offset)  # blocks may be shared that were not kept
                os.fsync(self._fd)
                self._close()
        except BaseException:
            self.discard()
            raise

    def discard(self) -> None:
        """Stop and unlink, whatever state the file is in; never hides the error that led here."""
        self._stop()
        self._unlink()

    def _close(self) -> None:
        # A descriptor is gone even when close fails: closing it again would hit another thread's file.
        reading, self._reading = self._reading, -1
        fd, self._fd = self._fd, -1
        if reading >= 0:
            with contextlib.suppress(OSError):  # nothing was written through it
                os.close(reading)
        if fd >= 0:
            os.close(fd)

    def _unlink(self) -> None:
        with contextlib.suppress(OSError):
            self._close()
        with contextlib.suppress(ShardkitError):
            remove(self.path)

    def _stop(self) -> None:
        self._work.put(None)
        self._thread.join()

    def _next_buffer(self, needed: int) -> mmap.mmap:
        if needed <= self._capacity:
            return self._free.get()
        # A piece larger than a buffer gets one of its own, when all before it is written: there is never a second.
        self._work.join()
        return mmap.mmap(-1, needed)

    def _drain(self) -> None:
        offset = 0
        while (work := self._work.get()) is not None:
            buffer, count, there = work
            if self._error is None:
                try:
                    with memoryview(buffer) as view, view[:count] as run, os_errors(_FAILED_WRITE, self.path, offset):
                        self._on_bytes(run)
                        if there:  # what is left are some pages each time: the page cache gathers them
                            _leave_direct(self._fd)
                        for first, end in _between(there, count):
                            _write_all(self._fd, run[first:end], offset + first)
                    offset += count
                except BaseException as error:
                    self._error = error
            if len(buffer) == self._capacity:
                self._free.put(buffer)
            else:
                with contextlib.suppress(BufferError):  # a view in the traceback of an error keeps it a little longer
                    buffer.close()
            self._work.task_done()


def _open_new(path: bytes) -> int:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    try:
        return os.open(path, flags | os.O_DIRECT, _MODE)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        # Some file systems create the file before they refuse O_DIRECT.
        remove(path)
        return os.open(path, flags, _MODE)


def _open_existing(path: bytes) -> int:
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        return os.open(path, flags | os.O_DIRECT)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return os.open(path, flags)


def _between(there: Sequence[tuple[int, int]], count: int) -> Iterator[tuple[int, int]]:
    """Yield the runs of [0, count) that lie outside of some rising runs.

    >>> list(_between([(0, 4), (8, 9)], 10))
    [(4, 8), (9, 10)]
    """
    first = 0
    for start, end in there:
        if first < start:
            yield first, start
        first = end
    if first < count:
        yield first, count


def _read_all(fd: int, room: memoryview, offset: int) -> None:
    done = 0
    while done < len(room):
        try:
            count = os.preadv(fd, [room[done:]], offset + done)
        except OSError as error:
            if error.errno != errno.EINVAL or not _leave_direct(fd):
                raise
            continue
        if not count:
            raise OSError(errno.EIO, "the system gave no bytes and no reason")
        done += count


def _write_all(fd: int, run: memoryview, offset: int) -> None:
    done = 0
    while done < len(run):
        rest = run[done:]
        aligned = align_down(len(rest), DIRECT_ALIGN) if not (offset + done) % DIRECT_ALIGN else 0
        if not aligned:
            _leave_direct(fd)
        try:
            count = os.pwrite(fd, rest[:aligned] if aligned else rest, offset + done)
        except OSError as error:
            if error.errno != errno.EINVAL or not _leave_direct(fd):
                raise
            continue
        if not count:
            raise OSError(errno.EIO, "the system took no bytes and gave no reason")
        done += count


def _leave_direct(fd: int) -> bool:
    """Go on through the page cache, and tell whether that is a change."""
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    if not flags & os.O_DIRECT:
        return False
    fcntl.fcntl(fd, fcntl.F_SETFL, flags & ~os.O_DIRECT)
    return True
