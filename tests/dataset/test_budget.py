"""The memory of encoded batches: whatever comes fits, and it was counted before anything was read."""

from __future__ import annotations

import contextlib
import tempfile
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardkit.dataset.budget import batch_budget, piece_bytes, pieces_held
from shardkit.dataset.reading import GAP_BYTES, SampleReader
from shardkit.dataset.samples import Part, Samples
from shardkit.dataset.shardset import open_dataset
from shardkit.dataset.steps import BatchPlan
from shardkit.dataset.window import WindowOrder
from shardkit.storage.backends import open_reader
from shardkit.testing.datasets import draft_dataset

ALIGNS = (1, 512, 4096)


class Aligned:
    """A reader as far as a plan asks it."""

    def __init__(self, reader, align):
        self.reader, self.align = reader, align

    def __getattr__(self, name):
        return getattr(self.reader, name)


@cache
def folder(counts, sizes, align=4096):
    """Write a data set, once, into a folder that goes with the process."""
    root = tempfile.TemporaryDirectory(prefix="shardkit-budget-")
    folder.kept = [*getattr(folder, "kept", []), root]
    return draft_dataset(counts, sizes=sizes, align=align).write(Path(root.name) / "ds")


@contextlib.contextmanager
def planner(path, align, *, rows=None, metadata=False):
    """A function from ids to the bytes that reading them takes, and the samples."""
    with open_dataset(path) as dataset:
        samples = Samples([Part(dataset, rows)])
        storage, _ = open_reader("buffered", samples.shard_paths)
        reader = SampleReader(samples, Aligned(storage, align), metadata=metadata)
        yield lambda ids: reader.plan(np.asarray(ids, np.int64)).nbytes, samples
        storage.close()


SETS = st.sampled_from(
    [
        folder((7, 1, 12, 4), (401, 512, 4096, 9001, 30000)),
        folder((30,), (401, 401, 401, 401, 401, 60000)),
        folder((5, 5), (401, 100_000), 65536),
    ]
)


