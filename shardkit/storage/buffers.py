"""Host memory for reads: page-aligned, reused, and never more of it than the budget says."""

from __future__ import annotations

import contextlib
import mmap
import threading
import time
from collections import deque
from typing import TYPE_CHECKING

from shardkit.errors import CapabilityError, ConfigError, StorageError
from shardkit.extent import align_up

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

__all__ = ["BufferPool", "Lease"]

_HUGE = 2 << 20
_POLL_S = 0.02


class Lease:
    """A run of page-aligned host memory on loan from a `BufferPool`. A context manager that releases at its end."""

    __slots__ = ("_lock", "_release", "_view")

    def __init__(self, view: memoryview, release: Callable[[], None]) -> None:
        """Take over `view`; `release` is called once."""
        self._view: memoryview | None = view
        self._release = release
        self._lock = threading.Lock()

    @property
    def view(self) -> memoryview:
        """Exactly the bytes asked for: writable, host memory, page-aligned, owned by the pool, of undefined content.

        Raises:
            ConfigError: the lease was released.
        """
        view = self._view
        if view is None:
            raise ConfigError("this buffer was given back")
        return view

    def release(self) -> None:
        """Give the memory back; idempotent.

        It is lent again only when nothing made from `view` (a slice, a NumPy array) is alive any more, so a view that
        outlives its lease keeps its bytes, and goes on counting against the budget.
        """
        with self._lock:
            view, self._view = self._view, None
        if view is None:
            return
        with contextlib.suppress(BufferError):  # an array holds on to it: the pool sees that too, and waits for it
            view.release()
        self._release()

    def __enter__(self) -> Lease:
        """Return the lease."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Release."""
        self.release()


