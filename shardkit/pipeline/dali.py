"""Decoding by NVIDIA DALI on the CPU, and the only importer of it.

DALI decodes, and cuts while it decodes; `shardkit.pipeline.finish` resizes and normalises, in half the time that DALI
takes for it. A thread of its own keeps DALI busy while the training loop computes.
"""

from __future__ import annotations

import contextlib
from collections import deque
from typing import TYPE_CHECKING, Any

from shardkit.errors import CapabilityError
from shardkit.pipeline.cpu import resize_by_pillow
from shardkit.pipeline.dali_augmenter import Augmenter
from shardkit.pipeline.dali_library import Dali
from shardkit.pipeline.dali_line import DecodingLine
from shardkit.pipeline.decoder import BatchSource, DecodedBatch, DecodeSpec, Resize
from shardkit.pipeline.finish import Finisher
from shardkit.pipeline.flight import Flight, Tally
from shardkit.pipeline.workers import Outcome, Workers
from shardkit.storage.reader import HOST, MemorySpace

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

__all__ = ["DaliDecoder"]

_IN_FLIGHT = 2


class DaliDecoder:
    """A `Decoder` on DALI's CPU operators."""

    name = "dali"
    accepts: MemorySpace = HOST
    in_flight = _IN_FLIGHT

    def __init__(self, spec: DecodeSpec, *, batch_size: int, resize: Resize = resize_by_pillow) -> None:
        """Prepare to decode batches of at most `batch_size` images.

        Raises:
            CapabilityError: DALI is not installed or cannot be loaded.
        """
        self._dali = _import_dali()
        self._spec = spec
        self._batch_size = batch_size
        self._finisher = Finisher(spec, resize)
        self._tally = Tally()

    @property
    def counts(self) -> Mapping[str, int]:
        """How many images DALI and Pillow have decoded so far; see `Decoder`."""
        return {"dali": self._tally.dali, "pillow": self._tally.pillow}

    def decode(self, source: BatchSource, epoch: int) -> Iterator[DecodedBatch]:
        """Decode every batch of `source`, in order; see `Decoder`."""
        spec, size = self._spec, self._batch_size
        with contextlib.ExitStack() as stack:  # every step is made, also when Ctrl-C comes in one of them
            stack.callback(self._finisher.forget)
            finishing = Workers(spec.thread_count, "shardkit-finish")
            stack.callback(finishing.close)
            augment = None
            if spec.recipe.graph:
                augmenter = Augmenter(self._dali, spec, batch_size=size, epoch=epoch)
                augmenting = Workers(1, "shardkit-augment")
                stack.callback(augmenting.close)

                def augment(flight: Flight) -> Outcome[Any]:
                    return augmenting.submit(augmenter.augmented, flight)

            line = DecodingLine(self._dali, self._finisher, source, finishing, self._tally, batch_size=size)
            stack.callback(line.close)  # the first one: the other threads wait for it
            run = _Run(source, line, augment)
            while (decoded := run.next()) is not None:
                yield decoded

    def close(self) -> None:
        """Let go of memory; see `Decoder`."""
        self._finisher.forget()


class _Run:
    """One pass over a source: which batches are in the line, and what comes out, in their order."""

    def __init__(
        self, source: BatchSource, line: DecodingLine, augment: Callable[[Flight], Outcome[Any]] | None
    ) -> None:
        self._source, self._line, self._augment = source, line, augment
        self._flying: deque[tuple[Flight, Outcome[Any] | None]] = deque()
        self._failed: Exception | None = None
        self._ended = False

    def next(self) -> DecodedBatch | None:
        self._top_up(wait=True)
        if not self._flying:
            if self._failed is not None:
                raise self._failed
            return None
        flight, augmented = self._flying[0]
        check = self._source.check  # the line may be in a read of a substitute
        decoded = DecodedBatch(flight.wait(check) if augmented is None else augmented.wait(check), flight.batch)
        self._flying.popleft()
        self._top_up(wait=False)  # the line has work while the caller has the batch
        return decoded

    def _top_up(self, *, wait: bool) -> None:
        """Take what is read, and wait for a read only when nothing is in flight, as `Fetcher` demands."""
        while len(self._flying) < _IN_FLIGHT and not self._ended:
            try:
                batch = self._source.get(wait=wait and not self._flying)
            except Exception as error:
                self._failed, self._ended = error, True  # the batches before it come first
                return
            if batch is None:
                self._ended = wait and not self._flying
                return
            flight = self._line.take(batch)
            self._flying.append((flight, self._augment(flight) if self._augment else None))


def _import_dali() -> Dali:
    try:
        from nvidia.dali import fn, types
        from nvidia.dali.auto_aug import core
        from nvidia.dali.auto_aug.rand_augment import get_rand_augment_suite
        from nvidia.dali.pipeline import pipeline_def
    except ImportError as error:
        raise CapabilityError(
            "decoding needs NVIDIA DALI, which is not installed", found=str(error),
            remedy="pip install 'shardkit[dali]', or take decoder='cpu' (Pillow, slower)",
        ) from error  # fmt: skip
    return Dali(pipeline_def, fn, types, core, get_rand_augment_suite)
