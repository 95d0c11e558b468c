"""Encoded samples a second, nothing decoded: plain reads of shards, and shardkit's batches. For `bench_read.py`."""

from __future__ import annotations

import contextlib
import functools
import itertools
import mmap
import os
import queue
import sys
import threading
from typing import TYPE_CHECKING

import numpy as np
from turns import Clock, Result, drop_caches, read_all

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import numpy.typing as npt

    from shardkit.dataset.arrangement import Shuffle
    from shardkit.dataset.encoded import EncodedLoader


BATCH = 256
LONG_ENOUGH_S = 0.7
"""Warm passes are repeated until then: the clock of the processors ticks every 10 ms."""
RING, HUGE = 128 << 20, 2 << 20

SHUFFLES: tuple[Shuffle, ...] = ("none", "window", "global")
WAYS = ("auto", "buffered", "direct", "uring")


def plain(dataset: Path, threads: int, chunk: int, *, direct: bool = False, ring: int = 0, huge: bool = False) -> int:
    """Read every byte of all shards, `chunk` bytes a preadv, with threads that take the next chunk each; return bytes.

    Each thread reads into one buffer over and over, which stays in the processor's cache; with `ring` bytes it goes
    round in that much memory, as somebody must who hands the bytes on. Huge pages are fewer pieces for the device.
    """
    jobs: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()
    descriptors = []
    for path in shards(dataset):
        descriptors.append(os.open(path, os.O_RDONLY | (os.O_DIRECT if direct else 0)))
        for offset in range(0, os.path.getsize(path), chunk):
            jobs.put((descriptors[-1], offset))
    done = [0] * threads

    def work(number: int) -> None:
        slots = max(ring // threads // chunk, 1)
        memory = memory_of(number, slots * chunk, huge)
        with contextlib.suppress(queue.Empty):
            for turn in range(1 << 62):
                file, offset = jobs.get_nowait()
                at = turn % slots * chunk
                done[number] += os.preadv(file, [memory[at : at + chunk].data], offset)

    workers = [threading.Thread(target=work, args=(number,)) for number in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    for descriptor in descriptors:
        os.close(descriptor)
    return sum(done)


@functools.cache  # a second pass finds it in use already
def memory_of(_number: int, size: int, huge: bool) -> npt.NDArray[np.uint8]:
    """Return the memory of one thread."""
    mapping = mmap.mmap(-1, max(size, HUGE) + HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if huge:
        mapping.madvise(mmap.MADV_HUGEPAGE)
    memory = np.frombuffer(mapping, np.uint8)
    return memory[-memory.ctypes.data % HUGE if huge else 0 :]


CEILINGS: dict[str, Callable[[Path], int]] = {
    "plain preadv, buffered, 2 x 1 MiB": lambda dataset: plain(dataset, 2, 1 << 20),
    "plain preadv, buffered, 4 x 1 MiB": lambda dataset: plain(dataset, 4, 1 << 20),
    "plain preadv, buffered, 2 x 1 MiB, into 128 MiB of huge pages": lambda dataset: plain(
        dataset, 2, 1 << 20, ring=RING, huge=True
    ),
    "plain preadv, O_DIRECT, 1 x 4 MiB": lambda dataset: plain(dataset, 1, 4 << 20, direct=True),
    "plain preadv, O_DIRECT, 16 x 1 MiB": lambda dataset: plain(dataset, 16, 1 << 20, direct=True),
    "plain preadv, O_DIRECT, 16 x 1 MiB, huge pages": lambda dataset: plain(
        dataset, 16, 1 << 20, direct=True, huge=True
    ),
}


def shards(dataset: Path) -> list[Path]:
    return sorted(dataset.glob("*.tar"))


def count_samples(dataset: Path) -> int:
    import pyarrow as pa

    with pa.memory_map(str(dataset / "index.arrow")) as source:
        index = pa.ipc.open_file(source)
        return sum(index.get_batch(i).num_rows for i in range(index.num_record_batches))


def measure_plain(name: str, dataset: Path, cold: bool) -> Result:
    """Measure a ceiling in this process; samples a second, the shards' padding and headers being read too."""
    samples = count_samples(dataset)
    read, size = CEILINGS[name], sum(path.stat().st_size for path in shards(dataset))

    def one_pass() -> int:
        if read(dataset) != size:
            raise SystemExit(f"{name}: not all bytes were read")
        return samples

    return timed(one_pass, dataset, cold)


def timed(one_pass: Callable[[], int], dataset: Path, cold: bool) -> Result:
    """Time passes from an empty page cache, or over a full one, with the memory that they need already in use.

    What the first pass from an empty page cache takes, all that it has to open and to allocate included, is told
    beside it.
    """
    if not cold:
        read_all(shards(dataset))
        one_pass()
        clock, count = Clock(), one_pass()
        while clock.seconds() < LONG_ENOUGH_S:
            count += one_pass()
        return clock.stop(count)
    drop_caches()
    first = Clock()
    result = {"first_rate": first.stop(one_pass())["rate"]}
    drop_caches()
    clock = Clock()
    return result | clock.stop(one_pass())


def open_loader(dataset: Path, shuffle: Shuffle, way: str) -> EncodedLoader:
    from shardkit.dataset.encoded import EncodedLoader, ReadOptions

    return EncodedLoader.open(
        dataset, ReadOptions(batch_size=BATCH, shuffle=shuffle, io=way, last_batch="partial", on_bad="raise")
    )


def read_epoch(loader: EncodedLoader, epoch: int) -> tuple[int, int, int]:
    """Read an epoch; return how many samples, bytes and the sum of labels came."""
    from shardkit.dataset.state import Position

    fetcher = loader.start(Position(epoch, 0))
    samples = size = labels = 0
    while (batch := fetcher.get(wait=True)) is not None:
        samples += len(batch)
        size += sum(map(len, batch.views))
        labels += int(batch.labels.sum())
        batch.release()
    fetcher.close()
    return samples, size, labels


def name_of(shuffle: str, way: str) -> str:
    return f"shardkit, {shuffle}, io={way}"


def names() -> list[str]:
    return [*CEILINGS, *(name_of(shuffle, way) for shuffle in SHUFFLES for way in WAYS)]


def measure(name: str, dataset: Path, cold: bool) -> Result:
    """Measure one row in this process."""
    if name in CEILINGS:
        return measure_plain(name, dataset, cold)
    return measure_batches(name, dataset, cold)


def measure_batches(name: str, dataset: Path, cold: bool) -> Result:
    """Measure shardkit's batches; the first pass opens the dataset, and `auto` decides how to read it."""
    import shardkit

    shuffle, way = next((s, w) for s in SHUFFLES for w in WAYS if name_of(s, w) == name)
    with shardkit.open(dataset) as index:
        expected = len(index), index.manifest.totals.payload, int(index.columns.numbers("label")[:].sum())
    open_loader(dataset, shuffle, "buffered" if way == "auto" else way).close()  # everything is imported
    opened: list[EncodedLoader] = []
    passes = itertools.count()

    def one_epoch() -> int:
        if not opened:
            opened.append(open_loader(dataset, shuffle, way))
        found = read_epoch(opened[0], next(passes))
        if found != expected:
            raise SystemExit(f"{name}: samples, bytes and labels {found}, expected {expected}")
        return found[0]

    result = timed(one_epoch, dataset, cold)
    if way == "auto":
        print(f"{name}: {opened[0].choice.backend}: {opened[0].choice.reason}", file=sys.stderr)
    return result
