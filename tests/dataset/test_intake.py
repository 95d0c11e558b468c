"""The memory of a loader: as much as it is worth, less where there is no more, and an error where it cannot do."""

from __future__ import annotations

import gc
import mmap
import re

import pytest

from shardkit.dataset.budget import piece_bytes, pieces_held, pieces_wanted
from shardkit.dataset.encoded import EncodedLoader, ReadOptions
from shardkit.dataset.state import Position
from shardkit.errors import CapabilityError
from shardkit.storage import ring
from shardkit.storage.reader import HOST
from shardkit.testing.datasets import draft_dataset
from shardkit.testing.host_device import HostDevice


class Small(HostDevice):
    """A device with little memory, in one piece."""

    free = 0

    def memory(self, nbytes):
        if nbytes > self.free:
            raise CapabilityError("the device has no memory left", expected=nbytes, found=self.free)
        return super().memory(nbytes)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return draft_dataset((150, 150), sizes=(60_000, 80_000)).write(tmp_path_factory.mktemp("intake") / "ds")


def options(shuffle, space):
    # Rings come in 2 MiB: pieces and batches are larger than that.
    return ReadOptions(
        batch_size=32, io="buffered", shuffle=shuffle, extent_bytes=1 << 20, window_extents=4, space=space
    )


def unit(loader):
    """Return the bytes of a piece in the pool, or of a batch."""
    if loader.options.shuffle == "window":
        order = loader._order
        assert (pieces_held(loader.plan, order), pieces_wanted(loader.plan, order)) == (2, 3)
        return piece_bytes(loader.samples, order, align=loader.reader.align) + mmap.PAGESIZE
    return loader.pool.budget_bytes // loader.options.most_batches(loader.samples)


def epoch(loader):
    """Return the ids of an epoch, each batch released before the next one is asked for."""
    fetcher, found = loader.start(Position(0, 0)), []
    while (batch := fetcher.get(wait=True)) is not None:
        found += batch.ids.tolist()
        batch.release()
    fetcher.close()
    return found


@pytest.fixture(params=["window", "none"])
def whole(request, folder):
    """A loader with all the memory that it wants, its epoch, and the bytes of a piece or batch."""
    with EncodedLoader.open(folder, options(request.param, HOST)) as loader:
        yield request.param, epoch(loader), unit(loader), loader.pool.budget_bytes


def test_a_device_with_little_memory_gets_a_smaller_pool(whole, folder, caplog):
    shuffle, ids, one, wanted = whole
    device = Small()
    device.free = int(2.6 * one) if shuffle == "window" else wanted - mmap.PAGESIZE
    with EncodedLoader.open(folder, options(shuffle, device.space), device=device) as loader:
        assert loader.pool.budget_bytes <= device.free < wanted
        assert re.search(r"do with \d+ bytes of memory for images, not \d+", caplog.text)
        assert epoch(loader) == ids


def test_a_device_with_too_little_memory_is_an_error_that_leaves_nothing_behind(whole, folder):
    shuffle, _, one, _ = whole
    device = Small()
    device.free = one
    with pytest.raises(CapabilityError, match="no memory left"):
        EncodedLoader.open(folder, options(shuffle, device.space), device=device)
    gc.collect()
    assert device.allocated_bytes == 0


def test_a_ring_near_a_device_may_be_smaller_than_it_is_wanted(whole, folder, monkeypatch):
    shuffle, ids, one, wanted = whole
    room = int(2.6 * one) if shuffle == "window" else wanted * 3 // 4
    monkeypatch.setattr(ring, "available_memory", lambda: 2 * room)  # of which a ring takes a half at most
    with EncodedLoader.open(folder, options(shuffle, HOST), device=HostDevice()) as loader:
        assert room - (2 << 20) <= loader.pool.budget_bytes <= room
        assert epoch(loader) == ids


def test_a_ring_that_is_too_small_to_come_to_an_end_is_an_error(whole, folder, monkeypatch):
    shuffle, _, one, _ = whole
    monkeypatch.setattr(ring, "available_memory", lambda: 2 * one)
    device = HostDevice()
    with pytest.raises(CapabilityError, match=r"no memory for the batches; expected \d+ bytes; found \d+; take"):
        EncodedLoader.open(folder, options(shuffle, HOST), device=device)
    gc.collect()
    assert device.pinned == {}
