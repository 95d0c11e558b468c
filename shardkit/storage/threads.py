"""The threads of a reader: one batch of ops is shared out, and the first error in the order of the ops is raised."""

from __future__ import annotations

import os
import threading
from concurrent.futures import Future
from dataclasses import dataclass, field
from queue import SimpleQueue
from time import monotonic
from typing import TYPE_CHECKING, Protocol, TypeAlias

from shardkit.errors import ConfigError
from shardkit.storage.reader import Pending, ReadOp, ReadOps

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

__all__ = ["ReadThreads", "Row", "Worker", "rows_of"]

Row: TypeAlias = tuple[int, int, int, memoryview]
"""An op as the threads handle it, because a tuple costs a tenth of an object: file, offset, need, destination."""


class Worker(Protocol):
    """Carries out ops in one thread, and may keep things (an open file) from one op to the next."""

    def read(self, row: Row, /) -> int:
        """Carry out one op and return the bytes that arrived."""

    def end(self) -> None:
        """Give back what was kept."""


def rows_of(ops: Sequence[ReadOp]) -> list[Row]:
    """Return the ops as rows; they hold the caller's memory until they are gone."""
    if isinstance(ops, ReadOps):
        buffer, lists = ops.buffer, (ops.file, ops.offset, ops.need, ops.start, ops.start + ops.length)
        rows = zip(*(column.tolist() for column in lists), strict=True)
        return [(file, offset, need, buffer[start:end]) for file, offset, need, start, end in rows]
    return [(op.file, op.span.offset, op.need, op.dst) for op in ops]


@dataclass(slots=True)
class _Batch:
    """The ops of one call, handed out in order, one at a time."""

    # What was handed out is carried out: when op k has failed, every op before it is done or in some thread's hands.
    # So the smallest k in the end is the first failure, whatever the timing was.
    rows: list[Row]
    begin: Callable[[], Worker]
    numbers: Iterator[int]
    failed: list[tuple[int, BaseException]] = field(default_factory=list)


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
        # Taken by itself and not through the condition, whose Python code Ctrl-C can leave with the lock held.
        self._lock = threading.Lock()
        self._left = threading.Condition(self._lock)
        self._calls = 0
        self._closed = False
        self._helpers: _Helpers | None = None
        self._process = os.getpid()
        # What each thread is in and since when. Set and removed as a whole, so it is read without a lock.
        self._busy: dict[object, tuple[int, int, float]] = {}

    def run(self, rows: list[Row], begin: Callable[[], Worker]) -> int:
        """Let workers read every row; returns or raises when no thread is inside one any more.

        Args:
            rows: the batch; emptied in the end, because a thread that waits for work must not hold the memory.
            begin: makes the worker of one thread; called in it.

        Returns:
            The sum of what `Worker.read` returned.

        Raises:
            ConfigError: the reader is closed.
            BaseException: what `Worker.read` raised for the first row that failed. Later rows may have been left out,
                earlier ones never are.
        """
        helpers = self._enter(len(rows))
        try:
            return self._share_out(_Batch(rows, begin, iter(range(len(rows)))), helpers)
        finally:
            self._leave()

    def oldest(self, paths: Sequence[str]) -> Pending | None:
        """Return the read that has run the longest, or None when none runs; takes no lock.

        Args:
            paths: the reader's files.
        """
        oldest = min(list(self._busy.values()), key=lambda busy: busy[2], default=None)
        if oldest is None or self._process != os.getpid():
            return None
        file, offset, since = oldest
        return Pending(path=paths[file], offset=offset, seconds=monotonic() - since)

    def close(self) -> bool:
        """Wait for the calls in progress and end the threads; return whether this was the first time."""
        self._notice_fork()
        with self._lock:
            first, self._closed = not self._closed, True
            while self._calls:
                self._left.wait()
            helpers, self._helpers = self._helpers, None
        if helpers is not None:
            helpers.end()
        return first

    def _enter(self, ops: int) -> _Helpers | None:
        self._notice_fork()
        with self._lock:
            if self._closed:
                raise ConfigError("the reader is closed", remedy="open another one")
            self._calls += 1
            if self._threads == 1 or ops < 2:
                return None
            if self._helpers is None:
                self._helpers = _Helpers(self._threads - 1)
            return self._helpers

    def _notice_fork(self) -> None:
        """Start anew in a child process: it has none of the threads, and a lock that one of them may have held."""
        if self._process != os.getpid():
            self._lock = threading.Lock()
            self._left = threading.Condition(self._lock)
            self._calls, self._helpers, self._process, self._busy = 0, None, os.getpid(), {}

    def _leave(self) -> None:
        with self._lock:
            self._calls -= 1
            self._left.notify_all()

    def _share_out(self, batch: _Batch, helpers: _Helpers | None) -> int:
        futures: list[Future[int]] = []
        total = 0
        try:
            if helpers is not None:
                count = min(self._threads, len(batch.rows)) - 1
                futures.extend(helpers.submit(lambda: self._work(batch)) for _ in range(count))
            total += self._work(batch)
        finally:
            total += _wait_for(futures, batch)
            # A helper thread holds `batch` until its next task, and must not hold the caller's memory till then.
            batch.rows.clear()
        try:
            if batch.failed:
                raise min(batch.failed, key=lambda failure: failure[0])[1]
        finally:
            batch.failed.clear()  # an error that is held by a frame of its own traceback would keep that memory, too
        return total

    def _work(self, batch: _Batch) -> int:
        rows, failed, busy, me = batch.rows, batch.failed, self._busy, object()
        worker, total = batch.begin(), 0
        try:
            for number in batch.numbers:
                row = rows[number]
                busy[me] = (row[0], row[1], monotonic())
                try:
                    total += worker.read(row)
                except BaseException as error:
                    failed.append((number, error))
                    if not isinstance(error, Exception):
                        raise  # Ctrl-C in the calling thread outranks every failed read
                if failed:
                    break
        finally:
            busy.pop(me, None)
            worker.end()
        return total


