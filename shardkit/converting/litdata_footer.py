"""LitData's Arrow footers: a chunk of flat values holds its rows in Arrow's format behind its offsets."""

from __future__ import annotations

import contextlib
import mmap
import struct
from itertools import islice
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from shardkit.converting.compressed import MAX_BYTES
from shardkit.errors import FormatError, UnsafeError, from_os_error
from shardkit.escaping import escape
from shardkit.format.arrow_file import unpacked_bytes
from shardkit.storage.regular import open_regular

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["LitDataFooter", "has_footer"]

_MAGIC = b"LDARW01\0"
_END = struct.Struct("<I8s")
_FILE_MAGIC = b"ARROW1"
_FILE_START = 8
"""Bytes before the messages of a file, which are those of a stream."""
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
        except ValueError:  # an empty file has no map
            data = memoryview(b"")
        end = len(data) - _END.size
        size = _END.unpack_from(data, end)[0] if end >= 0 else 0
        if size > end:
            raise FormatError("a chunk is too short for its footer", path=file, expected=size, found=max(end, 0))
        self._arrow = data[end - size : end]
        self._is_file = self._arrow[: len(_FILE_MAGIC)] == _FILE_MAGIC

    def row(self, number: int) -> dict[str, Any]:
        """Return a row of the chunk.

        Raises:
            FormatError: Arrow cannot read its batch, or that is not what the index states.
            UnsafeError: unpacked, it is over the limit.
        """
        if not self._first <= number < self._first + self._rows.num_rows:
            self._rows = pa.table({})  # before the next takes its memory
            self._first = number - number % _BATCH if self._is_file else 0
            self._rows = self._read()
        place = number - self._first
        return {name: self._rows.column(name)[place].as_py() for name in self._names}

    def _read(self) -> pa.Table:
        try:
            rows = pa.Table.from_batches(self._batches())
            rows.validate(full=True)  # a damaged offset would lead anywhere in memory
        except (MemoryError, UnsafeError):
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

    def _batches(self) -> list[pa.RecordBatch]:
        """Return the batch that is wanted, of a stream all; first comes the look at how large one becomes."""
        start = _FILE_START if self._is_file else 0
        messages = pa.ipc.MessageReader.open_stream(pa.py_buffer(self._arrow[start:]))
        stated = next(_until_end(messages), None)
        if stated is None:
            raise ValueError("it has no schema")
        schema = pa.ipc.read_schema(stated)
        first = self._first // _BATCH
        found, size = [], 0
        for message in islice(_until_end(messages), first, first + 1 if self._is_file else None):
            size += unpacked_bytes(message.metadata.to_pybytes(), memoryview(message.body or b""))
            if size > MAX_BYTES:
                raise UnsafeError("the rows of a chunk are too large for memory", path=self.file,
                                  expected=f"at most {MAX_BYTES} bytes", found=size)  # fmt: skip
            found.append(pa.ipc.read_record_batch(message, schema))
        return found


def _until_end(messages: pa.ipc.MessageReader) -> Iterator[pa.ipc.Message]:
    with contextlib.suppress(StopIteration):
        while True:
            yield messages.read_next_message()
