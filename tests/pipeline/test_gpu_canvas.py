"""What is planned before a GPU works: cuts, targets, and places in a slab."""

from __future__ import annotations

import contextlib
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardkit.dataset.arrangement import open_samples
from shardkit.pipeline import nvjpeg
from shardkit.pipeline.cpu import resize_by_pillow
from shardkit.pipeline.crops import random_crops
from shardkit.pipeline.decoder import DecodeSpec
from shardkit.pipeline.finish import Finisher
from shardkit.pipeline.gpu_backend import Decoded
from shardkit.pipeline.gpu_canvas import begun, facts_of, image_rows, output_of
from shardkit.pipeline.hardware import decode_threads
from shardkit.pipeline.nvjpeg import image_bytes, plan_slab, slab_budget
from shardkit.testing.images import Picture, jpeg_bytes, write_pictures

SIDES = st.integers(1, 3000)


def whole(width, height, orientation=1):
    width, height = np.atleast_1d(width).astype(np.int64), np.atleast_1d(height).astype(np.int64)
    return Decoded(
        np.arange(len(width)) * (1 << 30) + 4096, 3 * width, width, height,
        np.broadcast_to(np.asarray(orientation, np.int64), width.shape), None,
    )  # fmt: skip


@given(SIDES, SIDES, st.integers(1, 300))
def test_the_centre_is_cut_as_on_the_cpu(width, height, size):
    spec = DecodeSpec(size=size, train=False)
    (row,) = image_rows(spec, whole(width, height), None)
    seen = []

    def resize(source, target):
        seen.append(target)
        target[...] = 0

    if width * height < 1 << 18 and size < 64:
        image = np.broadcast_to(np.zeros(3, np.uint8), (height, width, 3))
        Finisher(spec, resize).begin(1).put(0, image, mirror=False)
        assert seen[0].shape == (row["out_height"], row["out_width"], 3)
    assert (row["x"], row["y"], row["w"], row["h"]) == (0, 0, width, height)
    assert min(row["out_width"], row["out_height"]) >= size
    for side in ("width", "height"):
        cut, left = row[f"cut_{'x' if side == 'width' else 'y'}"], row[f"out_{side}"] - size
        assert cut - (left - cut) in (0, 1)  # half a pixel goes down and right
        assert row[f"target_{side}"] == size


@given(st.integers(0, 1 << 40), st.integers(1, 40), st.integers(1, 40), st.booleans())
def test_a_crop_lies_within_its_image_also_when_its_size_was_unknown(number, width, height, known):
    ids, sides = np.asarray([number]), [np.asarray([side if known else 0]) for side in (width, height)]
    crops = random_crops(ids, *sides, seed=0, epoch=0)
    (x,), (y,), (w,), (h,) = crops.boxes([width], [height])
    assert 0 <= x < x + w <= width
    assert 0 <= y < y + h <= height
    if known:
        (top, left), (rows, columns) = crops.anchor[0].tolist(), crops.shape[0].tolist()
        assert (x, y) == (round(left * width), round(top * height))
        assert (w, h) == (round(columns * width), round(rows * height))


def test_orientations_from_5_on_swap_the_sides():
    spec = DecodeSpec(size=10, train=True, augment="none")
    rows = image_rows(spec, whole([40] * 8, [30] * 8, np.arange(1, 9)), None)
    assert rows["target_width"].tolist() == [40] * 4 + [30] * 4
    assert rows["target_height"].tolist() == [30] * 4 + [40] * 4
    assert rows["width"].tolist() == [40] * 8
    output = output_of(spec, rows)
    assert (output.dtype, output.planar, output.width, output.height) == ("uint8", False, 40, 40)


class Given:
    def __init__(self, shape, dtype):
        self.address, self.shape, self.dtype = 1 << 20, shape, dtype
        self.pixels = self

    def split(self, shapes):
        return shapes


@pytest.mark.parametrize(
    ("options", "shape", "row", "item"),
    [
        ({}, (5, 3, 8, 8), 8, 4),
        ({"channels_last": True, "dtype": "float16"}, (5, 8, 8, 3), 24, 2),
        ({"dtype": "uint8"}, (5, 3, 8, 8), 8, 1),
    ],
)
def test_results_go_to_their_places_of_a_dense_batch(options, shape, row, item):
    spec = DecodeSpec(size=8, train=True, **options)
    canvas = begun(spec, 5, Given, None)
    assert canvas.pixels.shape == shape
    rows = image_rows(spec, whole([20, 30, 40], [9, 9, 9]), random_crops(np.arange(3), *[np.full(3, 9)] * 2, seed=0,
                                                                        epoch=0))  # fmt: skip
    canvas.aim(rows, np.array([4, 0, 2]), Given)
    assert rows["target"].tolist() == [(1 << 20) + place * 192 * item for place in (4, 0, 2)]
    assert set(rows["row"].tolist()) == {row}


