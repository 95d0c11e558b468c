"""A shard that may be damaged anywhere: read where it can be read, scanned for headers, never changed, never mapped.

A mapping of a file that shrinks, or whose disk fails, ends the process by a signal; a read says what went wrong.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections import OrderedDict
from typing import TYPE_CHECKING, Self, TypeAlias

import numpy as np

from shardkit.errors import StorageError, from_os_error
from shardkit.extent import align_down, align_up
from shardkit.format.tar import BLOCK
from shardkit.storage.atomic import os_errors

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["DamagedFile", "is_regular"]

_CHUNK = 1 << 20
_PAGE = 4096
_WINDOW = 16 << 10
_WINDOWS = 16
_MAGIC_AT = 257
_MAGIC = b"ustar\x0000"
_MOST_BYTES = 1 << 30
_Identity: TypeAlias = tuple[int, int, int, int]


def is_regular(path: bytes) -> bool:
    """Tell whether a name leads to a regular file; a link is followed."""
    try:
        return stat.S_ISREG(os.stat(path).st_mode)
    except OSError:
        return False


class DamagedFile:
    """A regular file, open for reading. A context manager that closes."""

    def __init__(self, path: bytes) -> None:
        """Open it; never blocks on a FIFO.

        Raises:
            ShardkitError: it cannot be opened, as `from_os_error` maps it, or is no regular file.
        """
        self.path = path
        with os_errors("cannot open a shard", path):
            self._fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
        status = os.fstat(self._fd)
        if not stat.S_ISREG(status.st_mode):
            os.close(self._fd)
            raise StorageError("not a regular file", path=path)
        self.size = status.st_size
        self._identity = _identity(status)
        self._windows: OrderedDict[int, bytes] = OrderedDict()

    def __enter__(self) -> Self:
        """Return the file."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close it."""
        os.close(self._fd)

    def read(self, offset: int, count: int) -> bytes:
        """Return the bytes at `offset`; fewer where the file ends.

        Raises:
            StorageError: the system failed the read.
        """
        end = min(offset + count, self.size)
        if end <= offset:
            return b""
        first, last = align_down(offset, _WINDOW), align_up(end, _WINDOW)
        if last - first <= 2 * _WINDOW:
            try:
                pieces = b"".join(self._window(at) for at in range(first, last, _WINDOW))
                return pieces[offset - first : end - first]
            except StorageError:
                pass  # of a neighbour, perhaps
        buffer = bytearray(end - offset)
        return bytes(memoryview(buffer)[: self.read_into(memoryview(buffer), offset)])

    def _window(self, at: int) -> bytes:
        """Return an aligned piece of the file; the last few are kept, since headers lie side by side."""
        if at in self._windows:
            self._windows.move_to_end(at)
            return self._windows[at]
        buffer = bytearray(min(_WINDOW, self.size - at))
        data = bytes(memoryview(buffer)[: self.read_into(memoryview(buffer), at)])
        self._windows[at] = data
        if len(self._windows) > _WINDOWS:
            self._windows.popitem(last=False)
        return data

    def read_into(self, view: memoryview, offset: int) -> int:
        """Fill `view`, host memory of the caller's, from `offset` on; return the bytes that there were.

        Raises:
            StorageError: the system failed the read.
        """
        done = 0
        while done < len(view):
            try:
                count = os.preadv(self._fd, [view[done : done + _MOST_BYTES]], offset + done)
            except OSError as error:
                failed = from_os_error(error, "cannot read", path=self.path, offset=offset + done)
                raise StorageError(failed.what, path=self.path, offset=failed.offset, found=failed.found,
                                   errno=error.errno or errno.EIO) from error  # fmt: skip
            if not count:
                break
            done += count
        return done

    def next_header(self, start: int, magic: bytes = _MAGIC) -> int | None:
        """Return the offset of the first block from `start` on that has a ustar header's magic, or None.

        Args:
            start: a multiple of 512. What the system cannot read is passed over.
            magic: what stands there.
        """
        wanted = np.frombuffer(magic, np.uint8)
        for offset, data in self.chunks(start):
            blocks = np.frombuffer(data, np.uint8, len(data) // BLOCK * BLOCK).reshape(-1, BLOCK)
            marked = np.flatnonzero((blocks[:, _MAGIC_AT : _MAGIC_AT + len(magic)] == wanted).all(axis=1))
            if len(marked):
                return offset + int(marked[0]) * BLOCK
        return None

    def is_zero(self, start: int, end: int) -> bool:
        """Tell whether the bytes [start, end) are all zero; what cannot be read is not."""
        position = start
        for offset, data in self.chunks(start, end):
            if offset != position or data.count(0) != len(data):
                return False
            position += len(data)
        return position >= end

    def _pages(self, start: int, end: int) -> Iterator[tuple[int, bytes]]:
        """Yield what can be read of [start, end), page by page."""
        at = start
        while at < end:
            upto = min(align_down(at, _PAGE) + _PAGE, end)
            with contextlib.suppress(StorageError):
                yield at, self.read(at, upto - at)
            at = upto

    def changed(self) -> bool:
        """Tell whether the file, or what its name leads to, is another one than when it was opened."""
        try:
            return not self._identity == _identity(os.fstat(self._fd)) == _identity(os.stat(self.path))
        except OSError:
            return True

    def chunks(self, start: int, end: int | None = None) -> Iterator[tuple[int, bytes]]:
        """Yield offsets and bytes; where a large read fails, page by page, without those that fail too."""
        limit = self.size if end is None else min(end, self.size)
        length = 8 * BLOCK  # a next header is near in most cases; a long gap is read in long pieces
        while start < limit:
            count = min(length, limit - start)
            try:
                yield start, self.read(start, count)
            except StorageError:
                yield from self._pages(start, start + count)
            start += count
            length = min(length * 4, _CHUNK)


def _identity(status: os.stat_result) -> _Identity:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns
