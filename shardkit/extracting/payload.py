"""The bytes of one image, from its shard to a file, checked on the way."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardkit.errors import IntegrityError, ShortReadError
from shardkit.format.checksum import crc32c
from shardkit.storage.atomic import os_errors

if TYPE_CHECKING:
    from shardkit.extracting.tree import Tree

__all__ = ["BUFFER_BYTES", "Payload", "extract_payload"]

BUFFER_BYTES = 1 << 20
"""Bytes that are on the way at a time, for each thread."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Payload:
    """An image in a shard."""

    row: int
    """Sample number; names the temporary file."""
    key: str
    shard: str
    """Path of the shard."""
    offset: int
    size: int
    checksum: int
    """CRC-32C that the index states."""


def extract_payload(shard: int, payload: Payload, tree: Tree, path: bytes, buffer: memoryview) -> None:
    """Copy an image to a temporary file, and give that its name when every byte is right.

    Args:
        shard: descriptor of the open shard.
        payload: where the image lies.
        tree: gets the file.
        path: relative and safe.
        buffer: host memory, the caller's; overwritten.

    Raises:
        IntegrityError: the bytes do not have their CRC-32C; names shard, offset and key. No file is left.
        StorageError: the system failed a read (then its path is the shard's) or a write.
        Occupied: a folder has the name.
        ShardkitError: as `from_os_error` maps it.
    """
    fd, temporary = tree.create(payload.row)
    try:
        try:
            _copy(shard, payload, fd, os.path.join(tree.folder, path), buffer)
        finally:
            # Some file systems say only here that there was no room.
            with os_errors("cannot write", os.path.join(tree.folder, path)):
                os.close(fd)
        tree.place(temporary, path)
    except BaseException:
        tree.discard(temporary)
        raise


def _copy(shard: int, payload: Payload, fd: int, target: bytes, buffer: memoryview) -> None:
    done, found = 0, 0
    while done < payload.size:
        chunk = buffer[: min(payload.size - done, len(buffer))]
        chunk = chunk[: _read(shard, payload, done, chunk)]
        found = crc32c(chunk, found)
        with os_errors("cannot write", target):
            written = 0
            while written < len(chunk):
                written += os.write(fd, chunk[written:])
        done += len(chunk)
    if found != payload.checksum:
        raise IntegrityError(
            "an image is not what was packed", path=payload.shard, offset=payload.offset, key=payload.key,
            expected=f"CRC-32C {payload.checksum:08x}", found=f"{found:08x}",
            remedy="restore the shard, or give --on-error skip to leave the image out",
        )  # fmt: skip


def _read(shard: int, payload: Payload, done: int, chunk: memoryview) -> int:
    at = payload.offset + done
    with os_errors("cannot read a shard", os.fsencode(payload.shard), at):
        count = os.preadv(shard, [chunk], at)
    if not count:
        raise ShortReadError("a shard ended early", path=payload.shard, offset=at, key=payload.key,
                             expected=f"{payload.size - done} bytes more", remedy="run shardkit verify")  # fmt: skip
    return count
