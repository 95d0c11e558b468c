"""Batches without bad samples: which others stand in, whoever finds out and whenever, and what errors leave behind."""

from __future__ import annotations

import dataclasses
import logging
import os

import numpy as np
import pytest

from shardkit.dataset.bad import ATTEMPTS, substitute_position
from shardkit.dataset.encoded import EncodedLoader, ReadOptions
from shardkit.dataset.fetch import Fetcher
from shardkit.dataset.order import GlobalOrder
from shardkit.dataset.shardset import open_dataset
from shardkit.dataset.source import BatchReading, Step
from shardkit.dataset.state import Position
from shardkit.dataset.steps import BatchPlan
from shardkit.errors import FormatError, ShortReadError
from shardkit.testing.damage import flip_byte
from shardkit.testing.datasets import draft_dataset

TOTAL, SEED = 60, 9
BAD = (3, 4, 17, 31, 32, 33, 59)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A data set in which the first bytes of some images are damaged."""
    written = draft_dataset((TOTAL // 3,) * 3, sizes=(700, 900)).write(tmp_path_factory.mktemp("source") / "ds")
    with open_dataset(written) as dataset:
        for number in BAD:
            flip_byte(written / f"tiny-{number // 20:06}.tar", dataset.columns["offset"][number], 0xFF)
    return written


@pytest.fixture
def source(stack, folder):
    """A function that opens the damaged data set in the shuffled order."""

    def make(path=folder, order=None, **options):
        return stack(path, order=order or GlobalOrder(TOTAL, SEED), seed=SEED, **options)

    return make


def expected(position, epoch, bad=BAD):
    """Return the sample that comes at a position: its own, or the first usable substitute."""
    order = GlobalOrder(TOTAL, SEED)
    own = int(order.at(epoch, np.array([position]))[0])
    attempts = iter(range(ATTEMPTS))
    while own in bad:
        other = substitute_position(position, next(attempts), TOTAL, seed=SEED, epoch=epoch)
        own = int(order.at(epoch, np.array([other]))[0])
    return own


def batch_of(on, positions, epoch=0):
    return BatchReading(on.source, on.pool).begin(Step(epoch, 0, np.asarray(positions, np.int64)))()


def whole(samples, batch):
    """Everything that a batch says about each of its samples."""
    located = [getattr(batch.located, field.name).tolist() for field in dataclasses.fields(batch.located)]
    views = [view.tobytes() for view in batch.views]
    sides = [batch.width.tolist(), batch.height.tolist(), batch.labels.tolist()]
    json = batch.metadata or [None] * len(batch)
    return list(zip(batch.ids.tolist(), samples.keys(batch.ids), views, json, *located, *sides, strict=True))


# --- the same substitutes for everybody ------------------------------------------------------------------------------


@pytest.mark.parametrize(("world", "batch"), [(1, 1), (1, 7), (1, 60), (2, 5), (3, 4), (5, 6)])
@pytest.mark.parametrize("depth", [1, 4])
def test_the_substitutes_are_the_same_for_every_batch_size_rank_and_depth(source, world, batch, depth):
    found = {}
    for rank in range(world):
        on = source()
        plan = BatchPlan(n=TOTAL, batch_size=batch, world_size=world, rank=rank, lanes=world, last_batch="partial")
        steps = (Step(2, step, plan.positions(step)) for step in range(plan.steps))
        reading = BatchReading(on.source, on.pool)
        fetcher = Fetcher(reading, steps, depth=depth, replace=on.source.replace, oldest=on.storage.oldest)
        while (one := fetcher.get(wait=True)) is not None:
            found |= dict(zip(one.positions.tolist(), one.ids.tolist(), strict=True))
            one.release()
        fetcher.close()
    assert found == {position: expected(position, 2) for position in range(TOTAL)}


@pytest.mark.parametrize("metadata", [False, True])
def test_a_substitute_is_whole(source, folder, metadata):
    on = source(metadata=metadata)
    batch = batch_of(on, range(TOTAL))
    ids = [expected(position, 0) for position in range(TOTAL)]
    with open_dataset(folder) as dataset:
        truth = [dataset[number] for number in ids]
        shown = [(dataset.columns["width"][number], dataset.columns["height"][number]) for number in ids]
    assert batch.ids.tolist() == ids
    assert batch.positions.tolist() == list(range(TOTAL))
    assert [view.tobytes() for view in batch.views] == [sample.jpeg for sample in truth]
    assert batch.labels.tolist() == [sample.label for sample in truth]
    assert list(zip(batch.width, batch.height, strict=True)) == shown
    assert batch.metadata == ([sample.metadata for sample in truth] if metadata else None)
    for at in range(TOTAL):
        path, offset = batch.place(at)
        with open(path, "rb") as file:
            assert os.pread(file.fileno(), len(truth[at].jpeg), offset) == truth[at].jpeg
    batch.release()
    assert on.pool.lent_bytes == 0


def test_who_finds_out_makes_no_difference(source, folder):
    """Header or decoder, at once or one after the other, in this order or that: the same batch comes out."""
    late = (8, 21, 22, 40, 55)  # only the decoder will see what is wrong with them
    wanted = [expected(position, 1, BAD + late) for position in range(TOTAL)]
    for turns in ([late], [late[::-1]], [late[:2], late[2:]], [[number] for number in late], [[n] for n in late[::-1]]):
        on = source()
        batch = batch_of(on, range(TOTAL), epoch=1)
        pending = list(turns)
        while bad := {at: "torn" for at, number in enumerate(batch.ids.tolist()) if number in late}:
            first = next((turn for turn in pending if set(turn) & set(batch.ids[list(bad)].tolist())), late)
            pending = [turn for turn in pending if turn is not first]
            batch = on.source.replace(batch, {at: why for at, why in bad.items() if int(batch.ids[at]) in first})
        assert batch.ids.tolist() == wanted
        batch.release()
        later = batch_of(on, range(TOTAL), epoch=1)  # what a decoder found is asked again: nothing depends on history
        assert later.ids.tolist() == [expected(position, 1, BAD) for position in range(TOTAL)]
        later.release()


def test_a_substitute_that_a_decoder_refuses_is_followed_by_the_next_one(source):
    on, seen = source(), list[int]()
    batch = batch_of(on, [3])
    for attempt in range(1, 5):
        seen.append(int(batch.ids[0]))
        batch = on.source.replace(batch, {0: "torn"})
        assert batch.attempts.tolist() >= [attempt]
    assert len(on.bad.by_key) >= len(set(seen) - set(BAD))
    assert on.bad.substitutions == 1
    batch.release()


def test_the_old_batch_gives_its_memory_to_the_new_one(source):
    on = source()
    batch = batch_of(on, range(10, 20))
    lent = on.pool.lent_bytes
    other = on.source.replace(batch, {2: "torn", 5: "torn"})
    assert batch.views == []
    assert len(other.views) == 10
    assert on.pool.lent_bytes == lent
    other.release()
    assert on.pool.lent_bytes == 0


def test_each_bad_sample_is_named_once_and_each_substitute_counted(source, caplog):
    on = source()
    with caplog.at_level(logging.WARNING):
        for epoch in range(3):
            batch_of(on, range(TOTAL), epoch).release()
    assert set(on.bad.by_key) == {f"c/{number:04}" for number in BAD}
    assert len(caplog.records) == len(BAD)
    assert on.bad.substitutions == 3 * len(BAD)  # a substitute that was bad itself never stood in


def test_a_selection_substitutes_from_itself(source, folder):
    """Ids count in the whole data set, positions in what was selected."""
    wanted = [f"c/{number:04}" for number in (3, 5, 17, 20, 58)]
    options = ReadOptions(batch_size=5, io="buffered", seed=1)
    loader = EncodedLoader.open(folder, options, keys=wanted)
    fetcher = loader.start(Position(0, 0))
    batch = fetcher.get(wait=True)
    assert set(loader.samples.keys(batch.ids)) <= {"c/0005", "c/0020", "c/0058"}
    assert set(loader.bad.by_key) == {"c/0003", "c/0017"}
    batch.release()
    fetcher.close()
    loader.close()


# --- what cannot be replaced -----------------------------------------------------------------------------------------


def test_to_raise_leaves_the_batch_to_its_owner(source):
    on = source(on_bad="raise")
    with pytest.raises(FormatError, match=r"tiny-00000\d\.tar:\d+ \[sample c/00\d\d\]"):
        batch_of(on, range(TOTAL))
    position = next(p for p in range(TOTAL) if expected(p, 0, ()) not in BAD)
    batch = batch_of(on, [position])
    with pytest.raises(FormatError, match=rf"\[sample c/{batch.ids[0]:04}\].*found torn"):
        on.source.replace(batch, {0: "torn"})
    assert len(batch.views) == 1
    batch.release()
    assert on.pool.lent_bytes == 0


def test_where_all_samples_are_bad_the_search_ends(source, tmp_path):
    folder = draft_dataset((20, 20, 20)).write(tmp_path / "ds")
    with open_dataset(folder) as dataset:
        for number in range(TOTAL):
            flip_byte(folder / f"tiny-{number // 20:06}.tar", dataset.columns["offset"][number])
    on = source(folder)
    with pytest.raises(FormatError, match=f"no sample can stand in.*among {ATTEMPTS} of the epoch") as caught:
        batch_of(on, [0, 1])
    own = int(GlobalOrder(TOTAL, SEED).at(0, np.array([0]))[0])
    assert caught.value.key == f"c/{own:04}"
    assert 20 < len(on.bad.by_key) <= ATTEMPTS + 1
    del caught
    assert on.pool.lent_bytes == 0


def test_one_good_sample_stands_in_for_all(source, tmp_path):
    folder = draft_dataset((20, 20, 20)).write(tmp_path / "ds")
    good = (7, 41)
    with open_dataset(folder) as dataset:
        for number in set(range(TOTAL)) - set(good):
            flip_byte(folder / f"tiny-{number // 20:06}.tar", dataset.columns["offset"][number])
    positions = [p for p in range(TOTAL) if any(
        int(GlobalOrder(TOTAL, SEED).at(0, np.array([substitute_position(p, a, TOTAL, seed=SEED, epoch=0)]))[0]) in good
        for a in range(ATTEMPTS)
    )]  # fmt: skip
    on = source(folder)
    bad = tuple(set(range(TOTAL)) - set(good))
    assert batch_of(on, positions).ids.tolist() == [expected(position, 0, bad) for position in positions]


def test_a_storage_error_of_a_substitute_leaves_the_batch_whole(source, stack, tmp_path):
    folder = draft_dataset((20, 20, 20), sizes=(5000,)).write(tmp_path / "ds")
    on = source(folder)
    shard = {position: expected(position, 0, ()) // 20 for position in range(TOTAL)}
    place = next(
        position for position in range(TOTAL)
        if shard[position] == 0 and shard[substitute_position(position, 0, TOTAL, seed=SEED, epoch=0)] == 2
    )  # fmt: skip
    batch = batch_of(on, [place])
    before = whole(on.samples, batch)
    os.truncate(folder / "tiny-000002.tar", 600)
    with pytest.raises(ShortReadError, match=r"tiny-000002\.tar:\d+ \[sample"):
        on.source.replace(batch, {0: "torn"})
    assert whole(on.samples, batch) == before
    assert on.bad.substitutions == 0
    batch.release()
    assert on.pool.lent_bytes == 0
