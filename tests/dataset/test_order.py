from __future__ import annotations

import hashlib
import itertools
import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from shardkit.dataset import order
from shardkit.dataset.order import MAX_SAMPLES, ORDER_VERSION, LoaderOrder, permute
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


def scalar_order(position: int, n: int, seed: int, epoch: int) -> int:
    """The same order one number at a time, with Python's unbounded integers and true division."""
    state = split_mix((split_mix(seed) + epoch) % 2**64)
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


@given(st.integers(2049, 10**9), st.integers(0, TOP), st.integers(0, TOP), st.data())
def test_vectors_agree_with_one_number_at_a_time(n, seed, epoch, data):
    positions = data.draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=5))
    expected = [scalar_order(position, n, seed, epoch) for position in positions]
    assert permute(positions, n, seed=seed, epoch=epoch).tolist() == expected


# --- a bijection -----------------------------------------------------------------------------------------------------


def test_every_small_epoch_holds_every_sample_once():
    for n in range(1, 301):
        assert sorted(whole(n, seed=n).tolist()) == list(range(n))


def test_the_network_is_a_bijection_for_every_small_n_too():
    for n in range(1, 301):
        found = order._walk(np.arange(n, dtype=np.uint64), n, state=n)
        assert sorted(found.tolist()) == list(range(n))


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


@pytest.mark.parametrize("n", [10, 5000])
def test_positions_outside_the_epoch_are_refused(n):
    for wrong in (-1, n, 2**62):
        with pytest.raises(ConfigError, match=f"expected 0..{n - 1}; found {wrong}"):
            permute([0, wrong], n, seed=0, epoch=0)


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


# --- batches and ranks -----------------------------------------------------------------------------------------------


def loader(**changes) -> LoaderOrder:
    values = {
        "n": 100,
        "batch_size": 4,
        "world_size": 1,
        "rank": 0,
        "lanes": 1,
        "last_batch": "partial",
        "shuffle": "global",
        "seed": 0,
    }
    return LoaderOrder(**values | changes)


@st.composite
def runs(draw) -> dict[str, object]:
    lanes = draw(st.integers(1, 12))
    global_batch = lanes * draw(st.integers(1, 5))
    last_batch = draw(st.sampled_from(["drop", "pad", "partial"]))
    return {
        "n": draw(st.integers(global_batch if last_batch == "drop" else 1, 400)),
        "lanes": lanes,
        "last_batch": last_batch,
        "shuffle": draw(st.sampled_from(["global", "none"])),
        "seed": draw(st.integers(0, TOP)),
    } | {"global_batch": global_batch}


def ranks_of(run: dict[str, object], world_size: int) -> list[LoaderOrder]:
    settings = {name: value for name, value in run.items() if name != "global_batch"}
    batch_size = run["global_batch"] // world_size
    return [
        LoaderOrder(**settings, batch_size=batch_size, world_size=world_size, rank=rank) for rank in range(world_size)
    ]


def worlds(run: dict[str, object]) -> list[int]:
    return [size for size in range(1, run["lanes"] + 1) if run["lanes"] % size == 0]


@given(runs(), st.integers(0, 5))
@example({"n": 1, "lanes": 12, "last_batch": "pad", "shuffle": "none", "seed": 0, "global_batch": 60}, 0)
def test_all_ranks_together_hand_out_the_epoch(run, epoch):
    n, full = run["n"], run["global_batch"]
    for world_size in worlds(run):
        ranks = ranks_of(run, world_size)
        assert len({rank.steps for rank in ranks}) == 1
        out = Counter(
            sample for rank in ranks for step in range(rank.steps) for sample in rank.batch(epoch, step).tolist()
        )
        in_order = list(range(n)) if run["shuffle"] == "none" else whole(n, run["seed"], epoch).tolist()
        if run["last_batch"] == "drop":
            assert ranks[0].dropped == n % full
            assert out == Counter(in_order[: n - n % full])
        elif run["last_batch"] == "pad":
            assert 0 <= ranks[0].padded < full
            assert out == Counter(itertools.islice(itertools.cycle(in_order), n + ranks[0].padded))
        else:
            assert (ranks[0].dropped, ranks[0].padded) == (0, 0)
            assert out == Counter(in_order)


@given(runs(), st.integers(0, 5))
def test_global_batches_are_the_same_for_every_world_size(run, epoch):
    def global_batches(world_size: int) -> list[list[int]]:
        ranks = ranks_of(run, world_size)
        return [
            sorted(np.concatenate([rank.batch(epoch, step) for rank in ranks]).tolist())
            for step in range(ranks[0].steps)
        ]

    alone = global_batches(1)
    for world_size in worlds(run):
        assert global_batches(world_size) == alone


