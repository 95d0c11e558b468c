"""A graph of DALI's that works on finished squares: a user's function, or RandAugment; then mirrors and normalises.

A graph of its own, apart from decoding: an image that cannot be decoded does not disturb its random numbers.
"""

from __future__ import annotations

import contextlib
import warnings
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from shardkit.errors import ConfigError, ShardkitError
from shardkit.pipeline.augment import RANDAUGMENT, random_operations
from shardkit.pipeline.dali_library import telling_line

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy.typing as npt

    from shardkit.pipeline.dali_library import Dali
    from shardkit.pipeline.decoder import DecodeSpec
    from shardkit.pipeline.finish import Pixels
    from shardkit.pipeline.flight import Flight

__all__ = ["Augmenter"]

_Foreign: TypeAlias = Any  # nodes of DALI's graph, tensors
_SEEDS = (1 << 31) - 1  # DALI takes more, its random operators use no more
_REMEDY = "let it return one DALI node of images [size, size, 3], as the one that it is given"
_SQUARE, _MIRROR, _OPERATION, _NEGATIVE = "square", "mirror", "operation", "negative"


class Augmenter:
    """Augments batches, in order, in one thread."""

    def __init__(self, dali: Dali, spec: DecodeSpec, *, batch_size: int, epoch: int) -> None:
        """Build the graph of an epoch.

        Args:
            dali: the library.
            spec: whose recipe works on squares.
            batch_size: the most images of a batch.
            epoch: decides with the seed what random operators of a function draw.

        Raises:
            ConfigError: the function of `spec.augment` cannot be called, or returns no node.
        """
        self._dali, self._spec, self._recipe = dali, spec, spec.recipe
        self._suite = dali.suite(use_shape=True) if self._recipe.randaugment else []
        build = dali.pipeline_def(self._graph, enable_conditionals=self._recipe.randaugment)
        # DALI's suite uses operators by their deprecated names and says so past every filter.
        quiet = warnings.catch_warnings(record=True) if self._recipe.randaugment else contextlib.nullcontext()
        with quiet, self._blaming():
            self._pipe = build(
                batch_size=batch_size, num_threads=spec.thread_count, device_id=None, prefetch_queue_depth=1,
                seed=(spec.seed * 1_000_003 + epoch) % _SEEDS,
            )  # fmt: skip
            self._pipe.build()

    def augmented(self, flight: Flight) -> npt.NDArray[Any]:
        """Wait for a batch of squares and return its pixels, as `DecodedBatch.pixels` says.

        Raises:
            ConfigError: the function of `spec.augment` fails on it, or makes something else of it.
            ShardkitError: as `Flight.wait`.
        """
        squares = flight.wait()
        size, count = self._spec.size, len(squares)
        shape = (count, size, size, 3) if self._spec.channels_last else (count, 3, size, size)
        if not count:
            return np.empty(shape, self._spec.dtype)
        with self._blaming():
            images = self._run(squares, flight)
            shapes = images.shape()
        if len(shapes) != count or any(found != shape[1:] for found in shapes):
            odd = next((found for found in shapes if found != shape[1:]), shape[1:])
            raise ConfigError(
                "the function of augment= returns other images than it must",
                expected=_told(count, shape[1:], self._spec), found=_told(len(shapes), odd, self._spec), remedy=_REMEDY,
            )  # fmt: skip
        return np.from_dlpack(images.as_tensor())

    def _run(self, squares: Pixels, flight: Flight) -> _Foreign:
        pipe, held = self._pipe, [squares]  # DALI looks at all of it until its output is there
        pipe.feed_input(_SQUARE, squares)
        if flight.crops is not None:
            held.append(flight.crops.mirror)
            pipe.feed_input(_MIRROR, held[-1])
        if self._recipe.randaugment:
            batch = flight.batch
            drawn = random_operations(batch.ids, len(self._suite), seed=self._spec.seed, epoch=batch.epoch)
            held += [drawn.operation, drawn.negative]
            for number in range(RANDAUGMENT.operations):
                pipe.feed_input(f"{_OPERATION}{number}", drawn.operation[number])
                pipe.feed_input(f"{_NEGATIVE}{number}", drawn.negative[number])
        pipe.schedule_run()
        (images,) = pipe.share_outputs()
        pipe.release_outputs()  # for its queue; the memory stays whoever's holds `images`
        return images

    @contextlib.contextmanager
    def _blaming(self) -> Iterator[None]:
        """Say of an error that the user's function is where to look."""
        try:
            yield
        except Exception as error:
            if self._recipe.function is None or isinstance(error, ShardkitError):
                raise
            raise ConfigError(
                "the function of augment= fails as a part of DALI's graph", found=telling_line(error), remedy=_REMEDY
            ) from error

    def _graph(self) -> _Foreign:
        fn, types, spec = self._dali.fn, self._dali.types, self._spec
        square = fn.external_source(name=_SQUARE, no_copy=True, dtype=types.UINT8, ndim=3, layout="HWC")
        function = self._recipe.function
        square = self._randaugmented(square) if function is None else function(square)
        plain = spec.dtype == "uint8"
        return fn.crop_mirror_normalize(
            square,
            mirror=0 if self._recipe.cut == "centre" else self._number(_MIRROR),
            dtype={"float32": types.FLOAT, "float16": types.FLOAT16, "uint8": types.UINT8}[spec.dtype],
            output_layout="HWC" if spec.channels_last else "CHW",
            mean=[0.0] * 3 if plain else list(spec.mean),
            std=[1.0] * 3 if plain else list(spec.std),
        )

    def _randaugmented(self, square: _Foreign) -> _Foreign:
        core, size = self._dali.auto_aug, self._spec.size
        for number in range(RANDAUGMENT.operations):
            square = core.select(
                self._suite, self._number(f"{_OPERATION}{number}"), data=square, num_magnitude_bins=RANDAUGMENT.bins,
                magnitude_bin=core.signed_bin(RANDAUGMENT.magnitude, self._number(f"{_NEGATIVE}{number}")),
                shape=[size, size], fill_value=128,
            )  # fmt: skip
        return square

    def _number(self, name: str) -> _Foreign:
        return self._dali.fn.external_source(name=name, no_copy=True, dtype=self._dali.types.INT32, ndim=0)


def _told(count: int, shape: tuple[int, ...], spec: DecodeSpec) -> str:
    """Return a shape as the function sees it: the colours last."""
    seen = shape if spec.channels_last else (*shape[1:], *shape[:1])
    return f"{count} of {' x '.join(map(str, seen))}"
