"""Measure `--reflink` of pack and extract against copies, on XFS and btrfs, in runs that take turns. Needs root.

    python scripts/bench_reflink.py FOLDER [--images N] [--bytes N] [--rounds N] [--seconds N] [--jobs N] [--json FILE]

File systems are made in FOLDER, in sparse files behind loop devices, and removed at the end. Each run is a process of
its own that times the work until everything is on the disk, without its start. Bytes written are those that the device
was told to write, journal and metadata included, up to a sync after the run. "clone only" shares every image's blocks
and copies the tails, as pack lays them out, and reads, checks and digests nothing: what the checks cost is the rest.
"read later" is the speed at which what was made is read afterwards, in order, past the page cache.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, cast

from turns import Case, Clock, describe_machine, drop_caches, read_all, show, take_turns, write_json

from shardkit.testing.mounts import loop_mount

if TYPE_CHECKING:
    from collections.abc import Callable

    from shardkit.storage.clone import Reflink

WAYS = {
    "pack": ("pack never", "pack always", "pack sha256 never", "pack sha256 always", "clone only"),
    "extract": ("extract never", "extract always", "cp --reflink=never", "cp --reflink=always"),
}
SHARDS = 4
BLOCK = 4096


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--images", type=int, default=4000)
    parser.add_argument("--bytes", type=int, default=90_000, help="of an image")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=900)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", nargs=3, metavar=("WAY", "PLACE", "CACHE"))
    options = parser.parse_args()
    if options.child:
        print(json.dumps(run(options.child[0], Path(options.child[1]), options.child[2], options.jobs)))
        return
    print(describe_machine(["shardkit", "pyarrow", "crc32c", "xxhash"]))
    payload = options.images * options.bytes
    with tempfile.TemporaryDirectory(dir=options.folder) as place, contextlib.ExitStack() as stack:
        cases = []
        for kind in ("xfs", "btrfs"):
            image, at = Path(place, f"{kind}.img"), Path(place, kind)
            disk = stack.enter_context(loop_mount(image, at, kind, size=4 * payload + (1 << 30)))
            make(disk.path, options.images, options.bytes)
            start = (sys.executable, __file__, place, "--jobs", str(options.jobs), "--child")
            cases += [
                Case(group=kind, name=way, cache=cache, twice=cache == "cold", command=(*start, way, str(at), cache))
                for cache in ("warm", "cold")
                for ways in WAYS.values()
                for way in ways
            ]
        rows = take_turns(cases, rounds=options.rounds, retries=0, seconds=options.seconds)
    for kind in ("xfs", "btrfs"):
        for cache in ("warm", "cold"):
            lines = [
                [row.case.name, row.failure or row.spread("s", "{:.2f}"), row.spread("written_mb"),
                 row.spread("read_mb"), row.spread("later_gbps", "{:.2f}"), row.told()]
                for row in rows if (row.case.group, row.case.cache) == (kind, cache)
            ]  # fmt: skip
            show(f"{kind}, {cache} page cache, {options.images} images, {payload / 1e6:,.0f} MB, {options.jobs} jobs",
                 ["", "s", "MB written", "MB read", "read later, GB/s", "runs"], lines)  # fmt: skip
    if options.json:
        write_json(options.json, rows)


def make(place: Path, images: int, size: int) -> None:
    """Write a tree of images and a dataset of them."""
    import shardkit
    from shardkit.testing.datasets import tiny_jpeg

    for number in range(images):
        path = place / "tree" / f"{number % 20:02d}" / f"{number:06d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(tiny_jpeg(number, size))
    shardkit.pack(place / "tree", place / "ds", name="d", shards=SHARDS, reflink="never")
    os.sync()


def run(way: str, place: Path, cache: str, jobs: int) -> dict[str, float]:
    """Do one thing, time it, and ask its device what it had to do."""
    target = place / f"out-{os.getpid()}"
    source = place / ("tree" if way.startswith(("pack", "clone")) else "ds")
    work = prepare(way, place, target, jobs)
    files = sorted(path for path in source.rglob("*") if path.is_file())
    if way.startswith("cp"):
        files = sorted((place / "tree").rglob("*.jpg"))
    drop_caches()
    if cache == "warm":
        read_all(files)
    device = device_of(place)
    before, clock = counters(device), Clock()
    work()
    result = clock.stop(sum(path.stat().st_size for path in files))
    os.sync()
    result |= {
        f"{name}_mb": (after - first) * 512 / 1e6
        for name, first, after in zip(("read", "written"), before, counters(device), strict=True)
    }
    if way.startswith(("pack", "clone")):
        result["later_gbps"] = read_later(target)
    shutil.rmtree(target)
    os.sync()
    return result


def prepare(way: str, place: Path, target: Path, jobs: int) -> Callable[[], object]:
    """Import what is needed; return what is to be timed."""
    import shardkit
    from shardkit.extracting.run import extract

    shardkit.pack  # noqa: B018 - imports it
    kind, *_, mode = way.split()
    reflink = cast("Reflink", mode)
    if kind == "pack":
        digest = "sha256" if "sha256" in way else "xxh3-128"
        return lambda: shardkit.pack(
            place / "tree", target, name="d", shards=SHARDS, jobs=jobs, digest=digest, reflink=reflink
        )
    if kind == "extract":
        return lambda: extract(place / "ds", target, jobs=jobs, reflink=reflink)
    if kind == "cp":
        return lambda: copy_tree(place / "tree", target, mode)
    return lambda: clone_only(sorted((place / "tree").rglob("*.jpg")), target)


def copy_tree(source: Path, target: Path, mode: str) -> None:
    import subprocess

    subprocess.run(["cp", "-r", mode, source, target], check=True)
    subprocess.run(["sync", "-f", target], check=True)


def clone_only(files: list[Path], target: Path) -> None:
    """Share blocks into as many files as there are shards, with a block between two images, and sync."""
    from shardkit.storage.clone import Place, plan_blocks, share_blocks

    target.mkdir()
    for shard in range(SHARDS):
        name, at = target / f"{shard}.tar", BLOCK
        with open(name, "wb") as out:
            for path in files[shard::SHARDS]:
                with open(path, "rb", buffering=0) as file:
                    plan = plan_blocks(0, at, os.fstat(file.fileno()).st_size, BLOCK)
                    if plan.shared:
                        share_blocks(Place(file.fileno(), 0, b""), Place(out.fileno(), at, b""), plan.shared)
                    tail = os.pread(file.fileno(), plan.tail, plan.shared)
                    os.pwrite(out.fileno(), tail + bytes(2 * BLOCK - len(tail)), at + plan.shared)
                at += plan.shared + 2 * BLOCK
            os.fsync(out.fileno())


def read_later(target: Path) -> float:
    """Return GB/s of reading every shard in order by O_DIRECT."""
    import mmap

    drop_caches()
    clock, size, buffer = Clock(), 0, mmap.mmap(-1, 4 << 20)
    for path in sorted(target.glob("*.tar")):
        fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
        while count := os.readv(fd, [buffer]):
            size += count
            if count % BLOCK:
                break
        os.close(fd)
    return size / clock.seconds() / 1e9


def device_of(place: Path) -> Path:
    """Return the counters of the device that is mounted there; btrfs does not tell it by stat."""
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        fields = line.split()
        if fields[4] == str(place):
            return Path("/sys/class/block", Path(fields[fields.index("-") + 2]).name, "stat")
    raise SystemExit(f"{place} is not mounted")


def counters(device: Path) -> tuple[int, int]:
    """Return sectors read and written."""
    fields = device.read_text().split()
    return int(fields[2]), int(fields[6])


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
