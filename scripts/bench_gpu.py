"""Everything that a GPU's loader must reach, measured in one go: stage by stage, each run a process of its own.

    python scripts/bench_gpu.py --data /tmp/tree --work /tmp/bench --out /tmp/bench.jsonl
    python scripts/bench_gpu.py --data /tmp/tree --work /tmp/bench --out /tmp/bench.jsonl --stage decode cold
    python scripts/bench_gpu.py --dry-run

It packs the tree as it is, with `--resize 256`, and several times over, as stages need it, into the work folder, unless
they are there. Rows of a stage take turns; every run is a line of the file --out as soon as it is done. After each
stage its table is printed, and whether the bars are met. Stages:

- decode: nvJPEG's engines alone, both decoders in every way to read, DALI's own reader at 2, 4, 8 and 16 threads. Warm.
- small: the same images, packed smaller.
- train: ResNet-50 in bfloat16, fed by one batch again and again, by each decoder, and by DALI's reader.
- cold: every image --repeat times, so that a pass lasts a second or two, from ext4 on a loop device over tmpfs with
  direct I/O, as from a fast disk; needs root. Else from --work itself.
- first: seconds to the first batch of a process.
- cache: epochs one after the other, with the encoded images kept in GPU memory and without.
- staging: pinned host memory against managed memory.

--dry-run runs what a CPU can do, on a tiny dataset, to see that the script works.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from turns import describe_machine, verdict

import shardkit
from shardkit.benching import machine as facts
from shardkit.benching.case import Case, Settings
from shardkit.benching.clock import read_all, shards_of
from shardkit.benching.table import one_run, table
from shardkit.benching.turns import Row, command_for, take_turns
from shardkit.testing.mounts import NoMountsError, loop_mount, tmpfs

if TYPE_CHECKING:
    from collections.abc import Iterator

PACKAGES = (
    "shardkit", "torch", "nvidia-dali-cuda120", "nvidia-dali-cuda130", "kvikio-cu12", "kvikio-cu13", "nvidia-nvjpeg",
    "cuda-bindings", "numpy",
)  # fmt: skip
RIVAL_THREADS = (2, 4, 8, 16)
SHUFFLES = ("none", "window", "global")
CACHE = "16GiB"
SPARE_BYTES = 256 << 20
"""Of the loop device's file system, beyond the dataset."""


@dataclass(frozen=True, kw_only=True)
class Stage:
    """Rows that are compared."""

    settings: Settings
    cases: list[Case]
    warm: bool = True
    """The page cache is filled first."""


def pipeline(decoder: str, io: str = "auto", shuffle: str = "global", **options: str | int) -> Case:
    return Case(kind="pipeline", io=io, decoder=decoder, shuffle=shuffle, options=tuple(options.items()))


def rivals(threads: tuple[int, ...] = RIVAL_THREADS) -> list[Case]:
    return [Case(kind="rival", threads=count) for count in threads]


def decode_cases() -> list[Case]:
    ways = [pipeline(decoder, io) for decoder in ("nvjpeg", "dali") for io in ("auto", "direct", "gds")]
    orders = [pipeline(decoder, "auto", "window") for decoder in ("nvjpeg", "dali")]
    return [Case(kind="engines"), pipeline("auto"), *ways, *orders, *rivals()]


def small_cases() -> list[Case]:
    return [Case(kind="engines"), pipeline("nvjpeg"), pipeline("dali"), *rivals((8, 16))]


def train_cases() -> list[Case]:
    names = ("synthetic", "nvjpeg", "dali", "rival")
    return [Case(kind="train", decoder=name, io="auto" if name in {"nvjpeg", "dali"} else "") for name in names]


def cold_cases() -> list[Case]:
    plain = [
        Case(kind="plain", io=io, threads=threads, chunk_bytes=chunk)
        for io, threads, chunk in (
            ("direct", 8, 1 << 20), ("direct", 16, 1 << 20), ("direct", 8, 4 << 20), ("buffered", 8, 1 << 20)
        )
    ]  # fmt: skip
    plain.append(replace(plain[1], options=(("buffers", 16),)))  # into as much memory as a loader has
    raw = [Case(kind="read", io="auto", shuffle=order) for order in SHUFFLES]
    host = [Case(kind="read", io="auto", shuffle=order, options=(("space", "host"),)) for order in SHUFFLES]
    ways = [Case(kind="read", io=io, shuffle=order) for order in SHUFFLES for io in ("direct", "uring")]
    decoded = [pipeline("auto", "auto", order) for order in SHUFFLES]
    theirs = [Case(kind="rival", threads=8, options=(("decode", False),)), *rivals((8,))]
    direct = Case(kind="rival", threads=8, options=(("decode", False), ("dont_use_mmap", True)))
    return [*plain, *raw, *ways, *host, *decoded, *theirs, direct]


