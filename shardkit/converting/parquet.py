"""Hugging Face's Parquet: the files that people publish, read by row groups, in order; `datasets` is not needed."""

from __future__ import annotations

import contextlib
import json
import os
import re
from bisect import bisect_right
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from shardkit.converting.columns import Column, class_names
from shardkit.errors import ConfigError, FormatError, ShardkitError, UnsafeError, from_os_error
from shardkit.escaping import escape
from shardkit.storage.regular import open_regular

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["PARQUET", "ParquetTable", "parquet_files"]

PARQUET = ".parquet"
_NUMBERED = re.compile(r"(.+)-[0-9]{5}-of-[0-9]{5}\.parquet")
_MAX_GROUP_BYTES = 1 << 32
_MAX_FILE_BYTES = 1 << 46
_LEAST_ROWS, _MOST_ROWS = 4, 4096
"""Unpacked at a time: of rows with photographs more are no faster."""
_UNPACKED_BYTES = 64 << 20
_RATIOS = {"UNCOMPRESSED": 1, "SNAPPY": 22, "GZIP": 1040}
"""Codec to the most bytes that one stored byte can become, where that is little enough to say anything."""


def parquet_files(path: str) -> list[str]:
    """Return a Parquet file, or those of a folder, sorted by name; none where there are none.

    Raises:
        ConfigError: they are of several splits.
    """
    if not os.path.isdir(path):
        return [path]
    names = sorted(name for name in os.listdir(path) if name.endswith(PARQUET))
    splits = sorted({match[1] for name in names if (match := _NUMBERED.fullmatch(name))})
    if len(splits) > 1:
        remedy = f"convert one, e.g. 'hf:DIR/{escape(splits[0])}-*.parquet' with --key shard"
        raise ConfigError("a folder of several splits", path=path, found=", ".join(map(escape, splits[:8])),
                          remedy=remedy)  # fmt: skip
    return [os.path.join(path, name) for name in names]


class ParquetTable:
    """Parquet files with one schema, few rows of which are in memory at a time.

    A row group may be some kilobytes in its file, whatever it states, and a terabyte when all of its rows are unpacked.
    """

    in_order = True

    def __init__(self, files: Sequence[str]) -> None:
        """Look at the end of each file, which says what is in it.

        Raises:
            FormatError: one is damaged, or has other columns or classes than the first.
            UnsafeError: one is no regular file, or a row group is too large for memory.
            ShardkitError: the system failed to read one.
        """
        self.files = list(files)
        self._groups: list[tuple[str, int, int]] = []  # file, number in it, rows
        found: tuple[Column, ...] | None = None
        for path in self.files:
            with _opened(path) as file:
                columns = _columns(path, file)
                self._groups += [(path, number, _rows(path, file, number)) for number in range(file.num_row_groups)]
            if found is not None and columns != found:
                raise FormatError("Parquet files with different columns or classes", path=path)
            found = columns
        self.columns = found or ()
        self._known = [column.name for column in self.columns if column.kind != "other"]
        self._ends = list(accumulate(rows for _, _, rows in self._groups))
        self._group = -1
        self._batches: Iterator[pa.RecordBatch] = iter(())
        self._first, self._held = 0, 0
        """Number of the first row in memory, and of rows there."""
        self._values: dict[str, pa.Array] = {}
        """Their columns; of images the bytes alone."""

    def __len__(self) -> int:
        """Return the number of rows."""
        return self._ends[-1] if self._ends else 0

    def row(self, number: int) -> dict[str, Any]:
        """Return a row, images as the bytes that are stored; raises what pyarrow raises.

        Raises:
            FormatError: its row group cannot be read.
        """
        group = bisect_right(self._ends, number)
        if group != self._group or number < self._first:
            self._group, self._batches = group, self._read(group)
            self._first, self._held, self._values = (self._ends[group - 1] if group else 0), 0, {}
        while number >= self._first + self._held:
            self._first, self._held, self._values = self._first + self._held, 0, {}  # before the next take its memory
            batch = next(self._batches, None)
            if batch is None or not batch.num_rows:
                path, _, rows = self._groups[group]
                raise FormatError("a row group has fewer rows than its file states", path=path, expected=rows)
            self._held, self._values = batch.num_rows, self._taken(batch)
        place = number - self._first
        return {name: values[place].as_py() for name, values in self._values.items()}

    def _taken(self, batch: pa.RecordBatch) -> dict[str, pa.Array]:
        """Return the columns that have a place in a shard."""
        values = {}
        for column in self.columns:
            if column.kind == "image":
                # A path alone would name any file of the machine's: what it names is not opened.
                whole = batch.column(column.name)
                values[column.name] = whole.flatten()[whole.type.get_field_index("bytes")]
            elif column.kind != "other":
                values[column.name] = batch.column(column.name)
        return values

    def _read(self, group: int) -> Iterator[pa.RecordBatch]:
        path, number, _ = self._groups[group]
        try:
            with _opened(path) as file:
                count = _rows_at_once(file.metadata.row_group(number))
                yield from file.iter_batches(count, row_groups=[number], columns=self._known, use_threads=False)
        except (MemoryError, ShardkitError):
            raise
        except (OSError, pa.ArrowException) as error:
            detail = escape(f"{type(error).__name__}: {error}"[:160])
            raise FormatError("a row group of a Parquet file cannot be read", path=path, found=detail) from error


