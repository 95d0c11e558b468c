"""The rings of a reader: made when they are needed, lent to one thread at a time, each with the same memory."""

from __future__ import annotations

import logging
import os
import platform
import threading

import numpy as np

from shardkit.errors import CapabilityError
from shardkit.storage.uring_causes import OTHERWISE, no_uring, not_registered
from shardkit.storage.uring_ring import Ring

__all__ = ["RingLease", "RingPool"]

_log = logging.getLogger(__name__)
_POLL_S = 0.02  # a notice may get lost when Ctrl-C comes just then
_KNOWN_BYTES = 64


class RingLease:
    """A thread's hold on a ring, which ends by one store to `over`: no signal can come between."""

    __slots__ = ("over",)

    def __init__(self, *, over: bool = False) -> None:
        """Hold nothing yet."""
        self.over = over


class _Slot:
    """A ring, its last lease, and the memory that it was last asked to know."""

    __slots__ = ("knows", "lease", "ring")

    def __init__(self, ring: Ring, lease: RingLease) -> None:
        self.ring, self.lease = ring, lease
        self.knows: list[memoryview] = []


class RingPool:
    """Up to `most` rings; threads that find none free wait."""

    def __init__(self, *, depth: int, files: int, most: int, sqpoll: bool) -> None:
        """Make one ring and read through it what is known, to be sure of it.

        Args:
            depth: requests in flight of one ring.
            files: places for registered files of one ring.
            most: rings; >= 1.
            sqpoll: as for `Ring`.

        Raises:
            CapabilityError: io_uring cannot be had, or reads wrong.
        """
        self._depth, self._files, self._most, self._sqpoll = depth, files, most, sqpoll
        self._memories: list[memoryview] = []
        self._said = False
        self._lock = threading.Lock()  # taken itself: Ctrl-C inside a condition's __enter__ would leave it locked
        self._freed = threading.Condition(self._lock)
        self._slots = [_Slot(self._make(), RingLease(over=True))]

    @property
    def registered(self) -> list[int]:
        """Bytes of registered memory, for each ring there is."""
        return [slot.ring.registered for slot in self._slots]

    def take(self, lease: RingLease) -> Ring:
        """Return a ring at rest that is this thread's until the lease is over; waits until one is free.

        Args:
            lease: the caller sets `over` whatever happens, then calls `notify`.

        Raises:
            CapabilityError: there is no ring, and none can be made.
        """
        slot = self._take(lease)
        if slot.knows is not self._memories:
            self._register(slot)
        return slot.ring

    def notify(self) -> None:
        """Let waiting threads look again."""
        with self._lock:
            self._freed.notify()

    def register(self, memory: memoryview) -> None:
        """Let every ring know this memory too when it is next taken. What the system refuses is logged once."""
        with self._lock:
            self._memories = [*self._memories, memory]

    def forget_file(self, descriptor: int) -> None:
        """Let no ring keep a file open that is about to be closed."""
        for slot in self._slots:
            slot.ring.forget_file(descriptor)

    def close(self) -> None:
        """Give everything back; no lease may be running. Idempotent."""
        slots, self._slots, self._most = self._slots, [], 0
        for slot in slots:
            slot.ring.come_to_rest()
            slot.ring.close(unregister=True)
        self._memories = []

    def start_anew(self) -> None:
        """Be usable in a child process, with rings of its own: the parent's only lose their copies in the child."""
        slots, self._slots = self._slots, []
        self._lock = threading.Lock()  # taken itself: Ctrl-C inside a condition's __enter__ would leave it locked
        self._freed = threading.Condition(self._lock)
        for slot in slots:
            slot.ring.close(unregister=False)

    def _take(self, lease: RingLease) -> _Slot:
        with self._lock:
            while True:
                for slot in self._slots:
                    if slot.lease.over:
                        slot.lease = lease
                        return slot
                if len(self._slots) < self._most and (ring := self._one_more()) is not None:
                    slot = _Slot(ring, lease)
                    self._slots.append(slot)
                    return slot
                self._freed.wait(_POLL_S)

    def _one_more(self) -> Ring | None:
        """Make a ring; where the system refuses one more than there are, those have to do."""
        try:
            return self._make()
        except CapabilityError:
            if not self._slots:
                raise
            self._most = len(self._slots)
            return None

    def _make(self) -> Ring:
        try:
            ring = Ring(self._depth, files=self._files, sqpoll=self._sqpoll)
        except OSError as error:
            raise no_uring(error) from error
        try:
            _require_right(ring)
        except BaseException:
            ring.close(unregister=False)
            raise
        return ring

    def _register(self, slot: _Slot) -> None:
        memories = self._memories
        try:
            slot.ring.register_memory(memories)
        except OSError as error:
            if not self._said:
                self._said = True
                _log.warning("%s", not_registered(error, sum(memory.nbytes for memory in memories), self._most))
        slot.knows = memories  # known or refused: not to be tried again


def _require_right(ring: Ring) -> None:
    """Read known bytes, with a plain descriptor and then with a registered one.

    Raises:
        CapabilityError: they do not arrive.
    """
    known, found = os.urandom(_KNOWN_BYTES), np.zeros(_KNOWN_BYTES, np.uint8)
    file = os.memfd_create("shardkit-io-uring")
    try:
        os.write(file, known)
        for place in (-1, ring.place_of(file)):
            found[:] = 0
            columns = (0, file, place, 0, found.ctypes.data, _KNOWN_BYTES)
            ring.put(*(np.array([value], np.int64) for value in columns))
            ring.enter(1)
            _, result = ring.reap()
            if result.tolist() != [_KNOWN_BYTES] or found.tobytes() != known:
                raise CapabilityError(
                    "io_uring does not read right here",
                    expected=f"{_KNOWN_BYTES} known bytes",
                    found=f"result {result.tolist()}, {'the' if found.tobytes() == known else 'other'} bytes",
                    remedy=f"report it with the kernel, Linux {platform.release()}, {OTHERWISE}",
                )
    except OSError as error:
        raise no_uring(error) from error
    finally:
        ring.come_to_rest()
        ring.forget_file(file)
        os.close(file)
