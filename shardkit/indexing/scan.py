"""A foreign shard's samples, from its headers alone: payloads are passed over, not read."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardkit.errors import FormatError, IntegrityError, ShortReadError, UnsafeError, from_os_error
from shardkit.format.foreign_tar import ForeignTarParser
from shardkit.format.grouping import group_members
from shardkit.storage.regular import open_regular

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from shardkit.extent import Extent
    from shardkit.format.foreign_tar import ArchiveEnd, Member
    from shardkit.format.grouping import ForeignSample

__all__ = ["MAX_MEMBERS", "ShardScan", "scan"]

MAX_MEMBERS = 1 << 22
"""Members of a shard. They are all held in memory: some hundred bytes each, and a name that stands in the file."""
MAX_SHARD_BYTES = 1 << 46
"""Bytes of the largest shard that is opened: 64 TiB."""

_READ_BYTES = 4096
"""Reads end where a page ends: a page costs what a header costs, and small members share one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardScan:
    """What stands in a shard."""

    file_bytes: int
    samples: Sequence[ForeignSample]
    """In stored order, the ones that cannot be used among them; see `ForeignSample.usable`."""
    refused: Sequence[Member]
    """Members that were not taken, in stored order; each has its `refusal`."""
    end: ArchiveEnd
    """Whether the archive's end marker is whole; tar readers do not ask for it."""
    end_offset: int
    """The first byte after the last member. What follows, zeros or not, no tar reader sees."""

    @property
    def usable(self) -> Sequence[ForeignSample]:
        """The samples that may be loaded, in stored order."""
        return [sample for sample in self.samples if sample.usable]


def scan(path: str | os.PathLike[str]) -> ShardScan:
    """Return the samples of a tar, reading nothing but its headers.

    Args:
        path: the shard; a regular file.

    Raises:
        TarFormatError: it is no tar, it is truncated, or a header is damaged; `offset` says where.
        UnsafeError: it is no regular file, over a limit, or a header that tar readers disagree about.
        IntegrityError: it changed meanwhile.
        StorageError: the system failed a read.
        CapabilityError: the system forbids it.
    """
    path = os.fspath(path)
    try:
        with open_regular(path, MAX_SHARD_BYTES) as file:
            return _scan(file.fileno())
    except (FormatError, IntegrityError, ShortReadError, UnsafeError) as error:
        error.path = path
        raise
    except OSError as error:
        raise from_os_error(error, "cannot read a shard", path=path) from error


def _scan(fd: int) -> ShardScan:
    before = os.fstat(fd)
    # Headers lie apart: pages read ahead would be payload.
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
    parser = ForeignTarParser(before.st_size)
    members = list(_members(parser, _Headers(fd)))
    after = os.fstat(fd)
    if (after.st_size, after.st_mtime_ns) != (before.st_size, before.st_mtime_ns):
        raise IntegrityError("a shard changed while it was scanned", expected=f"{before.st_size} bytes, untouched",
                             found=f"{after.st_size} bytes", remedy="wait for its writer, then scan again")  # fmt: skip
    assert parser.end is not None
    assert parser.end_offset is not None
    return ShardScan(
        file_bytes=before.st_size, samples=group_members(members),
        refused=[member for member in members if member.refusal is not None],
        end=parser.end, end_offset=parser.end_offset,
    )  # fmt: skip


def _members(parser: ForeignTarParser, headers: _Headers) -> Iterator[Member]:
    count = 0
    while (wanted := parser.wanted) is not None:
        member = parser.feed(headers.read(wanted))
        if member is not None:
            count += 1
            if count > MAX_MEMBERS:
                raise UnsafeError("too many members for one shard", offset=member.start, expected=MAX_MEMBERS)
            yield member


class _Headers:
    """Small reads of a file, the last one kept."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._start = 0
        self._data = b""

    def read(self, wanted: Extent) -> bytes:
        """Return the bytes of an extent.

        Raises:
            ShortReadError: the file ended before.
        """
        at = wanted.offset - self._start
        if at < 0 or at + wanted.length > len(self._data):
            # To the end of its page: what follows a header there is in memory then, and often the next header.
            self._start, at = wanted.offset, 0
            self._data = os.pread(self._fd, max(_READ_BYTES - wanted.offset % _READ_BYTES, wanted.length), self._start)
        if len(self._data) < wanted.length:
            raise ShortReadError("a shard ended while it was scanned", offset=wanted.offset,
                                 expected=f"{wanted.length} bytes", found=f"{len(self._data)} bytes")  # fmt: skip
        return self._data[at : at + wanted.length]
