from __future__ import annotations

import hashlib
import itertools
import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardkit.dataset.order import MAX_SAMPLES, ORDER_VERSION, GlobalOrder, StoredOrder, permute, permute_parts
from shardkit.errors import ConfigError

TOP = 2**64 - 1


def whole(n: int, seed: int = 0, epoch: int = 0) -> np.ndarray:
    return permute(np.arange(n), n, seed=seed, epoch=epoch)


def excess(counts: np.ndarray, expected: float, freedom: int) -> float:
    """Chi-square, in standard deviations above what chance gives."""
    chi = float(((counts - expected) ** 2 / expected).sum())
    return (chi - freedom) / math.sqrt(2 * freedom)


# --- the promise -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("n", "seed", "epoch", "samples"),
    [
        (8, 0, 0, [0, 7, 2, 5, 4, 6, 3, 1]),
        (8, 0, 1, [4, 1, 7, 5, 0, 6, 3, 2]),
        (1000, 7, 3, [87, 892, 25, 40, 835, 879, 922, 760]),
        (2048, 0, 0, [557, 1552, 1642, 1481, 1282, 918, 1115, 1695]),
        (2049, 0, 0, [358, 849, 718, 31, 1985, 1487, 565, 407]),
        (1281167, 0, 0, [1007391, 1188933, 818547, 485138, 134100, 459100, 1008036, 822110]),
        (1281167, 1, 0, [1272996, 953153, 752677, 92559, 348080, 1189026, 472203, 126196]),
        (1281167, 0, 1, [463258, 855599, 243915, 1236262, 1181322, 908007, 721069, 146219]),
        (
            MAX_SAMPLES,
            TOP,
            TOP,
            [
                202630855500,
                354574357313,
                810928008945,
                981234944599,
                829316751957,
                281811490295,
                773337211933,
                711171006888,
            ],
        ),
    ],
)
def test_order_version_1_is_these_numbers_for_ever(n, seed, epoch, samples):
    # A change here changes the samples of every resumed run: it needs a new ORDER_VERSION and a line in the CHANGELOG.
    assert ORDER_VERSION == 1
    assert permute(np.arange(8) * (n // 8), n, seed=seed, epoch=epoch).tolist() == samples


@pytest.mark.parametrize(
    ("n", "digest"),
    [
        (1000, "0ff000e2db2f63a15ea93852a8961d84fb31a39a9149f9593a5253e7a0a755eb"),
        (100_003, "a57aeb8581f8531bd43991fe7f34d4e9662112cef248e642679dd3a8eb3d50ca"),
    ],
)
def test_whole_epochs_keep_their_digest(n, digest):
    assert hashlib.sha256(whole(n, seed=42, epoch=5).astype("<i8").tobytes()).hexdigest() == digest


def split_mix(state: int) -> int:
    z = (state + 0x9E3779B97F4A7C15) % 2**64
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
    return z ^ z >> 31


def scalar_order(position: int, n: int, state: int) -> int:
    """The same order one number at a time, with Python's unbounded integers and true division."""
    columns = math.isqrt(n - 1) + 1
    rows = math.ceil(n / columns)
    while True:
        row, column = divmod(position, columns)
        for number in range(8):
            key = split_mix((state + (number + 1) * 0x9E3779B97F4A7C15) % 2**64)
            z = (column if number % 2 == 0 else row) + key
            z = z * 0xBF58476D1CE4E5B9 % 2**64
            z = (z ^ z >> 29) * 0x94D049BB133111EB % 2**64 >> 32
            if number % 2 == 0:
                row = (row + (z * rows >> 32)) % rows
            else:
                column = (column + (z * columns >> 32)) % columns
        position = row * columns + column
        if position < n:
            return position


@given(st.integers(2049, MAX_SAMPLES), st.integers(0, TOP), st.integers(0, TOP), st.data())
def test_vectors_agree_with_one_number_at_a_time(n, seed, epoch, data):
    positions = data.draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=5))
    state = split_mix((split_mix(seed) + epoch) % 2**64)
    expected = [scalar_order(position, n, state) for position in positions]
    assert permute(positions, n, seed=seed, epoch=epoch).tolist() == expected


