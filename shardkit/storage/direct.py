"""Reads past the page cache, with O_DIRECT: from the device into the caller's memory without a copy."""

from __future__ import annotations

import errno
import logging
import os
import threading
from typing import TYPE_CHECKING

from shardkit.errors import CapabilityError, ConfigError, ShardkitError, StorageError, from_os_error
from shardkit.escaping import escape
from shardkit.extent import DIRECT_ALIGN, align_down
from shardkit.storage.buffered import DEFAULT_THREADS, ByteCounter, CachedReads, check_files
from shardkit.storage.descriptors import DescriptorCache, Loan, default_max_open, short_read
from shardkit.storage.probe import PathFacts, mount_of, probe
from shardkit.storage.reader import DIRECT, HOST, PAGE_CACHE, SPAN_BYTES, MemorySpace, Pending, ReadOp, columns
from shardkit.storage.threads import ReadThreads, Row, rows_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from shardkit.storage.reader import OpColumns

__all__ = ["DirectReader", "Refusals", "one_path_a_folder", "require_aligned", "require_direct"]

_log = logging.getLogger(__name__)


class DirectReader:
    """A `Reader` that uses preadv(2) on files opened with O_DIRECT.

    A file that was opened but refuses the read itself (EINVAL: its device wants another alignment than the others'),
    or that keeps returning less than a block, is read through the page cache from then on: `counters` shows the
    bytes, `refused` the number of such files, and the first one of each mount is logged.
    """

    space: MemorySpace = HOST
    span_bytes = SPAN_BYTES

    def __init__(
        self,
        paths: Sequence[str | os.PathLike[str]],
        *,
        threads: int = DEFAULT_THREADS,
        max_open: int | None = None,
        align: int | None = None,
    ) -> None:
        """Ask one file a folder whether it can be read directly, and with which alignment.

        Args:
            paths: the files, addressed by their index.
            threads: the most that read at the same time for one call.
            max_open: descriptors kept open; None asks `default_max_open`.
            align: bytes, a power of two; None takes what the files state, or 4096 where they state nothing.

        Raises:
            CapabilityError: the file system of one of the folders has no direct reads.
            StorageError: a file that was asked is not there.
            ConfigError: `threads` or `max_open` is below 1.
        """
        facts = [probe(path) for path in one_path_a_folder(paths)]
        self.align = align or max((require_direct(fact) for fact in facts), default=DIRECT_ALIGN)
        limit = default_max_open() if max_open is None else max_open
        self._files = DescriptorCache(paths, flags=os.O_DIRECT, max_open=limit)
        self._cached = DescriptorCache(paths, flags=0, max_open=limit)
        self._threads = ReadThreads(threads)
        self._bytes = ByteCounter(DIRECT, PAGE_CACHE)
        self._refusals = Refusals(self._files.paths)

    @property
    def counters(self) -> Mapping[str, int]:
        """Bytes delivered so far, direct and out of the page cache."""
        return self._bytes.snapshot()

    @property
    def refused(self) -> int:
        """Files that could be opened for direct reads but not read."""
        return len(self._refusals)

    def read_into(self, ops: Sequence[ReadOp], /) -> None:
        """Carry out every op; see `Reader`."""
        rows = columns(ops)
        check_files(rows, len(self._files.paths))
        require_aligned(rows, self.align, self._files.paths)
        self._bytes.add(DIRECT, self._threads.run(rows_of(ops), self._begin, threads=self._threads.most))

    def register(self, memory: memoryview, /) -> None:
        """Do nothing: preadv pins the pages of each destination anew."""

    def oldest(self) -> Pending | None:
        """Return the read that has run the longest; see `Reader`."""
        return self._threads.oldest(self._files.paths)

    def close(self) -> None:
        """Give back every descriptor and thread; idempotent."""
        self._threads.close()
        for cache in (self._files, self._cached):
            cache.forget_threads()  # none reads any more, though Ctrl-C may have kept one from saying so
            cache.close()

    def _begin(self) -> _DirectReads:
        return _DirectReads(self._files, self._cached, self.align, self._refusals, self._bytes)


class Refusals:
    """The files of a reader that opened for direct reads but refuse them; several threads may add."""

    def __init__(self, paths: Sequence[str]) -> None:
        """Start with none."""
        self._paths = paths
        self._files: set[int] = set()
        self._said: set[str] = set()
        self._lock = threading.Lock()

    def __contains__(self, file: int) -> bool:
        """Return whether a file refused a read."""
        return file in self._files

    def __len__(self) -> int:
        """Return how many files did."""
        return len(self._files)

    def add(self, file: int, offset: int, length: int, why: str) -> None:
        """Remember a file, and say so by logging if it is the first of its mount.

        Args:
            file: index of the file.
            offset: first byte of the span that was refused.
            length: bytes of the span.
            why: what the system answered.
        """
        path = self._paths[file]
        mount = mount_of(path)
        with self._lock:
            self._files.add(file)
            first = mount.point not in self._said
            self._said.add(mount.point)
        if first:
            _log.warning(
                "%s refuses direct reads of %d bytes at %d (%s); its file system is %s; the page cache serves it now",
                escape(path), length, offset, why, mount.file_system,
            )  # fmt: skip


