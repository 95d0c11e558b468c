"""Decoded images of any size become one batch: resized, mirrored, normalised, each in one visit of its memory.

On 8 bits until the last step: a float32 pixel takes four times the memory traffic of an 8-bit one, and a resize of
8 bits a third of the time.
"""

from __future__ import annotations

import sys
import threading
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from shardkit.pipeline.crops import Crops, random_crops

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardkit.dataset.batch import EncodedBatch
    from shardkit.pipeline.decoder import DecodeSpec, Resize

    _Image = npt.NDArray[np.uint8]

__all__ = ["Canvas", "Finisher", "Pixels", "put_all"]

Pixels: TypeAlias = npt.NDArray[Any] | list[npt.NDArray[np.uint8]]
"""A dense batch (Any: of the spec's dtype), or whole images."""

_KEPT = 4  # two in the decoder, one handed over, one that the consumer still names; with 3, new memory costs 25 % more


class Finisher:
    """Makes batches of squares by a spec. One thread calls `begin`; any number work on what it returns.

    It remembers the memory of the last 4 batches, to use it again when nobody looks at it any more, until `forget`: at
    most 4 times the batch's bytes, 616 MB for 256 float32 images of 224 x 224, and that only while a run goes on.
    """

    def __init__(self, spec: DecodeSpec, resize: Resize) -> None:
        """Prepare; `resize` does what its Protocol says."""
        self.spec, self.resize, self.cut = spec, resize, spec.recipe.cut
        self.square = spec.recipe.graph
        """Whether the result is squares for a graph: uint8 [n, size, size, 3], neither mirrored nor normalised."""
        self.planar = not (spec.channels_last or self.square)
        self.dtype = np.dtype("uint8" if self.square else spec.dtype)
        mean, scale = np.asarray(spec.mean, np.float32), 1 / np.asarray(spec.std, np.float32)
        shape = (3, 1, 1) if self.planar else (-1,)
        # Whole rows of a [size, size, 3] image: a loop of three is slow.
        self.mean, self.scale = (np.tile(a, 1 if self.planar else spec.size).reshape(shape) for a in (mean, scale))
        self._memory: list[npt.NDArray[Any]] = []
        self._scratch = threading.local()

    def begin(self, count: int) -> Canvas:
        """Return an empty batch of `count` images."""
        if self.cut == "whole":
            return Canvas(self, [np.empty((0, 0, 3), np.uint8)] * count)
        return Canvas(self, self._array(count))

    def forget(self) -> None:
        """Let go of the memory of batches; who still looks at one keeps it."""
        self._memory = []

    def crops(self, batch: EncodedBatch) -> Crops | None:
        """Return the random choices for a batch; None where nothing is random."""
        if self.cut != "random":
            return None
        return random_crops(batch.ids, batch.width, batch.height, seed=self.spec.seed, epoch=batch.epoch)

    def scratch(self) -> tuple[_Image, npt.NDArray[np.float32]]:
        """Return an image of this thread's, as dense as the result's, as uint8 and as float32."""
        own = self._scratch
        if not hasattr(own, "images"):
            size = self.spec.size
            shape = (3, size, size) if self.planar else (size, size, 3)
            own.images = np.empty(shape, np.uint8), np.empty(shape, np.float32)
        images: tuple[_Image, npt.NDArray[np.float32]] = own.images
        return images

    def _array(self, count: int) -> npt.NDArray[Any]:
        """Return memory for a batch, that of an earlier one if nobody looks at it any more: its pages are there."""
        size = self.spec.size
        shape = (count, 3, size, size) if self.planar else (count, size, size, 3)
        for at in range(len(self._memory)):
            if _references(self._memory, at) == _IDLE and len(self._memory[at]) >= count:
                return self._memory[at][:count]
        array = np.empty(shape, self.dtype)
        self._memory = [*self._memory[-_KEPT + 1 :], array]
        return array[:]


def _references(arrays: list[npt.NDArray[Any]], at: int) -> int:
    return sys.getrefcount(arrays[at])


_IDLE = _references([np.empty(0)], 0)  # of an array that only the list holds: interpreters count differently


class Canvas:
    """The pixels of one batch while they are made. Several threads may put images into it."""

    def __init__(self, finisher: Finisher, pixels: Pixels) -> None:
        """Start with nothing in it."""
        self._by = finisher
        self.pixels = pixels
        """What `DecodedBatch.pixels` says, or squares; whole when each place was put."""

    def put(self, at: int, image: _Image, *, mirror: bool) -> None:
        """Finish one image into place `at`.

        Args:
            at: place in the batch.
            image: [h, w, 3] dense: the crop, or the whole image where the centre or all of it is wanted.
            mirror: swap left and right.
        """
        by, pixels = self._by, self.pixels
        if isinstance(pixels, list):
            pixels[at] = image
        elif by.dtype == np.uint8:
            target = _interleaved(pixels[at], by.planar)
            if mirror and not by.square:
                part = _interleaved(by.scratch()[0], by.planar)
                self._resize(image, part)
                _swap(part, target)
            else:
                self._resize(image, target)
        else:
            small, wide = by.scratch()
            self._resize(image, _interleaved(small, by.planar))
            values = wide if by.dtype == np.float16 else pixels[at]
            self._normalise(small, values, mirror)
            if values is wide:
                pixels[at] = values

    def _normalise(self, small: _Image, values: npt.NDArray[np.float32], mirror: bool) -> None:
        by = self._by
        if mirror:
            _swap(_interleaved(small, by.planar), _interleaved(values, by.planar))
        else:
            values[...] = small
        # Converting first and computing in place is faster than NumPy's arithmetic on mixed types.
        rows = values if by.planar else values.reshape(len(values), -1)
        np.subtract(rows, by.mean, out=rows)
        np.multiply(rows, by.scale, out=rows)

    def _resize(self, image: _Image, target: _Image) -> None:
        by = self._by
        if by.cut != "centre":
            by.resize(image, target)
            return
        size, (height, width) = by.spec.size, image.shape[:2]
        scale = min(height, width) / by.spec.shorter
        height, width = (max(round(side / scale), size) for side in (height, width))
        y, x = (height - size + 1) // 2, (width - size + 1) // 2  # half a pixel goes down and right, as in DALI
        whole = np.empty((height, width, 3), np.uint8)
        by.resize(image, whole)
        target[...] = whole[y : y + size, x : x + size]


def put_all(canvas: Canvas, places: Sequence[int], images: Sequence[_Image], mirror: Sequence[int]) -> None:
    """Put several images, in one thread."""
    for at, image, turned in zip(places, images, mirror, strict=True):
        canvas.put(at, image, mirror=bool(turned))


def _interleaved(image: npt.NDArray[Any], planar: bool) -> npt.NDArray[Any]:
    return image.transpose(1, 2, 0) if planar else image


def _swap(source: _Image, target: npt.NDArray[Any]) -> None:
    """Copy [h, w, 3] with left and right swapped; one colour after the other, since a loop of three is slow."""
    for colour in range(3):
        target[..., colour] = source[:, ::-1, colour]
