"""Which positions of an epoch a rank gets in a step: the same number of steps on every rank, without any talk."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias, get_args

import numpy as np

from shardkit.dataset.arguments import require_choice, require_range
from shardkit.dataset.order import MAX_SAMPLES
from shardkit.errors import ConfigError

if TYPE_CHECKING:
    import numpy.typing as npt

__all__ = ["BatchPlan", "LastBatch"]

LastBatch: TypeAlias = Literal["drop", "pad", "partial"]
"""What becomes of the samples that do not fill a global batch at the end of an epoch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPlan:
    """The batches of one rank, as positions of the epoch.

    An epoch is a row of positions 0, 1, 2, ... of which each holds a sample (`shardkit.dataset.order.Order`). Step s
    takes the global batch: positions s * `global_batch` up to (s + 1) * `global_batch`. Position p belongs to lane
    p mod `lanes`, and a rank serves the lanes that are equal to it modulo `world_size`. So the same global batches
    come out, in the same order, for every world size that divides `lanes`, as long as `global_batch` stays the same.

    Every rank makes `steps` steps. Only the last one of an epoch depends on `last_batch`:

    - "drop" leaves the positions that fill no global batch out: `dropped` samples, other ones in each shuffled epoch.
    - "pad" fills the last global batch with the samples of the epoch's first positions: `padded` of them come twice.
    - "partial" hands out what is left. The ranks' parts then differ by at most one sample, and with fewer samples
      than ranks the last ranks get an empty batch, so that all of them still make the step.
    """

    n: int
    """Samples of the data set; >= 1."""
    batch_size: int
    """Samples that one rank gets in a step, as PyTorch counts; >= 1."""
    world_size: int
    """Ranks; divides `lanes`."""
    rank: int
    """This rank; 0..world_size - 1."""
    lanes: int
    """A constant of the run, whatever its world size is; divides `global_batch`."""
    last_batch: LastBatch
    """The end of an epoch, as told above."""

    def __post_init__(self) -> None:
        """Refuse what cannot give every rank the same number of steps."""
        for name, value, low, high in (
            ("n", self.n, 1, MAX_SAMPLES),
            ("batch_size", self.batch_size, 1, MAX_SAMPLES),
            ("world_size", self.world_size, 1, MAX_SAMPLES),
            ("rank", self.rank, 0, self.world_size - 1),
            ("lanes", self.lanes, 1, MAX_SAMPLES),
        ):
            require_range(name, value, low, high)
        require_choice("last_batch", self.last_batch, get_args(LastBatch))
        self._require_whole_lanes()
        if self.last_batch == "drop" and self.n < self.global_batch:
            raise ConfigError(
                "an epoch has no whole global batch, so last_batch='drop' would drop all of it",
                expected=f"at least {self.global_batch} samples ({self.batch_size} on each of {self.world_size} ranks)",
                found=self.n,
                remedy="take last_batch='pad' or 'partial', or a smaller batch_size",
            )

    @property
    def global_batch(self) -> int:
        """Samples that all ranks together get in a full step: batch_size * world_size."""
        return self.batch_size * self.world_size

    @property
    def steps(self) -> int:
        """Steps of every epoch, on every rank."""
        whole, rest = divmod(self.n, self.global_batch)
        return whole + (rest > 0 and self.last_batch != "drop")

    @property
    def dropped(self) -> int:
        """Samples that every epoch leaves out."""
        return self.n % self.global_batch if self.last_batch == "drop" else 0

    @property
    def padded(self) -> int:
        """Samples that every epoch, over all ranks, hands out once more than its n."""
        return -self.n % self.global_batch if self.last_batch == "pad" else 0

    def takes(self, position: int) -> bool:
        """Return whether this rank gets a position of the epoch, not counting what fills the last step of "pad"."""
        return position % self.world_size == self.rank and 0 <= position < self.n - self.dropped

    def positions(self, step: int) -> npt.NDArray[np.int64]:
        """Return the positions in the epoch that this rank gets in a step, rising but for the wrap of "pad"; int64.

        Raises:
            ConfigError: the epoch has no such step.
        """
        if not 0 <= step < self.steps:
            raise ConfigError("the epoch has no such step", expected=f"0..{self.steps - 1}", found=step)
        first = step * self.global_batch
        end = first + self.global_batch
        if self.last_batch == "partial":
            end = min(end, self.n)
        # `world_size` divides `global_batch`, so a lane of this rank is met at every `world_size`-th position.
        taken = np.arange(first + self.rank, end, self.world_size, dtype=np.int64)
        return taken % self.n if end > self.n else taken

    def _require_whole_lanes(self) -> None:
        if self.lanes % self.world_size:
            served = ", ".join(str(size) for size in _divisors(self.lanes))
            raise ConfigError(
                f"{self.lanes} lanes cannot be shared out among {self.world_size} ranks",
                expected=f"a world size of {served}",
                found=self.world_size,
            )
        if self.global_batch % self.lanes:
            share = self.lanes // self.world_size
            raise ConfigError(
                "a global batch must take equally from every lane",
                expected=f"a batch_size in multiples of {share} ({self.lanes} lanes on {self.world_size} ranks)",
                found=self.batch_size,
            )


def _divisors(number: int) -> list[int]:
    """Return the divisors, rising.

    >>> _divisors(12)
    [1, 2, 3, 4, 6, 12]
    """
    small = [value for value in range(1, math.isqrt(number) + 1) if number % value == 0]
    return sorted({*small, *(number // value for value in small)})
