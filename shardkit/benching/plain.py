"""The ceiling: all bytes of all shards by plain preadv, in threads that take the next piece each."""

from __future__ import annotations

import itertools
import mmap
import os
import threading

from shardkit.errors import StorageError

__all__ = ["PlainReads"]


class PlainReads:
    """Descriptors and memory, which is used again and again.

    With one buffer a thread the bytes need not leave the processor's caches. No program can keep them there: where the
    storage is as fast as memory, reading into as much of that as a loader has is a quarter slower.
    """

    def __init__(self, paths: list[str], *, direct: bool, threads: int, chunk_bytes: int, buffers: int = 1) -> None:
        """Open the files.

        Args:
            paths: what is read.
            direct: past the page cache.
            threads: that read.
            chunk_bytes: of one read; a multiple of 4096.
            buffers: of each thread, which takes them in turn.
        """
        self._chunk_bytes = chunk_bytes
        flags = os.O_RDONLY | os.O_CLOEXEC | (os.O_DIRECT if direct else 0)
        self._files = [os.open(path, flags) for path in paths]
        self._sizes = [os.fstat(file).st_size for file in self._files]
        self._buffers = [[_touched(chunk_bytes) for _ in range(buffers)] for _ in range(threads)]

    @property
    def total_bytes(self) -> int:
        """Of all files."""
        return sum(self._sizes)

    def read(self) -> int:
        """Read every byte once; return how many came.

        Raises:
            StorageError: not all of them came.
        """
        pieces = itertools.chain.from_iterable(
            ((file, at) for at in range(0, size, self._chunk_bytes))
            for file, size in zip(self._files, self._sizes, strict=True)
        )
        lock, counts = threading.Lock(), [0] * len(self._buffers)

        def work(number: int) -> None:
            buffers = itertools.cycle(self._buffers[number])
            while True:
                with lock:
                    piece = next(pieces, None)
                if piece is None:
                    return
                counts[number] += os.preadv(piece[0], [next(buffers)], piece[1])

        workers = [threading.Thread(target=work, args=(number,), daemon=True) for number in range(len(counts))]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        if sum(counts) != self.total_bytes:
            raise StorageError("plain reads did not give all bytes", expected=self.total_bytes, found=sum(counts))
        return sum(counts)

    def close(self) -> None:
        """Close the files."""
        while self._files:
            os.close(self._files.pop())


def _touched(nbytes: int) -> mmap.mmap:
    """Return memory that the system has given: page by page, while it is read into, would be slower."""
    memory = mmap.mmap(-1, nbytes)
    memory.write(bytes(nbytes))
    return memory