def test_whole_images_lie_one_behind_the_other():
    spec = DecodeSpec(size=8, train=True, augment="none")
    canvas = begun(spec, 4, Given, None)
    rows = image_rows(spec, whole([2, 3, 4], [5, 6, 7], [1, 6, 1]), None)
    canvas.aim(rows, np.array([3, 0, 1]), Given)
    assert (rows["target"] - (1 << 20)).tolist() == [0, 30, 84]
    assert canvas.pixels == [(3, 6, 3), (7, 4, 3), None, (5, 2, 3)]
    assert canvas.whole[0].shape == (30 + 54 + 84,)


def test_squares_for_a_graph_are_neither_mirrored_nor_planar():
    spec = DecodeSpec(size=8, train=True, augment="randaugment")
    crops = random_crops(np.arange(64), *[np.full(64, 9)] * 2, seed=0, epoch=0)
    rows = image_rows(spec, whole([9] * 64, [9] * 64), crops)
    assert not rows["mirror"].any()
    assert crops.mirror.any()
    canvas = begun(spec, 64, Given, (4096, None))
    canvas.aim(rows, np.arange(64), Given)
    assert rows["target"][1] - rows["target"][0] == 192
    assert output_of(spec, rows).dtype == "uint8"


def test_an_image_without_an_orientation_is_upright(tmp_path):
    class Whole:
        ids = np.arange(2)

    pixels = np.zeros((8, 16, 3), np.uint8)
    pictures = [Picture("a", jpeg_bytes(pixels), 0), Picture("b", jpeg_bytes(pixels, orientation=6), 0)]
    Whole.samples = open_samples([write_pictures(tmp_path / "ds", pictures)])
    facts = facts_of(Whole, np.array([1, 0]))
    assert facts.orientation.tolist() == [6, 1]
    assert facts[facts.orientation == 6].width.tolist() == [16]
    Whole.samples.close()


@given(st.lists(st.tuples(SIDES, SIDES), min_size=1, max_size=40))
def test_images_of_a_slab_do_not_overlap(sides):
    width, height = np.array(sides, np.int64).T
    plan = plan_slab(width, height)
    assert not (plan.offsets % 256).any()
    assert (plan.pitch >= 3 * width).all()
    ends = plan.offsets + plan.pitch * height
    assert (ends <= [*plan.offsets[1:], plan.nbytes]).all()
    assert plan.nbytes == image_bytes(width, height).sum()


@given(st.lists(st.integers(1, 40), max_size=60), st.integers(5, 60))
@settings(max_examples=200)
def test_a_batch_is_shared_into_as_few_jobs_as_fit(sizes, budget):
    sizes = np.asarray(sizes, np.int64)
    shares = nvjpeg._fitting(sizes, budget)
    assert [n for share in shares for n in share] == np.flatnonzero(sizes <= budget).tolist()
    assert all(len(share) and sizes[share].sum() <= budget for share in shares)
    for share, after in itertools.pairwise(shares):
        assert sizes[share].sum() + sizes[after[0]] > budget


def test_slabs_are_counted_from_the_index_before_anything_runs(tmp_path):
    rng = np.random.default_rng(0)
    sides = rng.integers(8, 60, (40, 2))
    sides[7] = 900, 1200
    pictures = [Picture(f"p/{n}", jpeg_bytes(np.zeros((h, w, 3), np.uint8)), 0) for n, (h, w) in enumerate(sides)]
    samples = open_samples([write_pictures(tmp_path / "ds", pictures)])
    sizes = image_bytes(sides[:, 1], sides[:, 0])
    usual = 16 * sizes.mean() + 4 * 4 * sizes.std()
    budget = slab_budget(samples, 16)
    assert 3 * usual <= budget < 3 * usual + (2 << 20) + 1
    assert slab_budget(samples, 1) >= sizes.max()
    assert slab_budget(samples, 1) <= 3 * sizes.max() + (2 << 20)
    samples.close()


@pytest.mark.parametrize(("side", "threads"), [(8, 3), (399, 3), (400, 1), (500, 1)])
def test_small_images_are_decoded_by_more_threads(tmp_path, side, threads):
    """400 x 400 pixels is where one thread's calls take as long as the engines."""
    pictures = [Picture(f"p/{n}", jpeg_bytes(np.zeros((side, side, 3), np.uint8)), 0) for n in range(3)]
    with contextlib.closing(open_samples([write_pictures(tmp_path / "ds", pictures)])) as samples:
        assert decode_threads(samples) == threads


def test_resizing_by_pillow_is_what_the_plan_stands_for():
    """The whole chain in NumPy: a planned cut of a resized image is what the CPU's canvas makes."""
    spec = DecodeSpec(size=16, train=False, dtype="uint8", channels_last=True)
    image = np.random.default_rng(1).integers(0, 255, (37, 53, 3), np.uint8)
    (row,) = image_rows(spec, whole(53, 37), None)
    resized = np.empty((row["out_height"], row["out_width"], 3), np.uint8)
    resize_by_pillow(image, resized)
    canvas = Finisher(spec, resize_by_pillow).begin(1)
    canvas.put(0, image, mirror=False)
    cut = resized[row["cut_y"] : row["cut_y"] + 16, row["cut_x"] : row["cut_x"] + 16]
    assert np.array_equal(cut, canvas.pixels[0])
