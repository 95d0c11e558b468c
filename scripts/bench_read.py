"""Read, decode and open, side by side in one run: shardkit, DALI, webdataset, plain reads, and other peers.

    python scripts/make_photos.py /tmp/photos -n 6000 --classes 100
    python scripts/bench_read.py /tmp/dataset --tree /tmp/photos --open /tmp/ten-million

Every measurement is a process of its own; the rows take turns, A B C then C B A; a run in which other programs took
more than a tenth of the processors is made again. Printed are medians with the lowest and highest run, ratios of
medians, and whether each bar is met. Groups, of which `--only` takes parts ("raw", "decode", "auto", "cold", ...):

- raw: samples a second without decoding, in batches of 256 that are touched only by counting samples, bytes and
  labels; against plain preadv of all shards. Warm, and cold: the page cache is dropped before the pass, which needs
  root. "First pass" is the first of the process, with opening, deciding and new memory, as others' rows have it.
- decode: training batches of 64 at 224 x 224 in float32, warm, two threads or workers; against DALI and webdataset.
- first: seconds from the start of the process to the first batch; DALI's own pipeline with torch and without.
- open: see `bench_open.py`; with `--open FOLDER` only, 1.4 GB.

`--peers FILE` runs another script's rows after these, as `python FILE read --peer NAME --cache CACHE --reps N --out
FILE --data DIR` (and `decode`, `open`), and merges its medians, which it writes as lines of JSON, into the tables.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import decoded_batches
import raw_reads
from turns import (
    Case,
    Row,
    describe_machine,
    drop_caches,
    may_drop_caches,
    read_all,
    show,
    take_turns,
    verdict,
    write_json,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

PACKAGES = (
    "shardkit", "torch", "nvidia-dali-cuda120", "nvidia-dali-cuda130", "webdataset", "pillow", "numpy", "pyarrow",
    "simplejpeg",
)  # fmt: skip
TASKS = {"raw": "read", "decode": "decode", "open": "open"}
"""What another script calls a group."""
NEEDS = {"webdataset + simplejpeg, DataLoader, no antialias": ("simplejpeg", "cv2", "webdataset", "torch")}


def list_cases(options: argparse.Namespace) -> list[Case]:
    caches = ("cold", "warm") if may_drop_caches() else ("warm",)
    found = []

    def add(group: str, name: str, cache: str, python: str = sys.executable) -> None:
        child = ("--child", group, name, cache, "--threads", str(options.threads), "--seconds", str(options.seconds))
        command = (python, __file__, str(options.dataset), *child)
        found.append(Case(group=group, name=name, cache=cache, command=command, twice=group == "first"))

    for cache in caches:
        for name in raw_reads.names():
            add("raw", name, cache)
    for name in (decoded_batches.CEILING, *decoded_batches.CONTENDERS):
        if all(importlib.util.find_spec(package) for package in NEEDS.get(name, ())):
            add("decode", name, "warm")
        elif options.peer_python:
            add("decode", name, "warm", options.peer_python)
        else:
            print(f"{name}: left out, needs {', '.join(NEEDS[name])} (or --peer-python)")
    for name in decoded_batches.FIRST:
        add("first", name, "warm")
    if options.open:
        import bench_open

        found += bench_open.cases(options.open)
    return [case for case in found if wanted(case, options.only)]


def wanted(case: Case, only: Sequence[str]) -> bool:
    text = f"{case.group} | {case.name} | {case.cache}"
    return not only or any(all(word in text for word in part.split("+")) for part in only)


def run_child(options: argparse.Namespace) -> None:
    group, name, cache = options.child
    if group == "raw":
        result = raw_reads.measure(name, options.dataset, cache == "cold")
    elif group == "decode":
        result = decoded_batches.measure_rate(name, options.dataset, options.threads, options.seconds)
    else:
        result = decoded_batches.measure_first(name, options.dataset, options.threads)
    print(json.dumps(result), flush=True)
    os._exit(0)  # some contenders' workers would be waited for


def report(rows: Sequence[Row], peers: Sequence[Row], samples: int) -> None:
    for cache in ("cold", "warm"):
        mine = pick(rows, "raw", cache)
        if mine:
            report_raw(cache, mine, pick(peers, "raw", cache))
    if decode := pick(rows, "decode"):
        report_decode(decode, pick(peers, "decode"))
    if first := pick(rows, "first"):
        report_first(first)
    if opened := pick(rows, "open"):
        import bench_open

        bench_open.report(opened, samples)
    if elsewhere := pick(peers, "open"):
        lines = [(r.case.name, r.spread("open_s", "{:.4f}"), r.spread("rss_open_mb"), r.told()) for r in elsewhere]
        show("open, elsewhere", ("", "s", "RSS after, MB", "runs"), lines)
    for row in [*rows, *peers]:
        if row.failure:
            print(f"- failed: {row.case.group} | {row.case.name} | {row.case.cache}: {row.failure}")


def pick(rows: Sequence[Row], group: str, cache: str = "") -> list[Row]:
    return [row for row in rows if row.case.group == group and cache in ("", row.case.cache)]


def best(rows: Sequence[Row], word: str) -> float | None:
    """Return the highest median rate of the rows whose name has a word."""
    found = [rate for row in rows if word in row.case.name and (rate := row.median("rate")) is not None]
    return max(found, default=None)


def ratio(value: float | None, reference: float | None) -> str:
    return f"{value / reference:.2f}" if value and reference else "-"


def report_raw(cache: str, rows: list[Row], peers: list[Row]) -> None:
    plain = [row for row in rows if "plain" in row.case.name]
    usual = [row for row in plain if "huge" not in row.case.name]  # memory as a program gets it, small and used again
    ceiling, direct = best(usual, "plain"), best(usual, "O_DIRECT")
    strict, strict_direct = best(plain, "plain"), best(plain, "O_DIRECT")
    peer = best([row for row in peers if "ceiling" not in row.case.name], "")
    lines = []
    for row in sorted([*rows, *peers], key=lambda row: -(row.median("rate") or 0)):
        rate = row.median("rate")
        ratios = (ratio(rate, ceiling), ratio(rate, direct), ratio(row.median("first_rate") or rate, peer))
        numbers = (row.spread("rate"), row.spread("first_rate"), row.spread("cpu_us", "{:.1f}"))
        lines.append((row.case.name, *numbers, *ratios, row.told()))
    columns = ("", "samples/s", "first pass", "CPU µs each", "x best plain", "x best O_DIRECT", "x best peer", "runs")
    show(f"read, {cache}", columns, lines)
    rates = {row.case.name: row.median("rate") for row in rows}
    for shuffle, bar in (("none", 0.9), ("window", 0.9), ("global", 0.8)):
        rate = rates.get(raw_reads.name_of(shuffle, "auto"))
        if rate and ceiling:
            verdict(f"{cache}: {shuffle}, io=auto, over the best plain read", rate / ceiling, ">=", bar, "x")
        if rate and strict and strict != ceiling:
            verdict(f"{cache}: {shuffle}, io=auto, over that into huge pages", rate / strict, ">=", bar, "x")
    for way in ("direct", "uring"):
        rate = rates.get(raw_reads.name_of("none", way))
        if rate and direct:
            verdict(f"{cache}: none, io={way}, over the best plain O_DIRECT read", rate / direct, ">=", 0.95, "x")
        if rate and strict_direct and strict_direct != direct:
            verdict(f"{cache}: none, io={way}, over that into huge pages", rate / strict_direct, ">=", 0.95, "x")


def report_decode(rows: list[Row], peers: list[Row]) -> None:
    others = [row for row in rows if "ShardLoader" not in row.case.name and row.case.name != decoded_batches.CEILING]
    others += [row for row in peers if not row.case.name.startswith(("peer: part", "peer: ceiling"))]
    ceilings = [row for row in rows if row.case.name == decoded_batches.CEILING]
    ceilings += [row for row in peers if "decode only" in row.case.name]
    reference, ceiling = best(others, ""), best(ceilings, "")
    lines = []
    for row in sorted([*rows, *peers], key=lambda row: -(row.median("rate") or 0)):
        rate = row.median("rate")
        cpu = f"{(row.median('cpu_us') or 0) / 1e3:.2f}"
        lines.append((row.case.name, row.spread("rate"), cpu, ratio(rate, reference), ratio(rate, ceiling), row.told()))
    show("decode", ("", "images/s", "CPU ms each", "x best peer", "x decode only", "runs"), lines)
    rate = next((row.median("rate") for row in rows if row.case.name == "ShardLoader"), None)
    if rate and reference:
        verdict("ShardLoader over the best peer", rate / reference, ">=", 1.05, "x")
    if rate and ceiling:
        verdict("ShardLoader over decoding only", rate / ceiling, ">=", 0.6, "x")


def report_first(rows: list[Row]) -> None:
    fields = ("first_s", "cpu_s")
    lines = [(row.case.name, *(row.spread(field, "{:.2f}") for field in fields), row.told()) for row in rows]
    show("first batch", ("", "s from start", "CPU s", "runs"), lines)
    found = {row.case.name: row.median("first_s") for row in rows}
    ours = found.pop("ShardLoader", None)
    for name, seconds in found.items():
        if ours and seconds:
            verdict(f"ShardLoader's first batch over that of {name}", ours / seconds, "<=", 1.2, "x")


def run_peers(options: argparse.Namespace, groups: set[str]) -> list[Row]:
    """Run another script's rows, and return its medians as rows of one run, with their lowest and highest."""
    rows: dict[Case, Row] = {}
    tasks = [
        (group, task) for group, task in (("raw", "read"), ("decode", "decode"), ("open", "open")) if group in groups
    ]
    for group, task in tasks:
        for name in options.peer:
            with tempfile.NamedTemporaryFile("r", suffix=".jsonl") as file:
                command = [sys.executable, str(options.peers), task, "--peer", name, "--out", file.name]
                command += ["--reps", str(options.peers_rounds), "--budget", str(options.peers_seconds)]
                command += ["--data", str(options.peers_data)]
                if task == "open":
                    command += ["--order", "1e7"]
                elif not may_drop_caches():
                    command += ["--cache", "warm"]
                print(f"\n{' '.join(command)}", file=sys.stderr, flush=True)
                environment = os.environ | {"PEERS_PATIENCE": "60"}
                subprocess.run(command, stdout=sys.stderr, check=False, env=environment)
                add_peers(rows, group, [json.loads(line) for line in file])
    return list(rows.values())


