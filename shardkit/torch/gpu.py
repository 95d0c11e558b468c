"""Batches in GPU memory for PyTorch: memory of its own allocator, and its streams' order. Nothing here waits."""

from __future__ import annotations

import contextlib
import math
from itertools import accumulate
from typing import TYPE_CHECKING

import torch

from shardkit.storage.device import lost_error

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    import numpy as np
    import numpy.typing as npt

    from shardkit.pipeline.gpu_backend import DeviceArray
    from shardkit.storage.cuda import CudaDevice
    from shardkit.storage.device import Event, Stream

__all__ = ["TensorArray", "allocator", "on_consumer_stream", "to_device", "told_as_ours"]


class TensorArray:
    """A tensor as decoders see it; see `shardkit.pipeline.gpu_backend.DeviceArray`."""

    def __init__(self, tensor: torch.Tensor) -> None:
        """Wrap a dense tensor."""
        self.pixels = tensor
        self.address = tensor.data_ptr()

    def split(self, shapes: list[tuple[int, ...]]) -> list[torch.Tensor]:
        """Return views of these shapes, one behind the other."""
        counts = [math.prod(shape) for shape in shapes]
        flat, starts = self.pixels.flatten(), accumulate(counts, initial=0)
        return [
            flat[start : start + count].view(shape)
            for start, count, shape in zip(starts, counts, shapes, strict=False)  # the last start is the end
        ]


def allocator(device: CudaDevice, stream: Stream) -> Callable[[tuple[int, ...], str], DeviceArray]:
    """Return what gives decoders memory for pixels.

    It comes from PyTorch's own caching allocator, in the name of the stream that writes it: so memory that a consumer
    let go of is used again only behind that stream's work, and behind that of streams that `on_consumer_stream` named.
    It raises a CapabilityError when the device has no memory left.
    """
    place = torch.device("cuda", device.number)
    writing: torch.cuda.Stream = torch.cuda.ExternalStream(stream.handle, device=place)  # type: ignore[no-untyped-call]

    def allocate(shape: tuple[int, ...], dtype: str) -> TensorArray:
        kind: torch.dtype = getattr(torch, dtype)
        with told_as_ours(device, math.prod(shape) * kind.itemsize), torch.cuda.stream(writing):
            return TensorArray(torch.empty(shape, dtype=kind, device=place))

    return allocate


@contextlib.contextmanager
def told_as_ours(device: CudaDevice, nbytes: int) -> Iterator[None]:
    """Raise what PyTorch says of a GPU as errors of this package.

    Args:
        device: the GPU.
        nbytes: that the block takes of its memory.

    Raises:
        CapabilityError: there is no room for them.
        DeviceError: the GPU is lost.
    """
    try:
        yield
    except torch.cuda.OutOfMemoryError as error:
        raise device.full(nbytes, _first_sentence(error)) from error
    except RuntimeError as error:
        if not device.lost:
            raise
        raise lost_error(_first_sentence(error)) from error


def _first_sentence(error: RuntimeError) -> str:
    return str(error).partition("\n")[0].partition(". ")[0]


def on_consumer_stream(device: CudaDevice, tensors: Iterable[torch.Tensor], ready: Event) -> None:
    """Order tensors into the stream that the caller works on: it waits for them, and keeps their memory while it works.

    Args:
        device: theirs.
        tensors: of one batch.
        ready: what the stream waits for; the host does not.
    """
    stream = torch.cuda.current_stream(torch.device("cuda", device.number))
    device.borrowed_stream(stream.cuda_stream).wait_for(ready)
    for tensor in tensors:
        tensor.record_stream(stream)


def to_device(device: CudaDevice, values: npt.NDArray[np.int64]) -> torch.Tensor:
    """Return a copy of a few numbers in GPU memory, in the order of the caller's stream; int64 [n]."""
    pinned = torch.from_numpy(values).pin_memory()
    return pinned.to(torch.device("cuda", device.number), non_blocking=True)
