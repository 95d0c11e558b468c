"""The mixed order: exact shares, each part's own order, and nothing that depends on how positions are asked."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardkit.dataset.mixing import BLOCK, MixedOrder
from shardkit.dataset.order import MAX_SAMPLES, ORDER_VERSION, GlobalOrder, StoredOrder
from shardkit.dataset.steps import BatchPlan
from shardkit.dataset.window import WindowOrder
from shardkit.errors import ConfigError

TOP = 2**64 - 1


def mixed(sizes=(3000, 500), weights=(0.7, 0.3), seed=0):
    starts = np.concatenate([[0], np.cumsum(sizes)])
    parts = [(GlobalOrder(n, seed=at + 1), int(starts[at])) for at, n in enumerate(sizes)]
    return MixedOrder(parts, weights, seed)


def whole(order, epoch=0):
    return order.at(epoch, np.arange(order.n))


def parts_of(order, epoch=0):
    return order.draws(epoch, np.arange(order.n))[0]


mixes = st.builds(
    lambda pairs, seed: mixed(*zip(*pairs, strict=True), seed),
    st.lists(st.tuples(st.integers(1, 3000), st.floats(0.01, 1)), min_size=1, max_size=5),
    st.integers(0, TOP),
)


# --- the promise -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("epoch", "asked", "parts", "samples"),
    [
        (0, range(8), [1, 1, 1, 1, 1, 0, 1, 1], [3200, 3280, 3266, 3065, 3286, 2143, 3339, 3365]),
        (5, range(3000, 3008), [1, 0, 0, 1, 1, 0, 0, 1], [3014, 2674, 1046, 3228, 3221, 2228, 1378, 3261]),
    ],
)
def test_order_version_1_is_these_numbers_for_ever(epoch, asked, parts, samples):
    # A change here changes the samples of every resumed run: it needs a new ORDER_VERSION and a line in the CHANGELOG.
    assert ORDER_VERSION == 1
    order, positions = mixed(), np.array(asked)
    assert order.draws(epoch, positions)[0].tolist() == parts
    assert order.at(epoch, positions).tolist() == samples


def split_mix(state: int) -> int:
    z = (state + 0x9E3779B97F4A7C15) % 2**64
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
    return z ^ z >> 31


def scalar_block(shares, seed, epoch, block):
    """The parts of a block with Python's unbounded integers: slots in the order of a hash get part 0, 1, ..."""
    step = 0x9E3779B97F4A7C15
    state = split_mix((split_mix((split_mix(0x6D69786564) + seed) % 2**64) + epoch) % 2**64)
    state = split_mix((state + block * step) % 2**64)
    slots = sorted(range(BLOCK), key=lambda slot: (split_mix((state + slot * step) % 2**64) >> 10, slot))
    parts = [0] * BLOCK
    for slot, part in zip(slots, [k for k, share in enumerate(shares) for _ in range(share)], strict=True):
        parts[slot] = part
    return parts


@given(st.integers(0, TOP), st.integers(0, TOP), st.integers(0, 2**29))
@settings(max_examples=20)
def test_vectors_agree_with_one_number_at_a_time(seed, epoch, block):
    order = MixedOrder([(StoredOrder(2**39), 0), (StoredOrder(2**38), 2**39)], [3, 1], seed)
    parts, draws = order.draws(epoch, block * BLOCK + np.arange(BLOCK))
    expected = scalar_block(order.shares, seed, epoch, block)
    assert parts.tolist() == expected
    counts = [block * share for share in order.shares]
    for part, draw in zip(expected, draws.tolist(), strict=True):
        assert draw == counts[part]
        counts[part] += 1


# --- shares and sequences --------------------------------------------------------------------------------------------


@given(mixes, st.integers(0, 5))
@settings(max_examples=40)
def test_every_whole_block_holds_the_exact_shares(order, epoch):
    parts = parts_of(order, epoch)
    for first in range(0, order.n - BLOCK + 1, BLOCK):
        assert tuple(np.bincount(parts[first : first + BLOCK], minlength=len(order.shares))) == order.shares
    rest = np.bincount(parts[order.n - order.n % BLOCK :], minlength=len(order.shares))
    assert (rest <= order.shares).all()


