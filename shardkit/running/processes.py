"""Worker processes, spoken to over sockets.

A process is a fresh interpreter: no fork of one that may hold threads, locks or a GPU context, and no second import of
the caller's main module. It ends with its parent, whatever it is doing.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import traceback
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Literal, TypeAlias, TypeVar

from shardkit.errors import ShardkitError, WorkerError, from_os_error
from shardkit.escaping import escape
from shardkit.running.arrow_start import without_pandas

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Answer", "answer", "how_it_ended", "serve", "start_process"]

_START = "import json, sys; sys.path[:] = json.loads(sys.argv[2]); from {module} import serve; serve(int(sys.argv[1]))"
_ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
"""For NumPy's library of linear algebra, which makes a thread for each processor when it is loaded, and is not used."""
_PARENTS = {signal.SIGINT, signal.SIGTERM}
"""Signals that a terminal or a batch system sends to every process: the parent's to handle, and it ends the others."""

_T = TypeVar("_T")
Answer: TypeAlias = "tuple[Literal['done'], _T] | tuple[Literal['error'], ShardkitError]"
"""What a worker sends when a piece of work is over."""


def start_process(module: str) -> tuple[Connection, subprocess.Popen[bytes]]:
    """Start a worker, and return the line to it.

    Args:
        module: has `serve(fd)`, which calls the one here.

    Raises:
        WorkerError: it cannot be started.
    """
    try:
        ours, theirs = socket.socketpair()
        with contextlib.ExitStack() as stack:
            stack.callback(ours.close)
            stack.enter_context(theirs)
            process = _spawn(module, theirs.fileno())
            return Connection(ours.detach()), process
    except (OSError, ValueError) as error:
        raise WorkerError(
            "a worker process cannot be started", path=sys.executable, found=str(error),
            remedy="use --jobs 1, which needs none",
        ) from error  # fmt: skip


def _spawn(module: str, fd: int) -> subprocess.Popen[bytes]:
    if not sys.executable:
        raise ValueError("this interpreter does not know its own file")
    # What is blocked here stays blocked in the worker, from its first instruction on.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _PARENTS)
    try:
        start, path = _START.format(module=module), json.dumps([str(entry) for entry in sys.path])
        return subprocess.Popen(
            [sys.executable, "-c", start, str(fd), path],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, pass_fds=[fd], env=_ONE_THREAD | os.environ,
        )  # fmt: skip
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def how_it_ended(code: int) -> str:
    """Return what an exit status as `Popen` gives it means."""
    if code >= 0:
        return f"exit status {code}"
    with contextlib.suppress(ValueError):
        return f"signal {signal.Signals(-code).name}"
    return f"signal {-code}"


def serve(fd: int, work: Callable[[Connection], object]) -> None:
    """Be a worker process: until `work` returns, the parent closes its end of the socket `fd`, or it is gone."""
    threading.Thread(target=_end_with_parent, args=(fd,), daemon=True).start()
    with contextlib.suppress(EOFError, OSError), Connection(fd) as connection, without_pandas():
        work(connection)
    os._exit(0)


def _end_with_parent(fd: int) -> None:
    """Wait until the other side of the socket is closed, and end the process, whatever it is doing.

    Unfinished temporary files are the next run's to sweep.
    """
    poll = select.poll()
    poll.register(fd, select.POLLRDHUP)
    poll.poll()
    os._exit(0)


def answer(make: Callable[[], _T], *, path: str | bytes) -> Answer[_T]:
    """Make something, and return it or the error as a parent can show it.

    Args:
        make: is called.
        path: of what is worked on, for an error of the system that names none.
    """
    try:
        return "done", make()
    except ShardkitError as error:
        return "error", error
    except OSError as error:
        return "error", from_os_error(error, "a worker failed", path=error.filename or path)
    except Exception:  # a bug: the parent shows it as one
        trace = " | ".join(traceback.format_exc().strip().splitlines())
        return "error", ShardkitError(f"a worker failed: {escape(trace)}")
