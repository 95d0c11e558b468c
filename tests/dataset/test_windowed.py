"""Reading by windows: the batches of the order, every byte read once, no more memory than planned."""

from __future__ import annotations

import itertools
import os

import numpy as np
import pytest

from shardkit.dataset.encoded import EncodedLoader, ReadOptions
from shardkit.dataset.fetch import Fetcher
from shardkit.dataset.shardset import open_dataset
from shardkit.dataset.source import BatchReading, Step
from shardkit.dataset.state import Position
from shardkit.dataset.steps import BatchPlan
from shardkit.dataset.window import WindowOrder
from shardkit.dataset.windowed import WindowReading
from shardkit.errors import CapabilityError, FormatError, IntegrityError, ShortReadError, StorageError
from shardkit.storage.buffered import BufferedReader
from shardkit.testing.damage import flip_byte
from shardkit.testing.datasets import draft_dataset

COUNTS = (20, 1, 27, 13)
TOTAL = sum(COUNTS)
SIZE = 40_000  # with one unwanted sample between them, two are not read in one piece


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return draft_dataset(COUNTS, sizes=(SIZE, SIZE + 777)).write(tmp_path_factory.mktemp("windowed") / "ds")


@pytest.fixture(scope="module")
def truth(folder):
    with open_dataset(folder) as dataset:
        return [(sample.key, sample.label, sample.jpeg, sample.metadata) for sample in dataset]


@pytest.fixture
def load(folder):
    """A function that makes loaders of the windowed order; closed at the end."""
    made = []

    def make(path=folder, **options):
        given = {"batch_size": 6, "shuffle": "window", "io": "buffered", "last_batch": "partial", "seed": 5}
        try:
            made.append(EncodedLoader.open(path, ReadOptions(**{**given, **options})))
        except CapabilityError as error:
            pytest.skip(str(error))
        return made[-1]

    yield make
    for loader in made:
        loader.close()


def run(loader, epoch=0, step=0):
    """Return the rest of an epoch: of each batch its positions, and key, label, bytes and json of each sample."""
    fetcher, found = loader.start(Position(epoch, step)), []
    while (batch := fetcher.get(wait=True)) is not None:
        views = [view.tobytes() for view in batch.views]
        assert batch.addresses.tolist() == [view.ctypes.data for view in batch.views]
        json = batch.metadata if loader.options.metadata else [None] * len(batch)
        rows = list(zip(batch.samples.keys(batch.ids), batch.labels.tolist(), views, json, strict=True))
        found.append((batch.step, batch.positions.tolist(), rows))
        batch.release()
    assert fetcher.close()
    assert loader.pool.lent_bytes == 0
    return found


def drain(fetcher):
    while (batch := fetcher.get(wait=True)) is not None:
        batch.release()


def order_of(loader, **changes):
    given = {"n": TOTAL, "seed": 5, "lanes": loader.plan.lanes, "extent_samples": 7, "window_extents": 2}
    return WindowOrder(**{**given, **changes})


def plan_of(order):
    return BatchPlan(n=order.n, batch_size=order.lanes, world_size=1, rank=0, lanes=order.lanes, last_batch="partial")


# --- which samples, and how often a byte is read ---------------------------------------------------------------------


@pytest.mark.parametrize("io", ["buffered", "direct"])
@pytest.mark.parametrize(("world", "lanes", "batch"), [(1, 1, 6), (1, 3, 6), (2, 2, 5), (3, 6, 4), (2, 4, 40)])
def test_an_epoch_is_the_order_and_reads_every_byte_once(load, truth, io, world, lanes, batch):
    seen, read = [], 0
    for rank in range(world):
        loader = load(
            batch_size=batch, rank=rank, world_size=world, lanes=lanes, io=io, extent_bytes=7 * SIZE + 9000,
            window_extents=2, metadata=True,
        )  # fmt: skip
        for step, positions, rows in run(loader, epoch=1):
            assert positions == loader.plan.positions(step).tolist()
            ids = order_of(loader).at(1, np.asarray(positions, np.int64)).tolist()
            assert rows == [truth[number] for number in ids]
            seen += ids
        read += sum(loader.reader.counters.values())
    assert sorted(seen) == list(range(TOTAL))
    stored = sum(loader.samples.gather("sample_size", np.arange(TOTAL)).tolist())
    pieces = sum(len(order_of(loader).pieces(lane)) for lane in range(lanes))
    # A piece is a few runs of neighbours, each widened to whole blocks.
    assert loader.samples.total_payload <= read <= stored + pieces * 4 * 2 * (loader.reader.align - 1)


