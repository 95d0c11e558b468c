"""Measurements that take turns: each in a process of its own, in rounds A B C, C B A, with an eye on other programs.

A script that measures lists its cases, and is called again by itself for each run, with the case's arguments and
`--child`; the child measures one thing and prints its result as one line of JSON. What other programs took of the
processors meanwhile is the child's `others`; a run in which they took more than a tenth is made again, a few times, and
else counts as busy. Medians leave busy runs out where there are others.
"""

from __future__ import annotations

import contextlib
import errno
import importlib.metadata
import json
import os
import platform
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

BUSY = 0.1
"""Share of the processors from which others disturb a run."""
LONGEST_S = 120
"""Seconds for one run."""
Result: TypeAlias = "dict[str, float]"

_DROP = Path("/proc/sys/vm/drop_caches")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One row of a table."""

    group: str
    name: str
    cache: str
    """"warm", "cold", or "" where that is no question."""
    command: tuple[str, ...]
    """Of the child."""
    twice: bool = False
    """Run it once unmeasured right before, so that what it imports is in the page cache."""


@dataclass(slots=True, kw_only=True)
class Row:
    """A case and its runs."""

    case: Case
    runs: list[Result] = field(default_factory=list)
    failure: str = ""
    """What a run that failed said last."""

    def calm(self) -> list[Result]:
        return [run for run in self.runs if run.get("others", 0) <= BUSY] or self.runs

    def values(self, name: str) -> list[float]:
        return [run[name] for run in self.calm() if name in run]

    def median(self, name: str) -> float | None:
        values = self.values(name)
        return statistics.median(values) if values else None

    def spread(self, name: str, form: str = "{:,.0f}") -> str:
        """Return median (lowest-highest)."""
        values = self.values(name)
        if not values:
            return "-"
        middle, low, high = (form.format(pick(values)) for pick in (statistics.median, min, max))
        return f"{middle} ({low}-{high})"

    def told(self) -> str:
        """Return the number of runs, and of busy ones that had to be counted."""
        calm = self.calm()
        busy = sum(run.get("others", 0) > BUSY for run in calm)
        most = max((run.get("others", 0) for run in calm), default=0)
        return f"{len(calm)}" + (f", {busy} busy" if busy else "") + f", others <= {most:.0%}"


class Clock:
    """Times a part of this process, with its CPU seconds and those of everybody else."""

    def __init__(self) -> None:
        self._own, self._all, self._start = cpu_seconds(), busy_seconds(), time.perf_counter()

    def seconds(self) -> float:
        return time.perf_counter() - self._start

    def cpu_seconds(self) -> float:
        return cpu_seconds() - self._own

    def stop(self, count: int) -> Result:
        """Return rate a second, seconds, CPU microseconds each, and the others' share of the processors."""
        took, own = time.perf_counter() - self._start, cpu_seconds() - self._own
        others = max(busy_seconds() - self._all - own, 0.0) / (took * (os.cpu_count() or 1))
        return {"rate": count / took, "s": took, "cpu_us": own / count * 1e6, "others": others}


