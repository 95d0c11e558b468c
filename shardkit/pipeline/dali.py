"""Decoding by NVIDIA DALI on the CPU, and the only importer of it.

DALI decodes, and cuts while it decodes; `shardkit.pipeline.finish` resizes and normalises, in half the time that DALI
takes for it. A thread of its own keeps DALI busy while the training loop computes.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shardkit.errors import CapabilityError
from shardkit.pipeline.cpu import resize_by_pillow
from shardkit.pipeline.dali_augmenter import Augmenter
from shardkit.pipeline.dali_library import Dali
from shardkit.pipeline.dali_line import DecodingLine
from shardkit.pipeline.decoder import BatchSource, DecodedBatch, DecodeSpec, Hand, Resize, as_it_is
from shardkit.pipeline.finish import Finisher
from shardkit.pipeline.flight import Flight, Tally
from shardkit.pipeline.run import Run
from shardkit.pipeline.workers import Outcome, Workers
from shardkit.storage.reader import HOST, MemorySpace

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from shardkit.dataset.batch import EncodedBatch

__all__ = ["DaliDecoder", "open_dali"]

_IN_FLIGHT = 2


class DaliDecoder:
    """A `Decoder` on DALI's CPU operators."""

    name = "dali"
    accepts: MemorySpace = HOST
    in_flight = _IN_FLIGHT
    device_bytes = 0

    def __init__(self, spec: DecodeSpec, *, batch_size: int, resize: Resize = resize_by_pillow) -> None:
        """Prepare to decode batches of at most `batch_size` images.

        Raises:
            CapabilityError: DALI is not installed or cannot be loaded.
        """
        self._dali = open_dali()
        self._spec = spec
        self._batch_size = batch_size
        self._finisher = Finisher(spec, resize)
        self._tally = Tally()

    @property
    def counts(self) -> Mapping[str, int]:
        """How many images DALI and Pillow have decoded so far; see `Decoder`."""
        return {"dali": self._tally.dali, "pillow": self._tally.pillow}

    def decode(self, source: BatchSource, epoch: int, hand: Hand = as_it_is) -> Iterator[DecodedBatch]:
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

            def take(batch: EncodedBatch) -> _Flying:
                flight = line.take(batch)
                return _Flying(flight, augment(flight) if augment is not None else None)

            yield from Run(source, take, in_flight=_IN_FLIGHT, hand=hand)

    def close(self) -> None:
        """Let go of memory; see `Decoder`."""
        self._finisher.forget()


@dataclass(frozen=True, slots=True)
class _Flying:
    """A batch in the line, and perhaps in the graph behind it."""

    flight: Flight
    augmented: Outcome[Any] | None

    @property
    def over(self) -> bool:
        return self.flight.over if self.augmented is None else self.augmented.done

    def wait(self, look: Callable[[], object] | None = None) -> DecodedBatch:
        waited = self.flight if self.augmented is None else self.augmented
        return DecodedBatch(waited.wait(look), self.flight.batch)


def open_dali() -> Dali:
    """Return the library.

    Raises:
        CapabilityError: it is not installed or cannot be loaded.
    """
    try:
        from nvidia.dali import fn, tensors, types
        from nvidia.dali.auto_aug import core
        from nvidia.dali.auto_aug.rand_augment import get_rand_augment_suite
        from nvidia.dali.pipeline import pipeline_def
    except ImportError as error:
        raise CapabilityError(
            "decoding needs NVIDIA DALI, which is not installed", found=str(error),
            remedy="pip install 'shardkit[dali]', or take decoder='cpu' (Pillow, slower)",
        ) from error  # fmt: skip
    return Dali(pipeline_def, fn, types, core, get_rand_augment_suite, tensors)
