"""Reads through the page cache: right on every file system, and what every other backend is compared with."""

from __future__ import annotations

import errno
import os
import threading
from typing import TYPE_CHECKING

from shardkit.errors import ConfigError, ShardkitError, from_os_error
from shardkit.storage.descriptors import DescriptorCache, default_max_open, short_read
from shardkit.storage.reader import HOST, PAGE_CACHE, MemorySpace, ReadOp
from shardkit.storage.threads import ReadThreads

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["DEFAULT_THREADS", "BufferedReader", "ByteCounter", "check_files", "read_cached"]

DEFAULT_THREADS = 8
"""Reading threads. With fewer a device behind the file system waits; cached data gains nothing from more."""


class BufferedReader:
    """A `Reader` that uses preadv(2) without flags: any offset, any length, any address."""

    space: MemorySpace = HOST
    align = 1

    def __init__(
        self,
        paths: Sequence[str | os.PathLike[str]],
        *,
        threads: int = DEFAULT_THREADS,
        max_open: int | None = None,
    ) -> None:
        """Open no file yet.

        Args:
            paths: the files, addressed by their index.
            threads: the most that read at the same time for one call.
            max_open: descriptors kept open; None asks `default_max_open`.

        Raises:
            ConfigError: `threads` or `max_open` is below 1.
        """
        self._files = DescriptorCache(paths, flags=0, max_open=default_max_open() if max_open is None else max_open)
        self._threads = ReadThreads(threads)
        self._bytes = ByteCounter(PAGE_CACHE)

    @property
    def counters(self) -> Mapping[str, int]:
        """Bytes delivered so far, all of them out of the page cache."""
        return self._bytes.snapshot()

    def read_into(self, ops: Sequence[ReadOp], /) -> None:
        """Carry out every op; see `Reader`."""
        check_files(ops, len(self._files.paths))
        self._bytes.add(PAGE_CACHE, self._threads.run(ops, self._read))

    def close(self) -> None:
        """Give back every descriptor and thread; idempotent."""
        if self._threads.close():
            self._files.close()

    def _read(self, op: ReadOp) -> int:
        return read_cached(self._files, op, 0)


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


def check_files(ops: Sequence[ReadOp], files: int) -> None:
    """Refuse an op whose file is not in the reader's list.

    Args:
        ops: the batch.
        files: how many files the reader has.

    Raises:
        ConfigError: there is one.
    """
    for op in ops:
        if not 0 <= op.file < files:
            raise ConfigError(
                "an op names a file that the reader was not given", expected=f"0..{files - 1}", found=op.file
            )


def read_cached(files: DescriptorCache, op: ReadOp, done: int) -> int:
    """Read the bytes of one op through the page cache, from byte `done` of its span on.

    Returns:
        How many bytes arrived; with `done` they make at least `op.need`.

    Raises:
        ShortReadError: the file ended before.
        StorageError: the system failed the open or the read.
        CapabilityError: the system forbids it.
    """
    if done >= op.need:
        return 0
    try:
        return _fill(files, op, done)
    except ShardkitError as error:
        if getattr(error, "errno", None) != errno.ESTALE:
            raise
    # The server replaced the file under its name. Once more by name: another size is an error of the cache then, and
    # another content of the same size is a matter of checksums, above this layer.
    files.discard(op.file)
    return _fill(files, op, done)


def _fill(files: DescriptorCache, op: ReadOp, start: int) -> int:
    done, dst, offset = start, op.dst, op.span.offset
    descriptor = files.borrow(op.file)
    try:
        while done < op.need:
            # preadv fills memory in place (pread would make a bytes object), and Python repeats it after a signal.
            count = os.preadv(descriptor.number, [dst[done:] if done else dst], offset + done)
            if count == 0:
                raise short_read(files, op.file, descriptor.number, offset, op.need, done)
            done += count
    except ShardkitError:
        raise
    except OSError as error:
        raise from_os_error(error, "cannot read a file", path=files.paths[op.file], offset=offset + done) from error
    finally:
        files.give_back(descriptor)
    return done - start
