"""Decoded training batches a second: ShardLoader, DALI's own webdataset reader, and webdataset with Pillow.

All of them read the same shards of one packed dataset and make the same thing of an image: random crop of 8 to 100 % of
the area, resized to 224 x 224 with antialiasing, mirrored half of the time, normalised to float32, batches of 64 on the
CPU. They take turns in fresh processes, so that what else the machine does hits them alike; the rates are those of the
steady state, from the 9th batch on. A run in which other programs took more than a tenth of the processors is repeated
(--retries). Printed: every run, then medians and their ratio to DALI's reader.

    python scripts/make_photos.py /tmp/photos -n 3000 --classes 100
    shardkit pack /tmp/photos /tmp/dataset --shard-size 64MB
    python scripts/bench_loader.py /tmp/dataset --rounds 5 --seconds 8
"""

from __future__ import annotations

import argparse
import importlib.metadata
import io
import itertools
import json
import math
import os
import platform
import random
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypedDict, Unpack

BATCH, SIZE, SKIPPED = 64, 224, 8
MEAN, STD = (123.675, 116.28, 103.53), (58.395, 57.12, 57.375)
AREA, RATIO = (0.08, 1.0), (3 / 4, 4 / 3)


class Options(TypedDict, total=False):
    threads: int
    shuffle: Literal["global", "none"]
    decoder: str


Batches: TypeAlias = Iterator[tuple[Any, Any]]  # images [64, 3, 224, 224] float32 and labels; Any: no library's types


def shardkit_global(dataset: Path, threads: int) -> Batches:
    return shardkit_loader(dataset, threads=threads)


def shardkit_stored(dataset: Path, threads: int) -> Batches:
    return shardkit_loader(dataset, threads=threads, shuffle="none")


def shardkit_pillow(dataset: Path, threads: int) -> Batches:
    return shardkit_loader(dataset, threads=threads, decoder="cpu")


def shardkit_loader(dataset: Path, **options: Unpack[Options]) -> Batches:
    from shardkit.torch import ShardLoader

    loader = ShardLoader(dataset, BATCH, size=SIZE, **options)
    while True:
        yield from loader


def dali_fused(dataset: Path, threads: int) -> Batches:
    return dali_reader(dataset, threads, fused=True)


def dali_separate(dataset: Path, threads: int) -> Batches:
    return dali_reader(dataset, threads, fused=False)


def dali_reader(dataset: Path, threads: int, *, fused: bool) -> Batches:
    import nvidia.dali.plugin.pytorch

    dali: Any = nvidia.dali  # its types are unfinished
    fn, types = dali.fn, dali.types
    shards = sorted(str(path) for path in dataset.glob("*.tar"))
    pipe = dali.Pipeline(batch_size=BATCH, num_threads=threads, device_id=None, prefetch_queue_depth=2, seed=1)
    with pipe:
        jpeg, label = fn.readers.webdataset(
            paths=shards, index_paths=[path.removesuffix(".tar") + ".idx" for path in shards], ext=["jpg", "cls"],
            random_shuffle=True, initial_fill=1024, missing_component_behavior="error",
        )  # fmt: skip
        if fused:
            crop = fn.decoders.image_random_crop(
                jpeg, output_type=types.RGB, random_area=AREA, random_aspect_ratio=RATIO
            )
            image = fn.resize(crop, size=[SIZE, SIZE])
        else:
            whole = fn.decoders.image(jpeg, output_type=types.RGB)
            image = fn.random_resized_crop(whole, size=[SIZE, SIZE], random_area=AREA, random_aspect_ratio=RATIO)
        image = fn.crop_mirror_normalize(
            image, mirror=fn.random.coin_flip(), dtype=types.FLOAT, output_layout="CHW", mean=MEAN, std=STD
        )
        pipe.set_outputs(image, fn.pad(label, fill_value=0))
    for batch in dali.plugin.pytorch.DALIGenericIterator([pipe], ["image", "label"], size=-1, auto_reset=False):
        yield batch[0]["image"], batch[0]["label"]


def webdataset_pillow(dataset: Path, threads: int) -> Batches:
    import torch
    import webdataset

    shards = sorted(str(path) for path in dataset.glob("*.tar"))
    source = webdataset.WebDataset(shards, shardshuffle=len(shards), empty_check=False)
    samples = source.shuffle(1000).to_tuple("jpg", "cls").map(pillow_sample)
    loader = torch.utils.data.DataLoader(samples, batch_size=BATCH, num_workers=threads, persistent_workers=True)
    while True:
        yield from loader


def pillow_sample(sample: tuple[bytes, bytes]) -> tuple[Any, int]:
    import numpy as np
    from PIL import Image

    image = Image.open(io.BytesIO(sample[0])).convert("RGB")
    image = image.crop(random_box(*image.size)).resize((SIZE, SIZE), Image.Resampling.BILINEAR)
    if random.random() < 0.5:
        image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    pixels = (np.asarray(image, np.float32) - np.asarray(MEAN, np.float32)) / np.asarray(STD, np.float32)
    return np.ascontiguousarray(pixels.transpose(2, 0, 1)), int(sample[1])


