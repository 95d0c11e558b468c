"""nvJPEG's engines as a back end: encoded images that lie in GPU memory become whole images in one packed slab.

The sizes are known from the index, so every image's place is planned before anything runs, by other threads than the
decoding one. The engines do not keep the order of streams: a slab is lent by a `BufferPool`, and comes back when nobody
looks at it any more, which is after the event behind its last reader.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from shardkit.extent import align_up
from shardkit.pipeline.gpu_backend import Decoded, Share, Undecodable
from shardkit.pipeline.nvjpeg_library import DESTINATION, NvjpegError
from shardkit.storage.buffers import BufferPool
from shardkit.storage.reader import address_of
from shardkit.storage.stream_spans import StreamSpans
from shardkit.tracing import current_step

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy.typing as npt

    from shardkit.dataset.samples import Samples
    from shardkit.pipeline.gpu_backend import Job
    from shardkit.storage.device import Device, Stream
    from shardkit.storage.reader import MemorySpace

    _Ints = npt.NDArray[np.int64]

__all__ = ["BatchDecode", "NvjpegBackend", "SlabPlan", "image_bytes", "plan_slab", "slab_budget"]

PLACE_ALIGN = 256
"""Bytes that the place of an image in a slab is a multiple of."""
PITCH_ALIGN = 32
"""Bytes that a row is rounded up to."""

_DEVIATIONS = 4
"""By how much a usual batch is larger than the mean one, in standard deviations."""
_LARGEST = 256 << 20
"""Bytes of the largest image for which alone a slab is made larger; Pillow decodes larger ones."""
_TELLING = 8  # images of a job that must all fail before it is told
_FATAL = frozenset(("NOT_INITIALIZED", "ALLOCATOR_FAILURE", "ARCH_MISMATCH"))  # of no single image

_log = logging.getLogger(__name__)


class BatchDecode(Protocol):
    """What is used of `shardkit.pipeline.nvjpeg_library.NvjpegLibrary`."""

    def decode(
        self, addresses: npt.NDArray[np.uint64], sizes: npt.NDArray[np.uint64], destinations: npt.NDArray[np.void],
        stream: Stream, /,
    ) -> None:  # fmt: skip
        """Decode images, and wait until they are.

        Raises:
            NvjpegError: the batch failed.
        """


@dataclass(frozen=True, slots=True, eq=False)
class SlabPlan:
    """Where n images lie in one slab."""

    offsets: _Ints
    """[n] bytes from its start."""
    pitch: _Ints
    """[n] bytes of a row."""
    nbytes: int
    """Of the slab."""
    destinations: npt.NDArray[np.void]
    """[n] of `DESTINATION`: the places of a slab that begins at address 0."""

    def destinations_at(self, address: int) -> npt.NDArray[np.void]:
        """Return the places of a slab that begins there; [n] of `DESTINATION`."""
        found = self.destinations.copy()
        found["channel"][:, 0] += np.uint64(address)
        return found


def plan_slab(width: _Ints, height: _Ints) -> SlabPlan:
    """Pack images one behind the other.

    Args:
        width: [n] pixels a line as stored; > 0.
        height: [n] lines; > 0.
    """
    ends, pitch = np.cumsum(image_bytes(width, height)), _pitch(width)
    offsets = np.concatenate([np.zeros(1, np.int64), ends[:-1]])[: len(ends)]
    destinations = np.zeros(len(ends), DESTINATION)
    destinations["channel"][:, 0], destinations["pitch"][:, 0] = offsets, pitch
    return SlabPlan(offsets, pitch, int(ends[-1]) if len(ends) else 0, destinations)


def image_bytes(width: _Ints, height: _Ints) -> _Ints:
    """Return the bytes of a slab that images of these sizes take; int64 [n]."""
    return _rounded(_pitch(width) * np.asarray(height, np.int64), PLACE_ALIGN)


def slab_budget(samples: Samples, batch_size: int, *, slabs: int = 3) -> int:
    """Return the bytes of device memory that slabs of usual batches of these samples take, counted beforehand.

    A batch is a random choice of samples, so a usual one is as large as the mean and four standard deviations. What
    still does not fit is decoded in several jobs. The largest single image fits in any case, up to 256 MiB.

    Args:
        samples: whose sizes the index knows.
        batch_size: the most images of a batch.
        slabs: how many: one is decoded into, one is being finished, and one more lets neither wait for the other.
    """
    count, total, squares, largest = 0, 0.0, 0.0, 0
    for width, height in zip(samples.size_chunks("width"), samples.size_chunks("height"), strict=True):
        sizes = image_bytes(width.astype(np.int64), height.astype(np.int64)).astype(np.float64)
        count, total, squares = count + len(sizes), total + float(sizes.sum()), squares + float(sizes @ sizes)
        largest = max(largest, int(sizes.max(initial=0)))
    mean = total / max(count, 1)
    deviation = max(squares / max(count, 1) - mean**2, 0.0) ** 0.5
    usual = batch_size * mean + _DEVIATIONS * deviation * batch_size**0.5
    usual = min(usual, float(batch_size * largest))
    return align_up(max(int(slabs * usual), min(largest, _LARGEST), PLACE_ALIGN), 2 << 20)


class NvjpegBackend:
    """A `Backend` on nvJPEG's hardware decoder."""

    name = "nvjpeg"
    depth = 1

    def __init__(self, library: BatchDecode, device: Device, *, budget_bytes: int) -> None:
        """Take the memory of slabs.

        Args:
            library: opened on `device`.
            device: in whose memory the encoded images lie.
            budget_bytes: of `slab_budget`.

        Raises:
            CapabilityError: the device has no memory left.
        """
        self.accepts: MemorySpace = device.space
        self._library: BatchDecode | None = library
        self._stream = device.stream()
        self._spans = StreamSpans(device, self._stream, "decode")
        self._slabs = BufferPool(budget_bytes, memory=device.memory)
        self._started: tuple[Job, SlabPlan, memoryview] | None = None
        self._told = False

    @property
    def device_bytes(self) -> int:
        """What slabs take; the library's own is not told."""
        return self._slabs.budget_bytes

    def shares(self, width: _Ints, height: _Ints) -> list[Share]:
        """See `shardkit.pipeline.gpu_backend.Shares`: as few jobs as the budget allows, each with its plan."""
        return [
            Share(numbers, plan_slab(width[numbers], height[numbers]))
            for numbers in _fitting(image_bytes(width, height), self._slabs.budget_bytes)
        ]

    def start(self, job: Job) -> None:
        """Wait for a slab; see `Backend`."""
        assert isinstance(job.plan, SlabPlan), "the job is of our `shares`"
        self._started = job, job.plan, self._slabs.acquire(job.plan.nbytes)

    def collect(self) -> Decoded:
        """Decode the job, and return it; see `Backend`."""
        assert self._started is not None, "no job is started"
        (job, plan, slab), self._started = self._started, None
        destinations = plan.destinations_at(address_of(slab))
        payloads, sizes = job.addresses.view(np.uint64), job.sizes.view(np.uint64)
        try:
            self._decode(payloads, sizes, destinations)
        except NvjpegError as error:
            _require_of_an_image(error)
            raise Undecodable(self._refused(payloads, sizes, destinations)) from None
        addresses = plan.offsets + address_of(slab)
        return Decoded(addresses, plan.pitch, job.width, job.height, job.orientation, slab)

    def rest(self) -> None:
        """Do nothing: what was collected is not looked at any more."""

    def close(self) -> None:
        """Drop what was started and the library, and give slabs back when nobody looks at them any more; idempotent."""
        self._started = self._library = None
        self._slabs.close()

    def _decode(
        self, payloads: npt.NDArray[np.uint64], sizes: npt.NDArray[np.uint64], destinations: npt.NDArray[np.void]
    ) -> None:
        assert self._library is not None, "it is closed"
        begun = self._spans.begin()
        self._library.decode(payloads, sizes, destinations, self._stream)
        if begun is not None:  # the engines keep no stream's order, but here they are through
            self._spans.end(begun, "decode", step=current_step(), nbytes=int(sizes.sum()))
            self._stream.synchronize()
            self._spans.note()

    def _refused(
        self, payloads: npt.NDArray[np.uint64], sizes: npt.NDArray[np.uint64], destinations: npt.NDArray[np.void]
    ) -> dict[int, str]:
        """Find the images that fail a batch, by halving it; at least one."""
        bad: dict[int, str] = {}
        failed = [(0, len(payloads))]  # of these at least one fails, if batches fail for their images
        while failed:
            first, end = failed.pop()
            for start, stop in _halves(first, end):
                part = slice(start, stop)
                try:
                    self._decode(payloads[part], sizes[part], destinations[part])
                except NvjpegError as error:
                    _require_of_an_image(error)
                    if stop - start > 1:
                        failed.append((start, stop))
                    else:
                        bad[start] = f"nvJPEG: {error.status}"
        # A batch whose halves all succeed failed for no image: it goes to Pillow whole rather than round and round.
        bad = bad or dict.fromkeys(range(len(payloads)), "nvJPEG: fails on the whole batch, and on no part of it")
        if len(bad) == len(payloads) >= _TELLING and not self._told:
            self._told = True
            _log.warning(
                "nvJPEG has decoded none of %d images; Pillow decodes them, slower, now and whenever this happens "
                "again: %s", len(bad), next(iter(bad.values())),
            )  # fmt: skip
        return bad


def _halves(first: int, end: int) -> Iterator[tuple[int, int]]:
    """Yield the halves of a range of at least one; of one there is itself."""
    middle = (first + end) // 2
    if middle > first:
        yield first, middle
    yield middle, end


def _require_of_an_image(error: NvjpegError) -> None:
    if error.status in _FATAL:
        raise error


def _fitting(sizes: _Ints, budget: int) -> list[_Ints]:
    """Return numbers, in order, whose sizes are within the budget together; those above it alone are left out."""
    numbers = np.flatnonzero(sizes <= budget)
    found = []
    ends = np.cumsum(sizes[numbers])
    first, before = 0, 0
    while first < len(numbers):
        stop = int(np.searchsorted(ends, before + budget, side="right"))
        found.append(numbers[first:stop])
        first, before = stop, int(ends[stop - 1])
    return found


def _pitch(width: _Ints) -> _Ints:
    return _rounded(3 * np.asarray(width, np.int64), PITCH_ALIGN)


def _rounded(values: _Ints, unit: int) -> _Ints:
    return -(-values // unit) * unit
