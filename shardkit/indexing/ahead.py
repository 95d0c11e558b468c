"""Long reads past the page cache, the next ones on their way, of a file that nobody has read lately.

Through the cache a page costs a processor nearly as much as looking at the headers in it, and displaces one that
somebody may want.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

from shardkit.extent import DIRECT_ALIGN, align_down
from shardkit.storage.residency import cached_bytes

if TYPE_CHECKING:
    from typing import Self

__all__ = ["PIECE_BYTES", "SHARED_BYTES", "ReadAhead"]

PIECE_BYTES = 4 << 20
"""Of one read."""
SHARED_BYTES = 64 << 10
"""What a piece has in common with the next one: a header and what is read with it stand in one of them as a whole."""
_COMING = 2
"""Reads that wait in line, so that there is always one on its way."""


class ReadAhead:
    """Pieces of a file in rising order. A context manager that waits for its reads and closes at its end."""

    def __init__(self, fd: int) -> None:
        """Open the file of a descriptor once more, whatever its name leads to by now.

        Raises:
            OSError: it cannot be read past the page cache, or there is no /proc.
        """
        self._fd = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
        self._thread = ThreadPoolExecutor(1, "read-ahead")
        self._buffers = [memoryview(mmap.mmap(-1, PIECE_BYTES)) for _ in range(_COMING + 1)]
        self._coming: deque[tuple[int, Future[memoryview]]] = deque()
        self._asked = 0

    @classmethod
    def where_it_pays(cls, fd: int, offset: int) -> Self | None:
        """Return one if the page cache has few of the next bytes; None if it has, or nothing tells."""
        cached = cached_bytes(fd, offset, PIECE_BYTES)
        if cached is None or cached > PIECE_BYTES // 2:
            return None
        with contextlib.suppress(OSError):
            return cls(fd)
        return None

    def __enter__(self) -> Self:
        """Return the reader."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close."""
        self._thread.shutdown(cancel_futures=True)
        os.close(self._fd)

    def take(self, offset: int) -> tuple[int, memoryview]:
        """Return the piece that holds `offset`, and `SHARED_BYTES` from there on unless the file ends: start and bytes.

        It is valid until the next call.

        Raises:
            OSError: the system failed the read, of any byte in it.
        """
        while self._coming and not 0 <= offset - self._coming[0][0] < PIECE_BYTES - SHARED_BYTES:
            self._coming.popleft()
        if not self._coming:
            self._ask(align_down(offset, DIRECT_ALIGN))
        start, piece = self._coming.popleft()
        last = self._coming[-1][0] if self._coming else start
        for number in range(1, _COMING + 1 - len(self._coming)):
            self._ask(last + number * (PIECE_BYTES - SHARED_BYTES))
        return start, piece.result()

    def _ask(self, start: int) -> None:
        # There is one more buffer than reads in line, and one thread: the next is written to when nobody looks at it.
        buffer = self._buffers[self._asked % len(self._buffers)]
        self._asked += 1
        self._coming.append((start, self._thread.submit(self._read, start, buffer)))

    def _read(self, start: int, buffer: memoryview) -> memoryview:
        return buffer[: os.preadv(self._fd, [buffer], start)]
