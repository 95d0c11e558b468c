"""Reads past the page cache, with O_DIRECT: from the device into the caller's memory without a copy."""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import threading
from typing import TYPE_CHECKING

from shardkit.errors import CapabilityError, ConfigError, ShardkitError, StorageError, from_os_error
from shardkit.escaping import escape
from shardkit.extent import DIRECT_ALIGN, align_down
from shardkit.storage.buffered import DEFAULT_THREADS, ByteCounter, check_files, read_cached
from shardkit.storage.descriptors import Descriptor, DescriptorCache, default_max_open, short_read
from shardkit.storage.probe import PathFacts, mount_of, probe
from shardkit.storage.reader import DIRECT, HOST, PAGE_CACHE, MemorySpace, ReadOp
from shardkit.storage.threads import ReadThreads

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["DirectReader", "one_path_a_folder", "require_direct"]

_log = logging.getLogger(__name__)


class DirectReader:
    """A `Reader` that uses preadv(2) on files opened with O_DIRECT.

    A file that was opened but refuses the read itself (EINVAL: its device wants another alignment than the others'),
    or that keeps returning less than a block, is read through the page cache from then on: `counters` shows the
    bytes, `refused` the number of such files, and the first one is logged.
    """

    space: MemorySpace = HOST

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
        self._refused: set[int] = set()
        self._lock = threading.Lock()

    @property
    def counters(self) -> Mapping[str, int]:
        """Bytes delivered so far, direct and out of the page cache."""
        return self._bytes.snapshot()

    @property
    def refused(self) -> int:
        """Files that could be opened for direct reads but not read."""
        return len(self._refused)

    def read_into(self, ops: Sequence[ReadOp], /) -> None:
        """Carry out every op; see `Reader`."""
        check_files(ops, len(self._files.paths))
        for op in ops:
            _require_aligned(op, self.align, self._files.paths[op.file])
        self._bytes.add(DIRECT, self._threads.run(ops, self._read))

    def close(self) -> None:
        """Give back every descriptor and thread; idempotent."""
        if self._threads.close():
            self._files.close()
            self._cached.close()

    def _read(self, op: ReadOp) -> int:
        done = 0 if op.file in self._refused else self._read_direct(op)
        if done < op.need:
            self._bytes.add(PAGE_CACHE, read_cached(self._cached, op, done))
        return done

    def _read_direct(self, op: ReadOp) -> int:
        """Return the leading bytes that arrived: at least `need`, or whole blocks after which the file refused."""
        if not op.need:
            return 0
        try:
            return self._fill(op)
        except ShardkitError as error:
            if getattr(error, "errno", None) != errno.ESTALE:
                raise
        self._files.discard(op.file)
        return self._fill(op)

    def _fill(self, op: ReadOp) -> int:
        done, dst, offset, path = 0, op.dst, op.span.offset, self._files.paths[op.file]
        descriptor = self._borrow(op.file)
        try:
            while done < op.need:
                count = os.preadv(descriptor.number, [dst[done:] if done else dst], offset + done)
                if done + count >= op.need:
                    return done + count
                # A short count need not end at a block; what follows must start at one.
                if align_down(count, self.align) == 0:
                    if offset + done + count >= os.fstat(descriptor.number).st_size:
                        raise short_read(self._files, op.file, descriptor.number, offset, op.need, done + count)
                    self._refuse(op, f"it returned {count} bytes of {len(dst) - done}")
                    return done
                done += align_down(count, self.align)
        except ShardkitError:
            raise
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise from_os_error(error, "cannot read a file", path=path, offset=offset + done) from error
            self._refuse(op, "EINVAL")
        finally:
            self._files.give_back(descriptor)
        return done

    def _borrow(self, file: int) -> Descriptor:
        try:
            return self._files.borrow(file)
        except StorageError as error:
            if error.errno != errno.EINVAL:
                raise
            raise _no_direct(self._files.paths[file], "EINVAL at open") from error

    def _refuse(self, op: ReadOp, why: str) -> None:
        with self._lock:
            first = not self._refused
            self._refused.add(op.file)
        if first:
            path = self._files.paths[op.file]
            _log.warning(
                "%s refuses direct reads of %d bytes at %d (%s); its file system is %s; the page cache serves it now",
                escape(path), op.span.length, op.span.offset, why, mount_of(path).file_system,
            )  # fmt: skip


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


def _require_aligned(op: ReadOp, align: int, path: str) -> None:
    if not op.span.length:
        return
    address = ctypes.addressof(ctypes.c_char.from_buffer(op.dst))
    if (op.span.offset | op.span.length | address) & (align - 1):
        raise ConfigError(
            "a direct read is not aligned",
            path=path,
            offset=op.span.offset,
            expected=f"offset, length and address in multiples of {align}",
            found=f"length {op.span.length}, address {address:#x}",
        )