def first_cases() -> list[Case]:
    return [Case(kind="first", decoder=name, io="auto") for name in ("nvjpeg", "dali", "rival")]


def cache_cases() -> list[Case]:
    plain = Case(kind="epochs", io="auto", decoder="nvjpeg")
    return [plain, replace(plain, options=(("cache_gpu", CACHE),))]


def staging_cases() -> list[Case]:
    return [pipeline("nvjpeg", staging=staging) for staging in ("pinned", "managed")]


CASES = {
    "decode": decode_cases, "small": small_cases, "train": train_cases, "cold": cold_cases, "first": first_cases,
    "cache": cache_cases, "staging": staging_cases,
}  # fmt: skip


def prepare(options: argparse.Namespace) -> dict[str, Path]:
    """Return the datasets: "full", and if a stage needs them "small" and "repeated"; packed if they are not there."""
    tree = options.data
    if tree is None:
        tree = options.work / "tree"
        if not tree.exists():
            script = Path(__file__).with_name("make_photos.py")
            subprocess.run([sys.executable, str(script), str(tree), "-n", str(options.images)], check=True)
    how: dict[str, dict[str, Any]] = {"full": {}}  # Any: options of every type
    if "small" in options.stage:
        how["small"] = {"resize": 64 if options.dry_run else 256}
    if "cold" in options.stage:
        how["repeated"] = {"key": "index"}
    for name, given in how.items():
        folder = options.work / name
        if (folder / "manifest.json").exists():
            continue
        if folder.exists():
            shutil.rmtree(folder)
        source = repeated(tree, options.repeat, options.work / "repeated.csv") if name == "repeated" else tree
        began = time.monotonic()
        manifest = shardkit.pack(source, folder, shards=2 if options.dry_run else 16, **given)
        print(f"packed {folder}: {manifest.totals.samples} images in {time.monotonic() - began:.1f} s", flush=True)
    return {name: options.work / name for name in how}


def repeated(tree: Path, count: int, listing: Path) -> Path:
    """Write a list of all images of a tree, `count` times over, and return it."""
    images = sorted(path for path in tree.rglob("*") if path.suffix.lower() in {".jpg", ".jpeg"})
    classes = sorted({path.parent.name for path in images})
    labels = {name: number for number, name in enumerate(classes)}
    with listing.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["path", "label"])
        for _ in range(count):
            rows.writerows([str(path.resolve()), labels[path.parent.name]] for path in images)
    return listing


@contextlib.contextmanager
def fast_disk(dataset: Path, work: Path) -> Iterator[Path]:
    """Copy a dataset to ext4 on a loop device over tmpfs, with direct I/O; where that cannot be had, yield it as it is.

    The kernel takes the mounts down when the process ends, however that is.
    """
    size = sum(path.stat().st_size for path in dataset.iterdir() if path.is_file()) * 11 // 10 + SPARE_BYTES
    with contextlib.ExitStack() as stack:
        try:
            memory = stack.enter_context(tmpfs(work / "memory", size=size + SPARE_BYTES))
            disk = stack.enter_context(loop_mount(memory / "image", work / "disk", "ext4", size=size))
            direct = direct_io(disk.path)
            copied = disk.path / dataset.name
            shutil.copytree(dataset, copied)
            subprocess.run(["sync"], check=True)
            print(f"cold: ext4 on a loop device over tmpfs, {direct}", flush=True)
        except (NoMountsError, OSError) as error:
            stack.close()
            print(f"cold: no loop device ({error}); from {dataset} itself", flush=True)
            copied = dataset
        yield copied


