"""A data set, opened for reading as a loader opens it: what the tests of the reading side stand on."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pytest

from shardkit.dataset.arrangement import open_samples
from shardkit.dataset.bad import BadSamples
from shardkit.dataset.fetch import Fetcher
from shardkit.dataset.order import StoredOrder
from shardkit.dataset.reading import SampleReader
from shardkit.dataset.source import BatchReading, SampleSource, Step
from shardkit.errors import CapabilityError
from shardkit.storage.backends import open_reader
from shardkit.storage.buffers import BufferPool

if TYPE_CHECKING:
    from shardkit.dataset.samples import Samples
    from shardkit.storage.reader import Reader


@dataclass(frozen=True)
class Stack:
    """Everything from the samples up to the source of batches."""

    samples: Samples
    storage: Reader
    reader: SampleReader
    bad: BadSamples
    source: SampleSource
    pool: BufferPool


@pytest.fixture
def stack():
    """A function that opens data sets, in stored order unless told otherwise; all of it is closed at the end."""
    made = []

    def make(
        *folders, io="buffered", order=None, seed=0, on_bad="substitute", pool_bytes=64 << 20, storage=None, **read
    ):
        samples = open_samples(folders)
        try:
            opened = storage(samples.shard_paths) if storage else open_reader(io, samples.shard_paths)[0]
        except CapabilityError as error:
            samples.close()
            pytest.skip(str(error))
        reader, bad = SampleReader(samples, opened, **read), BadSamples(samples, on_bad)
        source = SampleSource(reader, order or StoredOrder(len(samples)), bad, seed=seed)
        made.append(Stack(samples, opened, reader, bad, source, BufferPool(pool_bytes, align=opened.align)))
        return made[-1]

    yield make
    for one in made:
        one.pool.close()
        one.storage.close()
        one.samples.close()


@pytest.fixture
def settle():
    """A function that waits until a condition holds; ten seconds are more than any of them takes."""

    def wait(condition):
        deadline = time.monotonic() + 10
        while not condition():
            assert time.monotonic() < deadline
            time.sleep(0.002)

    return wait


@pytest.fixture
def reading_threads():
    """A function: the names of the fetchers' threads that run now."""
    return lambda: [one.name for one in threading.enumerate() if one.name.startswith("shardkit-fetch")]


@pytest.fixture
def fetch(stack, settle, reading_threads, folder):
    """A function that starts a fetcher over lists of sample numbers; closed at the end, when all memory is back."""
    started = []

    def start(steps, *, on=None, depth=2, reading=BatchReading, oldest=None, **waiting):
        on = on or stack(folder)
        numbered = (Step(3, number, np.asarray(ids, np.int64)) for number, ids in enumerate(steps))
        fetcher = Fetcher(
            reading(on.source, on.pool), numbered, depth=depth, replace=on.source.replace,
            oldest=oldest or on.storage.oldest, **waiting,
        )  # fmt: skip
        started.append((fetcher, on.pool))
        return fetcher

    yield start
    for fetcher, pool in started:
        fetcher.close()
        settle(lambda: not reading_threads())  # also one that a test left behind and then let go
        assert pool.lent_bytes == 0
