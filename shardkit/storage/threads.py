"""The threads of a reader: one batch of ops is shared out, and the first error in the order of the ops is raised."""

from __future__ import annotations

import os
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

from shardkit.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from shardkit.storage.reader import ReadOp

__all__ = ["ReadThreads"]


class ReadThreads:
    """Carries out ops with up to `threads` threads, the calling one among them, so that any caller makes progress."""

    def __init__(self, threads: int) -> None:
        """Start nothing yet.

        Args:
            threads: >= 1; 1 reads in the calling thread only.

        Raises:
            ConfigError: fewer than one.
        """
        if threads < 1:
            raise ConfigError("a reader needs at least one thread", found=threads)
        self._threads = threads
        self._state = threading.Condition()
        self._calls = 0
        self._closed = False
        self._helpers: ThreadPoolExecutor | None = None
        self._process = os.getpid()

    def run(self, ops: Sequence[ReadOp], read: Callable[[ReadOp], int]) -> int:
        """Call `read` with every op; returns or raises when no thread is inside `read` any more.

        Args:
            ops: the batch.
            read: carries out one op; called from several threads.

        Returns:
            The sum of what `read` returned.

        Raises:
            ConfigError: the reader is closed.
            BaseException: what `read` raised for the first op that failed. Later ops may have been left out, earlier
                ones never are.
        """
        helpers = self._enter(len(ops))
        try:
            if helpers is None:
                return sum(map(read, ops))
            return _share_out(ops, read, helpers, min(self._threads, len(ops)) - 1)
        finally:
            self._leave()

    def close(self) -> bool:
        """Wait for the calls in progress and end the threads; return whether this was the first time."""
        self._notice_fork()
        with self._state:
            first, self._closed = not self._closed, True
            while self._calls:
                self._state.wait()
            helpers, self._helpers = self._helpers, None
        if helpers is not None:
            helpers.shutdown()
        return first

    def _enter(self, ops: int) -> ThreadPoolExecutor | None:
        self._notice_fork()
        with self._state:
            if self._closed:
                raise ConfigError("the reader is closed", remedy="open another one")
            self._calls += 1
            if self._threads == 1 or ops < 2:
                return None
            if self._helpers is None:
                self._helpers = ThreadPoolExecutor(self._threads - 1, thread_name_prefix="shardkit-read")
            return self._helpers

    def _notice_fork(self) -> None:
        """Start anew in a child process: it has none of the threads, and a lock that one of them may have held."""
        if self._process != os.getpid():
            self._state, self._calls, self._helpers, self._process = threading.Condition(), 0, None, os.getpid()

    def _leave(self) -> None:
        with self._state:
            self._calls -= 1
            self._state.notify_all()


def _share_out(ops: Sequence[ReadOp], read: Callable[[ReadOp], int], helpers: ThreadPoolExecutor, count: int) -> int:
    # Handed out in order, one at a time, and what was handed out is carried out: when op k has failed, every op before
    # it is done or in some thread's hands. So the smallest k in the end is the first failure, whatever the timing was.
    todo, numbers = list(ops), iter(range(len(ops)))
    failed: list[tuple[int, BaseException]] = []

    def work() -> int:
        total = 0
        while not failed:
            number = next(numbers, None)
            if number is None:
                break
            try:
                total += read(todo[number])
            except BaseException as error:
                failed.append((number, error))
                if not isinstance(error, Exception):
                    raise  # Ctrl-C in the calling thread outranks every failed read
        return total

    futures: list[Future[int]] = []
    total = 0
    try:
        futures.extend(helpers.submit(work) for _ in range(count))
        total += work()
    finally:
        # One that has not started, because another call keeps the helpers busy, is not waited for.
        total += sum(future.result() for future in futures if not future.cancel())
        # A helper thread holds `work` until its next task, and `work` must not hold the caller's memory till then.
        todo.clear()
    try:
        if failed:
            raise min(failed, key=lambda failure: failure[0])[1]
    finally:
        failed.clear()  # an error that is held by a frame of its own traceback would keep that memory, too
    return total
