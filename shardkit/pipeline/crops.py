"""Random crops and mirroring as a pure function of (seed, epoch, sample).

Drawn here and not inside a decoder, so that the pixels of a sample depend neither on its batch, nor on the number of
ranks, threads or batches before it, nor on which decoder does the work: an epoch that is resumed in its middle, or run
again on another machine, crops alike.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from shardkit.splitmix import STEP, finalise, mix

if TYPE_CHECKING:
    import numpy.typing as npt

__all__ = ["Crops", "random_crops", "uniform_draws"]

AREA = (0.08, 1.0)
"""Share of the image's area that a crop covers."""
RATIO = (3 / 4, 4 / 3)
"""Width by height of a crop; its logarithm is uniform."""
ATTEMPTS = 10
"""Draws of a shape until one fits into the image; then the largest centre crop within `RATIO` is taken."""

_DRAWS = 32  # numbers reserved for a sample in each stream; a crop uses 2 * ATTEMPTS + 3
_UNKNOWN = 1 << 14  # side of the square that an image of unknown size is taken for
_SALT = 0x63726F7073  # keeps these numbers apart from others that are drawn from the same seed


@dataclass(frozen=True, slots=True)
class Crops:
    """n crops, in fractions of the image as it is shown (after its EXIF orientation). Owned by the caller."""

    anchor: npt.NDArray[np.float32]
    """[n, 2]: top and left edge, in [0, 1)."""
    shape: npt.NDArray[np.float32]
    """[n, 2]: height and width, in (0, 1]; with the anchor at most 1."""
    mirror: npt.NDArray[np.int32]
    """[n]: 1 where left and right are swapped, else 0."""

    def boxes(
        self, width: npt.ArrayLike, height: npt.ArrayLike, places: slice = slice(None)
    ) -> tuple[npt.NDArray[np.int64], ...]:
        """Return left edge, top edge, width and height of crops in whole pixels, each int64 [m], within the image.

        Args:
            width: [m] pixels of the images, as shown; > 0.
            height: [m] likewise.
            places: m of the crops.
        """
        edges = []
        for axis, side in ((1, np.asarray(width)), (0, np.asarray(height))):
            # What was drawn for an image of unknown size may round to a pixel beyond it.
            first = np.minimum(np.rint(self.anchor[places, axis].astype(np.float64) * side), side - 1)
            share = np.rint(self.shape[places, axis].astype(np.float64) * side)
            edges += [first, np.clip(share, 1, side - first)]
        x, w, y, h = (edge.astype(np.int64) for edge in edges)
        return x, y, w, h


def random_crops(
    ids: npt.NDArray[np.int64], width: npt.NDArray[np.integer[Any]], height: npt.NDArray[np.integer[Any]], *,
    seed: int, epoch: int,
) -> Crops:  # fmt: skip
    """Draw a crop of whole pixels for each sample: the distribution of torchvision's RandomResizedCrop.

    Args:
        ids: [n] numbers of the samples.
        width: [n] pixels, as shown; 0 when unknown, then the crop's aspect ratio is relative to the image's.
        height: [n] pixels, as shown; 0 when unknown.
        seed: any integer >= 0.
        epoch: any integer >= 0.
    """
    known = (width > 0) & (height > 0)
    columns = np.where(known, width, _UNKNOWN).astype(np.float64)
    rows = np.where(known, height, _UNKNOWN).astype(np.float64)
    draws = uniform_draws(ids, _DRAWS, seed=seed, epoch=epoch, salt=_SALT)
    area = (columns * rows)[:, None] * (AREA[0] + (AREA[1] - AREA[0]) * draws[:, :ATTEMPTS])
    low, high = np.log(RATIO)
    ratio = np.exp(low + (high - low) * draws[:, ATTEMPTS : 2 * ATTEMPTS])
    w, h = np.rint(np.sqrt(area * ratio)), np.rint(np.sqrt(area / ratio))
    fits = (w >= 1) & (w <= columns[:, None]) & (h >= 1) & (h <= rows[:, None])
    first, any_fits = np.argmax(fits, axis=1), fits.any(axis=1)
    at = np.arange(len(ids))
    centre_w = np.maximum(np.minimum(columns, np.rint(rows * RATIO[1])), 1)
    centre_h = np.maximum(np.minimum(rows, np.rint(columns / RATIO[0])), 1)
    w, h = np.where(any_fits, w[at, first], centre_w), np.where(any_fits, h[at, first], centre_h)
    y_draw, x_draw, flip = (draws[:, 2 * ATTEMPTS + i] for i in range(3))
    y = np.where(any_fits, np.floor(y_draw * (rows - h + 1)), (rows - h) // 2)
    x = np.where(any_fits, np.floor(x_draw * (columns - w + 1)), (columns - w) // 2)
    anchor, shape = np.stack([y / rows, x / columns], axis=1), np.stack([h / rows, w / columns], axis=1)
    return Crops(anchor.astype(np.float32), shape.astype(np.float32), (flip < 0.5).astype(np.int32))


def uniform_draws(
    ids: npt.NDArray[np.int64], count: int, *, seed: int, epoch: int, salt: int
) -> npt.NDArray[np.float64]:
    """Draw numbers in [0, 1) for each sample, from its own stretch of a SplitMix64 stream; float64 [n, count].

    Args:
        ids: [n] numbers of the samples.
        count: numbers for each; at most 32.
        seed: any integer >= 0.
        epoch: any integer >= 0.
        salt: names the stream: two purposes must not share one.
    """
    key = mix(mix(mix(salt) + seed) + epoch)
    z = np.empty((len(ids), count), np.uint64)
    z[:] = np.arange(count)
    z += (ids * _DRAWS).astype(np.uint64)[:, None]
    z *= np.uint64(STEP)
    z += np.uint64(key)
    return np.asarray(finalise(z) >> np.uint64(11), np.float64) * 2.0**-53