def add_peers(rows: dict[Case, Row], group: str, lines: Sequence[dict[str, object]]) -> None:
    names = {"samples_s": "rate", "others": "others", "open_s": "open_s", "rss_open_mb": "rss_open_mb"}
    for line in lines:
        name = f"peer: {line['peer']}" + (f", {line['order']}" if line["order"] else "")
        case = Case(group=group, name=name, cache=str(line["cache"]), command=())
        row = rows.setdefault(case, Row(case=case))
        run = {ours: float(str(line[theirs])) for theirs, ours in names.items() if theirs in line}
        if "error" in line or "wrong" in line:
            row.failure = str(line.get("error") or line.get("wrong"))
        elif "open_s" in run or "rate" in run:
            cpu, count = float(str(line["cpu_s"])), float(str(line["n"]))
            row.runs.append(run | ({"cpu_us": cpu / count * 1e6} if count else {}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dataset", type=Path)
    parser.add_argument("--tree", type=Path, help="packed into the dataset's place if there is none yet")
    parser.add_argument("--open", type=Path, help="folder of bench_open.py's dataset; made if it is not there")
    parser.add_argument("--only", nargs="+", default=[], help="rows with these words; A+B wants both")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--retries", type=int, default=2, help="of a run that others disturbed")
    parser.add_argument("--minutes", type=float, default=12, help="the longest, peers not counted")
    parser.add_argument("--seconds", type=float, default=4.0, help="steady state of one decode run")
    parser.add_argument(
        "--threads", type=int, default=len(os.sched_getaffinity(0)), help="or workers, of decode and first"
    )
    parser.add_argument("--json", type=Path, help="write every run there, a line each")
    parser.add_argument("--peer-python", help="interpreter for webdataset + simplejpeg, where this one lacks them")
    parser.add_argument("--peers", type=Path, help="another script to run afterwards")
    parser.add_argument("--peers-data", type=Path, default=Path("/tmp/bench"))
    parser.add_argument("--peers-rounds", type=int, default=3)
    parser.add_argument("--peers-seconds", type=float, default=900, help="of each task, and of each --peer")
    parser.add_argument("--peer", nargs="+", default=["all"], help="parts of the other script's rows")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        run_child(options)
    else:
        run(options)


def run(options: argparse.Namespace) -> None:
    began = time.monotonic()
    prepare(options)
    print(describe_machine(PACKAGES))
    sizes = [path.stat().st_size for path in raw_reads.shards(options.dataset)]
    print(
        f"{len(sizes)} shards, {sum(sizes) / 1e6:.0f} MB, {raw_reads.count_samples(options.dataset)} samples",
        flush=True,
    )
    if not may_drop_caches():
        print("cold: left out, since only root may drop the page cache")
    cases = list_cases(options)
    rows = take_turns(cases, rounds=options.rounds, retries=options.retries, seconds=60 * options.minutes)
    print(f"{sum(len(row.runs) for row in rows)} runs in {time.monotonic() - began:.0f} s", flush=True)
    peers = run_peers(options, {case.group for case in cases}) if options.peers else []
    report(rows, peers, 10_000_000)
    if options.json:
        write_json(options.json, [*rows, *peers])


def prepare(options: argparse.Namespace) -> None:
    if options.tree and not options.dataset.exists():
        command = [sys.executable, "-m", "shardkit", "pack", str(options.tree), str(options.dataset), "--shards", "8"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    if options.open:
        import bench_open

        bench_open.prepare(options.open, 1000, 10_000)
    if may_drop_caches():
        drop_caches()
    read_all(raw_reads.shards(options.dataset))


if __name__ == "__main__":
    main()
