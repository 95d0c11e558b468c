"""The last step on a GPU: launches that turn whole images into a batch's pixels, and the memory that they need."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from shardkit.extent import align_up
from shardkit.pipeline.decoder import DecodedBatch
from shardkit.pipeline.gpu_backend import Decoded
from shardkit.pipeline.gpu_canvas import begun, drawn_crops, facts_of, image_rows, output_of, pixel_shape
from shardkit.pipeline.gpu_memory import Room, Table
from shardkit.pipeline.kernels import IMAGE
from shardkit.storage.buffers import BufferPool
from shardkit.storage.reader import address_of
from shardkit.storage.stream_spans import StreamSpans

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy.typing as npt

    from shardkit.dataset.batch import EncodedBatch
    from shardkit.pipeline.decoder import DecodeSpec
    from shardkit.pipeline.gpu_backend import Allocate, SquareAugmenter
    from shardkit.pipeline.gpu_canvas import Facts, GpuCanvas
    from shardkit.pipeline.gpu_flight import GpuFlight
    from shardkit.pipeline.kernels import Kernels
    from shardkit.storage.device import Device, Event, Stream

    _Ints = npt.NDArray[np.int64]
    _Image = npt.NDArray[np.uint8]

__all__ = ["GpuFinisher", "Surroundings"]

_Array: TypeAlias = Any  # the consumer's own: torch's, NumPy's

_ALIGN = 256
_GROUP_BYTES = 64 << 20
"""Pixels that are sent to the device together where Pillow has decoded."""


@dataclass(frozen=True, slots=True, eq=False)
class Surroundings:
    """What all lines of a decoder work with."""

    spec: DecodeSpec
    device: Device
    kernels: Kernels
    stream: Stream
    """On which batches are finished."""
    allocate: Allocate
    batch_size: int
    """The most images of a batch."""


class GpuFinisher:
    """Finishes parts of batches; for one thread, which waits for each part's event before it asks for the next."""

    def __init__(self, around: Surroundings, augmenter: SquareAugmenter | None, *, in_flight: int) -> None:
        """Take the memory that batches need.

        Args:
            around: of the decoder.
            augmenter: works on squares; None where the recipe has no graph.
            in_flight: the most batches that are begun and not complete.

        Raises:
            CapabilityError: the device has no memory left.
        """
        self._around, self._augmenter = around, augmenter
        self._rows = Table(around.device, IMAGE, around.batch_size)
        self._numbers = Table(around.device, np.int64, 2 * around.batch_size)
        self._room = Room(around.device)
        self._spans = StreamSpans(around.device, around.stream, "finish")
        self._squares: BufferPool | None = None
        if augmenter is not None:
            one = 3 * around.spec.size**2 * around.batch_size
            # One more than can be lent: nobody ever waits.
            self._squares = BufferPool((in_flight + 1) * (one + (1 << 16)), memory=around.device.memory)

    @property
    def nbytes(self) -> int:
        """What it takes of the device."""
        return self._rows.nbytes + self._room.nbytes + (self._squares.budget_bytes if self._squares else 0)

    def finish(self, flight: GpuFlight, places: _Ints, facts: Facts, images: Decoded) -> Event:
        """Launch the work that makes images into their places of a batch, and return the event behind it.

        Args:
            flight: of the batch.
            places: [m] of it.
            facts: [m].
            images: [m]; stays until the event has passed.
        """
        around = self._around
        canvas = flight.canvas = flight.canvas or self._begun(flight)
        crops = drawn_crops(around.spec, facts, epoch=flight.batch.epoch)
        rows = image_rows(around.spec, images, crops)
        canvas.aim(rows, places, around.allocate)
        begun = self._spans.begin()
        address = self._rows.upload(around.stream, rows)
        around.kernels.finish(around.stream, address, len(rows), output_of(around.spec, rows))
        return self._spans.end(begun, "kernel", step=flight.batch.step)

    def finish_from_host(self, flight: GpuFlight, places: _Ints, facts: Facts, images: list[_Image]) -> Event:
        """Do likewise with images in host memory, [h, w, 3] as shown, which stay as long."""
        event: Event | None = None
        for group in _groups([image.nbytes for image in images]):
            if event is not None:
                event.wait()
            some = np.asarray(group)
            uploaded = self._uploaded([images[at] for at in group], flight.batch.step)
            event = self.finish(flight, places[some], facts[some], uploaded)
        assert event is not None, "a part has images"
        return event

    def pixels(self, flight: GpuFlight, event: Event | None) -> tuple[DecodedBatch, Event]:
        """Return a batch whose parts are all launched, and the event behind all work on it.

        Args:
            flight: of the batch.
            event: behind the last part; None for a batch without images.

        Raises:
            ConfigError: the function `augment` does not do what it must.
        """
        around, batch = self._around, flight.batch
        canvas = flight.canvas = flight.canvas or self._begun(flight)
        # Here and not by the consumer, to whom a copy of his own would be a wait for other threads.
        numbers = self._numbers_of(batch)
        if self._augmenter is None or not len(batch):
            event = around.stream.record()
            return DecodedBatch(canvas.pixels, batch, event, numbers), event
        if event is not None:
            event.wait()
        mirror = _mirror(around.spec, batch)
        made = self._augmenter.augmented_on_device(canvas.address, batch.ids, batch.epoch, mirror)
        memory = around.allocate(pixel_shape(around.spec, len(batch)), around.spec.dtype)
        begun = self._spans.begin()
        around.stream.copy(memory.address, made.address, made.nbytes)
        canvas.memory = made  # the squares go, this stays until the event has passed
        event = self._spans.end(begun, "copy", step=batch.step, nbytes=made.nbytes)
        return DecodedBatch(memory.pixels, batch, event, numbers), event

    def note(self) -> None:
        """Record when the device did what it has done; for who has waited for an event.

        Raises:
            DeviceError: the device has failed.
        """
        self._spans.note()

    def settle(self) -> None:
        """Wait for all work on the stream.

        Raises:
            DeviceError: some of it failed.
        """
        self._around.stream.synchronize()

    def _numbers_of(self, batch: EncodedBatch) -> list[_Array]:
        """Send labels and ids to the device, on the stream; int64 [n] each."""
        count = len(batch)
        memory = self._around.allocate((2 * count,), "int64")
        if count:
            self._numbers.send(self._around.stream, np.concatenate([batch.labels, batch.ids]), memory.address)
        return memory.split([(count,), (count,)])

    def _begun(self, flight: GpuFlight) -> GpuCanvas:
        around, count = self._around, len(flight.batch)
        if self._squares is None or not count:
            return begun(around.spec, count, around.allocate, None)
        memory = self._squares.acquire(3 * around.spec.size**2 * count)
        return begun(around.spec, count, around.allocate, (address_of(memory), memory))

    def _uploaded(self, images: list[_Image], step: int) -> Decoded:
        """Send images to the device, on the stream."""
        sizes = np.asarray([image.nbytes for image in images], np.int64)
        ends = np.cumsum((sizes + _ALIGN - 1) // _ALIGN * _ALIGN)
        addresses = self._room.take(int(ends[-1])) + np.concatenate([np.zeros(1, np.int64), ends[:-1]])
        begun = self._spans.begin()
        for address, image in zip(addresses.tolist(), images, strict=True):
            self._around.stream.upload(address, image.ctypes.data, image.nbytes)
        if begun is not None:
            self._spans.end(begun, "copy", step=step, nbytes=int(sizes.sum()))
        height, width = np.asarray([image.shape[:2] for image in images], np.int64).T
        return Decoded(addresses, 3 * width, width, height, np.ones_like(width), images)


def _mirror(spec: DecodeSpec, batch: EncodedBatch) -> npt.NDArray[np.int32] | None:
    crops = drawn_crops(spec, facts_of(batch, np.arange(len(batch))), epoch=batch.epoch)
    return None if crops is None else crops.mirror


def _groups(sizes: list[int]) -> Iterator[list[int]]:
    """Yield numbers, in order, whose sizes are not above the limit together; a larger one comes alone."""
    group: list[int] = []
    total = 0
    for number, size in enumerate(sizes):
        needed = align_up(size, _ALIGN)
        if group and total + needed > _GROUP_BYTES:
            yield group
            group, total = [], 0
        group.append(number)
        total += needed
    if group:
        yield group
