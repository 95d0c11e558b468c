"""Those who make shards, one shard each at a time: a thread of the caller's process, and further processes.

A single job is the caller's own. Else all are spoken to over a socket. The thread has nothing to import, so it works
while the processes start. A worker writes temporary files only; names are the parent's to give, so that one which
outlives a killed parent can never touch a dataset.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING, Any, Self

import pyarrow as pa

from shardkit.errors import CapabilityError, StorageError, WorkerError
from shardkit.packing.plan import shard_name
from shardkit.packing.write import BUFFER_BYTES, BUFFERS, Progress, ShardJob, ShardResult, write_shard
from shardkit.running import processes
from shardkit.running.first_error import FirstError
from shardkit.running.spool import mapped
from shardkit.storage.atomic import os_errors
from shardkit.storage.sequential_writer import new_buffers

if TYPE_CHECKING:
    import mmap
    import subprocess
    from collections.abc import Collection, Iterator, Sequence
    from types import TracebackType

    from shardkit.packing.options import ShardOptions
    from shardkit.packing.supply import Origin
    from shardkit.storage.clone import Reflink

__all__ = ["PlanFile", "Workers", "serve"]

_PATIENCE_S = 1.0
_EARLY = 1
"""Processes that start before the plan says how many there is work for: they import while the sources are scanned."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanFile:
    """Where a worker finds its jobs."""

    path: bytes
    """Arrow IPC file, one record batch a shard."""
    origin: Origin
    work: bytes
    options: ShardOptions
    reflink: Reflink = "never"

    def job(self, number: int) -> ShardJob:
        """Return the job of shard `number`, with its rows in memory.

        Raises:
            ShardkitError: the plan cannot be read.
        """
        try:
            with os_errors("cannot read the plan", self.path), open(self.path, "rb") as file:
                rows = pa.ipc.open_file(file).get_batch(number)
        except pa.ArrowInvalid as error:
            raise self._damaged(error) from error
        name = shard_name(self.options.name, number)
        return ShardJob(name=name, origin=self.origin, work=self.work, rows=rows, options=self.options,
                        reflink=self.reflink)  # fmt: skip

    def amounts(self, numbers: Collection[int]) -> Iterator[tuple[int, tuple[int, int]]]:
        """Yield numbers of shards with how many sources they have, and bytes; no page of another column is read.

        Raises:
            ShardkitError: the plan cannot be read.
        """
        if not numbers:
            return
        try:
            with os_errors("cannot read the plan", self.path):
                plan = pa.ipc.open_file(pa.py_buffer(mapped(self.path)))
            for number in numbers:
                rows = plan.get_batch(number)
                yield number, (rows.num_rows, int(rows.column("size").to_numpy().sum()))
        except pa.ArrowInvalid as error:
            raise self._damaged(error) from error

    def _damaged(self, error: Exception) -> StorageError:
        return StorageError("the plan is damaged", path=self.path, found=str(error)[:200])