def direct_io(mounted: Path) -> str:
    """Let the loop device below a mount pass the page cache of what is below it; return what became of it."""
    device = next(
        line.split()[0] for line in Path("/proc/mounts").read_text().splitlines() if line.split()[1] == str(mounted)
    )
    done = subprocess.run(["losetup", "--direct-io=on", device], capture_output=True, text=True, check=False)
    state = Path("/sys/block", Path(device).name, "loop/dio")
    on = state.read_text().strip() == "1" if state.exists() else not done.returncode
    return "direct I/O on" if on else f"direct I/O refused: {done.stderr.strip() or done.returncode}"


def run_stage(name: str, stage: Stage, options: argparse.Namespace) -> list[Row]:
    """Measure a stage, tell of every run, and print the table."""
    print(f"\n## {name}: {stage.settings.dataset}\n", flush=True)
    if stage.warm:
        read_all(shards_of(stage.settings.dataset))
    rows = {case: Row(case=case) for case in stage.cases}
    began = time.monotonic()
    turns = take_turns(
        stage.cases, lambda case: command_for(case, stage.settings), rounds=options.rounds,
        timeout_s=options.timeout, until_s=began + 60 * options.minutes,
    )  # fmt: skip
    for row in turns:
        rows[row.case] = row
        print(f"[{time.monotonic() - began:5.0f} s] {one_run(row)}", file=sys.stderr, flush=True)
        last = {"refused": row.refused} if row.refused else {"failed": row.failed} if row.failed else row.runs[-1]
        with options.out.open("a") as file:
            file.write(json.dumps({"stage": name, "case": row.case.to_json()} | last) + "\n")
    print("\n".join(table(list(rows.values()))), flush=True)
    return list(rows.values())


def best(rows: list[Row], kind: str, figure: str = "images_s", **wanted: str) -> float | None:
    """Return the highest median of the rows of a kind whose case has these values."""
    found = [
        value
        for row in rows
        if row.case.kind == kind and all(getattr(row.case, name) == text for name, text in wanted.items())
        if (value := row.median(figure)) is not None
    ]
    return max(found, default=None)


def compare(what: str, ours: float | None, theirs: float | None, bar: float) -> None:
    if ours and theirs:
        verdict(what, ours / theirs, ">=", bar, "x")


def report(done: dict[str, list[Row]]) -> None:
    """Print the bars of every stage that was run."""
    print("\n## bars\n")
    decode, train, cold = (done.get(name, []) for name in ("decode", "train", "cold"))
    rival = best(decode, "rival")
    for decoder, bar in (("nvjpeg", 1.0), ("dali", 1.0)):
        compare(f"{decoder} over DALI's reader", best(decode, "pipeline", decoder=decoder), rival, bar)
    ours = best(decode, "pipeline", decoder="nvjpeg")
    compare("nvjpeg over the engines alone", ours, best(decode, "engines"), 0.97)
    within = best(decode, "pipeline", "within_images_s", decoder="nvjpeg")
    compare("nvjpeg within epochs over the engines alone", within, best(decode, "engines"), 0.97)
    for row in decode:
        cpu = row.median("cpu_us")
        if cpu is not None and row.case.decoder == "nvjpeg":
            verdict(f"CPU an image, {row.case.name}", cpu, "<=", 85, "us")
    theirs = [cpu for row in decode if row.case.kind == "rival" and (cpu := row.median("cpu_us")) is not None]
    for row in decode:
        cpu = row.median("cpu_us")
        if theirs and cpu is not None and row.case.decoder == "dali":
            verdict(f"CPU an image of {row.case.name} over DALI's least", cpu / min(theirs), "<=", 1, "x")
    compare("smaller images", best(done.get("small", []), "pipeline", decoder="nvjpeg"), ours, 1.8)
    for decoder in ("nvjpeg", "dali", "rival"):
        trained, idle = best(train, "train", decoder=decoder), best(train, "train", decoder="synthetic")
        compare(f"training by {decoder} over one batch again and again", trained, idle, 0.99)
        waits = best(train, "train", "host_wait", decoder=decoder)
        if waits is not None:
            verdict(f"the host's wait in training by {decoder}", waits * 100, "<=", 1, "%")
    ceiling = best(cold, "plain", io="direct")
    kept = best([row for row in cold if row.case.options], "plain")
    read = [row for row in cold if row.case.kind == "read"]
    for place, rows in (
        ("GPU", [row for row in read if not row.case.options]),  # for nvjpeg
        ("host", [row for row in read if row.case.options]),  # for dali
    ):
        for order, bar in (("none", 0.9), ("window", 0.9), ("global", 0.7)):
            ours = best(rows, "read", shuffle=order)
            compare(f"cold, {order}, into {place} memory, over plain O_DIRECT reads", ours, ceiling, bar)
            compare(f"cold, {order}, into {place} memory, over such reads into 256 MiB", ours, kept, bar)
    compare("cold, DALI's reader without decoding", best(cold, "rival"), ceiling, 0.55)
    for row in done.get("first", []):
        if (seconds := row.median("first_s")) is not None and row.case.decoder != "rival":
            verdict(f"first batch, {row.case.name}", seconds, "<=", 3, "s")
    for row in decode:
        if (taken := row.median("gpu_bytes")) is not None and row.case.kind == "pipeline":
            verdict(f"GPU memory, {row.case.name}", taken / 1e9, "<=", 4, "GB")


