"""Where the bytes of a file lie on its disk, and which of them other files have too: what FIEMAP says."""

from __future__ import annotations

import fcntl
import os
import struct
from typing import TYPE_CHECKING

from shardkit.extent import Extent

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["shared_bytes", "shared_extents"]

_FIEMAP = 0xC020660B
"""FS_IOC_FIEMAP: _IOWR('f', 11, struct fiemap)."""
_HEAD = struct.Struct("=QQIIII")
_ITEM = struct.Struct("=QQQQQIIII")
_COUNT = 256
_SYNC = 1
_LAST, _SHARED = 0x1, 0x2000


def shared_extents(path: Path) -> list[Extent]:
    """Return the runs of a file whose blocks another file has, too, in order."""
    found: list[Extent] = []
    fd = os.open(path, os.O_RDONLY)
    try:
        start, more = 0, True
        while more:
            answer = bytearray(_HEAD.pack(start, (1 << 63) - 1, _SYNC, 0, _COUNT, 0) + bytes(_COUNT * _ITEM.size))
            fcntl.ioctl(fd, _FIEMAP, answer)
            count = _HEAD.unpack_from(answer)[3]
            more = False
            for number in range(count):
                logical, _, length, _, _, flags, *_ = _ITEM.unpack_from(answer, _HEAD.size + number * _ITEM.size)
                if flags & _SHARED:
                    found.append(Extent(logical, length))
                start, more = logical + length, not flags & _LAST
    finally:
        os.close(fd)
    return found


def shared_bytes(path: Path) -> int:
    """Return how many bytes of a file lie in blocks that another file has, too."""
    return sum(extent.length for extent in shared_extents(path))
