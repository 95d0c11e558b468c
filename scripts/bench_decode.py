"""CPU time an image of decoding: the decoder as ShardLoader runs it, DALI doing all of it, the parts, and a bad image.

Everything works on the same images in memory with the same random crops: what is measured is neither reading nor a
consumer. CPU time an image is the measure, since other programs change it little; the rate is printed too.

    python scripts/make_photos.py /tmp/photos -n 3000 --classes 100
    shardkit pack /tmp/photos /tmp/dataset --shard-size 64MB
    python scripts/bench_decode.py /tmp/dataset --rounds 5
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from turns import Case, Clock, Result, Row, describe_machine, show, take_turns

import shardkit
from shardkit.dataset.batch import EncodedBatch
from shardkit.dataset.samples import Part, Samples
from shardkit.pipeline.crops import random_crops
from shardkit.pipeline.decoder import DecodeSpec

SIZE = 224
WARM_UP = 3  # batches that are not counted


class Memory:
    """A `BatchSource` over images in memory; every `bad_every`-th has a Huffman table that no decoder takes."""

    def __init__(self, folder: Path, images: int, batch: int, batches: int, bad_every: int = 0) -> None:
        dataset = shardkit.open(folder)
        self.samples = Samples([Part(dataset)])
        self.count = min(images, len(dataset))
        jpegs = [np.frombuffer(dataset[number].jpeg, np.uint8) for number in range(self.count)]
        self.payloads = jpegs
        self.broken = [self._broken(jpeg) for jpeg in jpegs] if bad_every else []
        self.batch, self.batches, self.bad_every, self.step, self.replaced = batch, batches, bad_every, 0, 0

    def get(self, *, wait: bool) -> EncodedBatch | None:
        if self.step == self.batches:
            return None
        positions = np.arange(self.batch, dtype=np.int64) + self.step * self.batch
        ids = positions % self.count
        views = [self.payloads[number] for number in ids.tolist()]
        for at in np.flatnonzero(positions % self.bad_every == self.bad_every - 1) if self.bad_every else ():
            views[at] = self.broken[ids[at]]
        self.step += 1
        return EncodedBatch(
            samples=self.samples, epoch=0, step=self.step - 1, positions=positions, ids=ids,
            attempts=np.zeros_like(ids), located=self.samples.locate(ids), views=views, metadata=None,
            addresses=np.asarray([view.ctypes.data for view in views], np.int64),
        )  # fmt: skip

    def replace(self, batch: EncodedBatch, bad: Mapping[int, str], /) -> EncodedBatch:
        ids, views = batch.ids.copy(), list(batch.views)
        for at in bad:
            ids[at] = (ids[at] + 1) % self.count
            views[at] = self.payloads[ids[at]]
        self.replaced += len(bad)
        return replace(batch, ids=ids, views=views)

    def check(self) -> None:
        """Nothing is read."""

    @staticmethod
    def _broken(jpeg: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
        at = jpeg.tobytes().index(b"\xff\xc4")
        broken = jpeg.copy()
        broken[at + 5 : at + 21] = 255
        return broken


Steps: TypeAlias = Iterator[int]  # images of each step
Foreign: TypeAlias = Any
"""What has no types: DALI, and a field of `DecodeSpec`."""


def decoder(source: Memory, threads: int, name: str = "dali", **spec: Foreign) -> Steps:
    from shardkit.pipeline.cpu import PillowDecoder
    from shardkit.pipeline.dali import DaliDecoder
    from shardkit.torch.resize import resize

    fields: Foreign = {"size": SIZE, "train": True, "threads": threads} | spec
    wanted = DecodeSpec(**fields)
    if name == "dali":
        run = DaliDecoder(wanted, batch_size=source.batch, resize=resize).decode(source, 0)
    else:
        run = PillowDecoder(wanted, resize=resize).decode(source, 0)
    for batch in run:
        yield len(batch.batch)


def graph(source: Memory, threads: int, parts: str) -> Steps:
    """DALI alone: "whole" decoding, "crop" decoding, "resize" after it, or all up to "normalise"."""
    import nvidia.dali

    dali: Foreign = nvidia.dali
    fn, types = dali.fn, dali.types
    pipe: Foreign = dali.Pipeline(batch_size=source.batch, num_threads=threads, device_id=None, prefetch_queue_depth=1)
    with pipe:
        jpeg = fn.external_source(name="jpeg", no_copy=True, dtype=types.UINT8, ndim=1)
        anchor, shape = (fn.external_source(name=n, no_copy=True, dtype=types.FLOAT, ndim=1) for n in "as")
        mirror = fn.external_source(name="m", no_copy=True, dtype=types.INT32, ndim=0)
        image = fn.decoders.image(jpeg, output_type=types.RGB)
        if parts != "whole":
            image = fn.decoders.image_slice(jpeg, anchor, shape, axes=[0, 1], output_type=types.RGB)
        if parts in ("resize", "normalise"):
            image = fn.resize(image, size=[SIZE, SIZE])
        if parts == "normalise":
            image = fn.crop_mirror_normalize(
                image, mirror=mirror, dtype=types.FLOAT, output_layout="CHW", mean=[124.0] * 3, std=[58.0] * 3
            )
        pipe.set_outputs(image, mirror, anchor, shape)  # the inputs too, so that none is optimised away
    pipe.build()
    held: list[Foreign] = []
    while (batch := source.get(wait=True)) is not None:
        crops = random_crops(batch.ids, batch.width, batch.height, seed=0, epoch=0)
        held.append((batch, crops))
        for name, values in (("jpeg", batch.views), ("a", crops.anchor), ("s", crops.shape), ("m", crops.mirror)):
            pipe.feed_input(name, values)
        pipe.schedule_run()
        if len(held) == 2:
            yield _taken(pipe, held)
    while held:
        yield _taken(pipe, held)


def _taken(pipe: Foreign, held: list[Foreign]) -> int:
    pipe.share_outputs()
    pipe.release_outputs()
    return len(held.pop(0)[0])


CONTENDERS: dict[str, Callable[[Memory, int], Steps]] = {
    "decoder": decoder,
    "decoder, uint8": lambda source, threads: decoder(source, threads, dtype="uint8"),
    "decoder, float16": lambda source, threads: decoder(source, threads, dtype="float16"),
    "decoder, channels_last": lambda source, threads: decoder(source, threads, channels_last=True),
    "decoder, evaluation": lambda source, threads: decoder(source, threads, train=False),
    "decoder, randaugment": lambda source, threads: decoder(source, threads, augment="randaugment"),
    "decoder, whole images": lambda source, threads: decoder(source, threads, augment="none"),
    "decoder=cpu": lambda source, threads: decoder(source, threads, "cpu"),
    "DALI: all of it": lambda source, threads: graph(source, threads, "normalise"),
    "DALI: crop, resize": lambda source, threads: graph(source, threads, "resize"),
    "DALI: crop": lambda source, threads: graph(source, threads, "crop"),
    "DALI: whole images": lambda source, threads: graph(source, threads, "whole"),
    "decoder, a bad image in 500": decoder,
}
BAD = {"decoder, a bad image in 500": 500}


def run_one(name: str, options: argparse.Namespace) -> Result:
    """Measure one contender in this process."""
    batches = WARM_UP + max(options.images // options.batch, 1)
    source = Memory(options.dataset, 1500, options.batch, batches, BAD.get(name, 0))
    steps = CONTENDERS[name](source, options.threads)
    for _ in range(WARM_UP):
        next(steps)
    clock, replaced = Clock(), source.replaced
    count = sum(steps)
    return clock.stop(count) | {"bad": (source.replaced - replaced) / count}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dataset", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--retries", type=int, default=0, help="of runs that other programs disturbed")
    parser.add_argument("--images", type=int, default=3000, help="of each run")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--only", nargs="*", default=list(CONTENDERS), choices=list(CONTENDERS))
    parser.add_argument("--child", choices=list(CONTENDERS), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(run_one(options.child, options)), flush=True)
        return
    print(describe_machine(("shardkit", "torch", "nvidia-dali-cuda120", "pillow", "numpy")))
    again = (sys.executable, __file__, *sys.argv[1:], "--child")
    cases = [Case(group="decode", name=name, cache="", command=(*again, name)) for name in options.only]
    rows = take_turns(cases, rounds=options.rounds, retries=options.retries, seconds=3600)
    lines = [(row.case.name, row.spread("cpu_us"), row.spread("rate"), row.told()) for row in rows]
    show("Decoding", ("", "CPU us an image", "images/s", "runs"), lines)
    report_bad({row.case.name: row for row in rows})


def report_bad(rows: Mapping[str, Row]) -> None:
    (name,) = BAD
    good, worse, share = (
        rows[key].median(column) if key in rows else None
        for key, column in (("decoder", "cpu_us"), (name, "cpu_us"), (name, "bad"))
    )
    if good and worse and share:
        each = (worse - good) / share
        print(
            f"\na bad image costs {each / 1e3:.0f} ms of CPU; one in 10,000 takes {each / good / 100:.2f} % of the rate"
        )


if __name__ == "__main__":
    main()
