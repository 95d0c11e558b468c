"""Shards in threads: results in stored order, and a stop that every thread sees."""

from __future__ import annotations

import os
import threading
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

from shardkit.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable

__all__ = ["Stopped", "Threads", "Turns"]

_AHEAD = 2
_T = TypeVar("_T")
_S = TypeVar("_S")


class Stopped(Exception):
    """The run has ended meanwhile; raised in a thread whose result nobody asks for."""


class Threads:
    """As many threads as jobs; with one, all is done in the caller's."""

    def __init__(self, jobs: int | None) -> None:
        """Start none yet.

        Args:
            jobs: default as many as this process has cores.

        Raises:
            ConfigError: fewer than one.
        """
        self.jobs = len(os.sched_getaffinity(0)) if jobs is None else jobs
        if self.jobs < 1:
            raise ConfigError("at least one job", found=jobs)
        self._stop = threading.Event()

    def check(self) -> None:
        """End this thread's work if the run has ended; for loops over blocks and samples.

        Raises:
            Stopped: it has.
        """
        if self._stop.is_set():
            raise Stopped

    def in_order(self, work: Callable[[_S], _T], items: Iterable[_S]) -> Generator[_T]:
        """Yield what comes of each item, in order; the first error in that order ends the run.

        However it ends, no thread works on when the iterator is closed. At most two items a thread are begun or done
        and not yet yielded.
        """
        if self.jobs == 1:
            yield from map(work, items)
            return
        pool = ThreadPoolExecutor(self.jobs, "repair")
        running: deque[Future[_T]] = deque()
        try:
            for item in items:
                running.append(pool.submit(work, item))
                if len(running) >= _AHEAD * self.jobs:
                    yield running.popleft().result()
            while running:
                yield running.popleft().result()
        except BaseException:
            self._stop.set()
            raise
        finally:
            pool.shutdown(cancel_futures=True)


class Turns:
    """Lets those that must go one after another do so, in the order of their numbers, among others that need not."""

    def __init__(self, check: Callable[[], None]) -> None:
        """Begin with number 0.

        Args:
            check: raises when nobody waits for a result any more.
        """
        self._check = check
        self._changed = threading.Condition()
        self._over: set[int] = set()
        self._next = 0

    def wait(self, number: int) -> None:
        """Return when everybody with a lower number is over it.

        Raises:
            Stopped: as `check`.
        """
        with self._changed:
            while self._next < number:
                self._check()
                self._changed.wait(0.1)

    def over(self, number: int) -> None:
        """Say that a number is over it, or never needed its turn. Idempotent."""
        with self._changed:
            self._over.add(number)
            while self._next in self._over:
                self._over.remove(self._next)
                self._next += 1
            self._over = {one for one in self._over if one >= self._next}
            self._changed.notify_all()
