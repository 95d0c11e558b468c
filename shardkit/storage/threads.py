"""The threads of a reader: one batch of ops is shared out, and the first error in the order of the ops is raised."""

from __future__ import annotations

import os
import sys
import threading
from dataclasses import dataclass, field
from time import monotonic, sleep
from typing import TYPE_CHECKING, Protocol, TypeAlias

from shardkit.errors import ConfigError
from shardkit.storage.crew import Crew
from shardkit.storage.reader import Pending, ReadOp, ReadOps

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

__all__ = ["ReadThreads", "Row", "Worker", "rows_of"]

_POLL_S = 0.002

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


@dataclass(slots=True, eq=False)
class _Batch:
    """The ops of one call, handed out in order, one at a time."""

    # What was handed out is carried out: when op k has failed, every op before it is done or in some thread's hands.
    # So the smallest k in the end is the first failure, whatever the timing was.
    rows: list[Row]
    begin: Callable[[], Worker]
    numbers: Iterator[int]
    stopped: bool = False
    over: bool = False
    """The call has returned or raised: one store, so that no signal can come between."""
    failed: list[tuple[int, Exception]] = field(default_factory=list)
    arrived: list[int] = field(default_factory=list)
    """Bytes, of each thread that has ended."""
    busy: dict[object, tuple[int, int, float]] = field(default_factory=dict)
    """What each thread is in and since when. Set and removed as a whole, so it is read without a lock."""

    def stop(self) -> None:
        """Hand out nothing more."""
        self.stopped = True

    def work(self) -> None:
        """Carry out ops until none is left or one has failed; called in each thread."""
        worker, total, me = self.begin(), 0, object()
        try:
            for number in self.numbers:
                row = self.rows[number]
                self.busy[me] = (row[0], row[1], monotonic())
                try:
                    total += worker.read(row)
                except Exception as error:
                    self.failed.append((number, error))
                    self.stopped = True
                if self.stopped:
                    break
        finally:
            self.busy.pop(me, None)
            self.arrived.append(total)
            worker.end()


class ReadThreads:
    """Carries out ops with up to `most` threads, the calling one among them, so that any caller makes progress."""

    def __init__(self, most: int) -> None:
        """Start nothing yet.

        Args:
            most: threads; >= 1; 1 reads in the calling thread only.

        Raises:
            ConfigError: fewer than one.
        """
        if most < 1:
            raise ConfigError("a reader needs at least one thread", found=most)
        self.most = most
        """Threads that a call may have."""
        self._lock = threading.Lock()
        self._calls: set[_Batch] = set()
        self._closed = False
        self._crew = Crew(most - 1, name="shardkit-read")
        self._process = os.getpid()

    def run(self, rows: list[Row], begin: Callable[[], Worker], *, threads: int) -> int:
        """Let workers read every row; returns or raises when no thread is inside one any more.

        Args:
            rows: the batch; emptied in the end, because a thread that waits for work must not hold the memory.
            begin: makes the worker of one thread; called in it.
            threads: how many read, at most.

        Returns:
            The sum of what `Worker.read` returned.

        Raises:
            ConfigError: the reader is closed.
            BaseException: what `Worker.read` raised for the first row that failed. Later rows may have been left out,
                earlier ones never are.
        """
        batch = _Batch(rows, begin, iter(range(len(rows))))
        try:
            self._enter(batch)
            self._crew.share(batch.work, min(threads, len(rows)) - 1, batch.stop)
            if batch.failed:
                raise min(batch.failed, key=lambda failure: failure[0])[1]
            return sum(batch.arrived)
        finally:
            batch.over = True
            self._calls.discard(batch)
            rows.clear()
            batch.failed.clear()  # an error that a frame of its own traceback holds would keep that memory, too

    def oldest(self, paths: Sequence[str]) -> Pending | None:
        """Return the read that has run the longest, or None when none runs; takes no lock.

        Args:
            paths: the reader's files.
        """
        running = [busy for call in list(self._calls) if not call.over for busy in list(call.busy.values())]
        oldest = min(running, key=lambda busy: busy[2], default=None)
        if oldest is None or self._process != os.getpid():
            return None
        file, offset, since = oldest
        return Pending(path=paths[file], offset=offset, seconds=monotonic() - since)

    def close(self) -> None:
        """Wait for the calls in progress and end the threads; idempotent."""
        if sys.is_finalizing():  # the interpreter lets no daemon thread run any more: one that reads would never end
            return
        self._notice_fork()
        with self._lock:
            self._closed = True
        while any(not call.over for call in list(self._calls)):
            sleep(_POLL_S)
        self._crew.close()

    def _enter(self, batch: _Batch) -> None:
        self._notice_fork()
        with self._lock:
            if self._closed:
                raise ConfigError("the reader is closed", remedy="open another one")
            self._calls.add(batch)

    def _notice_fork(self) -> None:
        """Start anew in a child process: it has none of the threads, and a lock that one of them may have held."""
        if self._process != os.getpid():
            self._lock, self._calls = threading.Lock(), set()
            self._crew.start_anew()
            self._process = os.getpid()
