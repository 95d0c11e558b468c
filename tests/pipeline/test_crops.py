"""Random crops: what a crop may be, that it belongs to the sample, and that its numbers never change."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardkit.pipeline.crops import ATTEMPTS, random_crops

SIDES, SEEDS = st.integers(1, 70000), st.integers(0, 2**64 - 1)


def drawn(ids, width, height, seed=0, epoch=0):
    ids = np.atleast_1d(np.asarray(ids, np.int64))
    sides = (np.broadcast_to(np.asarray(side, np.int64), ids.shape) for side in (width, height))
    return random_crops(ids, *sides, seed=seed, epoch=epoch)


@given(number=st.integers(0, 2**40), width=SIDES, height=SIDES, seed=SEEDS, epoch=st.integers(0, 99))
def test_a_crop_is_whole_pixels_inside_the_image(number, width, height, seed, epoch):
    crops = drawn(number, width, height, seed, epoch)
    box = np.array([*crops.anchor[0], *crops.shape[0]], np.float64) * (height, width, height, width)
    whole = np.rint(box)
    assert np.abs(box - whole).max() < 0.02  # float32 on 70,000 pixels
    top, left, rows, columns = whole
    assert 0 <= top < top + rows <= height
    assert 0 <= left < left + columns <= width
    assert crops.mirror[0] in (0, 1)
    assert (crops.anchor + crops.shape).max() < 1 + 2e-7


def test_area_and_ratio_stay_in_their_ranges_and_reach_them():
    crops = drawn(np.arange(20000), 1000, 800)
    rows, columns = crops.shape[:, 0] * 800.0, crops.shape[:, 1] * 1000.0
    area, ratio = rows * columns / 800_000, columns / rows
    assert 0.079 < area.min() < 0.085
    assert 0.95 < area.max() <= 1
    assert 0.745 < ratio.min() < 0.755
    assert 1.325 < ratio.max() < 1.34


def test_crops_are_distributed_as_their_definition_says():
    """Against a plain loop with Python's own generator."""
    width, height = 500, 375
    chance = random.Random(0)

    def one():
        for _ in range(ATTEMPTS):
            area = width * height * chance.uniform(0.08, 1)
            ratio = np.exp(chance.uniform(np.log(3 / 4), np.log(4 / 3)))
            w, h = round((area * ratio) ** 0.5), round((area / ratio) ** 0.5)
            if 0 < w <= width and 0 < h <= height:
                return chance.randint(0, height - h), chance.randint(0, width - w), h, w
        raise AssertionError

    expected = np.array([one() for _ in range(8000)], float)
    crops = drawn(np.arange(8000), width, height)
    found = np.concatenate([crops.anchor, crops.shape], axis=1) * [height, width, height, width]
    for quantile in (0.1, 0.25, 0.5, 0.75, 0.9):
        assert np.quantile(found, quantile, axis=0) == pytest.approx(np.quantile(expected, quantile, axis=0), abs=10)
    assert np.corrcoef(found.T)[0, 1] == pytest.approx(np.corrcoef(expected.T)[0, 1], abs=0.05)


def test_half_of_the_images_are_mirrored_whatever_their_crop():
    crops = drawn(np.arange(20000), 640, 480)
    assert abs(crops.mirror.mean() - 0.5) < 0.02
    for values in (*crops.anchor.T, *crops.shape.T):
        assert abs(np.corrcoef(values, crops.mirror)[0, 1]) < 0.03


def test_neighbouring_samples_epochs_and_seeds_are_unrelated():
    a = drawn(np.arange(5000), 640, 480)
    for b in (
        drawn(np.arange(1, 5001), 640, 480), drawn(np.arange(5000), 640, 480, epoch=1),
        drawn(np.arange(5000), 640, 480, seed=1),
    ):  # fmt: skip
        assert abs(np.corrcoef(a.anchor[:, 0], b.anchor[:, 0])[0, 1]) < 0.06
        assert abs(np.corrcoef(a.mirror, b.mirror)[0, 1]) < 0.06
        assert not np.array_equal(a.anchor, b.anchor)


def test_a_crop_depends_on_its_sample_and_not_on_its_batch():
    whole = drawn(np.arange(100), 640, 480, seed=5, epoch=2)
    some = drawn([41, 7, 99], 640, 480, seed=5, epoch=2)
    for name in ("anchor", "shape", "mirror"):
        assert np.array_equal(getattr(whole, name)[[41, 7, 99]], getattr(some, name))


@pytest.mark.parametrize(("width", "height"), [(1000, 10), (10, 1000), (65535, 1)])
def test_an_image_that_no_crop_fits_gives_its_widest_centre(width, height):
    crops = drawn(np.arange(200), width, height)
    box = np.rint(np.concatenate([crops.anchor, crops.shape], axis=1) * np.array([height, width] * 2, np.float64))
    short = min(width, height)
    side = round(short * 4 / 3) if short > 1 else 1
    rows, columns = (short, side) if width > height else (side, short)
    centre = [(height - rows) // 2, (width - columns) // 2, rows, columns]
    assert (box == centre).all(axis=1).mean() > 0.9


@pytest.mark.parametrize(("width", "height"), [(0, 0), (0, 400), (300, 0)])
def test_an_image_of_unknown_size_is_cropped_by_fractions(width, height):
    crops = drawn(np.arange(500), width, height)
    assert crops.anchor.min() >= 0
    assert (crops.anchor + crops.shape).max() <= 1 + 2e-7
    assert 0.4 < np.prod(crops.shape, axis=1).mean() < 0.6


def test_no_samples_have_no_crops():
    crops = drawn([], 5, 5)
    assert (crops.anchor.shape, crops.shape.shape, crops.mirror.shape) == ((0, 2), (0, 2), (0,))


def test_the_numbers_are_a_promise():
    """Written down once: a run that is repeated with a later version crops alike."""
    crops = drawn([0, 1, 2, 1 << 33], 640, 480, seed=12345, epoch=7)
    boxes = np.concatenate([crops.anchor, crops.shape], axis=1) * np.array([480, 640] * 2, np.float64)
    promised = [[1, 140, 173, 201], [6, 40, 440, 412], [32, 145, 416, 483], [11, 120, 455, 476]]
    assert np.rint(boxes).astype(int).tolist() == promised
    assert crops.mirror.tolist() == [1, 1, 0, 1]
