"""A GPU for tests: memory, engines and kernels are stand-ins on the host, everything of shardkit's is the real one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from shardkit.pipeline.gpu_decoder import GpuDecoder, NewAugmenter
from shardkit.pipeline.nvjpeg import NvjpegBackend
from shardkit.storage.reader import address_of
from shardkit.testing.host_device import HostDevice, HostStream
from shardkit.testing.host_kernels import HostKernels
from shardkit.testing.host_nvjpeg import HostNvjpeg

if TYPE_CHECKING:
    from shardkit.pipeline.decoder import DecodeSpec
    from shardkit.pipeline.kernels import Output
    from shardkit.storage.device import Stream

__all__ = ["HostArray", "HostMachine", "LateKernels"]

_Pixels: TypeAlias = Any  # NumPy arrays, of any type


class LateKernels:
    """The host's kernels, launched when a stream comes to them and not before."""

    def __init__(self) -> None:
        """Compile them."""
        self.inner = HostKernels()

    def finish(self, stream: Stream, images: int, count: int, output: Output) -> None:
        """Make results when the stream is there."""
        assert isinstance(stream, HostStream)
        stream.submit(lambda: self.inner.finish(_idle(stream), images, count, output))

    def inspect(self, stream: Stream, payloads: int, count: int, verdicts: int) -> None:
        """Look at encoded images when the stream is there."""
        assert isinstance(stream, HostStream)
        stream.submit(lambda: self.inner.inspect(_idle(stream), payloads, count, verdicts))


def _idle(stream: HostStream) -> HostStream:
    """Return a stream without work: the one that launches is at this piece of it."""
    return HostStream(stream.device, urgent=False)


class HostArray:
    """A `DeviceArray` whose pixels are a NumPy array."""

    def __init__(self, device: HostDevice, shape: tuple[int, ...], dtype: str) -> None:
        """Take memory of the device."""
        memory = device.memory(int(np.prod(shape)) * np.dtype(dtype).itemsize)
        self.address = address_of(memory)
        self.pixels: _Pixels = np.frombuffer(memory, dtype).reshape(shape)

    def split(self, shapes: list[tuple[int, ...]]) -> list[_Pixels]:
        """Return arrays one behind the other."""
        ends = np.cumsum([int(np.prod(shape)) for shape in shapes])
        return [part.reshape(shape) for part, shape in zip(np.split(self.pixels, ends[:-1]), shapes, strict=True)]


class HostMachine:
    """A device and what is on it."""

    def __init__(self, *, lazy: bool = True, decode_threads: int = 1) -> None:
        """Start it; `lazy` as for `HostDevice`, `decode_threads` of each decoder."""
        self._decode_threads = decode_threads
        self.device = HostDevice(lazy=lazy)
        self.engines = HostNvjpeg(self.device)
        self.kernels = LateKernels()

    def allocate(self, shape: tuple[int, ...], dtype: str) -> HostArray:
        """Return memory for pixels."""
        return HostArray(self.device, shape, dtype)

    def decoder(
        self, spec: DecodeSpec, *, batch_size: int = 64, budget_bytes: int = 64 << 20,
        augmenter: NewAugmenter | None = None,
    ) -> GpuDecoder:  # fmt: skip
        """Return a decoder on nvJPEG.

        Args:
            spec: of the pixels.
            batch_size: the most images of a batch.
            budget_bytes: of the slabs of a back end.
            augmenter: for recipes with a graph.
        """
        backends = [
            NvjpegBackend(self.engines, self.device, budget_bytes=budget_bytes) for _ in range(self._decode_threads)
        ]
        return GpuDecoder(
            spec, backends, self.device, self.kernels, self.allocate, batch_size=batch_size, shares=backends[0].shares,
            augmenter=augmenter,
        )  # fmt: skip
