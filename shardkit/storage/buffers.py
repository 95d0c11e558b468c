"""Memory for reads: one ring of page-aligned memory, lent out in slices, and never more of it than the budget."""

from __future__ import annotations

import bisect
import contextlib
import ctypes
import mmap
import queue
import threading
import time
import weakref
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from shardkit.errors import CapabilityError, ConfigError, StorageError
from shardkit.extent import align_down, align_up

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    import numpy.typing as npt

__all__ = ["BufferPool", "aligned_memory"]

_Bytes: TypeAlias = "npt.NDArray[np.uint8]"
_HUGE = 2 << 20


class BufferPool:
    """Lends slices of one map, whose size is the budget; several threads may use it.

    A slice is on loan for as long as anything looks at it: the memoryview that `acquire` returned, a slice of that,
    a NumPy array on it. There is nothing to release and so nothing that is released too early; who is done drops
    what he holds. Memory that was used before is lent first, because the kernel has to zero the other anew.
    """

    def __init__(
        self,
        budget_bytes: int,
        *,
        align: int = mmap.PAGESIZE,
        memory: Callable[[int], memoryview] | None = None,
    ) -> None:
        """Map the ring; the system gives host memory page by page, when it is first written to.

        Args:
            budget_bytes: the most that is ever lent at the same time, rounded up to whole pages; at least one.
            align: bytes that the address and the size of every slice are multiples of; a power of two, less than a
                page counts as a page.
            memory: makes the ring from its bytes: pinned host memory, or a device's, which is lent but never touched
                here. If it returns less, that is the budget; what is more is never lent. It must be aligned to `align`,
                and to a page. None maps host memory that starts at 2 MiB.

        Raises:
            ConfigError: the budget, or what `memory` returned, is below one page.
            CapabilityError: the system cannot map so much.
        """
        self._unit = max(align, mmap.PAGESIZE)
        self._require(budget_bytes, mmap.PAGESIZE)
        wanted = align_up(budget_bytes, self._unit)
        ring = (memory or _host_memory)(wanted)
        self._require(ring.nbytes, self._unit)
        self._budget = align_down(min(ring.nbytes, wanted), self._unit)
        self.memory: memoryview = ring[: self._budget]
        """The whole ring: writable; for `Reader.register`. Mapped while anything looks at it."""
        self._free = _FreeRuns(self._budget)
        self._lent: dict[int, tuple[weakref.ref[_Bytes], int]] = {}  # by offset: who is watched, and bytes
        self._died: queue.SimpleQueue[int | None] = queue.SimpleQueue()  # its put may be called inside of a finaliser
        self._turn = threading.Lock()  # one waits for memory, the others for their turn
        self._closed = False

    @staticmethod
    def _require(nbytes: int, least: int) -> None:
        if nbytes < least:
            raise ConfigError("a pool needs at least one page", expected=f">= {least}", found=nbytes)

    @property
    def budget_bytes(self) -> int:
        """The most bytes that are ever lent."""
        return self._budget

    @property
    def lent_bytes(self) -> int:
        """Bytes that something looks at now, in whole pages."""
        return sum(length for watched, length in list(self._lent.values()) if watched() is not None)

    def acquire(self, length: int, *, timeout_s: float | None = None) -> memoryview:
        """Lend `length` bytes, waiting until the budget allows it.

        Args:
            length: bytes; may be 0.
            timeout_s: the longest wait; None waits until there is room or the pool is closed.

        Returns:
            Exactly the bytes asked for: writable, page-aligned, of undefined content, on loan while it or anything
            made of it is alive.

        Raises:
            ConfigError: the budget can never hold `length` bytes, or the pool is, or becomes, closed.
            StorageError: the wait was longer than `timeout_s`.
        """
        size = max(align_up(length, self._unit), self._unit)
        if length < 0 or size > self._budget:
            raise ConfigError(
                "the buffer budget can never hold this lease", expected=f"0..{self._budget} bytes", found=length
            )
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        if not self._turn.acquire(timeout=-1 if timeout_s is None else max(timeout_s, 0)):
            raise self._too_late(size, timeout_s)
        try:
            while (offset := self._take(size)) is None:
                if not self._wait(deadline):
                    raise self._too_late(size, timeout_s)
            # Whatever is made of this array keeps it alive, so its end is the end of the loan.
            part: _Bytes = np.frombuffer(self.memory[offset : offset + size], np.uint8)
            died = self._died
            self._lent[offset] = (weakref.ref(part, lambda _: died.put(offset)), size)
        finally:
            self._turn.release()
        return part.data[:length]

    def close(self) -> None:
        """Make every `acquire` fail, now and later; idempotent. The map goes when nothing looks at it any more."""
        self._closed = True
        self._died.put(None)
        self.memory = memoryview(bytearray())

    def __enter__(self) -> BufferPool:
        """Return the pool."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close."""
        self.close()

    def _take(self, size: int) -> int | None:
        with contextlib.suppress(queue.Empty):
            while True:
                self._give_back(self._died.get_nowait())
        if self._closed:
            raise ConfigError("the buffer pool is closed")
        return self._free.take(size)

    def _wait(self, deadline: float | None) -> bool:
        """Wait until some slice has come back or the pool is closed; False when the time is over."""
        left = None if deadline is None else deadline - time.monotonic()
        if left is not None and left <= 0:
            return False
        try:
            self._give_back(self._died.get(timeout=left))
        except queue.Empty:
            return False
        return True

    def _give_back(self, offset: int | None) -> None:
        if offset is None:  # closed; whoever waits after this one has to see it, too
            self._died.put(None)
            raise ConfigError("the buffer pool is closed")
        self._free.give(offset, self._lent.pop(offset)[1])

    def _too_late(self, size: int, timeout_s: float | None) -> StorageError:
        found = f"{self.lent_bytes} of {self._budget} bytes are in use"
        return StorageError(f"no buffer came free in {timeout_s} s", expected=f"{size} bytes", found=found)


