"""Damage done to files on disk, byte by byte and page by page: what disks, copies and people do to a dataset."""

from __future__ import annotations

import ctypes
import errno
import os
from typing import TYPE_CHECKING

from shardkit.errors import StorageError
from shardkit.storage.sequential import OpenSequential, SequentialReader

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence
    from pathlib import Path

    from shardkit.extent import Extent

__all__ = [
    "PAGE",
    "append",
    "cut",
    "disturbed",
    "exchange",
    "failing",
    "flip_byte",
    "punch_hole",
    "swap_pages",
    "zero_page",
]

PAGE = 4096
"""Bytes of a page: what is lost, repeated or misplaced at once."""


def flip_byte(path: Path, offset: int, mask: int = 1) -> None:
    """Invert the bits of `mask` in one byte."""
    with open(path, "r+b", buffering=0) as file:
        byte = os.pread(file.fileno(), 1, offset)[0]
        os.pwrite(file.fileno(), bytes([byte ^ mask]), offset)


def cut(path: Path, size: int) -> None:
    """Make a file end after `size` bytes."""
    os.truncate(path, size)


def append(path: Path, data: bytes) -> None:
    """Add bytes to the end of a file."""
    with open(path, "ab") as file:
        file.write(data)


def swap_pages(path: Path, page: int, other_path: Path, other_page: int) -> None:
    """Exchange a page of one file with a page of another, or of the same one."""
    with open(path, "r+b", buffering=0) as one, open(other_path, "r+b", buffering=0) as other:
        first = os.pread(one.fileno(), PAGE, page * PAGE)
        second = os.pread(other.fileno(), PAGE, other_page * PAGE)
        os.pwrite(one.fileno(), second, page * PAGE)
        os.pwrite(other.fileno(), first, other_page * PAGE)


def zero_page(path: Path, page: int) -> None:
    """Overwrite one page with zeros."""
    with open(path, "r+b", buffering=0) as file:
        os.pwrite(file.fileno(), bytes(PAGE), page * PAGE)


def punch_hole(path: Path, page: int) -> None:
    """Give one page back to the file system: it reads as zeros from then on.

    Raises:
        OSError: the file system has no holes.
    """
    keep_size, punch = 1, 2  # FALLOC_FL_KEEP_SIZE, FALLOC_FL_PUNCH_HOLE of linux/falloc.h
    fallocate = ctypes.CDLL(None, use_errno=True).fallocate64
    fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    with open(path, "r+b", buffering=0) as file:
        if fallocate(file.fileno(), keep_size | punch, page * PAGE, PAGE):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), os.fspath(path))


def exchange(path: Path, other: Path) -> None:
    """Let two files take each other's names."""
    between = path.with_name(path.name + ".exchanged")
    path.rename(between)
    other.rename(path)
    between.rename(other)


def disturbed(name: str, disturb: Callable[[int], object], *, block_bytes: int = PAGE) -> OpenSequential:
    """Return an opener for `shardkit.verify` whose reader of one file calls `disturb` before each block.

    Args:
        name: file name; other files are read undisturbed.
        disturb: takes the block's offset; what it raises, the read raises.
        block_bytes: size of a block.
    """

    class Disturbed(SequentialReader):
        def blocks(self, extents: Sequence[Extent]) -> Generator[tuple[int, memoryview], None, None]:
            for offset, block in super().blocks(extents):
                if os.path.basename(self.path) == name:
                    disturb(offset)
                yield offset, block

    return lambda path: Disturbed(path, direct=False, block_bytes=block_bytes)


def failing(name: str, at: int = 0) -> OpenSequential:
    """Return an opener for `shardkit.verify` for which the disk fails to read one file from an offset on."""

    def fail(offset: int) -> None:
        if offset >= at:
            raise StorageError("cannot read", path=name, offset=offset, found="EIO", errno=errno.EIO)

    return disturbed(name, fail)
