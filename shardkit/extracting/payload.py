"""The bytes of one image, from its shard to a file, checked on the way."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardkit.errors import CapabilityError, IntegrityError, ShortReadError
from shardkit.format.checksum import crc32c
from shardkit.storage.atomic import os_errors
from shardkit.storage.clone import Place, block_bytes, plan_blocks, share_blocks

if TYPE_CHECKING:
    from shardkit.extracting.tree import Tree
    from shardkit.storage.clone import Reflink

__all__ = ["BUFFER_BYTES", "Payload", "checksum_of", "extract_payload"]

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
    """CRC-32C that the index states, or where it states none, that the image had when its headers were looked at."""


def checksum_of(shard: int, payload: Payload, buffer: memoryview) -> int:
    """Return the CRC-32C of an image as it lies in its shard.

    Raises:
        StorageError: the system failed a read, or the shard ended early.
    """
    done, found = 0, 0
    while done < payload.size:
        chunk = buffer[: min(payload.size - done, len(buffer))]
        chunk = chunk[: _read(shard, payload.offset, payload, done, chunk)]
        found = crc32c(chunk, found)
        done += len(chunk)
    return found


def extract_payload(
    shard: int, payload: Payload, tree: Tree, path: bytes, buffer: memoryview, reflink: Reflink = "never"
) -> int:
    """Bring an image into a temporary file, and give that its name when every byte is right.

    Args:
        shard: descriptor of the open shard.
        payload: where the image lies.
        tree: gets the file.
        path: relative and safe.
        buffer: host memory, the caller's; overwritten.
        reflink: whether the file shares the image's whole blocks with the shard.

    Returns:
        The bytes of those blocks.

    Raises:
        IntegrityError: the bytes do not have their CRC-32C; names shard, offset and key. No file is left.
        CapabilityError: blocks cannot be shared, with `always`.
        StorageError: the system failed a read (then its path is the shard's) or a write.
        Occupied: a folder has the name.
        ShardkitError: as `from_os_error` maps it.
    """
    fd, temporary = tree.create(payload.row)
    target = os.path.join(tree.folder, path)
    try:
        try:
            shared = 0 if reflink == "never" else _share(shard, payload, fd, target, reflink)
            _copy_rest(shard, payload, fd, target, buffer, shared)
        finally:
            # Some file systems say only here that there was no room.
            with os_errors("cannot write", target):
                os.close(fd)
        tree.place(temporary, path)
    except BaseException:
        tree.discard(temporary)
        raise
    return shared


def _share(shard: int, payload: Payload, fd: int, target: bytes, reflink: Reflink) -> int:
    block = block_bytes(fd)
    plan = plan_blocks(payload.offset, 0, payload.size, block)
    if payload.size < block:
        return 0
    try:
        if plan.head:
            raise CapabilityError(
                "an image that does not start where a block does shares none with a file", path=payload.shard,
                offset=payload.offset, key=payload.key, expected=f"a multiple of {block}",
                remedy="shardkit convert --align makes others; else leave --reflink always away",
            )  # fmt: skip
        source = Place(shard, payload.offset, os.fsencode(payload.shard))
        share_blocks(source, Place(fd, 0, target), plan.shared)
    except CapabilityError:
        if reflink == "always":
            raise
        return 0
    return plan.shared


def _copy_rest(shard: int, payload: Payload, fd: int, target: bytes, buffer: memoryview, shared: int) -> None:
    """Write what the file does not share, and look at all of it: what is shared is read from the file itself.

    So what was checked is what is stored, even if somebody wrote into the shard meanwhile.
    """
    done, found = 0, 0
    while done < payload.size:
        ours = done < shared
        chunk = buffer[: min((shared if ours else payload.size) - done, len(buffer))]
        chunk = chunk[: _read(fd if ours else shard, 0 if ours else payload.offset, payload, done, chunk)]
        found = crc32c(chunk, found)
        if not ours:
            _write(fd, chunk, done, target)
        done += len(chunk)
    if found != payload.checksum:
        raise IntegrityError(
            "an image is not what was packed", path=payload.shard, offset=payload.offset, key=payload.key,
            expected=f"CRC-32C {payload.checksum:08x}", found=f"{found:08x}",
            remedy="restore the shard; --on-error skip leaves the image out",
        )  # fmt: skip


def _write(fd: int, chunk: memoryview, offset: int, target: bytes) -> None:
    with os_errors("cannot write", target):
        written = 0
        while written < len(chunk):
            written += os.pwrite(fd, chunk[written:], offset + written)


def _read(fd: int, first: int, payload: Payload, done: int, chunk: memoryview) -> int:
    """Read some of an image, which begins at byte `first` of the file; an error names its place in the shard."""
    at = payload.offset + done
    with os_errors("cannot read a shard", os.fsencode(payload.shard), at):
        count = os.preadv(fd, [chunk], first + done)
    if not count:
        raise ShortReadError("a shard ended early", path=payload.shard, offset=at, key=payload.key,
                             expected=f"{payload.size} bytes of image", found=f"its end after {done} of them",
                             remedy="run again: it says which samples of the shard are whole")  # fmt: skip
    return count
