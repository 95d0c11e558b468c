"""Reads with io_uring: a batch goes to the kernel in a few system calls, and no op costs an object or a thread."""

from __future__ import annotations

import os
import platform
import threading
import weakref
from time import monotonic, sleep
from typing import TYPE_CHECKING

from shardkit.errors import CapabilityError, ConfigError
from shardkit.extent import DIRECT_ALIGN
from shardkit.storage.buffered import ByteCounter, check_files
from shardkit.storage.descriptors import DescriptorCache, default_max_open
from shardkit.storage.direct import Refusals, one_path_a_folder, require_aligned, require_direct
from shardkit.storage.probe import mount_of, probe
from shardkit.storage.reader import DIRECT, HOST, PAGE_CACHE, MemorySpace, Pending, ReadOp, columns
from shardkit.storage.uring_causes import cause_and_remedy, require_fit
from shardkit.storage.uring_crew import Crew
from shardkit.storage.uring_drive import Call, Drive, Sources
from shardkit.storage.uring_pool import RingLease, RingPool
from shardkit.storage.uring_ring import Ring, keeps_store_order

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["DEFAULT_DEPTH", "MAX_DEPTH", "UringReader", "uring_refusal"]

DEFAULT_DEPTH = 64
"""Requests in flight of one ring."""
MAX_DEPTH = 4096

_DIRECT_RINGS = 2
_MOST_PLACES = 1024
_POLL_S = 0.002