def dry(cases: list[Case]) -> list[Case]:
    """Return the rows as a CPU can have them, in the place of a GPU's; what is only a GPU's stays, and is refused."""
    found = []
    for case in cases:
        options = tuple(pair for pair in case.options if pair[0] in {"decode", "dont_use_mmap"})
        decoder = {"dali": "cpu", "nvjpeg": "dali"}.get(case.decoder, case.decoder)
        found.append(replace(case, decoder=decoder, options=options, io="buffered" if case.io == "gds" else case.io))
    return list(dict.fromkeys(found))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="tree of JPEGs; made when left out")
    parser.add_argument("--work", type=Path, help="folder for the datasets; default: a new one, removed at the end")
    parser.add_argument("--out", type=Path, default=Path("bench_gpu.jsonl"), help="every run, a line each, added")
    parser.add_argument("--stage", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--only", nargs="+", default=[], help="rows whose kind and name have one of these words")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=4.0, help="of each run")
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--timeout", type=float, default=90, help="seconds for one run, its start included")
    parser.add_argument("--minutes", type=float, default=9, help="the longest for a stage")
    parser.add_argument("--images", type=int, default=16384, help="of the tree that is made")
    parser.add_argument("--repeat", type=int, default=5, help="how often the stage cold has every image")
    parser.add_argument("--trace", type=Path, help="folder for a trace of the last run of each row, for Perfetto")
    parser.add_argument("--dry-run", action="store_true")
    options = parser.parse_args()
    if options.dry_run:
        options.rounds, options.seconds, options.batch_size, options.images, options.repeat = 1, 0.2, 16, 96, 2
    return options


def main() -> None:
    options = parse()
    with contextlib.ExitStack() as stack:
        if options.work is None:
            options.work = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-gpu-")))
        print(describe_machine(PACKAGES))
        if options.trace is not None:
            options.trace.mkdir(parents=True, exist_ok=True)
            os.environ["SHARDKIT_BENCH_TRACE"] = str(options.trace.resolve())
        options.work.mkdir(parents=True, exist_ok=True)
        with options.out.open("a") as file:
            file.write(json.dumps({"machine": facts.describe_machine(str(options.work)), **facts.versions()}) + "\n")
        datasets = prepare(options)
        full = datasets["full"]
        settings = Settings(
            dataset=str(full), device="cpu" if options.dry_run else "cuda", batch_size=options.batch_size,
            seconds=options.seconds, size=32 if options.dry_run else 224, warm_up=2 if options.dry_run else 16,
        )  # fmt: skip
        done: dict[str, list[Row]] = {}
        for name in options.stage:
            with contextlib.ExitStack() as place:
                cases = CASES[name]()
                if options.dry_run:
                    cases = dry(cases)
                if options.only:
                    cases = [c for c in cases if any(word in f"{c.kind} {c.name}" for word in options.only)]
                chosen = settings
                if name == "small":
                    chosen = replace(settings, dataset=str(datasets["small"]))
                elif name == "cache":
                    chosen = replace(settings, cold=True)  # the first epoch comes from the storage
                elif name == "cold":
                    disk = place.enter_context(fast_disk(datasets["repeated"], options.work))
                    chosen = replace(settings, dataset=str(disk), cold=True)
                stage = Stage(settings=chosen, cases=cases, warm=not chosen.cold)
                done[name] = run_stage(name, stage, options)
        report(done)


if __name__ == "__main__":
    main()
