"""How many samples each label has."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

    _Ints: TypeAlias = npt.NDArray[np.int64]

__all__ = ["LabelTally"]

_PENDING = 1 << 20


class LabelTally:
    """Counts labels; memory: the distinct ones."""

    def __init__(self) -> None:
        """Start empty."""
        self._labels: _Ints = np.empty(0, np.int64)
        self._counts: _Ints = np.empty(0, np.int64)
        self._pending: list[tuple[_Ints, _Ints]] = []
        self._held = 0

    def see(self, labels: npt.NDArray[np.integer]) -> None:
        """Count labels [n]; -1 stands for none."""
        found, counts = np.unique(labels, return_counts=True)
        self._pending.append((found.astype(np.int64), counts))
        self._held += found.size
        if self._held > max(_PENDING, 2 * self._labels.size):
            self._merge()

    def totals(self) -> tuple[_Ints, _Ints]:
        """Return the labels, rising, and how many samples have each; int64 [k], [k]."""
        self._merge()
        return self._labels, self._counts

    def _merge(self) -> None:
        parts = [(self._labels, self._counts), *self._pending]
        labels, places = np.unique(np.concatenate([part[0] for part in parts]), return_inverse=True)
        # Floats count exactly up to 2**53 samples.
        counts = np.bincount(places, weights=np.concatenate([part[1] for part in parts]), minlength=labels.size)
        self._labels, self._counts = labels, counts.astype(np.int64)
        self._pending, self._held = [], 0
