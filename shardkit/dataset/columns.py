"""The columns of a memory-mapped index: many rows of many shards in one vectorised gather, nothing loaded before.

All record batches of `index.arrow` lie in one map, uncompressed. So row r of a shard is item `base[shard] + r` of the
whole map seen as items of the column's type, and any set of rows is one fancy index into that view.
"""

from __future__ import annotations

import mmap
import operator
from collections.abc import Iterator, Sequence
from typing import Any, Protocol, TypeAlias, overload

import numpy as np
import numpy.typing as npt

from shardkit.errors import IndexFormatError
from shardkit.format.index import SCHEMA

__all__ = ["Column", "Rows", "TextColumn", "make_absent", "map_column"]

_Ints: TypeAlias = npt.NDArray[np.int64]
_Bytes: TypeAlias = npt.NDArray[np.uint8]
_Batches: TypeAlias = Sequence[Any]  # Any: pyarrow has no types; record batches, one a shard
_Many: TypeAlias = slice | Sequence[int] | npt.NDArray[np.integer[Any]]


class _Buffer(Protocol):
    """What is used of a pyarrow buffer."""

    address: int
    size: int


NULL = -1
"""What a null reads as; only labels may be null."""


class Rows:
    """How the samples of a dataset, numbered through, fall onto its shards."""

    __slots__ = ("starts",)

    def __init__(self, samples: Sequence[int]) -> None:
        """Take the number of samples of each shard."""
        self.starts: _Ints = np.concatenate([np.zeros(1, np.int64), np.cumsum(np.asarray(samples, np.int64))])

    def __len__(self) -> int:
        """Return the number of samples."""
        return int(self.starts[-1])

    def resolve(self, ids: Sequence[int] | npt.NDArray[np.integer[Any]]) -> _Ints:
        """Return sample numbers as int64 [n], negative ones counted from the end.

        Raises:
            IndexError: one is outside the dataset.
            TypeError: they are not integers, or not one row of them.
        """
        array = np.asarray(ids)
        if array.ndim != 1 or not (np.issubdtype(array.dtype, np.integer) or array.size == 0):
            raise TypeError(f"sample numbers are one row of integers, not {array.dtype} of shape {array.shape}")
        numbers = array.astype(np.int64, copy=False)
        total = len(self)
        wrong = (numbers < -total) | (numbers >= total)
        if wrong.any():
            raise IndexError(f"sample {int(numbers[wrong][0])} of a dataset with {total} samples")
        return np.where(numbers < 0, numbers + total, numbers)

    def resolve_one(self, number: int) -> int:
        """Return one sample number, counted from the start.

        Raises:
            IndexError: it is outside the dataset.
        """
        total = len(self)
        if not -total <= number < total:
            raise IndexError(f"sample {number} of a dataset with {total} samples")
        return number + total if number < 0 else number

    def shard_of(self, ids: _Ints) -> _Ints:
        """Return the shard of each sample; `ids` are resolved."""
        shard: _Ints = np.searchsorted(self.starts, ids, side="right") - 1
        return shard


