"""A graph of DALI's that works on finished squares: a user's function, or RandAugment; then mirrors and normalises.

A graph of its own, apart from decoding: an image that cannot be decoded does not disturb its random numbers. It is the
same on the CPU and on a GPU, where it takes the squares of a batch as the one piece of memory that they are.
"""

from __future__ import annotations

import contextlib
import math
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np

from shardkit.errors import ConfigError, ShardkitError
from shardkit.pipeline.augment import RANDAUGMENT, random_operations
from shardkit.pipeline.dali_library import (
    DaliMemory,
    device_failure,
    guarded,
    leave_standing,
    telling_line,
)
from shardkit.storage.reader import address_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy.typing as npt

    from shardkit.pipeline.dali_library import Dali
    from shardkit.pipeline.decoder import DecodeSpec
    from shardkit.pipeline.flight import Flight
    from shardkit.storage.device import Device

__all__ = ["AugmentedOnDevice", "Augmenter"]

_Foreign: TypeAlias = Any  # nodes of DALI's graph, tensors
_SEEDS = (1 << 31) - 1  # DALI takes more, its random operators use no more
_REMEDY = "let it return one DALI node of images [size, size, 3], as the one that it is given"
_SQUARE, _MIRROR, _OPERATION, _NEGATIVE = "square", "mirror", "operation", "negative"


@dataclass(frozen=True, slots=True, eq=False)
class AugmentedOnDevice:
    """A batch in device memory, dense, as `DecodedBatch.pixels` says; no work that writes it is left."""

    address: int
    """Of its first byte."""
    nbytes: int
    """Its size."""
    memory: object
    """Keeps it; who drops it makes sure that nothing reads the batch any more."""


