"""Files of samples that are compressed as a whole, as MDS and LitData write them: unpacked in memory, one at a time."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

from shardkit.errors import FormatError, from_os_error
from shardkit.escaping import escape
from shardkit.storage.regular import open_regular

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["MAX_BYTES", "CompressedFiles"]

MAX_BYTES = (1 << 32) - 1
"""Bytes of a file of either format, before and after: its offsets have 32 bits."""
_COUNT = struct.Struct("<I")
_PLACE = struct.Struct("<II")


class CompressedFiles:
    """The file that was asked for last, unpacked: rows that are read in order unpack each file once."""

    def __init__(self, decompress: Callable[[str, bytes], bytes]) -> None:
        """Take what unpacks the bytes of a file of that path."""
        self._decompress = decompress
        self._file = ""
        self._data = b""

    def sample(self, file: str, number: int, count: int, size: int | None = None) -> bytes:
        """Return the stored bytes of a sample.

        Args:
            file: path of the compressed file.
            number: of the sample in it.
            count: samples that the index states.
            size: bytes of the unpacked file, where the index states them.

        Raises:
            FormatError: the file cannot be unpacked, or is not what the index states.
            UnsafeError: it is no regular file, or over the format's limit.
            ShardkitError: the system failed to read it.
            ValueError: the sample's place is none.
        """
        if file != self._file:
            self._file, self._data = "", b""  # before the next one takes its memory
            self._data = self._unpacked(file, count, size)
            self._file = file
        begin, end = _PLACE.unpack_from(self._data, _COUNT.size * (1 + number))
        if not begin <= end <= len(self._data):
            raise ValueError("the sample lies outside its file")
        return self._data[begin:end]

    def _unpacked(self, file: str, count: int, size: int | None) -> bytes:
        try:
            with open_regular(file, MAX_BYTES) as stream:
                packed = stream.read()
        except OSError as error:
            raise from_os_error(error, "cannot read a compressed file", path=file) from error
        try:
            data = self._decompress(file, packed)
            stated = _COUNT.unpack_from(data)[0]
        except MemoryError:
            raise
        except Exception as error:  # whatever damaged bytes make of the library
            detail = escape(f"{type(error).__name__}: {error}"[:160])
            raise FormatError("a compressed file cannot be unpacked", path=file, found=detail) from error
        if stated != count or len(data) != (len(data) if size is None else size):
            raise FormatError("a compressed file is not what the index states", path=file,
                              expected=f"{count} samples" + ("" if size is None else f" in {size} bytes"),
                              found=f"{stated} in {len(data)}")  # fmt: skip
        return data
