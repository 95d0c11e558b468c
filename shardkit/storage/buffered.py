"""Reads through the page cache: right on every file system, and what every other backend is compared with."""

from __future__ import annotations

import errno
import os
import threading
from typing import TYPE_CHECKING

from shardkit.errors import ConfigError, ShardkitError, from_os_error
from shardkit.storage.descriptors import DescriptorCache, Loan, default_max_open, short_read
from shardkit.storage.reader import HOST, PAGE_CACHE, SPAN_BYTES, MemorySpace, Pending, ReadOp, columns
from shardkit.storage.residency import held_share
from shardkit.storage.threads import ReadThreads, Row, rows_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from shardkit.storage.reader import OpColumns

__all__ = ["DEFAULT_THREADS", "BufferedReader", "ByteCounter", "CachedReads", "check_files", "threads_for"]

DEFAULT_THREADS = 8
"""Reading threads. With fewer a device behind the file system waits."""

_FROM_MEMORY = 0.9
"""From this share on a call counts as one from memory: too few threads cost more than too many."""
_ASK_EVERY = 32
"""Of so many ops of a thread one is asked about: an answer costs a tenth of a cached op."""


class BufferedReader:
    """A `Reader` that uses preadv(2) without flags: any offset, any length, any address.

    Each call looks at some of its ops before they are read, and so tells the next one how many threads are worth
    having: see `threads_for`.
    """

    space: MemorySpace = HOST
    align = 1
    span_bytes = SPAN_BYTES

    def __init__(
        self,
        paths: Sequence[str | os.PathLike[str]],
        *,
        threads: int = DEFAULT_THREADS,
        max_open: int | None = None,
        random: bool = True,
    ) -> None:
        """Open no file yet.

        Args:
            paths: the files, addressed by their index.
            threads: the most that read at the same time for one call.
            max_open: descriptors kept open; None asks `default_max_open`.
            random: whether reads are scattered; the kernel then reads nothing ahead of them.

        Raises:
            ConfigError: `threads` or `max_open` is below 1.
        """
        limit = default_max_open() if max_open is None else max_open
        advice = os.POSIX_FADV_RANDOM if random else os.POSIX_FADV_SEQUENTIAL
        self._files = DescriptorCache(paths, flags=0, max_open=limit, advice=advice)
        self._threads = ReadThreads(threads)
        self._next_threads = threads
        self._bytes = ByteCounter(PAGE_CACHE)

    @property
    def counters(self) -> Mapping[str, int]:
        """Bytes delivered so far, all of them out of the page cache."""
        return self._bytes.snapshot()

    def read_into(self, ops: Sequence[ReadOp], /) -> None:
        """Carry out every op; see `Reader`."""
        check_files(columns(ops), len(self._files.paths))
        shares = list[float]()
        threads, begin = self._next_threads, lambda: CachedReads(self._files, shares)
        self._bytes.add(PAGE_CACHE, self._threads.run(rows_of(ops), begin, threads=threads))
        self._next_threads = threads_for(shares, most=self._threads.most, processors=len(os.sched_getaffinity(0)))

    def register(self, memory: memoryview, /) -> None:
        """Do nothing: the kernel copies to any address alike."""

    def oldest(self) -> Pending | None:
        """Return the read that has run the longest; see `Reader`."""
        return self._threads.oldest(self._files.paths)

    def close(self) -> None:
        """Give back every descriptor and thread; idempotent."""
        self._threads.close()
        self._files.forget_threads()  # none reads any more, though Ctrl-C may have kept one from saying so
        self._files.close()


def threads_for(shares: Sequence[float], *, most: int, processors: int) -> int:
    """Return how many threads the next call gets, from what the page cache held of the last one.

    What is in memory is copied, by no more threads than there are processors: others would only take the interpreter's
    lock from each other. (On two processors 8 threads give 0.7 to 0.85 of what 2 give.) For a device all of them wait.

    Args:
        shares: of some ops, 0 to 1; none when nothing told.
        most: threads that a call may have.
        processors: that this process may use.
    """
    cached = bool(shares) and sum(shares) >= _FROM_MEMORY * len(shares)
    return min(most, max(processors, 2)) if cached else most


class ByteCounter:
    """Bytes by the path that they took; several threads may add."""

    def __init__(self, *names: str) -> None:
        """Start each name at 0."""
        self._bytes = dict.fromkeys(names, 0)
        self._lock = threading.Lock()

    def add(self, name: str, count: int) -> None:
        """Count bytes of one path."""
        with self._lock:
            self._bytes[name] += count

    def snapshot(self) -> dict[str, int]:
        """Return the numbers of this moment."""
        with self._lock:
            return dict(self._bytes)


def check_files(ops: OpColumns, files: int) -> None:
    """Refuse an op whose file is not in the reader's list.

    Args:
        ops: the batch.
        files: how many files the reader has.

    Raises:
        ConfigError: there is one.
    """
    wrong = (ops.file < 0) | (ops.file >= files)
    if wrong.any():
        found, expected = int(ops.file[wrong][0]), f"0..{files - 1}"
        raise ConfigError("an op names a file that the reader was not given", expected=expected, found=found)


class CachedReads:
    """One thread's reads through the page cache; a `Worker`."""

    __slots__ = ("_files", "_loan", "_shares", "_until_asked")

    def __init__(self, files: DescriptorCache, shares: list[float] | None = None) -> None:
        """Open nothing yet.

        Args:
            files: where descriptors come from.
            shares: gets, for the first and then for some ops, how much of them was cached.
        """
        self._files = files
        self._loan = Loan(files)
        self._shares, self._until_asked = shares, 0

    def read(self, row: Row, done: int = 0) -> int:
        """Read the bytes of one op, from byte `done` of its span on.

        Returns:
            How many bytes arrived; with `done` they make at least the op's `need`.

        Raises:
            ShortReadError: the file ended before.
            StorageError: the system failed the open or the read, or does not allow it.
        """
        if done >= row[2]:
            return 0
        try:
            return self._fill(row, done)
        except ShardkitError as error:
            if error.errno != errno.ESTALE:
                raise
        # The server replaced the file under its name. Once more by name: another file is an error of the cache then.
        self._loan.reopen(row[0])
        return self._fill(row, done)

    def end(self) -> None:
        """Give the descriptor back."""
        self._loan.give_back()

    def _fill(self, row: Row, start: int) -> int:
        file, offset, need, dst = row
        number, done = self._loan.number(file), start
        if self._shares is not None:
            self._look(self._shares, number, offset, need)
        try:
            while True:
                # preadv fills memory in place (pread would make a bytes object); Python repeats it after a signal.
                count = os.preadv(number, (dst[done:] if done else dst,), offset + done)
                done += count
                if done >= need:
                    return done - start
                if not count:
                    break
        except OSError as error:
            path = self._files.paths[file]
            raise from_os_error(error, "cannot read a file", path=path, offset=offset + done) from error
        raise short_read(self._files, file, number, offset, need, done)

    def _look(self, shares: list[float], number: int, offset: int, need: int) -> None:
        if self._until_asked:
            self._until_asked -= 1
            return
        self._until_asked = _ASK_EVERY - 1
        share = held_share(number, offset, need)
        if share is not None:
            shares.append(share)
