"""One file, read once from front to back at the speed of the disk: large aligned blocks, the next one on its way."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import stat
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeAlias

from shardkit.errors import CapabilityError, ShortReadError, StorageError
from shardkit.extent import DIRECT_ALIGN, Extent, align_down, align_up, enclosing
from shardkit.storage.reader import DIRECT, PAGE_CACHE

if TYPE_CHECKING:
    from types import TracebackType

__all__ = ["BLOCK_BYTES", "OpenSequential", "SequentialReader"]

BLOCK_BYTES = 4 << 20
"""Bytes of one read. Three of them are in memory: one is looked at while the next two arrive."""
_AHEAD = 2
"""Reads that wait in line. With one, each read would start only when the interpreter lets its thread run: late, when
the other thread is busy with the block before."""

_REFUSED = {errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP}
_Identity: TypeAlias = tuple[int, int, int, int]


class SequentialReader:
    """A regular file, opened to be read in rising order. A context manager that closes at its end.

    Not for several threads at once.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, direct: bool | None = None, block_bytes: int = BLOCK_BYTES
    ) -> None:
        """Open the file; never blocks on a FIFO, never writes.

        Args:
            path: the file.
            direct: True demands O_DIRECT; False reads through the page cache; None takes O_DIRECT where the file
                system has it, and elsewhere asks the kernel to drop its cached pages first.
            block_bytes: bytes of one read; a multiple of 4096.

        Raises:
            CapabilityError: O_DIRECT was demanded and is not to be had.
            StorageError: the file cannot be opened, or is no regular file.
        """
        self.path = os.fspath(path)
        self._direct = direct
        self._block_bytes = block_bytes
        self.read_path = PAGE_CACHE if direct is False else DIRECT
        """The path that the bytes take: `DIRECT` or `PAGE_CACHE`; may change until the first block has arrived."""
        self._fd = self._open()
        try:
            status = os.fstat(self._fd)
            if not stat.S_ISREG(status.st_mode):
                raise StorageError("not a regular file", path=self.path)
            if direct is None and self.read_path == PAGE_CACHE:
                self._drop_cache()
        except BaseException:
            self.close()
            raise
        self.size = status.st_size
        """Bytes of the file when it was opened."""
        self._identity = _identity(status)

    def __enter__(self) -> SequentialReader:
        """Return the reader."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close."""
        self.close()

    def close(self) -> None:
        """Give the descriptor back; idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def blocks(self, extents: Sequence[Extent]) -> Generator[tuple[int, memoryview], None, None]:
        """Yield the bytes of `extents`, widened to whole pages, block by block.

        Args:
            extents: rising, inside the file, at least a page apart.

        Yields:
            The offset in the file and the bytes there: host memory, owned by the reader, valid until the next block
            is asked for.

        Raises:
            ShortReadError: the file ended before its size.
            StorageError: the system failed a read; names the offset.
            CapabilityError: O_DIRECT was demanded and refused at the first read.
        """
        plan = list(self._plan(extents))
        if not plan:
            return
        room = align_up(max(block.length for block in plan), DIRECT_ALIGN)
        buffers = [memoryview(mmap.mmap(-1, room)) for _ in plan[: _AHEAD + 1]]
        if len(plan) == 1:
            yield plan[0].offset, self._read(plan[0], buffers[0])
            return
        with ThreadPoolExecutor(1, "read-ahead") as ahead:

            def read(number: int) -> Future[memoryview]:
                return ahead.submit(self._read, plan[number], buffers[number % len(buffers)])

            arriving = deque(read(number) for number in range(min(_AHEAD, len(plan))))
            for number, block in enumerate(plan):
                view = arriving.popleft().result()
                if number + _AHEAD < len(plan):
                    arriving.append(read(number + _AHEAD))
                yield block.offset, view

    def changed(self) -> bool:
        """Tell whether the file, or what its name leads to, is another one than when it was opened."""
        try:
            return not self._identity == _identity(os.fstat(self._fd)) == _identity(os.stat(self.path))
        except OSError:
            return True

    def first_hole(self, extent: Extent) -> int | None:
        """Return the offset of the first byte in `extent` that the file system holds no data for, or None."""
        try:
            hole = max(os.lseek(self._fd, extent.offset, os.SEEK_HOLE), extent.offset)
        except OSError:
            return None
        return hole if hole < min(extent.end, self.size) else None

    def _plan(self, extents: Sequence[Extent]) -> Iterator[Extent]:
        for extent in extents:
            whole = enclosing(extent, DIRECT_ALIGN)
            end = min(whole.end, self.size)
            for offset in range(whole.offset, end, self._block_bytes):
                yield Extent(offset, min(self._block_bytes, end - offset))

    def _open(self) -> int:
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
        if self.read_path == DIRECT:
            try:
                return os.open(self.path, flags | os.O_DIRECT)
            except OSError as error:
                self._leave_direct(error, "cannot open", None)
        try:
            return os.open(self.path, flags)
        except OSError as error:
            raise _failure(error, "cannot open", self.path, None) from error

    def _read(self, block: Extent, buffer: memoryview) -> memoryview:
        """Read one block into the front of `buffer`."""
        done = 0
        while done < block.length:
            want = block.length - done
            if self.read_path == DIRECT:
                want = align_up(want, DIRECT_ALIGN)
            try:
                count = os.preadv(self._fd, [buffer[done : done + want]], block.offset + done)
            except OSError as error:
                self._leave_direct(error, "cannot read", block.offset + done)
                continue
            if done + count < block.length and self.read_path == DIRECT:
                count = align_down(count, DIRECT_ALIGN)  # the next read must start on a page, too
            if count == 0:
                raise ShortReadError(
                    "the file ended early", path=self.path, offset=block.offset + done,
                    expected=f"{self.size} bytes", found=f"end of file at {os.fstat(self._fd).st_size}",
                )  # fmt: skip
            done += count
        return buffer[: block.length]

    def _leave_direct(self, error: OSError, what: str, offset: int | None) -> None:
        """Go on through the page cache when the file system refuses O_DIRECT; raise what else went wrong."""
        if error.errno not in _REFUSED or self.read_path != DIRECT:
            raise _failure(error, what, self.path, offset) from error
        if self._direct:
            raise CapabilityError(
                "this file system takes no O_DIRECT", path=self.path, remedy="leave --direct away"
            ) from error
        self.read_path = PAGE_CACHE
        if offset is not None:
            fcntl.fcntl(self._fd, fcntl.F_SETFL, fcntl.fcntl(self._fd, fcntl.F_GETFL) & ~os.O_DIRECT)
            self._drop_cache()

    def _drop_cache(self) -> None:
        os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)


OpenSequential: TypeAlias = Callable[[str], SequentialReader]
"""Opens a path; the seam at which a test makes the disk fail."""


def _identity(status: os.stat_result) -> _Identity:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _failure(error: OSError, what: str, path: str, offset: int | None) -> StorageError:
    found = f"{errno.errorcode.get(error.errno or 0, type(error).__name__)} ({error.strerror or error})"
    return StorageError(what, path=path, offset=offset, found=found, errno=error.errno)
