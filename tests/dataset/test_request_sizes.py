"""How long the requests are that reach cuFile: never short where neighbours are read with them.

The device and the library are made of host memory; what is asked for is sizes.
"""

from __future__ import annotations

import pytest

from shardkit.dataset import intake
from shardkit.dataset.encoded import EncodedLoader, ReadOptions
from shardkit.dataset.state import Position
from shardkit.storage.backends import Choice
from shardkit.storage.gds import GdsReader
from shardkit.testing.datasets import draft_dataset
from shardkit.testing.host_device import HostDevice
from shardkit.testing.host_gds import HostGds

SPAN = 4 << 20
STRIDE = 8192
SHORT = 64 << 10
BATCH = SPAN // STRIDE + 1
"""Samples of one block of headers and one of an image: one more than a span holds."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return draft_dataset((3 * BATCH,), sizes=(4096,)).write(tmp_path_factory.mktemp("requests") / "ds")


@pytest.fixture
def load(folder, monkeypatch):
    """A function that makes loaders over a stand-in for KvikIO; closed at the end."""
    made, device, library = [], HostDevice(), HostGds()

    def open_reader(io, paths, device, **options):
        return GdsReader(paths, device, library=library), Choice("gds", "told")

    monkeypatch.setattr(intake, "open_device_reader", open_reader)

    def make(**options):
        given = {"batch_size": BATCH, "io": "gds", "last_batch": "partial", "space": device.space} | options
        made.append(EncodedLoader.open(folder, ReadOptions(**given), device=device))
        return made[-1], library

    yield make
    for loader in made:
        loader.close()


@pytest.mark.parametrize("cache", [0, 1 << 30])
@pytest.mark.parametrize("shuffle", ["none", "window"])
def test_no_request_of_a_stored_or_windowed_order_is_short(load, shuffle, cache):
    loader, library = load(shuffle=shuffle, cache_gpu=cache, extent_bytes=BATCH * STRIDE, window_extents=1, seed=3)
    fetcher = loader.start(Position(0, 0))
    samples = 0
    while (batch := fetcher.get(wait=True)) is not None:
        samples += len(batch.ids)
        batch.release()
    fetcher.close()
    assert samples == 3 * BATCH
    assert max(library.requests) > 1 << 20
    assert min(library.requests) >= SHORT
    assert max(library.requests) <= SPAN
