"""DALI's mixed decoder as a back end: encoded images in host memory become whole pixels in a GPU's.

One graph of a source and a decoder, fed by hand. Three runs may be started before the first is collected: one is
decoded while the next ones wait for their turn.
"""

from __future__ import annotations

import contextlib
import logging
import re
from collections import deque
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np

from shardkit.errors import CapabilityError, DeviceError
from shardkit.pipeline.dali_library import (
    DaliMemory,
    device_failure,
    guarded,
    host_tensors,
    leave_standing,
    telling_line,
)
from shardkit.pipeline.gpu_backend import Decoded, Undecodable
from shardkit.storage.reader import HOST, MemorySpace

if TYPE_CHECKING:
    import numpy.typing as npt

    from shardkit.pipeline.dali_library import Dali
    from shardkit.pipeline.gpu_backend import Job
    from shardkit.storage.device import Device

    _Ints: TypeAlias = npt.NDArray[np.int64]

__all__ = ["DaliBackend"]

_Foreign: TypeAlias = Any  # DALI has no types: pipelines, lists of tensors
_JPEG = "jpeg"
_KEPT_INPUTS = 3  # one was seen not to be enough on a GPU
_NAMED = re.compile(r"sample #(\d+)")
_HINTED_BYTES = 1 << 30  # the hardware decoder prepares memory for a whole batch of images as large as the hint

_SMALLEST = (
    b"\xff\xd8\xff\xdb\x00\x43\x00" + b"\1" * 64 + b"\xff\xc0\x00\x0b\x08\x00\x08\x00\x08\x01\x01\x11\x00"
    b"\xff\xc4\x00\x14\x00\x01" + bytes(16) + b"\xff\xc4\x00\x14\x10\x01" + bytes(16) +
    b"\xff\xda\x00\x08\x01\x01\x00\x00\x3f\x00\x3f\xff\xd9"
)  # fmt: skip
"""A gray JPEG of 8 x 8 pixels."""

_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Started:
    """A job in the graph, and the tensors that look at its memory."""

    job: Job
    tensors: _Foreign


