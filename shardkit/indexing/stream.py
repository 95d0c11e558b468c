"""A file that streams by once: pieces of it in rising order, and the digest of all of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardkit.errors import ShortReadError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from shardkit.format.checksum import Digest

__all__ = ["Stream"]


class Stream:
    """Pieces of a stream of blocks. Only the block at hand, and one piece that crosses its border, are in memory."""

    def __init__(
        self, blocks: Iterator[tuple[int, memoryview]], size: int, digest: Digest, arrived: Callable[[int], object]
    ) -> None:
        """Wait for nothing yet.

        Args:
            blocks: offset and bytes of each block, one after the other from 0; a block's bytes are valid until the next
                one is asked for.
            size: bytes of the file.
            digest: takes every byte, in order.
            arrived: called with the size of each block as it arrives.
        """
        self._blocks = blocks
        self._size = size
        self._digest = digest
        self._arrived = arrived
        self._block = memoryview(b"")
        self._start = self._end = 0

    def read(self, offset: int, length: int) -> memoryview:
        """Return `length` bytes from `offset` on, which is behind all that was read before; valid until the next call.

        Raises:
            ShortReadError: the blocks end before.
        """
        start, end = offset, offset + length
        while start >= self._end and self._advance():
            pass
        if end <= self._end:
            return self._block[start - self._start : end - self._start]
        piece = bytearray(self._block[start - self._start :])
        while self._end < end and self._advance():
            piece += self._block[: end - self._start]
        if len(piece) < length:
            raise ShortReadError("a shard ended while it was read", offset=start, expected=f"{length} bytes",
                                 found=f"{len(piece)} bytes")  # fmt: skip
        return memoryview(piece)

    def held(self, offset: int) -> tuple[memoryview, int]:
        """Return the block at hand once `offset` was asked for, and where it starts."""
        while offset >= self._end and self._advance():
            pass
        return self._block, self._start

    def zeros_until(self, offset: int) -> int:
        """Return `offset`: every byte streams by anyway."""
        return offset

    def drain(self) -> None:
        """Let the rest pass, into the digest."""
        while self._advance():
            pass

    def _advance(self) -> bool:
        block = next(self._blocks, None)
        if block is None:
            return False
        self._start, view = block
        self._block = view[: self._size - self._start]
        self._end = self._start + len(self._block)
        self._digest.update(self._block)
        self._arrived(len(self._block))
        return True
