"""Pack one tree with `shardkit pack`, GNU tar, and webdataset's ShardWriter followed by DALI's wds2idx.

The tools take turns, so that what else the machine does hits them alike; medians and ratios are printed. Times are of
whole commands, start-up included, once as they return and once when their bytes are on the disk (shardkit syncs itself;
the others are followed by syncfs). webdataset's start-up is left out, in its favour. With `--cache cold` the page cache
is dropped before every run, which needs root.

    python scripts/make_photos.py /tmp/photos -n 6000 --classes 100
    python scripts/bench_pack.py /tmp/photos --work /tmp/bench --rounds 5 --cache warm cold
"""

from __future__ import annotations

import argparse
import ctypes
import os
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from turns import describe_machine

if TYPE_CHECKING:
    from collections.abc import Callable

SHARDS = 8


def shardkit(jobs: int) -> Callable[[Path, Path], None]:
    def run(tree: Path, out: Path) -> None:
        command = [sys.executable, "-m", "shardkit", "pack", str(tree), str(out), "--shards", str(SHARDS)]
        subprocess.run([*command, "--jobs", str(jobs)], check=True, stdout=subprocess.DEVNULL)

    return run


def tar(tree: Path, out: Path) -> None:
    out.mkdir()
    subprocess.run(["tar", "-cf", str(out / "all.tar"), "-C", str(tree), "."], check=True)


_SHARD_WRITER = """
import sys, pathlib, time, webdataset
tree, out, shards = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]), int(sys.argv[3])
start = time.perf_counter()
files = sorted(p for p in tree.rglob("*") if p.is_file())
labels = {name: i for i, name in enumerate(sorted({p.parent.name for p in files}))}
with webdataset.ShardWriter(str(out / "x-%06d.tar"), maxcount=-(-len(files) // shards), verbose=0) as writer:
    for i, path in enumerate(files):
        writer.write({"__key__": f"{i:09d}", "jpg": path.read_bytes(), "cls": labels[path.parent.name]})
print(time.perf_counter() - start)
"""


def shard_writer(tree: Path, out: Path) -> float:
    """Return its own seconds: importing webdataset, and with it torch, is not counted."""
    out.mkdir()
    command = [sys.executable, "-c", _SHARD_WRITER, str(tree), str(out), str(SHARDS)]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def shard_writer_and_index(tree: Path, out: Path) -> float:
    seconds = shard_writer(tree, out)
    start = time.perf_counter()
    wds2idx = str(Path(sys.executable).with_name("wds2idx"))
    for shard in sorted(out.glob("*.tar")):
        subprocess.run([wds2idx, str(shard), str(shard.with_suffix(".idx"))], check=True, capture_output=True)
    return seconds + time.perf_counter() - start


TOOLS: dict[str, Callable[[Path, Path], float | None]] = {
    "shardkit pack, 1 job": shardkit(1),
    "shardkit pack, 2 jobs": shardkit(2),
    "GNU tar -cf": tar,
    "webdataset ShardWriter": shard_writer,
    "ShardWriter + wds2idx": shard_writer_and_index,
}


def measure(run: Callable[[Path, Path], float | None], tree: Path, out: Path, cold: bool) -> tuple[float, float]:
    """Return seconds until the command was done, and until its bytes were on the disk."""
    shutil.rmtree(out, ignore_errors=True)
    sync(out.parent)
    if cold:
        Path("/proc/sys/vm/drop_caches").write_text("3")
    start = time.perf_counter()
    own = run(tree, out)
    done = time.perf_counter() - start
    skipped = 0.0 if own is None else done - own
    sync(out.parent)
    return done - skipped, time.perf_counter() - start - skipped


def sync(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY)
    if ctypes.CDLL(None, use_errno=True).syncfs(fd):
        raise OSError(ctypes.get_errno(), "syncfs")
    os.close(fd)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tree", type=Path)
    parser.add_argument("--work", type=Path, required=True, help="folder on the disk to measure")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cache", nargs="+", choices=["warm", "cold"], default=["warm"], help="cold needs root")
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    files = [p for p in options.tree.rglob("*") if p.is_file()]
    size = sum(p.stat().st_size for p in files)
    print_machine()
    print(f"{len(files)} files, {size / 1e6:.1f} MB; medians of {options.rounds} alternating rounds\n")
    for cache in options.cache:
        for path in files:  # warm: everything is in the page cache
            path.read_bytes()
        table(options, len(files), cache == "cold")


def table(options: argparse.Namespace, count: int, cold: bool) -> None:
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in TOOLS}
    for _ in range(options.rounds):
        for name, run in TOOLS.items():
            times[name].append(measure(run, options.tree, options.work / "out", cold))
    medians = {name: [statistics.median(column) for column in zip(*runs, strict=True)] for name, runs in times.items()}
    reference = medians["GNU tar -cf"]
    print(f"| {'cold' if cold else 'warm'} | samples/s | s (min-max) | s on disk | x tar | x tar, on disk |")
    print("|---|---|---|---|---|---|")
    for name, (done, synced) in medians.items():
        spread = f"{min(t for t, _ in times[name]):.2f}-{max(t for t, _ in times[name]):.2f}"
        ratios = f"{reference[0] / done:.2f} | {reference[1] / synced:.2f}"
        print(f"| {name} | {count / done:,.0f} | {done:.2f} ({spread}) | {synced:.2f} | {ratios} |")
    print(flush=True)


def print_machine() -> None:
    print(describe_machine(("shardkit", "numpy", "pyarrow", "crc32c", "xxhash", "webdataset", "nvidia-dali-cuda120")))
    print(subprocess.run(["tar", "--version"], capture_output=True, text=True, check=True).stdout.splitlines()[0])


if __name__ == "__main__":
    main()