class _DirectReads:
    """One thread's direct reads; a `Worker`."""

    __slots__ = ("_align", "_bytes", "_cached", "_direct", "_files", "_refusals")

    def __init__(
        self, files: DescriptorCache, cached: DescriptorCache, align: int, refusals: Refusals, count: ByteCounter
    ) -> None:
        self._files, self._align, self._refusals, self._bytes = files, align, refusals, count
        self._direct = Loan(files)
        self._cached = CachedReads(cached)

    def read(self, row: Row) -> int:
        """Return the bytes that arrived directly; those of the page cache are counted here."""
        need = row[2]
        done = 0 if row[0] in self._refusals else self._read_direct(row)
        if done < need:
            # Never hold one descriptor while waiting for another: two threads could wait for each other.
            self._direct.give_back()
            try:
                self._bytes.add(PAGE_CACHE, self._cached.read(row, done))
            finally:
                self._cached.end()
        return done

    def end(self) -> None:
        """Give the descriptor back."""
        self._direct.give_back()

    def _read_direct(self, row: Row) -> int:
        """Return the leading bytes that arrived: at least `need`, or whole blocks after which the file refused."""
        if not row[2]:
            return 0
        try:
            return self._fill(row)
        except ShardkitError as error:
            if error.errno != errno.ESTALE:
                raise
        self._direct.reopen(row[0])
        return self._fill(row)

    def _fill(self, row: Row) -> int:
        file, offset, need, dst = row
        number, done = self._borrow(file), 0
        try:
            while True:
                count = os.preadv(number, (dst[done:] if done else dst,), offset + done)
                if done + count >= need:
                    return done + count
                # A short count need not end at a block; what follows must start at one.
                whole = align_down(count, self._align)
                if not whole:
                    break
                done += whole
        except OSError as error:
            if error.errno != errno.EINVAL:
                path = self._files.paths[file]
                raise from_os_error(error, "cannot read a file", path=path, offset=offset + done) from error
            self._refusals.add(file, offset, len(dst), "EINVAL")
            return done
        if offset + done + count >= os.fstat(number).st_size:
            raise short_read(self._files, file, number, offset, need, done + count)
        self._refusals.add(file, offset, len(dst), f"it returned {count} bytes of {len(dst) - done}")
        return done

    def _borrow(self, file: int) -> int:
        try:
            return self._direct.number(file)
        except StorageError as error:
            if error.errno != errno.EINVAL:
                raise
            raise _no_direct(self._files.paths[file], "EINVAL at open") from error


def one_path_a_folder(paths: Sequence[str | os.PathLike[str]]) -> list[str]:
    """Return the first path of each folder; but for links and mounts on files, its neighbours share its file system."""
    first: dict[str, str] = {}
    for path in paths:
        name = os.fspath(path)
        first.setdefault(os.path.dirname(name), name)
    return list(first.values())


def require_direct(facts: PathFacts) -> int:
    """Return the alignment for direct reads of a file.

    Raises:
        CapabilityError: the file has none.
    """
    if facts.direct_refusal is not None:
        raise _no_direct(facts.path, f"{facts.direct_refusal} at open")
    if facts.direct_align == 0:
        raise _no_direct(facts.path, "statx says that the file has no direct reads")
    return facts.direct_align or DIRECT_ALIGN


def _no_direct(path: str, why: str) -> CapabilityError:
    return CapabilityError(
        "direct reads are not possible here",
        path=path,
        expected="a file system that opens files with O_DIRECT",
        found=f"{escape(mount_of(path).file_system)}: {why}",
        remedy="take io='buffered' or 'auto', or move the data set",
    )


def require_aligned(ops: OpColumns, align: int, paths: Sequence[str]) -> None:
    """Refuse an op that a direct read cannot serve.

    Args:
        ops: the batch.
        align: bytes; a power of two.
        paths: the reader's files.

    Raises:
        ConfigError: an offset, a length or an address is no multiple of `align`.
    """
    wrong = (((ops.offset | ops.length | ops.address) & (align - 1)) != 0) & (ops.length != 0)
    if wrong.any():
        at = int(wrong.argmax())
        raise ConfigError(
            "a direct read is not aligned",
            path=paths[int(ops.file[at])],
            offset=int(ops.offset[at]),
            expected=f"offset, length and address in multiples of {align}",
            found=f"length {int(ops.length[at])}, address {int(ops.address[at]):#x}",
        )
