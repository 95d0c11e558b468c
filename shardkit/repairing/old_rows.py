"""The rows that an index, or two, had for a shard: what its samples must be, where the index itself can be believed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from shardkit.errors import IndexFormatError
from shardkit.extent import align_up
from shardkit.format.index import SampleRow
from shardkit.format.keys import is_safe_key, path_from_source
from shardkit.format.tar import BLOCK

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardkit.format.index import RecordBatch
    from shardkit.repairing.members import ClassNames

__all__ = ["OldRows", "cover", "row_fault"]

_ROWS_AT_ONCE = 1024


class OldRows:
    """The rows of one shard in stored order. Memory: the batches, and 16 bytes a row; more once a key is asked for."""

    def __init__(self, batches: Sequence[RecordBatch], *, proven: bool) -> None:
        """Take what indexes gave.

        Args:
            batches: at least one; several where two indexes disagree and neither is proved.
            proven: the manifest has the digest of the index, or two indexes have the same rows.
        """
        self.batch = batches[0]
        self.proven = proven
        self._others = batches[1:]
        starts = self.batch.column("sample_offset").to_numpy(zero_copy_only=False)
        order = np.argsort(starts, kind="stable")
        self._order = order[starts[order] % BLOCK == 0]  # elsewhere no header is
        self._starts: npt.NDArray[np.uint64] = starts[self._order]
        self._chunk: tuple[int, list[SampleRow]] = (-1, [])
        self._by_key: dict[str, list[SampleRow]] | None = None
        self._numbers: dict[str, int] = {}

    def __len__(self) -> int:
        """Return the number of rows."""
        return int(self.batch.num_rows)

    def row(self, number: int) -> SampleRow:
        """Return one row."""
        first = number // _ROWS_AT_ONCE * _ROWS_AT_ONCE
        if self._chunk[0] != first:
            self._chunk = (first, [SampleRow(**row) for row in self.batch.slice(first, _ROWS_AT_ONCE).to_pylist()])
        return self._chunk[1][number - first]

    def at(self, offset: int) -> int | None:
        """Return the number of the row whose sample starts at `offset`."""
        place = int(np.searchsorted(self._starts, np.uint64(offset)))
        return int(self._order[place]) if place < len(self._starts) and int(self._starts[place]) == offset else None

    def next_start(self, offset: int) -> int | None:
        """Return where the first sample after `offset` starts."""
        place = int(np.searchsorted(self._starts, np.uint64(offset), side="right"))
        return int(self._starts[place]) if place < len(self._starts) else None

    def with_key(self, key: str) -> tuple[int, list[SampleRow]] | None:
        """Return the number of a key's row, -1 when only another index has it, and what each index says of it."""
        if self._by_key is None:
            self._by_key = {}
            for batch in (self.batch, *self._others):
                for number, values in enumerate(batch.to_pylist()):
                    self._by_key.setdefault(values["key"], []).append(SampleRow(**values))
                    if batch is self.batch:
                        self._numbers[values["key"]] = number
        rows = self._by_key.get(key)
        return None if rows is None else (self._numbers.get(key, -1), rows)


def cover(rows: OldRows, size: int, classes: ClassNames) -> bool:
    """Tell whether rows can be those of a whole shard: each possible, and each sample where the one before it ends.

    A digest proves that an index is the one that was written with the manifest, and not that it tells the truth.

    Args:
        rows: all rows of the shard.
        size: bytes of the shard.
        classes: of the dataset.
    """
    at = 0
    for row in map(rows.row, range(len(rows))):
        end = row.sample_offset + row.sample_size
        inside = not row.json_size or at < row.json_offset <= row.json_offset + row.json_size < row.offset
        if row.sample_offset != at or align_up(row.offset + row.size, BLOCK) != end or end > size or not inside:
            return False
        if row_fault(row) or classes.label_fault(row.label):
            return False
        at = end
    return True


def row_fault(row: SampleRow) -> str | None:
    """Return why no dataset has such a row; None when one can."""
    if not is_safe_key(row.key):
        return "a key that some reader would misread"
    if row.label is not None and row.label < 0:
        return "a label below 0"
    if row.label is None and not row.json_offset:
        return "neither a label nor a json member"
    if not row.size or row.offset % BLOCK or row.offset <= row.sample_offset:
        return "an image where none can lie"
    try:
        path_from_source(row.source)
    except IndexFormatError:
        return "a source that is no path"
    return None