class Column:
    """A column of numbers over the whole dataset: `len`, and values by number, slice or array of numbers.

    Values are copied out of the memory map, so they stay when the dataset is closed.
    """

    __slots__ = ("_bits", "_bytes", "_items", "_rows", "_shift")

    def __init__(self, rows: Rows, memory: _Bytes, dtype: npt.DTypeLike, base: _Ints, bits: _Ints | None) -> None:
        """Bind the column to the map.

        Args:
            rows: of the dataset.
            memory: uint8, the whole map; kept.
            dtype: of the values.
            base: int64 [shards], the item of the map, seen as `dtype`, that holds each shard's first row.
            bits: int64 [shards], the bit of the map that tells whether each shard's first row is valid, -1 for a
                shard without nulls; None for a column without nulls.
        """
        kind = np.dtype(dtype)
        self._rows = rows
        self._bytes = memory
        self._items: npt.NDArray[Any] = np.frombuffer(memory, kind, memory.size // kind.itemsize)  # Any: by column
        self._shift = base - rows.starts[:-1]
        self._bits = bits

    @property
    def dtype(self) -> np.dtype[Any]:
        """The type of the values; Any, since it is another one for each column."""
        return self._items.dtype

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self._rows)

    @overload
    def __getitem__(self, index: int, /) -> int: ...
    @overload
    def __getitem__(self, index: _Many, /) -> npt.NDArray[Any]: ...
    def __getitem__(self, index: int | _Many, /) -> int | npt.NDArray[Any]:
        """Return one value as an int, or an array [n] of `dtype` for a slice or an array of sample numbers.

        Raises:
            IndexError: a number is outside the dataset.
            TypeError: not numbers.
        """
        if isinstance(index, slice):
            first, stop, step = index.indices(len(self))
            if step == 1 and self._bits is None:
                return np.concatenate([self._items[:0], *self.chunks(first, stop)])
            ids = np.arange(first, stop, step, dtype=np.int64)
        elif isinstance(index, int | np.integer):
            ids = np.asarray([self._rows.resolve_one(operator.index(index))], np.int64)
            return int(self.take(ids, self._rows.shard_of(ids))[0])
        else:
            ids = self._rows.resolve(index)
        return self.take(ids, self._rows.shard_of(ids))

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> npt.NDArray[Any]:
        """Return the whole column for `np.asarray(column)`; always a copy."""
        return np.asarray(self[:], dtype)

    def chunks(self, first: int = 0, stop: int | None = None) -> Iterator[npt.NDArray[Any]]:
        """Yield the stored values of the samples [first, stop), a view into the map for each shard; nulls undefined.

        After a pass over all samples the map is no longer resident; whoever still holds a view reads it again.
        """
        last = len(self) if stop is None else stop
        starts = self._rows.starts.tolist()
        for shard in range(len(starts) - 1):
            low, high = max(first, starts[shard]), min(last, starts[shard + 1])
            if low < high:
                at = int(self._shift[shard])
                yield self._items[at + low : at + high]
        if last - first == len(self):
            make_absent(self._bytes)

    def take(self, ids: _Ints, shard: _Ints) -> npt.NDArray[Any]:
        """Return the values of resolved sample numbers [n], whose shards [n] the caller knows; nulls are -1."""
        values: npt.NDArray[Any] = self._items[self._shift[shard] + ids]
        if self._bits is None:
            return values
        first = self._bits[shard]
        bit = first + ids - self._rows.starts[shard]
        valid = (self._bytes[np.where(first < 0, 0, bit >> 3)] >> (bit & 7).astype(np.uint8)) & 1
        values[(first >= 0) & (valid == 0)] = NULL
        return values


class TextColumn:
    """A column of texts over the whole dataset: `len`, and texts by number, slice or array of numbers."""

    __slots__ = ("_base", "_ends", "_first", "_memory", "_rows")

    def __init__(self, rows: Rows, memory: _Bytes, first: _Ints, base: _Ints) -> None:
        """Bind the column to the map.

        Args:
            rows: of the dataset.
            memory: uint8, the whole map; kept.
            first: int64 [shards], the int32 of the map that states where each shard's first text starts; one int32 a
                text follows, that states where it ends.
            base: int64 [shards], the byte of the map from which those offsets count.
        """
        self._rows = rows
        self._memory = memory
        self._ends = np.frombuffer(memory, np.int32, memory.size // 4)
        self._first = first
        self._base = base

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self._rows)

    @overload
    def __getitem__(self, index: int, /) -> str: ...
    @overload
    def __getitem__(self, index: _Many, /) -> list[str]: ...
    def __getitem__(self, index: int | _Many, /) -> str | list[str]:
        """Return one text, or a list for a slice or an array of sample numbers.

        Raises:
            IndexError: a number is outside the dataset.
            TypeError: not numbers.
            IndexFormatError: the text is damaged.
        """
        if isinstance(index, slice):
            return self._texts(np.arange(*index.indices(len(self)), dtype=np.int64))
        if isinstance(index, int | np.integer):
            return self._texts(np.asarray([self._rows.resolve_one(operator.index(index))], np.int64))[0]
        return self._texts(self._rows.resolve(index))

    def find(self, text: str) -> int:
        """Return the number of the first sample with this text, or -1.

        Looks at every row, last byte first and all rows of a shard at once: about 15 ms a million.
        """
        wanted = text.encode("utf-8", "surrogatepass")
        for shard in range(len(self._base)):
            row = self._find_in(shard, wanted)
            if row >= 0:
                return int(self._rows.starts[shard]) + row
        make_absent(self._memory)
        return -1

    def _find_in(self, shard: int, wanted: bytes) -> int:
        first, stop = self._rows.starts[shard : shard + 2].tolist()
        if first == stop:
            return -1
        # A shard has one offset more than texts: the end of its last one.
        at = int(self._first[shard])
        ends = self._ends[at : at + stop - first + 1].astype(np.int64)
        rows = np.flatnonzero(np.diff(ends) == len(wanted))
        starts = self._base[shard] + ends[rows]
        whole = (starts >= 0) & (starts + len(wanted) <= self._memory.size)
        rows, starts = rows[whole], starts[whole]
        for at in range(len(wanted) - 1, -1, -1):
            same = self._memory[starts + at] == wanted[at]
            rows, starts = rows[same], starts[same]
            if not rows.size:
                return -1
        return int(rows[0]) if rows.size else -1

    def _texts(self, ids: _Ints) -> list[str]:
        shard = self._rows.shard_of(ids)
        base = self._base[shard]
        item = self._first[shard] + ids - self._rows.starts[shard]
        starts = (base + self._ends[item]).tolist()
        ends = (base + self._ends[item + 1]).tolist()
        view = self._memory.data
        texts = []
        for i, (start, end) in enumerate(zip(starts, ends, strict=True)):
            try:
                if not base[i] <= start <= end <= len(view):
                    raise ValueError(f"offsets {start} and {end}")
                texts.append(str(view[start:end], "utf-8"))
            except ValueError as error:
                what = f"the text of sample {ids[i]} in the index is damaged"
                raise IndexFormatError(what, found=str(error)[:200], remedy="run shardkit verify") from error
        return texts


