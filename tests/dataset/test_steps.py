from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from shardkit.dataset.order import GlobalOrder, Order, StoredOrder
from shardkit.dataset.steps import BatchPlan
from shardkit.dataset.window import WindowOrder
from shardkit.errors import ConfigError

TOP = 2**64 - 1


def plan(**changes) -> BatchPlan:
    values = {"n": 100, "batch_size": 4, "world_size": 1, "rank": 0, "lanes": 1, "last_batch": "partial"}
    return BatchPlan(**values | changes)


@dataclass(frozen=True)
class Run:
    """What stays as it is when a run goes on with other ranks."""

    order: Order
    lanes: int
    global_batch: int
    last_batch: str

    @property
    def n(self) -> int:
        return self.order.n

    def worlds(self) -> list[int]:
        return [size for size in range(1, self.lanes + 1) if self.lanes % size == 0]

    def ranks(self, world_size: int) -> list[BatchPlan]:
        return [
            BatchPlan(
                n=self.n,
                batch_size=self.global_batch // world_size,
                world_size=world_size,
                rank=rank,
                lanes=self.lanes,
                last_batch=self.last_batch,
            )
            for rank in range(world_size)
        ]

    def batch(self, rank: BatchPlan, epoch: int, step: int) -> list[int]:
        return self.order.at(epoch, rank.positions(step)).tolist()


@st.composite
def runs(draw) -> Run:
    lanes = draw(st.integers(1, 12))
    global_batch = lanes * draw(st.integers(1, 5))
    last_batch = draw(st.sampled_from(["drop", "pad", "partial"]))
    n = draw(st.integers(global_batch if last_batch == "drop" else 1, 400))
    seed = draw(st.integers(0, TOP))
    extents = {"extent_samples": draw(st.integers(1, 30)), "window_extents": draw(st.integers(1, 5))}
    window = WindowOrder(n=n, seed=seed, lanes=lanes, **extents)
    return Run(draw(st.sampled_from([StoredOrder(n), GlobalOrder(n, seed), window])), lanes, global_batch, last_batch)


@given(runs(), st.integers(0, 5))
@example(Run(StoredOrder(1), 12, 60, "pad"), 0)
@example(Run(WindowOrder(n=5, seed=0, lanes=12, extent_samples=2, window_extents=2), 12, 24, "partial"), 0)
def test_all_ranks_together_hand_out_the_epoch(run, epoch):
    n, full = run.n, run.global_batch
    in_order = run.order.at(epoch, np.arange(n)).tolist()
    assert sorted(in_order) == list(range(n))
    for world_size in run.worlds():
        ranks = run.ranks(world_size)
        assert len({rank.steps for rank in ranks}) == 1
        out = Counter(
            itertools.chain.from_iterable(run.batch(rank, epoch, step) for rank in ranks for step in range(rank.steps))
        )
        if run.last_batch == "drop":
            assert (ranks[0].dropped, ranks[0].padded) == (n % full, 0)
            assert out == Counter(in_order[: n - n % full])
        elif run.last_batch == "pad":
            assert ranks[0].dropped == 0
            assert 0 <= ranks[0].padded < full
            assert (n + ranks[0].padded) % full == 0
            assert out == Counter(itertools.islice(itertools.cycle(in_order), n + ranks[0].padded))
        else:
            assert (ranks[0].dropped, ranks[0].padded) == (0, 0)
            assert out == Counter(in_order)


@given(runs(), st.integers(0, 5))
def test_global_batches_are_the_same_for_every_world_size(run, epoch):
    def global_batches(world_size: int) -> list[list[int]]:
        ranks = run.ranks(world_size)
        return [
            sorted(itertools.chain.from_iterable(run.batch(rank, epoch, step) for rank in ranks))
            for step in range(ranks[0].steps)
        ]

    alone = global_batches(1)
    for world_size in run.worlds():
        assert global_batches(world_size) == alone


@given(runs())
def test_ranks_share_no_position(run):
    for world_size in run.worlds():
        ranks = run.ranks(world_size)
        seen = [
            set(np.concatenate([rank.positions(step) for step in range(rank.steps)]).tolist()) if rank.steps else set()
            for rank in ranks
        ]
        # Padding alone hands a position out twice, and from an epoch's beginning.
        shared = {position for one, other in itertools.combinations(seen, 2) for position in one & other}
        assert shared <= set(range(ranks[0].padded))


@given(runs())
def test_a_rank_takes_the_positions_of_its_steps_but_for_the_padding(run):
    for world_size in run.worlds():
        for rank in run.ranks(world_size):
            count = sum(len(rank.positions(step)) for step in range(rank.steps))
            taken = np.concatenate([rank.positions(step) for step in range(rank.steps)] or [np.zeros(0, np.int64)])
            own = [position for position in range(-1, run.n + 1) if rank.takes(position)]
            assert own == taken[: len(own)].tolist()
            assert 0 <= count - len(own) <= rank.padded