@given(path=SETS, data=st.data(), size=st.integers(1, 8), align=st.sampled_from(ALIGNS), metadata=st.booleans())
def test_any_two_batches_fit(path, data, size, align, metadata):
    with planner(path, align, metadata=metadata) as (nbytes, samples):
        ids = st.lists(st.integers(0, len(samples) - 1), max_size=size)
        budget = batch_budget(samples, batch_size=size, slots=2, align=align, metadata=metadata)
        taken = [max(-(-nbytes(data.draw(ids)) // 4096) * 4096, 4096) for _ in range(2)]  # whole pages are lent
        assert sum(taken) <= budget


@pytest.mark.parametrize("align", ALIGNS)
@pytest.mark.parametrize("slots", [2, 5])
def test_the_largest_images_may_come_together(align, slots):
    with planner(folder((40,), (*[401] * 19, 90_000)), align) as (nbytes, samples):
        largest = nbytes([19, 39])
        assert largest >= 180_000
        budget = batch_budget(samples, batch_size=2, slots=slots, align=align, metadata=False)
        assert budget >= 2 * largest
        assert budget < 2 * largest + slots * 2 * (2 * align + 33_000)  # yet most batches are small


def test_usual_batches_fill_every_slot():
    with planner(folder((40,), (50_000,)), 4096) as (nbytes, samples):
        for slots in (2, 3, 8):
            budget = batch_budget(samples, batch_size=4, slots=slots, align=4096, metadata=False)
            assert slots * nbytes([1, 9, 17, 33]) <= budget < slots * 4 * (50_000 * 1.25 + 2 * 4096 + 33_000)


def test_only_selected_samples_count():
    path = folder((40,), (*[401] * 19, 90_000))
    rows = np.arange(19)
    with planner(path, 512, rows=rows) as (_, samples):
        assert batch_budget(samples, batch_size=2, slots=2, align=512, metadata=False) < 180_000


def test_json_members_count_when_they_are_read():
    with planner(folder((6,), (401,)), 1) as (_, samples):
        without, read = (batch_budget(samples, batch_size=3, slots=2, align=1, metadata=told) for told in (False, True))
        sizes = np.sort(samples.gather("json_size", np.arange(6)))
        assert read - without >= 2 * sizes[-3:].sum()


# --- pieces of a windowed order --------------------------------------------------------------------------------------


@st.composite
def windows(draw, n):
    return WindowOrder(
        n=n,
        seed=draw(st.integers(0, 2**64 - 1)),
        lanes=draw(st.integers(1, 5)),
        extent_samples=draw(st.integers(1, 12)),
        window_extents=draw(st.integers(1, 6)),
    )


@settings(max_examples=100)
@given(
    path=SETS, data=st.data(), align=st.sampled_from(ALIGNS), metadata=st.booleans(), epoch=st.integers(0, 40),
    selected=st.booleans(),
)  # fmt: skip
def test_any_piece_fits(path, data, align, metadata, epoch, selected):
    with open_dataset(path) as dataset:
        total = len(dataset)
    rows = np.flatnonzero(data.draw(st.lists(st.booleans(), min_size=total, max_size=total))) if selected else None
    if rows is not None and not rows.size:
        rows = np.array([total - 1])
    with planner(path, align, rows=rows, metadata=metadata) as (nbytes, samples):
        order = data.draw(windows(len(samples)))
        most = piece_bytes(samples, order, align=align)
        for lane in range(order.lanes):
            for piece in order.pieces(lane):
                assert nbytes(samples.ids(order.members(epoch, piece))) <= most


def test_large_images_on_both_sides_of_where_an_extent_could_begin_fit():
    # Extents of ten samples: wherever the ring is cut, sample 9 and 10 may lie in one.
    path = folder((30,), (*[401] * 9, 50_000, 50_000, *[401] * 19))
    with planner(path, 1) as (nbytes, samples):
        order = WindowOrder(n=30, seed=0, lanes=1, extent_samples=10, window_extents=1)
        pieces = order.pieces(0)
        largest = max(nbytes(order.members(epoch, piece)) for epoch in range(20) for piece in pieces)
        assert 100_000 < largest <= piece_bytes(samples, order, align=1)


@pytest.mark.parametrize(("lanes", "extents", "times"), [(1, 4, 4), (1, 99, 20), (4, 99, 6), (20, 99, 2), (1, 1, 1)])
def test_a_piece_takes_no_more_than_its_window_and_its_lane_hold(lanes, extents, times):
    with planner(folder((200,), (9000,)), 1) as (nbytes, samples):
        order = WindowOrder(n=200, seed=0, lanes=lanes, extent_samples=10, window_extents=extents)
        extent = int(samples.gather("sample_size", np.arange(10)).sum())
        assert nbytes(np.arange(10)) <= piece_bytes(samples, order, align=1) < times * (1.05 * extent + GAP_BYTES)


def test_the_sizes_of_shards_and_extents_need_not_meet():
    for counts in ((200,), (1,) * 40 + (160,), (67, 66, 67)):
        with planner(folder(counts, (401, 9000, 700)), 1) as (_, samples):
            for length in (1, 3, 7, 64, 150):
                order = WindowOrder(n=200, seed=0, lanes=1, extent_samples=length, window_extents=1)
                sizes = samples.gather("sample_size", np.arange(200)) + 2
                ring = np.concatenate([sizes, sizes])
                longest = max(ring[at : at + length].sum() for at in range(200))
                assert piece_bytes(samples, order, align=1) == longest + 1


def test_small_extents_that_lie_close_together_fit():
    with planner(folder((30,), (401, 401, 401, 401, 401, 60000)), 1) as (nbytes, samples):
        order = WindowOrder(n=30, seed=0, lanes=1, extent_samples=2, window_extents=3)
        pieces = [order.members(epoch, piece) for epoch in range(30) for piece in order.pieces(0)]
        assert max(nbytes(piece) for piece in pieces) <= piece_bytes(samples, order, align=1)


def test_what_lies_between_the_two_ends_of_an_extent_that_closes_a_small_ring_fits():
    with planner(folder((7,), (3000,)), 1) as (nbytes, samples):
        order = WindowOrder(n=7, seed=0, lanes=1, extent_samples=4, window_extents=1)
        pieces = [order.members(epoch, piece) for epoch in range(20) for piece in order.pieces(0)]
        assert max(nbytes(piece) for piece in pieces) <= piece_bytes(samples, order, align=1)


@settings(max_examples=200)
@given(
    n=st.integers(1, 120), world=st.integers(1, 3), per_rank=st.integers(1, 3), share=st.integers(1, 30),
    extent=st.integers(1, 6), extents=st.integers(1, 4), last=st.sampled_from(["drop", "pad", "partial"]),
    data=st.data(),
)  # fmt: skip
def test_no_step_holds_more_pieces_than_said(n, world, per_rank, share, extent, extents, last, data):
    lanes, batch = world * per_rank, per_rank * share
    if last == "drop" and n < batch * world:
        last = "partial"
    plan = BatchPlan(
        n=n, batch_size=batch, world_size=world, rank=data.draw(st.integers(0, world - 1)), lanes=lanes, last_batch=last
    )
    order = WindowOrder(n=n, seed=1, lanes=lanes, extent_samples=extent, window_extents=extents)
    held, most = {}, 0
    for step in range(plan.steps):  # as WindowReading goes about it, when every batch before was released
        mine = set()
        for piece, _, _ in order.pieces_of(plan.positions(step)):
            mine.add(piece)
            most = max(most, len(mine | set(held.values())))
            held[piece.lane] = piece
    assert most <= pieces_held(plan, order)
