"""The reading thread: the right bytes, a bounded number of them, errors with a name, and an end."""

from __future__ import annotations

import os
import threading
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardkit.dataset.fetch import Fetcher, budget_bytes, read_batch
from shardkit.dataset.shardset import open_dataset
from shardkit.errors import CapabilityError, ConfigError, IntegrityError, ShortReadError
from shardkit.storage.backends import open_reader
from shardkit.storage.buffers import BufferPool
from shardkit.testing.datasets import draft_dataset
from shardkit.testing.images import Picture, corners, jpeg_bytes, write_pictures

COUNTS = (7, 1, 12, 4)
TOTAL = sum(COUNTS)
SIZES = (401, 512, 4096, 9001, 30000)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return draft_dataset(COUNTS, sizes=SIZES).write(tmp_path_factory.mktemp("fetch") / "ds")


@pytest.fixture
def dataset(folder):
    with open_dataset(folder) as opened:
        yield opened


@pytest.fixture(params=["buffered", "direct"])
def reader(request, dataset):
    try:
        opened, _ = open_reader(request.param, dataset.shard_paths)
    except CapabilityError as error:
        pytest.skip(str(error))
    yield opened
    opened.close()


@pytest.fixture
def pool():
    with BufferPool(64 << 20) as opened:
        yield opened


@pytest.fixture
def fetch(dataset, reader, pool):
    """A function that starts a fetcher over lists of sample numbers; closed at the end."""
    started = []

    def start(steps, *, depth=2, metadata=False, pool=pool):
        numbered = ((step, np.asarray(ids, np.int64)) for step, ids in enumerate(steps))
        started.append(Fetcher(dataset, reader, pool, numbered, epoch=3, depth=depth, metadata=metadata))
        return started[-1]

    yield start
    for fetcher in started:
        fetcher.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "shardkit-fetch"]
    assert pool.lent_bytes == 0


def batches(fetcher):
    while (batch := fetcher.get(wait=True)) is not None:
        yield batch
        batch.release()


def settle(condition):
    """Wait until a condition holds; the test's own time limit is the deadline."""
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


