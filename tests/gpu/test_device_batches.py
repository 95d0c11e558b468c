"""Batches of encoded images in a GPU's memory are those of host memory, from a pool, from places that stay, mended."""

from __future__ import annotations

import gc

import numpy as np
import pytest

from shardkit.dataset.encoded import EncodedLoader, ReadOptions
from shardkit.dataset.shardset import open_dataset
from shardkit.dataset.state import Position
from shardkit.errors import CapabilityError
from shardkit.storage.reader import HOST
from shardkit.testing.damage import flip_byte
from shardkit.testing.datasets import draft_dataset

pytestmark = pytest.mark.gpu

COUNTS = (60, 90, 50)
TOTAL = sum(COUNTS)
BAD = 70  # its bytes are not what was packed
CACHES = {"none": 0, "some": 8 << 20, "all": 1 << 30}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    written = draft_dataset(COUNTS, sizes=(700, 120_000, 401, 60_000)).write(tmp_path_factory.mktemp("gpu") / "ds")
    with open_dataset(written) as dataset:
        flip_byte(written / "tiny-000001.tar", dataset.columns["offset"][BAD] + 250)
    return written


@pytest.fixture
def load(folder, device):
    """A function that makes loaders into the GPU's memory, or the host's; closed at the end."""
    made = []

    def make(*, space, **options):
        given = {"batch_size": 16, "io": "buffered", "last_batch": "partial", "seed": 7, "extent_bytes": 1 << 20}
        options = ReadOptions(**{**given, "window_extents": 4, "space": space, **options})
        try:
            made.append(EncodedLoader.open(folder, options, device=None if space == HOST else device))
        except CapabilityError as error:
            pytest.skip(str(error))
        return made[-1]

    yield make
    for loader in made:
        loader.close()


def fetched(device, batch):
    """Return the bytes of each image, by way of the addresses."""
    if batch.space == HOST:
        return [view.tobytes() for view in batch.views]
    stream, copies = device.stream(), [np.empty(size, np.uint8) for size in batch.located.size.tolist()]
    for copy, address in zip(copies, batch.addresses.tolist(), strict=True):
        stream.download(copy.ctypes.data, address, copy.nbytes)
    stream.synchronize()
    return [copy.tobytes() for copy in copies]


def run(device, loader, epoch, *, replaced=()):
    fetcher, found = loader.start(Position(epoch, 0)), []
    while (batch := fetcher.get(wait=True)) is not None:
        batch = fetcher.replace(batch, {at: "torn" for at in replaced if at < len(batch)})
        found.append((batch.ids.tolist(), batch.labels.tolist(), fetched(device, batch), batch.metadata))
        batch.release()
    assert fetcher.close()
    return found


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("shuffle", ["global", "window", "none"])
@pytest.mark.parametrize(("io", "staging"), [("buffered", "pinned"), ("direct", "pinned"), ("buffered", "managed")])
def test_batches_are_those_of_host_memory(device, load, shuffle, cache, io, staging):
    given = {"shuffle": shuffle, "metadata": True, "check": "crc", "io": io}
    host = load(space=HOST, **given)
    on_device = load(space=device.space, cache_gpu=CACHES[cache], staging=staging, **given)
    for epoch in range(2):
        assert run(device, on_device, epoch, replaced=(1, 9)) == run(device, host, epoch, replaced=(1, 9))
    assert f"c/{BAD:04}" in on_device.bad.by_key


@pytest.mark.parametrize("shuffle", ["global", "window", "none"])
def test_a_second_epoch_reads_nothing(device, load, shuffle):
    loader = load(space=device.space, cache_gpu=CACHES["all"], shuffle=shuffle)
    run(device, loader, 0)
    read = dict(loader.reader.counters)
    run(device, loader, 1)
    assert dict(loader.reader.counters) == read
    assert loader.cache_counts["hits"] == loader.cache_counts["misses"] == TOTAL


def test_closed_loaders_have_given_their_memory_back(device, load):
    def taken_by_ten():
        for _ in range(10):
            loader = load(space=device.space, cache_gpu=CACHES["all"], prefetch=20)
            fetcher = loader.start(Position(0, 0))
            fetcher.get(wait=True).release()
            fetcher.close()
            loader.close()
        del loader, fetcher
        gc.collect()
        return device.free_bytes

    first = taken_by_ten()
    assert first - taken_by_ten() < load(space=device.space, cache_gpu=CACHES["all"]).memory["gpu cache"]
