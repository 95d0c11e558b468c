"""Measure `shardkit index` against DALI's `wds2idx`, GNU tar and a plain read, in runs that take turns.

    python scripts/bench_index.py FOLDER [--gb N] [--size SIZE] [--shards N] [--tool TOOL] [--rounds N] [--seconds N]
        [--jobs N] [--cache warm|cold] [--wds2idx PATH] [--sparse] [--json FILE]

Shards are made in FOLDER and removed at the end: random bytes behind small JPEG headers, three members a sample (jpg,
cls, json), images of 4 kB, 100 kB and 1 MB. Each run is a process of its own that times the work, not its start. With
root the page cache is dropped before a cold run; else all runs are warm. What shardkit writes is in its time, synced.
With `--sparse` images are holes behind their headers, so that a small disk holds shards of many large ones: what reads
headers only does the same as ever, and `full` and `dd direct`, which read everything, are left out.
`wds2idx.py` is DALI's own indexer, by default the one that is installed; it runs GNU tar twice for each shard.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import resource
import runpy
import shutil
import subprocess
import sys
import tarfile
import tempfile
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, cast

from turns import (
    Case,
    Clock,
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
    from collections.abc import Callable

    from shardkit.indexing.options import Facts

SIZES = {"4 kB": 4_000, "100 kB": 100_000, "1 MB": 1_000_000}
HOLES = ("index --facts none", "index --facts header", "wds2idx", "tar -tv")
TOOLS = ("index --facts none", "index --facts header", "index --facts full", "wds2idx", "tar -tv", "dd direct")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--gb", type=float, default=0.5, help="of each size")
    parser.add_argument("--size", choices=SIZES, action="append", help="of an image, again for another; all by default")
    parser.add_argument("--shards", type=int, default=4, help="of each size")
    parser.add_argument("--tool", choices=TOOLS, action="append", help="again for another; all by default")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--jobs", type=int, help="default: as shardkit index itself")
    parser.add_argument("--cache", choices=("warm", "cold"), action="append", help="of pages; both by default")
    parser.add_argument("--wds2idx", type=Path, default=installed_wds2idx(), help="a wds2idx.py")
    parser.add_argument("--sparse", action="store_true", help="images are holes behind their headers")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", nargs=3, metavar=("TOOL", "SHARDS", "CACHE"))
    options = parser.parse_args()
    if options.child:
        print(json.dumps(run(options)))
        return
    if options.cache == ["cold"] and not may_drop_caches():
        parser.error("--cache cold: only root may drop the page cache")
    sizes = {name: size for name, size in SIZES.items() if name in (options.size or SIZES)}
    print(describe_machine(["shardkit", "pyarrow", "crc32c", "xxhash", "nvidia-dali-cuda120"]))
    with tempfile.TemporaryDirectory(dir=options.folder) as place:
        folders = {
            name: make(Path(place, name.replace(" ", "")), size, options.gb, options.shards, sparse=options.sparse)
            for name, size in sizes.items()
        }
        caches = [cache for cache in options.cache or ("warm", "cold") if cache == "warm" or may_drop_caches()]
        start = [sys.executable, __file__, place, "--wds2idx", str(options.wds2idx)]
        start += [*(["--jobs", str(options.jobs)] if options.jobs else []), "--child"]
        cases = [
            Case(group=name, name=tool, cache=cache, twice=cache == "cold", command=(*start, tool, str(folder), cache))
            for name, folder in folders.items()
            for cache in caches
            for tool in options.tool or (HOLES if options.sparse else TOOLS)
            if tool != "wds2idx" or options.wds2idx is not None
        ]
        rows = take_turns(cases, rounds=options.rounds, retries=0, seconds=options.seconds)
    by_case = {(row.case.group, row.case.cache, row.case.name): row for row in rows}
    for cache in caches:
        lines = []
        for row in (row for row in rows if row.case.cache == cache):
            theirs = by_case.get((row.case.group, cache, "wds2idx"))
            mine, other = row.median("s"), theirs.median("s") if theirs else None
            gain = f"{other / mine:.2f}" if mine and other else "-"
            rate = row.spread("gbps", "{:.2f}")
            what = f"{row.case.group}: {row.case.name}"
            lines.append([what, row.failure or row.spread("ms"), rate, gain, row.told()])
        show(f"{cache} page cache, {options.shards} shards, {options.gb:g} GB, {options.jobs or 'default'} jobs",
             ["images of", "ms", "GB/s of shard", "x wds2idx", "runs"], lines)  # fmt: skip
    for name in sizes:
        for cache in caches:
            took = {
                row.case.name: row.median("s") for row in rows if row.case.group == name and row.case.cache == cache
            }
            header, disk, indexed = (took.get(tool) for tool in ("index --facts none", "dd direct", "wds2idx"))
            if header and disk:
                verdict(f"{name}, {cache}: header scan / plain direct read", disk / header, ">=", 0.8, "x")
            if header and indexed and name == "1 MB":
                verdict(f"{name}, {cache}: header scan / wds2idx", indexed / header, ">=", 10, "x")
    if options.json:
        write_json(options.json, rows)


def installed_wds2idx() -> Path | None:
    spec = importlib.util.find_spec("wds2idx")
    return Path(spec.origin) if spec is not None and spec.origin else None


def make(folder: Path, size: int, gigabytes: float, shards: int, *, sparse: bool = False) -> Path:
    """Write shards of images of a size, and return their folder."""
    folder.mkdir()
    count = max(int(gigabytes * 1e9 / shards / (size + 3 * 512)), 1)
    with ProcessPoolExecutor() as pool:
        list(pool.map(partial(make_shard, folder, size, count, sparse), range(shards)))
    return folder


def make_shard(folder: Path, size: int, count: int, sparse: bool, shard: int) -> None:
    from shardkit.testing.datasets import tiny_jpeg

    head, noise, size = tiny_jpeg(1), os.urandom(size), size - 512
    with (folder / f"s-{shard:03d}.tar").open("wb", buffering=1 << 20) as file:
        for number in range(count):
            image = head if sparse else head + noise[number % 512 :][: size - len(head)]
            for end, data in (("jpg", image), ("cls", b"%d" % (number % 1000)), ("json", b'{"n": %d}' % number)):
                info = tarfile.TarInfo(f"{shard}/{number:07d}.{end}")
                info.size = size if end == "jpg" else len(data)
                file.write(info.tobuf(tarfile.USTAR_FORMAT) + data)
                if hole := info.size - len(data):
                    file.seek(hole, os.SEEK_CUR)
                file.write(bytes(-info.size % 512))
        file.write(bytes(1024))


def run(options: argparse.Namespace) -> dict[str, float]:
    """Do one thing to the shards of a folder and time it."""
    tool, folder, cache = options.child[0], Path(options.child[1]), options.child[2]
    shards = sorted(folder.glob("*.tar"))
    size = sum(path.stat().st_size for path in shards)
    out = folder / f"out-{os.getpid()}"
    prepared = prepare(tool, shards, out, options)
    drop_caches() if cache == "cold" else read_all(shards)
    clock, before = Clock(), resource.getrusage(resource.RUSAGE_CHILDREN)
    prepared()
    result, after = clock.stop(size), resource.getrusage(resource.RUSAGE_CHILDREN)
    # The clock does not see processes that have ended by now: they are no others.
    own = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    result["others"] = max(result["others"] - own / (result["s"] * (os.cpu_count() or 1)), 0.0)
    result["cpu_us"] += own / size * 1e6
    shutil.rmtree(out, ignore_errors=True)
    return result | {"ms": result["s"] * 1e3, "gbps": size / result["s"] / 1e9}


def prepare(tool: str, shards: list[Path], out: Path, options: argparse.Namespace) -> Callable[[], object]:
    """Import what a tool needs; return what is to be timed."""
    if tool.startswith("index"):
        import shardkit

        shardkit.index, shardkit.open  # noqa: B018 - imports them
        facts = cast("Facts", tool.rpartition(" ")[2])
        return lambda: shardkit.index(shards, out=out, name="d", facts=facts, jobs=options.jobs)
    out.mkdir()
    if tool == "wds2idx":
        creator_of = runpy.run_path(str(options.wds2idx))["IndexCreator"]

        def index() -> None:
            for path in shards:
                with creator_of(str(path), str(out / f"{path.stem}.idx"), verbose=False) as creator:
                    creator.create_index()

        return index
    command = ["tar", "-tvf"] if tool == "tar -tv" else ["dd", "of=/dev/null", "bs=4M", "iflag=direct", "status=none"]

    def each() -> None:
        for path in shards:
            named = [*command, str(path)] if command[0] == "tar" else [*command, f"if={path}"]
            subprocess.run(named, check=True, stdout=subprocess.DEVNULL)

    return each


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
