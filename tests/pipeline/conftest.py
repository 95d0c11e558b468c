"""Decoders over real datasets: what the tests of the decoding side stand on."""

from __future__ import annotations

from contextlib import contextmanager
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
from shardkit.pipeline.cpu import PillowDecoder
from shardkit.pipeline.dali import DaliDecoder
from shardkit.storage.backends import open_reader
from shardkit.storage.buffers import BufferPool
from shardkit.testing.images import Picture, coloured, write_pictures
from shardkit.testing.photos import photo_file
from shardkit.torch.resize import resize

if TYPE_CHECKING:
    from shardkit.dataset.samples import Samples


def make_decoder(name, spec, batch_size=64):
    return DaliDecoder(spec, batch_size=batch_size, resize=resize) if name == "dali" else PillowDecoder(spec)


@pytest.fixture
def make():
    """A function that makes a decoder."""
    return make_decoder


@pytest.fixture
def feed():
    """A context manager that opens a dataset as a decoder's source."""
    return feed_decoder


@pytest.fixture
def decoded():
    """A function that decodes lists of sample numbers."""
    return decode_all


@pytest.fixture(params=["dali", "cpu"])
def name(request):
    return request.param


@dataclass(frozen=True)
class Feed:
    """What a decoder is given, and what lies under it."""

    fetcher: Fetcher
    samples: Samples
    bad: BadSamples
    pool: BufferPool


@contextmanager
def feed_decoder(folder, steps, *, epoch=0, depth=2, on_bad="raise"):
    """Read lists of sample numbers; no payload is looked at before the decoder sees it."""
    samples = open_samples([folder])
    storage, _ = open_reader("buffered", samples.shard_paths)
    with BufferPool(64 << 20, align=storage.align) as pool:
        bad = BadSamples(samples, on_bad)
        reader = SampleReader(samples, storage, inspect=False)
        source = SampleSource(reader, StoredOrder(len(samples)), bad, seed=0)
        numbered = (Step(epoch, step, np.asarray(ids, np.int64)) for step, ids in enumerate(steps))
        fetcher = Fetcher(
            BatchReading(source, pool), numbered, depth=depth, replace=source.replace, oldest=storage.oldest
        )
        try:
            yield Feed(fetcher, samples, bad, pool)
        finally:
            fetcher.close()
            storage.close()
            samples.close()
            assert pool.lent_bytes == 0


def decode_all(folder, decoder, steps, *, epoch=0, **options):
    """Decode lists of sample numbers; returns the pixels of each step."""
    with feed_decoder(folder, steps, epoch=epoch, **options) as given:
        run = decoder.decode(given.fetcher, epoch)
        try:
            return [as_arrays(batch.pixels) for batch in run]
        finally:
            run.close()


def as_arrays(pixels):
    return pixels if isinstance(pixels, list) else np.from_dlpack(pixels)


def pictures_of(jpegs):
    return [Picture(f"p/{number}", jpeg, 0) for number, jpeg in enumerate(jpegs)]


@pytest.fixture(scope="session")
def colour_folder(tmp_path_factory):
    return write_pictures(tmp_path_factory.mktemp("colours") / "ds", coloured(40))


@pytest.fixture(scope="session")
def photo_jpegs(photographs):
    return [photo_file(photographs, number, classes=5).data for number in range(24)]


@pytest.fixture(scope="session")
def photo_folder(tmp_path_factory, photo_jpegs):
    return write_pictures(tmp_path_factory.mktemp("photos") / "ds", pictures_of(photo_jpegs))


@pytest.fixture
def one_bad(tmp_path, photo_jpegs):
    """A dataset of 12 whose number 1 has no end."""
    jpegs = list(photo_jpegs[:12])
    jpegs[1] = jpegs[1][:-100]
    return write_pictures(tmp_path / "ds", [Picture(f"p/{number}", jpeg, 0) for number, jpeg in enumerate(jpegs)])