def cpu_seconds() -> float:
    """Return the CPU seconds of this process and its workers."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    total = usage.ru_utime + usage.ru_stime
    for children in Path("/proc/self/task").glob("*/children"):
        for child in children.read_text().split():
            fields = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()
            total += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return total


def busy_seconds() -> float:
    """Return the CPU seconds of all processes of the machine, and those that its host took; no interrupts."""
    user, nice, system, _, _, _, _, stolen = map(int, Path("/proc/stat").read_text().split(None, 9)[1:9])
    return (user + nice + system + stolen) / os.sysconf("SC_CLK_TCK")


def may_drop_caches() -> bool:
    return os.access(_DROP, os.W_OK) and os.geteuid() == 0


def drop_caches() -> None:
    os.sync()
    _DROP.write_text("3")


def read_all(paths: Iterable[Path]) -> None:
    """Bring files into the page cache, but for their holes."""
    buffer = memoryview(bytearray(4 << 20))
    for path in paths:
        with path.open("rb", buffering=0) as file:
            end = 0
            while (start := _next_data(file.fileno(), end)) is not None:
                end = os.lseek(file.fileno(), start, os.SEEK_HOLE)
                file.seek(start)
                while start < end and (count := file.readinto(buffer[: end - start])):
                    start += count


def _next_data(fd: int, offset: int) -> int | None:
    try:
        return os.lseek(fd, offset, os.SEEK_DATA)
    except OSError as error:
        if error.errno != errno.ENXIO:
            raise
        return None


def take_turns(cases: Sequence[Case], *, rounds: int, retries: int, seconds: float) -> list[Row]:
    """Measure every case `rounds` times, and stop when `seconds` are over, in whatever round that is."""
    rows = [Row(case=case) for case in cases]
    deadline = time.monotonic() + seconds
    for turn in range(rounds):
        for row in rows if turn % 2 == 0 else reversed(rows):
            if time.monotonic() > deadline:
                print(f"the time is up in round {turn + 1} of {rounds}: rows below may have fewer runs", flush=True)
                return rows
            if row.failure:
                continue
            _measure(row, retries)
            case, last = row.case, row.runs[-1] if row.runs and not row.failure else None
            told = json.dumps({k: round(v, 4) for k, v in last.items()}) if last else row.failure
            print(f"{turn + 1} {case.group} | {case.name} | {case.cache}: {told}", file=sys.stderr, flush=True)
    return rows


def _measure(row: Row, retries: int) -> None:
    """Add the first run that nobody disturbed, else the least disturbed one."""
    runs: list[Result] = []
    for attempt in range(retries + 1):
        _wait_for_quiet(2.0 * attempt)
        try:
            if row.case.twice and not attempt:
                _spawn(row.case.command)
            code, out, err = _spawn(row.case.command)
        except subprocess.TimeoutExpired:
            row.failure = f"no result after {LONGEST_S} s"
            return
        lines = [line for line in out.splitlines() if line.startswith("{")]
        if code or not lines:
            row.failure = (err.strip().splitlines() or [f"exit code {code}"])[-1][:200]
            return
        runs.append(json.loads(lines[-1]))
        if runs[-1].get("others", 0) <= BUSY:
            break
    row.runs.append(min(runs, key=lambda run: run.get("others", 0)))


def _spawn(command: Sequence[str]) -> tuple[int, str, str]:
    """Run a child in a session of its own; return its exit code and what it printed, and leave no worker of it behind.

    Raises:
        subprocess.TimeoutExpired: it took too long, and was killed.
    """
    environment = os.environ | {"SPAWNED": repr(time.time()), "PYTHONWARNINGS": "ignore"}
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        child = subprocess.Popen(command, stdout=out, stderr=err, env=environment, start_new_session=True)
        try:
            code = child.wait(LONGEST_S)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
        out.seek(0)
        err.seek(0)
        return code, out.read(), err.read()


def _wait_for_quiet(longest: float) -> None:
    """Wait, `longest` seconds at most, until other programs rest for a quarter of a second."""
    end = time.monotonic() + longest
    while time.monotonic() < end:
        before = busy_seconds()
        time.sleep(0.25)
        if busy_seconds() - before < 0.25 * BUSY * (os.cpu_count() or 1):
            return


def since_spawned() -> float:
    """Return the seconds since the parent started this process."""
    return time.time() - float(os.environ["SPAWNED"])


def show(title: str, columns: Sequence[str], lines: Iterable[Sequence[str]]) -> None:
    """Print a Markdown table."""
    print(f"\n### {title}\n\n| " + " | ".join(columns) + " |\n|---" + "|--:" * (len(columns) - 1) + "|")
    for line in lines:
        print("| " + " | ".join(line) + " |")
    sys.stdout.flush()


def verdict(what: str, value: float, relation: str, bar: float, unit: str) -> None:
    """Print whether a bar is met; `relation` is "<=" or ">="."""
    met = value <= bar if relation == "<=" else value >= bar
    print(f"- {what}: {value:.4g} {unit}, wanted {relation} {bar:g}: {'met' if met else 'MISSED'}", flush=True)


def write_json(path: Path, rows: Iterable[Row]) -> None:
    """Write every run, a line each, with its case."""
    lines = []
    for row in rows:
        about = {"group": row.case.group, "name": row.case.name, "cache": row.case.cache}
        lines += [json.dumps(about | run) for run in row.runs]
        if row.failure:
            lines.append(json.dumps(about | {"failure": row.failure}))
    path.write_text("\n".join(lines) + "\n")


def describe_machine(packages: Sequence[str]) -> str:
    """Return processors, system and the versions of those packages that are installed."""
    versions = []
    for package in packages:
        try:
            versions.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    model = next(
        (line.partition(":")[2].strip() for line in open("/proc/cpuinfo") if line.startswith("model name")),  # noqa: SIM115
        platform.machine(),
    )
    return (
        f"{len(os.sched_getaffinity(0))} processors, {model}, Linux {platform.release()}, "
        f"load {os.getloadavg()[0]:.1f} before the start\nPython {platform.python_version()}, {', '.join(versions)}"
    )
