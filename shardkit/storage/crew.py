"""Threads that help a call, built so that Ctrl-C in the calling thread can come between any two steps.

Signals are handled in the main thread only, but there anywhere: also inside the Python code of `threading.Condition`
and of futures, which then keep their lock for ever. So the calling thread uses plain locks, C queues and flags here,
which are set in one step, and what it waits for it also looks for from time to time.
"""

from __future__ import annotations

import contextlib
import threading
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Crew"]

_POLL_S = 0.02


class _Task:
    """One piece of work for one helper."""

    __slots__ = ("cancelled", "error", "over", "started", "wake", "work")

    def __init__(self, work: Callable[[], None], wake: SimpleQueue[None]) -> None:
        self.work, self.wake = work, wake
        self.started = self.cancelled = self.over = False
        self.error: BaseException | None = None

    def run(self) -> None:
        # Either the caller sees `started`, and waits, or this thread sees `cancelled`.
        self.started = True
        try:
            if not self.cancelled:
                self.work()
        except BaseException as error:
            self.error = error
        finally:
            self.over = True
            self.wake.put(None)


class Crew:
    """Helpers that share the work of calls; with none of them the caller does it all.

    They are daemons, and not an executor's threads, which are joined when the interpreter ends: one read that hangs
    would hang the end of the program, too.
    """

    def __init__(self, helpers: int, *, name: str) -> None:
        """Start nothing yet.

        Args:
            helpers: threads.
            name: of each of them, before its number.
        """
        self._helpers, self._name = helpers, name
        self.start_anew()

    def start_anew(self) -> None:
        """Be usable in a child process, which has none of the threads: they start when they are first needed."""
        self._tasks: SimpleQueue[_Task | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()

    def share(self, work: Callable[[], None], helpers: int, stop: Callable[[], None]) -> None:
        """Do some work in this thread and the same in helpers; returns or raises when none of them is in it any more.

        Args:
            work: called in each thread.
            helpers: how many; those that are busy elsewhere until this thread has done its part stay out.
            stop: called when something was raised; makes `work` end soon.

        Raises:
            BaseException: what `work` raised here, else in a helper.
        """
        wake: SimpleQueue[None] = SimpleQueue()
        tasks = [_Task(work, wake) for _ in range(min(helpers, self._helpers))]
        raised: BaseException | None = None
        try:
            if tasks:
                self._start()
            for task in tasks:
                self._tasks.put(task)
            work()
        except BaseException as error:
            raised = error
        while True:
            try:
                if raised is not None:
                    stop()
                _wait_for(tasks, wake)
                break
            except BaseException as error:  # Ctrl-C, perhaps once more
                raised = error
        raised = raised or next((task.error for task in tasks if task.error is not None), None)
        try:
            if raised is not None:
                raise raised
        finally:
            del raised, tasks  # an error that its own traceback's frames hold would keep the caller's memory, too

    def delegate(self, work: Callable[[], None], stop: Callable[[], None]) -> None:
        """Let a helper do some work, between whose steps Ctrl-C cannot come; there must be one, and it must be idle.

        Args:
            work: called in the helper; has not begun, or is over, when this returns or raises.
            stop: called when something was raised here; makes `work` end soon.

        Raises:
            BaseException: what came here, else what `work` raised.
        """
        wake: SimpleQueue[None] = SimpleQueue()
        task, raised = _Task(work, wake), list[BaseException]()
        try:
            self._start()
            self._tasks.put(task)
            while not task.over:
                with contextlib.suppress(Empty):
                    wake.get(timeout=_POLL_S)
        except BaseException as error:
            raised.append(error)
        while True:
            try:
                if raised:
                    stop()
                _wait_for([task], wake)
                break
            except BaseException as error:  # Ctrl-C, perhaps once more
                raised.append(error)
        try:
            if raised or task.error is not None:
                raise raised[-1] if raised else task.error or RuntimeError
        finally:
            raised.clear()
            del task  # an error that its own traceback's frames hold would keep the caller's memory, too

    def close(self) -> None:
        """End the threads when they have done what they do."""
        self._tasks.put(None)
        for thread in self._threads:
            thread.join()
        self._threads = []

    def _start(self) -> None:
        with self._lock:
            while (number := len(self._threads)) < self._helpers:
                name = f"{self._name}-{number}"
                thread = threading.Thread(target=_work_off, args=(self._tasks,), name=name, daemon=True)
                thread.start()
                self._threads.append(thread)  # Ctrl-C before this: there is one more, which ends with the others


def _wait_for(tasks: list[_Task], wake: SimpleQueue[None]) -> None:
    for task in tasks:
        task.cancelled = True
        while task.started and not task.over:
            with contextlib.suppress(Empty):
                wake.get(timeout=_POLL_S)


def _work_off(tasks: SimpleQueue[_Task | None]) -> None:
    while (task := tasks.get()) is not None:
        task.run()
        del task  # it holds the caller's memory
    tasks.put(None)  # the next one is to end, too
