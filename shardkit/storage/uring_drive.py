"""Drives the ops of one call through a ring: what goes in next, and what becomes of every result."""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass, field
from time import monotonic, sleep
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from shardkit.errors import ShardkitError, from_os_error
from shardkit.extent import align_down
from shardkit.storage.descriptors import DescriptorCache, short_read
from shardkit.storage.direct import Refusals, require_direct
from shardkit.storage.probe import mount_of, probe
from shardkit.storage.uring_causes import require_fit

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from shardkit.storage.descriptors import Descriptor
    from shardkit.storage.reader import OpColumns, ReadOp
    from shardkit.storage.uring_ring import Ring

    _Ints: TypeAlias = npt.NDArray[np.int64]

__all__ = ["Call", "Drive", "Sources"]

_UNKNOWN, _FAILED = -1, -2
_MOST = 1 << 30  # bytes of one request, whose length field has 32 bits
_MOST_TRIES = 1000
_PAUSE_S = 0.001
_NONE = np.empty(0, np.int64)


@dataclass(frozen=True, slots=True)
class Sources:
    """Where the bytes of a reader come from: route 0 is direct, route 1 the page cache."""

    caches: tuple[DescriptorCache, DescriptorCache]
    """By route."""
    align: int
    """Bytes; what a direct read goes on at after a short one."""
    refusals: Refusals
    """Files that take route 1."""
    fit: set[int] = field(default_factory=set)
    """Devices whose file systems io_uring reads right."""

    def require_fit(self, descriptor: int, path: str) -> None:
        """Refuse an open file of a file system that io_uring reads wrongly.

        Raises:
            CapabilityError: it is on one.
        """
        device = os.fstat(descriptor).st_dev
        if device not in self.fit:
            require_fit(mount_of(path), path)
            self.fit.add(device)


class Call:
    """The ops of one `read_into`, handed out in order."""

    # What was handed out is carried out: when op k has failed, every op before it is done or in flight, and those go
    # on. So the smallest k in the end is the first failure, whatever the timing was.

    def __init__(self, ops: Sequence[ReadOp], rows: OpColumns, refusals: Refusals, *, direct: bool = True) -> None:
        """Hold on to the ops, and so to the caller's memory, until `end`.

        Args:
            ops: the batch.
            rows: the same as columns.
            refusals: files to send through the page cache.
            direct: without it all files go that way.
        """
        self.ops: Sequence[ReadOp] | None = ops
        self.rows = rows
        self.files, which = np.unique(rows.file, return_inverse=True)
        size = len(rows.file)
        self.source = which  # files, and then the same through the page cache
        self.done = np.zeros(size, np.int64)
        self.since = np.full(size, np.inf)  # when it was handed out; infinite while nothing is done about an op
        self.tries = np.zeros(size, np.int32)
        self.stale = np.zeros(size, np.bool_)
        if not direct or len(refusals):
            refused = np.array([not direct or int(file) in refusals for file in self.files], np.int64)
            self.source = which + len(self.files) * refused[which]
        self.todo = np.flatnonzero(rows.need > 0)
        self.over = False
        """Set when the call has returned or raised."""
        self.first_failed = size
        self._error: ShardkitError | None = None
        self._next = 0

    @property
    def more(self) -> bool:
        """Whether there are ops that were not taken."""
        return self._next < len(self.todo)

    def route_and_file(self, op: int) -> tuple[int, int]:
        """Return the route that an op takes, and its file."""
        route, which = divmod(int(self.source[op]), len(self.files))
        return route, int(self.files[which])

    def take(self, most: int) -> _Ints:
        """Return the numbers of the next ops, none when all are taken or one has failed."""
        start = self._next
        self._next = min(start + most, len(self.todo))
        return self.todo[start : self._next]

    def fail(self, op: int, error: ShardkitError) -> None:
        """Note that an op has failed, and hand out nothing more."""
        self._next = len(self.todo)
        if op < self.first_failed:
            self.first_failed, self._error = op, error

    def end(self) -> ShardkitError | None:
        """Let go of the memory and of the first error, which is returned."""
        error, self._error, self.ops = self._error, None, None
        return error

    def oldest(self) -> tuple[int, float] | None:
        """Return the op that was handed out first of those in progress, and when; from any thread."""
        op = int(self.since.argmin()) if len(self.since) else 0
        since = float(self.since[op]) if len(self.since) else np.inf
        return (op, since) if since != np.inf else None


