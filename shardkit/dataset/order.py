"""Which sample comes when: a seeded order for each epoch, computed position by position, never stored.

The order is a promise: equal arguments give equal samples in every version of shardkit with the same `ORDER_VERSION`,
on every machine, for every number of ranks. A test holds it to numbers that are written down.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeAlias

import numpy as np

from shardkit.dataset.arguments import require_range
from shardkit.errors import ConfigError
from shardkit.splitmix import MIX_A, MIX_B, STEP, U64, finalise, mix

if TYPE_CHECKING:
    import numpy.typing as npt

    _U64s: TypeAlias = npt.NDArray[np.uint64]

__all__ = [
    "MAX_SAMPLES",
    "ORDER_VERSION",
    "GlobalOrder",
    "Order",
    "StoredOrder",
    "permute",
    "permute_parts",
    "require_positions",
]

ORDER_VERSION = 1
"""Changes when any order below changes; a saved position of another version means nothing."""

MAX_SAMPLES = 1 << 40
"""Samples of the largest data set that has an order."""

_ROUNDS = 8  # after four, samples that lie one row of the grid apart are visibly related; six pass, eight keep a margin
_SORTED = 2048  # a network of few cells favours some orders over others; sorting few hashes does not, and is as fast
_KEYS = np.array([(number + 1) * STEP & U64 for number in range(1, _ROUNDS + 1)], np.uint64)
# Of no dimension: for numpy these are the fastest numbers to compute with, and on a batch of positions an operation
# costs more than its arithmetic.
_ONE, _MIX_A, _MIX_B, _HALF, _FOLD = (np.array(value, np.uint64) for value in (1, MIX_A, MIX_B, 32, 29))


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
    require_range("n", n, 1, MAX_SAMPLES)
    require_range("a seed", seed, 0, U64)
    require_range("an epoch", epoch, 0, U64)
    cells = asked.reshape(-1).view(np.uint64)
    require_positions(asked.reshape(-1), n)
    state = mix(mix(seed) + epoch)
    if n <= _SORTED:
        return _sort_hashes(n, state)[asked]
    network = _Network.of(np.array([n], np.uint64), np.array([state], np.uint64))
    return _walk(cells, network).view(np.int64).reshape(asked.shape)


def permute_parts(
    positions: npt.NDArray[np.int64], sizes: npt.NDArray[np.int64], states: npt.NDArray[np.uint64]
) -> npt.NDArray[np.int64]:
    """Permute each position within a part of its own: the network of `permute`, for many parts in one pass.

    Positions of equal size and state are permuted by the same bijection of [0, size).

    Args:
        positions: int64 [k], each in [0, its size).
        sizes: samples of the part of each position; int64 [k], or [1] for all of them; 1..`MAX_SAMPLES`.
        states: what chooses the order of each part, well mixed; uint64, shaped as `sizes`.

    Returns:
        int64 [k].

    Raises:
        ConfigError: a position lies outside its part.
    """
    cells, limits = positions.view(np.uint64), sizes.view(np.uint64)
    outside = np.flatnonzero(cells >= limits)  # from out there a walk might never come back
    if outside.size:
        wrong, size = int(positions[outside[0]]), int(np.broadcast_to(sizes, positions.shape)[outside[0]])
        raise ConfigError("a position lies outside its part", expected=f"0..{size - 1}", found=wrong)
    return _walk(cells, _Network.of(limits, states)).view(np.int64)


def _sort_hashes(n: int, state: int) -> npt.NDArray[np.int64]:
    """Return the whole order of few samples. SplitMix64 repeats no number, so that no two samples tie."""
    return np.argsort(finalise(np.arange(1, n + 1, dtype=np.uint64) * np.uint64(STEP) + np.uint64(state)))


class _Network(NamedTuple):
    """A bijection for each of k cells, every array [k]; or one for all cells, every array of no dimension."""

    n: _U64s
    rows: _U64s
    columns: _U64s
    keys: tuple[_U64s, ...]
    """One for each round."""

    @classmethod
    def of(cls, n: _U64s, states: _U64s) -> _Network:
        """Lay the network out; [k] or [1] each."""
        # A double holds numbers below 2**53, and its root is right to the last bit: cut off, it is the whole root.
        columns = np.sqrt((n - _ONE).astype(np.float64)).astype(np.uint64) + _ONE
        rows = (n + columns - _ONE) // columns
        shape = () if n.shape == (1,) else n.shape
        keys = finalise(states + _KEYS[:, None]).reshape(_ROUNDS, *shape)
        return cls(n.reshape(shape), rows.reshape(shape), columns.reshape(shape), tuple(map(np.asarray, keys)))

    def take(self, cells: npt.NDArray[np.intp]) -> _Network:
        """Return the network of some of the cells."""
        if not self.n.ndim:
            return self
        keys = tuple(key[cells] for key in self.keys)
        return _Network(self.n[cells], self.rows[cells], self.columns[cells], keys)


def _walk(cells: _U64s, network: _Network) -> _U64s:
    """Permute a grid of at least n cells, and each cell that comes out past n again, so that [0, n) stays closed."""
    result = _feistel(cells, network)
    while (outside := np.flatnonzero(result >= network.n)).size:
        result[outside] = _feistel(result[outside], network.take(outside))
    return result


def _feistel(cells: _U64s, network: _Network) -> _U64s:
    """Permute the cells of a grid of rows * columns. Arithmetic is that of 64-bit unsigned numbers, wrapping."""
    _, rows, columns, keys = network
    row = cells // columns
    digits, sizes = [row, cells - row * columns], (rows, columns)
    scratch = np.empty_like(cells)
    for number, key in enumerate(keys):
        changed = number % 2
        size = sizes[changed]
        total = _hash_below(digits[1 - changed], key, size, scratch)
        total += digits[changed]
        # total mod size: total is below twice the size, and where it is below the size the difference wraps to a huge
        # number, so the smaller of the two is right.
        digits[changed] = np.minimum(total, np.subtract(total, size, out=scratch))
    digits[0] *= columns
    digits[0] += digits[1]
    return digits[0]


def _hash_below(digit: _U64s, key: _U64s, size: _U64s, scratch: _U64s) -> _U64s:
    """Return a keyed hash of each digit, in [0, size). `size` is at most 2**20, so 32 bits of hash times it fit."""
    z = digit + key
    z *= _MIX_A
    z ^= np.right_shift(z, _FOLD, out=scratch)
    z *= _MIX_B
    z >>= _HALF
    z *= size
    z >>= _HALF
    return z


class Order(Protocol):
    """A row of positions 0, 1, 2, ... for each epoch, each of which holds one of n samples."""

    @property
    def n(self) -> int:
        """Positions of an epoch, and samples; 1..`MAX_SAMPLES`."""

    def at(self, epoch: int, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the samples at `positions` of an epoch.

        Args:
            epoch: 0..2**64 - 1.
            positions: int64 [k], each in [0, n), in any order.

        Returns:
            int64 [k], each in [0, n).

        Raises:
            ConfigError: an argument is out of its range.
        """


