"""Reads with io_uring: a batch goes to the kernel in a few system calls, and no op costs an object or a thread."""

from __future__ import annotations

import errno
import os
import platform
import sys
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
from shardkit.storage.reader import DIRECT, HOST, PAGE_CACHE, SPAN_BYTES, MemorySpace, Pending, ReadOp, columns
from shardkit.storage.uring_causes import cause_and_remedy, require_fit
from shardkit.storage.uring_drive import Call, Drive, Sources
from shardkit.storage.uring_pool import RingLease, RingPool
from shardkit.storage.uring_ring import Ring, keeps_store_order

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["DEFAULT_DEPTH", "MAX_DEPTH", "UringReader", "polling_refusal", "uring_refusal"]

DEFAULT_DEPTH = 64
"""Requests in flight of one ring."""
DEFAULT_RINGS = 2
"""As many as a loader's threads."""
MAX_DEPTH = 4096

_MOST_PLACES = 1024
_POLL_S = 0.002


class UringReader:
    """A `Reader` on Linux io_uring, for files opened with O_DIRECT, or through the page cache.

    One ring serves a call, driven by the calling thread; calls of other threads take further rings, and wait when all
    are taken. A file that refuses direct reads is served, counted and logged as by `DirectReader`.

    A child process after a fork makes rings of its own when it first reads, and leaves its parent's alone.
    """

    space: MemorySpace = HOST
    span_bytes = SPAN_BYTES

    def __init__(
        self,
        paths: Sequence[str | os.PathLike[str]],
        *,
        depth: int = DEFAULT_DEPTH,
        rings: int = DEFAULT_RINGS,
        max_open: int | None = None,
        align: int | None = None,
        direct: bool = True,
        sqpoll: bool = False,
    ) -> None:
        """Make one ring and read through it what is known, to be sure of it.

        Args:
            paths: the files, addressed by their index.
            depth: requests in flight of one ring; 1 to `MAX_DEPTH`.
            rings: the most that are made, and so calls that read at the same time.
            max_open: descriptors kept open; None asks `default_max_open`.
            align: bytes, a power of two; None takes what the files state, or 4096 where they state nothing; 1 without
                `direct`.
            direct: past the page cache. Without it the kernel copies what is cached while it takes requests, in one
                system call for many.
            sqpoll: let a thread of the kernel poll for requests. It takes a processor for itself while reads run.

        Raises:
            CapabilityError: io_uring cannot be had here, or not for these files, or direct reads cannot; says why and
                what to do.
            StorageError: a file that was asked for its alignment is not there.
            ConfigError: a number is out of range.
        """
        _check_numbers(depth, rings, sqpoll)
        for path in one_path_a_folder(paths):
            require_fit(mount_of(path), path)
        self._direct = direct
        if direct:
            facts = [probe(path) for path in one_path_a_folder(paths)]
            self.align = align or max((require_direct(fact) for fact in facts), default=DIRECT_ALIGN)
        else:
            self.align = 1
        limit = default_max_open() if max_open is None else max_open
        through = DescriptorCache(paths, flags=0, max_open=limit, closing=self._forget_file)
        past = DescriptorCache(paths, flags=os.O_DIRECT, max_open=limit, closing=self._forget_file)
        self._paths = through.paths
        self._sources = Sources((past, through), self.align, Refusals(self._paths))
        self._bytes = ByteCounter(DIRECT, PAGE_CACHE)
        self._closed = False
        self._lock = threading.Lock()
        self._calls: set[Call] = set()
        self._rings = RingPool(depth=depth, files=min(limit, _MOST_PLACES), most=rings, sqpoll=sqpoll)
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
        require_aligned(rows, self.align, self._paths)
        call = Call(ops, rows, self._sources.refusals, direct=self._direct)
        try:
            self._enter(call)
            if call.more:
                self._drive(call)
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
        """Pin memory for reads into it, once for each ring.

        What the system refuses is logged once, with the limit to raise, and reads go on without.
        """
        if memory.nbytes:
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
        """Wait for the calls in progress; give back every ring and descriptor; idempotent."""
        if sys.is_finalizing():  # the interpreter lets no daemon thread run any more: one that reads would never end
            return
        with self._lock:
            self._closed = True
        while any(not call.over for call in list(self._calls)):
            sleep(_POLL_S)
        self._rings.close()
        for cache in self._sources.caches:
            cache.forget_threads()  # none reads any more, though Ctrl-C may have kept one from saying so
            cache.close()

    def _after_fork(self) -> None:
        """Drop, in a child process, what is its parent's: rings, and a lock that one of its threads may have held."""
        self._lock = threading.Lock()
        self._calls = set()
        self._rings.start_anew()

    def _enter(self, call: Call) -> None:
        with self._lock:
            if self._closed:
                raise ConfigError("the reader is closed", remedy="open another one")
            self._calls.add(call)

    def _drive(self, call: Call) -> None:
        lease = RingLease()
        try:
            drive = Drive(call, self._rings.take(lease), self._sources)
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


def polling_refusal() -> str | None:
    """Return why the kernel may not poll for this process's requests (`sqpoll`), in one clause, or None when it may.

    To be asked where `uring_refusal` has nothing to say.
    """
    if not keeps_store_order():
        return f"not offered on {platform.machine()}"
    try:
        Ring(1, files=0, sqpoll=True).close(unregister=False)
    except OSError as error:
        if error.errno == errno.EPERM:
            return "EPERM: before Linux 5.13 it needs CAP_SYS_NICE"
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
