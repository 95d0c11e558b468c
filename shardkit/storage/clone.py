"""Whole blocks of one file that another file gets without a copy: both share them until one of the two is written to.

Only FICLONERANGE is asked for, which shares or refuses. copy_file_range(2) shares where that does, and elsewhere copies
without saying so, bytes that nobody has looked at: whoever has to read and check them anyway writes them better.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
import tempfile
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from shardkit.errors import CapabilityError, ConfigError, ShardkitError, ShortReadError, from_os_error
from shardkit.extent import DIRECT_ALIGN, align_down, align_up
from shardkit.storage.regular import open_regular

__all__ = [
    "REFLINKS",
    "BlockPlan",
    "Place",
    "Reflink",
    "block_bytes",
    "can_share",
    "check_reflink",
    "plan_blocks",
    "share_blocks",
    "try_to_share",
]

Reflink: TypeAlias = Literal["auto", "always", "never"]
REFLINKS: tuple[Reflink, ...] = get_args(Reflink)
"""Blocks are shared where that works, or it is an error where it does not, or they are copied."""

_RANGE = struct.Struct("=qQQQ")
"""struct file_clone_range: source descriptor, offset there, bytes, offset in the target."""
_WRITES = 4 << 29 if os.uname().machine.startswith(("ppc", "mips", "sparc", "alpha")) else 1 << 30
_FICLONERANGE = _WRITES | _RANGE.size << 16 | 0x94 << 8 | 13
"""_IOW(0x94, 13, struct file_clone_range); the processors named above have other bits for "writes"."""
_HAVE_IT = "XFS (mkfs.xfs -m reflink=1) and btrfs share blocks within one file system; else leave --reflink always away"
_REFUSALS = {
    errno.EOPNOTSUPP: "this file system does not share blocks between files",
    errno.ENOTTY: "this file system does not share blocks between files",
    errno.ENOSYS: "this system does not share blocks between files",
    errno.EXDEV: "source and target lie on different file systems, which cannot share blocks",
    errno.EINVAL: "the file system does not share these blocks: its own may be larger, or one file lacks checksums",
    errno.ETXTBSY: "a swap file shares no blocks",
    errno.EPERM: "blocks may not be shared into or out of this file: it is immutable, append-only or sealed",
    errno.EACCES: "blocks may not be shared into or out of this file",
}


@dataclass(frozen=True, slots=True)
class BlockPlan:
    """A run of bytes, cut where whole blocks of both files begin and end. Only `shared` need not be copied."""

    head: int
    """Bytes before the first whole block."""
    shared: int
    """Bytes of whole blocks."""
    tail: int
    """Bytes after the last one."""


def plan_blocks(source_offset: int, target_offset: int, length: int, block: int) -> BlockPlan:
    """Return what two files can share of a run of bytes.

    Args:
        source_offset: where the run lies in one file.
        target_offset: where it goes in the other; no block is whole in both unless they differ by whole blocks.
        length: bytes of the run.
        block: bytes of a block, a power of two.

    >>> plan_blocks(8192, 0, 10000, 4096), plan_blocks(5000, 904, 10000, 4096)
    (BlockPlan(head=0, shared=8192, tail=1808), BlockPlan(head=3192, shared=4096, tail=2712))
    >>> plan_blocks(512, 0, 10000, 4096)
    BlockPlan(head=10000, shared=0, tail=0)
    """
    first, end = align_up(source_offset, block), align_down(source_offset + length, block)
    if (source_offset - target_offset) % block or first >= end:
        return BlockPlan(length, 0, 0)
    return BlockPlan(first - source_offset, end - first, source_offset + length - end)


def block_bytes(file: int | bytes) -> int:
    """Return the bytes of the blocks that an open file, or what lies in a folder, can share; at least 4096."""
    return max(os.statvfs(file).f_frsize, DIRECT_ALIGN)


@dataclass(frozen=True, slots=True)
class Place:
    """Where blocks begin in an open file."""

    descriptor: int
    offset: int
    """A multiple of the block."""
    path: bytes
    """What an error calls the file."""


def share_blocks(source: Place, target: Place, length: int) -> None:
    """Let `length` bytes of `target` be those of `source`, now: later changes of one are not seen in the other.

    What was there is gone; the file grows where need be. Bytes of `source` that are still in memory only are written to
    the disk first. Whether it lasts is for the caller's fsync of `target`, as with any write.

    Args:
        source: opened for reading.
        target: opened for writing.
        length: a multiple of the block.

    Raises:
        CapabilityError: these two cannot share blocks; `target` must be written in another way.
        ShortReadError: `source` ends before.
        TargetFullError: no space for what describes the blocks, or a quota or a file size limit.
        StorageError: the system failed.
    """
    wanted = _RANGE.pack(source.descriptor, source.offset, length, target.offset)
    try:
        fcntl.ioctl(target.descriptor, _FICLONERANGE, wanted)
    except OSError as error:
        raise _told(error, source, target, length) from error


def _told(error: OSError, source: Place, target: Place, length: int) -> ShardkitError:
    number = error.errno or 0
    size = os.fstat(source.descriptor).st_size
    if number == errno.EINVAL and size < source.offset + length:
        return ShortReadError("a file ended early", path=source.path, offset=source.offset,
                              expected=f"{length} bytes from there on", found=f"{size} bytes in all")  # fmt: skip
    if number not in _REFUSALS:
        return from_os_error(error, "cannot share blocks", path=target.path, offset=target.offset)
    found = f"{errno.errorcode[number]} ({error.strerror})"
    return CapabilityError(_REFUSALS[number], path=target.path, offset=target.offset, found=found,
                           remedy=_HAVE_IT, errno=number)  # fmt: skip


def try_to_share(source: bytes, folder: bytes) -> None:
    """Share a block of a file with one that has no name and is gone at once, to know what a folder's files can do.

    Args:
        source: a regular file; with less than a block, it says nothing, and has nothing to share either.
        folder: where there is something to be written, or the folder that it will be made in.

    Raises:
        CapabilityError: the two cannot share blocks.
        ShardkitError: as `from_os_error` maps what else hinders it.
    """
    while folder != b"/" and not os.path.isdir(folder):
        folder = os.path.dirname(folder)
    try:
        with open_regular(source) as file, tempfile.TemporaryFile(dir=os.fsdecode(folder)) as new:
            block = block_bytes(new.fileno())
            if os.fstat(file.fileno()).st_size >= block:
                share_blocks(Place(file.fileno(), 0, source), Place(new.fileno(), 0, folder), block)
    except ShardkitError:
        raise
    except OSError as error:
        raise from_os_error(error, "cannot find out whether blocks can be shared", path=folder) from error


def can_share(reflink: Reflink, source: bytes, folder: bytes) -> bool:
    """Tell whether blocks are to be shared: what is wished, and what a folder's files can do.

    Args:
        reflink: the wish.
        source: as `try_to_share`.
        folder: as `try_to_share`.

    Raises:
        ShardkitError: they cannot be, and `reflink` is `always`.
    """
    if reflink == "never":
        return False
    try:
        try_to_share(source, folder)
    except ShardkitError:
        if reflink == "always":
            raise
        return False
    return True


def check_reflink(value: object) -> None:
    """Refuse what is none of `REFLINKS`.

    Raises:
        ConfigError: says what may be given.
    """
    if value not in REFLINKS:
        raise ConfigError("unknown reflink", expected=" or ".join(REFLINKS), found=ascii(value)[:80])
