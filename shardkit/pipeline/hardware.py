"""What the index says about who can decode a dataset."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from shardkit.format.jpeg import hardware_decodable

if TYPE_CHECKING:
    from shardkit.dataset.samples import Samples

__all__ = ["decode_threads", "hardware_share", "largest_sides", "mean_pixels"]

_LOOKED_AT = 4096  # the share is known to 1 or 2 % by as many
_ENGINES_BUSY = 160_000
"""Pixels an image from which on one thread's calls keep all JPEG engines of an H200 busy: a call takes 30 µs of its
thread an image, whatever the image's size, and the engines 0.18 ms a million pixels."""
_MOST_THREADS = 3
"""Of a third one the engines still give 13 % more, of a fourth one less."""


def hardware_share(samples: Samples) -> float:
    """Return the share of images that a GPU's JPEG engines take, by the facts of up to 4,096 of them; 0 to 1."""
    numbers = np.linspace(0, len(samples) - 1, min(len(samples), _LOOKED_AT)).astype(np.int64)
    ids = samples.ids(numbers)
    sof, precision, scans, components, subsampling, width, height = (
        samples.gather(name, ids)
        for name in ("sof", "precision", "scans", "components", "subsampling", "width", "height")
    )
    taken = hardware_decodable(sof, precision, scans, components, subsampling) & (width > 0) & (height > 0)
    return float(taken.mean())


def decode_threads(samples: Samples) -> int:
    """Return how many threads it takes to keep a GPU's JPEG engines busy with these images, by their size."""
    return 1 if mean_pixels(samples) >= _ENGINES_BUSY else _MOST_THREADS


def mean_pixels(samples: Samples) -> float:
    """Return how many pixels an image has on average, by up to 4,096 of them."""
    numbers = np.linspace(0, len(samples) - 1, min(len(samples), _LOOKED_AT)).astype(np.int64)
    ids = samples.ids(numbers)
    return float((samples.gather("width", ids).astype(np.int64) * samples.gather("height", ids)).mean())


def largest_sides(samples: Samples) -> tuple[int, int]:
    """Return the largest width and the largest height of all images, as stored; 0 where none is known."""
    width, height = (
        max((int(chunk.max(initial=0)) for chunk in samples.size_chunks(name)), default=0)
        for name in ("width", "height")
    )
    return width, height
