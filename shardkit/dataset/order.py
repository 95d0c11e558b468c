"""Which sample comes when: a seeded order per epoch, computed position by position, and each rank's part of it.

The order is a promise: equal arguments give equal samples in every version of shardkit with the same `ORDER_VERSION`,
on every machine, for every number of ranks. A test holds it to numbers that are written down.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias, get_args

import numpy as np

from shardkit.errors import ConfigError
from shardkit.splitmix import MIX_A, MIX_B, STEP, U64, finalise, mix

if TYPE_CHECKING:
    import numpy.typing as npt

__all__ = ["MAX_SAMPLES", "ORDER_VERSION", "LastBatch", "LoaderOrder", "Shuffle", "permute"]

ORDER_VERSION = 1
"""Changes when any order below changes; a saved position of another version means nothing."""

MAX_SAMPLES = 1 << 40
"""Samples of the largest data set that has an order."""

LastBatch: TypeAlias = Literal["drop", "pad", "partial"]
"""What becomes of the samples that do not fill a global batch at the end of an epoch."""
Shuffle: TypeAlias = Literal["global", "none"]
"""One permutation of all samples for each epoch, or the stored order."""

_ROUNDS = 8  # after four, samples that lie one row of the grid apart are visibly related; six pass, eight keep a margin
_SORTED = 2048  # a network of few cells favours some orders over others; sorting few hashes does not, and is as fast


def permute(positions: npt.ArrayLike, n: int, *, seed: int, epoch: int) -> npt.NDArray[np.int64]:
    """Return the samples at `positions` of the shuffled order of n samples.

    A bijection of [0, n) in O(1) memory. A position is written as two digits (row, column) of a nearly square grid of
    at least n cells, and Feistel rounds add to one digit a keyed hash of the other. A cell past n is permuted again
    until it lies below; less than one in sqrt(n) is past it. Up to 2048 samples are sorted by a keyed hash instead.

    Args:
        positions: integers in [0, n), any shape.
        n: samples; 1..`MAX_SAMPLES`.
        seed: 0..2**64 - 1; together with `epoch` it chooses the order.
        epoch: 0..2**64 - 1.

    Returns:
        int64, shaped as `positions`.

    Raises:
        ConfigError: an argument is out of its range.

    >>> permute([0, 1, 2, 3, 4, 5, 6, 7], 8, seed=0, epoch=0).tolist()
    [0, 7, 2, 5, 4, 6, 3, 1]
    """
    asked = np.asarray(positions, dtype=np.int64)
    for name, value, low, high in (
        ("n", n, 1, MAX_SAMPLES),
        ("a seed", seed, 0, U64),
        ("an epoch", epoch, 0, U64),
    ):
        if not low <= value <= high:
            raise ConfigError(f"{name} is out of range", expected=f"{low}..{high}", found=value)
    cells = asked.reshape(-1).view(np.uint64)
    if cells.size and int(cells.max()) >= n:  # a negative position is huge as an unsigned number
        wrong = asked[(asked < 0) | (asked >= n)]
        raise ConfigError("a position lies outside the epoch", expected=f"0..{n - 1}", found=int(wrong.flat[0]))
    state = mix(mix(seed) + epoch)
    if n <= _SORTED:
        return _sort_hashes(n, state)[asked]
    return _walk(cells, n, state).view(np.int64).reshape(asked.shape)


def _sort_hashes(n: int, state: int) -> npt.NDArray[np.int64]:
    """Return the whole order of few samples. SplitMix64 repeats no number, so that no two samples tie."""
    return np.argsort(finalise(np.arange(1, n + 1, dtype=np.uint64) * np.uint64(STEP) + np.uint64(state)))


def _walk(cells: npt.NDArray[np.uint64], n: int, state: int) -> npt.NDArray[np.uint64]:
    """Permute a grid of at least n cells, and each cell that comes out past n again, so that [0, n) stays closed."""
    columns = math.isqrt(n - 1) + 1
    rows = -(-n // columns)
    keys = tuple(mix(state + number * STEP) for number in range(1, _ROUNDS + 1))
    result = _feistel(cells, rows, columns, keys)
    while (outside := np.flatnonzero(result >= np.uint64(n))).size:
        result[outside] = _feistel(result[outside], rows, columns, keys)
    return result


def _feistel(cells: npt.NDArray[np.uint64], rows: int, columns: int, keys: tuple[int, ...]) -> npt.NDArray[np.uint64]:
    """Permute the cells of a grid of rows * columns. Arithmetic is that of 64-bit unsigned numbers, wrapping."""
    width = np.uint64(columns)
    row = cells // width
    digits, sizes = [row, cells - row * width], (np.uint64(rows), width)
    scratch = np.empty_like(cells)
    for number, key in enumerate(keys):
        changed = number % 2
        size = sizes[changed]
        total = _hash_below(digits[1 - changed], key, size, scratch)
        total += digits[changed]
        # total mod size: total is below twice the size, and where it is below the size the difference wraps to a huge
        # number, so the smaller of the two is right.
        digits[changed] = np.minimum(total, np.subtract(total, size, out=scratch))
    digits[0] *= width
    digits[0] += digits[1]
    return digits[0]


def _hash_below(
    digit: npt.NDArray[np.uint64], key: int, size: np.uint64, scratch: npt.NDArray[np.uint64]
) -> npt.NDArray[np.uint64]:
    """Return a keyed hash of each digit, in [0, size). `size` is at most 2**20, so 32 bits of hash times it fit."""
    z = digit + np.uint64(key)
    z *= np.uint64(MIX_A)
    z ^= np.right_shift(z, np.uint64(29), out=scratch)
    z *= np.uint64(MIX_B)
    z >>= np.uint64(32)
    z *= size
    z >>= np.uint64(32)
    return z


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderOrder:
    """The batches of one rank, for every epoch and step, without talking to another rank.

    An epoch is a row of positions 0, 1, 2, ... of which each holds a sample (`permute`, or the stored order). Step s
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
    shuffle: Shuffle
    """"global" or "none"."""
    seed: int
    """0..2**64 - 1."""

    def __post_init__(self) -> None:
        """Refuse what cannot give every rank the same number of steps."""
        for name, value, low, high in (
            ("n", self.n, 1, MAX_SAMPLES),
            ("batch_size", self.batch_size, 1, MAX_SAMPLES),
            ("world_size", self.world_size, 1, MAX_SAMPLES),
            ("rank", self.rank, 0, self.world_size - 1),
            ("lanes", self.lanes, 1, MAX_SAMPLES),
            ("seed", self.seed, 0, U64),
        ):
            if not low <= value <= high:
                raise ConfigError(f"{name} is out of range", expected=f"{low}..{high}", found=value)
        for name, word, allowed in (
            ("last_batch", self.last_batch, get_args(LastBatch)),
            ("shuffle", self.shuffle, get_args(Shuffle)),
        ):
            if word not in allowed:
                raise ConfigError(f"{name} has no such value", expected=" or ".join(allowed), found=repr(word))
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

    def batch(self, epoch: int, step: int) -> npt.NDArray[np.int64]:
        """Return the samples that this rank gets in a step of an epoch; int64, `batch_size` of them but for "partial".

        Raises:
            ConfigError: the epoch is out of range or has no such step.
        """
        positions = self.positions(step)
        if self.shuffle == "none":
            return positions
        return permute(positions, self.n, seed=self.seed, epoch=epoch)

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