@given(runs())
def test_sizes_are_equal_but_for_the_last_partial_step(run):
    for world_size in worlds(run):
        ranks = ranks_of(run, world_size)
        for step in range(ranks[0].steps):
            sizes = [len(rank.batch(0, step)) for rank in ranks]
            last = step == ranks[0].steps - 1
            if last and run["last_batch"] == "partial":
                assert sum(sizes) == run["n"] - step * run["global_batch"]
                assert max(sizes) - min(sizes) <= 1
                assert sizes == sorted(sizes, reverse=True)
            else:
                assert set(sizes) == {run["global_batch"] // world_size}


@given(runs())
def test_a_rank_serves_whole_lanes(run):
    lanes = run["lanes"]
    for world_size in worlds(run):
        for rank in ranks_of(run, world_size):
            whole_steps = run["n"] // run["global_batch"]
            for step in range(whole_steps):
                found = Counter((rank.positions(step) % lanes).tolist())
                mine = [lane for lane in range(lanes) if lane % world_size == rank.rank]
                assert found == dict.fromkeys(mine, run["global_batch"] // lanes)


def test_a_batch_is_a_slice_of_the_epoch():
    one = loader(n=5000, batch_size=7, seed=4)
    assert np.array_equal(one.batch(2, 3), whole(5000, seed=4, epoch=2)[21:28])
    assert np.array_equal(loader(n=5000, batch_size=7, shuffle="none").batch(2, 3), np.arange(21, 28))


def test_batch_size_counts_one_rank_as_pytorch_does():
    of_four = loader(n=96, batch_size=4, world_size=4, lanes=4, rank=3)
    assert of_four.global_batch == 16
    assert of_four.steps == 6
    assert len(of_four.batch(0, 0)) == 4


def test_padding_starts_again_at_the_first_positions_of_the_epoch():
    padded = loader(n=10, batch_size=4, last_batch="pad", seed=5)
    in_order = whole(10, seed=5, epoch=1).tolist()
    assert padded.padded == 2
    assert padded.batch(1, 2).tolist() == [*in_order[8:], *in_order[:2]]


def test_padding_goes_round_as_often_as_it_must():
    assert loader(n=3, batch_size=8, last_batch="pad", shuffle="none").batch(0, 0).tolist() == [0, 1, 2, 0, 1, 2, 0, 1]


def test_partial_gives_late_ranks_an_empty_batch_rather_than_fewer_steps():
    ranks = [loader(n=10, batch_size=2, world_size=4, lanes=4, rank=rank, shuffle="none") for rank in range(4)]
    assert [rank.steps for rank in ranks] == [2, 2, 2, 2]
    assert [rank.batch(0, 1).tolist() for rank in ranks] == [[8], [9], [], []]


def test_a_world_size_that_does_not_divide_the_lanes_is_refused_with_those_that_do():
    with pytest.raises(ConfigError, match=r"12 lanes .* 5 ranks; expected a world size of 1, 2, 3, 4, 6, 12; found 5"):
        loader(lanes=12, world_size=5, batch_size=12)


def test_a_batch_that_does_not_fill_the_lanes_is_refused_with_the_multiple_to_take():
    with pytest.raises(ConfigError, match=r"multiples of 4 \(8 lanes on 2 ranks\); found 6"):
        loader(lanes=8, world_size=2, batch_size=6)


def test_dropping_the_whole_epoch_is_refused():
    assert loader(n=4, batch_size=4, last_batch="drop").steps == 1
    with pytest.raises(ConfigError, match="at least 4 samples"):
        loader(n=3, batch_size=4, last_batch="drop")


@pytest.mark.parametrize(
    "wrong",
    [
        {"n": 0},
        {"batch_size": 0},
        {"world_size": 0},
        {"rank": 1},
        {"rank": -1},
        {"lanes": 0},
        {"seed": -1},
        {"last_batch": "keep"},
        {"shuffle": "window"},
    ],
)
def test_settings_out_of_range_are_refused_by_name(wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        loader(**wrong)


def test_steps_outside_the_epoch_are_refused():
    one = loader(n=10, batch_size=4)
    for step in (-1, 3):
        with pytest.raises(ConfigError, match=f"expected 0..2; found {step}"):
            one.batch(0, step)
