"""Measure `shardkit verify` against a plain O_DIRECT read of the same shards, in alternating runs.

    python scripts/bench_verify.py DATASET [--runs N] [--jobs N] [--level LEVEL]

Prints the median of each, its rate, and its share of the plain read's rate. Nothing is written. Both sides pass the
page cache, so the order of the runs does not matter; a dataset of at least a gigabyte hides the start of the process.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import time
from typing import TYPE_CHECKING

from shardkit.verifying.report import LEVELS
from shardkit.verifying.run import verify

if TYPE_CHECKING:
    from collections.abc import Callable


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("dataset")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--level", choices=LEVELS, action="append", help="again for another; checksum by default")
    options = parser.parse_args()
    with os.scandir(options.dataset) as entries:
        shards = sorted(entry.path for entry in entries if entry.name.endswith(".tar"))
    size = sum(os.path.getsize(shard) for shard in shards)
    ways: dict[str, Callable[[], None]] = {"dd iflag=direct bs=4M": lambda: read_plainly(shards)}
    for level in options.level or ["checksum"]:
        ways[f"verify --level {level}"] = lambda level=level: prove(options.dataset, level, options.jobs)  # type: ignore[misc]
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(options.runs):
        for name, run in ways.items():
            start = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - start)
    plain = statistics.median(seconds["dd iflag=direct bs=4M"])
    print(f"{len(shards)} shards, {size / 1e9:.2f} GB, {options.jobs} jobs, medians of {options.runs} alternating runs")
    for name, values in seconds.items():
        median = statistics.median(values)
        spread = f"{min(values):.2f} to {max(values):.2f} s"
        print(f"{name:24} {median:6.2f} s  {size / median / 1e9:6.2f} GB/s  {plain / median:5.2f} x   ({spread})")


def read_plainly(shards: list[str]) -> None:
    for shard in shards:
        subprocess.run(["dd", f"if={shard}", "of=/dev/null", "bs=4M", "iflag=direct", "status=none"], check=True)


def prove(dataset: str, level: str, jobs: int) -> None:
    report = verify(dataset, level, jobs=jobs)  # type: ignore[arg-type]
    if report.exit_code or report.read_path != "direct":
        raise SystemExit(f"not a fair run: exit code {report.exit_code}, read path {report.read_path}")


if __name__ == "__main__":
    main()
