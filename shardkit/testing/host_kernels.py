"""The kernels of the GPU, compiled from the same source for the processor at hand: their arithmetic without a GPU."""

from __future__ import annotations

import ctypes
import functools
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from shardkit.pipeline.kernels import TYPES, Output, source_text

if TYPE_CHECKING:
    from shardkit.storage.device import Stream

__all__ = ["COMPILER", "HostKernels"]

COMPILER = shutil.which("g++") or shutil.which("c++")
"""The C++ compiler; None where there is none."""


class HostKernels:
    """`shardkit.pipeline.kernels.Kernels` on host memory, for devices whose memory is host memory."""

    def __init__(self) -> None:
        """Compile them; once a process."""
        self._library = _library()

    def finish(self, stream: Stream, images: int, count: int, output: Output) -> None:
        """Make results, after what the stream has to do."""
        stream.synchronize()
        self._library.finish_all(
            ctypes.c_void_p(images), count, ctypes.byref(output.colours), TYPES.index(output.dtype),
            int(output.planar), output.width, output.height,
        )  # fmt: skip

    def inspect(self, stream: Stream, payloads: int, count: int, verdicts: int) -> None:
        """Look at encoded images, after what the stream has to do."""
        stream.synchronize()
        self._library.inspect_all(ctypes.c_void_p(payloads), count, ctypes.c_void_p(verdicts))


@functools.cache
def _library() -> ctypes.CDLL:
    assert COMPILER is not None, "there is no C++ compiler"
    with tempfile.TemporaryDirectory() as folder:
        built = Path(folder) / "kernels.so"
        source = Path(folder) / "kernels.cpp"
        source.write_text(source_text(), "utf-8")
        subprocess.run([COMPILER, "-O2", "-shared", "-fPIC", "-std=c++17", "-o", built, source], check=True)
        return ctypes.CDLL(str(built))
