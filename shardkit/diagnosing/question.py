"""Foreign libraries, asked in a process of their own: what hangs, or crashes, is an answer and not the end of us."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import fields
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from shardkit.diagnosing.facts import CudaAnswer, KvikAnswer

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType

__all__ = ["PATIENCE_S", "Question", "answer_of"]

_Answer = TypeVar("_Answer", bound=CudaAnswer | KvikAnswer)

PATIENCE_S = 10.0
"""When a driver or a library counts as one that does not answer. A healthy driver that nothing keeps loaded may take
seconds."""
_LEAST_S = 0.1  # in which is read what is there


class Question(Generic[_Answer]):
    """A child process that prints, while its parent does something else, what it knows: an answer a line as JSON.

    Each line replaces the one before, and says what the child is about to ask as not answered. So whatever ends it,
    the last line is true.
    """

    def __init__(self, command: Sequence[str], kind: type[_Answer], whom: str) -> None:
        """Start it, in an empty folder of its own: cuFile writes a log where it stands.

        Args:
            command: what prints the answers.
            kind: of them.
            whom: it asks, for what is told when it says nothing: "the driver".

        Raises:
            OSError: it cannot be started.
        """
        self._kind: type[_Answer] = kind
        self._whom = whom
        self._began = time.monotonic()
        self._folder = tempfile.TemporaryDirectory(prefix="shardkit-doctor-", ignore_cleanup_errors=True)
        try:
            self._child: subprocess.Popen[bytes] = subprocess.Popen(
                list(command), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                cwd=self._folder.name, env=_environment(),
            )  # fmt: skip
        except OSError:
            self._folder.cleanup()
            raise

    def answer(self, patience_s: float = PATIENCE_S) -> _Answer:
        """Return what it says so many seconds after it was started, or that it does not: several answer in one wait."""
        said, otherwise = self._said(patience_s)
        for line in reversed(said.splitlines()):
            with contextlib.suppress(ValueError, TypeError):
                return answer_of(json.loads(line), self._kind)
        return self._kind(error=otherwise)

    def _said(self, patience_s: float) -> tuple[bytes, str]:
        """Return what it printed, and what to report when there is no answer in that."""
        try:
            left_s = self._began + patience_s - time.monotonic()
            said, complaint = self._child.communicate(timeout=max(left_s, _LEAST_S))
        except subprocess.TimeoutExpired as late:
            return late.output or b"", f"{self._whom} did not answer within {patience_s:g} s"
        last = complaint.decode("utf-8", "replace").strip().splitlines()[-1:]
        return said, ": ".join([f"asking {self._whom} ended with code {self._child.returncode}", *last])

    def close(self) -> None:
        """End it. A child that hangs inside of the driver cannot be ended, and is not waited for."""
        if self._child.poll() is None:
            self._child.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._child.wait(0.2)
        for pipe in (self._child.stdout, self._child.stderr):
            if pipe is not None:
                pipe.close()
        self._folder.cleanup()

    def __enter__(self) -> Question[_Answer]:
        """Return the question."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close."""
        self.close()


def _environment() -> dict[str, str]:
    """Return ours, in which a child finds the modules that we find."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path)), "PYTHONSAFEPATH": "1"}


def answer_of(document: Any, kind: type[_Answer]) -> _Answer:  # noqa: ANN401 - what JSON holds
    """Return the answer that a JSON document states; lists become tuples.

    Raises:
        TypeError: it is not a document of that shape.
    """
    if not isinstance(document, dict) or not {part.name for part in fields(kind)} >= set(document):
        raise TypeError("no answer of ours")
    values: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in document.items()
    }
    return kind(**values)
