"""Percentiles are values that were seen, the very ones that numpy's sort finds; bars hold every value once."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardkit.inspecting.report import PERCENTILES
from shardkit.inspecting.spread import FirstPass, SecondPass, float_keys

TOP = 2**32 - 1
EDGES = st.sampled_from([0, 1, 2, 65535, 65536, 65537, 2**31, TOP - 1, TOP])


def measured(blocks, *, floats=False):
    first = FirstPass(floats=floats)
    for block in blocks:
        first.see(block)
    second = SecondPass(first)
    for block in blocks:
        second.see(block)
    return second.measure()


def sorted_ones(values):
    return np.percentile(values, PERCENTILES, method="inverted_cdf").tolist()


def check_bars(measure, values):
    edges = np.asarray(measure.edges)
    assert len(edges) == len(measure.counts) + 1 <= 49
    assert (edges[0], edges[-1]) == (values.min(), values.max())
    for i, count in enumerate(measure.counts):
        last = i == len(measure.counts) - 1
        inside = (values >= edges[i]) & ((values <= edges[i + 1]) if last else (values < edges[i + 1]))
        assert count == np.count_nonzero(inside)
    assert sum(measure.counts) == values.size


@given(st.lists(st.lists(st.integers(0, TOP) | EDGES | st.integers(100, 130), max_size=40), min_size=1, max_size=4))
def test_whole_numbers_are_those_of_a_sort(blocks):
    arrays = [np.asarray(block, np.uint32) for block in blocks]
    measure = measured(arrays)
    values = np.concatenate(arrays)
    assert measure.known == values.size
    if values.size:
        assert list(measure.percentiles) == sorted_ones(values)
        check_bars(measure, values.astype(np.int64))
    else:
        assert (measure.percentiles, measure.edges, measure.counts) == ((), (), ())


@given(st.lists(st.floats(2.0**-20, 2.0**32, width=32), min_size=1, max_size=60))
def test_floats_are_those_of_a_sort(numbers):
    values = np.asarray(numbers, np.float32)
    measure = measured(np.array_split(float_keys(values), 3), floats=True)
    assert list(measure.percentiles) == sorted_ones(values)
    check_bars(measure, values.astype(np.float64))


@pytest.mark.parametrize("count", [1, 2, 19, 20, 21, 99, 100, 101, 1000])
def test_ranks_at_their_boundaries(count):
    values = np.arange(count, dtype=np.uint32) * 70_000
    assert list(measured([values]).percentiles) == sorted_ones(values)


def test_bars_are_even_on_a_logarithmic_scale():
    values = np.arange(1, 1 << 20, dtype=np.uint32)
    edges = np.log(np.asarray(measured([values]).edges, np.float64))
    steps = np.diff(edges)[24:]  # whole numbers are too far apart for the first ones
    assert steps.max() < 1.1 * steps.min()


def test_what_is_not_known_is_counted_and_nothing_else():
    first = FirstPass()
    first.see(np.asarray([7], np.uint32), 3)
    first.see(np.empty(0, np.uint32), 2)
    assert SecondPass(first).measure().unknown == 5