@given(st.lists(st.tuples(st.integers(1, MAX_SAMPLES), st.integers(0, TOP), st.integers(0, TOP)), max_size=8))
def test_parts_agree_with_one_number_at_a_time(asked):
    sizes = np.array([size for size, _, _ in asked], np.int64)
    positions = np.array([position % size for size, position, _ in asked], np.int64)
    states = np.array([state for _, _, state in asked], np.uint64)
    expected = [scalar_order(position % size, size, state) for size, position, state in asked]
    assert permute_parts(positions, sizes, states).tolist() == expected


# --- a bijection -----------------------------------------------------------------------------------------------------


def test_every_small_epoch_holds_every_sample_once():
    for n in range(1, 301):
        assert sorted(whole(n, seed=n).tolist()) == list(range(n))


def test_every_small_part_holds_every_sample_once():
    for n in range(1, 301):
        found = permute_parts(np.arange(n), np.array([n]), np.array([n], np.uint64))
        assert sorted(found.tolist()) == list(range(n))


def test_a_part_has_its_order_whatever_is_asked_beside_it():
    sizes = np.array([1, 2, 7, 300, 5000, 70_001])
    states = np.array([9, 8, 7, 6, 5, 4], np.uint64)
    part = np.random.default_rng(1).integers(0, len(sizes), 3000)
    positions = np.random.default_rng(2).integers(0, 1 << 30, 3000) % sizes[part]
    together = permute_parts(positions, sizes[part], states[part])
    for number in range(len(sizes)):
        alone = permute_parts(positions[part == number], sizes[[number]], states[[number]])
        assert np.array_equal(together[part == number], alone)


@pytest.mark.parametrize("n", [2047, 2048, 2049, 50 * 51, 51 * 51, 51 * 51 + 1, 65_537, 1_000_003])
def test_large_epochs_hold_every_sample_once(n):
    assert np.array_equal(np.sort(whole(n, seed=3, epoch=9)), np.arange(n))


@pytest.mark.parametrize("n", [2**31 + 1, 10**11, MAX_SAMPLES - 1, MAX_SAMPLES])
def test_no_two_of_many_positions_share_a_sample_in_a_huge_epoch(n):
    positions = np.unique(np.linspace(0, n - 1, 200_000).astype(np.int64))
    samples = permute(positions, n, seed=1, epoch=1)
    assert samples.min() >= 0
    assert samples.max() < n
    assert len(np.unique(samples)) == len(positions)


def test_a_position_has_its_sample_whatever_is_asked_beside_it():
    n = 50_000
    all_at_once = whole(n, seed=8)
    shuffled = np.random.default_rng(0).permutation(n)
    assert np.array_equal(permute(shuffled, n, seed=8, epoch=0), all_at_once[shuffled])
    assert permute([77], n, seed=8, epoch=0)[0] == all_at_once[77]


@pytest.mark.parametrize("n", [10, 5000])
def test_shape_is_kept_and_arguments_are_not_changed(n):
    positions = np.arange(10).reshape(2, 5)
    before = positions.copy()
    found = permute(positions, n, seed=0, epoch=0)
    assert found.shape == (2, 5)
    assert found.dtype == np.int64
    assert np.array_equal(positions, before)
    assert permute(np.empty(0, np.int64), n, seed=0, epoch=0).shape == (0,)


def test_the_stored_order_is_every_position_itself():
    positions = np.array([3, 0, 9])
    assert StoredOrder(10).at(5, positions).tolist() == [3, 0, 9]
    for wrong in (-1, 10):
        with pytest.raises(ConfigError, match=f"expected 0..9; found {wrong}"):
            StoredOrder(10).at(0, np.array([0, wrong]))


@pytest.mark.parametrize("n", [10, 5000])
def test_the_global_order_is_the_permutation_of_its_seed(n):
    assert np.array_equal(GlobalOrder(n, 6).at(2, np.arange(n)), whole(n, seed=6, epoch=2))
    with pytest.raises(ConfigError, match=f"expected 0..{n - 1}; found {n}"):
        GlobalOrder(n, 6).at(2, np.array([n]))