class _Helpers:
    """Threads that run calls, oldest first. Unlike an executor's they do not keep the process from ending.

    An executor is joined when the interpreter ends, so one read that hangs would hang the end of the program, too.
    """

    def __init__(self, count: int) -> None:
        self._calls: SimpleQueue[tuple[Future[int], Callable[[], int]] | None] = SimpleQueue()
        self._threads = [
            threading.Thread(target=self._run, name=f"shardkit-read-{number}", daemon=True) for number in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, call: Callable[[], int]) -> Future[int]:
        """Let some thread make a call."""
        future: Future[int] = Future()
        self._calls.put((future, call))
        return future

    def end(self) -> None:
        """Wait until every call is made and every thread has ended."""
        for _ in self._threads:
            self._calls.put(None)
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        while (task := self._calls.get()) is not None:
            future, call = task
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(call())
                except BaseException as error:
                    future.set_exception(error)
            del task, future, call  # what a call holds must not wait for the next one


def _wait_for(futures: list[Future[int]], batch: _Batch) -> int:
    """Return the sum of what the helpers read, when the last of them has ended, whatever interrupts meanwhile."""
    total, interrupts = 0, list[BaseException]()
    while futures:
        try:
            # One that has not started, because another call keeps the helpers busy, is not waited for.
            if not futures[-1].cancel():
                total += futures[-1].result()
            futures.pop()
        except BaseException as error:
            # Ctrl-C, mostly. The caller gets its memory back only when nobody writes to it any more.
            batch.failed.append((len(batch.rows), error))
            interrupts.append(error)
            if futures[-1].done():
                futures.pop()
    if interrupts:
        try:
            raise interrupts[0]
        finally:
            batch.failed.clear()
            interrupts.clear()
    return total
