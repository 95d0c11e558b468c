"""What is told of labels: how many samples have one, and which classes no sample has."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

__all__ = ["LabelCount"]


class LabelCount:
    """Counts labels as they pass; memory: a byte a class."""

    def __init__(self, classes: Sequence[str] | None) -> None:
        """Start at nothing, with the names in label order; None without names."""
        self.labelled = 0
        """Samples that have a label."""
        self._classes = classes or ()
        self._met = np.zeros(len(self._classes), np.bool_)

    def see(self, labels: npt.NDArray[np.integer]) -> None:
        """Count labels [n], of samples that have one; each is below the number of classes where these have names."""
        self.labelled += len(labels)
        if self._classes:
            self._met[labels] = True

    @property
    def empty(self) -> tuple[str, ...]:
        """Names of the classes that no sample has, in label order."""
        return tuple(self._classes[number] for number in np.flatnonzero(~self._met).tolist())
