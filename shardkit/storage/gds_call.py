"""One call of `GdsReader.read_into`: what is started, what is waited for, and what is done when cuFile fails."""

from __future__ import annotations

import errno
import logging
import os
from dataclasses import dataclass, field
from time import monotonic
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from shardkit.errors import ShardkitError, from_os_error
from shardkit.extent import DIRECT_ALIGN, align_down, align_up
from shardkit.storage.buffered import CachedReads
from shardkit.storage.descriptors import Descriptor, short_read
from shardkit.storage.gds_batch import BatchReads, BatchRefusedError
from shardkit.storage.gds_facts import COMPAT, delivered_by
from shardkit.storage.gds_library import Span
from shardkit.storage.reader import PAGE_CACHE, address_of

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

    from shardkit.storage.device import Device
    from shardkit.storage.gds_batch import Batches
    from shardkit.storage.gds_files import GdsFiles, OpenFile
    from shardkit.storage.gds_library import GdsFuture, GdsLibrary
    from shardkit.storage.reader import OpColumns

    _Ints: TypeAlias = npt.NDArray[np.int64]

__all__ = ["MANY", "SMALL_BYTES", "TASK_BYTES", "GdsCall", "Shared", "for_batches", "task_bytes"]

TASK_BYTES = 4 << 20
"""What one thread of KvikIO's reads at most at a time; 1 MiB gives less than half of the speed (H200, warm files)."""
SMALL_BYTES = 256 << 10
"""Reads below this go by batches, where a call has many."""
MANY = 16
"""So many; below, threads are as fast and need no setting up."""

_OF_THE_FILE = {errno.EIO, errno.EACCES, errno.EPERM, errno.ENODATA, errno.EBADMSG, errno.EUCLEAN, errno.ETIMEDOUT}
"""What the storage said about the data, which another way to read them would only ask once more."""
_PASSING = {errno.EINTR, errno.EAGAIN, errno.ESTALE, errno.ENOMEM, errno.EMFILE, errno.ENFILE}
"""What says nothing about the next read."""
_ANY = 1
"""Of a batch: that a read failed, and not EPERM."""
_UNKNOWN = 1 << 62

_log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True, eq=False)
class Shared:
    """What the calls of a reader share."""

    files: GdsFiles
    library: GdsLibrary
    device: Device
    count: Callable[[str, int], None]
    """Adds bytes that arrived to those of one way."""
    registered: list[tuple[int, int]]
    """Start and end of registered memory."""
    batches: Batches | None
    """Of the library; None where there are none, or they were refused."""

    def refuse_batches(self, why: str) -> None:
        """Do without batches from now on, and say so by logging."""
        if self.batches is not None:
            self.batches = None
            _log.warning("batches of cuFile are not used: %s; KvikIO's threads read small spans, too", why)


@dataclass(slots=True, eq=False)
class _Held:
    """A file that this call has borrowed."""

    entry: Descriptor
    size: int
    """Bytes of the file now."""
    opened: OpenFile | None
    """None: it is read through host memory."""


@dataclass(slots=True, eq=False)
class _Flying:
    """A read that was started."""

    op: int
    opened: OpenFile
    future: GdsFuture
    length: int
    since: float


def for_batches(length: _Ints, need: _Ints, *, has_batches: bool) -> npt.NDArray[np.bool_]:
    """Return which of N ops go by batches: the small ones, where there are many.

    Args:
        length: [N] bytes of each span.
        need: [N] bytes that must arrive; what needs none is not read.
        has_batches: there are batches.

    Returns:
        [N] booleans.
    """
    small = (length < SMALL_BYTES) & (need > 0)
    return small if has_batches and np.count_nonzero(small) >= MANY else np.zeros(len(length), np.bool_)