@given(runs())
def test_sizes_are_equal_but_for_the_last_partial_step(run):
    for world_size in run.worlds():
        ranks = run.ranks(world_size)
        for step in range(ranks[0].steps):
            sizes = [len(rank.positions(step)) for rank in ranks]
            last = step == ranks[0].steps - 1
            if last and run.last_batch == "partial":
                assert sum(sizes) == run.n - step * run.global_batch
                assert max(sizes) - min(sizes) <= 1
                assert sizes == sorted(sizes, reverse=True)
            else:
                assert set(sizes) == {run.global_batch // world_size}


@given(runs())
def test_a_rank_serves_whole_lanes(run):
    for world_size in run.worlds():
        for rank in run.ranks(world_size):
            mine = [lane for lane in range(run.lanes) if lane % world_size == rank.rank]
            for step in range(run.n // run.global_batch):
                found = Counter((rank.positions(step) % run.lanes).tolist())
                assert found == dict.fromkeys(mine, run.global_batch // run.lanes)


@given(runs(), st.integers(0, 3))
def test_no_two_ranks_read_from_one_piece_of_the_window_order(run, epoch):
    extents = {"extent_samples": 7, "window_extents": 3}
    order = WindowOrder(n=run.n, seed=1, lanes=run.lanes, **extents)
    for world_size in run.worlds():
        read = [
            {piece for step in range(rank.steps) for piece, _, _ in order.pieces_of(rank.positions(step))}
            for rank in run.ranks(world_size)
            if rank.padded == 0
        ]
        assert sum(map(len, read)) == len(set().union(*read))


def test_a_batch_is_a_slice_of_the_epoch():
    assert plan(n=5000, batch_size=7).positions(3).tolist() == list(range(21, 28))


def test_batch_size_counts_one_rank_as_pytorch_does():
    of_four = plan(n=96, batch_size=4, world_size=4, lanes=4, rank=3)
    assert of_four.global_batch == 16
    assert of_four.steps == 6
    assert of_four.positions(0).tolist() == [3, 7, 11, 15]


def test_padding_starts_again_at_the_first_positions_of_the_epoch():
    padded = plan(n=10, batch_size=4, last_batch="pad")
    assert padded.padded == 2
    assert padded.positions(2).tolist() == [8, 9, 0, 1]


def test_padding_goes_round_as_often_as_it_must():
    assert plan(n=3, batch_size=8, last_batch="pad").positions(0).tolist() == [0, 1, 2, 0, 1, 2, 0, 1]


def test_partial_gives_late_ranks_an_empty_batch_rather_than_fewer_steps():
    ranks = [plan(n=10, batch_size=2, world_size=4, lanes=4, rank=rank) for rank in range(4)]
    assert [rank.steps for rank in ranks] == [2, 2, 2, 2]
    assert [rank.positions(1).tolist() for rank in ranks] == [[8], [9], [], []]


def test_a_huge_epoch_costs_no_more_than_a_small_one():
    late = plan(n=2**40, batch_size=4, world_size=8, rank=7, lanes=8)
    assert late.steps == 2**35
    assert late.positions(2**35 - 1).tolist() == [2**40 - 32 + lane for lane in (7, 15, 23, 31)]


def test_a_world_size_that_does_not_divide_the_lanes_is_refused_with_those_that_do():
    with pytest.raises(ConfigError, match=r"12 lanes .* 5 ranks; expected a world size of 1, 2, 3, 4, 6, 12; found 5"):
        plan(lanes=12, world_size=5, batch_size=12)


@given(st.integers(1, 60), st.integers(1, 70))
def test_exactly_the_divisors_of_the_lanes_are_world_sizes(lanes, world_size):
    settings = {"lanes": lanes, "world_size": world_size, "batch_size": lanes}
    divisors = [size for size in range(1, lanes + 1) if lanes % size == 0]
    if world_size in divisors:
        assert plan(**settings).global_batch == lanes * world_size
    else:
        with pytest.raises(ConfigError, match=f"expected a world size of {', '.join(map(str, divisors))}; "):
            plan(**settings)


def test_a_batch_that_does_not_fill_the_lanes_is_refused_with_the_multiple_to_take():
    with pytest.raises(ConfigError, match=r"multiples of 4 \(8 lanes on 2 ranks\); found 6"):
        plan(lanes=8, world_size=2, batch_size=6)


def test_dropping_the_whole_epoch_is_refused():
    assert plan(n=4, batch_size=4, last_batch="drop").steps == 1
    with pytest.raises(ConfigError, match="at least 4 samples"):
        plan(n=3, batch_size=4, last_batch="drop")


@pytest.mark.parametrize(
    "wrong",
    [
        {"n": 0},
        {"batch_size": 0},
        {"world_size": 0},
        {"rank": 1},
        {"rank": -1},
        {"lanes": 0},
        {"last_batch": "keep"},
    ],
)
def test_settings_out_of_range_are_refused_by_name(wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        plan(**wrong)


def test_steps_outside_the_epoch_are_refused():
    one = plan(n=10, batch_size=4)
    for step in (-1, 3):
        with pytest.raises(ConfigError, match=f"expected 0..2; found {step}"):
            one.positions(step)
