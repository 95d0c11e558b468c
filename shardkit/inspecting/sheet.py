"""Which samples a contact sheet shows: a seeded choice from every class, the same for equal datasets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from shardkit.splitmix import STEP, U64, mix

if TYPE_CHECKING:
    import numpy.typing as npt

__all__ = ["Group", "Picker", "plan_sheet"]


@dataclass(frozen=True, slots=True)
class Group:
    """The samples of one label, and which of them are shown."""

    label: int
    """-1 for the samples that have none."""
    samples: int
    places: tuple[int, ...]
    """Rising; the i-th sample with this label, in stored order and from 0."""


def plan_sheet(labels: npt.NDArray[np.int64], counts: npt.NDArray[np.int64], most: int, seed: int) -> list[Group]:
    """Return what is shown, by rising label: as many of each as there is room for, of some where there are too many.

    Args:
        labels: distinct and rising, [k].
        counts: samples that have each, at least 1, [k].
        most: samples that are shown together.
        seed: another one chooses others.
    """
    sizes = dict(zip(labels.tolist(), counts.tolist(), strict=True))
    chosen = list(sizes) if len(sizes) <= most else sorted(sorted(sizes, key=lambda x: _salt(seed, x))[:most])
    shown = {label: min(most // len(chosen), sizes[label]) for label in chosen}
    room = min(most, sum(sizes[label] for label in chosen)) - sum(shown.values())
    while room > 0:
        for label in chosen:
            if room and shown[label] < sizes[label]:
                shown[label], room = shown[label] + 1, room - 1
    return [Group(label, sizes[label], _draw(shown[label], sizes[label], _salt(seed, label))) for label in chosen]


class Picker:
    """Finds the numbers of the samples that a plan means, in one pass over the labels."""

    def __init__(self, groups: list[Group]) -> None:
        """Take a plan, by rising label."""
        self._groups = groups
        self._labels = np.asarray([group.label for group in groups], np.int64)
        self._seen = np.zeros(len(groups), np.int64)
        self.numbers: list[list[int]] = [[] for _ in groups]
        """Of each group, numbers of samples, rising."""

    def see(self, first: int, labels: npt.NDArray[np.integer]) -> None:
        """Look at the labels [n] of the samples from number `first` on; -1 stands for none."""
        if not self._groups:
            return
        places = np.minimum(np.searchsorted(self._labels, labels), self._labels.size - 1)
        counts = np.bincount(places[self._labels[places] == labels], minlength=self._labels.size)
        for i in np.flatnonzero(counts).tolist():
            start, stop = int(self._seen[i]), int(self._seen[i] + counts[i])
            within = [place - start for place in self._groups[i].places if start <= place < stop]
            if within:
                rows = np.flatnonzero(labels == self._labels[i])[within]
                self.numbers[i] += (rows + first).tolist()
        self._seen += counts


def _salt(seed: int, label: int) -> int:
    return mix(mix(seed & U64) ^ mix(label & U64))


def _draw(count: int, below: int, salt: int) -> tuple[int, ...]:
    """Return distinct numbers of [0, below), rising."""
    if 2 * count >= below:
        return tuple(sorted(sorted(range(below), key=lambda number: mix(salt ^ mix(number)))[:count]))
    drawn: set[int] = set()
    while len(drawn) < count:
        salt = (salt + STEP) & U64
        drawn.add(mix(salt) % below)
    return tuple(sorted(drawn))