def task_bytes(length: int) -> int:
    """Return what each thread reads of one op: as few equal parts as can be, so that none is a short rest.

    Args:
        length: bytes of the op.

    >>> task_bytes(4 << 20), task_bytes((4 << 20) + 1)
    (4194304, 2101248)
    """
    parts = max(-(-length // TASK_BYTES), 1)
    return max(align_up(-(-length // parts), DIRECT_ALIGN), DIRECT_ALIGN)


@dataclass(slots=True, eq=False)
class GdsCall:
    """The ops of one call. Run by one thread, in which no signal is handled; ops are numbered from 0."""

    rows: OpColumns
    shared: Shared
    over: bool = False
    """The call has returned or raised."""
    stopped: bool = False
    waits: tuple[int, float] | None = None
    """The op that is waited for, and since when it is under way; set as a whole, so it is read without a lock."""
    failed: list[tuple[int, Exception]] = field(default_factory=list)
    _held: dict[int, _Held] = field(default_factory=dict)
    _flying: list[_Flying] = field(default_factory=list)
    _later: list[tuple[int, str | None]] = field(default_factory=list)
    """Ops for host memory, and why their file is refused from now on; None when it is not, or is already."""

    def stop(self) -> None:
        """Start nothing more."""
        self.stopped = True

    def run(self) -> None:
        """Carry out every op; nothing is under way afterwards, and `failed` has what went wrong."""
        with self.shared.library.current():
            self._carry_out()

    def _carry_out(self) -> None:
        wanted = np.flatnonzero((self.rows.length > 0) & (self.rows.need > 0))
        by_batch = for_batches(self.rows.length, self.rows.need, has_batches=self.shared.batches is not None)
        try:
            done = self._read_batches(np.flatnonzero(by_batch))
            for op in wanted[~np.isin(wanted, done)].tolist():
                if self.stopped or self._is_settled(op):
                    break
                self._start(op)
        finally:
            self._collect()
        for op, why in sorted(self._later, key=lambda entry: entry[0]):
            if not self.stopped and not self._is_settled(op):
                self._read_on_host(op, why)

    def _is_settled(self, op: int) -> bool:
        """Return whether an op before this one has failed, so that nobody asks for it."""
        return any(number < op for number, _ in self.failed)

    # By KvikIO

    def _start(self, op: int) -> None:
        file, offset, need = (int(column[op]) for column in (self.rows.file, self.rows.offset, self.rows.need))
        self.waits = (op, monotonic())
        try:
            held = self._hold(file)
            if held.size < offset + need:
                self._require(held.entry.number, op)
        except ShardkitError as error:
            self.failed.append((op, error))
            return
        if held.opened is None:
            self._later.append((op, None))
            return
        length = min(int(self.rows.length[op]), held.size - offset)
        place = Span(int(self.rows.address[op]), length)
        try:
            future = held.opened.file.pread(place, length, offset, task_bytes(length))
        except Exception as error:  # a short read is carried out at once, and fails at once
            self._meet(op, error)
            return
        read = _Flying(op, held.opened, future, length, monotonic())
        if length < self.shared.library.threshold:
            self._finish(read)
        else:
            self._flying.append(read)

    def _hold(self, file: int) -> _Held:
        held = self._held.get(file)
        if held is None:
            entry = self.shared.files.cache.try_borrow(file)
            if entry is None:
                self._collect()  # first: two calls that each hold what the other waits for would wait for ever
                entry = self.shared.files.cache.borrow(file)
            held = self._hold_entry(file, entry)
        return held

    def _hold_entry(self, file: int, entry: Descriptor) -> _Held:
        held = self._held[file] = _Held(entry, -1, None)
        try:
            held.size = os.fstat(entry.number).st_size
        except OSError as error:
            if error.errno != errno.ESTALE:
                raise from_os_error(error, "cannot look at a file", path=self.shared.files.cache.paths[file]) from error
            held.size = _UNKNOWN  # host memory's way opens it anew
            return held
        if not self.shared.files.is_refused(file):
            try:
                held.opened = self.shared.files.of(file, entry)
            except Exception as error:
                cause = self.shared.library.cause(error)
                if cause.errno not in _PASSING:
                    self.shared.files.refuse(file, cause.text)
        return held

    def _collect(self) -> None:
        """Wait for everything that is under way, and give every file back."""
        for read in self._flying:
            self.waits = (read.op, read.since)
            self._finish(read)
        self._flying, self.waits = [], None
        self._give_back()

    def _finish(self, read: _Flying) -> None:
        """Wait for one read."""
        try:
            arrived = read.future.get()
        except Exception as error:
            self._meet(read.op, error)
            return
        if arrived < int(self.rows.need[read.op]):
            self._meet(read.op, OSError(f"it returned {arrived} bytes of {read.length}"))
        else:
            self._count(read.opened, arrived)

    def _give_back(self) -> None:
        held, self._held = self._held, {}
        for one in held.values():
            self.shared.files.cache.give_back(one.entry)

    def _count(self, opened: OpenFile, arrived: int) -> None:
        library = self.shared.library
        pages, rest = delivered_by(
            opened.mode, arrived, threshold=library.threshold, has_direct=opened.has_direct,
            goes_direct=library.goes_direct,
        )  # fmt: skip
        whole = align_down(arrived, DIRECT_ALIGN)
        self.shared.count(pages, whole)
        self.shared.count(rest, arrived - whole)

    # By batches

    def _read_batches(self, ops: _Ints) -> _Ints:
        """Return those of the ops whose bytes have arrived; nothing is said about the others."""
        batches, done = self.shared.batches, [np.zeros(0, np.int64)]
        if batches is None:
            return done[0]
        try:
            for start in range(0, len(ops), batches.most):
                if self.stopped or self.failed:
                    break
                done.append(self._read_batch(batches, ops[start : start + batches.most]))
        except BatchRefusedError as error:
            self.shared.refuse_batches(str(error))
        finally:
            self._give_back()
        return np.concatenate(done)

    def _read_batch(self, batches: Batches, ops: _Ints) -> _Ints:
        rows = self.rows
        files, which = np.unique(rows.file[ops], return_inverse=True)
        known = [self._known_to_batches(file) for file in files.tolist()]
        handle, size = np.asarray(known, np.int64).reshape(-1, 2).T
        fit = (handle[which] != 0) & (rows.offset[ops] + rows.need[ops] <= size[which])
        ops, which = ops[fit], which[fit]
        if not len(ops):
            return ops[:0]
        base = _bases(rows.address[ops], rows.length[ops], self.shared.registered)
        reads = BatchReads(
            handle=handle[which], offset=rows.offset[ops],
            length=np.minimum(rows.length[ops], size[which] - rows.offset[ops]),
            base=base, start=rows.address[ops] - base,
        )  # fmt: skip
        self.waits = (int(ops[0]), monotonic())
        arrived = batches.read(reads)
        well = arrived >= rows.need[ops]
        for op, said in zip(ops[~well].tolist(), (-arrived[~well]).tolist(), strict=True):
            if said in _OF_THE_FILE and said != _ANY:
                self._fail(op, said)
            elif said == errno.ESTALE:
                self.shared.files.cache.discard(int(rows.file[op]))
        for file, total in zip(*_sums(rows.file[ops][well], arrived[well]), strict=True):
            opened = self._held[file].opened
            mode = COMPAT if opened is None else opened.mode
            self.shared.count(delivered_by(mode, total, threshold=0, has_direct=True, goes_direct=False)[0], total)
        return ops[well]

    def _known_to_batches(self, file: int) -> tuple[int, int]:
        """Return handle and size of a file; no handle for one that cannot be had at once: it is read otherwise."""
        try:
            held = self._held.get(file)
            if held is None:
                entry = self.shared.files.cache.try_borrow(file)
                if entry is None:
                    return 0, 0
                held = self._hold_entry(file, entry)
        except ShardkitError:  # it is met again, in the order of the ops
            return 0, 0
        if held.opened is None:
            return 0, 0
        return self.shared.files.batch_handle(held.entry, held.opened), held.size

    # When something fails

    def _meet(self, op: int, error: Exception) -> None:
        """Decide what becomes of an op whose read failed: an error, or another way."""
        file, cause = int(self.rows.file[op]), self.shared.library.cause(error)
        try:
            self._require(self._held[file].entry.number, op)
        except ShardkitError as short:
            self.failed.append((op, short))
            return
        if cause.errno in _OF_THE_FILE:
            self._fail(op, cause.errno or 0)
            return
        if cause.errno == errno.ESTALE:
            self.shared.files.cache.discard(file)  # who reads it next opens it by name
        self._later.append((op, None if cause.errno in _PASSING else cause.text))

    def _fail(self, op: int, number: int) -> None:
        """Take an error number of the system as what became of an op."""
        path, offset = self.shared.files.cache.paths[int(self.rows.file[op])], int(self.rows.offset[op])
        said = OSError(number, os.strerror(number))
        self.failed.append((op, from_os_error(said, "cannot read a file", path=path, offset=offset)))

    def _require(self, descriptor: int, op: int) -> None:
        """Raise when the file is too short now."""
        file, offset, need = (int(column[op]) for column in (self.rows.file, self.rows.offset, self.rows.need))
        cache = self.shared.files.cache
        try:
            size = os.fstat(descriptor).st_size
        except OSError as error:
            if error.errno == errno.ESTALE:
                return  # it is opened anew
            raise from_os_error(error, "cannot look at a file", path=cache.paths[file], offset=offset) from error
        if size < offset + need:
            raise short_read(cache, file, descriptor, offset, need, max(size - offset, 0))

    def _read_on_host(self, op: int, why: str | None) -> None:
        """Read an op into host memory and copy it up; a file on which cuFile fails, but this does not, is refused."""
        file, offset, need, address = (
            int(column[op]) for column in (self.rows.file, self.rows.offset, self.rows.need, self.rows.address)
        )  # fmt: skip
        self.waits = (op, monotonic())
        reads, memory = CachedReads(self.shared.files.cache), memoryview(bytearray(need))
        try:
            arrived = reads.read((file, offset, need, memory))
            stream = self.shared.device.stream()
            stream.upload(address, address_of(memory), need)
            stream.synchronize()
        except Exception as error:
            self.failed.append((op, error))
            return
        finally:
            reads.end()
            self.waits = None
        self.shared.count(PAGE_CACHE, arrived)
        if why is not None and not self.shared.files.is_refused(file):
            self.shared.files.refuse(file, why)


def _bases(address: _Ints, length: _Ints, registered: list[tuple[int, int]]) -> _Ints:
    """Return for each destination where its registered memory starts, or its own address when it lies in none."""
    base = address.copy()
    for start, end in registered:
        base[(address >= start) & (address + length <= end)] = start
    return base


def _sums(file: _Ints, arrived: _Ints) -> tuple[list[int], list[int]]:
    files, which = np.unique(file, return_inverse=True)
    return files.tolist(), np.bincount(which, weights=arrived, minlength=len(files)).astype(np.int64).tolist()