class _FreeRuns:
    """The free parts of [0, size), in order; neighbours are joined."""

    def __init__(self, size: int) -> None:
        self._starts, self._ends = [0], [size]

    def take(self, length: int) -> int | None:
        """Take `length` bytes from the first run that has them, and return their offset."""
        for at, (start, end) in enumerate(zip(self._starts, self._ends, strict=True)):
            if end - start >= length:
                self._starts[at] = start + length
                if end - start == length:
                    del self._starts[at], self._ends[at]
                return start
        return None

    def give(self, start: int, length: int) -> None:
        """Give bytes back that were taken."""
        end = start + length
        at = bisect.bisect(self._starts, start)
        self._starts.insert(at, start)
        self._ends.insert(at, end)
        if at + 1 < len(self._starts) and self._starts[at + 1] == end:
            del self._starts[at + 1], self._ends[at]
        if at and self._ends[at - 1] == start:
            del self._starts[at], self._ends[at - 1]


def aligned_memory(size: int, align: int, *, huge: bool = False) -> memoryview:
    """Return writable, zeroed host memory of its own; it goes with its last view.

    What the view is made of (`.obj`) owns the map, so a `weakref.finalize` on it runs while the memory is still mapped.

    Args:
        size: bytes; may be 0.
        align: bytes that its address is a multiple of; a power of two.
        huge: ask for huge pages.

    Raises:
        CapabilityError: the system has no memory left to map.
    """
    try:
        memory = mmap.mmap(-1, size + align, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, ValueError, OverflowError) as error:
        raise CapabilityError(
            "cannot map memory for a buffer", expected=f"{size} bytes", found=str(error),
            remedy="take a smaller batch_size or prefetch, or raise the limit of memory",
        ) from error  # fmt: skip
    if huge:
        # Fewer page faults and longer runs for the device: cold direct reads of 90 kB ran 1.8 times as fast with it.
        # A kernel without huge pages says EINVAL.
        with contextlib.suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
    skipped = -np.frombuffer(memory, np.uint8).ctypes.data % align
    return memoryview((ctypes.c_ubyte * size).from_buffer(memory, skipped)).cast("B")


def _host_memory(size: int) -> memoryview:
    return aligned_memory(size, _HUGE, huge=True)
