"""Decoded training batches a second: ShardLoader, DALI's own reader, and webdataset. For `bench_read.py`.

All of them read the same shards of one packed dataset and make the same thing of an image: random crop of 8 to 100 % of
the area, resized to 224 x 224 with antialiasing, mirrored half of the time, normalised to float32, batches of 64 on the
CPU. The rates are those of the steady state, from the 9th batch on.
"""

from __future__ import annotations

import importlib
import io
import itertools
import math
import random
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypedDict, Unpack

from turns import Clock, Result, cpu_seconds, since_spawned

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

BATCH, SIZE, SKIPPED = 64, 224, 8
MEAN, STD = (123.675, 116.28, 103.53), (58.395, 57.12, 57.375)
AREA, RATIO = (0.08, 1.0), (3 / 4, 4 / 3)


class Options(TypedDict, total=False):
    threads: int
    shuffle: Literal["global", "none"]
    decoder: str


Foreign: TypeAlias = Any
"""A value of a library that has no types."""
Batches: TypeAlias = "Iterator[tuple[Any, Any]]"  # images [64, 3, 224, 224] float32, labels; Any: no library's types


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
    return dali_torch(dali_pipeline(dataset, threads, "fused"))


def dali_separate(dataset: Path, threads: int) -> Batches:
    return dali_torch(dali_pipeline(dataset, threads, "separate"))


def dali_decode_only(dataset: Path, threads: int) -> Batches:
    """Yield a row of pixels of each whole image: what decoding alone takes, a ceiling."""
    pipe = dali_pipeline(dataset, threads, "decode")
    pipe.build()
    while True:
        yield pipe.run()


def dali_bare(dataset: Path, threads: int) -> Batches:
    """Yield DALI's own arrays, without torch."""
    pipe = dali_pipeline(dataset, threads, "fused")
    pipe.build()
    while True:
        images, labels = pipe.run()
        yield images.as_tensor(), labels


def dali_torch(pipe: Foreign) -> Batches:
    from nvidia.dali.plugin.pytorch import DALIGenericIterator

    for batch in DALIGenericIterator([pipe], ["image", "label"], size=-1, auto_reset=False):
        yield batch[0]["image"], batch[0]["label"]


def dali_pipeline(dataset: Path, threads: int, kind: str) -> Foreign:
    """Return a pipeline over DALI's reader, not built yet; `kind` is "fused", "separate" or "decode"."""
    import nvidia.dali

    dali: Any = nvidia.dali  # its types are unfinished
    fn, types = dali.fn, dali.types
    shards = sorted(str(path) for path in dataset.glob("*.tar"))
    pipe = dali.Pipeline(batch_size=BATCH, num_threads=threads, device_id=None, prefetch_queue_depth=2, seed=1)
    with pipe:
        jpeg, label = fn.readers.webdataset(
            paths=shards, index_paths=[path.removesuffix(".tar") + ".idx" for path in shards], ext=["jpg", "cls"],
            random_shuffle=True, initial_fill=1024, missing_component_behavior="error",
        )  # fmt: skip
        if kind == "decode":
            image = fn.slice(fn.decoders.image(jpeg, output_type=types.RGB), 0, 1, axes=[0])
        elif kind == "fused":
            crop = fn.decoders.image_random_crop(
                jpeg, output_type=types.RGB, random_area=AREA, random_aspect_ratio=RATIO
            )
            image = fn.resize(crop, size=[SIZE, SIZE])
        else:
            whole = fn.decoders.image(jpeg, output_type=types.RGB)
            image = fn.random_resized_crop(whole, size=[SIZE, SIZE], random_area=AREA, random_aspect_ratio=RATIO)
        if kind != "decode":
            image = fn.crop_mirror_normalize(
                image, mirror=fn.random.coin_flip(), dtype=types.FLOAT, output_layout="CHW", mean=MEAN, std=STD
            )
        pipe.set_outputs(image, fn.pad(label, fill_value=0))
    return pipe


def webdataset_pillow(dataset: Path, threads: int) -> Batches:
    return webdataset_loader(dataset, threads, pillow_sample)


def webdataset_simplejpeg(dataset: Path, threads: int) -> Batches:
    return webdataset_loader(dataset, threads, simplejpeg_sample)


def webdataset_loader(dataset: Path, threads: int, sample: Callable[[tuple[bytes, bytes]], tuple[Any, int]]) -> Batches:
    import torch
    import webdataset

    shards = sorted(str(path) for path in dataset.glob("*.tar"))
    source = webdataset.WebDataset(shards, shardshuffle=len(shards), empty_check=False)
    samples = source.shuffle(1000).to_tuple("jpg", "cls").map(sample)
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
    return normalised(np.asarray(image, np.float32)), int(sample[1])


def simplejpeg_sample(sample: tuple[bytes, bytes]) -> tuple[Any, int]:
    """Resize with OpenCV, which has no antialiasing: less work than the others do."""
    cv2, simplejpeg = (importlib.import_module(name) for name in ("cv2", "simplejpeg"))  # neither has types
    cv2.setNumThreads(0)
    image = simplejpeg.decode_jpeg(sample[0], "RGB")
    left, top, right, bottom = random_box(image.shape[1], image.shape[0])
    image = cv2.resize(image[top:bottom, left:right], (SIZE, SIZE), interpolation=cv2.INTER_LINEAR)
    return normalised(cv2.flip(image, 1) if random.random() < 0.5 else image), int(sample[1])


def normalised(image: Foreign) -> Foreign:
    """Return float32 [3, SIZE, SIZE] of an image [SIZE, SIZE, 3]."""
    import numpy as np

    pixels = (image - np.asarray(MEAN, np.float32)) / np.asarray(STD, np.float32)
    return np.ascontiguousarray(pixels.transpose(2, 0, 1))


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
    "webdataset + simplejpeg, DataLoader, no antialias": webdataset_simplejpeg,
}
CEILING = "DALI reader, decode only"
FIRST: dict[str, Callable[[Path, int], Batches]] = {
    "ShardLoader": shardkit_global,
    "DALI reader, fused crop, torch": dali_fused,
    "DALI reader, fused crop, no torch": dali_bare,
}


def measure_rate(name: str, dataset: Path, threads: int, seconds: float) -> Result:
    """Measure one contender in this process: images a second."""
    ceiling = name == CEILING
    batches = dali_decode_only(dataset, threads) if ceiling else CONTENDERS[name](dataset, threads)
    for images, labels in itertools.islice(batches, SKIPPED):
        if not ceiling:
            require_whole(name, images, labels)
    clock, count = Clock(), 0
    while clock.seconds() < seconds:
        images, _ = next(batches)
        count += len(images)
    return clock.stop(count)


def measure_first(name: str, dataset: Path, threads: int) -> Result:
    """Measure in this process how long after its start the first batch is there."""
    clock, batches = Clock(), FIRST[name](dataset, threads)
    images, labels = next(batches)
    found = {"first_s": since_spawned(), "cpu_s": cpu_seconds(), "others": clock.stop(1)["others"]}
    require_whole(name, images, labels)
    return found


def require_whole(name: str, images: Foreign, labels: Foreign) -> None:
    shape = tuple(images.shape() if callable(images.shape) else images.shape)
    if shape != (BATCH, 3, SIZE, SIZE) or len(labels) != BATCH:
        raise SystemExit(f"{name}: a batch of shape {shape}")