def map_column(name: str, batches: _Batches, rows: Rows, memory: _Bytes) -> Column | TextColumn:
    """Return a column of a memory-mapped index, in O(shards).

    Args:
        name: a name of the schema.
        batches: the record batches that `decode_dataset_index` made of `memory`.
        rows: their lengths.
        memory: uint8, the whole map.

    Raises:
        IndexFormatError: a batch does not lie in the map as plain columns.
    """
    columns = [batch.column(name) for batch in batches]
    buffers = [column.buffers() for column in columns]
    kind = str(SCHEMA.field(name).type)
    offset = [column.offset for column in columns]
    count = np.diff(rows.starts).tolist()
    if kind == "string":
        lengths = [4 * (n + 1) if n else 0 for n in count]
        offsets = [_place(memory, b[1], size, 4) + o for b, size, o in zip(buffers, lengths, offset, strict=True)]
        data = [_place(memory, b[2], 0, 1) for b in buffers]
        return TextColumn(rows, memory, np.asarray(offsets, np.int64), np.asarray(data, np.int64))
    dtype = np.dtype(kind)  # Arrow names its numbers as NumPy does
    lengths = [n * dtype.itemsize for n in count]
    base = [_place(memory, b[1], size, dtype.itemsize) + o for b, size, o in zip(buffers, lengths, offset, strict=True)]
    bits = [
        8 * _place(memory, b[0], -(-n // 8), 1) + o if column.null_count else NULL
        for column, b, n, o in zip(columns, buffers, count, offset, strict=True)
    ]
    nulls = np.asarray(bits, np.int64) if any(bit != NULL for bit in bits) else None
    return Column(rows, memory, dtype, np.asarray(base, np.int64), nulls)


def make_absent(memory: _Bytes) -> None:
    """Take a map out of the resident memory of this process; the page cache keeps it. Does nothing to other memory."""
    viewed: object = memory.base
    mapping = viewed.obj if isinstance(viewed, memoryview) else viewed
    if isinstance(mapping, mmap.mmap):
        mapping.madvise(mmap.MADV_DONTNEED)


def _place(memory: _Bytes, buffer: _Buffer | None, length: int, item: int) -> int:
    """Return the item of the map at which a buffer starts; 0 for a buffer that nobody reads."""
    if buffer is None or buffer.size == 0:
        if length:
            raise IndexFormatError("a column of the index has no values", expected=f"{length} bytes", found=0)
        return 0
    start = buffer.address - memory.ctypes.data
    if start < 0 or start + max(length, buffer.size) > memory.size or start % item:
        # Compressed buffers were unpacked elsewhere; other writers may align to less than an item.
        raise IndexFormatError(
            "a column of the index does not lie in the file as plain, aligned values",
            expected=f"{length} bytes at a multiple of {item}",
            found=f"{buffer.size} bytes at {start}",
        )
    return int(start // item)