@given(mixes, st.integers(0, 3))
@settings(max_examples=40)
def test_each_part_comes_in_its_own_order_lap_after_lap(order, epoch):
    parts, samples = parts_of(order, epoch), whole(order, epoch)
    for number, (own, start) in enumerate(order._parts):
        found = samples[parts == number] - start
        for lap in range(-(-len(found) // own.n)):
            assert lap < order.laps[number]
            some = found[lap * own.n : (lap + 1) * own.n]
            assert np.array_equal(some, own.at(epoch * order.laps[number] + lap, np.arange(own.n))[: len(some)])


def test_a_small_part_comes_several_times_and_each_time_in_a_new_order():
    order = mixed((5000, 100), (0.5, 0.5))
    assert order.laps == (1, 26)
    samples, parts = whole(order), parts_of(order)
    laps = (samples[parts == 1] - 5000)[: 25 * 100].reshape(-1, 100)
    assert all(sorted(lap.tolist()) == list(range(100)) for lap in laps)
    assert len({lap.tobytes() for lap in laps}) == 25
    following = (whole(order, 1)[parts_of(order, 1) == 1] - 5000)[:100]
    assert following.tobytes() not in {lap.tobytes() for lap in laps}


def test_a_large_part_gives_other_samples_in_each_epoch_and_none_twice():
    order = mixed((5000, 100), (0.1, 0.9))
    epochs = [samples[samples < 5000] for samples in (whole(order, 0), whole(order, 1))]
    for found in epochs:
        assert len(np.unique(found)) == len(found)
        assert 480 < len(found) < 540
    # Two drawings of 510 out of 5000 share about 52.
    assert len(np.intersect1d(*epochs)) < 100


def test_a_mix_of_stored_orders_keeps_each_in_order():
    order = MixedOrder([(StoredOrder(3000), 0), (StoredOrder(2000), 3000)], [2, 1], 0)
    samples, parts = whole(order), parts_of(order)
    for number, start, n in ((0, 0, 3000), (1, 3000, 2000)):
        found = samples[parts == number]
        assert np.array_equal(found, start + np.arange(len(found)) % n)


def test_windows_can_be_mixed():
    window = WindowOrder(n=4000, seed=5, lanes=1, extent_samples=20, window_extents=8)
    order = MixedOrder([(window, 0), (GlobalOrder(1000, 3), 4000)], [4, 1], 0)
    samples, parts = whole(order), parts_of(order)
    found = samples[parts == 0]
    assert np.array_equal(found[:4000], window.at(0, np.arange(4000))[: len(found)])


def test_one_part_is_its_own_order():
    own = GlobalOrder(5000, 9)
    assert np.array_equal(whole(MixedOrder([(own, 0)], [0.1], 7), 3), own.at(3, np.arange(5000)))


def test_parts_may_be_given_in_any_order_of_their_numbers():
    order = MixedOrder([(StoredOrder(10), 90), (StoredOrder(90), 0)], [1, 1], 0)
    samples, parts = whole(order), parts_of(order)
    assert set(samples[parts == 0].tolist()) <= set(range(90, 100))
    assert samples[parts == 1].max() < 90


# --- a function of the position --------------------------------------------------------------------------------------


@given(mixes, st.integers(0, 3), st.data())
@settings(max_examples=40)
def test_a_position_has_its_sample_whatever_is_asked_beside_it(order, epoch, data):
    asked = np.array(data.draw(st.lists(st.integers(0, order.n - 1), max_size=50)), np.int64)
    before = asked.copy()
    assert np.array_equal(order.at(epoch, asked), whole(order, epoch)[asked])
    assert np.array_equal(asked, before)
    assert order.at(epoch, asked).dtype == np.int64


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_ranks_together_get_the_mix_for_every_world_size(world_size):
    order = mixed()
    plans = [
        BatchPlan(n=order.n, batch_size=64 // world_size, world_size=world_size, rank=rank, lanes=4, last_batch="drop")
        for rank in range(world_size)
    ]
    truth = whole(order, 2)
    for step in range(plans[0].steps):
        found = np.concatenate([order.at(2, plan.positions(step)) for plan in plans])
        assert np.array_equal(np.sort(found), np.sort(truth[step * 64 : (step + 1) * 64]))


def test_seed_and_epoch_choose_the_mix_and_equal_ones_give_it_again():
    assert np.array_equal(whole(mixed(seed=4), 1), whole(mixed(seed=4), 1))
    schedules = {parts_of(mixed(seed=seed), epoch).tobytes() for seed in range(4) for epoch in range(4)}
    assert len(schedules) == 16


def test_the_last_positions_of_a_huge_mix_are_found_at_once():
    half = MAX_SAMPLES // 2
    order = MixedOrder([(GlobalOrder(half, 1), 0), (GlobalOrder(half, 2), half)], [0.7, 0.3], 0)
    samples = order.at(3, np.arange(MAX_SAMPLES - 100, MAX_SAMPLES))
    assert samples.min() >= 0
    assert samples.max() < MAX_SAMPLES
    assert order.laps == (2, 1)


# --- random enough ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [0.5, 0.25, 0.05])
@pytest.mark.parametrize("lag", [1, 2, 7, 512])
def test_a_part_at_one_position_tells_nothing_of_another_in_its_block(share, lag):
    blocks = 2000
    n = blocks * BLOCK // 2
    order = mixed((n, n), (share, 1 - share), seed=lag)
    hit = (parts_of(order) == 0).reshape(blocks, BLOCK)
    k = order.shares[0]
    pairs = (hit[:, :-lag] & hit[:, lag:]).sum()
    # k of 1024 places at random: two of them are both taken with probability k (k - 1) / (1024 * 1023).
    expected = blocks * (BLOCK - lag) * k * (k - 1) / (BLOCK * (BLOCK - 1))
    assert abs(pairs - expected) < 5 * math.sqrt(expected)


@pytest.mark.parametrize("other", ["the next block", "the next epoch", "the next seed"])
def test_the_parts_of_two_blocks_are_independent(other):
    n = 1000 * BLOCK
    order = mixed((n // 2, n // 2), (0.25, 0.75))
    hit = (parts_of(order) == 0).reshape(-1, BLOCK)
    if other == "the next block":
        again = np.roll(hit, 1, axis=0)
    elif other == "the next epoch":
        again = (parts_of(order, 1) == 0).reshape(-1, BLOCK)
    else:
        again = (parts_of(mixed((n // 2, n // 2), (0.25, 0.75), seed=1)) == 0).reshape(-1, BLOCK)
    expected = n / 16
    assert abs((hit & again).sum() - expected) < 5 * math.sqrt(expected)


def test_every_place_of_a_block_is_equally_often_of_a_part():
    blocks = 4000
    order = mixed((blocks * BLOCK // 2,) * 2, (0.25, 0.75))
    counts = (parts_of(order) == 0).reshape(blocks, BLOCK).sum(axis=0)
    # Variance of one place: blocks * p * (1 - p); the counts add up exactly, so one degree of freedom is gone.
    chi = ((counts - blocks / 4) ** 2 / (blocks * 3 / 16)).sum()
    assert abs(chi - (BLOCK - 1)) < 5 * math.sqrt(2 * BLOCK)


# --- refused ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("weights", "shares"),
    [
        ([1, 1], (512, 512)),
        ([0.7, 0.3], (717, 307)),
        ([7, 3], (717, 307)),
        ([1, 1, 1], (342, 341, 341)),
        ([1e308, 1e308], (512, 512)),
        ([5e-324, 5e-324], (512, 512)),
        ([1023, 1], (1023, 1)),
        ([1, 2, 3, 4], (102, 205, 307, 410)),
    ],
)
def test_shares_are_the_weights_to_the_nearest_position(weights, shares):
    assert mixed((10,) * len(weights), weights).shares == shares


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ([1], "expected 2; found 1"),
        ([1, 0], "expected > 0; found 0"),
        ([1, -1], "found -1"),
        ([1, math.nan], "found nan"),
        ([1, math.inf], "found inf"),
        ([10_000, 1], "at least 1/1024 of all weights; found 0.0001"),
    ],
)
def test_weights_that_make_no_mix_are_refused(weights, message):
    with pytest.raises(ConfigError, match=message):
        mixed((10, 10), weights)


@pytest.mark.parametrize("starts", [(0, 9), (0, 11), (1, 11), (10, 10)])
def test_numbers_that_overlap_or_leave_a_gap_are_refused(starts):
    with pytest.raises(ConfigError, match="overlap or leave a gap"):
        MixedOrder([(StoredOrder(10), start) for start in starts], [1, 1], 0)


def test_arguments_out_of_range_are_refused():
    with pytest.raises(ConfigError, match="samples of a mix"):
        MixedOrder([], [], 0)
    for seed in (-1, 2**64):
        with pytest.raises(ConfigError, match="seed"):
            mixed(seed=seed)
    order = mixed()
    for epoch in (-1, 2**64):
        with pytest.raises(ConfigError, match="epoch"):
            order.at(epoch, np.arange(3))
    for wrong in (-1, order.n):
        with pytest.raises(ConfigError, match="outside the epoch"):
            order.at(0, np.array([0, wrong]))
