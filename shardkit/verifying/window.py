"""A shard that streams by once: pieces of it in rising order, and the digest of all of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardkit.errors import ShortReadError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from shardkit.format.checksum import Digest

__all__ = ["Window"]


class Window:
    """Pieces of a stream of blocks. Only the block at hand, and one piece that crosses its border, are in memory."""

    def __init__(
        self,
        blocks: Iterator[tuple[int, memoryview]],
        end: int,
        arrived: Callable[[int], object],
        digest: Digest | None = None,
    ) -> None:
        """Wait for nothing yet.

        Args:
            blocks: offset and bytes of each block, rising; a block's bytes are valid until the next one is asked for.
            end: bytes from here on are not part of the stream.
            arrived: called with the size of each block as it arrives.
            digest: takes every byte up to `end`, in order.
        """
        self._blocks = blocks
        self._limit = end
        self._arrived = arrived
        self._digest = digest
        self._block = memoryview(b"")
        self._start = 0
        self._end = 0

    def take(self, start: int, end: int) -> memoryview:
        """Return the bytes [start, end), which follow all that were taken before.

        The result is valid until the next call.

        Raises:
            ShortReadError: the blocks end before `end`, or pass over a part of the piece.
        """
        if self._start <= start and end <= self._end:
            return self._block[start - self._start : end - self._start]
        piece = bytearray()
        at = start
        while at < end:
            if at >= self._end:
                self._advance()
            if not self._start <= at < self._end:
                if at < self._start:
                    raise ShortReadError(
                        "a part of the file was not read", offset=at, found=f"a block at {self._start}"
                    )
                continue
            upto = min(end, self._end)
            piece += self._block[at - self._start : upto - self._start]
            at = upto
        return memoryview(piece)

    def drain(self) -> None:
        """Let the rest pass, into the digest."""
        while self._advance(required=False):
            pass

    def _advance(self, *, required: bool = True) -> bool:
        block = next(self._blocks, None)
        if block is None:
            if required:
                raise ShortReadError("the file ended early", offset=self._end)
            return False
        offset, view = block
        self._arrived(len(view))
        self._start, self._block = offset, view[: max(self._limit - offset, 0)]
        self._end = offset + len(self._block)
        if self._digest is not None:
            self._digest.update(self._block)
        return True
