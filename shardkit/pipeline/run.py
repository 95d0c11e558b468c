"""One pass of a decoder over its source: how many batches it works on, and in which order they come out."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

    from shardkit.dataset.batch import EncodedBatch
    from shardkit.pipeline.decoder import BatchSource, DecodedBatch, Hand

__all__ = ["Run", "Waited"]


class Waited(Protocol):
    """A batch that is being decoded."""

    @property
    def over(self) -> bool:
        """Whether `wait` has nothing to wait for."""

    def wait(self, look: Callable[[], object] | None = None) -> DecodedBatch:
        """Return it when it is decoded; `look` as for `shardkit.pipeline.workers.Outcome.wait`.

        Raises:
            ShardkitError: it cannot be decoded.
        """


class Run(Iterator["DecodedBatch"]):
    """Keeps a bounded number of batches in a decoder, and gives them in order; for one thread.

    It keeps nothing of a batch that it gave: letting go of pixels may be a wait for the threads that were just woken.
    """

    def __init__(
        self, source: BatchSource, take: Callable[[EncodedBatch], Waited], *, in_flight: int, hand: Hand,
        check: Callable[[], object] | None = None,
    ) -> None:  # fmt: skip
        """Take nothing yet.

        Args:
            source: of the batches.
            take: lets one into the decoder, which sees to its release.
            in_flight: the most that are in it.
            hand: makes what is given.
            check: called twice a second while a batch is waited for, as the source's; sees to batches that never come.
        """
        self._source, self._take, self._in_flight = source, take, in_flight
        self._hand, self._check = hand, check
        self._flying: deque[Waited] = deque()
        self._failed: Exception | None = None
        self._ended = False

    def __next__(self) -> DecodedBatch:
        """Return the next batch.

        Raises:
            ShardkitError: of the source, after the batches before it, or of the decoder.
        """
        if not (self._flying and self._flying[0].over):  # else later: see `Decoder.decode`
            self._top_up(wait=True)
        if not self._flying:
            if self._failed is not None:
                raise self._failed
            raise StopIteration
        decoded = self._hand(self._flying[0].wait(self._look))
        self._flying.popleft()
        self._top_up(wait=False)  # the decoder has work while the caller has the batch
        return decoded

    def _look(self) -> None:
        self._source.check()  # the decoder may be in a read of a substitute
        if self._check is not None:
            self._check()

    def _top_up(self, *, wait: bool) -> None:
        """Take what is read, and wait for a read only when nothing is in flight, as `Fetcher` demands."""
        while len(self._flying) < self._in_flight and not self._ended:
            try:
                batch = self._source.get(wait=wait and not self._flying)
            except Exception as error:
                self._failed, self._ended = error, True  # the batches before it come first
                return
            if batch is None:
                self._ended = wait and not self._flying
                return
            self._flying.append(self._take(batch))
