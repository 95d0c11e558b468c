"""Threads that decoders work in, and a way to wait for what they make that Ctrl-C cannot break.

Daemon threads of our own: an executor's are joined when the interpreter ends, also one whose read never does. Signals
come to the main thread anywhere in Python code, also in that of conditions and futures, which then keep their lock for
ever, and in `Thread.join`, which then takes a running thread for an ended one (CPython 3.11). So who waits here uses
`queue.SimpleQueue` and flags that are set in one step, and looks for itself from time to time.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import queue
import threading
import time
from typing import TYPE_CHECKING, Generic, ParamSpec, TypeVar

from shardkit.dataset.fetch import PATIENCE_S
from shardkit.errors import CapabilityError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["Cancelled", "Outcome", "Workers"]

_LOOK_S = 0.5  # how often who waits looks whether there is still something to wait for
_POLL_S = 0.05

_T = TypeVar("_T")
_P = ParamSpec("_P")


class Cancelled(Exception):
    """Work that was not done because its threads were closed."""


class Outcome(Generic[_T]):
    """What a thread will have made. One thread waits for it."""

    __slots__ = ("_bell", "_error", "_value", "done")

    def __init__(self) -> None:
        """Start without."""
        self._bell: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._value: _T
        self._error: BaseException | None = None
        self.done = False
        """Whether there is a value or an error."""

    def set(self, value: _T) -> None:
        """Give the value; what comes after the first value or error does nothing."""
        if not self.done:
            self._value = value
            self._ring()

    def fail(self, error: BaseException) -> None:
        """Give the error that `wait` raises; likewise."""
        if not self.done:
            self._error = error
            self._ring()

    def wait(self, look: Callable[[], object] | None = None) -> _T:
        """Return the value when it is there, or raise the error.

        Args:
            look: called twice a second meanwhile; may raise, to wait no longer.
        """
        while not self.done:
            try:
                self._bell.get(timeout=_LOOK_S)
            except queue.Empty:
                if look is not None:
                    look()
        try:
            if self._error is not None:
                raise self._error
            return self._value
        finally:
            # Else an error would hold the frame that holds it, and keep memory until cycles are looked for.
            del self, look

    def _ring(self) -> None:
        self.done = True
        self._bell.put(None)


class Workers:
    """A fixed number of daemon threads. They end with `close`, or when the interpreter does."""

    def __init__(self, count: int, name: str, *, hopeless: Callable[[], bool] = lambda: False) -> None:
        """Start `count` threads, called `name`-0 and so on.

        Args:
            count: of the threads.
            name: of the threads.
            hopeless: says that what a thread waits for may never come, as on a GPU that is lost.

        Raises:
            CapabilityError: the system gives no more threads; none is left behind.
        """
        self._tasks: queue.SimpleQueue[tuple[Outcome[object], Callable[[], object]] | None] = queue.SimpleQueue()
        self._ended: list[None] = []  # one for each thread that is through
        self._bell: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._process, self._hopeless = os.getpid(), hopeless
        self.in_read = False
        """Whether one of them is in `reading`."""
        self.closed = False
        """`close` was called."""
        self._threads: list[threading.Thread] = []
        # A thread that is in DALI or torch while the interpreter is taken down would take the process with it.
        atexit.register(self.close)
        try:
            for number in range(count):
                thread = threading.Thread(target=self._work_off, name=f"{name}-{number}", daemon=True)
                thread.start()
                self._threads.append(thread)
        except BaseException as error:
            self.close()
            if isinstance(error, RuntimeError):
                raise CapabilityError(
                    "threads cannot be started", expected=count, found=f"{len(self._threads)}, then {error}",
                    remedy="raise the limit of processes (ulimit -u, pids.max), or take fewer threads",
                ) from error  # fmt: skip
            raise

    @property
    def ended(self) -> bool:
        """Whether all threads are through; true in a child process, which has none of them."""
        return len(self._ended) >= len(self._threads) or self._process != os.getpid()

    def submit(self, work: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> Outcome[_T]:
        """Let a thread call `work` when one is free."""
        outcome: Outcome[_T] = Outcome()
        self._tasks.put((outcome, lambda: work(*args, **kwargs)))  # type: ignore[arg-type]  # of one type with its work
        return outcome

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Say that the thread is in a read, which may never end; for one of the threads at a time."""
        self.in_read = True
        try:
            yield
        finally:
            self.in_read = False

    def close(self) -> bool:
        """Cancel what was not begun, and wait for the threads; idempotent.

        One that stays in `reading`, or anywhere where it is hopeless, is left behind after a while.

        Ctrl-C does not shorten it: it is raised when the threads have ended, so that nobody frees memory they look at.

        Returns:
            Whether all threads have ended.
        """
        self.closed = True
        with contextlib.suppress(queue.Empty):
            while True:
                if (task := self._tasks.get_nowait()) is not None:
                    task[0].fail(Cancelled())
        for _ in self._threads:
            self._tasks.put(None)
        interrupted: BaseException | None = None
        end = time.monotonic() + PATIENCE_S
        while not self.ended and not (time.monotonic() > end and (self.in_read or self._hopeless())):
            try:
                with contextlib.suppress(queue.Empty):
                    self._bell.get(timeout=_POLL_S)
            except BaseException as error:
                interrupted = error
        atexit.unregister(self.close)
        if interrupted is not None:
            raise interrupted
        if self.ended and self._process == os.getpid():
            for thread in self._threads:
                thread.join()  # in its last few instructions
        return self.ended

    def _work_off(self) -> None:
        try:
            while (task := self._tasks.get()) is not None:
                _do(*task)
                del task  # it may hold memory
        finally:
            self._ended.append(None)
            self._bell.put(None)


def _do(outcome: Outcome[object], work: Callable[[], object]) -> None:
    try:
        outcome.set(work())
    except BaseException as error:  # whatever it is, who waits has to see it
        outcome.fail(error)
    finally:
        del outcome, work  # as in `Outcome.wait`
