"""Reads batches of random 90 kB ranges through every backend, warm and cold, with growing numbers of threads.

    python scripts/bench_readers.py FOLDER [--shards 8] [--shard-mib 256] [--batches 12] [--rounds 3]

FOLDER gets `bench-*.bin` files, which stay for the next run. One JSON line a setting: the median over the rounds.
Cold means that the files' pages were dropped before the round (posix_fadvise, no root needed).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from pathlib import Path

import numpy as np

from shardkit.errors import CapabilityError
from shardkit.storage.backends import open_reader
from shardkit.storage.buffers import BufferPool
from shardkit.storage.coalesce import coalesce

RANGE_BYTES = 90_000
BATCH = 256


def make_files(folder: Path, count: int, size: int) -> list[Path]:
    paths = [folder / f"bench-{number}.bin" for number in range(count)]
    for path in paths:
        if not path.exists() or path.stat().st_size != size:
            with path.open("wb") as file:
                for _ in range(size >> 20):
                    file.write(os.urandom(1 << 20))
                os.fsync(file.fileno())
    return paths


def set_cache(paths: list[Path], warm: bool) -> None:
    for path in paths:
        with path.open("rb") as file:
            if warm:
                while file.read(4 << 20):
                    pass
            else:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def measure(paths: list[Path], size: int, io: str, threads: int, batches: int, seed: int) -> tuple[float, float, float]:
    """Return medians of one round: seconds a batch, seconds to plan it, CPU seconds a batch."""
    random = np.random.default_rng(seed)
    reader, _ = open_reader(io, paths, threads=threads)
    took, planned, cpu = [], [], time.process_time()
    with BufferPool(64 << 20, align=reader.align) as pool:
        reader.register(pool.memory)
        for _ in range(batches):
            file = random.integers(0, len(paths), BATCH)
            offset = random.integers(0, (size - RANGE_BYTES) // 4096, BATCH) * 4096
            began = time.perf_counter()
            lengths = np.full(BATCH, RANGE_BYTES)
            plan = coalesce(file, offset, lengths, align=reader.align, gap_bytes=0, max_bytes=1 << 20)
            ops = plan.ops(pool.acquire(plan.buffer_bytes))
            ready = time.perf_counter()
            reader.read_into(ops)
            done = time.perf_counter()
            del ops  # gives the memory back
            planned.append(ready - began)
            took.append(done - ready)
    reader.close()
    return statistics.median(took), statistics.median(planned), (time.process_time() - cpu) / batches


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--shards", type=int, default=8)
    parser.add_argument("--shard-mib", type=int, default=256)
    parser.add_argument("--batches", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", default="1,2,4,8,16")
    parser.add_argument("--io", default="buffered,direct,uring", help="uring has no threads: one is enough")
    parser.add_argument("--cache", default="warm,cold")
    options = parser.parse_args()
    size = options.shard_mib << 20
    paths = make_files(options.folder, options.shards, size)
    for cache in options.cache.split(","):
        set_cache(paths, cache == "warm")
        settings = [(io, int(count)) for io in options.io.split(",") for count in options.threads.split(",")]
        rows: dict[tuple[str, int], list[tuple[float, float, float]]] = {setting: [] for setting in settings}
        for turn in range(options.rounds):  # settings take turns, so that a slow minute hits all of them alike
            for io, threads in settings:
                if cache == "cold":
                    set_cache(paths, False)
                try:
                    rows[io, threads].append(measure(paths, size, io, threads, options.batches, turn))
                except CapabilityError as error:
                    print(json.dumps({"io": io, "refused": str(error)}))
        for (io, threads), found in rows.items():
            if found:
                took, planned, cpu = (statistics.median(column) for column in zip(*found, strict=True))
                row = {"cache": cache, "io": io, "threads": threads, "batch_ms": round(took * 1e3, 2)}
                row |= {"plan_ms": round(planned * 1e3, 2), "ranges_per_s": round(BATCH / took)}
                row |= {"GB_per_s": round(BATCH * RANGE_BYTES / took / 1e9, 2), "cpu_us": round(cpu / BATCH * 1e6, 1)}
                print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
