"""The headers of a foreign shard, out of short reads where they lie apart and long ones where they lie close."""

from __future__ import annotations

import contextlib
import errno
import os
from bisect import bisect_right
from typing import TYPE_CHECKING

import numpy as np

from shardkit.errors import ShortReadError
from shardkit.extent import align_up
from shardkit.format.plain_headers import MANY, HeaderBlocks, header_chain
from shardkit.format.tar import BLOCK
from shardkit.indexing.ahead import PIECE_BYTES, SHARED_BYTES, ReadAhead

if TYPE_CHECKING:
    from typing import Self

__all__ = ["Headers"]

_READ_BYTES = 4096
"""Bytes of the shortest read, to which those up to the end of a page come: small members share it, and two pages take
a disk as long as one."""
_NEAR_BYTES = 192 << 10
"""Bytes that are read rather than passed over: to go somewhere else costs a disk about as long."""
_CHUNK_BYTES = PIECE_BYTES
"""Bytes of the longest read where headers lie near each other: some thousand members, so that what is done once for a
read or a run costs little."""
_GATHERED_BYTES = 2 << 20
"""Bytes of all that is gathered where they lie apart."""
_TOGETHER = 1000
"""Headers that are gathered before they are looked at, and as many more as stand in the last piece."""


class Headers:
    """A shard's headers, and what stands around them: one long piece of the file, or short ones that were gathered.

    A context manager that ends its reads at its end; the descriptor stays the caller's.

    Where headers lie apart they are followed by their sizes alone and looked at when there are many; see
    `header_chain`. Whoever looks must hold against each other what they state and where they stand.
    """

    def __init__(self, fd: int, ahead: int = 0) -> None:
        """Use a descriptor, which stays the caller's.

        Args:
            fd: of the file.
            ahead: bytes of a payload that are read with its header where headers lie apart.
        """
        self._fd = fd
        self._apart_bytes = _READ_BYTES + ahead
        # In rising order, with gaps between them.
        self._starts = [0]
        self._pieces = [memoryview(b"")]
        self._gathered: HeaderBlocks | None = None
        self._follows = True
        """Whether headers stood where those before them said, as far as was seen."""
        self._length = _READ_BYTES
        # One for all reads: to get memory from the kernel takes as long as to read into it.
        self._buffer = memoryview(bytearray(2 * _READ_BYTES))
        self._opened = contextlib.ExitStack()
        self._ahead: ReadAhead | None = None
        self._asked = False
        """Whether it is decided if long reads go past the page cache."""

    def __enter__(self) -> Self:
        """Return the reader."""
        return self

    def __exit__(self, *_: object) -> None:
        """End its reads."""
        self._opened.close()

    def read(self, offset: int, length: int) -> memoryview:
        """Return `length` bytes from `offset` on; valid until the next call.

        Raises:
            ShortReadError: the file ended before.
        """
        number = bisect_right(self._starts, offset) - 1
        piece, at = self._pieces[number], offset - self._starts[number]
        if at < 0 or at + length > len(piece):
            piece, at = self._fetched(offset, length), 0
        if len(piece) < length:
            raise ShortReadError("a shard ended while it was scanned", offset=offset, expected=f"{length} bytes",
                                 found=f"{len(piece)} bytes")  # fmt: skip
        return piece[at : at + length]

    def held(self, offset: int) -> tuple[memoryview, int] | HeaderBlocks:
        """Return the piece that holds a header at `offset`, or what was gathered from there on, if that is much."""
        number = bisect_right(self._starts, offset) - 1
        at = offset - self._starts[number]
        if at < 0 or at + BLOCK > len(self._pieces[number]):
            # A chain that leads past what there is costs more than it gains: once is enough.
            self._follows &= offset >= self._starts[-1]
            if self._follows and offset - self._end > _NEAR_BYTES:
                self._gather(offset)
            else:
                self._fetch(offset, BLOCK)
            number = 0
        # What is not plain among the headers, and those behind it, are taken from the pieces, one by one.
        if self._gathered is not None and self._gathered.starts[0] == offset:
            return self._gathered
        return self._pieces[number], self._starts[number]

    def zeros_until(self, offset: int) -> int:
        """Return up to where the file has a hole from `offset` on; `offset` where it has none."""
        try:
            return os.lseek(self._fd, offset, os.SEEK_DATA)
        except OSError as error:  # ENXIO: nothing but a hole follows
            return os.fstat(self._fd).st_size if error.errno == errno.ENXIO else offset

    @property
    def _end(self) -> int:
        return self._starts[-1] + len(self._pieces[-1])

    def _fetched(self, offset: int, length: int) -> memoryview:
        if offset < self._starts[-1]:
            # Later pieces are still to be used.
            return memoryview(os.pread(self._fd, length, offset))
        self._fetch(offset, length)
        return self._pieces[0][offset - self._starts[0] :]

    def _fetch(self, offset: int, wanted: int) -> None:
        """Read a piece in place of all others."""
        near = -len(self._pieces[-1]) <= offset - self._end <= _NEAR_BYTES
        # Where many near ones follow each other it is the disk's sequential speed that counts; a single one is a page.
        self._length = min(4 * self._length, _CHUNK_BYTES) if near else _READ_BYTES
        taken = self._taken(offset) if self._length == _CHUNK_BYTES and wanted <= SHARED_BYTES else None
        if taken is None:
            length = align_up(offset + max(self._length, wanted), _READ_BYTES) - offset
            if length > len(self._buffer):
                self._buffer = memoryview(bytearray(length + _READ_BYTES))
            taken = offset, self._piece(offset, 0, length)
            if self._length == _CHUNK_BYTES:
                os.posix_fadvise(self._fd, offset + length, _CHUNK_BYTES, os.POSIX_FADV_WILLNEED)
        self._starts, self._pieces, self._gathered = [taken[0]], [taken[1]], None

    def _taken(self, offset: int) -> tuple[int, memoryview] | None:
        """Return a piece that was read past the page cache; None where that does not pay, or fails."""
        if not self._asked:
            self._asked = True
            self._ahead = ReadAhead.where_it_pays(self._fd, offset)
            if self._ahead is not None:
                self._opened.enter_context(self._ahead)
        if self._ahead is not None:
            try:
                return self._ahead.take(offset)
            except (OSError, RuntimeError):  # the latter where no thread is to be had
                # Through the cache it is as much as can be read, and an error only where somebody looks.
                self._ahead = None
                self._opened.close()
        return None

    def _piece(self, offset: int, place: int, length: int) -> memoryview:
        """Read up to `length` bytes to a place in the buffer."""
        return self._buffer[place : place + os.preadv(self._fd, [self._buffer[place : place + length]], offset)]

    def _gather(self, offset: int) -> None:
        """Read a piece at each place where headers seem to stand, as far as they lie apart, in place of all others."""
        if len(self._buffer) < _GATHERED_BYTES:
            # Not set to zeros, so that only what is used is got from the kernel.
            self._buffer = np.empty(_GATHERED_BYTES, np.uint8).data
        begins, pieces = list[int](), list[memoryview]()
        starts, places = list[int](), list[int]()
        start: int | None = offset
        place = 0
        while start is not None and len(starts) < _TOGETHER:
            length = align_up(start + self._apart_bytes, _READ_BYTES) - start
            if place + length > _GATHERED_BYTES:
                break
            try:
                piece = self._piece(start, place, length)
            except OSError:
                # Nobody has asked for this place yet; who does gets the error.
                if not pieces:
                    raise
                break
            begins.append(start)
            pieces.append(piece)
            found, after = header_chain(piece, 0)
            for at in found:
                starts.append(start + at)
                places.append(place + at)
            place += align_up(len(piece), BLOCK)
            start = None if not found or after is None else _next_apart(offset, len(pieces), start + after)
        self._starts, self._pieces, self._length = begins, pieces, _READ_BYTES
        self._gathered = None if len(starts) < MANY else _blocks(self._buffer, places, starts)


def _next_apart(first: int, pieces: int, following: int) -> int | None:
    """Return where to read next, None when places do not lie apart: a near one is taken as long as most are far.

    Args:
        first: where the first piece is.
        pieces: how many there are.
        following: where headers seem to stand next.
    """
    return following if following - first > (pieces - 1) * _NEAR_BYTES else None


def _blocks(buffer: memoryview, places: list[int], starts: list[int]) -> HeaderBlocks:
    """Return a copy of blocks, with the offsets at which they stand in the file."""
    blocks = np.frombuffer(buffer, np.uint8, _GATHERED_BYTES).reshape(-1, BLOCK)
    return HeaderBlocks(blocks[np.array(places) // BLOCK], np.array(starts))
