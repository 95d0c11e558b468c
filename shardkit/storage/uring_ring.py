"""One io_uring: requests go in as columns, results come out as columns, and nothing is lost when a signal comes."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import platform
import threading
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from shardkit.storage import uring_abi as abi

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    _Ints: TypeAlias = npt.NDArray[np.int64]

__all__ = ["Ring", "keeps_store_order"]

_FEATURES = abi.FEAT_SINGLE_MMAP | abi.FEAT_NODROP | abi.FEAT_EXT_ARG  # Linux 5.11 has all three
_LAST = (1 << 32) - 1  # the counters of both queues are 32 bits wide and wrap
_POLL_NS = 250_000_000
_IDLE_MS = 50
_PIECE = 1 << 30  # the kernel's limit for one registered buffer
_AGAIN = {errno.ETIME, errno.EINTR, errno.EAGAIN, errno.EBUSY}


def keeps_store_order() -> bool:
    """Return whether this processor shows another one its stores in program order (x86-64 does)."""
    return platform.machine() in {"x86_64", "AMD64"}


class Ring:
    """Two queues that the kernel shares with one thread at a time; whoever uses a ring owns it until `settle`.

    What is in flight is never counted here but read off the queues' own counters, so an exception between any two
    lines (Ctrl-C) leaves a ring that `settle` can still bring to rest.

    Memory order: the kernel reads requests inside `enter`, called by the thread that wrote them, so program order is
    enough; with a polling thread in the kernel they must become visible before the counter does, which plain stores
    only promise where `keeps_store_order`. Results may be written by a kernel thread on another processor: where loads
    are not kept in order either, a system call stands between reading the counter and reading the results, in which
    the interpreter's lock is let go and taken again.
    """

    def __init__(self, depth: int, *, files: int, sqpoll: bool = False) -> None:
        """Make a ring.

        Args:
            depth: requests in flight; >= 1.
            files: places for registered files; 0 for none.
            sqpoll: let a thread of the kernel take the requests.

        Raises:
            OSError: the system refused; ENOSYS too where io_uring lacks a needed feature (before Linux 5.11).
        """
        self.depth = depth
        """The most that is in flight."""
        self.holds: object = None
        """Keeps the memory alive that the kernel may write into."""
        self._sqpoll = sqpoll
        self._ordered = keeps_store_order()
        self._wait = np.zeros(1, abi.WAIT)
        self._time = np.array([0, _POLL_NS], np.int64)
        self._wait["timespec"] = self._time.ctypes.data
        self._fd, params = _setup(depth, sqpoll)
        try:
            self._map(params)
        except BaseException:
            self.close(unregister=False)
            raise
        self.registered = 0
        """Bytes of memory that this ring knows."""
        self._memories: list[tuple[int, int, int]] = []  # address, bytes, number of the first buffer
        self._files_lock = threading.Lock()
        self._places: dict[int, int] = {}  # descriptor -> place
        self._free = self._register_places(files)

    @property
    def in_flight(self) -> int:
        """Requests whose results were not taken by `reap` yet."""
        return (int(self._sq_tail[0]) - int(self._cq_head[0])) & _LAST

    def put(self, tag: _Ints, descriptor: _Ints, place: _Ints, offset: _Ints, address: _Ints, length: _Ints) -> None:
        """Queue reads; the kernel sees them at the next `enter`. At most `depth` are in flight then.

        Args:
            tag: [N] comes back with the result.
            descriptor: [N] open files.
            place: [N] where they are registered, or -1.
            offset: [N] first byte to read.
            address: [N] where it goes to.
            length: [N] bytes; below 2**31.
        """
        block = np.zeros(len(tag), abi.SQE)
        block["opcode"] = abi.OP_READ
        if self._memories:
            buffer = self._buffer_of(address, length)
            block["opcode"][buffer >= 0] = abi.OP_READ_FIXED
            block["buf_index"] = np.maximum(buffer, 0)
        placed = place >= 0
        block["flags"][placed] = abi.IOSQE_FIXED_FILE
        block["fd"] = np.where(placed, place, descriptor)
        block["off"], block["addr"], block["len"], block["user_data"] = offset, address, length, tag
        self._queue(block)

    def enter(self, complete: int) -> None:
        """Hand over what is queued and wait for results, though no longer than a quarter of a second.

        Args:
            complete: results to wait for; 0 does not wait.

        Raises:
            OSError: the system refused for good.
        """
        queued = (int(self._sq_tail[0]) - int(self._sq_head[0])) & _LAST
        flags = abi.ENTER_GETEVENTS | abi.ENTER_EXT_ARG | (abi.ENTER_SQ_WAKEUP if self._sqpoll else 0)
        try:
            abi.enter(self._fd, queued, complete, flags, self._wait.ctypes.data, abi.WAIT.itemsize)
        except OSError as error:
            if error.errno not in _AGAIN:
                raise

    def reap(self) -> tuple[_Ints, _Ints]:
        """Return the tags and results that have come, int64 [N] each: bytes read, or a negative error number."""
        head, tail = int(self._cq_head[0]), int(self._cq_tail[0])
        if not self._ordered:
            abi.enter(self._fd, 0, 0, 0, 0, 0)
        slots = (head + np.arange((tail - head) & _LAST)) & (len(self._cqes) - 1)
        found = self._cqes[slots]
        self._cq_head[0] = tail
        return found["user_data"].astype(np.int64), found["res"].astype(np.int64)

    def settle(self) -> None:
        """Take back what the kernel has not taken, cancel what can be, wait for the rest and forget all results.

        After it the kernel writes into no memory of any request. It may be interrupted and called again.
        """
        if not self._sqpoll:  # the kernel looks at the queue inside `enter` only
            self._sq_tail[0] = self._sq_head[0]
        if self._working():
            block = np.zeros(1, abi.SQE)
            block["opcode"] = abi.OP_ASYNC_CANCEL
            block["op_flags"] = abi.ASYNC_CANCEL_ALL | abi.ASYNC_CANCEL_ANY  # before Linux 5.19 it fails: no harm
            self._queue(block)
        while self._working():
            self.enter(self._working())
        self._cq_head[0] = self._cq_tail[0]

    def come_to_rest(self) -> None:
        """Call `settle` until it was not interrupted.

        Raises:
            OSError: the ring cannot be waited for.
        """
        while True:
            try:
                self.settle()
            except OSError:
                raise
            except BaseException:  # a second Ctrl-C: the first one is on its way already
                continue
            return

    def register_memory(self, memories: Sequence[memoryview]) -> None:
        """Pin memory that reads will go into, instead of what was pinned before. Nothing may be in flight.

        Raises:
            OSError: the system refused; then the ring knows no memory.
        """
        if self._memories:
            self._memories, self.registered = [], 0
            abi.register(self._fd, abi.UNREGISTER_BUFFERS, 0, 0)
        pieces, found = list[tuple[int, int]](), list[tuple[int, int, int]]()
        for memory in memories:
            start = np.frombuffer(memory, np.uint8).ctypes.data
            found.append((start, memory.nbytes, len(pieces)))
            pieces += [(start + at, min(_PIECE, memory.nbytes - at)) for at in range(0, memory.nbytes, _PIECE)]
        if pieces:
            vector = np.array(pieces, abi.IOVEC)
            abi.register(self._fd, abi.REGISTER_BUFFERS, vector.ctypes.data, len(vector))
        self._memories, self.registered = found, sum(size for _, size, _ in found)

    def place_of(self, descriptor: int) -> int:
        """Return where an open file is registered, which this does if need be; -1 where there is no place left."""
        with self._files_lock:
            place = self._places.get(descriptor, -1)
            if place < 0 and self._free:
                place = self._free[-1]
                self._set_file(place, descriptor)
                self._places[descriptor] = self._free.pop()
            return place

    def forget_file(self, descriptor: int) -> None:
        """Unregister a file that is about to be closed, or a place would keep it open; from any thread."""
        with self._files_lock:
            place = self._places.pop(descriptor, -1)
            if place >= 0:
                self._set_file(place, -1)
                self._free.append(place)

    def close(self, *, unregister: bool) -> None:
        """Give everything back; idempotent.

        Args:
            unregister: let go of memory and files before this returns, rather than a little later in the background.
                False in a child process, whose copy of the ring is the parent's.
        """
        if self._fd < 0:
            return
        if unregister:
            self.register_memory([])
            if self._places or self._free:
                abi.register(self._fd, abi.UNREGISTER_FILES, 0, 0)
        self._sqes = self._cqes = np.empty(0, np.uint8)
        self._sq_head = self._sq_tail = self._cq_head = self._cq_tail = np.zeros(1, np.uint32)
        try:
            for mapping in self._mappings:
                with contextlib.suppress(BufferError):  # a thread that a fork left behind looks at it for ever
                    mapping.close()
        finally:
            os.close(self._fd)
            self._fd = -1

    def _map(self, params: npt.NDArray[np.void]) -> None:
        self._mappings: list[mmap.mmap] = []
        p = {name: int(params[name][0]) for name in abi.PARAMS.names or () if "resv" not in name}
        entries, results = p["sq_entries"], p["cq_entries"]
        ring_bytes = max(p["sq_array"] + 4 * entries, p["cq_cqes"] + abi.CQE.itemsize * results)
        flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
        ring = mmap.mmap(self._fd, ring_bytes, flags=flags, offset=abi.OFF_SQ_RING)
        self._mappings.append(ring)
        sqes = mmap.mmap(self._fd, abi.SQE.itemsize * entries, flags=flags, offset=abi.OFF_SQES)
        self._mappings.append(sqes)
        self._sqes = np.frombuffer(sqes, abi.SQE)
        self._cqes = np.frombuffer(ring, abi.CQE, results, p["cq_cqes"])
        self._sq_head, self._sq_tail, self._cq_head, self._cq_tail = (
            np.frombuffer(ring, np.uint32, 1, p[name]) for name in ("sq_head", "sq_tail", "cq_head", "cq_tail")
        )
        np.frombuffer(ring, np.uint32, entries, p["sq_array"])[:] = np.arange(entries)  # request k lies in slot k

    def _queue(self, block: npt.NDArray[np.void]) -> None:
        tail = int(self._sq_tail[0])
        self._sqes[(tail + np.arange(len(block))) & (len(self._sqes) - 1)] = block
        self._sq_tail[0] = (tail + len(block)) & _LAST

    def _working(self) -> int:
        """Requests without a result: each gives exactly one."""
        return (int(self._sq_tail[0]) - int(self._cq_tail[0])) & _LAST

    def _buffer_of(self, address: _Ints, length: _Ints) -> _Ints:
        """Return the number of the registered buffer that holds each destination, -1 where none holds all of it."""
        number = np.full(len(address), -1, np.int64)
        for start, size, first in self._memories:
            low, high = address - start, address - start + length - 1
            inside = (low >= 0) & (high < size) & (low // _PIECE == high // _PIECE)
            number[inside] = first + low[inside] // _PIECE
        return number

    def _register_places(self, files: int) -> list[int]:
        if not files:
            return []
        try:
            empty = np.full(files, -1, np.int32)
            abi.register(self._fd, abi.REGISTER_FILES, empty.ctypes.data, files)
        except OSError:  # more than this process may have open, or no memory: plain descriptors do as well
            return []
        return list(range(files))[::-1]

    def _set_file(self, place: int, descriptor: int) -> None:
        number = np.array([descriptor], np.int32)
        update = np.zeros(1, abi.FILES_UPDATE)
        update["offset"], update["fds"] = place, number.ctypes.data
        abi.register(self._fd, abi.REGISTER_FILES_UPDATE, update.ctypes.data, 1)


def _setup(depth: int, sqpoll: bool) -> tuple[int, npt.NDArray[np.void]]:
    """Make a ring that interrupts its thread less, where the kernel (5.19) can."""
    tries = [abi.SETUP_SQPOLL] if sqpoll else [abi.SETUP_COOP_TASKRUN, 0]
    for flags in tries:
        params = np.zeros(1, abi.PARAMS)
        params["flags"], params["sq_thread_idle"] = flags, _IDLE_MS
        try:
            fd = abi.setup(depth, params.ctypes.data)
        except OSError as error:
            if error.errno != errno.EINVAL or flags == tries[-1]:
                raise
            continue
        if int(params["features"][0]) & _FEATURES != _FEATURES:
            os.close(fd)
            raise OSError(errno.ENOSYS, "io_uring lacks features that Linux has since 5.11")
        return fd, params
    raise AssertionError("a ring was neither made nor refused")
