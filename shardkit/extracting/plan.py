"""Which samples are extracted, under which names, and which two would meet under one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from shardkit.dataset.selection import select
from shardkit.errors import ConfigError, ShardkitError, UnsafeError
from shardkit.escaping import escape
from shardkit.extracting.names import Name, class_folders, folder_of, name
from shardkit.format.checksum import hash64
from shardkit.format.keys import without_here

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy.typing as npt

    from shardkit.dataset.shardset import Dataset
    from shardkit.extracting.names import Layout

    _Ints: TypeAlias = npt.NDArray[np.int64]

__all__ = ["Plan", "Refusal", "make_plan"]

_ROWS_AT_ONCE = 4096
_PIECE_SAMPLES = 256
"""Samples that one thread extracts before it reports: some hundredths of a second."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """A sample that has no name of its own."""

    reason: str
    """`unsafe-name` or `same-name`."""
    error: ShardkitError
    """What it says, and what it raises when the run is to stop."""


class Plan:
    """The samples to extract; names are made when they are asked for, so memory is 16 bytes a sample."""

    def __init__(self, dataset: Dataset, layout: Layout, rows: _Ints) -> None:
        """Bind to a dataset, which stays the caller's.

        Args:
            dataset: whose samples.
            layout: of the tree.
            rows: int64 [k], rising sample numbers.
        """
        self.dataset = dataset
        self.rows = rows
        self._layout: Layout = layout
        self._folders = class_folders(dataset.classes or ())
        self._ends = np.cumsum([shard.samples for shard in dataset.manifest.shards])
        self.refused: dict[int, Refusal] = {}
        """Sample number -> why it has no name; in stored order."""
        self.renamed = 0
        """Samples whose source was to be their path, and is not, or not byte for byte."""
        self.unstated = 0
        """Samples with a label whose path does not begin with their class."""

    def names(self, rows: _Ints) -> list[Name]:
        """Return the paths of samples, refused ones too; int64 [k] rising rows."""
        columns = self.dataset.columns
        labels = columns.numbers("label")[rows].tolist()
        known = "media_type" in self.dataset.manifest.known_columns
        kinds = columns.numbers("media_type")[rows].tolist() if known else [None] * len(rows)
        keys, sources = (columns.texts(column)[rows] for column in ("key", "source"))
        return [
            name(self._layout, key=key, source=source, media_type=kind, folder=folder_of(label, self._folders))
            for key, source, kind, label in zip(keys, sources, kinds, labels, strict=True)
        ]

    def pieces(self) -> Iterator[_Ints]:
        """Yield runs of rows, each within one shard, in stored order."""
        first = 0
        for end in np.searchsorted(self.rows, self._ends).tolist():
            for start in range(first, end, _PIECE_SAMPLES):
                yield self.rows[start : min(start + _PIECE_SAMPLES, end)]
            first = end

    def shard_of(self, row: int) -> str:
        """Return the path of the shard that a sample lies in."""
        return self.dataset.shard_paths[int(np.searchsorted(self._ends, row, side="right"))]

    def shard_bytes(self, row: int) -> int:
        """Return the size of the shard that a sample lies in, as the manifest states it."""
        return self.dataset.manifest.shards[int(np.searchsorted(self._ends, row, side="right"))].bytes

    def payload(self) -> int:
        """Return the bytes of all images."""
        size = self.dataset.columns.numbers("size")
        return sum(int(size[rows].sum(dtype=np.int64)) for rows in _runs(self.rows))


def make_plan(dataset: Dataset, layout: Layout, keys: Sequence[str] | None) -> Plan:
    """Return what there is to extract, with every name looked at once.

    Raises:
        ConfigError: a key is not in the dataset.
        IndexFormatError: a text of the index is damaged.
    """
    chosen = select(dataset, keys=keys) if keys else None
    plan = Plan(dataset, layout, np.arange(len(dataset), dtype=np.int64) if chosen is None else chosen)
    hashes = np.empty(len(plan.rows), np.uint64)
    faults: dict[int, Refusal] = {}
    for first, rows in zip(range(0, len(plan.rows), _ROWS_AT_ONCE), _runs(plan.rows), strict=True):
        names = plan.names(rows)
        hashes[first : first + len(rows)] = [hash64(one.path) for one in names]
        plan.renamed += sum(one.instead for one in names)
        plan.unstated += sum(one.unstated for one in names)
        faults |= {row: _unsafe(dataset, row, one) for row, one in zip(rows.tolist(), names, strict=True) if one.fault}
    plan.refused = dict(sorted((faults | _meetings(plan, hashes, faults)).items()))
    return plan


def _runs(rows: _Ints) -> Iterator[_Ints]:
    for first in range(0, len(rows), _ROWS_AT_ONCE):
        yield rows[first : first + _ROWS_AT_ONCE]


def _unsafe(dataset: Dataset, row: int, one: Name) -> Refusal:
    key = dataset.columns.texts("key")[row]
    error = UnsafeError(
        f"a sample's name is refused: {one.fault}", key=key, found=escape(one.path[:200]),
        remedy="--on-error skip leaves it out",
    )  # fmt: skip
    return Refusal("unsafe-name", error)


def _meetings(plan: Plan, hashes: npt.NDArray[np.uint64], faults: dict[int, Refusal]) -> dict[int, Refusal]:
    """Return the samples whose path an earlier one has; only those with equal hashes are compared."""
    order = np.argsort(hashes, kind="stable")
    twin = hashes[order][1:] == hashes[order][:-1]
    suspects = np.unique(np.concatenate([order[:-1][twin], order[1:][twin]]))
    first: dict[bytes, str] = {}
    found: dict[int, Refusal] = {}
    for rows in _runs(plan.rows[suspects]):
        keys = plan.dataset.columns.texts("key")[rows]
        for row, key, one in zip(rows.tolist(), keys, plan.names(rows), strict=True):
            if row in faults:
                continue
            if one.path in first:
                found[row] = Refusal("same-name", _same_name(one.path, key, first[one.path]))
            else:
                first[one.path] = key
    return found


def _same_name(path: bytes, key: str, other: str) -> ConfigError:
    # Shards that were numbered anew each, as another tool's may be: no layout parts what one key and one source join.
    one_key = without_here(key) == without_here(other)
    way_out = "shardkit convert --key shard, and extract that with --layout class" if one_key else "the other --layout"
    return ConfigError(
        "two samples would be one file", path=path, key=key, found=f"sample {escape(other)} under that name",
        remedy=f"try {way_out}; --on-error skip keeps the first",
    )  # fmt: skip