@pytest.mark.parametrize("last", ["drop", "pad", "partial"])
def test_the_end_of_an_epoch_is_that_of_the_plan(load, truth, last):
    for world, lanes, batch in ((1, 2, 8), (2, 2, 7), (3, 3, 5)):
        seen = []
        for rank in range(world):
            loader = load(batch_size=batch, rank=rank, world_size=world, lanes=lanes, last_batch=last)
            found = run(loader)
            assert len(found) == loader.plan.steps
            seen += [key for _, _, rows in found for key, *_ in rows]
        assert len(seen) == TOTAL - loader.plan.dropped + loader.plan.padded
        assert len(set(seen)) == TOTAL - loader.plan.dropped


def test_an_epoch_may_start_anywhere(load):
    loader = load(lanes=3, extent_bytes=4 * SIZE, window_extents=2)
    whole = run(loader, epoch=2)
    for step in range(len(whole) + 1):
        assert run(loader, epoch=2, step=step) == whole[step:]


def test_a_rank_without_samples_makes_its_step(load):
    loader = load(batch_size=TOTAL // 2, rank=1, world_size=2, lanes=2)  # one sample is left for the last step
    assert [len(rows) for _, _, rows in run(loader)] == [TOTAL // 2, 0]
    fetcher = loader.start(Position(0, 1))
    batch = fetcher.get(wait=True)
    assert (batch.metadata, batch.views, batch.labels.tolist()) == (None, [], [])
    fetcher.close()


@pytest.mark.parametrize("metadata", [False, True])
def test_pieces_give_what_reading_sample_by_sample_gives(stack, tmp_path, metadata):
    folder = draft_dataset((9, 9, 9)).write(tmp_path / "ds")
    order = WindowOrder(n=27, seed=3, lanes=2, extent_samples=4, window_extents=2)
    for bad in (3, 11, 12, 26):
        with open_dataset(folder) as dataset:
            shard, offset = divmod(bad, 9)[0], dataset.columns["offset"][bad]
        flip_byte(folder / f"tiny-{shard:06}.tar", offset)
    found = []
    for windowed in (False, True):
        on = stack(folder, order=order, seed=8, metadata=metadata)
        reading = (
            WindowReading(on.source, on.pool, order, plan_of(order), piece_bytes=1 << 20)
            if windowed
            else BatchReading(on.source, on.pool)
        )
        rows = []
        for number, positions in enumerate(np.array_split(np.arange(27), 5)):
            batch = reading.begin(Step(1, number, positions))()
            assert (batch.epoch, batch.step, batch.positions.tolist()) == (1, number, positions.tolist())
            columns = [getattr(batch.located, name).tolist() for name in ("shard", "offset", "size", "label")]
            sides = batch.width.tolist(), batch.height.tolist()
            assert batch.addresses.tolist() == [view.ctypes.data for view in batch.views]
            rows.append((batch.ids.tolist(), columns, sides, [v.tobytes() for v in batch.views], batch.metadata))
            batch.release()
        found.append((rows, on.bad.by_key, on.bad.substitutions))
    assert found[0] == found[1]
    assert set(found[0][1]) == {"c/0003", "c/0011", "c/0012", "c/0026"}
    assert found[0][2] == 4
    assert not {3, 11, 12, 26}.intersection(number for row in found[0][0] for number in row[0])


# --- memory ----------------------------------------------------------------------------------------------------------

SHAPES = [
    (lanes, batch, extent, extents)
    for lanes, share, extent, extents in itertools.product((1, 2, 5), (1, 3, 13), (1, 4, 60), (1, 3))
    for batch in (lanes * share,)
]


@pytest.mark.parametrize("last", ["pad", "partial"])
def test_no_shape_waits_for_memory_for_ever(load, last):
    for lanes, batch, extent, extents in SHAPES:
        loader = load(
            lanes=lanes, batch_size=batch, extent_bytes=extent * (SIZE + 400), window_extents=extents, last_batch=last,
            prefetch=1 + batch % 3,
        )  # fmt: skip
        positions = [found[1] for found in run(loader)]
        assert positions == [loader.plan.positions(step).tolist() for step in range(loader.plan.steps)]
        loader.close()


def test_a_step_may_take_many_pieces_of_a_lane(load):
    loader = load(batch_size=50, extent_bytes=1, window_extents=3)  # pieces of three samples, all held at once
    assert [len(rows) for _, _, rows in run(loader)] == [50, 11]


def test_the_memory_is_that_of_three_pieces_a_lane(load):
    loader = load(lanes=2, extent_bytes=5 * SIZE + 9000, window_extents=2)
    piece = 10 * (SIZE + 777 + 4096)
    assert 6 * 10 * SIZE < loader.pool.budget_bytes < 6 * 1.15 * piece
    loader = load(lanes=2, extent_bytes=1 << 40, window_extents=99)  # all of a lane is one piece
    assert loader.pool.budget_bytes < 4 * 1.15 * TOTAL * (SIZE + 777 + 4096)


def test_a_finished_epoch_that_someone_keeps_holds_no_memory(load):
    loader = load()
    kept = []
    for leave_after in (1, 3, 99):
        fetcher = loader.start(Position(0, 0))
        for _ in range(leave_after):
            if (batch := fetcher.get(wait=True)) is None:
                break
            batch.release()
        if leave_after < 99:
            assert fetcher.close()
        kept.append(fetcher)
        assert loader.pool.lent_bytes == 0
    assert len(run(loader, epoch=1)) == loader.plan.steps


# --- errors and bad samples ------------------------------------------------------------------------------------------


def test_an_error_in_a_piece_reaches_the_consumer_with_the_first_sample_that_it_hit(load, tmp_path):
    folder = draft_dataset(COUNTS, sizes=(SIZE,)).write(tmp_path / "ds")
    loader = load(folder, extent_bytes=5 * SIZE, window_extents=1)
    offset = loader.samples.gather("offset", np.arange(TOTAL))
    os.truncate(folder / "tiny-000002.tar", int(offset[30]) + 50)
    fetcher = loader.start(Position(0, 0))
    with pytest.raises(ShortReadError) as caught:
        drain(fetcher)
    number = int(caught.value.key.removeprefix("c/"))
    assert 30 <= number < 48
    assert caught.value.offset == offset[number]
    assert caught.value.path == str(folder / "tiny-000002.tar")
    fetcher.close()
    assert loader.pool.lent_bytes == 0


def test_a_bad_sample_in_a_piece_is_named_when_it_is_to_raise(load, tmp_path):
    folder = draft_dataset(COUNTS, sizes=(SIZE,)).write(tmp_path / "ds")
    with open_dataset(folder) as dataset:
        offset = dataset.columns["offset"][40]
    flip_byte(folder / "tiny-000002.tar", offset)
    loader = load(folder, on_bad="raise", extent_bytes=5 * SIZE, window_extents=1)
    fetcher = loader.start(Position(0, 0))
    with pytest.raises(FormatError, match=rf"tiny-000002\.tar:{offset} \[sample c/0040\]"):
        drain(fetcher)
    fetcher.close()
    assert loader.pool.lent_bytes == 0


class FailsOnce(BufferedReader):
    """A reader whose first call the system fails."""

    failed = False

    def read_into(self, ops, /):
        if not self.failed:
            self.failed = True
            raise StorageError("the server went away", path=self._files.paths[0], offset=0)
        super().read_into(ops)


def test_a_failed_read_of_a_piece_is_tried_again_by_the_next_step(stack, folder, truth):
    order = WindowOrder(n=TOTAL, seed=0, lanes=1, extent_samples=10, window_extents=1)
    on = stack(folder, order=order, storage=FailsOnce)
    reading = WindowReading(on.source, on.pool, order, plan_of(order), piece_bytes=1 << 20)
    reads = [reading.begin(Step(0, number, np.arange(4) + 4 * number)) for number in range(2)]
    with pytest.raises(StorageError, match="went away"):
        reads[0]()
    batch = reads[1]()
    assert [view.tobytes() for view in batch.views] == [truth[number][2] for number in order.at(0, np.arange(4, 8))]
    assert on.pool.lent_bytes == 1 << 20  # one piece


def test_steps_that_share_a_piece_read_it_once(stack, folder):
    order = WindowOrder(n=TOTAL, seed=0, lanes=1, extent_samples=20, window_extents=1)
    on = stack(folder, order=order)
    steps = (Step(0, number, np.arange(number, number + 1)) for number in range(20))
    reading = WindowReading(on.source, on.pool, order, plan_of(order), piece_bytes=1 << 20)
    fetcher = Fetcher(reading, steps, depth=9, replace=on.source.replace, oldest=on.storage.oldest)
    drain(fetcher)
    fetcher.close()
    assert sum(on.storage.counters.values()) < 40 * (SIZE + 777 + 4096)  # the next piece was read ahead


def test_a_piece_that_is_larger_than_the_index_says_is_damage_and_no_endless_wait(stack, folder):
    order = WindowOrder(n=TOTAL, seed=0, lanes=1, extent_samples=10, window_extents=1)
    on = stack(folder, order=order)
    reading = WindowReading(on.source, on.pool, order, plan_of(order), piece_bytes=4096)
    with pytest.raises(IntegrityError, match=r"smaller than their members.*run shardkit verify") as caught:
        reading.begin(Step(0, 0, np.arange(4)))
    assert caught.value.key is not None