@pytest.mark.parametrize("n", [10, 5000])
def test_positions_outside_the_epoch_are_refused(n):
    for wrong in (-1, n, 2**62):
        with pytest.raises(ConfigError, match=f"expected 0..{n - 1}; found {wrong}"):
            permute([0, wrong], n, seed=0, epoch=0)


@pytest.mark.parametrize("wrong", [-1, 10, 2**62])
def test_positions_outside_their_part_are_refused_rather_than_walked_for_ever(wrong):
    states = np.zeros(2, np.uint64)
    for sizes in ([10], [20, 10]):
        with pytest.raises(ConfigError, match=f"outside its part; expected 0..9; found {wrong}"):
            permute_parts(np.array([0, wrong]), np.array(sizes), states[: len(sizes)])


@pytest.mark.parametrize("wrong", [{"n": 0}, {"n": MAX_SAMPLES + 1}, {"seed": -1}, {"seed": 2**64}, {"epoch": -1}])
def test_arguments_out_of_range_are_refused(wrong):
    with pytest.raises(ConfigError, match="out of range"):
        permute([0], **{"n": 10, "seed": 0, "epoch": 0} | wrong)


# --- random enough ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [2, 3, 4, 5])
def test_few_samples_come_in_all_orders_equally_often(n):
    epochs = 120 * math.factorial(n)
    seen = Counter(tuple(whole(n, seed=1, epoch=epoch).tolist()) for epoch in range(epochs))
    counts = np.array([seen[found] for found in itertools.permutations(range(n))])
    assert excess(counts, 120, len(counts) - 1) < 4


@pytest.mark.parametrize("n", [16, 97, 2100])
def test_every_sample_comes_equally_often_at_every_position(n):
    epochs = 40 * n if n < 1000 else 1500
    bins = min(n, 100)
    counts = np.zeros((bins, bins))
    positions = np.arange(n)
    for epoch in range(epochs):
        samples = permute(positions, n, seed=2, epoch=epoch)
        counts += np.histogram2d(positions, samples, bins=bins, range=[[0, n], [0, n]])[0]
    expected = np.outer(*2 * [np.histogram(positions, bins=bins, range=(0, n))[0]]) * epochs / n
    freedom = (bins - 1) ** 2
    # Cells at the edges of bins hold one sample more or less; `expected` says so.
    assert excess(counts, expected, freedom) < 4


@pytest.mark.parametrize("n", [2, 3, 5, 16, 97])
def test_every_sample_of_a_part_comes_equally_often_at_every_position(n):
    parts = 200 * n
    states = np.random.default_rng(3).integers(0, TOP, parts, np.uint64, endpoint=True)
    positions = np.tile(np.arange(n), parts)
    samples = permute_parts(positions, np.full(n * parts, n), np.repeat(states, n))
    counts = np.histogram2d(positions, samples, bins=n, range=[[0, n], [0, n]])[0]
    assert excess(counts, parts / n, (n - 1) ** 2) < 4


@pytest.mark.parametrize("n", [100_003, 1_281_167])
@pytest.mark.parametrize("lag", ["neighbour", "row", "two rows"])
def test_positions_that_are_close_lead_to_samples_that_are_not(n, lag):
    columns = math.isqrt(n - 1) + 1
    distance = {"neighbour": 1, "row": columns, "two rows": 2 * columns}[lag]
    counts = np.zeros(200)
    for epoch in range(3):
        samples = whole(n, seed=11, epoch=epoch)
        counts += np.histogram((samples[distance:] - samples[:-distance]) % n, bins=200, range=(0, n))[0]
    assert excess(counts, counts.sum() / 200, 199) < 4


@pytest.mark.parametrize("n", [900, 100_003])
def test_seeds_and_epochs_give_unrelated_orders(n):
    settings = [(0, 0), (0, 1), (1, 0), (1, 1), (2**32, 0), (0, 2**32), (TOP, 0), (0, TOP)]
    orders = [whole(n, seed=seed, epoch=epoch) for seed, epoch in settings]
    for one, other in itertools.combinations(orders, 2):
        assert (one == other).sum() < 10  # chance gives 1, whatever n is
        assert abs(np.corrcoef(one, other)[0, 1]) < 5 / math.sqrt(n)
