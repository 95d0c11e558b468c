"""Runs of the command line by the hundred: each in a process of its own, which costs no interpreter's start.

One server process imports everything once and forks a child a command, so that a run of `shardkit pack` over a few
images takes some hundredths of a second. That is what makes a sweep over every system call of a pack affordable.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Child", "Commands", "Done", "NoTracerError"]

_SERVER = """
import contextlib, ctypes, gc, json, os, sys
with contextlib.suppress(ImportError):
    import pandas  # pyarrow looks for it at its first array, and then each child would import it
import numpy.ma, shardkit.packing.picture, shardkit.packing.run, shardkit.verifying.run
import shardkit.converting.run, shardkit.exporting.run, shardkit.extracting.run, shardkit.indexing.run
import shardkit.inspecting.run, shardkit.looking.listing, shardkit.looking.members, shardkit.repairing.run
import PIL.Image
from shardkit.cli.main import main
PIL.Image.preinit()
gc.collect()
gc.freeze()  # or the first collection of each child copies every page

def line():
    text = b""
    while not text.endswith(b"\\n"):
        text += os.read(0, 1) or sys.exit()
    return text

def serve(arguments, out, err):
    ctypes.CDLL(None).prctl(0x59616D61, ctypes.c_ulong(-1))  # PR_SET_PTRACER: any process may trace this one
    said, null = os.dup(1), os.open(os.devnull, os.O_RDONLY)
    for fd, path in ((1, out), (2, err)):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, fd)
        os.close(file)
    os.write(said, b"%d\\n" % os.getpid())  # from here on a tracer may count: `said` stays open
    os.read(0, 1)
    os.dup2(null, 0)
    code = 1
    try:
        main(arguments)
    except SystemExit as end:
        code = end.code
    finally:
        sys.stdout.flush()
        os._exit(code)

while True:
    job = json.loads(line())
    child = os.fork()
    if not child:
        serve(*job)
    _, status, usage = os.wait4(child, 0)
    os.write(1, b"%d %d\\n" % (os.waitstatus_to_exitcode(status), usage.ru_maxrss))
