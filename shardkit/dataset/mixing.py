"""Mixing several collections of samples by weight: which of them serves a position, and with which of its samples.

Positions fall into blocks of 1024. Every block holds the same number of positions of each part, its share, in an order
drawn for the block; so how often a part was drawn before any position is a product and the count within one block.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from shardkit.dataset.arguments import require_range
from shardkit.dataset.order import MAX_SAMPLES, require_positions
from shardkit.errors import ConfigError
from shardkit.splitmix import STEP, U64, finalise, mix

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from shardkit.dataset.order import Order

    _Ints: TypeAlias = npt.NDArray[np.int64]

__all__ = ["BLOCK", "MixedOrder"]

BLOCK = 1024
"""Positions over which the shares of a mix are exact; the smallest share is one of them."""

_SLOTS = np.arange(BLOCK, dtype=np.uint64)
_LAST_BITS = np.uint64(BLOCK - 1)
_SALT = 0x6D69786564  # keeps these choices apart from others that are drawn from the same seed


class MixedOrder:
    """An order that takes each position from one of several orders, by weight; see the head of this file. O(1) memory.

    An epoch has as many positions as all parts have samples, so a part that is drawn more often than its size comes
    several times in an epoch, and one that is drawn less often comes in part. What a part gives is its own order, draw
    by draw: draw j of an epoch is position j mod n of the part, in the part's own epoch

        epoch * laps + j // n

    where `laps` is the most often that the part can begin in one epoch of the mix. No two pairs of epoch and lap share
    such a number, so every lap of a shuffled part has an order of its own, and each epoch of a large part starts a new
    one, of which it takes the beginning.
    """

    def __init__(self, parts: Sequence[tuple[Order, int]], weights: Sequence[float], seed: int) -> None:
        """Work out the shares.

        Args:
            parts: an order, and the number in the mix of its sample 0; these runs of numbers must tile [0, n).
            weights: how often each part is drawn, relative to the others; positive and finite, of any sum.
            seed: 0..2**64 - 1. Orders of equal seed and size in `parts` shuffle alike: give each its own.

        Raises:
            ConfigError: no parts, runs that overlap or leave a gap, a weight that is no weight or is too small for one
                position of a block, or a seed out of range.
        """
        self._parts = tuple(parts)
        self._n = _require_tiles(self._parts)
        self._shares = _shares(weights, len(self._parts))
        require_range("seed", seed, 0, U64)
        self._state = mix(mix(_SALT) + seed)
        self._share = np.asarray(self._shares, np.int64)
        self._pattern = np.repeat(np.arange(len(self._shares), dtype=np.uint16), self._share)
        self._counts = np.concatenate([np.arange(share, dtype=np.int64) for share in self._shares])
        whole, rest = divmod(self._n, BLOCK)
        self._laps = tuple(
            max(1, -(-(whole * share + min(share, rest)) // order.n))
            for share, (order, _) in zip(self._shares, self._parts, strict=True)
        )

    @property
    def n(self) -> int:
        """Positions of an epoch: the samples of all parts together; 1..`MAX_SAMPLES`."""
        return self._n

    @property
    def shares(self) -> tuple[int, ...]:
        """Positions of each part in every `BLOCK` positions: what the weights come to."""
        return self._shares

    @property
    def laps(self) -> tuple[int, ...]:
        """How often each part begins in an epoch at most; >= 1."""
        return self._laps

    def at(self, epoch: int, positions: _Ints) -> _Ints:
        """Return the samples at `positions`; see `shardkit.dataset.order.Order`. A sample may come several times."""
        part, draw = self.draws(epoch, positions)
        samples = np.empty_like(positions)
        for number in np.flatnonzero(np.bincount(part, minlength=len(self._parts))).tolist():
            order, start = self._parts[number]
            members = np.flatnonzero(part == number)
            lap, within = np.divmod(draw[members], order.n)
            for some in np.unique(lap).tolist():
                taken = lap == some
                samples[members[taken]] = start + order.at(epoch * self._laps[number] + some, within[taken])
        return samples

    def draws(self, epoch: int, positions: _Ints) -> tuple[_Ints, _Ints]:
        """Return which part serves each of `positions`, and how often the part was drawn before in this epoch.

        Args:
            epoch: 0..2**64 - 1.
            positions: int64 [k], each in [0, n), in any order.

        Returns:
            Indices into the parts, and counts from 0; int64 [k] each.

        Raises:
            ConfigError: an argument is out of its range.
        """
        require_range("an epoch", epoch, 0, U64)
        require_positions(positions, self._n)
        block, slot = np.divmod(positions, BLOCK)
        blocks, row = np.unique(block, return_inverse=True)
        parts, before = self._lay_out(epoch, blocks)
        part = parts[row, slot].astype(np.int64)
        draw: _Ints = block * self._share[part] + before[row, slot]
        return part, draw

    def _lay_out(self, epoch: int, blocks: _Ints) -> tuple[npt.NDArray[np.uint16], _Ints]:
        """Return the part of each position of some blocks, and its count within the block; [blocks, BLOCK] each."""
        # The shares, one after another, are put at the positions in the order of a hash; its last bits give way to the
        # position, so that no two tie and sorting the numbers themselves will do, which is far faster than argsort.
        state = np.uint64(mix(self._state + epoch))
        states = finalise((blocks.astype(np.uint64) + np.uint64(1)) * np.uint64(STEP) + state)
        hashes = finalise(states[:, None] + (_SLOTS + np.uint64(1)) * np.uint64(STEP))
        drawn = (np.sort(hashes & ~_LAST_BITS | _SLOTS, axis=1) & _LAST_BITS).view(np.int64)
        rows = np.arange(len(blocks))[:, None]
        parts = np.empty(drawn.shape, np.uint16)
        parts[rows, drawn] = self._pattern
        # Sorted by part, positions rising within each: the first of a part has count 0, the next 1, and so on.
        before = np.empty(drawn.shape, np.int64)
        before[rows, np.argsort(parts, axis=1, kind="stable")] = self._counts
        return parts, before


def _require_tiles(parts: Sequence[tuple[Order, int]]) -> int:
    """Return the samples of all parts.

    Raises:
        ConfigError: there is no part, or their runs of numbers do not tile [0, n).
    """
    end = 0
    for order, start in sorted(parts, key=lambda part: part[1]):
        if start != end:
            raise ConfigError("the parts of a mix overlap or leave a gap", expected=f"a part at {end}", found=start)
        end += order.n
    if not 1 <= end <= MAX_SAMPLES:
        raise ConfigError("the samples of a mix are out of range", expected=f"1..{MAX_SAMPLES}", found=end)
    return end


def _shares(weights: Sequence[float], parts: int) -> tuple[int, ...]:
    """Return the positions of each part in a block: rounded down, and the rest to the largest remainders, first first.

    In exact arithmetic, so that every machine shares out alike.

    >>> _shares([0.7, 0.3], 2)
    (717, 307)
    """
    if len(weights) != parts:
        raise ConfigError("each part of a mix needs one weight", expected=parts, found=len(weights))
    for weight in weights:
        if not (math.isfinite(weight) and weight > 0):
            raise ConfigError("a weight is not a positive, finite number", expected="> 0", found=weight)
    exact = [Fraction(weight) for weight in weights]
    total = sum(exact)
    wanted = [weight * BLOCK / total for weight in exact]
    shares = [math.floor(value) for value in wanted]
    by_remainder = sorted(range(parts), key=lambda at: shares[at] - wanted[at])
    for at in by_remainder[: BLOCK - sum(shares)]:
        shares[at] += 1
    if 0 in shares:
        smallest = shares.index(0)
        raise ConfigError(
            f"weight {weights[smallest]:g} is too small beside the others: its part would never come",
            expected=f"a share of at least 1/{BLOCK} of all weights",
            found=f"{float(exact[smallest] / total):.2g}",
            remedy="raise it, or leave the part out",
        )
    return tuple(shares)
