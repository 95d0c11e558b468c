"""A stand-in for a GPU in tests: its device memory is host memory, so that everything around a GPU runs without one.

It takes the place of a machine, and of nothing in shardkit. Like CUDA it promises little: fresh memory holds rubbish,
work may be carried out as late as someone waits for it, and then fails if its memory has gone in the meantime.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
import weakref
from collections import Counter, deque
from time import perf_counter
from typing import TYPE_CHECKING

import numpy as np

from shardkit.errors import CapabilityError, DeviceError
from shardkit.storage.buffers import aligned_memory
from shardkit.storage.reader import address_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from shardkit.storage.device import Event
    from shardkit.storage.reader import MemorySpace

__all__ = ["POISON", "HostDevice", "HostEvent", "HostStream"]

POISON = 0xA5
"""What fresh memory holds."""

_PAGE = 4096
_CALLS = {
    "memory", "managed", "pin", "stream", "upload", "download", "copy", "prefetch", "record", "wait_for", "synchronize",
    "done", "wait",
}  # fmt: skip
_REFUSALS = {"memory", "managed", "pin"}
_libc = ctypes.CDLL(None, use_errno=True)


class HostDevice:
    """A `shardkit.storage.device.Device` whose memory the host may touch, and kernels compiled for the host, too."""

    def __init__(
        self, number: int = 0, *, lazy: bool = False, numa_node: int | None = None, lock: bool = False
    ) -> None:
        """Make a device without work.

        Args:
            number: that it has in this process.
            lazy: streams carry out work only when it is waited for, or when an event is asked for the second time
                whether it is done. What is reused too early is then always seen.
            numa_node: that it says.
            lock: `pin` locks the memory by mlock(2), so that the process's limit counts.
        """
        self.number, self.numa_node, self.lazy = number, numa_node, lazy
        self.space: MemorySpace = f"cuda:{number}"
        self.name = "host memory"
        self.lost = False
        """See `Device`; whoever sets it makes every call fail from then on."""
        self.turn = threading.RLock()
        """Held while work is carried out."""
        self.allocations: dict[int, int] = {}
        """Bytes of each allocation of device memory that is alive, by address."""
        self.pinned: dict[int, int] = {}
        """Bytes of each piece of host memory that is pinned, by address."""
        self.calls: Counter[str] = Counter()
        """How often each call of the device, its streams and events was made."""
        self.current_in: Counter[str] = Counter()
        """How many blocks of each thread, by its name, it is current in."""
        self._lock, self._process = lock, os.getpid()
        self._to_fail: Counter[str] = Counter()
        self._managed: set[int] = set()

    @property
    def allocated_bytes(self) -> int:
        """Bytes of device memory that are alive."""
        return sum(list(self.allocations.values()))

    def fail_next(self, what: str) -> None:
        """Let the next call of a name fail: with CapabilityError where a device may refuse, else with DeviceError.

        Args:
            what: a call of a device, stream or event: "memory", "managed", "pin", "stream", "upload", "download",
                "copy", "prefetch", "record", "wait_for", "synchronize", "done", "wait".
        """
        assert what in _CALLS, what
        self._to_fail[what] += 1

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        """Count the threads that it is current in, in `current_in`."""
        name = threading.current_thread().name
        self.current_in[name] += 1
        try:
            yield
        finally:
            self.current_in[name] -= 1

    def memory(self, nbytes: int) -> memoryview:
        """Return poisoned memory."""
        self.meet("memory")
        return self._allocate(nbytes)

    def managed(self, nbytes: int) -> memoryview:
        """Return poisoned memory, which host and device may touch."""
        self.meet("managed")
        memory = self._allocate(nbytes)
        self._managed.add(address_of(memory))
        weakref.finalize(memory.obj, self._managed.discard, address_of(memory)).atexit = False
        return memory

    def pin(self, memory: memoryview) -> None:
        """Remember that host memory is pinned, until it goes."""
        self.meet("pin")
        where, nbytes = address_of(memory), memory.nbytes
        if where % _PAGE or any(at < where + nbytes and where < at + size for at, size in self.pinned.items()):
            raise CapabilityError("host memory cannot be pinned", found="it is not page-aligned, or is pinned already")
        if self._lock and _libc.mlock(ctypes.c_void_p(where), ctypes.c_size_t(nbytes)):
            found = os.strerror(ctypes.get_errno())
            raise CapabilityError("host memory cannot be pinned", expected=nbytes, found=found)
        self.pinned[where] = nbytes
        weakref.finalize(memory.obj, self.pinned.pop, where).atexit = False

    def stream(self, *, urgent: bool = False) -> HostStream:
        """Return a new stream."""
        self.meet("stream")
        return HostStream(self, urgent=urgent)

    def may_touch(self, address: int, nbytes: int, *, on_device: bool) -> bool:
        """Return whether a range lies in one allocation that is alive, or else in no memory of the device's alone."""
        ranges = list(self.allocations.items())
        owner = next((at for at, size in ranges if at <= address and address + nbytes <= at + size), None)
        return owner is not None if on_device else owner is None or owner in self._managed

    def meet(self, call: str) -> None:
        """Count a call, and let it fail if it is to."""
        if self._process != os.getpid():
            raise CapabilityError("a GPU does not survive a fork", found=f"opened by process {self._process}")
        self.calls[call] += 1
        if self.lost:
            raise DeviceError("a GPU failed an operation", found=f"{call}: the device is lost")
        if self._to_fail[call]:
            self._to_fail[call] -= 1
            if call in _REFUSALS:
                raise CapabilityError(f"the device refuses {call!r}", found="it was told to")
            raise DeviceError("a GPU failed an operation", found=f"{call}: it was told to")

    def _allocate(self, nbytes: int) -> memoryview:
        memory = aligned_memory(nbytes, _PAGE)
        np.frombuffer(memory, np.uint8)[:] = POISON
        if nbytes:
            where = address_of(memory)
            self.allocations[where] = nbytes
            weakref.finalize(memory.obj, self.allocations.pop, where).atexit = False
        return memory


