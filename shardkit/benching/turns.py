"""Rounds A B C, C B A, ...: each run in a process of its own, which may crash or hang and ends nothing but itself."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from shardkit.escaping import escape

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from shardkit.benching.case import Case, Settings

__all__ = ["BUSY", "Row", "command_for", "spawn", "take_turns"]

BUSY = 0.1
"""Share of the processors from which other programs disturb a run."""
_GRACE_S = 10.0
"""For a child to end after it has written its result."""
_LOOK_S = 0.05
_LOG_TAIL = 200
_Result: TypeAlias = "dict[str, Any]"  # JSON values


@dataclass(slots=True, kw_only=True)
class Row:
    """A case, and its runs so far."""

    case: Case
    """What is measured."""
    runs: list[_Result] = field(default_factory=list)
    """What each run gave."""
    refused: str = ""
    """Why this machine cannot have it."""
    failed: str = ""
    """How a run failed; the row is left out of later rounds."""

    @property
    def counted(self) -> list[_Result]:
        """The runs that other programs did not disturb; all, where there is none."""
        return [run for run in self.runs if run.get("others", 0.0) <= BUSY] or self.runs

    def values(self, name: str) -> list[float]:
        """Return a figure of the runs that count."""
        return [run[name] for run in self.counted if name in run]

    def median(self, name: str) -> float | None:
        """Return its median; None where it was not measured."""
        values = self.values(name)
        return statistics.median(values) if values else None

    def to_json(self) -> dict[str, Any]:  # Any: JSON values
        """Return everything."""
        names = ("images_s", "gb_s", "cpu_us", "first_s", "host_wait", "gpu_idle", "gpu_bytes", "wait_read_s")
        medians = {name: value for name in names if (value := self.median(name)) is not None}
        told = {"refused": self.refused} if self.refused else {"failed": self.failed} if self.failed else {}
        return {"case": self.case.to_json(), "median": medians, "runs": self.runs, **told}


def command_for(case: Case, settings: Settings) -> list[str]:
    """Return the command of a run, to which the path of the result is added."""
    job = json.dumps({"case": case.to_json(), "settings": asdict(settings)})
    return [sys.executable, "-m", "shardkit.benching.child", job]


def take_turns(
    cases: Sequence[Case], command: Callable[[Case], Sequence[str]], *, rounds: int, timeout_s: float,
    until_s: float | None = None,
) -> Iterator[Row]:  # fmt: skip
    """Measure every case `rounds` times; yield its row after each run.

    Args:
        cases: in the order of the first round.
        command: of a run of a case; gets the path of the result as last argument.
        rounds: runs of each.
        timeout_s: for one run; then it is ended and the row counts as failed.
        until_s: `time.monotonic()` after which no further run is started.
    """
    rows = [Row(case=case) for case in cases]
    for turn in range(rounds):
        for row in rows if turn % 2 == 0 else reversed(rows):
            if row.refused or row.failed or (until_s is not None and time.monotonic() > until_s):
                continue
            result = spawn(command(row.case), timeout_s)
            row.refused, row.failed = result.pop("refused", ""), result.pop("failed", "")
            if not row.refused and not row.failed:
                row.runs.append(result)
            yield row


def spawn(command: Sequence[str], timeout_s: float) -> _Result:
    """Run a child in a session of its own, and return its result, or {"failed": why}; nothing of it is left behind."""
    with tempfile.TemporaryDirectory(prefix="shardkit-bench-") as folder:
        result, log = Path(folder, "result.json"), Path(folder, "log")
        with log.open("wb") as file:
            child = subprocess.Popen(
                [*command, str(result)], stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True
            )
            try:
                code = _wait(child, result, timeout_s)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGKILL)
                child.wait()
        if result.exists():
            found: _Result = json.loads(result.read_text("utf-8"))
            return found
        if code is None:
            return {"failed": f"no result after {timeout_s:g} s"}
        return {"failed": _last_words(code, log.read_text("utf-8", "replace"))}


def _wait(child: subprocess.Popen[bytes], result: Path, timeout_s: float) -> int | None:
    """Return the exit code, or None when the time is up, or the child does not end though its result is there."""
    end = time.monotonic() + timeout_s
    done_s: float | None = None
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return child.wait(_LOOK_S)
        now = time.monotonic()
        if done_s is None and result.exists():
            done_s = now
        if now > end or (done_s is not None and now > done_s + _GRACE_S):
            return None


def _last_words(code: int, log: str) -> str:
    said = (log.strip().splitlines() or ["it said nothing"])[-1][:_LOG_TAIL]
    how = f"ended by {_signal_name(-code)}" if code < 0 else f"exit code {code}"
    return f"{how}: {escape(said)}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # most of the real-time ones have none
        return f"signal {number}"