class Workers:
    """A number of workers: one thread, the others processes. A context manager."""

    def __init__(self, jobs: int) -> None:
        """Take how many shards are made at a time, at most; nothing is started yet."""
        self._jobs = jobs
        self._workers: dict[Connection, subprocess.Popen[bytes] | threading.Thread] = {}

    def make(self, plan: PlanFile, numbers: Sequence[int], progress: Progress) -> Iterator[tuple[int, ShardResult]]:
        """Make shards; yield each as it gets ready, in any order.

        Args:
            plan: what they are made of.
            numbers: which, rising.
            progress: told of samples as they are packed.

        Raises:
            WorkerError: a process died, or could not be started.
            ShardkitError: what a worker met; of the first shard, by number, at which one did.
        """
        if self._jobs == 1:  # nobody to talk to: what goes wrong is raised where it is met
            buffers = new_buffers(BUFFERS, BUFFER_BYTES)
            for number in numbers:
                yield number, make_shard(plan, number, progress, buffers)
            return
        if not numbers:
            return
        self._start_thread()
        self._start_processes(min(self._jobs, len(numbers)) - 1)
        pending = iter(numbers)
        busy: dict[Connection, int] = {}
        failed = FirstError()
        for connection in sorted(self._workers, key=self._is_process):
            self._send(connection, plan)
            self._next(connection, pending, busy)
        while busy:
            for ready in wait(list(busy)):
                assert isinstance(ready, Connection)
                kind, value = self._receive(ready, shard_name(plan.options.name, busy[ready]))
                if kind == "progress":
                    progress(*value)
                    continue
                number = busy.pop(ready)
                if kind == "error":
                    failed.note(number, value)
                else:
                    yield number, value
                failed.raise_unless_open(busy.values())
                if failed.error is None:
                    self._next(ready, pending, busy)

    def _start_thread(self) -> None:
        ours, theirs = (Connection(end.detach()) for end in socket.socketpair())
        thread = threading.Thread(target=_work, args=(theirs,), name="shardkit-pack", daemon=True)
        self._workers[ours] = thread
        thread.start()

    def _start_processes(self, count: int) -> None:
        """Start what is missing to `count` processes."""
        while sum(map(self._is_process, self._workers)) < count:
            connection, process = processes.start_process(__name__)
            self._workers[connection] = process

    def _is_process(self, connection: Connection) -> bool:
        return not isinstance(self._workers[connection], threading.Thread)

    def _next(self, connection: Connection, pending: Iterator[int], busy: dict[Connection, int]) -> None:
        number = next(pending, None)
        if number is not None:
            busy[connection] = number
            self._send(connection, number)

    def _send(self, connection: Connection, message: object) -> None:
        try:
            connection.send(message)
        except OSError as error:
            raise self._died(connection) from error

    def _receive(self, connection: Connection, shard: str) -> tuple[str, Any]:  # Any: what the kind says
        try:
            kind, value = connection.recv()
        except (EOFError, OSError) as error:
            raise self._died(connection, f" while it made {shard}") from error
        return kind, value

    def _died(self, connection: Connection, when: str = "") -> WorkerError:
        worker = self._workers[connection]
        how = "its thread ended" if isinstance(worker, threading.Thread) else processes.how_it_ended(worker.wait())
        return WorkerError(
            f"a worker died{when}", found=how,
            remedy="look for the out-of-memory killer, or use fewer --jobs, then run again with --resume",
        )  # fmt: skip

    def __enter__(self) -> Self:
        """Start the first processes."""
        try:
            self._start_processes(min(self._jobs - 1, _EARLY))
        except BaseException:
            self._end(kill=True)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        """End the workers: processes at once after an error, else when they see the socket closed."""
        self._end(kill=error is not None)

    def _end(self, *, kill: bool) -> None:
        for connection, worker in self._workers.items():
            connection.close()
            if kill and not isinstance(worker, threading.Thread):
                worker.kill()
        for worker in self._workers.values():
            if not isinstance(worker, threading.Thread):
                worker.wait()
            elif worker.ident is not None:  # a signal may come before the thread is started
                # A decoder that is at work cannot be stopped: the thread ends at its next word, or with the process.
                worker.join(_PATIENCE_S if kill else None)
        self._workers.clear()


def serve(fd: int) -> None:
    """Be a worker process; see `shardkit.running.processes`."""
    processes.serve(fd, _work)


def _work(connection: Connection) -> None:
    """Take a `PlanFile`, then shard numbers, until the other side of the socket is closed."""
    buffers: list[mmap.mmap] = []
    with contextlib.suppress(EOFError, OSError), connection:
        plan: PlanFile = connection.recv()
        while True:
            connection.send(_answer(connection, plan, connection.recv(), buffers))


def make_shard(plan: PlanFile, number: int, progress: Progress, buffers: list[mmap.mmap]) -> ShardResult:
    """Make one shard; a machine without the memory for it is no bug."""
    try:
        return write_shard(plan.job(number), progress, buffers)
    except MemoryError as error:
        raise CapabilityError(
            f"too little memory to make shard {number}",
            remedy="use fewer --jobs, or refuse large images by --max-bytes and --max-pixels",
        ) from error


def _answer(
    connection: Connection, plan: PlanFile, number: int, buffers: list[mmap.mmap]
) -> processes.Answer[ShardResult]:
    def progress(*counts: int) -> None:
        connection.send(("progress", counts))

    def make() -> ShardResult:
        if not buffers:
            buffers.extend(new_buffers(BUFFERS, BUFFER_BYTES))
        return make_shard(plan, number, progress, buffers)

    return processes.answer(make, path=plan.work)