class DaliBackend:
    """A `Backend` on DALI; its images are as they are shown: DALI applies their orientation.

    Payloads are plain JPEGs (`shardkit.format.jpeg_header.is_plain_jpeg`): what it cannot make out ends the process.
    """

    accepts: MemorySpace = HOST
    name = "dali"
    depth = 3
    device_bytes = 0  # DALI does not tell

    def __init__(
        self, dali: Dali, device: Device, *, batch_size: int, threads: int, hw_decoder_load: float = 1.0,
        largest: tuple[int, int] = (0, 0), pinned: bool = False, decoder_device: Literal["mixed", "cpu"] = "mixed",
    ) -> None:  # fmt: skip
        """Build the graph.

        Args:
            dali: the library.
            device: where the pixels go.
            batch_size: the most images of a job.
            threads: of DALI's, for what the GPU's engines do not do.
            hw_decoder_load: share of a job that the JPEG engines take, 0..1.
            largest: width and height of the largest image, for which the engines' memory is prepared; 0 for unknown.
            pinned: payloads lie in pinned memory, and DALI need not copy them to its own.
            decoder_device: "cpu" decodes without a GPU, to host memory: for devices whose memory that is.

        Raises:
            CapabilityError: DALI cannot work on the device.
        """
        self._dali = dali
        self._mixed = decoder_device == "mixed"
        self._pinned = pinned and self._mixed
        self._device = device
        self._started: deque[_Started] = deque()
        self._given_up: list[_Started] = []
        self._told = False
        self._holds = False  # DALI looks at the payloads of a job that was collected
        fn, types = dali.fn, dali.types
        width, height = _hint(largest, batch_size)

        def graph() -> _Foreign:
            jpeg = fn.external_source(name=_JPEG, no_copy=True, dtype=types.UINT8, ndim=1)
            return fn.decoders.image(
                jpeg, device=decoder_device, output_type=types.RGB, hw_decoder_load=hw_decoder_load,
                preallocate_width_hint=width, preallocate_height_hint=height,
            )  # fmt: skip

        # A queue of 1 is what makes `schedule_run` start one run at a time; how many wait is up to the caller.
        build = dali.pipeline_def(graph)
        number = device.number if self._mixed else None
        try:
            with device.current():
                pipe = build(batch_size=batch_size, num_threads=threads, device_id=number, prefetch_queue_depth=1)
                pipe.build()
        except RuntimeError as error:
            raise CapabilityError(
                "DALI cannot decode on this GPU", found=telling_line(error),
                remedy="install the nvidia-dali build for the driver's CUDA version, or take decoder='cpu'",
            ) from error  # fmt: skip
        self._pipe: _Foreign = guarded(pipe, device)

    def start(self, job: Job) -> None:
        """Begin to decode; see `Backend`."""
        try:
            with self._device.current():  # DALI asks CUDA for the thread's and says that pinned memory belongs to it
                tensors = host_tensors(self._dali, job.views, pinned=self._pinned)
                self._run(tensors)
        except Exception as error:
            if (failure := device_failure(error, self._device)) is None:
                raise
            raise failure from error
        self._started.append(_Started(job, tensors))
        self._holds = True

    def collect(self) -> Decoded:
        """Wait for the oldest job; see `Backend`."""
        try:
            images = self._outcome()
        except Exception as error:  # DALI turns its errors into many of Python's
            raise self._given_up_for(error) from error
        self._started.popleft()
        self._given_up.clear()
        return _decoded(images, DaliMemory(images, self._device))

    def rest(self) -> None:
        """Let DALI let go of the last job's payloads; see `Backend`.

        The graph keeps the last inputs that it was given until further ones come, which here are single small images.
        """
        if self._device.lost:
            return
        while self._started:  # of a line that was closed
            with contextlib.suppress(Undecodable, DeviceError):
                self.collect()
        if self._holds and self._pipe is not None:
            self._holds = False
            with contextlib.suppress(Exception):  # whatever it is, the next job meets it again
                for _ in range(_KEPT_INPUTS):
                    self._run(host_tensors(self._dali, [np.frombuffer(_SMALLEST, np.uint8)]))
                    self._outcome()

    def close(self) -> None:
        """Wait for what was started, and drop it; see `Backend`."""
        if self._pipe is not None and self._device.lost:
            leave_standing(self._pipe, *self._started, *self._given_up)
            self._started.clear()
        while self._started:
            with contextlib.suppress(Undecodable, DeviceError):
                self.collect()
        self._pipe = None
        self._given_up.clear()

    def _run(self, tensors: _Foreign) -> None:
        self._pipe.feed_input(_JPEG, tensors)
        self._pipe.schedule_run()

    def _outcome(self) -> _Foreign:
        """Wait until the oldest run is over, on the GPU, too: its inputs are free and its output is there."""
        with self._device.current():
            (images,) = self._pipe.share_outputs()
            self._pipe.release_outputs()  # for its queue; the memory stays whoever's holds `images`
            return images

    def _given_up_for(self, error: Exception) -> Undecodable | DeviceError:
        """Take the oldest job out, whose run has failed, and return what that means.

        The GPU may still read its payloads: a run that fails does not wait for what it has begun. A later one that
        succeeds has waited for it, in the same stream; if none is under way, one of a single small image does.
        """
        run = self._started.popleft()
        self._given_up.append(run)
        count = len(run.job)
        if (failure := device_failure(error, self._device)) is not None:
            return failure
        if not self._started:
            try:
                self._run(host_tensors(self._dali, [np.frombuffer(_SMALLEST, np.uint8)]))
                self._outcome()
            except Exception as dead:
                return DeviceError("DALI decodes nothing any more", found=telling_line(dead))
            self._given_up.clear()
        number = int(named[1]) if (named := _NAMED.search(str(error))) else -1
        if 0 <= number < count:
            return Undecodable({number: "DALI cannot decode it"})
        if not self._told:
            self._told = True
            _log.warning(
                "DALI has failed and names no image; Pillow decodes what it should have decoded, slower, now and "
                "whenever this happens again: %s", telling_line(error),
            )  # fmt: skip
        return Undecodable(dict.fromkeys(range(count), telling_line(error)))


def _hint(largest: tuple[int, int], batch_size: int) -> tuple[int, int]:
    """Return width and height to prepare for; 0, 0 where a batch of the largest would take too much memory."""
    return largest if 3 * largest[0] * largest[1] * batch_size <= _HINTED_BYTES else (0, 0)


def _decoded(images: _Foreign, memory: DaliMemory) -> Decoded:
    shapes = images.shape()
    sides = np.fromiter(chain.from_iterable(shapes), np.int64, 3 * len(shapes)).reshape(-1, 3)
    height, width = sides[:, 0].copy(), sides[:, 1].copy()
    pitch = 3 * width
    upright = np.ones(len(shapes), np.int64)
    return Decoded(_addresses(images, pitch * height), pitch, width, height, upright, memory)


def _addresses(images: _Foreign, sizes: _Ints) -> _Ints:
    """Return where each image begins; one call of DALI's an image costs 1 µs, and is not needed.

    Args:
        images: a list of tensors.
        sizes: [n] bytes of each.
    """
    last = len(sizes) - 1
    with contextlib.suppress(RuntimeError):  # it lies in pieces
        addresses: _Ints = images.data_ptr() + np.cumsum(sizes) - sizes
        if images[last].data_ptr() == addresses[last]:
            return addresses
    return np.array([images[number].data_ptr() for number in range(len(sizes))], np.int64)