@dataclass(frozen=True, slots=True)
class StoredOrder:
    """The order in which the samples are stored, in every epoch."""

    n: int
    """Samples; 1..`MAX_SAMPLES`."""

    def __post_init__(self) -> None:
        """Refuse what is out of range."""
        require_range("n", self.n, 1, MAX_SAMPLES)

    def at(self, epoch: int, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the positions themselves; see `Order`."""
        del epoch
        require_positions(positions, self.n)
        return positions


@dataclass(frozen=True, slots=True)
class GlobalOrder:
    """One random order of all samples, a new one each epoch; see `permute`."""

    n: int
    """Samples; 1..`MAX_SAMPLES`."""
    seed: int
    """0..2**64 - 1."""

    def __post_init__(self) -> None:
        """Refuse what is out of range."""
        require_range("n", self.n, 1, MAX_SAMPLES)
        require_range("seed", self.seed, 0, U64)

    def at(self, epoch: int, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return `permute` of the positions; see `Order`."""
        return permute(positions, self.n, seed=self.seed, epoch=epoch)


def require_positions(positions: npt.NDArray[np.int64], n: int) -> None:
    """Refuse a position outside of [0, n).

    Raises:
        ConfigError: there is one.
    """
    # Seen as unsigned, a negative position is huge: one pass finds both.
    if positions.size and int(positions.view(np.uint64).max()) >= n:
        wrong = positions[(positions < 0) | (positions >= n)]
        raise ConfigError("a position lies outside the epoch", expected=f"0..{n - 1}", found=int(wrong.flat[0]))
