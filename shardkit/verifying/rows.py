"""The rows of one shard's index as arrays, and where they put every byte of the shard."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from shardkit.extent import align_up
from shardkit.format.index import FACTS
from shardkit.format.layout import sample_bytes, shard_bytes
from shardkit.format.tar import BLOCK

if TYPE_CHECKING:
    from shardkit.format.index import RecordBatch

__all__ = ["Geometry", "Rows", "expected_geometry", "geometry_of"]

_Ints = npt.NDArray[np.int64]


class Rows:
    """Columns of a shard's index; arrays are int64 [n] in stored order, in memory of their own."""

    def __init__(self, batch: RecordBatch) -> None:
        """Take the columns out of a validated record batch."""
        self.batch = batch
        labels = batch.column("label")
        self.labelled: npt.NDArray[np.bool_] = ~labels.is_null().to_numpy(zero_copy_only=False)
        """bool [n]; False where the row has no label."""
        self.label = self._column("label")
        """Undefined where `labelled` is False."""
        self.offset = self._column("offset")
        self.size = self._column("size")
        self.crc32c = self._column("crc32c")
        self.sample_offset = self._column("sample_offset")
        self.sample_size = self._column("sample_size")
        self.json_offset = self._column("json_offset")
        self.json_size = self._column("json_size")
        json_bytes = np.where(self.json_offset > 0, BLOCK - (-self.json_size // BLOCK) * BLOCK, 0)
        self.small: _Ints = np.where(self.labelled, 2 * BLOCK, 0) + json_bytes
        """Bytes of the small members, with their headers and block padding: a label always fits one block."""

    def __len__(self) -> int:
        """Return the number of samples."""
        return int(self.batch.num_rows)

    def keys(self, first: int = 0, count: int | None = None) -> list[str]:
        """Return the keys of `count` rows from `first` on; of all of them by default."""
        return self._texts("key", first, count)

    def sources(self, first: int = 0, count: int | None = None) -> list[str]:
        """Return the sources of `count` rows from `first` on; of all of them by default."""
        return self._texts("source", first, count)

    def key(self, row: int) -> str:
        """Return the key of one row."""
        return str(self.batch.column("key")[row].as_py())

    def facts(self, first: int, count: int) -> list[tuple[int, ...]]:
        """Return the `FACTS` of `count` rows from `first` on."""
        part = self.batch.slice(first, count)
        return list(zip(*(part.column(name).to_pylist() for name in FACTS), strict=True))

    def _texts(self, name: str, first: int, count: int | None) -> list[str]:
        values: list[str] = self.batch.column(name).slice(first, count).to_pylist()
        return values

    def _column(self, name: str) -> _Ints:
        values: Any = self.batch.column(name)  # Any: pyarrow ships no types
        whole = values.fill_null(0).to_numpy(zero_copy_only=False)
        ints: _Ints = whole.astype(np.int64)  # a uint64 from 2^63 on becomes negative, and is no offset either way
        return ints


@dataclass(frozen=True, slots=True)
class Geometry:
    """Where the members of a shard lie when its samples have these sizes, one after another. int64 [n] each."""

    sample_offset: _Ints
    sample_size: _Ints
    json_offset: _Ints
    offset: _Ints
    shard_bytes: int
    """Size of the whole shard."""


def expected_geometry(rows: Rows, align: int) -> Geometry:
    """Return where the rows' labels, json sizes and image sizes put everything."""
    sizes = sample_bytes(rows.small, rows.size, align)
    ends = np.cumsum(sizes)
    starts = ends - sizes
    json_offset = np.where(rows.json_offset > 0, starts + np.where(rows.labelled, 2 * BLOCK, 0) + BLOCK, 0)
    offset = ends - (-(-rows.size // BLOCK) * BLOCK)
    end = int(ends[-1]) if len(ends) else 0
    return Geometry(starts, sizes, json_offset, offset, shard_bytes(align_up(end, BLOCK), align))


def geometry_of(rows: Rows, align: int, shard_bytes: int, *, layout: str) -> Geometry:
    """Return where the samples of a shard must lie: in a foreign one wherever the rows say."""
    if layout == "foreign":
        return Geometry(rows.sample_offset, rows.sample_size, rows.json_offset, rows.offset, shard_bytes)
    return expected_geometry(rows, align)