class Augmenter:
    """Augments batches, in order, in one thread."""

    def __init__(
        self, dali: Dali, spec: DecodeSpec, *, batch_size: int, epoch: int, device: Device | None = None,
        operators: Literal["gpu", "cpu"] = "gpu",
    ) -> None:  # fmt: skip
        """Build the graph of an epoch.

        Args:
            dali: the library.
            spec: whose recipe works on squares.
            batch_size: the most images of a batch.
            epoch: decides with the seed what random operators of a function draw.
            device: where squares and results lie; None for host memory.
            operators: "cpu" works in host memory although the squares lie on a device, by two copies.

        Raises:
            ConfigError: the function of `spec.augment` cannot be called, or returns no node.
        """
        self._dali, self._spec, self._recipe = dali, spec, spec.recipe
        self._device = (device, device.stream()) if device is not None else None
        self._on_gpu = operators == "gpu" and device is not None
        # In whose order inputs come. Without one DALI takes CUDA's default stream, and waits for what PyTorch computes.
        self._order = self._device[1].handle if self._device is not None and self._on_gpu else None
        self._suite = dali.suite(use_shape=True) if self._recipe.randaugment else []
        build = dali.pipeline_def(self._graph, enable_conditionals=self._recipe.randaugment)
        # DALI's suite uses operators by their deprecated names and says so past every filter.
        quiet = warnings.catch_warnings(record=True) if self._recipe.randaugment else contextlib.nullcontext()
        current = contextlib.nullcontext() if device is None else device.current()
        with quiet, current, self._blaming():
            self._pipe = build(
                batch_size=batch_size, num_threads=spec.thread_count, prefetch_queue_depth=1,
                device_id=device.number if device is not None and self._on_gpu else None,
                seed=(spec.seed * 1_000_003 + epoch) % _SEEDS,
            )  # fmt: skip
            self._pipe.build()
            guarded(self._pipe, device if self._on_gpu else None)

    def close(self) -> None:
        """Let go of the graph; idempotent."""
        if self._device is not None and self._device[0].lost:
            leave_standing(self._pipe)
        self._pipe = None

    def augmented(self, flight: Flight) -> npt.NDArray[Any]:
        """Wait for a batch of squares in host memory and return its pixels, as `DecodedBatch.pixels` says.

        Raises:
            ConfigError: the function of `spec.augment` fails on it, or makes something else of it.
            ShardkitError: as `Flight.wait`.
        """
        squares = flight.wait()
        if not len(squares):
            return np.empty(self._shape(0), self._spec.dtype)
        mirror = flight.crops.mirror if flight.crops is not None else None
        return self._on_host(np.asarray(squares), flight.batch.ids, flight.batch.epoch, mirror)

    def augmented_on_device(
        self, squares: int, ids: npt.NDArray[np.int64], epoch: int, mirror: npt.NDArray[np.int32] | None
    ) -> AugmentedOnDevice:
        """Return the pixels of a batch of squares in device memory; see `shardkit.pipeline.gpu_backend`.

        Raises:
            ConfigError: as `augmented`.
            DeviceError: the GPU failed.
        """
        if self._device is None:
            raise TypeError("this augmenter was made without a device")
        (device, stream), size, count = self._device, self._spec.size, len(ids)
        shape = count, size, size, 3
        if self._on_gpu:
            fed = self._dali.tensors.TensorListGPU(_OnDevice(squares, shape), "HWC", device.number)
            images = self._images(fed, ids, epoch, mirror)
            nbytes = math.prod(self._shape(count)) * np.dtype(self._spec.dtype).itemsize
            return AugmentedOnDevice(images.data_ptr(), nbytes, DaliMemory(images, device))
        held = np.empty(shape, np.uint8)
        stream.download(held.ctypes.data, squares, held.nbytes)
        stream.synchronize()
        pixels = self._on_host(held, ids, epoch, mirror)
        memory = device.memory(pixels.nbytes)
        stream.upload(address_of(memory), pixels.ctypes.data, pixels.nbytes)
        stream.synchronize()
        return AugmentedOnDevice(address_of(memory), pixels.nbytes, memory)

    def _on_host(
        self, squares: npt.NDArray[np.uint8], ids: npt.NDArray[np.int64], epoch: int,
        mirror: npt.NDArray[np.int32] | None,
    ) -> npt.NDArray[Any]:  # fmt: skip
        fed = self._dali.tensors.TensorListCPU(squares, "HWC")
        return np.from_dlpack(self._images(fed, ids, epoch, mirror).as_tensor())

    def _images(
        self, squares: _Foreign, ids: npt.NDArray[np.int64], epoch: int, mirror: npt.NDArray[np.int32] | None
    ) -> _Foreign:
        """Return the batch as a list of DALI's, dense and in one piece, that is there."""
        count = len(ids)
        shape = self._shape(count)
        with self._blaming():
            images = self._run(squares, ids, epoch, mirror)
            shapes = images.shape()
        if len(shapes) != count or any(found != shape[1:] for found in shapes):
            odd = next((found for found in shapes if found != shape[1:]), shape[1:])
            raise ConfigError(
                "the function of augment= returns other images than it must",
                expected=_told(count, shape[1:], self._spec), found=_told(len(shapes), odd, self._spec), remedy=_REMEDY,
            )  # fmt: skip
        return images

    def _run(
        self, squares: _Foreign, ids: npt.NDArray[np.int64], epoch: int, mirror: npt.NDArray[np.int32] | None
    ) -> _Foreign:
        # DALI looks at all of it until its output is there; who holds the lists drops them, and not a thread of DALI's.
        held: dict[str, _Foreign] = {_SQUARE: squares}
        if self._recipe.cut != "centre":
            held[_MIRROR] = self._numbers(np.zeros(len(ids), np.int32) if mirror is None else mirror)
        if self._recipe.randaugment:
            drawn = random_operations(ids, len(self._suite), seed=self._spec.seed, epoch=epoch)
            for number in range(RANDAUGMENT.operations):
                held[f"{_OPERATION}{number}"] = self._numbers(drawn.operation[number])
                held[f"{_NEGATIVE}{number}"] = self._numbers(drawn.negative[number])
        pipe = self._pipe
        for name, fed in held.items():
            pipe.feed_input(name, fed, cuda_stream=self._order)
        pipe.schedule_run()
        (images,) = pipe.share_outputs()
        pipe.release_outputs()  # for its queue; the memory stays whoever's holds `images`
        return images

    def _numbers(self, numbers: npt.NDArray[np.int32]) -> _Foreign:
        return self._dali.tensors.TensorListCPU(numbers)

    def _shape(self, count: int) -> tuple[int, ...]:
        size = self._spec.size
        return (count, size, size, 3) if self._spec.channels_last else (count, 3, size, size)

    @contextlib.contextmanager
    def _blaming(self) -> Iterator[None]:
        """Say of an error that the GPU or the user's function is where to look."""
        try:
            yield
        except Exception as error:
            if isinstance(error, ShardkitError):
                raise
            if self._device is not None and self._on_gpu and (failure := device_failure(error, self._device[0])):
                raise failure from error
            if self._recipe.function is None:
                raise
            raise ConfigError(
                "the function of augment= fails as a part of DALI's graph", found=telling_line(error), remedy=_REMEDY
            ) from error

    def _graph(self) -> _Foreign:
        fn, types, spec = self._dali.fn, self._dali.types, self._spec
        where = "gpu" if self._on_gpu else "cpu"
        square = fn.external_source(name=_SQUARE, device=where, no_copy=True, dtype=types.UINT8, ndim=3, layout="HWC")
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


class _OnDevice:
    """Dense uint8 in a GPU's memory, as other libraries take it."""

    def __init__(self, address: int, shape: tuple[int, ...]) -> None:
        # Without a stream to wait for: what was to be written there is.
        self.__cuda_array_interface__ = {
            "shape": shape, "typestr": "|u1", "data": (address, False), "strides": None, "version": 3,
        }  # fmt: skip
