"""Who indexes the shards: the caller's thread, threads beside it, or processes, by what there is to compute."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import deque
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, TypeAlias

from shardkit.errors import ShardkitError
from shardkit.indexing.rows import index_shard
from shardkit.indexing.workers import Workers

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Generator, Sequence

    from shardkit.indexing.inputs import ShardFile
    from shardkit.indexing.options import IndexOptions
    from shardkit.indexing.rows import ShardOutcome
    from shardkit.indexing.target import Target

    _Outcome: TypeAlias = ShardOutcome | ShardkitError
    _Measured: TypeAlias = tuple[_Outcome, float, float]

__all__ = ["WORTH_PROCESSES_S", "Crew", "threads_worth"]

WORTH_PROCESSES_S = 1.0
"""CPU seconds of the work that is left, by what was done, from which on processes are worth their start: 16 take 0.7 s
for that, and on two processors two gain from 0.8 s of computing on."""
_LOOK_S = 0.1
"""After which time it is seen what the first shard costs, and whether its headers have to be waited for."""


def threads_worth(jobs: int, took: float, cost: float) -> int:
    """Return how many threads compute as much as one can: more would wait for the interpreter, and for each other.

    Args:
        jobs: the most.
        took: seconds that one took by itself.
        cost: of them, those that it computed.

    >>> threads_worth(16, 2.0, 1.9), threads_worth(16, 2.0, 0.5), threads_worth(16, 2.0, 0.0)
    (1, 4, 16)
    """
    return max(round(took / max(cost, took / jobs)), 1)


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
        self._clock: int | None = None
        """Of the CPU time of the thread that reads the first shard."""
        self._passed = 0
        """Bytes that threads read or passed over."""

    def index(
        self, missing: Sequence[int], jobs: int, matters: Callable[[int], bool]
    ) -> Generator[list[tuple[int, _Outcome]], None, None]:
        """Yield what comes of some shards, as many at a time as are ready; few wait to be taken.

        Where a shard cannot be read, or the target failed, that is what comes of it.

        Args:
            missing: places of the shards, rising.
            jobs: shards at a time.
            matters: asked after what was yielded whether a shard is still to be read, or waited for.

        Raises:
            WorkerError: a process died.
        """
        if jobs == 1 or len(missing) < 3:
            for number in missing:
                if matters(number):
                    yield [(number, self._index(number))]
            return
        waiting = deque(missing)
        pool = ThreadPoolExecutor(min(jobs, len(missing)), "index")
        try:
            running = yield from self._in_threads(pool, waiting, jobs, matters)
            if waiting:
                processes = self._in_processes(waiting, jobs, running, matters)
                with contextlib.closing(processes) as batches:
                    for outcomes in batches:
                        yield outcomes
                        # Not at the end: it may be what ends the run.
                        for future in [future for future in running if future.done()]:
                            yield [(running.pop(future), future.result()[0])]
            for future, number in running.items():
                if matters(number):
                    yield [(number, future.result()[0])]
        finally:
            self._stopped.set()
            pool.shutdown(wait=True, cancel_futures=True)

    def _in_threads(
        self, pool: ThreadPoolExecutor, waiting: deque[int], jobs: int, matters: Callable[[int], bool]
    ) -> Generator[list[tuple[int, _Outcome]], None, dict[Future[_Measured], int]]:
        """Index until all is done, or until it is known that what is left is for processes: it stays in `waiting`.

        Returns:
            What threads still work at.
        """
        running: dict[Future[_Measured], int] = {}
        at_once, seen, begun = 1, 0, time.perf_counter()
        left = sum(self._shards[number].bytes for number in waiting)
        while True:
            if waiting and not matters(waiting[0]):
                waiting.clear()
            while waiting and len(running) < at_once:
                number = waiting.popleft()
                left -= self._shards[number].bytes
                running[pool.submit(self._measured, number)] = number
            if not any(map(matters, running.values())):
                return running
            if not seen and at_once == 1 and not wait(running, _LOOK_S).done:
                cost = self._computed()
                if self._passed and cost * left / self._passed >= WORTH_PROCESSES_S:
                    return running
                # Where headers lie apart it is the disk that takes long, and threads wait as well as processes do.
                at_once = threads_worth(jobs, time.perf_counter() - begun, cost)
                continue
            done = wait(running, return_when=FIRST_COMPLETED).done
            over = [(running.pop(future), *future.result()) for future in done]
            yield [(number, outcome) for number, outcome, _, _ in over]
            seen += len(over)
            number, _, cost, took = over[-1]
            if cost * left / max(self._shards[number].bytes, 1) >= WORTH_PROCESSES_S:
                if seen > 1:  # the first one paid for what is done once
                    at_once = 0
            elif at_once == 1:  # of several at once it is not known what each waits for
                at_once = threads_worth(jobs, took, cost)

    def _in_processes(
        self, missing: Collection[int], jobs: int, running: Collection[Future[_Measured]],
        matters: Callable[[int], bool],
    ) -> Generator[list[tuple[int, _Outcome]], None, None]:  # fmt: skip
        def room() -> int:  # one at least: of the threads one at most is at work by now
            return jobs - sum(not future.done() for future in running)

        with Workers(min(jobs, len(missing), len(os.sched_getaffinity(0)))) as workers:
            given = [(number, self._shards[number]) for number in missing]
            yield from workers.index(given, self._options, self._target, self._arrived, matters, room)

    def _computed(self) -> float:
        """Return the CPU seconds of the thread that reads the first shard."""
        return 0.0 if self._clock is None else time.clock_gettime(self._clock)

    def _measured(self, number: int) -> _Measured:
        """Index a shard; return the CPU seconds and the seconds that it took, too."""
        self._clock = self._clock or time.pthread_getcpuclockid(threading.get_ident())
        begun, start = time.perf_counter(), time.thread_time()
        outcome = self._index(number)
        return outcome, time.thread_time() - start, time.perf_counter() - begun

    def _index(self, number: int) -> _Outcome:
        try:
            return index_shard(self._shards[number], self._options, self._target.temporary, self._count)
        except ShardkitError as error:
            return error

    def _count(self, count: int) -> None:
        if self._stopped.is_set():
            raise _StoppedError
        self._passed += count
        self._arrived(count)
