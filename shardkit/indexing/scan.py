"""A foreign shard's samples, from its headers alone: payloads are passed over, not read."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from shardkit.errors import FormatError, IntegrityError, ShortReadError, UnsafeError, from_os_error
from shardkit.extent import align_up
from shardkit.format.foreign_tar import ForeignTarParser, as_members
from shardkit.format.grouping import group_members
from shardkit.format.tar import BLOCK
from shardkit.storage.regular import open_regular

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from shardkit.format.foreign_tar import ArchiveEnd, Member, Run
    from shardkit.format.grouping import ForeignSample

__all__ = ["MAX_MEMBERS", "MAX_SHARD_BYTES", "Headers", "ShardScan", "Source", "member_runs", "scan"]

MAX_MEMBERS = 1 << 22
"""Members of a shard. They are all held in memory: some hundred bytes each, and a name that stands in the file."""
MAX_SHARD_BYTES = 1 << 46
"""Bytes of the largest shard that is opened: 64 TiB."""

_READ_BYTES = 4096
"""Bytes of the shortest read, to which those up to the end of a page come: small members share it, and two pages take
a disk as long as one."""
_NEAR_BYTES = 192 << 10
"""Bytes that are read rather than passed over: to go somewhere else costs a disk about as long."""
_CHUNK_BYTES = 1 << 20
"""Bytes of the longest read, where headers lie near each other."""


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
    members = [member for run in member_runs(parser, Headers(fd)) for member in as_members(run)]
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


class Source(Protocol):
    """Bytes of a file, asked for in rising order."""

    def read(self, offset: int, length: int) -> bytes | memoryview:
        """Return `length` bytes from `offset` on, valid until the next call."""

    def held(self, offset: int) -> tuple[int, bytes | memoryview]:
        """Return the piece of the file that is in memory once `offset` was asked for, and where it starts.

        Valid until the next call. It may be too short for anybody's purpose.
        """


def member_runs(parser: ForeignTarParser, source: Source) -> Iterator[Run]:
    """Yield a shard's members in stored order, as many at a time as are at hand.

    Between two runs the source may be asked for anything that follows the first header of the last run.

    Raises:
        UnsafeError: there are too many, or as the parser.
        TarFormatError: as the parser.
        ShortReadError: as the source.
    """
    count = 0
    while (wanted := parser.wanted) is not None:
        start, data = source.held(wanted.offset)
        run = parser.feed_plain(data, start)
        if not len(run):
            member = parser.feed(bytes(source.read(wanted.offset, wanted.length)))
            run = [] if member is None else [member]
        count += len(run)
        if count > MAX_MEMBERS:
            offset = as_members(run)[MAX_MEMBERS - count].start
            raise UnsafeError("too many members for one shard", offset=offset, expected=f"at most {MAX_MEMBERS}")
        if len(run):
            yield run


class Headers:
    """Small reads of a file where headers lie apart, long ones where they lie close; the last one is kept."""

    def __init__(self, fd: int) -> None:
        """Use a descriptor, which stays the caller's."""
        self._fd = fd
        self._start = 0
        self._data = memoryview(b"")
        self._length = _READ_BYTES
        # One for all reads: to get memory from the kernel takes as long as to read into it.
        self._buffer = memoryview(bytearray(2 * _READ_BYTES))

    def read(self, offset: int, length: int) -> memoryview:
        """Return `length` bytes from `offset` on; valid until the next call.

        Raises:
            ShortReadError: the file ended before.
        """
        at = offset - self._start
        if at < 0 or at + length > len(self._data):
            self._fetch(offset, length)
            at = 0
        if len(self._data) < length:
            raise ShortReadError("a shard ended while it was scanned", offset=offset, expected=f"{length} bytes",
                                 found=f"{len(self._data)} bytes")  # fmt: skip
        return self._data[at : at + length]

    def held(self, offset: int) -> tuple[int, memoryview]:
        """Return the last read, or one that starts at `offset` if it ended before a header there would."""
        at = offset - self._start
        if at < 0 or at + BLOCK > len(self._data):
            self._fetch(offset, BLOCK)
        return self._start, self._data

    def _fetch(self, offset: int, wanted: int) -> None:
        gap = offset - self._start - len(self._data)
        near = -len(self._data) <= gap <= _NEAR_BYTES
        # Where many near ones follow each other it is the disk's sequential speed that counts; a single one is a page.
        self._length = min(4 * self._length, _CHUNK_BYTES) if near else _READ_BYTES
        length = align_up(offset + max(self._length, wanted), _READ_BYTES) - offset
        if length > len(self._buffer):
            self._buffer = memoryview(bytearray(length + _READ_BYTES))
        self._start, self._data = offset, self._buffer[: os.preadv(self._fd, [self._buffer[:length]], offset)]
        if self._length == _CHUNK_BYTES:
            os.posix_fadvise(self._fd, offset + length, _CHUNK_BYTES, os.POSIX_FADV_WILLNEED)
