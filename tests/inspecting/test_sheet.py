"""Which samples a contact sheet shows: as many as there is room for, from every class, always the same."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardkit.inspecting.sheet import Picker, plan_sheet


def chosen(labels, most, seed, block=7):
    labels = np.asarray(labels, np.int64)
    groups = plan_sheet(*np.unique(labels, return_counts=True), most, seed)
    picker = Picker(groups)
    for first in range(0, labels.size, block):
        picker.see(first, labels[first : first + block])
    return {group.label: numbers for group, numbers in zip(groups, picker.numbers, strict=True)}


@given(st.lists(st.integers(-1, 12), min_size=1, max_size=80), st.integers(1, 60), st.integers(0, 2**70))
def test_numbers_are_of_their_class_and_fill_the_sheet(labels, most, seed):
    shown = chosen(labels, most, seed)
    for label, numbers in shown.items():
        assert numbers == sorted(set(numbers))
        assert all(labels[number] == label for number in numbers)
        assert numbers
    assert len(shown) == min(most, len(set(labels)))
    assert sum(map(len, shown.values())) == min(most, sum(labels.count(label) for label in shown))
    assert shown == chosen(labels, most, seed, block=1) == chosen(labels, most, seed, block=1000)


def test_classes_share_the_sheet_evenly():
    sizes = [len(numbers) for numbers in chosen([0] * 500 + [1] * 3 + [2] * 500, 63, 0).values()]
    assert sizes == [30, 3, 30]


def test_another_seed_chooses_others():
    labels = [0, 1] * 1000
    assert chosen(labels, 40, 1) == chosen(labels, 40, 1)
    assert chosen(labels, 40, 1) != chosen(labels, 40, 2)
    assert list(chosen(range(100), 5, 1)) != list(chosen(range(100), 5, 2))


@pytest.mark.parametrize("most", [100, 900])
def test_each_sample_is_as_likely_as_any_other(most):
    times = np.zeros(1000)
    for seed in range(200):
        times[chosen([5] * 1000, most, seed)[5]] += 1
    expected = 200 * most / 1000
    spread = np.sqrt(200 * (most / 1000) * (1 - most / 1000))
    assert abs(times - expected).max() < 5 * spread
    assert 0.8 * spread < times.std() < 1.2 * spread
