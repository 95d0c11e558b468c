"""Images that no checksum vouches for: the headers in the shard must say of them what the index says."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING

from shardkit.errors import FormatError, IntegrityError, ShortReadError, UnsafeError
from shardkit.escaping import escape
from shardkit.extracting.payload import checksum_of
from shardkit.format.foreign_tar import ForeignTarParser
from shardkit.format.keys import source_from_path
from shardkit.storage.atomic import os_errors

if TYPE_CHECKING:
    from shardkit.extracting.payload import Payload
    from shardkit.format.foreign_member import Member

__all__ = ["vouch"]

_REMEDY = "index the shards again: shardkit index --overwrite"


def vouch(
    shard: int, payload: Payload, buffer: memoryview, *, start: int, shard_bytes: int, source: str
) -> Payload:  # fmt: skip
    """Return an image with the CRC-32C that it has now, when the headers before it say that it is one.

    Args:
        shard: descriptor of the open shard.
        payload: where the index says that the image lies.
        buffer: host memory, the caller's; overwritten.
        start: offset of the sample's first header.
        shard_bytes: of the shard, as the manifest states it.
        source: the member's name as the index states it.

    Raises:
        IntegrityError: no member of that name and size lies there.
        StorageError: the system failed a read, or the shard ended early.
    """
    try:
        member = _member_at(shard, payload, ForeignTarParser(shard_bytes, start))
    except (FormatError, UnsafeError) as error:
        raise IntegrityError(
            f"an image cannot be found by its headers: {error.what}", path=payload.shard,
            offset=start if error.offset is None else error.offset, key=payload.key, remedy=_REMEDY,
        ) from error  # fmt: skip
    expected = (source, payload.offset, payload.size)
    found = None if member is None else (source_from_path(os.fsencode(member.name)), member.offset, member.size)
    if member is None or found != expected or not member.usable:
        raise IntegrityError(
            "the headers of a shard do not lead to an image that its index lists", path=payload.shard, offset=start,
            key=payload.key, expected=_shown(*expected), found=_shown(*found) if found else "no such member",
            remedy=_REMEDY,
        )  # fmt: skip
    return replace(payload, checksum=checksum_of(shard, payload, buffer))


def _shown(source: str, offset: int, size: int) -> str:
    return f"{size} bytes of {escape(source)} at {offset}"


def _member_at(shard: int, payload: Payload, parser: ForeignTarParser) -> Member | None:
    """Return the first member whose payload lies where the image does, or behind it."""
    while (wanted := parser.wanted) is not None and parser.end is None:
        with os_errors("cannot read a shard", os.fsencode(payload.shard), wanted.offset):
            data = os.pread(shard, wanted.length, wanted.offset)
        if len(data) < wanted.length:
            raise ShortReadError("a shard ended early", path=payload.shard, offset=wanted.offset, key=payload.key,
                                 expected=f"{wanted.length} bytes", found=f"{len(data)} bytes")  # fmt: skip
        member = parser.feed(data)
        if member is not None and member.offset >= payload.offset:
            return member
    return None
