"""One pass over a foreign shard: its headers, and as much of its payloads as the index is to state."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardkit.errors import IntegrityError, ShardkitError, from_os_error
from shardkit.extent import Extent
from shardkit.format.checksum import new_digest
from shardkit.format.foreign_member import as_members, run_end
from shardkit.format.foreign_tar import ForeignTarParser
from shardkit.format.member_digest import members_digest
from shardkit.format.plain_headers import PlainRun
from shardkit.format.sample_columns import SampleJoiner
from shardkit.indexing.headers import Headers
from shardkit.indexing.images import HEAD_BYTES
from shardkit.indexing.notes import Notes
from shardkit.indexing.scan import MAX_SHARD_BYTES, member_runs
from shardkit.indexing.stream import Stream
from shardkit.storage.regular import open_regular
from shardkit.storage.sequential import SequentialReader

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from shardkit.format.foreign_member import Member, Run
    from shardkit.format.sample_columns import SampleColumns
    from shardkit.indexing.options import IndexOptions
    from shardkit.indexing.scan import Source

__all__ = ["ShardContent", "read_shard"]

_REPORT_MEMBERS = 1024
_AHEAD = {"none": 0, "header": HEAD_BYTES[0]}
"""Bytes behind a header that may be wanted with it."""


@dataclass(slots=True, kw_only=True)
class ShardContent:
    """What stands in a shard."""

    bytes: int
    """Size of the file."""
    mtime_ns: int
    samples: SampleColumns
    """The ones that cannot be used among them."""
    refused: Sequence[Member]
    """Members that were not taken, in stored order."""
    notes: Notes
    """What was read of the members."""
    digest: str
    """Hex digest: of the whole file when every byte was read, else of what stands where."""


def read_shard(path: str, options: IndexOptions, arrived: Callable[[int], object]) -> ShardContent:
    """Return what stands in a shard.

    Args:
        path: the shard; a regular file.
        options: say how much of it to read.
        arrived: called now and then with the number of bytes that were read or passed over since the last call; what it
            raises ends the pass.

    Raises:
        TarFormatError: it is no tar, it is truncated, or a header is damaged; `offset` says where.
        UnsafeError: it is no regular file, over a limit, or a header that tar readers disagree about.
        IntegrityError: it changed meanwhile.
        StorageError: the system failed a read, or does not allow it.
    """
    try:
        with open_regular(path, MAX_SHARD_BYTES) as file:
            before = os.fstat(file.fileno())
            if options.facts == "full":
                content = _read_whole(path, before, options, arrived)
            else:
                # Headers lie apart: pages read ahead would be payload.
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
                with Headers(file.fileno(), _AHEAD[options.facts]) as headers:
                    content, runs = _walk(headers, before, options, arrived)
                content.digest = members_digest(options.digest, before.st_size, runs)
            after = os.fstat(file.fileno())
    except ShardkitError as error:
        if error.path is None:
            error.path = path
        raise
    except OSError as error:
        raise from_os_error(error, "cannot read a shard", path=path) from error
    if (after.st_size, after.st_mtime_ns) != (before.st_size, before.st_mtime_ns):
        raise _changed(path, before.st_size, after.st_size)
    return content


def _read_whole(
    path: str, status: os.stat_result, options: IndexOptions, arrived: Callable[[int], object]
) -> ShardContent:
    digest = new_digest(options.digest)
    with SequentialReader(path) as reader:
        if reader.size != status.st_size:
            raise _changed(path, status.st_size, reader.size)
        with contextlib.closing(reader.blocks([Extent(0, reader.size)] if reader.size else [])) as blocks:
            stream = Stream(blocks, reader.size, digest, arrived)
            content, _ = _walk(stream, status, options, None)
            stream.drain()
    content.digest = digest.hexdigest()
    return content


def _walk(
    source: Source, status: os.stat_result, options: IndexOptions, passed: Callable[[int], object] | None
) -> tuple[ShardContent, Sequence[Run]]:
    """Return what stands in a shard, but for its digest, and all its members."""
    joiner, notes = SampleJoiner(), Notes(options, source)
    told = unsaid = 0
    for run in member_runs(ForeignTarParser(status.st_size), source):
        codes = joiner.add(run)
        if isinstance(run, PlainRun) and codes is not None:
            notes.take_run(run, codes, joiner.extensions)
        else:
            notes.take(as_members(run))
        unsaid += len(run)
        if passed is not None and unsaid >= _REPORT_MEMBERS:
            end = run_end(run)
            passed(end - told)
            told, unsaid = end, 0
    if passed is not None:
        passed(status.st_size - told)
    samples = joiner.columns(options.image_extensions)
    content = ShardContent(bytes=status.st_size, mtime_ns=status.st_mtime_ns, samples=samples,
                           refused=joiner.refused, notes=notes, digest="")  # fmt: skip
    return content, joiner.runs


def _changed(path: str, before: int, after: int) -> IntegrityError:
    return IntegrityError("a shard changed while it was read", path=path, expected=f"{before} bytes, untouched",
                          found=f"{after} bytes", remedy="wait for its writer, then run again")  # fmt: skip
