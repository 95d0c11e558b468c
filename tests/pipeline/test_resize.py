"""Both ways to resize: the same filter, within 1 of each other, into either order of memory."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from PIL import Image

from shardkit.pipeline.cpu import resize_by_pillow
from shardkit.torch.resize import resize

SIZES = [((1, 1), (7, 5)), ((1, 90), (4, 4)), ((300, 200), (64, 64)), ((64, 64), (64, 64)), ((33, 57), (224, 224)),
         ((900, 1200), (224, 224))]  # fmt: skip


@pytest.mark.parametrize("planar", [False, True])
@pytest.mark.parametrize(("source", "target"), SIZES)
@pytest.mark.parametrize("by", [resize, resize_by_pillow])
def test_pixels_are_within_one_of_pillows(by, source, target, planar):
    image = np.random.default_rng(0).integers(0, 256, (*source, 3), dtype=np.uint8)
    expected = np.asarray(Image.fromarray(image).resize(target[::-1], Image.Resampling.BILINEAR)).astype(int)
    found = np.full((3, *target), 77, np.uint8).transpose(1, 2, 0) if planar else np.full((*target, 3), 77, np.uint8)
    by(image, found)
    assert np.abs(found - expected).max() <= 1
    assert np.abs(found - expected).mean() < 0.1


def test_it_starts_no_threads():
    before = threading.active_count()
    target = np.empty((224, 224, 3), np.uint8)
    for _ in range(20):
        resize(np.zeros((500, 500, 3), np.uint8), target)
    assert threading.active_count() == before