class UringReader:
    """A `Reader` on Linux io_uring, for files opened with O_DIRECT or for reads through the page cache.

    Direct: one ring serves a call, driven by the calling thread; calls of other threads take further rings, and wait
    when all are taken. A file that refuses direct reads is served, counted and logged as by `DirectReader`.

    Through the page cache: what is cached is copied while it is handed over, so the calling thread and helpers, one a
    ring, share a call; what is not cached the device reads ahead.

    A child process after a fork makes rings of its own when it first reads, and leaves its parent's alone.
    """

    space: MemorySpace = HOST

    def __init__(
        self,
        paths: Sequence[str | os.PathLike[str]],
        *,
        direct: bool = True,
        depth: int = DEFAULT_DEPTH,
        rings: int | None = None,
        max_open: int | None = None,
        align: int | None = None,
        sqpoll: bool = False,
    ) -> None:
        """Make one ring and read through it what is known, to be sure of it.

        Args:
            paths: the files, addressed by their index.
            direct: read past the page cache; False reads through it, with no alignment.
            depth: requests in flight of one ring; 1 to `MAX_DEPTH`.
            rings: the most that are made; None for 2, or without `direct` for the processors, up to 4.
            max_open: descriptors kept open; None asks `default_max_open`.
            align: bytes, a power of two, for direct reads; None takes what the files state, else 4096.
            sqpoll: let a thread of the kernel poll for requests. It takes a processor for itself while reads run.

        Raises:
            CapabilityError: io_uring cannot be had here, or not for these files, or direct reads cannot; says why and
                what to do.
            StorageError: a file that was asked for its alignment is not there.
            ConfigError: a number is out of range.
        """
        most = rings if rings is not None else _DIRECT_RINGS if direct else min(len(os.sched_getaffinity(0)), 4)
        _check_numbers(depth, most, sqpoll)
        for path in one_path_a_folder(paths):
            require_fit(mount_of(path), path)
        facts = [probe(path) for path in one_path_a_folder(paths)] if direct else []
        needs = max((require_direct(fact) for fact in facts), default=DIRECT_ALIGN)
        self.align = (align or needs) if direct else 1
        limit = default_max_open() if max_open is None else max_open
        through = DescriptorCache(paths, flags=0, max_open=limit, closing=self._forget_file)
        past = DescriptorCache(paths, flags=os.O_DIRECT, max_open=limit, closing=self._forget_file)
        self._paths = through.paths
        self._sources = Sources((past, through), self.align, Refusals(self._paths))
        self._direct, self._depth, self._threads = direct, depth, 1 if direct else most
        self._bytes = ByteCounter(DIRECT, PAGE_CACHE)
        self._closed = False
        self._lock = threading.Lock()
        self._calls: set[Call] = set()
        self._rings = RingPool(depth=depth, files=min(limit, _MOST_PLACES), most=most, sqpoll=sqpoll)
        self._crew = Crew(self._threads - 1)
        _LIVE.add(self)

    @property
    def counters(self) -> Mapping[str, int]:
        """Bytes delivered so far, direct and out of the page cache."""
        return self._bytes.snapshot()

    @property
    def refused(self) -> int:
        """Files that could be opened for direct reads but not read."""
        return len(self._sources.refusals)

    @property
    def registered(self) -> list[int]:
        """Bytes of registered memory, for each ring that was made so far."""
        return self._rings.registered

    def read_into(self, ops: Sequence[ReadOp], /) -> None:
        """Carry out every op; see `Reader`."""
        rows = columns(ops)
        check_files(rows, len(self._paths))
        if self._direct:
            require_aligned(rows, self.align, self._paths)
        chunk = self._depth
        if self._threads > 1:  # small enough that threads end at about the same time
            chunk = max(1, min(chunk, -(-len(rows.file) // (4 * self._threads))))
        call = Call(ops, rows, chunk=chunk, cached=not self._direct, refusals=self._sources.refusals)
        try:
            self._enter(call)
            if len(call.todo):
                helpers = min(self._threads, -(-len(call.todo) // chunk)) - 1
                self._crew.share(lambda: self._drive(call), helpers, call.stop)
        finally:
            call.over = True
            error = call.end()
            self._calls.discard(call)
        if error is not None:
            try:
                raise error
            finally:
                del error  # an error that its own traceback's frame holds would keep the memory, too

    def register(self, memory: memoryview, /) -> None:
        """Pin memory for direct reads into it, once for each ring; reads through the page cache gain nothing from it.

        What the system refuses is logged once, with the limit to raise, and reads go on without.
        """
        if self._direct and memory.nbytes:
            self._rings.register(memory)

    def oldest(self) -> Pending | None:
        """Return the read that has run the longest; see `Reader`."""
        found = [(call, *oldest) for call in list(self._calls) if (oldest := call.oldest()) is not None]
        if not found:
            return None
        call, op, since = min(found, key=lambda entry: entry[2])
        path = self._paths[int(call.rows.file[op])]
        return Pending(path=path, offset=int(call.rows.offset[op]), seconds=monotonic() - since)

    def close(self) -> None:
        """Wait for the calls in progress; give back every ring, descriptor and thread; idempotent."""
        with self._lock:
            self._closed = True
        while any(not call.over for call in list(self._calls)):
            sleep(_POLL_S)
        self._crew.close()
        self._rings.close()
        for cache in self._sources.caches:
            cache.forget_threads()  # none reads any more, though Ctrl-C may have kept one from saying so
            cache.close()

    def _after_fork(self) -> None:
        """Drop, in a child process, what is its parent's: rings, threads, and a lock that one may have held."""
        self._lock = threading.Lock()
        self._calls = set()
        self._crew.start_anew()
        self._rings.start_anew()

    def _enter(self, call: Call) -> None:
        with self._lock:
            if self._closed:
                raise ConfigError("the reader is closed", remedy="open another one")
            self._calls.add(call)

    def _drive(self, call: Call) -> None:
        lease = RingLease()
        try:
            ring = self._rings.take(lease, unless=lambda: not call.more)
            if ring is not None:
                drive = Drive(call, ring, self._sources)
                drive.run()
                self._bytes.add(DIRECT, drive.arrived[0])
                self._bytes.add(PAGE_CACHE, drive.arrived[1])
        finally:
            lease.over = True
            self._rings.notify()

    def _forget_file(self, descriptor: int) -> None:
        self._rings.forget_file(descriptor)


def uring_refusal() -> str | None:
    """Return why this process cannot have io_uring, in one clause, or None when it can; costs a few system calls."""
    try:
        Ring(1, files=0).close(unregister=False)
    except OSError as error:
        return cause_and_remedy(error)[0]
    return None


def _check_numbers(depth: int, rings: int, sqpoll: bool) -> None:
    if not 1 <= depth <= MAX_DEPTH or rings < 1:
        found = f"depth {depth}, {rings} rings"
        raise ConfigError("a ring has room for requests", expected=f"depth 1..{MAX_DEPTH}, rings >= 1", found=found)
    if sqpoll and not keeps_store_order():
        raise CapabilityError(
            "polling for requests is not offered on this processor",
            expected="one that keeps the order of stores, as x86-64 does",
            found=platform.machine(),
            remedy="leave sqpoll off",
        )


_LIVE: weakref.WeakSet[UringReader] = weakref.WeakSet()


def _forget_parents_rings() -> None:
    for reader in list(_LIVE):
        reader._after_fork()


os.register_at_fork(after_in_child=_forget_parents_rings)
