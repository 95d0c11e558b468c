"""Decoding on a GPU: whole images by a back end, everything behind it by a kernel of our own."""

from __future__ import annotations

import atexit
import contextlib
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from shardkit.pipeline.decoder import as_it_is
from shardkit.pipeline.gpu_backend import Share
from shardkit.pipeline.gpu_finish import GpuFinisher, Surroundings
from shardkit.pipeline.gpu_flight import GpuTally
from shardkit.pipeline.gpu_inspection import Inspection
from shardkit.pipeline.gpu_line import GpuLine
from shardkit.pipeline.gpu_threads import LineThreads
from shardkit.pipeline.run import Run

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    import numpy.typing as npt

    from shardkit.pipeline.decoder import BatchSource, DecodedBatch, DecodeSpec, Hand
    from shardkit.pipeline.gpu_backend import Allocate, Backend, Shares, SquareAugmenter
    from shardkit.pipeline.kernels import Kernels
    from shardkit.storage.device import Device, Stream

    _Ints = npt.NDArray[np.int64]

__all__ = ["GpuDecoder", "NewAugmenter", "one_share"]

_AROUND = 2
"""Batches that are being prepared and finished, beside those that the back ends decode."""

NewAugmenter: TypeAlias = "Callable[[int], SquareAugmenter]"
"""Makes the augmenter of an epoch, by its number."""


def one_share(width: _Ints, height: _Ints) -> list[Share]:
    """Decode any images together: for a back end that finds its own memory."""
    return [Share(np.arange(len(width)))]


class GpuDecoder:
    """A `Decoder` on a GPU. Pixels are in the device's memory, complete behind `DecodedBatch.ready`."""

    def __init__(
        self, spec: DecodeSpec, backends: Sequence[Backend], device: Device, kernels: Kernels, allocate: Allocate, *,
        batch_size: int, shares: Shares = one_share, augmenter: NewAugmenter | None = None,
        stream: Stream | None = None,
    ) -> None:  # fmt: skip
        """Prepare to decode batches of at most `batch_size` images.

        Args:
            spec: of the pixels.
            backends: decode, each in a thread of its own; at least one, of one kind. The decoder closes them.
            device: on which everything is.
            kernels: of that device.
            allocate: memory for pixels.
            batch_size: the most images of a batch.
            shares: of the back ends.
            augmenter: for recipes with a graph.
            stream: on which batches are finished; None makes one, urgent, so that a batch does not wait behind the
                training step.
        """
        assert augmenter is not None or not spec.recipe.graph, "a graph needs an augmenter"
        self.name, self.accepts = backends[0].name, backends[0].accepts
        self.in_flight = sum(backend.depth for backend in backends) + _AROUND
        """See `Decoder`."""
        self._backends, self._shares = list(backends), shares
        self._augmenter = augmenter if spec.recipe.graph else None
        self._around = Surroundings(spec, device, kernels, stream or device.stream(urgent=True), allocate, batch_size)
        self._tally = GpuTally()
        self._in_use = 0

    @property
    def stream(self) -> Stream:
        """On which batches are finished, and their pixels first written."""
        return self._around.stream

    @property
    def counts(self) -> Mapping[str, int]:
        """How many images the back end and Pillow have decoded so far; see `Decoder`."""
        return {self.name: self._tally.backend, "pillow": self._tally.pillow}

    @property
    def device_bytes(self) -> int:
        """What the decoder takes of the device's memory beside the pixels: slabs, and what the last run took."""
        return self._in_use + sum(backend.device_bytes for backend in self._backends)

    def decode(self, source: BatchSource, epoch: int, hand: Hand = as_it_is) -> Iterator[DecodedBatch]:
        """Decode every batch of `source`, in order; see `Decoder`.

        Raises:
            DeviceError: the GPU failed; names the first sample of a batch.
        """
        around = self._around
        with contextlib.ExitStack() as stack:  # every step is made, also when Ctrl-C comes in one of them
            augmenter = self._augmenter(epoch) if self._augmenter is not None else None
            if augmenter is not None:
                stack.callback(augmenter.close)
            inspection = Inspection(around.device, around.kernels, self.accepts, batch_size=around.batch_size)
            finisher = GpuFinisher(around, augmenter, in_flight=self.in_flight)
            threads = LineThreads(stack, around.device, decoding=len(self._backends), pillow=around.spec.thread_count)
            line = GpuLine(threads, source, inspection, self._backends, self._shares, finisher, self._tally)
            stack.callback(line.close)  # the first one: it ends the threads in their order
            stack.callback(atexit.unregister, line.close)
            atexit.register(line.close)  # before theirs, likewise: one may wait for what another one has

            def handed(decoded: DecodedBatch) -> DecodedBatch:
                self._in_use = inspection.nbytes + finisher.nbytes
                return hand(decoded)

            yield from Run(source, line.take, in_flight=self.in_flight, hand=handed, check=line.check)
            line.settle()

    def close(self) -> None:
        """Give back the back ends' memory; see `Decoder`."""
        for backend in self._backends:
            backend.close()
