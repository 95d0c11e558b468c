"""A foreign shard's samples, from its headers alone: payloads are passed over, not read."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from shardkit.errors import FormatError, IntegrityError, ShortReadError, UnsafeError, from_os_error
from shardkit.format.foreign_member import as_members
from shardkit.format.foreign_tar import ForeignTarParser
from shardkit.format.grouping import group_members
from shardkit.format.member_digest import members_digest
from shardkit.format.plain_headers import HeaderBlocks
from shardkit.indexing.headers import Headers
from shardkit.storage.regular import open_regular

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from shardkit.format.foreign_member import Member, Run
    from shardkit.format.foreign_tar import ArchiveEnd
    from shardkit.format.grouping import ForeignSample

__all__ = ["MAX_MEMBERS", "MAX_SHARD_BYTES", "ShardScan", "Source", "digest_of_members", "member_runs", "scan"]

MAX_MEMBERS = 1 << 22
"""Members of a shard. They are all held in memory: some hundred bytes each, and a name that stands in the file."""
MAX_SHARD_BYTES = 1 << 46
"""Bytes of the largest shard that is opened: 64 TiB."""


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
    """The first byte after the last member. Zeros follow, as far as anything does."""

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
        StorageError: the system failed a read, or does not allow it.
    """
    with _opened(path) as fd:
        return _scan(fd)


def digest_of_members(path: str | os.PathLike[str], algorithm: str) -> str:
    """Return what the manifest states as the digest of a shard that was indexed without checksums; reads headers only.

    Raises:
        ShardkitError: as `scan`.
    """
    with _opened(path) as fd, Headers(fd) as headers:
        size = os.fstat(fd).st_size
        return members_digest(algorithm, size, member_runs(ForeignTarParser(size), headers))


@contextlib.contextmanager
def _opened(path: str | os.PathLike[str]) -> Iterator[int]:
    path = os.fspath(path)
    try:
        with open_regular(path, MAX_SHARD_BYTES) as file:
            # Headers lie apart: pages read ahead would be payload.
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
            yield file.fileno()
    except (FormatError, IntegrityError, ShortReadError, UnsafeError) as error:
        error.path = path
        raise
    except OSError as error:
        raise from_os_error(error, "cannot read a shard", path=path) from error


def _scan(fd: int) -> ShardScan:
    before = os.fstat(fd)
    parser = ForeignTarParser(before.st_size)
    with Headers(fd) as headers:
        members = [member for run in member_runs(parser, headers) for member in as_members(run)]
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
        """Return `length` bytes from `offset` on, valid until the next call.

        Those before the last header that was held may be asked for in any order, until something behind it is; so
        long they are valid, too.
        """

    def held(self, offset: int) -> tuple[bytes | memoryview, int] | HeaderBlocks:
        """Return what is in memory of the file once `offset` was asked for: a piece and where it starts, or headers.

        Valid until the next call. A piece may be too short for anybody's purpose; of the headers the first is at
        `offset`, if it is one.
        """

    def zeros_until(self, offset: int) -> int:
        """Return up to where zeros are known to stand from `offset` on, without a look at them; `offset` for none."""


def member_runs(parser: ForeignTarParser, source: Source) -> Iterator[Run]:
    """Yield a shard's members in stored order, as many at a time as are at hand.

    Between two runs the source may be asked for anything that follows the first header of the last run.

    Raises:
        UnsafeError: there are too many, or as the parser.
        TarFormatError: as the parser.
        ShortReadError: as the source.
    """
    count = 0
    while (wanted := parser.wanted) is not None and parser.end is None:
        held = source.held(wanted.offset)
        run = parser.feed_blocks(held) if isinstance(held, HeaderBlocks) else parser.feed_plain(*held)
        if not len(run):
            member = parser.feed(bytes(source.read(wanted.offset, wanted.length)))
            run = [] if member is None else [member]
        count += len(run)
        if count > MAX_MEMBERS:
            offset = as_members(run)[MAX_MEMBERS - count].start
            raise UnsafeError("too many members for one shard", offset=offset, expected=f"at most {MAX_MEMBERS}")
        if len(run):
            yield run
    while (wanted := parser.wanted) is not None:  # there may be terabytes of zeros, none of which was ever written
        known = source.zeros_until(wanted.offset)
        if known > wanted.offset:
            parser.pass_zeros(known)
        else:
            parser.feed(bytes(source.read(wanted.offset, wanted.length)))
