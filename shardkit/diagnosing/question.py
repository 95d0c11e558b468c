"""CUDA's side, asked in a process of its own: a driver that hangs, or crashes, is an answer and not the end of us."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from shardkit.diagnosing.facts import CudaAnswer

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType

__all__ = ["PATIENCE_S", "CudaQuestion", "answer_of"]

PATIENCE_S = 10.0
"""When a driver counts as one that does not answer. A healthy one may take seconds where nothing keeps it loaded."""


class CudaQuestion:
    """A child process that prints, while its parent does something else, what it knows: a `CudaAnswer` a line as JSON.

    Each line replaces the one before, and says what the child is about to ask as not answered. So whatever ends it,
    the last line is true.
    """

    def __init__(self, command: Sequence[str]) -> None:
        """Start it, in an empty folder of its own: cuFile writes a log where it stands.

        Raises:
            OSError: it cannot be started.
        """
        self._folder = tempfile.TemporaryDirectory(prefix="shardkit-doctor-", ignore_cleanup_errors=True)
        try:
            self._child = subprocess.Popen(
                list(command), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                cwd=self._folder.name, env=_environment(),
            )  # fmt: skip
        except OSError:
            self._folder.cleanup()
            raise

    def answer(self, patience_s: float = PATIENCE_S) -> CudaAnswer:
        """Return what it says, or that it does not."""
        try:
            said, complaint = self._child.communicate(timeout=patience_s)
            otherwise = f"asking CUDA ended with code {self._child.returncode}"
        except subprocess.TimeoutExpired as late:
            said, complaint = late.output or b"", b""
            otherwise = f"the driver did not answer within {patience_s:g} s"
        for line in reversed(said.splitlines()):
            with contextlib.suppress(ValueError, TypeError):
                return answer_of(json.loads(line))
        last = complaint.decode("utf-8", "replace").strip().splitlines()[-1:]
        return CudaAnswer(error=": ".join([otherwise, *last]))

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

    def __enter__(self) -> CudaQuestion:
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


def answer_of(document: Any) -> CudaAnswer:  # noqa: ANN401 - what JSON holds
    """Return the answer that a JSON document states; lists become tuples.

    Raises:
        TypeError: it is not a document of that shape.
    """
    if not isinstance(document, dict) or not {part.name for part in fields(CudaAnswer)} >= set(document):
        raise TypeError("no answer of ours")
    values: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in document.items()
    }
    return CudaAnswer(**values)
