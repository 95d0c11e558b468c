"""One pass over a dataset, and what it adds to the loader's sums."""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable

    from shardkit.dataset.fetch import Fetcher
    from shardkit.pipeline.decoder import DecodedBatch

__all__ = ["Batch", "Epoch", "LoaderStats", "Totals"]

Batch: TypeAlias = tuple[Any, ...]
"""Images and labels, and with fields the extras: tensors [B, 3, S, S] and [B], and a dict. Any: they differ in type."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderStats:
    """What a loader has done so far, over all its epochs."""

    batches: int
    """Batches handed out."""
    samples: int
    """Samples in them."""
    bytes: Mapping[str, int]
    """Bytes read, by the path that they took: "direct" (past the page cache), "page cache"."""
    wait_read_s: float
    """Seconds for which nothing was in the decoder because the next batch was not read yet."""
    wait_decode_s: float
    """Seconds for which the training loop waited for pixels, reading aside."""
    io: str
    """The way of reading in use."""
    io_reason: str
    """Why it was chosen."""
    decoder: str
    """The decoder in use."""
    buffer_budget_bytes: int
    """The most memory that encoded batches may take."""
    buffer_bytes: int
    """What they take now."""


class Totals:
    """Sums over all epochs of a loader."""

    def __init__(self) -> None:
        """Start at nothing."""
        self.batches = self.samples = 0
        self.wait_read_s = self.wait_decode_s = 0.0


class Epoch(Iterator[Batch]):
    """One iteration: owns the reading thread and the decoder's run, and ends both when it is over or dropped."""

    def __init__(
        self, fetcher: Fetcher, decoding: Iterator[DecodedBatch], render: Callable[[DecodedBatch], Batch],
        totals: Totals,
    ) -> None:  # fmt: skip
        """Take over a running `fetcher` and the decoder's run on it."""
        self._fetcher, self._decoding, self._render, self._totals = fetcher, decoding, render, totals
        self._end = weakref.finalize(self, _end, decoding, fetcher)

    def __next__(self) -> Batch:
        """Return the next batch, or raise what reading or decoding it raised; either end of the epoch closes it."""
        started, read = time.perf_counter(), self._fetcher.waited_s
        try:
            decoded = next(self._decoding)
        except BaseException:
            self.close()  # StopIteration, too: an epoch that is over holds nothing
            raise
        totals, waited = self._totals, self._fetcher.waited_s - read
        totals.wait_read_s += waited
        totals.wait_decode_s += time.perf_counter() - started - waited
        totals.batches += 1
        totals.samples += len(decoded.batch)
        return self._render(decoded)

    def close(self) -> None:
        """End it; idempotent."""
        self._end()


def _end(decoding: Iterator[DecodedBatch], fetcher: Fetcher) -> None:
    # Decoding first: the reading thread may wait for memory that the decoder gives back.
    closing = getattr(decoding, "close", None)
    if closing is not None:
        closing()
    fetcher.close()
