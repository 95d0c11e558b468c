"""nvJPEG's hardware backend on encoded images that lie in GPU memory, through ctypes: no package offers it.

One call decodes a batch; addresses, sizes and places come as arrays, so that nothing is done an image in Python. The
engines do not keep the stream's order: what a call reads and writes must be free of other work on the device before it,
and is when it returns.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import numpy as np

from shardkit.errors import CapabilityError, DeviceError

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

    from shardkit.storage.cuda import CudaDevice
    from shardkit.storage.device import Stream

__all__ = ["DESTINATION", "NvjpegError", "NvjpegLibrary", "open_nvjpeg"]

DESTINATION = np.dtype([("channel", "u8", 4), ("pitch", "u8", 4)])
"""Where an image goes: the library's nvjpegImage_t. Interleaved RGB has its address and its bytes a row in place 0."""

_STATUS = (
    "SUCCESS", "NOT_INITIALIZED", "INVALID_PARAMETER", "BAD_JPEG", "JPEG_NOT_SUPPORTED", "ALLOCATOR_FAILURE",
    "EXECUTION_FAILED", "ARCH_MISMATCH", "INTERNAL_ERROR", "IMPLEMENTATION_NOT_SUPPORTED", "INCOMPLETE_BITSTREAM",
)  # fmt: skip
_HARDWARE_DEVICE = 5  # nvjpegBackend_t
_RGBI = 5  # nvjpegOutputFormat_t
_REMEDY = (
    "the driver's libnvcuvid.so.1 must be there (in a container NVIDIA_DRIVER_CAPABILITIES=compute,utility,video), and "
    "the GPU must have JPEG engines (A100, A30, Hopper, Ada, Blackwell); or take decoder='dali'"
)


class NvjpegError(DeviceError):
    """nvJPEG refused a call."""

    def __init__(self, call: str, code: int) -> None:
        """Name the status."""
        status = _STATUS[code] if 0 <= code < len(_STATUS) else str(code)
        super().__init__("nvJPEG failed", found=f"{call}: {status}")
        self.status = status
        """Without its prefix: "BAD_JPEG"."""

    def __reduce__(self) -> tuple[object, ...]:
        """Cross a process border."""
        call, code = str(self.found).partition(": ")[0], _STATUS.index(self.status) if self.status in _STATUS else -1
        return type(self), (call, code)


def open_nvjpeg(device: CudaDevice) -> NvjpegLibrary:
    """Return the library on a GPU.

    Raises:
        CapabilityError: the library, the driver's video library or the engines are not there.
    """
    try:
        from cuda.pathfinder import load_nvidia_dynamic_lib

        library = ctypes.CDLL(load_nvidia_dynamic_lib("nvjpeg").abs_path)
    except (ImportError, RuntimeError, OSError) as error:  # the pathfinder raises a RuntimeError
        raise CapabilityError(
            "nvJPEG is not here", found=str(error), remedy="pip install 'shardkit[gpu]', or take decoder='dali'"
        ) from error
    try:
        return NvjpegLibrary(device, library)
    except NvjpegError as error:
        raise CapabilityError("nvJPEG cannot use JPEG engines here", found=error.found, remedy=_REMEDY) from error


class NvjpegLibrary:
    """A handle and a decoder state of nvJPEG; for one thread at a time."""

    def __init__(self, device: CudaDevice, library: ctypes.CDLL) -> None:
        """Open the hardware backend; `open_nvjpeg` does it.

        Raises:
            NvjpegError: the library refuses.
        """
        self._device, self._library, self._initialised = device, library, 0
        self._query = device.library.cuStreamQuery
        self._handle, self._state = ctypes.c_void_p(), ctypes.c_void_p()
        with device.current():
            self._call("nvjpegCreateEx", _HARDWARE_DEVICE, None, None, 0, ctypes.byref(self._handle))
            device.at_end_of(self, _free, device, library.nvjpegDestroy, self._handle)
            self._call("nvjpegJpegStateCreate", self._handle, ctypes.byref(self._state))
            # The last one is made first.
            device.at_end_of(self, _free, device, library.nvjpegJpegStateDestroy, self._state)

    def engines(self) -> tuple[int, int]:
        """Return how many JPEG engines the GPU has, and the cores of each."""
        engines, cores = ctypes.c_uint(), ctypes.c_uint()
        with self._device.current():
            self._call("nvjpegGetHardwareDecoderInfo", self._handle, ctypes.byref(engines), ctypes.byref(cores))
        return engines.value, cores.value

    def decode(
        self, addresses: npt.NDArray[np.uint64], sizes: npt.NDArray[np.uint64], destinations: npt.NDArray[np.void],
        stream: Stream,
    ) -> None:  # fmt: skip
        """Decode n images, and wait until they are.

        Args:
            addresses: uint64 [n], of the encoded images in device memory.
            sizes: uint64 [n], bytes.
            destinations: [n] of `DESTINATION`; device memory.
            stream: to put the work on.

        Raises:
            NvjpegError: the batch failed; nothing is known of any of its images.
        """
        with self._device.current():
            try:
                self._start(addresses, sizes, destinations, stream)
            except NvjpegError:
                self._initialised = 0  # after a failure the state has to be made ready again
                raise
            finally:
                # Mostly there is nothing left to wait for. Then the lock is not given away once more: to get it back
                # takes as long as some other thread works, and the engines stand still meanwhile.
                if self._query(ctypes.c_void_p(stream.handle)):
                    stream.synchronize()

    def _start(
        self, addresses: npt.NDArray[np.uint64], sizes: npt.NDArray[np.uint64], destinations: npt.NDArray[np.void],
        stream: Stream,
    ) -> None:  # fmt: skip
        count = len(addresses)
        if count != self._initialised:
            self._initialised = 0
            self._call("nvjpegDecodeBatchedInitialize", self._handle, self._state, count, 1, _RGBI)
            self._initialised = count
        self._call(
            "nvjpegDecodeBatched", self._handle, self._state, ctypes.c_void_p(addresses.ctypes.data),
            ctypes.c_void_p(sizes.ctypes.data), ctypes.c_void_p(destinations.ctypes.data),
            ctypes.c_void_p(stream.handle),
        )  # fmt: skip

    def _call(self, name: str, *arguments: object) -> None:
        code = getattr(self._library, name)(*arguments)
        if code:
            raise NvjpegError(name, code)


def _free(device: CudaDevice, call: Callable[[ctypes.c_void_p], int], handle: ctypes.c_void_p) -> None:
    """Free what the library made, unless the device is lost: then that would end the process."""
    if not device.lost:
        call(handle)
