from __future__ import annotations

import itertools
import math
import tracemalloc
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardkit.dataset.order import MAX_SAMPLES, ORDER_VERSION, GlobalOrder, Order, StoredOrder, permute, permute_parts
from shardkit.dataset.window import WindowOrder
from shardkit.errors import ConfigError

TOP = 2**64 - 1


def window(n: int, **changes) -> WindowOrder:
    return WindowOrder(**{"n": n, "seed": 0, "lanes": 1, "extent_samples": 10, "window_extents": 4} | changes)


def whole(order: Order, epoch: int = 0) -> np.ndarray:
    return order.at(epoch, np.arange(order.n))


@st.composite
def orders(draw, most: int = 400) -> WindowOrder:
    return WindowOrder(
        n=draw(st.integers(1, most)),
        seed=draw(st.integers(0, TOP)),
        lanes=draw(st.integers(1, 16)),
        extent_samples=draw(st.integers(1, 40)),
        window_extents=draw(st.integers(1, 6)),
    )


# --- the promise -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("order", "epoch", "samples"),
    [
        (window(8, extent_samples=2, window_extents=2), 0, [3, 1, 2, 0, 5, 7, 6, 4]),
        (window(8, extent_samples=2, window_extents=2), 1, [6, 5, 3, 4, 1, 0, 2, 7]),
        (window(1000, seed=7, lanes=4, extent_samples=30), 3, [584, 297, 79, 784, 827, 695, 987, 634]),
        (
            window(1_281_167, seed=1, lanes=8, extent_samples=100, window_extents=64),
            0,
            [588663, 989948, 591706, 400491, 1114416, 30032, 1144983, 405622],
        ),
        (
            window(MAX_SAMPLES, seed=TOP, lanes=64, extent_samples=100, window_extents=64),
            TOP,
            [
                1045373286103,
                1053557523213,
                303247249368,
                179888448118,
                27950358729,
                97826633258,
                184684020786,
                79344771565,
            ],
        ),
    ],
)
def test_order_version_1_is_these_numbers_for_ever(order, epoch, samples):
    # A change here changes the samples of every resumed run: it needs a new ORDER_VERSION and a line in the CHANGELOG.
    assert ORDER_VERSION == 1
    assert order.at(epoch, np.arange(8) * (order.n // 8)).tolist() == samples


def mix(value: int) -> int:
    z = (value + 0x9E3779B97F4A7C15) % 2**64
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
    return z ^ z >> 31


def built(order: WindowOrder, epoch: int) -> list[int]:
    """The whole epoch from lists, as the module's head tells it: a ring, extents, a stream, segments, windows."""
    n, size = order.n, order.extent_samples
    ring, extents_seed, pieces = (mix(mix(0x77696E646F77 + purpose) + order.seed) for purpose in range(3))
    first = mix((ring + epoch) % 2**64) % n
    around = [*range(first, n), *range(first)]
    extents = [around[at : at + size] for at in range(0, n, size)]
    short = [extents.pop()] if len(extents[-1]) < size else []
    order_of_extents = permute(range(len(extents)), len(extents), seed=extents_seed, epoch=epoch) if extents else []
    in_turn = [extents[number] for number in order_of_extents] + short
    lanes: list[list[int]] = [[] for _ in range(order.lanes)]
    longer = [n // order.lanes + (lane < n % order.lanes) for lane in range(order.lanes)]
    owner = [lane for lane, samples in enumerate(longer) for _ in range(samples)]
    place = 0
    for at in range(0, len(in_turn), order.window_extents):
        pool = list(itertools.chain.from_iterable(in_turn[at : at + order.window_extents]))
        for lane, group in itertools.groupby(range(place, place + len(pool)), key=owner.__getitem__):
            begin = min(members := list(group))
            state = mix((begin * 0x9E3779B97F4A7C15 + mix((pieces + epoch) % 2**64)) % 2**64)
            for inside in range(len(members)):
                moved = permute_parts(np.array([inside]), np.array([len(members)]), np.array([state], np.uint64))
                lanes[lane].append(pool[begin - place + int(moved[0])])
        place += len(pool)
    rounds = itertools.zip_longest(*lanes)
    return [sample for samples in rounds for sample in samples if sample is not None]


@given(orders(), st.integers(0, TOP))
def test_positions_agree_with_an_epoch_built_from_lists(order, epoch):
    assert whole(order, epoch).tolist() == built(order, epoch)


# --- a bijection -----------------------------------------------------------------------------------------------------


@given(orders(3000), st.integers(0, TOP))
def test_every_epoch_holds_every_sample_once(order, epoch):
    assert sorted(whole(order, epoch).tolist()) == list(range(order.n))


@pytest.mark.parametrize("n", range(1, 9))
@pytest.mark.parametrize("lanes", [1, 3, 8, 100])
def test_fewer_samples_than_a_window_an_extent_or_the_lanes_are_an_epoch_too(n, lanes):
    for extent_samples, window_extents in itertools.product((1, 3, 8, 50), (1, 2, 50)):
        order = window(n, lanes=lanes, extent_samples=extent_samples, window_extents=window_extents)
        assert sorted(whole(order).tolist()) == list(range(n))
        assert sum(len(order.pieces(lane)) > 0 for lane in range(lanes)) == min(n, lanes)


@pytest.mark.parametrize(("lanes", "extent_samples"), [(1, 100), (8, 37), (64, 2500), (7, 1)])
def test_large_epochs_hold_every_sample_once(lanes, extent_samples):
    order = window(1_000_003, lanes=lanes, extent_samples=extent_samples, window_extents=16)
    assert np.array_equal(np.sort(whole(order, 3)), np.arange(order.n))


@pytest.mark.parametrize("n", [2**31 + 1, 10**11, MAX_SAMPLES - 1, MAX_SAMPLES])
@pytest.mark.parametrize("lanes", [1, 64])
def test_no_two_of_many_positions_share_a_sample_in_a_huge_epoch(n, lanes):
    order = window(n, lanes=lanes, extent_samples=150, window_extents=64)
    spread = np.linspace(0, n - 1, 100_000).astype(np.int64)
    positions = np.unique(np.concatenate([spread, np.arange(20_000), np.arange(n - 20_000, n)]))
    samples = order.at(1, positions)
    assert samples.min() >= 0
    assert samples.max() < n
    assert len(np.unique(samples)) == len(positions)


def test_sizes_at_the_limit_do_not_overflow():
    order = window(MAX_SAMPLES, lanes=1, extent_samples=MAX_SAMPLES, window_extents=MAX_SAMPLES)
    assert len(order.pieces(0)) == 1
    assert len(set(order.at(0, np.arange(0, MAX_SAMPLES, MAX_SAMPLES // 100)).tolist())) == 101
    many = window(5, lanes=MAX_SAMPLES, extent_samples=1, window_extents=1)
    assert sorted(whole(many).tolist()) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("lanes", [1, 64])
def test_memory_does_not_grow_with_the_epoch(lanes):
    order = window(MAX_SAMPLES, lanes=lanes, extent_samples=1 << 20, window_extents=1 << 10)
    positions = np.arange(1024) + MAX_SAMPLES // 3
    order.at(0, positions)
    tracemalloc.start()
    order.at(0, positions)
    order.pieces_of(positions)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1 << 20


@given(orders(5000), st.data())
def test_a_position_has_its_sample_whatever_is_asked_beside_it(order, data):
    positions = data.draw(st.lists(st.integers(0, order.n - 1), max_size=50))
    asked = np.array(positions, np.int64)
    found = order.at(4, asked)
    assert found.dtype == np.int64
    assert asked.tolist() == positions
    assert found.tolist() == [order.at(4, np.array([position])).item() for position in positions]


# --- lanes, pieces and what is read ----------------------------------------------------------------------------------


@given(orders())
def test_pieces_cover_each_lanes_segment_in_order_and_no_other_lanes(order):
    end = 0
    for lane in range(order.lanes):
        begin = end
        for piece in order.pieces(lane):
            assert piece.lane == lane
            assert piece.start == end < piece.end
            assert piece.start // order.window_samples == (piece.end - 1) // order.window_samples
            end = piece.end
        assert end - begin == len(range(lane, order.n, order.lanes))  # as many places as the lane has positions
    assert end == order.n


@given(orders(), st.integers(0, TOP))
def test_each_sample_is_a_member_of_one_piece_so_each_byte_is_read_once(order, epoch):
    pieces = [piece for lane in range(order.lanes) for piece in order.pieces(lane)]
    read = np.concatenate([order.members(epoch, piece) for piece in pieces])
    assert sorted(read.tolist()) == list(range(order.n))


@given(orders(), st.integers(0, TOP))
def test_reads_are_as_long_as_extents(order, epoch):
    pieces = [piece for lane in range(order.lanes) for piece in order.pieces(lane)]
    runs = sum(1 + np.count_nonzero(np.diff(order.members(epoch, piece)) != 1) for piece in pieces)
    # Only a border between lanes and the end of the ring may cut an extent in two.
    assert runs <= order.extents + (min(order.lanes, order.n) - 1) + 1


@given(orders(), st.integers(0, TOP))
def test_a_lane_hands_a_piece_out_before_it_needs_the_next_one(order, epoch):
    for lane in range(order.lanes):
        positions = np.arange(lane, order.n, order.lanes)
        samples = order.at(epoch, positions)
        done = 0
        for piece in order.pieces(lane):
            size = piece.end - piece.start
            members = order.members(epoch, piece)
            inside = order.shuffled(epoch, piece, np.arange(size))
            assert np.array_equal(samples[done : done + size], members[inside])
            done += size
        assert done == len(samples)


@given(orders(), st.data())
def test_the_pieces_of_positions_tell_where_each_sample_lies(order, data):
    positions = np.array(data.draw(st.lists(st.integers(0, order.n - 1), max_size=40)), np.int64)
    samples = order.at(2, positions)
    found = order.pieces_of(positions)
    assert [piece for piece, _, _ in found] == sorted({piece for piece, _, _ in found}, key=lambda piece: piece.start)
    assert sorted(itertools.chain.from_iterable(at.tolist() for _, at, _ in found)) == list(range(len(positions)))
    for piece, at, inside in found:
        assert piece in order.pieces(piece.lane)
        assert set((positions[at] % order.lanes).tolist()) == {piece.lane}
        assert np.array_equal(samples[at], order.members(2, piece)[order.shuffled(2, piece, inside)])


@given(orders())
def test_pieces_follow_each_other_and_know_their_first_position(order):
    for lane in range(order.lanes):
        pieces = order.pieces(lane)
        assert [order.following(piece) for piece in pieces] == [*pieces[1:], None][: len(pieces)]
        for piece in pieces:
            at = order.first_position(piece)
            assert [(found, inside.tolist()) for found, _, inside in order.pieces_of(np.array([at]))] == [(piece, [0])]


# --- random enough ---------------------------------------------------------------------------------------------------


def same_extent(order: Order, extent_of: np.ndarray, batch: int, epoch: int) -> np.ndarray:
    """For each whole batch: the share of its pairs of samples that come from one extent."""
    batches = extent_of[whole(order, epoch)][: order.n // batch * batch].reshape(-1, batch)
    pairs = [sum(count * (count - 1) for count in Counter(row).values()) for row in batches.tolist()]
    return np.array(pairs) / (batch * (batch - 1))


@pytest.mark.parametrize(("k", "pooled"), [(50, 2), (50, 8), (20, 16), (100, 16)])
@pytest.mark.parametrize("lanes", [1, 4])
def test_a_batch_holds_as_many_neighbours_as_a_pool_of_its_extents_gives(k, pooled, lanes):
    batch, windows = k, 12 * lanes  # no batch lies across a border, so that the share has a simple formula
    order = window(k * pooled * windows, lanes=lanes, extent_samples=k, window_extents=pooled)
    shares = []
    for epoch in range(12):
        extent_of = np.empty(order.n, np.int64)
        for piece in itertools.chain.from_iterable(map(order.pieces, range(lanes))):
            extent_of[order.members(epoch, piece)] = np.arange(piece.start, piece.end) // k
        shares.append(same_extent(order, extent_of, batch, epoch))
    found = np.concatenate(shares)
    one_lane = (batch / lanes - 1) / (batch - 1)  # of the pairs, those whose samples come from the same lane
    expected = one_lane * (k - 1) / (pooled * k - 1)
    assert abs(found.mean() - expected) < 5 * found.std() / math.sqrt(found.size)
    assert found.std() / math.sqrt(found.size) < 0.02 * expected  # so that the line above can fail


def test_the_stored_order_has_only_neighbours_and_the_global_order_almost_none():
    n, k = 24_000, 50
    extent_of = np.arange(n) // k
    assert same_extent(StoredOrder(n), extent_of, k, 0).tolist() == [1.0] * (n // k)
    shares = np.concatenate([same_extent(GlobalOrder(n, 0), extent_of, k, epoch) for epoch in range(12)])
    assert abs(shares.mean() - (k - 1) / (n - 1)) < 5 * shares.std() / math.sqrt(shares.size)


@pytest.mark.parametrize("n", [1, 2, 5, 16, 230, 240])
@pytest.mark.parametrize("lanes", [1, 4])
def test_every_sample_comes_equally_often_in_each_part_of_the_epoch(n, lanes):
    # 230: the last extent is short, and the last window too.
    order = window(n, seed=5, lanes=lanes, extent_samples=16, window_extents=3)
    epochs, parts = 2000, min(n, 10)
    part = np.arange(n) * parts // n
    counts = np.zeros((n, parts))
    for epoch in range(epochs):
        counts[whole(order, epoch), part] += 1
    expected = epochs * np.bincount(part) / n
    chi = ((counts - expected) ** 2 / expected).sum(axis=1)
    # Each sample by itself, since samples of one extent go together. Chance exceeds this in one sample of 3 million.
    assert chi.max() < parts - 1 + 8 * math.sqrt(2 * parts)


@pytest.mark.parametrize("lanes", [1, 8])
def test_dropping_the_end_of_each_epoch_drops_every_sample_equally_often(lanes):
    # 8 windows of 4 extents of 25, and 10 samples that make a short extent and a short window: all that is dropped.
    order = window(810, lanes=lanes, extent_samples=25)
    dropped = order.n % 80
    epochs = 3000
    counts = np.zeros(order.n)
    for epoch in range(epochs):
        counts[order.at(epoch, np.arange(order.n - dropped, order.n))] += 1
    expected = epochs * dropped / order.n
    assert abs(counts - expected).max() < 6 * math.sqrt(expected)


@pytest.mark.parametrize("n", [900, 100_003])
def test_seeds_epochs_and_sizes_give_unrelated_orders(n):
    settings = [(0, 0), (0, 1), (1, 0), (1, 1), (2**32, 0), (0, 2**32), (TOP, 0), (0, TOP)]
    found = [whole(window(n, seed=seed), epoch) for seed, epoch in settings]
    found.append(whole(window(n, extent_samples=11)))
    found.append(GlobalOrder(n, 0).at(0, np.arange(n)))
    for one, other in itertools.combinations(found, 2):
        assert (one == other).sum() < 20  # chance gives 1, in clumps since extents move as a whole
        assert abs(np.corrcoef(one, other)[0, 1]) < 5 / math.sqrt(n / 10)


def test_neighbours_of_one_epoch_are_not_neighbours_of_the_next():
    # The extents of an epoch begin elsewhere, so that the same samples are not tied together for the whole training.
    order = window(4000, extent_samples=20, window_extents=1)
    starts = set()
    for epoch in range(200):
        piece = order.pieces(0)[0]
        starts.add(int(order.members(epoch, piece)[0]) % 20)
    assert starts == set(range(20))


# --- arguments -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["n", "seed", "lanes", "extent_samples", "window_extents"])
def test_settings_out_of_range_are_refused_by_name(name):
    wrong = [-1, 2**64] if name == "seed" else [0, -1, MAX_SAMPLES + 1]
    for value in wrong:
        with pytest.raises(ConfigError, match=f"{name} is out of range.* found {value}"):
            window(**{"n": 10} | {name: value})


@pytest.mark.parametrize("n", [10, 5000])
def test_positions_outside_the_epoch_are_refused(n):
    for wrong in (-1, n, 2**62):
        for ask in (window(n).pieces_of, lambda positions: window(n).at(0, positions)):
            with pytest.raises(ConfigError, match=f"expected 0..{n - 1}; found {wrong}"):
                ask(np.array([0, wrong]))


def test_places_outside_of_a_piece_are_refused():
    piece = window(100).pieces(0)[0]
    for wrong in (-1, 40):
        with pytest.raises(ConfigError, match=f"expected 0..39; found {wrong}"):
            window(100).shuffled(0, piece, np.array([wrong]))


@pytest.mark.parametrize("n", [3, 100])  # 3: not one whole extent
@pytest.mark.parametrize("epoch", [-1, 2**64])
def test_epochs_out_of_range_are_refused(n, epoch):
    with pytest.raises(ConfigError, match="an epoch is out of range"):
        whole(window(n), epoch)
