"""One pass over a foreign shard: its headers, and as much of its payloads as the index is to state."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from shardkit.errors import IntegrityError, ShardkitError, from_os_error
from shardkit.extent import Extent
from shardkit.format.checksum import new_digest
from shardkit.format.foreign_tar import ForeignTarParser, members_digest
from shardkit.format.grouping import Grouping
from shardkit.format.strict_json import MAX_JSON_BYTES
from shardkit.indexing.images import (
    HEAD_BYTES,
    MAX_IMAGE_BYTES,
    MAX_LABEL_BYTES,
    ImageFacts,
    head_facts,
    is_json_object,
    parse_label,
    whole_facts,
)
from shardkit.indexing.scan import MAX_SHARD_BYTES, Headers, member_runs
from shardkit.indexing.stream import Stream
from shardkit.storage.regular import open_regular
from shardkit.storage.sequential import SequentialReader

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from shardkit.format.foreign_tar import Member
    from shardkit.format.grouping import ForeignSample
    from shardkit.indexing.options import IndexOptions
    from shardkit.indexing.scan import Source

__all__ = ["ShardContent", "read_shard"]

_REPORT_MEMBERS = 1024


@dataclass(slots=True, kw_only=True)
class ShardContent:
    """What stands in a shard."""

    bytes: int
    """Size of the file."""
    mtime_ns: int
    samples: Sequence[ForeignSample]
    """In stored order, the ones that cannot be used among them."""
    refused: Sequence[Member]
    """Members that were not taken, in stored order."""
    digest: str
    """Hex digest: of the whole file when every byte was read, else of what stands where."""
    images: dict[int, ImageFacts] = field(default_factory=dict)
    """By payload offset; images that nobody looked at are absent."""
    labels: dict[int, int | None] = field(default_factory=dict)
    """Class numbers by the payload offset of the cls member; None for one that states none."""
    objects: set[int] = field(default_factory=set)
    """Payload offsets of the json members that are one JSON object."""


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
        StorageError: the system failed a read.
        CapabilityError: the system forbids it.
    """
    try:
        with open_regular(path, MAX_SHARD_BYTES) as file:
            before = os.fstat(file.fileno())
            if options.facts == "full":
                content = _read_whole(path, before, options, arrived)
            else:
                # Headers lie apart: pages read ahead would be payload.
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
                content, members = _walk(Headers(file.fileno()), before, options, arrived)
                content.digest = members_digest(options.digest, before.st_size, members)
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
) -> tuple[ShardContent, Sequence[Member]]:
    """Return what stands in a shard, but for its digest, and all its members."""
    content = ShardContent(bytes=status.st_size, mtime_ns=status.st_mtime_ns, samples=(), refused=(), digest="")
    members: list[Member] = []
    groups, look, told, told_members = Grouping(), _Look(content, options, source), 0, 0
    for run in member_runs(ForeignTarParser(status.st_size), source):
        for member in run:
            extension = groups.add(member)
            if extension in look.extensions:
                look.at(member, extension)
        members += run
        if passed is not None and len(members) - told_members >= _REPORT_MEMBERS:
            passed(members[-1].end - told)
            told, told_members = members[-1].end, len(members)
    if passed is not None:
        passed(status.st_size - told)
    content.samples = groups.samples(options.image_extensions)
    content.refused = [member for member in members if member.refusal is not None]
    return content, members


class _Look:
    """Reads of members what their extension asks for."""

    def __init__(self, content: ShardContent, options: IndexOptions, source: Source) -> None:
        self._content = content
        self._source = source
        self._facts = options.facts
        self.extensions: frozenset[str | None] = frozenset({
            "json", *(["cls"] if options.labels == "cls" else []),
            *(options.image_extensions if options.facts != "none" else []),
        })  # fmt: skip
        """Of members that there is something to ask."""

    def at(self, member: Member, extension: str | None) -> None:
        size, offset = member.size, member.offset
        if extension == "cls":
            small = size <= MAX_LABEL_BYTES
            self._content.labels[offset] = parse_label(self._read(offset, size)) if small else None
        elif extension == "json":
            if 0 < size <= MAX_JSON_BYTES and is_json_object(self._read(offset, size)):
                self._content.objects.add(offset)
        elif 0 < size <= MAX_IMAGE_BYTES:
            self._content.images[offset] = self._image(offset, size)

    def _image(self, offset: int, size: int) -> ImageFacts:
        if self._facts == "full":
            return whole_facts(self._read(offset, size))
        for length in HEAD_BYTES:
            found = head_facts(self._read(offset, min(length, size)), size)
            if found is not None:
                return found
        raise AssertionError("the longest head says all that it can")

    def _read(self, offset: int, length: int) -> bytes | memoryview:
        return self._source.read(offset, length) if length else b""


def _changed(path: str, before: int, after: int) -> IntegrityError:
    return IntegrityError("a shard changed while it was read", path=path, expected=f"{before} bytes, untouched",
                          found=f"{after} bytes", remedy="wait for its writer, then run again")  # fmt: skip
