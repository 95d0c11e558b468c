"""Whether the record batches of Arrow's IPC formats are compressed, and how large they are, before Arrow unpacks them.

Arrow's own reader says so only after it has unpacked them, and some kilobytes may stand for gigabytes. The footer and
the messages are FlatBuffers: tables of fields, found through a table of offsets that stands before or behind each.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

from shardkit.errors import IndexFormatError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["MAX_MESSAGE_BYTES", "BatchBlocks", "unpacked_bytes"]

MAX_MESSAGE_BYTES = 1 << 20
"""Bytes of the longest description of a batch that is taken; one of an index has two kilobytes."""
_MAGIC = b"ARROW1"
_TAIL = struct.Struct("<i6s")
_BLOCK = struct.Struct("<qi4xq")
_PREFIX = struct.Struct("<Ii")
_CONTINUES = 0xFFFFFFFF
_FOOTER_BATCHES, _MESSAGE_KIND, _MESSAGE_HEADER, _BATCH_COMPRESSION = 3, 1, 2, 3
_RECORD_BATCH = 3
_BATCH_BUFFERS = 2
_BUFFER = struct.Struct("<qq")
_AS_IT_IS = -1


class BatchBlocks:
    """Where the record batches of a file are described."""

    def __init__(self, read: Callable[[int, int], bytes], size: int) -> None:
        """Read the footer.

        Args:
            read: returns bytes of the file, by offset and number; fewer where the file ends.
            size: bytes of the file.

        Raises:
            IndexFormatError: there is none.
        """
        self._read = read
        if size < _TAIL.size:
            raise IndexFormatError("not an Arrow IPC file", found=f"{size} bytes")
        try:
            length, magic = _TAIL.unpack(read(size - _TAIL.size, _TAIL.size))
            if magic != _MAGIC or not 0 < length <= size - _TAIL.size:
                raise IndexFormatError("not an Arrow IPC file", found="no footer")
            self._footer = read(size - _TAIL.size - length, length)
            at = _field(self._footer, _root(self._footer, 0), _FOOTER_BATCHES)
            self._first = 0 if at is None else at + _number(self._footer, at, "<I") + 4
            self._count = 0 if at is None else _number(self._footer, self._first - 4, "<I")
        except struct.error as error:
            raise IndexFormatError("not an Arrow IPC file", found="a damaged footer") from error

    def refuse_compressed(self, number: int) -> None:
        """Look at the description of one batch.

        Raises:
            IndexFormatError: the batch is compressed, or its description is damaged.
        """
        what = f"record batch {number} of the index"
        try:
            if number >= self._count:
                raise IndexFormatError(f"{what} is damaged", found="no such batch in the footer")
            offset, length, _ = _BLOCK.unpack_from(self._footer, self._first + number * _BLOCK.size)
            if offset < 0 or not _PREFIX.size <= length <= MAX_MESSAGE_BYTES:
                raise IndexFormatError(f"{what} is damaged", found=f"a description of {length} bytes at {offset}")
            data = self._read(offset, length)
            start = _PREFIX.size if _PREFIX.unpack_from(data)[0] == _CONTINUES else 4  # Arrow before 0.15
            message = _root(data, start)
            kind, header = (_field(data, message, slot) for slot in (_MESSAGE_KIND, _MESSAGE_HEADER))
            if kind is None or header is None or _number(data, kind, "<B") != _RECORD_BATCH:
                raise IndexFormatError(f"{what} is damaged", found="another kind of message")
            if _field(data, _root(data, header), _BATCH_COMPRESSION) is not None:
                raise IndexFormatError(f"{what} is compressed", expected="plain columns, which can be mapped")
        except struct.error as error:
            raise IndexFormatError(f"{what} is damaged", found="a damaged description") from error


def unpacked_bytes(message: bytes, body: memoryview) -> int:
    """Return how many bytes the buffers of a record batch take when Arrow has unpacked them: it fails on any more.

    Args:
        message: the description of the batch, as the stream has it.
        body: its buffers.

    Raises:
        IndexFormatError: the description is damaged, or of no record batch.
    """
    damaged = IndexFormatError("the description of a record batch is damaged")
    try:
        root = _root(message, 0)
        kind, header = (_field(message, root, slot) for slot in (_MESSAGE_KIND, _MESSAGE_HEADER))
        if kind is None or header is None or _number(message, kind, "<B") != _RECORD_BATCH:
            raise damaged
        batch = _root(message, header)
        packed = _field(message, batch, _BATCH_COMPRESSION) is not None
        at = _field(message, batch, _BATCH_BUFFERS)
        if at is None:
            return 0
        first = _root(message, at)
        total = 0
        for number in range(_number(message, first, "<I")):
            offset, length = _BUFFER.unpack_from(message, first + 4 + number * _BUFFER.size)
            stated = _number(bytes(body[offset : offset + 8]), 0, "<q") if packed and offset >= 0 < length else length
            total += length if stated == _AS_IT_IS else stated
            if min(offset, length, total) < 0 or stated < _AS_IT_IS:
                raise damaged
    except struct.error as error:
        raise damaged from error
    return total


def _number(data: bytes, at: int, kind: str) -> int:
    if at < 0:
        raise struct.error("before the start")
    return int(struct.unpack_from(kind, data, at)[0])


def _root(data: bytes, at: int) -> int:
    """Return the place that an offset stored at `at` leads to."""
    return at + _number(data, at, "<I")


def _field(data: bytes, table: int, slot: int) -> int | None:
    """Return where a field of a table stands; None when the table does not have it."""
    fields = table - _number(data, table, "<i")
    entry = 4 + 2 * slot
    if entry + 2 > _number(data, fields, "<H"):
        return None
    offset = _number(data, fields + entry, "<H")
    return table + offset if offset else None
