"""Processes that index shards, one shard each at a time, where there is more to compute than to wait for.

A worker writes temporary files only; names are the parent's to give, so that one which outlives a killed parent can
never touch a dataset.
"""

from __future__ import annotations

from functools import partial
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING, Any, Self, TypeAlias

from shardkit.errors import ShardkitError, WorkerError
from shardkit.indexing.rows import index_shard
from shardkit.running import processes

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable, Iterator, Sequence

    from shardkit.indexing.inputs import ShardFile
    from shardkit.indexing.options import IndexOptions
    from shardkit.indexing.rows import ShardOutcome
    from shardkit.indexing.target import Target

    _Work: TypeAlias = tuple[ShardFile, IndexOptions, Target]

__all__ = ["Workers", "serve"]


class Workers:
    """A number of processes. A context manager that ends them: at once after an error."""

    def __init__(self, count: int) -> None:
        """Take how many there are to be; none is started yet."""
        self._count = count
        self._processes: dict[Connection, subprocess.Popen[bytes]] = {}
        self._given: dict[int, str] = {}  # paths of the shards that are, or were, worked on

    def __enter__(self) -> Self:
        """Start them.

        Raises:
            WorkerError: one cannot be started.
        """
        try:
            for _ in range(self._count):
                self._start()
        except BaseException:
            self._end(kill=True)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """End them."""
        self._end(kill=kind is not None)

    def index(
        self, shards: Sequence[tuple[int, ShardFile]], options: IndexOptions, target: Target,
        arrived: Callable[[int], object], matters: Callable[[int], bool], room: Callable[[], int],
    ) -> Iterator[list[tuple[int, ShardOutcome | ShardkitError]]]:  # fmt: skip
        """Index shards; yield what comes of each, with its number, as many at a time as are ready.

        Args:
            shards: with their numbers.
            options: for each.
            target: gives the temporary names.
            arrived: called with the number of bytes that were read or passed over.
            matters: tells whether a shard is still to be read, or waited for.
            room: asked again and again how many processes may be at work; at least one.

        Raises:
            WorkerError: a process died.
        """
        waiting = (pair for pair in shards if matters(pair[0]))
        busy: dict[Connection, int] = {}
        idle = list(self._processes)
        while True:
            while idle and len(busy) < room() and (following := next(waiting, None)) is not None:
                number, shard = following
                self._give(idle.pop(), number, (shard, options, target), busy)
            if not any(map(matters, busy.values())):
                return
            done = []
            for ready in wait(list(busy)):
                assert isinstance(ready, Connection)
                kind, value = self._receive(ready, self._given[busy[ready]])
                if kind == "arrived":
                    arrived(value)
                    continue
                done.append((busy.pop(ready), value))
                idle.append(ready)
            if done:
                yield done

    def _start(self) -> None:
        connection, process = processes.start_process(__name__)
        self._processes[connection] = process

    def _give(self, connection: Connection, number: int, work: _Work, busy: dict[Connection, int]) -> None:
        busy[connection] = number
        self._given[number] = work[0].path
        try:
            connection.send(work)
        except OSError as error:  # it died while it waited
            raise self._died(connection, work[0].path) from error

    def _receive(self, connection: Connection, shard: str) -> tuple[str, Any]:  # Any: what the kind says
        try:
            kind, value = connection.recv()
        except (EOFError, OSError) as error:
            raise self._died(connection, shard) from error
        return kind, value

    def _died(self, connection: Connection, shard: str) -> WorkerError:
        return WorkerError(
            "a worker died", path=shard, found=processes.how_it_ended(self._processes[connection].wait()),
            remedy="look for the out-of-memory killer, or use fewer --jobs",
        )  # fmt: skip

    def _end(self, *, kill: bool) -> None:
        for connection, process in self._processes.items():
            connection.close()
            if kill:
                process.kill()
        for process in self._processes.values():
            process.wait()
        self._processes.clear()


def serve(fd: int) -> None:
    """Be a worker process; see `shardkit.running.processes`."""
    processes.serve(fd, _work)


def _work(connection: Connection) -> None:
    """Take shards, for ever, each with options and a target."""

    def arrived(count: int) -> None:
        connection.send(("arrived", count))

    while True:
        work: _Work = connection.recv()
        shard, options, target = work
        made = processes.answer(partial(index_shard, shard, options, target.temporary, arrived), path=shard.path)
        connection.send(made)
