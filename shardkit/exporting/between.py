"""What lies between the samples of a foreign shard, from its headers: for tools that walk through the whole tar.

Most shards have nothing there: then the one block behind the last sample is all that is read.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from shardkit.errors import ShardkitError, ShortReadError, from_os_error
from shardkit.extent import Extent
from shardkit.format.foreign_tar import ForeignTarParser
from shardkit.format.tar import BLOCK
from shardkit.storage.regular import open_regular

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from shardkit.format.foreign_tar import Member

__all__ = ["Between"]


class Between:
    """Reads the headers of the members that are in no sample of a shard; their payloads are passed over."""

    def __init__(self, path: str, samples: Sequence[Extent], shard_bytes: int) -> None:
        """Name the shard; it is opened by `members`.

        Args:
            path: of the shard.
            samples: where they lie, rising, one after another.
            shard_bytes: of the shard.
        """
        self._path = path
        starts = [*(sample.offset for sample in samples), shard_bytes]
        ends = [0, *(sample.end for sample in samples)]
        self._gaps = [Extent(end, start - end) for end, start in zip(ends, starts, strict=True) if start - end >= BLOCK]
        self.end = ends[-1]
        """First byte after the last member of any kind, once all of them were seen."""

    def members(self) -> Iterator[Member]:
        """Yield them in stored order, of every kind, the refused ones too.

        Raises:
            TarFormatError: there are none, but other bytes.
            UnsafeError: tar readers would disagree about them.
            StorageError: the shard cannot be read, or ends early.
        """
        try:
            with open_regular(self._path) as file:
                for gap in self._gaps:
                    yield from self._in_gap(file.fileno(), gap)
        except ShardkitError as error:
            error.path = self._path
            raise
        except OSError as error:
            raise from_os_error(error, "cannot read a shard", path=self._path) from error

    def _in_gap(self, fd: int, gap: Extent) -> Iterator[Member]:
        parser = ForeignTarParser(gap.length)
        while (wanted := parser.wanted) is not None:
            at = gap.offset + wanted.offset
            data = os.pread(fd, wanted.length, at)
            if len(data) < wanted.length:
                raise ShortReadError("a shard ended early", offset=at, expected=f"{wanted.length} bytes",
                                     found=f"{len(data)} bytes", remedy="run shardkit verify")  # fmt: skip
            member = parser.feed(data)
            if member is not None:
                self.end = max(self.end, gap.offset + member.end)
                yield member._replace(start=gap.offset + member.start, offset=gap.offset + member.offset)
