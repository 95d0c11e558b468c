"""Who indexes the shards: the caller's thread, threads beside it, or processes, by what there is to compute."""

from __future__ import annotations

import os
import threading
import time
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING

from shardkit.indexing.rows import index_shard
from shardkit.indexing.workers import Workers

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

    from shardkit.indexing.inputs import ShardFile
    from shardkit.indexing.options import IndexOptions
    from shardkit.indexing.rows import ShardOutcome
    from shardkit.indexing.target import Target

__all__ = ["WORTH_PROCESSES_S", "Crew"]

WORTH_PROCESSES_S = 1.0
"""CPU seconds of the work that is left, by the first shard's, from which on processes are worth their start."""
_CLOCK_S = 1e-6


class _StoppedError(Exception):
    """The run was told to stop: raised in threads, never seen outside."""


class Crew:
    """Indexes shards, several at a time; what comes out is the same for any number."""

    def __init__(
        self, shards: Sequence[ShardFile], options: IndexOptions, target: Target, arrived: Callable[[int], object]
    ) -> None:
        """Take what the work is about.

        Args:
            shards: all of them.
            options: for each.
            target: held; gives the temporary names.
            arrived: called with the number of bytes that were read or passed over, from any thread.
        """
        self._shards = shards
        self._options = options
        self._target = target
        self._arrived = arrived
        self._stopped = threading.Event()

    def index(self, missing: Sequence[int], jobs: int) -> Generator[tuple[int, ShardOutcome], None, None]:
        """Yield what comes of some shards, as each gets ready; few wait to be taken.

        Args:
            missing: places of the shards.
            jobs: shards at a time.

        Raises:
            WorkerError: a process died.
            ShardkitError: a shard cannot be read, or the target failed.
        """
        if not missing:
            return
        first, rest = missing[0], missing[1:]
        begun, start = time.perf_counter(), time.thread_time()
        outcome = self._index(first)
        cost, took = time.thread_time() - start, time.perf_counter() - begun
        yield first, outcome
        left = cost * sum(self._shards[number].bytes for number in rest) / max(self._shards[first].bytes, 1)
        # Where headers lie apart it is the disk that takes long, and threads wait as well as processes do.
        if jobs == 1 or len(rest) < 2:
            for number in rest:
                yield number, self._index(number)
        elif left < WORTH_PROCESSES_S:
            # One that computes, and as many as wait meanwhile: more would wait for the interpreter, and for each other.
            yield from self._in_threads(rest, min(jobs, 1 + int(took / max(cost, took / jobs, _CLOCK_S))))
        else:
            with Workers(min(jobs, len(rest), len(os.sched_getaffinity(0)))) as workers:
                given = [(number, self._shards[number]) for number in rest]
                yield from workers.index(given, self._options, self._target, self._arrived)

    def _in_threads(self, missing: Sequence[int], jobs: int) -> Generator[tuple[int, ShardOutcome], None, None]:
        waiting = iter(missing)
        pool = ThreadPoolExecutor(min(jobs, len(missing)), "index")
        try:
            running: dict[Future[ShardOutcome], int] = {}
            for number in [next(waiting) for _ in range(min(2 * jobs, len(missing)))]:
                running[pool.submit(self._index, number)] = number
            while running:
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    yield running.pop(future), future.result()
                    following = next(waiting, None)
                    if following is not None:
                        running[pool.submit(self._index, following)] = following
        finally:
            self._stopped.set()
            pool.shutdown(wait=True, cancel_futures=True)

    def _index(self, number: int) -> ShardOutcome:
        return index_shard(self._shards[number], self._options, self._target.temporary, self._count)

    def _count(self, count: int) -> None:
        if self._stopped.is_set():
            raise _StoppedError
        self._arrived(count)
