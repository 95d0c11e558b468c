"""Decoding by NVIDIA DALI on the CPU, and the only importer of it.

DALI decodes, and cuts while it decodes; `shardkit.pipeline.finish` resizes and normalises, in half the time that DALI
takes for it. A thread of its own keeps DALI busy while the training loop computes.
"""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from shardkit.errors import CapabilityError
from shardkit.pipeline.cpu import resize_by_pillow
from shardkit.pipeline.dali_augmenter import Augmenter
from shardkit.pipeline.dali_library import Dali
from shardkit.pipeline.dali_line import DecodingLine, Flight
from shardkit.pipeline.decoder import BatchSource, DecodedBatch, DecodeSpec, Resize
from shardkit.pipeline.finish import Finisher
from shardkit.storage.reader import HOST, MemorySpace

if TYPE_CHECKING:
    from collections.abc import Iterator

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

    def decode(self, source: BatchSource, epoch: int) -> Iterator[DecodedBatch]:
        """Decode every batch of `source`, in order; see `Decoder`."""
        spec = self._spec
        threads = ThreadPoolExecutor(spec.thread_count, thread_name_prefix="shardkit-finish")
        line = DecodingLine(self._dali, self._finisher, source, threads, batch_size=self._batch_size)
        augmenter = None
        if spec.recipe.graph:
            augmenter = Augmenter(self._dali, spec, batch_size=self._batch_size, epoch=epoch)
        run = _Run(source, line, augmenter)
        try:
            while (decoded := run.next()) is not None:
                yield decoded
        finally:
            run.close()
            threads.shutdown(cancel_futures=True)


class _Run:
    """One pass over a source: which batches are in the line, and what comes out, in their order."""

    def __init__(self, source: BatchSource, line: DecodingLine, augmenter: Augmenter | None) -> None:
        self._source, self._line, self._augmenter = source, line, augmenter
        self._augmenting = ThreadPoolExecutor(1, thread_name_prefix="shardkit-augment") if augmenter else None
        self._flying: deque[tuple[Flight, Future[Any] | None]] = deque()
        self._failed: BaseException | None = None
        self._ended = False

    def next(self) -> DecodedBatch | None:
        self._top_up(wait=True)
        if not self._flying:
            if self._failed is not None:
                raise self._failed
            return None
        flight, augmented = self._flying[0]
        pixels = flight.wait() if augmented is None else augmented.result()
        decoded = DecodedBatch(pixels, flight.batch)
        self._flying.popleft()
        self._top_up(wait=False)  # the line has work while the caller has the batch
        return decoded

    def close(self) -> None:
        self._line.close()
        if self._augmenting is not None:
            self._augmenting.shutdown(cancel_futures=True)
        while self._flying:
            self._flying.popleft()[0].batch.release()

    def _top_up(self, *, wait: bool) -> None:
        """Take what is read, and wait for a read only when nothing is in flight, as `Fetcher` demands."""
        while len(self._flying) < _IN_FLIGHT and not self._ended:
            try:
                batch = self._source.get(wait=wait and not self._flying)
            except BaseException as error:
                self._failed, self._ended = error, True  # the batches before it come first
                return
            if batch is None:
                self._ended = wait and not self._flying
                return
            flight = self._line.take(batch)
            self._flying.append((flight, self._augmented(flight)))

    def _augmented(self, flight: Flight) -> Future[Any] | None:
        if self._augmenter is None or self._augmenting is None:
            return None
        return self._augmenting.submit(self._augmenter.augmented, flight)


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
