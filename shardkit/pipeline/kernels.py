"""Kernels of our own for the GPU: the last step from a whole decoded image to its place in a batch, and a first look.

The counterpart of `shardkit.pipeline.finish` on the GPU, in one launch a batch: cut, EXIF orientation, resize as Pillow
does it, mirror, normalise. The source is kernels.cu, compiled for the GPU at hand in some 200 ms by NVRTC.
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass
from importlib import resources
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np

from shardkit.errors import CapabilityError, DeviceError
from shardkit.storage.cuda import take

if TYPE_CHECKING:
    from shardkit.storage.cuda import CudaDevice
    from shardkit.storage.device import Stream

__all__ = ["IMAGE", "PAYLOAD", "TYPES", "VERDICTS", "Colours", "CudaKernels", "Kernels", "Output", "source_text"]

_Foreign: TypeAlias = Any  # cuda.bindings has no types
_TILE = 32, 8
_INSPECTING = 32
_LAYERS = 65_535  # the most that a grid has in its third dimension

IMAGE = np.dtype([
    ("source", "u8"), ("target", "u8"),
    ("pitch", "i4"), ("width", "i4"), ("height", "i4"), ("orientation", "i4"),
    ("x", "i4"), ("y", "i4"), ("w", "i4"), ("h", "i4"),
    ("out_width", "i4"), ("out_height", "i4"), ("cut_x", "i4"), ("cut_y", "i4"),
    ("target_width", "i4"), ("target_height", "i4"),
    ("mirror", "i4"), ("row", "i4"),
])  # fmt: skip
"""What becomes of one image. source, target: device addresses of its interleaved RGB pixels and of its result. pitch:
bytes of a row. width, height: as stored. orientation: EXIF's, 1 to 8, still to be applied. x, y, w, h: the part that is
taken, in pixels as shown. out_width, out_height: what that part is resized to; of this the result, target_width x
target_height, begins at cut_x, cut_y. mirror: 1 swaps left and right. row: values from one row of the result to the
next: target_width (planar) or 3 * target_width."""

PAYLOAD = np.dtype([
    ("address", "u8"), ("size", "u8"), ("width", "i4"), ("height", "i4"), ("components", "i4"), ("sof", "i4"),
])  # fmt: skip
"""An encoded image and what the index says of it. address: device memory. size: bytes. width, height: as stored. sof: n
of the frame SOFn."""

VERDICTS = (
    "",
    "it does not begin as a JPEG",
    "no end marker (EOI) is near its end",
    "its markers do not lead to a scan",
    "its frame is another one than the index says",
    "it has over 1,024 segments before the first scan",
)
"""What `Kernels.inspect` finds, by code; 0 is fine."""

TYPES = ("uint8", "float16", "float32")
"""Pixel types, by code."""


class Colours(ctypes.Structure):
    """An argument of the kernel."""

    _fields_ = (("mean", ctypes.c_float * 3), ("scale", ctypes.c_float * 3))


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """What the results of one launch have in common."""

    dtype: str
    """One of `TYPES`; uint8 ignores `mean` and `scale`."""
    planar: bool
    """[3, height, width] instead of [height, width, 3]."""
    width: int
    """Pixels of the widest result."""
    height: int
    """Of the highest one."""
    mean: tuple[float, float, float]
    """Red, green, blue, 0..255; subtracted."""
    scale: tuple[float, float, float]
    """Then multiplied: 1 / std."""

    @property
    def colours(self) -> Colours:
        """As the kernel takes them."""
        return Colours((ctypes.c_float * 3)(*self.mean), (ctypes.c_float * 3)(*self.scale))


class Kernels(Protocol):
    """Launches on a stream; nothing waits. Threads may share it."""

    def finish(self, stream: Stream, images: int, count: int, output: Output, /) -> None:
        """Make results.

        Args:
            stream: in whose order.
            images: device address of `count` rows of `IMAGE`.
            count: images; may be 0.
            output: what they become.
        """

    def inspect(self, stream: Stream, payloads: int, count: int, verdicts: int, /) -> None:
        """Follow the markers of encoded images, and compare their frames with the index.

        Args:
            stream: in whose order.
            payloads: device address of `count` rows of `PAYLOAD`.
            count: images; may be 0.
            verdicts: device address of int32 [count]: a code of `VERDICTS` each.
        """


def source_text() -> str:
    """Return the source of the kernels."""
    return resources.files("shardkit.pipeline").joinpath("kernels.cu").read_text("utf-8")


class CudaKernels:
    """The kernels on a GPU; see `Kernels`."""

    def __init__(self, device: CudaDevice) -> None:
        """Compile them and load them.

        Raises:
            CapabilityError: NVRTC is not installed.
            DeviceError: it does not compile them for this GPU, or the GPU does not take them.
        """
        self._device, driver = device, device.driver
        architecture = (
            f"sm_{device.attribute('COMPUTE_CAPABILITY_MAJOR')}{device.attribute('COMPUTE_CAPABILITY_MINOR')}"
        )
        code = _compiled(architecture)
        with device.current():
            module = take(driver, "cuModuleLoadData", driver.cuModuleLoadData(code))
            device.at_end_of(self, driver.cuModuleUnload, module)
            self._finish, self._inspect = (
                take(driver, "cuModuleGetFunction", driver.cuModuleGetFunction(module, name))
                for name in (b"finish", b"inspect")
            )

    def finish(self, stream: Stream, images: int, count: int, output: Output) -> None:
        """Make results."""
        wide, high = _TILE
        across, down = -(-output.width // wide), -(-output.height // high)
        colours, type_code = output.colours, TYPES.index(output.dtype)
        for first in range(0, count, _LAYERS):
            grid, rows = (across, down, min(count - first, _LAYERS)), images + first * IMAGE.itemsize
            self._launch(
                stream, self._finish, grid, (wide, high, 1), ctypes.c_void_p(rows), colours, ctypes.c_int(type_code),
                ctypes.c_int(output.planar),
            )  # fmt: skip

    def inspect(self, stream: Stream, payloads: int, count: int, verdicts: int) -> None:
        """Look at encoded images."""
        grid = -(-count // _INSPECTING), 1, 1
        self._launch(
            stream, self._inspect, grid, (_INSPECTING, 1, 1), ctypes.c_void_p(payloads), ctypes.c_int(count),
            ctypes.c_void_p(verdicts),
        )  # fmt: skip

    def _launch(
        self, stream: Stream, function: _Foreign, grid: tuple[int, int, int], block: tuple[int, int, int],
        *arguments: ctypes.c_void_p | ctypes.c_int | Colours,
    ) -> None:  # fmt: skip
        if not all(grid):
            return
        places = (ctypes.c_void_p * len(arguments))(*(ctypes.addressof(argument) for argument in arguments))
        driver = self._device.driver
        with self._device.current():
            launched = driver.cuLaunchKernel(
                function, *grid, *block, 0, driver.CUstream(stream.handle), ctypes.addressof(places), 0
            )
        take(driver, "cuLaunchKernel", launched)


@functools.cache  # every loader of a process takes the same
def _compiled(architecture: str) -> bytes:
    """Return machine code for an architecture.

    Raises:
        CapabilityError: there is no NVRTC.
        DeviceError: it refuses the source.
    """
    try:
        from cuda.bindings import nvrtc

        made = nvrtc.nvrtcCreateProgram(source_text().encode(), b"kernels.cu", 0, [], [])
    except (ImportError, RuntimeError) as error:  # cuda.pathfinder: a RuntimeError for a library that is not there
        raise CapabilityError(
            "kernels are compiled by NVRTC, which is not here", found=str(error), remedy="pip install 'shardkit[gpu]'"
        ) from error
    program = _done(nvrtc, "nvrtcCreateProgram", made)
    options = [f"--gpu-architecture={architecture}".encode(), b"--std=c++17", b"-default-device"]
    (result,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
    if result != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        log = b" " * _done(nvrtc, "nvrtcGetProgramLogSize", nvrtc.nvrtcGetProgramLogSize(program))
        nvrtc.nvrtcGetProgramLog(program, log)
        raise DeviceError(f"NVRTC does not compile for {architecture}", found=log.rstrip(b"\0 ").decode())
    code: bytes = b" " * _done(nvrtc, "nvrtcGetCUBINSize", nvrtc.nvrtcGetCUBINSize(program))
    nvrtc.nvrtcGetCUBIN(program, code)
    nvrtc.nvrtcDestroyProgram(program)
    return code


def _done(nvrtc: _Foreign, call: str, result: tuple[_Foreign, ...]) -> _Foreign:
    if result[0] != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise DeviceError("NVRTC failed", found=f"{call}: {result[0].name}")
    return result[1]
