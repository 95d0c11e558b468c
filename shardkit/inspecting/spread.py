"""Exact percentiles and a histogram of any number of values, in two passes and constant memory.

Values are keys, uint32 whose order is theirs: whole numbers as they are, and floats that are not negative by their
bits. The first pass counts the upper halves of the keys; the second one counts the lower halves of those that share
their upper half with a percentile, so each percentile is a value that was seen and no estimate.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from shardkit.inspecting.report import PERCENTILES, Measure

if TYPE_CHECKING:
    import numpy.typing as npt

    _Keys: TypeAlias = npt.NDArray[np.uint32]

__all__ = ["FirstPass", "SecondPass", "float_keys"]

_HALF = 16
_BARS = 48


def float_keys(values: npt.NDArray[np.float32]) -> _Keys:
    """Return the keys of floats that are not negative: views, no copies."""
    return values.view(np.uint32)


class FirstPass:
    """Counts upper halves; knows least and greatest value."""

    def __init__(self, *, floats: bool = False) -> None:
        """Count whole numbers, or floats."""
        self.floats = floats
        self.unknown = 0
        self.upper = np.zeros(1 << _HALF, np.int64)
        self.least, self.greatest = (1 << 32) - 1, 0

    def see(self, keys: _Keys, unknown: int = 0) -> None:
        """Count keys [n], and values that are not known."""
        self.unknown += unknown
        if keys.size:
            self.upper += np.bincount(keys >> np.uint32(_HALF), minlength=self.upper.size)
            self.least = min(self.least, int(keys.min()))
            self.greatest = max(self.greatest, int(keys.max()))


class SecondPass:
    """Counts lower halves where a percentile lies, and bars."""

    def __init__(self, first: FirstPass) -> None:
        """Plan what is counted; the keys must come again, in any order."""
        self._first = first
        self._known = int(first.upper.sum())
        below = np.concatenate([np.zeros(1, np.int64), np.cumsum(first.upper)])
        # Nearest rank: the value that ceil(p n / 100) samples do not exceed; the first sample for 0.
        self._ranks = [max(-(-percent * self._known // 100), 1) - 1 for percent in PERCENTILES] if self._known else []
        self._halves = [int(np.searchsorted(below, rank, side="right")) - 1 for rank in self._ranks]
        self._within = [rank - int(below[half]) for rank, half in zip(self._ranks, self._halves, strict=True)]
        self._lower = {half: np.zeros(1 << _HALF, np.int64) for half in self._halves}
        self._inner = self._inner_edges()
        self._bars = np.zeros(len(self._inner) + 1, np.int64)

    def see(self, keys: _Keys) -> None:
        """Count keys [n]."""
        upper = keys >> np.uint32(_HALF)
        for half, counts in self._lower.items():
            chosen = keys if self._first.upper[half] == self._known else keys[upper == half]
            if chosen.size:
                counts += np.bincount(chosen & np.uint32((1 << _HALF) - 1), minlength=counts.size)
        self._bars += np.bincount(np.searchsorted(self._inner, keys, side="right"), minlength=self._bars.size)

    def measure(self) -> Measure:
        """Return what both passes have counted."""
        keys = [
            (half << _HALF) + int(np.searchsorted(np.cumsum(self._lower[half]), within, side="right"))
            for half, within in zip(self._halves, self._within, strict=True)
        ]
        edges = [self._first.least, *self._inner.tolist(), self._first.greatest] if self._known else []
        return Measure(
            known=self._known, unknown=self._first.unknown,
            percentiles=self._values(keys), edges=self._values(edges),
            counts=tuple(self._bars.tolist()) if self._known else (),
        )  # fmt: skip

    def _inner_edges(self) -> _Keys:
        """Return the keys at which a new bar begins, evenly spaced on a logarithmic scale."""
        if not self._known:
            return np.empty(0, np.uint32)
        least, greatest = self._values([self._first.least, self._first.greatest])
        if self._first.floats:
            marks = np.geomspace(max(least, 1e-6), max(greatest, 1e-6), _BARS + 1)[1:-1]
            keys = float_keys(marks.astype(np.float32))
        else:
            marks = np.ceil(np.geomspace(max(least, 1), greatest + 1, _BARS + 1)[1:-1])
            keys = np.minimum(marks, greatest).astype(np.uint32)
        keys = np.unique(keys)
        return keys[(keys > self._first.least) & (keys <= self._first.greatest)]

    def _values(self, keys: list[int]) -> tuple[float, ...]:
        if not self._first.floats:
            return tuple(keys)
        return tuple(np.asarray(keys, np.uint32).view(np.float32).astype(np.float64).tolist())