"""
_TIMEOUT_S = 60.0


class NoTracerError(Exception):
    """There is no strace here, or it may not trace; says why."""


@dataclass(frozen=True, slots=True)
class Done:
    """A command that has ended."""

    code: int
    """Exit code; negative for a signal that killed it."""
    stdout: str
    stderr: str
    trace: str = ""
    """What strace wrote."""
    peak_kib: int = 0
    """Largest resident memory of its own process and of the server that it was forked from; KiB."""

    @property
    def injected(self) -> bool:
        """Whether a fault met the command."""
        return "(INJECTED)" in self.trace or self.code == -signal.SIGKILL


class Commands:
    """Runs commands one after the other. A context manager that ends the server."""

    def __init__(self, watch: Sequence[str] = ()) -> None:
        """Start the server and wait until it has imported everything.

        Args:
            watch: system calls that the trace of every command shows. One strace follows the server and all that it
                forks, and the kernel stops them at these calls alone: a third of the cost of a tracer a command.

        Raises:
            NoTracerError: something is to be watched, and strace cannot.
        """
        self._folder = tempfile.mkdtemp()
        tracer = _following(watch, Path(self._folder, "trace")) if watch else []
        self._server = subprocess.Popen(
            [*tracer, sys.executable, "-c", _SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
        )
        self.run("--version")

    def __enter__(self) -> Self:
        """Return the running server."""
        return self

    def __exit__(self, *_: object) -> None:
        """End it."""
        with contextlib.suppress(subprocess.TimeoutExpired):  # at the end of its input
            self._server.communicate(timeout=10)
        self._server.kill()
        self._server.communicate()
        shutil.rmtree(self._folder)

    def run(
        self, *arguments: str | os.PathLike[str], inject: Sequence[str] = (), timeout_s: float = _TIMEOUT_S
    ) -> Done:
        """Run a command to its end.

        Args:
            arguments: of `shardkit`.
            inject: what strace does to which system call, e.g. `rename:signal=KILL:when=2`, counted a thread; or only
                the name of a call, to see it in the trace.
            timeout_s: then it is killed, and a `TimeoutError` raised.

        Raises:
            NoTracerError: something is to be injected, and strace cannot.
        """
        child = self.start(*arguments, inject=inject)
        child.go()
        return child.wait(timeout_s)

    def start(self, *arguments: str | os.PathLike[str], inject: Sequence[str] = ()) -> Child:
        """Fork a child that waits before its first step; `run` says the rest."""
        out, err, trace = (str(Path(self._folder, name)) for name in ("out", "err", "trace"))
        self._tell(json.dumps([[os.fspath(argument) for argument in arguments], out, err]).encode() + b"\n")
        pid = int(self._line(_TIMEOUT_S))
        Path(trace).write_bytes(b"")  # a tracer that follows the server appends
        child = Child(self, pid, (out, err, trace))
        if inject:
            try:
                child.tracer = _trace(pid, inject, trace)
            except NoTracerError:
                child.kill()
                raise
        return child

    def _tell(self, text: bytes) -> None:
        assert self._server.stdin is not None
        self._server.stdin.write(text)

    def _line(self, timeout_s: float) -> bytes:
        assert self._server.stdout is not None
        until = time.monotonic() + timeout_s
        text = b""
        while not text.endswith(b"\n"):
            ready, _, _ = select.select([self._server.stdout], [], [], max(0.0, until - time.monotonic()))
            if not ready:
                raise TimeoutError(f"no answer after {timeout_s} s")
            text += self._server.stdout.read(1) or self._gone()
        return text

    def _gone(self) -> bytes:
        raise RuntimeError("the server of commands has died")


class Child:
    """A command that waits for `go`, runs, or has ended."""

    def __init__(self, commands: Commands, pid: int, files: tuple[str, str, str]) -> None:
        """Take the process `pid` of `commands`."""
        self.pid = pid
        self.tracer: subprocess.Popen[str] | None = None
        self._commands = commands
        self._files = files

    def go(self) -> None:
        """Let it start."""
        self._commands._tell(b"\n")

    def kill(self) -> None:
        """End it, whatever it is doing."""
        os.kill(self.pid, signal.SIGKILL)
        self._commands._line(_TIMEOUT_S)

    def wait(self, timeout_s: float = _TIMEOUT_S) -> Done:
        """Return what came of it.

        Raises:
            TimeoutError: it did not end in time; it is killed.
        """
        try:
            code, peak = map(int, self._commands._line(timeout_s).split())
        except TimeoutError:
            self.kill()
            raise
        finally:
            if self.tracer is not None:
                self.tracer.communicate(timeout=_TIMEOUT_S)
        out, err, trace = (Path(name).read_text("utf-8", "backslashreplace") for name in self._files)
        return Done(code, out, err, trace, peak)


def _strace() -> str:
    path = shutil.which("strace")
    if path is None:
        raise NoTracerError("strace is not installed")
    return path


def _following(watch: Sequence[str], log: Path) -> list[str]:
    command = [_strace(), "-f", "-y", "--seccomp-bpf", "-A", "-o", str(log), "-e", f"trace={','.join(watch)}"]
    trial = subprocess.run([*command, "true"], check=False, capture_output=True, text=True)
    if trial.returncode:
        raise NoTracerError(trial.stderr.strip())
    return command


def _trace(pid: int, inject: Sequence[str], log: str) -> subprocess.Popen[str]:
    calls = ",".join(rule.partition(":")[0] for rule in inject)
    rules = [argument for rule in inject if ":" in rule for argument in ("-e", f"inject={rule}")]
    tracer = subprocess.Popen(
        [_strace(), "-f", "-y", "-p", str(pid), "-o", log, "-e", f"trace={calls}", *rules],
        stderr=subprocess.PIPE,
        text=True,
    )
    assert tracer.stderr is not None
    said = tracer.stderr.readline()
    if "attached" not in said:
        tracer.kill()
        tracer.communicate()
        raise NoTracerError(said.strip())
    return tracer
