"""Inspect a synthetic dataset of ten million samples, and of a tenth of it: seconds, and memory at its peak.

    python scripts/bench_inspect.py FOLDER [--shards 1000] [--rows 10000] [--rounds 5] [--json OUT]

FOLDER gets both datasets, once, as `bench_open.py` makes them: an index of 130 bytes a sample and sparse shards. Every
measurement is a process of its own with a warm page cache: `shardkit.inspect` without a page, and by how much it grew
the resident memory (anonymous memory, and pages of the map) beyond what the imports take.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from bench_open import make_dataset, resident
from turns import Case, Clock, Result, Row, describe_machine, read_all, show, take_turns, verdict, write_json

import shardkit
from shardkit.format.dataset_record import DATASET_INDEX, MANIFEST


def measure(folder: Path) -> Result:
    """Measure one inspection in this process."""
    inspect = shardkit.inspect  # its imports are not what is measured
    read_all([folder / MANIFEST, folder / DATASET_INDEX])
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    before, clock = {kind: resident(kind) for kind in ("RssAnon", "VmHWM")}, Clock()
    found = inspect(folder)
    taken: Result = {"seconds": clock.seconds(), "cpu": clock.cpu_seconds(), "samples": found.samples}
    if sum(one.samples for one in found.classes) != found.samples or found.measures["bytes"].known != found.samples:
        raise SystemExit("the figures do not add up")
    return taken | {"peak_mb": (resident("VmHWM") - before["VmHWM"]) / 1e6, "others": clock.stop(1)["others"]}


def report(rows: list[Row]) -> None:
    columns = {"seconds": "seconds", "CPU seconds": "cpu", "memory at its peak, MB": "peak_mb"}
    lines = [
        (row.case.name, *(row.spread(field, "{:,.1f}") for field in columns.values()), row.failure or row.told())
        for row in rows
    ]
    show("inspect", ("samples", *columns, "runs"), lines)
    for field, most, unit in (("seconds", 10, "s"), ("peak_mb", 200, "MB")):
        middle = rows[0].median(field)
        if middle is not None:
            verdict(f"{field}, {rows[0].case.name} samples", middle, "<=", most, unit)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--shards", type=int, default=1000)
    parser.add_argument("--rows", type=int, default=10_000, help="rows of one shard")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(measure(options.folder)))
        return
    print(describe_machine(("shardkit", "numpy", "pyarrow")))
    cases = []
    for shards in (options.shards, max(options.shards // 10, 1)):
        folder = options.folder / f"{shards}x{options.rows}"
        if not (folder / MANIFEST).exists():
            make_dataset(folder, shards, options.rows)
        command = (sys.executable, __file__, str(folder), "--child")
        cases.append(Case(group="inspect", name=f"{shards * options.rows:,}", cache="warm", command=command))
    rows = take_turns(cases, rounds=options.rounds, retries=2, seconds=600)
    report(rows)
    if options.json:
        write_json(options.json, rows)


if __name__ == "__main__":
    main()
