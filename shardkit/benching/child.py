"""The process of one run: `python -m shardkit.benching.child JOB RESULT`.

JOB is JSON, {"case": ..., "settings": ...}. Into the file RESULT goes what was measured, or {"refused": why} where this
machine cannot have it, or {"failed": why}. Where the environment's SHARDKIT_BENCH_TRACE names a folder a trace of the
run goes there, by the name of the row.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import signal
import sys
import traceback
from typing import TYPE_CHECKING, Any

from shardkit import tracing
from shardkit.benching.case import Case, Settings
from shardkit.errors import CapabilityError, ConfigError, ShardkitError
from shardkit.escaping import escape

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["answer", "main"]

_PR_SET_PDEATHSIG = 1
_CLAUSE = 300


def main(arguments: list[str], measure: Callable[[Case, Settings], dict[str, Any]] | None = None) -> None:
    """Measure what JOB says and write RESULT, whole or not at all.

    Args:
        arguments: JOB and RESULT.
        measure: what measures; None for the package's own.
    """
    job, path = arguments
    _end_with_parent()
    if measure is None:
        from shardkit.benching import measure as ours

        measure = ours.measure
    call, values = measure, json.loads(job)
    with _traced(values):
        result = answer(lambda: call(Case.from_json(values["case"]), Settings(**values["settings"])))
    with open(f"{path}.part", "w", encoding="utf-8") as file:
        json.dump(result, file)
    os.replace(f"{path}.part", path)


@contextlib.contextmanager
def _traced(values: dict[str, Any]) -> Iterator[None]:  # Any: JSON values
    folder = os.environ.get("SHARDKIT_BENCH_TRACE")
    if not folder:
        yield
        return
    name = f"{values['case']['kind']} {values['case'].get('name', '')}"
    tracer = tracing.start()
    yield
    tracing.stop(tracer)
    tracer.write(os.path.join(folder, re.sub(r"[^a-zA-Z0-9]+", "-", name).strip("-") + ".json"))


def answer(call: Callable[[], dict[str, Any]]) -> dict[str, Any]:  # Any: JSON values
    """Return what a call returns, or why it cannot be had, or how it failed."""
    try:
        return call()
    except (CapabilityError, ConfigError) as error:
        return {"refused": str(error)}
    except ModuleNotFoundError as error:
        return {"refused": f"not installed: {error}"}
    except Exception as error:
        traceback.print_exc()  # into the log, which the parent quotes
        return {"failed": _clause(error)}


def _clause(error: Exception) -> str:
    """Return an error as one line to print; DALI writes pages, and what happened is at their end."""
    if isinstance(error, ShardkitError):
        return f"{type(error).__name__}: {error}"
    words = " ".join((str(error).partition("encountered:")[2] or str(error)).split())
    return escape(f"{type(error).__name__}: {words}"[:_CLAUSE])


def _end_with_parent() -> None:
    """Let the kernel end this process when the one that started it is gone, however that was ended."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))


if __name__ == "__main__":
    main(sys.argv[1:])
    os._exit(0)  # what torch, CUDA and DALI do at the end of a process takes seconds, and everything is closed
