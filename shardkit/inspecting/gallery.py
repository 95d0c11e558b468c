"""The contact sheet: shelves of thumbnails, a class each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardkit.inspecting.thumbnails import Thumbnail, make_thumbnail

if TYPE_CHECKING:
    from collections.abc import Callable

    from shardkit.dataset.shardset import Dataset
    from shardkit.inspecting.scan import Scan

__all__ = ["MAX_THUMBNAILS", "Gallery", "Shelf", "class_name", "fill_gallery"]

MAX_THUMBNAILS = 1000
"""Of a page: each has at most 45 kB there, the most that noise can be with its texts."""


@dataclass(frozen=True, slots=True)
class Shelf:
    """What is shown of one class."""

    label: int | None
    name: str | None
    samples: int
    """Samples of the class, shown or not."""
    thumbnails: tuple[Thumbnail, ...]


@dataclass(frozen=True, slots=True)
class Gallery:
    """All that is shown."""

    shelves: tuple[Shelf, ...]
    groups: int
    """Classes with samples, shown or not; samples without a label count as one."""
    seed: int

    @property
    def shown(self) -> int:
        """Samples on all shelves, those without a picture, too."""
        return sum(len(shelf.thumbnails) for shelf in self.shelves)

    @property
    def failed(self) -> int:
        """Samples without a picture."""
        return sum(one.jpeg is None for shelf in self.shelves for one in shelf.thumbnails)


def fill_gallery(
    dataset: Dataset, scan: Scan, *, seed: int, progress: Callable[[int], object] | None = None
) -> Gallery:
    """Read and shrink the samples that a scan has chosen.

    Args:
        dataset: open.
        scan: of it.
        seed: that chose them.
        progress: called with 1 for each sample.
    """
    shelves = []
    for group, numbers in zip(scan.groups, scan.numbers, strict=True):
        thumbnails = []
        for number in numbers:
            thumbnails.append(make_thumbnail(dataset, number))
            if progress is not None:
                progress(1)
        label = None if group.label < 0 else group.label
        shelves.append(Shelf(label, class_name(dataset.classes, group.label), group.samples, tuple(thumbnails)))
    return Gallery(tuple(shelves), scan.labels.size, seed)


def class_name(classes: tuple[str, ...] | None, label: int) -> str | None:
    """Return the name of a label; None where there is none."""
    return classes[label] if classes is not None and 0 <= label < len(classes) else None