class HostStream:
    """Work in order; see `shardkit.storage.device.Stream`."""

    def __init__(self, device: HostDevice, *, urgent: bool) -> None:
        """Start with no work; made by `HostDevice.stream`."""
        self.device, self.urgent, self.handle = device, urgent, id(self)
        self._work: deque[Callable[[], None]] = deque()
        self._given = self._done = 0

    @property
    def waiting(self) -> int:
        """Pieces of work that were not carried out yet."""
        return len(self._work)

    def upload(self, target: int, source: int, nbytes: int) -> None:
        """Copy from host memory, which is not looked at before."""
        self.device.meet("upload")
        self.submit(lambda: self._move(target, source, nbytes, on_device=(target,)))

    def download(self, target: int, source: int, nbytes: int) -> None:
        """Copy to host memory."""
        self.device.meet("download")
        self.submit(lambda: self._move(target, source, nbytes, on_device=(source,)))

    def copy(self, target: int, source: int, nbytes: int) -> None:
        """Copy within the device's memory."""
        self.device.meet("copy")
        self.submit(lambda: self._move(target, source, nbytes, on_device=(source, target)))

    def prefetch(self, address: int, nbytes: int) -> None:
        """Move managed memory, which is here already."""
        self.device.meet("prefetch")
        self.submit(lambda: self._require_managed(address, nbytes))

    def record(self, *, timed: bool = False) -> HostEvent:
        """Return an event behind all work so far."""
        self.device.meet("record")
        event = HostEvent(self, timed=timed)
        event.number = self.submit(event.come)
        return event

    def wait_for(self, event: Event, /) -> None:
        """Let later work come after an event of another stream."""
        self.device.meet("wait_for")
        assert isinstance(event, HostEvent)
        self.submit(event.finish)

    def synchronize(self) -> None:
        """Carry out all work so far."""
        self.device.meet("synchronize")
        self.advance(self._given)

    def submit(self, work: Callable[[], None]) -> int:
        """Put work of the host's into the stream, such as a kernel, and return its number, from 1."""
        with self.device.turn:
            self._work.append(work)
            self._given += 1
            number = self._given
            if not self.device.lazy:
                self.advance(number)
        return number

    def advance(self, number: int) -> None:
        """Carry out work up to this number.

        Raises:
            DeviceError: a piece of it failed; it is gone then.
        """
        with self.device.turn:
            while self._done < number:
                self._done += 1
                self._work.popleft()()

    def _require_managed(self, address: int, nbytes: int) -> None:
        if not (
            self.device.may_touch(address, nbytes, on_device=True)
            and self.device.may_touch(address, nbytes, on_device=False)
        ):
            raise DeviceError(
                "a GPU failed an operation", expected="an address in managed memory",
                found=f"{address:#x}, {nbytes} bytes",
            )  # fmt: skip

    def _move(self, target: int, source: int, nbytes: int, *, on_device: tuple[int, ...]) -> None:
        if not nbytes:
            return
        for address in (target, source):
            if not self.device.may_touch(address, nbytes, on_device=address in on_device):
                expected = "in" if address in on_device else "outside of"
                raise DeviceError(
                    "a GPU failed an operation", expected=f"an address {expected} the device's memory",
                    found=f"{address:#x}, {nbytes} bytes",
                )  # fmt: skip
        ctypes.memmove(target, source, nbytes)


class HostEvent:
    """A point in a stream's work; see `shardkit.storage.device.Event`."""

    def __init__(self, stream: HostStream, *, timed: bool) -> None:
        """Make one; `HostStream.record` does."""
        self._stream, self._timed, self.handle = stream, timed, id(self)
        self.number = 0
        """Of the stream's work."""
        self.came_at: float | None = None
        """Seconds on the host's clock; None before."""
        self._asked = 0

    def come(self) -> None:
        """Be the work of the stream."""
        self.came_at = perf_counter()

    def finish(self) -> None:
        """Carry out all work before it."""
        self._stream.advance(self.number)

    def done(self) -> bool:
        """Return whether it has come; who asks twice makes it come."""
        self._stream.device.meet("done")
        self._asked += 1
        if self._asked > 1:
            self.finish()
        return self.came_at is not None

    def wait(self) -> None:
        """Carry out all work before it."""
        self._stream.device.meet("wait")
        self.finish()

    def since(self, earlier: Event, /) -> float:
        """Return the seconds between two timed events."""
        assert isinstance(earlier, HostEvent)
        if self.came_at is None or earlier.came_at is None or not (self._timed and earlier._timed):
            raise DeviceError("a GPU failed an operation", found="an event that is not done, or has no time")
        return self.came_at - earlier.came_at