@contextlib.contextmanager
def _opened(path: str) -> Iterator[pq.ParquetFile]:
    with contextlib.ExitStack() as stack:
        yield _parquet(path, stack)


def _parquet(path: str, stack: contextlib.ExitStack) -> pq.ParquetFile:
    try:
        file = stack.enter_context(open_regular(path, _MAX_FILE_BYTES))
        return stack.enter_context(pq.ParquetFile(file))
    except (MemoryError, UnsafeError):
        raise
    except pa.ArrowException as error:
        raise FormatError("no whole Parquet file", path=path, found=escape(str(error)[:160])) from error
    except OSError as error:
        if error.errno is None:  # Arrow's own, about the bytes
            raise FormatError("no whole Parquet file", path=path, found=escape(str(error)[:160])) from error
        raise from_os_error(error, "cannot open a Parquet file", path=path) from error


def _rows(path: str, file: pq.ParquetFile, group: int) -> int:
    record = file.metadata.row_group(group)
    if not 0 <= record.total_byte_size <= _MAX_GROUP_BYTES or record.num_rows < 0:
        raise UnsafeError("a row group that is too large for memory", path=path,
                          expected=f"at most {_MAX_GROUP_BYTES} bytes", found=record.total_byte_size)  # fmt: skip
    return int(record.num_rows)


def _rows_at_once(group: pq.RowGroupMetaData) -> int:
    """Return how many rows are unpacked at a time: so many as cannot be much, whatever the file states of their sizes.

    No value is longer than the unpacked column, and that is no longer than the stored one and its codec allow.
    """
    most = 1
    for number in range(group.num_columns):
        column = group.column(number)
        ratio = _RATIOS.get(column.compression)
        if ratio is None or column.total_compressed_size < 0:
            return _LEAST_ROWS
        most += ratio * column.total_compressed_size
    return max(_LEAST_ROWS, min(_UNPACKED_BYTES // most, _MOST_ROWS))


def _features(metadata: dict[bytes, bytes] | None) -> dict[str, Any]:
    """Return what `datasets` says about the columns; nothing where it says nothing that can be read."""
    try:
        features = json.loads((metadata or {})[b"huggingface"])["info"]["features"]
    except (KeyError, TypeError, ValueError, RecursionError):
        return {}
    return features if isinstance(features, dict) else {}


def _columns(path: str, file: pq.ParquetFile) -> tuple[Column, ...]:
    features = _features(file.schema_arrow.metadata)
    return tuple(_column(path, field, features.get(field.name)) for field in file.schema_arrow)


def _column(path: str, field: pa.Field, feature: object) -> Column:
    kind = field.type
    if pa.types.is_struct(kind):
        inner = kind.field(kind.get_field_index("bytes")).type if kind.get_field_index("bytes") >= 0 else None
        holds = inner is not None and (pa.types.is_binary(inner) or pa.types.is_large_binary(inner))
        return Column(field.name, "image" if holds and not _is_other(feature) else "other")
    if pa.types.is_integer(kind):
        names = feature.get("names") if isinstance(feature, dict) else None
        if isinstance(names, list) and names and all(isinstance(name, str) for name in names):
            return Column(field.name, "class", class_names(names, path))
        return Column(field.name, "int")
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return Column(field.name, "text")
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
        return Column(field.name, "bytes")
    return Column(field.name, "json" if pa.types.is_boolean(kind) or pa.types.is_floating(kind) else "other")


def _is_other(feature: object) -> bool:
    """Tell whether `datasets` says that the bytes are a sound, a film or a document."""
    return isinstance(feature, dict) and feature.get("_type", "Image") != "Image"
