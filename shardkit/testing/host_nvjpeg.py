"""A stand-in for a GPU's JPEG engines in tests: images are decoded by Pillow, at the addresses that are given.

It takes the place of a machine and its library, and like them it refuses what no engine takes, fails a whole batch for
one image, writes as many pixels as the bytes say, and does not care for the order of streams: what it is given it reads
and overwrites at once.
"""

from __future__ import annotations

import ctypes
import io
import threading
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image

from shardkit.errors import DeviceError
from shardkit.format.jpeg import JpegRefusal, inspect_jpeg
from shardkit.pipeline.nvjpeg_library import NvjpegError

if TYPE_CHECKING:
    import numpy.typing as npt

    from shardkit.storage.device import Stream
    from shardkit.testing.host_device import HostDevice

__all__ = ["HostNvjpeg"]

_CALL = "nvjpegDecodeBatched"
_BAD_JPEG, _NOT_SUPPORTED = 3, 4
_INVALID = 2


class HostNvjpeg:
    """What `shardkit.pipeline.nvjpeg.BatchDecode` says, on a `HostDevice`; threads may share it."""

    def __init__(self, device: HostDevice) -> None:
        """Start with no call made."""
        self._device = device
        self.batches: list[int] = []
        """Images of each call so far."""
        self.threads: set[str] = set()
        """Names of the threads that called."""
        self._failing: list[BaseException] = []

    def fail_next(self, error: int | BaseException) -> None:
        """Let the next call fail, whatever it is given: with a status of nvJPEG's, or an error."""
        self._failing.append(NvjpegError(_CALL, error) if isinstance(error, int) else error)

    def decode(
        self, addresses: npt.NDArray[np.uint64], sizes: npt.NDArray[np.uint64], destinations: npt.NDArray[np.void],
        stream: Stream,
    ) -> None:  # fmt: skip
        """Decode n images; see `BatchDecode`."""
        self.batches.append(len(addresses))
        self.threads.add(threading.current_thread().name)
        if self._failing:
            raise self._failing.pop(0)
        if not len(addresses):
            raise NvjpegError(_CALL, _INVALID)
        decoded = [self._decoded(address, size) for address, size in zip(addresses.tolist(), sizes.tolist(),
                                                                        strict=True)]  # fmt: skip
        places = destinations["channel"][:, 0].tolist(), destinations["pitch"][:, 0].tolist()
        for pixels, address, pitch in zip(decoded, *places, strict=True):
            self._write(pixels, address, pitch)

    def _decoded(self, address: int, size: int) -> npt.NDArray[np.uint8]:
        data = ctypes.string_at(self._owned(address, size), size)
        try:
            facts = inspect_jpeg(data)
        except JpegRefusal:
            raise NvjpegError(_CALL, _BAD_JPEG) from None
        if not facts.hardware_decodable:
            raise NvjpegError(_CALL, _NOT_SUPPORTED)
        try:
            with Image.open(io.BytesIO(data), formats=["JPEG"]) as image:
                return np.array(image.convert("RGB"))
        except OSError:
            raise NvjpegError(_CALL, _BAD_JPEG) from None

    def _write(self, pixels: npt.NDArray[np.uint8], address: int, pitch: int) -> None:
        height, width = pixels.shape[:2]
        self._owned(address, pitch * (height - 1) + 3 * width)
        for row in range(height):
            ctypes.memmove(address + row * pitch, pixels[row].ctypes.data, 3 * width)

    def _owned(self, address: int, nbytes: int) -> int:
        if not self._device.may_touch(address, nbytes, on_device=True):
            raise DeviceError("a GPU failed an operation", found=f"{_CALL}: {address:#x} is not the device's")
        return address
