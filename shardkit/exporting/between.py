"""What lies between the members of a foreign shard, from its headers: for tools that walk through the whole tar.

The DALI index tells where the members of all samples lie. Where one follows another at once, nothing is read; in most
shards that is everywhere, and the one block behind the last member is all that is looked at.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from shardkit.errors import ShardkitError, ShortReadError, TarFormatError, from_os_error
from shardkit.extent import align_up
from shardkit.format.foreign_header import parse_foreign_header
from shardkit.format.foreign_tar import ForeignTarParser
from shardkit.format.tar import BLOCK
from shardkit.storage.regular import open_regular

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from shardkit.format.dali_index import IndexedMember
    from shardkit.format.foreign_member import Member

__all__ = ["Between"]


class Between:
    """Reads the headers of what is no member of a sample in a shard; payloads are passed over."""

    def __init__(self, path: str, listed: Iterable[IndexedMember], shard_bytes: int) -> None:
        """Name the shard; it is opened by `members`.

        Args:
            path: of the shard.
            listed: the members of all samples, in stored order.
            shard_bytes: of the shard.
        """
        self._path = path
        self._bytes = shard_bytes
        self._gaps: list[tuple[int, int | None]] = []
        """Where the first header stands, and the payload of the listed member at the other end, if there is one."""
        self.end = 0
        """First byte after the last member of any kind, once all of them were seen."""
        self.restated: str | None = None
        """The first listed member to which an extended header gives another name or size than its own, as above."""
        for member in listed:
            if member.offset - BLOCK > self.end:
                self._gaps.append((self.end, member.offset))
            self.end = align_up(member.offset + member.size, BLOCK)
        if shard_bytes - self.end >= BLOCK:
            self._gaps.append((self.end, None))

    def members(self) -> Iterator[Member]:
        """Yield them in stored order, of every kind, the refused ones too.

        Raises:
            TarFormatError: there are none, but other bytes, or they do not lead to the next listed one.
            UnsafeError: tar readers would disagree about them.
            StorageError: the shard cannot be read, or ends early.
        """
        try:
            with open_regular(self._path) as file:
                for start, payload in self._gaps:
                    yield from self._in_gap(file.fileno(), start, payload)
        except ShardkitError as error:
            error.path = self._path
            raise
        except OSError as error:
            raise from_os_error(error, "cannot read a shard", path=self._path) from error

    def _in_gap(self, fd: int, start: int, payload: int | None) -> Iterator[Member]:
        parser = ForeignTarParser(self._bytes, start)
        at = start
        while (wanted := parser.wanted) is not None and parser.end is None and at != payload:
            data = os.pread(fd, wanted.length, wanted.offset)
            if len(data) < wanted.length:
                raise ShortReadError("a shard ended early", offset=wanted.offset, expected=f"{wanted.length} bytes",
                                     found=f"{len(data)} bytes", remedy="run shardkit verify")  # fmt: skip
            member = parser.feed(data)
            if member is None:
                continue
            at = member.offset
            if at != payload:
                self.end = max(self.end, member.end)
                yield member
            elif _own_name_and_size(data, wanted.offset) != (member.name, member.size):
                self.restated = self.restated or member.name
        if payload not in (None, at):
            raise TarFormatError("the headers of a shard do not lead to a member that its index lists", offset=start,
                                 expected=f"a payload at {payload}", remedy="run shardkit verify")  # fmt: skip


def _own_name_and_size(block: bytes, at: int) -> tuple[str, int]:
    header = parse_foreign_header(block, at)
    return os.fsdecode(header.name), header.size