def random_box(width: int, height: int) -> tuple[int, int, int, int]:
    for _ in range(10):
        area = width * height * random.uniform(*AREA)
        ratio = math.exp(random.uniform(math.log(RATIO[0]), math.log(RATIO[1])))
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            x, y = random.randint(0, width - w), random.randint(0, height - h)
            return x, y, x + w, y + h
    return 0, 0, width, height


CONTENDERS: dict[str, Callable[[Path, int], Batches]] = {
    "ShardLoader": shardkit_global,
    "ShardLoader, stored order": shardkit_stored,
    "ShardLoader, decoder=cpu": shardkit_pillow,
    "DALI reader, fused crop": dali_fused,
    "DALI reader, separate crop": dali_separate,
    "webdataset + Pillow, DataLoader": webdataset_pillow,
}
REFERENCE = "DALI reader, fused crop"


def run_one(name: str, dataset: Path, threads: int, seconds: float) -> dict[str, float]:
    """Measure one contender in this process."""
    began = time.perf_counter()
    batches = CONTENDERS[name](dataset, threads)
    images, labels = next(batches)
    if tuple(images.shape) != (BATCH, 3, SIZE, SIZE) or len(labels) != BATCH:
        raise SystemExit(f"{name}: {tuple(images.shape)}")
    first = time.perf_counter() - began
    for _ in itertools.islice(batches, SKIPPED - 1):
        pass
    count, cpu, machine, start = 0, cpu_seconds(), busy_seconds(), time.perf_counter()
    while time.perf_counter() - start < seconds:
        images, _ = next(batches)
        count += len(images)
    took, own = time.perf_counter() - start, cpu_seconds() - cpu
    others = (busy_seconds() - machine - own) / (took * (os.cpu_count() or 1))
    return {"images_s": count / took, "cpu_ms": own / count * 1e3, "first_batch_s": first, "others": others}


def cpu_seconds() -> float:
    """CPU seconds of this process and its workers."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    total = usage.ru_utime + usage.ru_stime
    for children in Path("/proc/self/task").glob("*/children"):
        for child in children.read_text().split():
            fields = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()
            total += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return total


def busy_seconds() -> float:
    """CPU seconds of the whole machine, idling and waiting for disks aside."""
    times = [int(field) for field in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    return (sum(times) - times[3] - times[4]) / os.sysconf("SC_CLK_TCK")


def describe(dataset: Path) -> None:
    packages = ("shardkit", "torch", "nvidia-dali-cuda120", "nvidia-dali-cuda130", "webdataset", "pillow", "numpy")
    versions = []
    for package in packages:
        try:
            versions.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    shards = [path.stat().st_size for path in dataset.glob("*.tar")]
    print(f"{cpu_model()}, {len(os.sched_getaffinity(0))} processors, Linux {platform.release()}")
    print(f"Python {platform.python_version()}, {', '.join(versions)}")
    print(f"{len(shards)} shards, {sum(shards) / 1e6:.0f} MB; load {os.getloadavg()[0]:.1f} before the start")


def cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dataset", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="or worker processes")
    parser.add_argument("--retries", type=int, default=3)
    parser.add_argument("--only", nargs="*", default=list(CONTENDERS), choices=list(CONTENDERS))
    parser.add_argument("--one", choices=list(CONTENDERS), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(run_one(options.one, options.dataset, options.threads, options.seconds)), flush=True)
        os._exit(0)  # some contenders' workers would be waited for
    describe(options.dataset)
    rates: dict[str, list[dict[str, float]]] = {name: [] for name in options.only}
    for turn in range(options.rounds):
        for name in options.only:
            command = [sys.executable, __file__, str(options.dataset), "--one", name]
            command += ["--threads", str(options.threads), "--seconds", str(options.seconds)]
            run = run_undisturbed(command, options.retries)
            rates[name].append(run)
            told = f"{run['images_s']:7.0f} images/s, others took {run['others']:4.0%}"
            print(f"round {turn + 1}: {name:32} {told}", flush=True)
    report(rates)


def run_undisturbed(command: list[str], retries: int) -> dict[str, float]:
    """Return the first run in which other programs left the processors alone, else the one they disturbed least."""
    runs: list[dict[str, float]] = []
    for _ in range(retries + 1):
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        runs.append(json.loads(done.stdout))
        if runs[-1]["others"] <= 0.1:
            break
        time.sleep(2)
    return min(runs, key=lambda run: run["others"])


def report(rates: dict[str, list[dict[str, float]]]) -> None:
    medians = {name: statistics.median(run["images_s"] for run in runs) for name, runs in rates.items()}
    reference = medians.get(REFERENCE)
    print(f"\n{'':32} {'images/s':>9} {'range':>13} {'CPU ms':>7} {'first s':>8} {'ratio':>6}")
    for name, runs in rates.items():
        low, high = (pick(run["images_s"] for run in runs) for pick in (min, max))
        cpu, first = (statistics.median(run[field] for run in runs) for field in ("cpu_ms", "first_batch_s"))
        ratio = f"{medians[name] / reference:6.2f}" if reference else ""
        print(f"{name:32} {medians[name]:9.0f} {low:6.0f}-{high:<6.0f} {cpu:7.2f} {first:8.2f} {ratio}")


if __name__ == "__main__":
    main()