class Drive:
    """Carries out a call, in the calling thread."""

    def __init__(self, call: Call, ring: Ring, sources: Sources) -> None:
        """Take a ring that is at rest."""
        self._call, self._ring, self._sources = call, ring, sources
        self._numbers = np.full(2 * len(call.files), _UNKNOWN, np.int64)  # by source: the descriptor
        self._places = np.full(2 * len(call.files), -1, np.int64)  # and where the ring knows it
        self._loans: list[tuple[DescriptorCache, Descriptor]] = []
        self._again = _NONE
        self.arrived = [0, 0]
        """Bytes that came, by route."""

    def run(self) -> None:
        """Carry out ops until none is left. When it returns or raises, the kernel works on none of them.

        Raises:
            BaseException: what is no failure of an op, such as Ctrl-C.
        """
        ring = self._ring
        try:
            ring.holds = self._call.ops
            while self._step():
                pass
            ring.holds = None
        except BaseException:
            ring.come_to_rest()
            ring.holds = None
            raise
        finally:
            self._give_back()

    def _step(self) -> bool:
        ring, call = self._ring, self._call
        take = self._next(ring.depth - ring.in_flight)
        if len(take):
            self._submit(take)
        flying = ring.in_flight
        if flying:
            # Waiting for some at once costs less than waking up for each, and leaves the device enough to do.
            more = call.more or len(self._again)
            ring.enter(min(flying, max(1, ring.depth // 4)) if more else flying)
            self._collect(*ring.reap())
        elif len(self._again):
            self._give_back()  # with empty hands, this thread may wait for descriptors
        return bool(len(take) or flying or len(self._again))

    def _next(self, room: int) -> _Ints:
        if not len(self._again):
            return self._call.take(room)
        again = self._again[self._again < self._call.first_failed]
        take, self._again = again[:room], again[room:]
        return np.concatenate((take, self._call.take(room - len(take))))

    def _submit(self, take: _Ints) -> None:
        call, rows = self._call, self._call.rows
        call.since[take] = monotonic()
        ready = self._open(take)
        if not len(ready):
            return
        source, done = call.source[ready], call.done[ready]
        self._ring.put(
            ready,
            self._numbers[source],
            self._places[source],
            rows.offset[ready] + done,
            rows.address[ready] + done,
            np.minimum(rows.length[ready] - done, _MOST),
        )

    def _open(self, take: _Ints) -> _Ints:
        """Open the files of some ops; return the ops whose files are open, and put off those that have to wait."""
        source = self._call.source[take]
        if self._numbers[source].min() >= 0:
            return take
        for op, at in zip(take.tolist(), source.tolist(), strict=True):
            if self._numbers[at] == _UNKNOWN and not self._borrow(op):
                break
        state = self._numbers[source]
        self._call.since[take[state < 0]] = np.inf
        self._again = np.concatenate((self._again, take[state == _UNKNOWN]))
        return take[state >= 0]

    def _borrow(self, op: int) -> bool:
        """Open the file of an op, or note why that fails; False when it would have to wait for other threads."""
        source, (route, file) = int(self._call.source[op]), self._call.route_and_file(op)
        cache = self._sources.caches[route]
        try:
            # Whoever waits for a descriptor while holding one could wait for ever.
            entry = cache.try_borrow(file) if self._loans or self._ring.in_flight else cache.borrow(file)
            if entry is None:
                return False
            self._loans.append((cache, entry))
            self._sources.require_fit(entry.number, cache.paths[file])
        except ShardkitError as error:
            if error.errno == errno.ESTALE and not self._call.stale[op]:
                self._call.stale[op] = True
                return self._borrow(op)
            self._numbers[source] = _FAILED
            self._call.fail(op, self._explain(error, route, cache.paths[file]))
            return True
        self._places[source] = self._ring.place_of(entry.number)
        self._numbers[source] = entry.number
        return True

    def _explain(self, error: ShardkitError, route: int, path: str) -> ShardkitError:
        if error.errno == errno.EINVAL and route == 0:
            try:
                require_direct(probe(path))
            except ShardkitError as better:
                return better
        return error

    def _collect(self, ops: _Ints, result: _Ints) -> None:
        call = self._call
        call.since[ops] = np.inf
        whole = result >= call.rows.need[ops] - call.done[ops]
        cached = call.source[ops] >= len(call.files)
        came, through = int(result.sum(where=whole)), int(result.sum(where=whole & cached))
        self.arrived[0] += came - through
        self.arrived[1] += through
        if whole.all():
            return
        for op, number in zip(ops[~whole].tolist(), result[~whole].tolist(), strict=True):
            self._look_into(op, number)

    def _look_into(self, op: int, result: int) -> None:
        """Decide about an op that is not done yet: go on, another way, or fail."""
        call, (route, file) = self._call, self._call.route_and_file(op)
        call.tries[op] += 1
        again = call.tries[op] < _MOST_TRIES
        if result >= 0:
            self._go_on(op, result)
        elif -result in {errno.EAGAIN, errno.EINTR} and again:
            sleep(_PAUSE_S)
            self._repeat(op)
        elif result == -errno.ESTALE and not call.stale[op]:
            # The server replaced the file under its name: once more by name.
            call.stale[op] = True
            self._sources.caches[route].discard(file)
            self._numbers[call.source[op]] = _UNKNOWN
            self._repeat(op)
        elif result == -errno.EINVAL and route == 0:
            self._refuse(op, "EINVAL")
        else:
            offset = int(call.rows.offset[op] + call.done[op])
            error = OSError(-result, os.strerror(-result))
            path = self._sources.caches[route].paths[file]
            call.fail(op, from_os_error(error, "cannot read a file", path=path, offset=offset))

    def _go_on(self, op: int, count: int) -> None:
        call, (route, file) = self._call, self._call.route_and_file(op)
        number, done = int(self._numbers[call.source[op]]), int(call.done[op])
        # A short count need not end at a block; what follows must start at one.
        whole = align_down(count, self._sources.align if route == 0 else 1)
        if whole:
            call.done[op] += whole
            self.arrived[route] += whole
            self._repeat(op)
            return
        if number < 0:  # the file is being opened anew for another op
            self._repeat(op)
            return
        offset, need = int(call.rows.offset[op]), int(call.rows.need[op])
        if route == 1 or offset + done + count >= os.fstat(number).st_size:
            cache = self._sources.caches[route]
            call.fail(op, short_read(cache, file, number, offset, need, done + count))
        else:
            self._refuse(op, f"it returned {count} bytes of {int(call.rows.length[op]) - done}")

    def _refuse(self, op: int, why: str) -> None:
        rows = self._call.rows
        self._sources.refusals.add(int(rows.file[op]), int(rows.offset[op]), int(rows.length[op]), why)
        self._call.source[op] += len(self._call.files)
        self._repeat(op)

    def _repeat(self, op: int) -> None:
        self._again = np.append(self._again, op)

    def _give_back(self) -> None:
        """End every loan; requests in flight need none, but those that the kernel has not seen yet would."""
        self._numbers[self._numbers >= 0] = _UNKNOWN
        while self._loans:
            cache, entry = self._loans.pop()
            cache.give_back(entry)
