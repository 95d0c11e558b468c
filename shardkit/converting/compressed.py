"""Files of samples that are compressed as a whole, as MDS and LitData write them: unpacked in memory, one at a time."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

import pyarrow as pa

from shardkit.errors import CapabilityError, FormatError, UnsafeError, from_os_error
from shardkit.escaping import escape
from shardkit.storage.regular import open_regular

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["MAX_BYTES", "BoundedZstd", "CompressedFiles"]

MAX_BYTES = (1 << 32) - 1
"""Bytes of a file of either format, before and after: its offsets have 32 bits."""
_COUNT = struct.Struct("<I")
_PLACE = struct.Struct("<II")
_CODECS = {"br": "brotli", "bz2": "bz2", "gz": "gzip", "snappy": "snappy", "zstd": "zstd"}
"""Arrow's names for those of the formats; `zstd:3` there has its level behind it."""
_STEP = 1 << 20


class CompressedFiles:
    """The file that was asked for last, unpacked: rows that are read in order unpack each file once."""

    def __init__(self, compression: Callable[[str], object]) -> None:
        """Take what the index states as the compression of the file of that path."""
        self._compression = compression
        self._file = ""
        self._data = b""

    def sample(self, file: str, number: int, count: int, sizes: tuple[int, int]) -> bytes:
        """Return the stored bytes of a sample.

        Args:
            file: path of the compressed file.
            number: of the sample in it.
            count: samples that the index states.
            sizes: least and most bytes of the unpacked file, as the index states them.

        Raises:
            CapabilityError: nothing here unpacks it.
            FormatError: the file cannot be unpacked, or is not what the index states.
            UnsafeError: it is no regular file, or over the format's limit.
            ShardkitError: the system failed to read it.
            ValueError: the sample's place is none.
        """
        if file != self._file:
            self._file, self._data = "", b""  # before the next one takes its memory
            self._data = self._unpacked(file, count, sizes)
            self._file = file
        begin, end = _PLACE.unpack_from(self._data, _COUNT.size * (1 + number))
        if not begin <= end <= len(self._data):
            raise ValueError("the sample lies outside its file")
        return self._data[begin:end]

    def _unpacked(self, file: str, count: int, sizes: tuple[int, int]) -> bytes:
        least, most = sizes
        try:
            with open_regular(file, MAX_BYTES) as stream:
                data = _unpack(stream.read(), self._compression(file), most)
        except (ValueError, pa.ArrowException) as error:
            detail = escape(f"{type(error).__name__}: {error}"[:160])
            raise FormatError("a compressed file cannot be unpacked", path=file, found=detail) from error
        except OSError as error:
            if error.errno is None:  # Arrow's own, about the bytes
                raise FormatError("a compressed file cannot be unpacked", path=file,
                                  found=escape(str(error)[:160])) from error  # fmt: skip
            raise from_os_error(error, "cannot read a compressed file", path=file) from error
        stated = _COUNT.unpack_from(data)[0] if len(data) >= _COUNT.size else None
        if stated != count or not least <= len(data) <= most:
            raise FormatError("a compressed file is not what the index states", path=file,
                              expected=f"{count} samples in {least} to {most} bytes",
                              found=f"{stated} in {len(data)}")  # fmt: skip
        return data


class BoundedZstd:
    """What `litdata` unpacks frames and samples by: its own makes whatever a frame states, were it terabytes."""

    def decompress(self, data: bytes | memoryview, decompressed_size: int = MAX_BYTES) -> bytes:
        """Return the bytes unpacked.

        Args:
            data: a whole frame.
            decompressed_size: what the chunk states; one byte more is returned where there are more.

        Raises:
            CapabilityError: Arrow here cannot unpack it.
            OSError: Arrow's own, without a number: it is damaged.
            UnsafeError: over the limit.
        """
        found = decompressed_size
        if found <= MAX_BYTES:
            unpacked = _unpack(bytes(data), "zstd", found)
            found = len(unpacked)
        if found > MAX_BYTES:
            raise UnsafeError("samples that are too large for memory", expected=f"at most {MAX_BYTES} bytes",
                              found=found)  # fmt: skip
        return unpacked


def _unpack(packed: bytes, compression: object, most: int) -> bytes:
    """Return the bytes unpacked, or the first of them when there are more than `most`.

    Raises:
        CapabilityError: Arrow here cannot unpack it.
        OSError: Arrow's own, without a number: they are damaged.
        ValueError: they are damaged, or nothing is known of the compression.
    """
    codec = _CODECS.get(str(compression).partition(":")[0])
    if codec is None:
        raise ValueError(f"no known compression: {ascii(compression)[:40]}")
    if not pa.Codec.is_available(codec):
        raise CapabilityError("Arrow here cannot unpack a compressed file", expected=codec,
                              remedy="pip install a pyarrow that was built with it")  # fmt: skip
    if codec == "snappy":  # its blocks are no streams, and state their size
        size = _snappy_size(packed)
        if size > most:
            raise ValueError(f"{size} bytes, not {most}")
        return bytes(pa.decompress(packed, size, codec, asbytes=True))
    data = bytearray()
    with pa.CompressedInputStream(pa.py_buffer(packed), codec) as stream:
        while len(data) <= most and (part := stream.read(min(_STEP, most + 1 - len(data)))):
            data += part
    return bytes(data)


def _snappy_size(packed: bytes) -> int:
    size = 0
    for place, byte in enumerate(packed[:5]):
        size |= (byte & 0x7F) << (7 * place)
        if byte < 0x80:
            return size
    raise ValueError("no size of a snappy block")
