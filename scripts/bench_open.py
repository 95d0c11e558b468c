"""Open a synthetic dataset of ten million samples, and find the first batch of an epoch and the last one.

    python scripts/bench_open.py FOLDER [--shards 1000] [--rows 10000] [--rounds 5] [--json OUT]

FOLDER gets the dataset, once: a manifest and an index as a pack writes them (130 bytes a sample), and sparse shards of
the size that they state, which take no room; the two indexes beside each shard are left out, since nothing here reads
them. Every measurement is a process of its own, warm, and cold where root may drop the page cache:

- open: `shardkit.open`, and by how much it grew the resident memory (RssAnon + RssFile + RssShmem), also at its peak;
- loader: what a loader asks of the index before it reads, the budget of its buffers;
- first, last: the numbers of the samples of one shuffled batch, where they lie, their sizes in pixels and keys, at the
  start of an epoch and at its end, as after a resume; then that time again for the batch beside it.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
from turns import (
    Case,
    Clock,
    Result,
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

import shardkit
from shardkit.dataset.budget import batch_budget
from shardkit.dataset.order import GlobalOrder
from shardkit.dataset.samples import Part, Samples
from shardkit.format.dataset_record import DATASET_INDEX, MANIFEST, FileRecord, Manifest, ShardRecord, Totals
from shardkit.format.index import SCHEMA, write_dataset_index
from shardkit.format.manifest import dump_manifest

if TYPE_CHECKING:
    from collections.abc import Iterator

ALIGN, BATCH, DIGEST = 4096, 256, "0" * 32
STEPS = ("open", "loader", "first", "last")


def make_dataset(folder: Path, shards: int, rows: int) -> None:
    """Write a dataset that `shardkit.open` takes; the manifest comes last, as always."""
    folder.mkdir(parents=True, exist_ok=True)
    records: list[ShardRecord] = []
    with (folder / DATASET_INDEX).open("wb") as sink:
        write_dataset_index(make_batches(folder, shards, rows, records), sink)
    payload, padding, size = (sum(getattr(r, name) for r in records) for name in ("payload", "padding", "bytes"))
    totals = Totals(
        shards=shards, samples=shards * rows, payload=payload, padding=padding, bytes=size,
        headers=size - payload - padding, refused=0,
    )  # fmt: skip
    manifest = Manifest(
        shardkit="0", name="synthetic", align=ALIGN, digest_algorithm="xxh3-128", seed=0, options={},
        classes=[f"n{number:08d}" for number in range(1000)], rejected=None, shards=records, totals=totals,
        index=FileRecord(bytes=(folder / DATASET_INDEX).stat().st_size, digest=DIGEST),
    )  # fmt: skip
    (folder / MANIFEST).write_text(dump_manifest(manifest))


def make_batches(folder: Path, shards: int, rows: int, records: list[ShardRecord]) -> Iterator[pa.RecordBatch]:
    random = np.random.default_rng(0)
    for shard in range(shards):
        number = np.arange(shard * rows, (shard + 1) * rows)
        size = random.integers(20_000, 160_000, rows)
        place = np.concatenate([[0], np.cumsum(ALIGN + -(-size // ALIGN) * ALIGN)])
        keys = [f"n{i % 1000:08d}/n{i % 1000:08d}_{i:08d}" for i in number.tolist()]
        columns = {
            "key": keys, "label": number % 1000, "offset": place[:-1] + ALIGN, "size": size,
            "crc32c": random.integers(0, 1 << 32, rows), "sample_offset": place[:-1], "sample_size": np.diff(place),
            "json_offset": place[:-1] + 1536, "json_size": np.full(rows, 100), "width": random.integers(200, 600, rows),
            "height": random.integers(200, 600, rows), "components": np.full(rows, 3), "subsampling": np.full(rows, 3),
            "precision": np.full(rows, 8), "scans": np.ones(rows), "media_type": np.ones(rows),
            "source": [key + ".JPEG" for key in keys],
        }  # fmt: skip
        arrays = [pa.array(columns.get(field.name, np.zeros(rows)), field.type, safe=False) for field in SCHEMA]
        end = -(-(int(place[-1]) + 1024) // 20480) * 20480
        name = f"synthetic-{shard:06d}.tar"
        (folder / name).touch()
        os.truncate(folder / name, end)
        file = FileRecord(bytes=0, digest=DIGEST)
        payload = int(size.sum())
        records.append(
            ShardRecord(
                name=name, bytes=end, digest=DIGEST, samples=rows, payload=payload,
                padding=end - payload - 4 * 512 * rows, index=file, dali_index=file, first_key=keys[0],
                last_key=keys[-1],
            )
        )  # fmt: skip
        yield pa.RecordBatch.from_arrays(arrays, schema=SCHEMA)


def resident(*kinds: str) -> int:
    """Return the resident bytes of this process, those of some kinds only if any are named."""
    status = Path("/proc/self/status").read_text()
    names = "|".join(kinds or ("RssAnon", "RssFile", "RssShmem"))
    return sum(int(value) * 1024 for value in re.findall(rf"(?:{names}):\s*([0-9]+) kB", status))


def measure(step: str, folder: Path, cold: bool) -> Result:
    """Measure one step in this process."""
    if cold:
        drop_caches()
    else:
        warm(folder)
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    before = {kind: resident(kind) for kind in ("RssAnon", "RssFile", "VmHWM")}
    rss, clock = resident(), Clock()
    samples = Samples([Part(shardkit.open(folder))])
    found: Result = {"open_ms": clock.seconds() * 1e3, "open_cpu_ms": clock.cpu_seconds() * 1e3}
    found["open_mb"] = (resident() - rss) / 1e6
    found |= {f"{kind}_mb": (resident(kind) - bytes_before) / 1e6 for kind, bytes_before in before.items()}
    start, cpu = time.perf_counter(), time.process_time()
    if step == "loader":
        batch_budget(samples, batch_size=BATCH, slots=6, align=ALIGN, metadata=False)
    elif step in ("first", "last"):
        at = 0 if step == "first" else len(samples) - 2 * BATCH
        find_batch(samples, at)
    if step != "open":
        found["step_ms"], found["step_cpu_ms"] = (time.perf_counter() - start) * 1e3, (time.process_time() - cpu) * 1e3
    if step in ("first", "last"):
        start = time.perf_counter()
        find_batch(samples, at + BATCH)
        found["next_ms"] = (time.perf_counter() - start) * 1e3
    return found | {"after_mb": (resident() - rss) / 1e6, "others": clock.stop(1)["others"]}


def warm(folder: Path) -> None:
    """Bring into the page cache what opening and looking up need; another row may have emptied it."""
    read_all([folder / MANIFEST, folder / DATASET_INDEX])
    for entry in os.scandir(folder):
        os.stat(entry.path)


def find_batch(samples: Samples, position: int) -> None:
    """Look up what a loader needs of one batch before it reads, and the keys."""
    ids = samples.ids(GlobalOrder(len(samples), 1).at(3, np.arange(position, position + BATCH)))
    located = samples.locate(ids)
    for name in ("width", "height", "orientation"):
        samples.gather(name, ids)
    keys = samples.keys(ids)
    if [key.rpartition("_")[2] for key in keys] != [f"{i:08d}" for i in ids.tolist()] or int(located.size.min()) < 1:
        raise SystemExit("the index is not the one that was asked for")


def cases(folder: Path, only: str = "") -> list[Case]:
    """Return the rows of the table, for this script or another one that runs them too."""
    caches = ("warm", "cold") if may_drop_caches() else ("warm",)
    found = []
    for cache in caches:
        for step in STEPS:
            command = (sys.executable, __file__, str(folder), "--child", step, cache)
            found.append(Case(group="open", name=step, cache=cache, command=command))
    return [case for case in found if only in f"{case.group} {case.name} {case.cache}"]


def report(rows: list[Row], samples: int) -> None:
    columns = {
        "open, ms": "open_ms", "its CPU ms": "open_cpu_ms", "its RSS, MB": "open_mb", "RSS at its peak": "VmHWM_mb",
        "step, ms": "step_ms", "CPU ms": "step_cpu_ms", "next batch, ms": "next_ms", "RSS after": "after_mb",
    }  # fmt: skip
    lines = []
    for row in rows:
        numbers = [row.spread(field) for field in columns.values()]
        lines.append((f"{row.case.name}, {row.case.cache}", *numbers, row.failure or row.told()))
    show(f"open {samples:,} samples", ("step", *columns, "runs"), lines)
    found = {(row.case.name, row.case.cache): row for row in rows}
    opened = [value for row in rows if row.case.cache == "warm" for value in row.values("open_ms")]
    grown = [value for row in rows if row.case.cache == "warm" for value in row.values("open_mb")]
    if opened:
        verdict("open", statistics.median(opened), "<=", 200, "ms")
        verdict("its resident memory", statistics.median(grown), "<=", 100, "MB")
    for field, kind in (("step_ms", "time"), ("step_cpu_ms", "CPU time")):
        first, last = (found[name, "warm"].median(field) if (name, "warm") in found else None for name in STEPS[2:])
        if first and last:
            verdict(
                f"{kind} of the first batch at the end of an epoch, over its start's", last / first, "<=", 1.25, "x"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--shards", type=int, default=1000)
    parser.add_argument("--rows", type=int, default=10_000, help="samples of a shard")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--retries", type=int, default=2)
    parser.add_argument("--json", type=Path, help="write every run there")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        step, cache = options.child
        print(json.dumps(measure(step, options.folder, cache == "cold")))
        return
    print(describe_machine(("shardkit", "numpy", "pyarrow")))
    if not may_drop_caches():
        print("cold: left out, since only root may drop the page cache")
    prepare(options.folder, options.shards, options.rows)
    rows = take_turns(cases(options.folder), rounds=options.rounds, retries=options.retries, seconds=600)
    report(rows, options.shards * options.rows)
    if options.json:
        write_json(options.json, rows)


def prepare(folder: Path, shards: int, rows: int) -> None:
    """Make the dataset unless it is there."""
    if not (folder / MANIFEST).exists():
        print(f"making {shards * rows:,} samples in {folder}", flush=True)
        make_dataset(folder, shards, rows)
    with shardkit.open(folder) as dataset:
        if len(dataset) != shards * rows:
            raise SystemExit(f"{folder} holds {len(dataset):,} samples, not {shards * rows:,}: name another folder")


if __name__ == "__main__":
    main()
