"""CRC-32C of the images of a batch against the index, and a second look past the page cache at those that differ."""

from __future__ import annotations

import contextlib
import os
import threading
from typing import TYPE_CHECKING

import numpy as np

from shardkit.errors import CapabilityError, ConfigError, ShardkitError
from shardkit.extent import align_down, align_up
from shardkit.format.checksum import crc32c
from shardkit.storage.backends import open_reader
from shardkit.storage.buffers import aligned_memory
from shardkit.storage.coalesce import coalesce

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from shardkit.dataset.samples import Samples
    from shardkit.dataset.shardset import Located
    from shardkit.dataset.space import Space
    from shardkit.storage.reader import Pending, Reader

    _Ints = npt.NDArray[np.int64]
    _Bytes = npt.NDArray[np.uint8]

__all__ = ["ChecksumCheck"]


class ChecksumCheck:
    """Compares images with the index's checksums. Threads may share it."""

    def __init__(self, samples: Samples, space: Space) -> None:
        """Bind to samples and to the space that their images are read into; both stay the caller's.

        Raises:
            ConfigError: shards of another tool were indexed without checksums.
        """
        for part in samples.parts:
            if not part.dataset.manifest.has_checksums:
                raise ConfigError(
                    "these shards were indexed without checksums, so none can be compared", path=part.dataset.path,
                    remedy="leave check='crc' away, or index them again: shardkit index --facts full --overwrite",
                )  # fmt: skip
        self._samples, self._space = samples, space
        self.retries = 0
        """Images whose CRC was wrong in what was read first, and right past the page cache."""
        self._again: set[Reader] = set()  # those that read past the page cache now
        self._lock = threading.Lock()

    def wrong(
        self, ids: _Ints, located: Located, views: Sequence[_Bytes], addresses: _Ints, skip: npt.NDArray[np.bool_]
    ) -> dict[int, str]:
        """Return the places whose CRC is wrong, with the reason; what is right past the page cache is put right.

        Args:
            ids: [n].
            located: [n].
            views: n images, in the space.
            addresses: [n] where they begin.
            skip: [n] places that are not looked at.

        Raises:
            StorageError: a shard cannot be read again; names the sample.
        """
        places = np.flatnonzero(~skip)
        stated = self._samples.gather("crc32c", ids[places]).tolist()
        seen = self._space.look([views[at] for at in places.tolist()], addresses[places])
        bad = {}
        for at, wanted, image in zip(places.tolist(), stated, seen, strict=True):
            if crc32c(image.data) == wanted:
                continue
            again = self._read_again(ids, located, at)
            found = crc32c(again)
            if found == wanted:
                with self._lock:
                    self.retries += 1
                self._space.overwrite(views[at], int(addresses[at]), again)
            else:
                bad[at] = f"its CRC-32C is {found:08x}, the index says {wanted:08x}, also past the page cache"
        return bad

    def pending(self) -> list[Pending]:
        """Return the longest read of each reader that reads past the page cache now."""
        return [one for reader in tuple(self._again) if (one := reader.oldest()) is not None]

    def _read_again(self, ids: _Ints, located: Located, at: int) -> memoryview:
        path = self._samples.shard_paths[int(located.shard[at])]
        try:
            return self._read_past_cache(path, int(located.offset[at]), int(located.size[at]))
        except ShardkitError as error:
            error.key = self._samples.keys(ids[at : at + 1])[0]
            raise

    def _read_past_cache(self, path: str, offset: int, size: int) -> memoryview:
        """Read a range from the device itself, or, where that cannot be had, after dropping it from the page cache."""
        try:
            reader, _ = open_reader("direct", [path], threads=1)
        except CapabilityError:
            with contextlib.suppress(OSError), open(path, "rb") as file:
                os.posix_fadvise(file.fileno(), offset, size, os.POSIX_FADV_DONTNEED)
            reader, _ = open_reader("buffered", [path], threads=1)
        self._again.add(reader)
        try:
            first = align_down(offset, reader.align)
            memory = aligned_memory(align_up(offset + size, reader.align) - first, reader.align)
            plan = coalesce([0], [offset], [size], align=reader.align, gap_bytes=0, max_bytes=1)
            reader.read_into(plan.ops(memory))
            return memory[offset - first : offset - first + size]
        finally:
            self._again.discard(reader)
            reader.close()
