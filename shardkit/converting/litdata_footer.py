"""LitData's Arrow footers: a chunk of flat values holds its rows in Arrow's format behind its offsets."""

from __future__ import annotations

import mmap
import struct
from typing import Any

import pyarrow as pa

from shardkit.errors import FormatError, from_os_error
from shardkit.escaping import escape
from shardkit.storage.regular import open_regular

__all__ = ["LitDataFooter", "has_footer"]

_MAGIC = b"LDARW01\0"
_END = struct.Struct("<I8s")
_FILE_MAGIC = b"ARROW1"
_BATCH = 256
"""Rows of every batch but the last; in a footer of older writers, a stream, they are anything."""


def has_footer(file: str) -> bool:
    """Tell whether a chunk ends as one with a footer does.

    Raises:
        ShardkitError: it cannot be read, or is no regular file.
    """
    try:
        with open_regular(file) as stream:
            stream.seek(max(0, stream.seek(0, 2) - _END.size))
            end = stream.read()
    except OSError as error:
        raise from_os_error(error, "cannot read a chunk", path=file) from error
    return len(end) == _END.size and end.endswith(_MAGIC)


class LitDataFooter:
    """The rows of one chunk, a batch of which is held: each is checked whole before a value of it is touched."""

    def __init__(self, file: str, count: int, names: list[str]) -> None:
        """Map the chunk.

        Args:
            file: its path.
            count: of rows that the index states.
            names: of the columns that the index states.

        Raises:
            FormatError: its footer is none, or not what the index states.
            ShardkitError: it cannot be read, or is no regular file.
        """
        self.file, self._count, self._names = file, count, names
        self._first, self._rows = 0, pa.table({})
        try:
            with open_regular(file) as stream:
                data = memoryview(mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ))
        except OSError as error:
            raise from_os_error(error, "cannot read a chunk", path=file) from error
        (size, _), end = _END.unpack_from(data, len(data) - _END.size), len(data) - _END.size
        if size > end:
            raise FormatError("a chunk is too short for its footer", path=file, expected=size, found=end)
        self._arrow = data[end - size : end]
        self._is_file = self._arrow[: len(_FILE_MAGIC)] == _FILE_MAGIC

    def row(self, number: int) -> dict[str, Any]:
        """Return a row of the chunk.

        Raises:
            FormatError: Arrow cannot read its batch, or that is not what the index states.
        """
        if not self._first <= number < self._first + self._rows.num_rows:
            self._rows = pa.table({})  # before the next takes its memory
            self._first = number - number % _BATCH if self._is_file else 0
            self._rows = self._read()
        place = number - self._first
        return {name: self._rows.column(name)[place].as_py() for name in self._names}

    def _read(self) -> pa.Table:
        try:
            if self._is_file:
                with pa.ipc.open_file(pa.py_buffer(self._arrow)) as reader:
                    rows = pa.Table.from_batches([reader.get_batch(self._first // _BATCH)])
            else:
                with pa.ipc.open_stream(pa.py_buffer(self._arrow)) as reader:
                    rows = reader.read_all()
            rows.validate(full=True)  # a damaged offset would lead anywhere in memory
        except MemoryError:
            raise
        except (OSError, ValueError, LookupError, TypeError, pa.ArrowException) as error:
            detail = escape(f"{type(error).__name__}: {error}"[:160])
            raise FormatError("the rows of a chunk cannot be read", path=self.file, found=detail) from error
        expected = min(_BATCH, self._count - self._first) if self._is_file else self._count
        if rows.num_rows != expected or sorted(rows.column_names) != sorted(self._names):
            found = f"{rows.num_rows} of {', '.join(map(escape, rows.column_names))}"
            raise FormatError("the rows of a chunk are not what the index states", path=self.file,
                              expected=f"{expected} of {', '.join(map(escape, self._names))}",
                              found=found[:160])  # fmt: skip
        return rows
