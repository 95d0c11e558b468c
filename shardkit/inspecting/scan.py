"""Two passes over the index: the first counts, the second finds percentiles and the samples that are shown."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from shardkit.inspecting.codings import COLUMNS, CodingTally
from shardkit.inspecting.labels import LabelTally
from shardkit.inspecting.sheet import Picker, plan_sheet
from shardkit.inspecting.spread import FirstPass, SecondPass, float_keys

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    import numpy.typing as npt

    from shardkit.dataset.shardset import Dataset
    from shardkit.inspecting.report import ImageFacts, Measure
    from shardkit.inspecting.sheet import Group

    _Ints: TypeAlias = npt.NDArray[np.int64]
    _Keys: TypeAlias = npt.NDArray[np.uint32]
    _Block: TypeAlias = dict[str, npt.NDArray[Any]]  # Any: each column has a type of its own

__all__ = ["BLOCK_ROWS", "Scan", "scan_index"]

BLOCK_ROWS = 1 << 20
"""Rows of the index that are in memory at a time: about 40 MB of columns, and as much again to count with."""
_SIZES = ("size", "width", "height")


@dataclass(frozen=True, slots=True)
class Scan:
    """What the index says in sum."""

    labels: _Ints
    """Distinct, rising; -1 for samples without one."""
    counts: _Ints
    """Samples that have each."""
    images: ImageFacts
    measures: Mapping[str, Measure]
    groups: Sequence[Group]
    """What is shown."""
    numbers: Sequence[Sequence[int]]
    """Of the samples that are shown, for each group."""


def scan_index(
    dataset: Dataset, *, thumbnails: int = 0, seed: int = 0, progress: Callable[[int], object] | None = None
) -> Scan:
    """Read the columns of numbers twice, a block of rows at a time.

    Args:
        dataset: open.
        thumbnails: how many samples are chosen to be shown.
        seed: of the choice.
        progress: called with the number of rows just looked at; every row is looked at twice.
    """
    codings, tally = CodingTally(), LabelTally()
    firsts = {"bytes": FirstPass(), "width": FirstPass(), "height": FirstPass(), "aspect": FirstPass(floats=True)}
    for _, block in _blocks(dataset, (*_SIZES, *COLUMNS, "label"), progress):
        codings.see(block)
        tally.see(block["label"])
        for name, (keys, unknown) in _keys(block).items():
            firsts[name].see(keys, unknown)
    labels, counts = tally.totals()
    groups = plan_sheet(labels, counts, thumbnails, seed) if thumbnails else []
    picker = Picker(groups)
    seconds = {name: SecondPass(first) for name, first in firsts.items()}
    for first, block in _blocks(dataset, (*_SIZES, "label"), progress):
        picker.see(first, block["label"])
        for name, (keys, _) in _keys(block).items():
            seconds[name].see(keys)
    measures = {name: second.measure() for name, second in seconds.items()}
    return Scan(labels, counts, codings.facts(), measures, groups, picker.numbers)


def _blocks(
    dataset: Dataset, names: Sequence[str], progress: Callable[[int], object] | None
) -> Iterator[tuple[int, _Block]]:
    """Yield the number of a block's first sample, and its columns."""
    columns = dataset.columns
    for first in range(0, len(dataset), BLOCK_ROWS):
        stop = min(first + BLOCK_ROWS, len(dataset))
        yield first, {name: columns.numbers(name)[first:stop] for name in names}
        columns.release()  # else the whole index would become resident, block by block
        if progress is not None:
            progress(stop - first)


def _keys(block: _Block) -> dict[str, tuple[_Keys, int]]:
    """Return, of each measure, the keys of the samples that have it and how many have not."""
    size, width, height = (block[name] for name in _SIZES)
    wide, high = width > 0, height > 0
    both = wide & high
    aspect: npt.NDArray[np.float32] = np.divide(width[both], height[both], dtype=np.float32)
    return {
        "bytes": (size, 0),
        "width": (width if wide.all() else width[wide], int(np.count_nonzero(~wide))),
        "height": (height if high.all() else height[high], int(np.count_nonzero(~high))),
        "aspect": (float_keys(aspect), int(np.count_nonzero(~both))),
    }