class BufferPool:
    """Lends page-aligned anonymous memory out of a hard budget of bytes; several threads may use it.

    Mapped memory is kept and lent again, because the kernel would have to zero it anew. Sizes are rounded up by at
    most an eighth, so that leases of similar size find each other's memory. The budget counts everything that is
    mapped: lent, kept, or still viewed after its release. Who waits is served in the order of arrival.
    """

    def __init__(self, budget_bytes: int) -> None:
        """Reserve nothing yet: memory is mapped when it is first asked for.

        Args:
            budget_bytes: the most that is ever mapped; at least one page.

        Raises:
            ConfigError: the budget is below one page.
        """
        if budget_bytes < mmap.PAGESIZE:
            raise ConfigError("a pool needs at least one page", expected=f">= {mmap.PAGESIZE}", found=budget_bytes)
        self._budget = budget_bytes
        self._changed = threading.Condition()
        self._queue: deque[object] = deque()
        self._mapped = 0
        self._lent = 0
        self._kept: list[mmap.mmap] = []  # the one released last is at the end, and warm in the caches
        self._viewed: list[mmap.mmap] = []
        self._closed = False

    @property
    def budget_bytes(self) -> int:
        """The most bytes that are ever mapped."""
        return self._budget

    @property
    def mapped_bytes(self) -> int:
        """Bytes that are mapped now: lent, kept for the next lease, or still viewed."""
        with self._changed:
            return self._mapped

    @property
    def lent_bytes(self) -> int:
        """Bytes that are out on leases now, rounded up as they are mapped."""
        with self._changed:
            return self._lent

    def acquire(self, length: int, *, timeout_s: float | None = None) -> Lease:
        """Lend `length` bytes, waiting until the budget allows it.

        Args:
            length: bytes; may be 0.
            timeout_s: the longest wait; None waits until there is room or the pool is closed.

        Raises:
            ConfigError: the budget can never hold `length` bytes, or the pool is, or becomes, closed.
            StorageError: the wait was longer than `timeout_s`.
            CapabilityError: the system has no memory left to map.
        """
        size = _mapping_bytes(length)
        if size > self._budget:
            raise ConfigError(
                "the buffer budget can never hold this lease", expected=f"at most {self._budget}", found=size
            )
        ticket = object()
        with self._changed:
            self._queue.append(ticket)
            try:
                memory = self._wait_for(ticket, size, timeout_s)
            finally:
                self._queue.remove(ticket)
                self._changed.notify_all()
            self._lent += size
        view = memoryview(memory)[:length]
        return Lease(view, lambda: self._take_back(memory))

    def close(self) -> None:
        """Unmap what is not lent and make every waiting `acquire` fail; what comes back later is unmapped then."""
        with self._changed:
            self._closed = True
            self._sort_viewed()
            while self._kept:
                self._unmap(self._kept.pop())
            self._changed.notify_all()

    def __enter__(self) -> BufferPool:
        """Return the pool."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close."""
        self.close()

    def _wait_for(self, ticket: object, size: int, timeout_s: float | None) -> mmap.mmap:
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            if self._closed:
                raise ConfigError("the buffer pool is closed")
            memory = self._find(size) if self._queue[0] is ticket else None
            if memory is not None:
                return memory
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                viewed = sum(len(memory) for memory in self._viewed)
                found = f"{self._lent} of {self._budget} bytes lent, {viewed} released but still viewed"
                raise StorageError(f"no buffer came free in {timeout_s} s", expected=f"{size} bytes", found=found)
            # The death of a view tells nobody, so it is looked for.
            self._changed.wait(min(_POLL_S, left or _POLL_S) if self._viewed else left)

    def _find(self, size: int) -> mmap.mmap | None:
        """Return memory of `size` bytes, kept or new, or None when the budget has no room."""
        self._sort_viewed()
        for index in range(len(self._kept) - 1, -1, -1):
            if len(self._kept[index]) == size:
                return self._kept.pop(index)
        while self._kept and self._mapped + size > self._budget:
            self._unmap(self._kept.pop(0))
        if self._mapped + size > self._budget:
            return None
        memory = _map(size)
        self._mapped += size
        return memory

    def _take_back(self, memory: mmap.mmap) -> None:
        with self._changed:
            self._lent -= len(memory)
            self._viewed.append(memory)
            self._sort_viewed()
            self._changed.notify_all()

    def _sort_viewed(self) -> None:
        """Move memory that nothing looks at any more to the kept, or unmap it when the pool is closed."""
        released, self._viewed = self._viewed, []
        for memory in released:
            if _is_viewed(memory):
                self._viewed.append(memory)
            elif self._closed:
                self._unmap(memory)
            else:
                self._kept.append(memory)

    def _unmap(self, memory: mmap.mmap) -> None:
        self._mapped -= len(memory)
        memory.close()


def _mapping_bytes(length: int) -> int:
    """Return the bytes to map for `length`: whole pages, and from 64 KiB on eight sizes between two powers of two.

    >>> _mapping_bytes(1), _mapping_bytes(100_000), _mapping_bytes(1 << 20)
    (4096, 106496, 1048576)
    """
    if length < 0:
        raise ConfigError("a buffer has no negative length", found=length)
    step = max(mmap.PAGESIZE, (1 << max(length - 1, 0).bit_length()) // 16)
    return max(align_up(length, step), mmap.PAGESIZE)


def _map(size: int) -> mmap.mmap:
    try:
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, ValueError, OverflowError) as error:
        raise CapabilityError("cannot map memory for a buffer", expected=f"{size} bytes", found=str(error)) from error
    if size >= _HUGE:
        # Fewer page faults and longer runs for the device: cold direct reads of 90 kB ran 1.8 times as fast with it.
        # A kernel without huge pages says EINVAL.
        with contextlib.suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def _is_viewed(memory: mmap.mmap) -> bool:
    """Return whether a memoryview or an array on `memory` is alive."""
    # Python tells this only by refusing to move memory that is looked at; the same size moves nothing.
    try:
        memory.resize(len(memory))
    except BufferError:
        return True
    return False
