"""A batch on its way through DALI, and what was counted on it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from shardkit.pipeline.workers import Outcome

if TYPE_CHECKING:
    from collections.abc import Callable

    from shardkit.dataset.batch import EncodedBatch
    from shardkit.pipeline.crops import Crops
    from shardkit.pipeline.finish import Canvas, Pixels

__all__ = ["Flight", "Tally"]


@dataclass(slots=True)
class Tally:
    """What a decoder's lines have done so far."""

    dali: int = 0
    """Images that DALI decoded."""
    pillow: int = 0
    """Images that Pillow decoded: by design, or because DALI did not."""
    failed: bool = False
    """DALI has failed once without naming an image, and it was told."""


@dataclass(slots=True, eq=False)
class Flight:
    """A batch in the line."""

    batch: EncodedBatch
    """With the substitutes that it has so far; its memory is released when all of it is decoded."""
    canvas: Canvas
    crops: Crops | None = None
    """Of the samples in `batch`; None without random crops."""
    left: int = 0
    """Chunks that are not decoded yet."""
    finishing: list[Outcome[None]] = field(default_factory=list)
    decoded: Outcome[None] = field(default_factory=Outcome)

    @property
    def over(self) -> bool:
        """Whether `wait` has nothing to wait for."""
        return self.decoded.done and all(task.done for task in self.finishing)

    def wait(self, look: Callable[[], object] | None = None) -> Pixels:
        """Wait until it is decoded and finished, and return the canvas's pixels.

        Args:
            look: as for `Outcome.wait`.

        Raises:
            ShardkitError: a bad sample is not replaced.
        """
        self.decoded.wait(look)
        for task in self.finishing:
            task.wait()
        return self.canvas.pixels