@pytest.mark.parametrize("metadata", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_views_are_the_bytes_of_the_samples(fetch, dataset, metadata, seed):
    rng = np.random.default_rng(seed)
    steps = [rng.integers(0, TOTAL, size) for size in (1, 5, TOTAL * 2, 0)] + [np.arange(TOTAL)]
    seen = 0
    for batch, ids in zip(batches(fetch(steps, metadata=metadata)), steps, strict=True):
        assert batch.ids.tolist() == ids.tolist()
        assert (batch.epoch, batch.step) == (3, seen)
        truth = [dataset[i] for i in ids]
        assert [view.tobytes() for view in batch.views] == [sample.jpeg for sample in truth]
        assert batch.labels.tolist() == [sample.label for sample in truth]
        assert [batch.key(i) for i in range(len(ids))] == [sample.key for sample in truth]
        assert batch.metadata == ([sample.metadata for sample in truth] if metadata else None)
        seen += 1
    assert seen == len(steps)


def test_a_sample_without_json_has_an_empty_object(tmp_path, pool):
    pictures = [Picture(f"k{i}", jpeg_bytes(corners(16)), 0, {"n": i} if i % 2 else None) for i in range(4)]
    with open_dataset(write_pictures(tmp_path / "ds", pictures)) as dataset:
        reader, _ = open_reader("buffered", dataset.shard_paths)
        batch = read_batch(dataset, reader, pool, np.arange(4), epoch=0, step=0, metadata=True)
        assert batch.metadata == [{}, {"n": 1}, {}, {"n": 3}]
        batch.release()
        reader.close()


@pytest.mark.parametrize("orientation", range(9))
def test_sizes_are_those_of_the_image_as_shown(tmp_path, pool, orientation):
    jpeg = jpeg_bytes(corners(32)[:20], orientation=orientation or None)
    with open_dataset(write_pictures(tmp_path / "ds", [Picture("a", jpeg, 0)])) as dataset:
        reader, _ = open_reader("buffered", dataset.shard_paths)
        batch = read_batch(dataset, reader, pool, np.arange(1), epoch=0, step=0, metadata=False)
        shown = (20, 32) if orientation >= 5 else (32, 20)
        assert (batch.width[0], batch.height[0]) == shown
        batch.release()
        reader.close()


def test_views_lie_in_the_lease_so_nothing_was_copied(fetch):
    batch = fetch([np.arange(TOTAL)]).get(wait=True)
    whole = np.frombuffer(batch.lease.view, np.uint8)
    assert all(np.shares_memory(view, whole) for view in batch.views)
    del whole
    batch.release()


def test_neighbours_are_read_in_one_piece(fetch, dataset, reader):
    before = sum(reader.counters.values())
    for batch in batches(fetch([np.arange(COUNTS[0])])):
        wanted = int(batch.located.size.sum())
        assert batch.lease.view.nbytes < wanted + COUNTS[0] * 8192
    assert sum(reader.counters.values()) - before < wanted + COUNTS[0] * 8192


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_no_more_batches_wait_than_the_depth(fetch, pool, depth):
    pulled = []

    def steps():
        for step in range(20):
            pulled.append(step)
            yield [0]

    fetcher = fetch(steps(), depth=depth)
    settle(lambda: len(pulled) == depth + 1)  # those that wait, and one that is read and finds no place
    time.sleep(0.1)
    assert len(pulled) == depth + 1
    assert pool.lent_bytes <= (depth + 1) * 8192
    assert len(list(batches(fetcher))) == 20


def test_without_waiting_an_unread_batch_is_none(fetch):
    gate = threading.Event()

    def steps():
        gate.wait(10)
        yield [0]

    fetcher = fetch(steps())
    assert fetcher.get(wait=False) is None
    gate.set()
    batch = fetcher.get(wait=True)
    batch.release()
    assert fetcher.get(wait=True) is None
    assert fetcher.get(wait=True) is None
    assert fetcher.waited_s > 0


def test_an_error_comes_after_the_batches_before_it_and_names_the_sample(tmp_path, pool):
    folder = draft_dataset((3, 3), sizes=(5000,)).write(tmp_path / "ds")
    with open_dataset(folder) as dataset:
        offset = dataset.columns["offset"][4]
        os.truncate(folder / "tiny-000001.tar", offset + 100)
        reader, _ = open_reader("buffered", dataset.shard_paths)
        steps = [np.array([0, 1]), np.array([2, 3]), np.array([5, 4, 3, 0]), np.array([1])]
        fetcher = Fetcher(dataset, reader, pool, enumerate(steps), epoch=0, depth=4)
        for _ in range(2):
            fetcher.get(wait=True).release()
        with pytest.raises(ShortReadError) as caught:
            fetcher.get(wait=True)
        assert caught.value.key == "c/0004"
        assert (caught.value.path, caught.value.offset) == (str(folder / "tiny-000001.tar"), offset)
        assert fetcher.get(wait=True) is None
        fetcher.close()
        reader.close()
    assert pool.lent_bytes == 0


def test_a_shard_that_vanished_names_the_first_sample_of_the_batch(tmp_path, pool):
    folder = draft_dataset((3, 3)).write(tmp_path / "ds")
    with open_dataset(folder) as dataset:
        (folder / "tiny-000001.tar").unlink()
        reader, _ = open_reader("buffered", dataset.shard_paths)
        fetcher = Fetcher(dataset, reader, pool, [(0, np.array([5, 0, 4]))], epoch=0, depth=1)
        with pytest.raises(Exception, match=r"tiny-000001\.tar:\d+ \[sample c/0004\].*ENOENT"):
            fetcher.get(wait=True)
        fetcher.close()
        reader.close()


def test_damaged_json_is_named(tmp_path, pool):
    draft = draft_dataset((3,))
    draft.shards[0].tar[draft.shards[0].rows[1].json_offset] = ord("]")
    with open_dataset(draft.write(tmp_path / "ds")) as dataset:
        reader, _ = open_reader("buffered", dataset.shard_paths)
        with pytest.raises(IntegrityError, match="sample c/0001"):
            read_batch(dataset, reader, pool, np.arange(3), epoch=0, step=0, metadata=True)
        reader.close()
    assert pool.lent_bytes == 0


def test_an_error_of_the_order_reaches_the_consumer(fetch):
    def steps():
        yield [0]
        raise ConfigError("no such step")

    fetcher = fetch(steps())
    fetcher.get(wait=True).release()
    with pytest.raises(ConfigError, match="no such step"):
        fetcher.get(wait=True)


def test_close_ends_a_thread_that_waits_for_a_place(fetch, pool):
    fetcher = fetch([[i % TOTAL] for i in range(50)], depth=1)
    settle(lambda: pool.lent_bytes >= 8192)
    started = time.monotonic()
    fetcher.close()
    fetcher.close()
    assert time.monotonic() - started < 1
    assert fetcher.get(wait=True) is None


def test_close_ends_a_thread_that_waits_for_memory(fetch, dataset, reader):
    with BufferPool(64 << 10) as small:
        fetcher = fetch([[3]] * 20, depth=20, pool=small)  # 9001 bytes each, of 64 KiB
        settle(lambda: small.lent_bytes > 48 << 10)
        started = time.monotonic()
        fetcher.close()
        assert time.monotonic() - started < 1
        assert small.lent_bytes == 0


def test_a_released_batch_still_knows_its_samples(fetch):
    batch = fetch([[4, 2]]).get(wait=True)
    batch.release()
    batch.release()
    assert batch.views == []
    assert (batch.key(1), len(batch), batch.place(0)[1]) == ("c/0002", 2, int(batch.located.offset[0]))


def test_nothing_is_read_ahead_with_a_depth_of_zero(fetch):
    with pytest.raises(ConfigError, match="read ahead"):
        fetch([[0]], depth=0)


@given(
    ids=st.lists(st.integers(0, TOTAL - 1), max_size=8), align=st.sampled_from([1, 512, 4096]), metadata=st.booleans()
)
def test_the_budget_holds_any_batch(folder, ids, align, metadata):
    with open_dataset(folder) as dataset:
        budget = budget_bytes(dataset, batch_size=8, slots=1, align=align, metadata=metadata)
        reader, _ = open_reader("buffered", dataset.shard_paths)
        reader.align = align
        with BufferPool(budget) as pool:  # acquire refuses what can never fit
            read_batch(dataset, reader, pool, np.asarray(ids, np.int64), epoch=0, step=0, metadata=metadata).release()
        reader.close()


def test_the_budget_holds_the_largest_images_together(tmp_path):
    noise = np.random.default_rng(0).integers(0, 255, (500, 500, 3), np.uint8)
    pictures = [Picture(f"small{i}", jpeg_bytes(corners(8)), 0) for i in range(40)]
    pictures[7] = Picture("large1", jpeg_bytes(noise), 0)
    pictures[23] = Picture("large2", jpeg_bytes(noise[::-1]), 0)
    with open_dataset(write_pictures(tmp_path / "ds", pictures)) as dataset:
        budget = budget_bytes(dataset, batch_size=2, slots=1, align=1, metadata=False)
        reader, _ = open_reader("buffered", dataset.shard_paths)
        with BufferPool(budget) as pool:
            read_batch(dataset, reader, pool, np.array([7, 23]), epoch=0, step=0, metadata=False).release()
        reader.close()
