"""Files that another program may have put there: opened only when they are regular, and never waited for."""

from __future__ import annotations

import os
import stat
from typing import BinaryIO

from shardkit.errors import UnsafeError

__all__ = ["open_regular"]


def open_regular(path: str | bytes, limit: int = 1 << 40) -> BinaryIO:
    """Open a regular file for reading; a FIFO under its name would keep a plain open waiting for ever.

    Args:
        path: the file; a symbolic link is followed.
        limit: bytes of the largest file that is taken.

    Raises:
        UnsafeError: it is no regular file, or larger than `limit`.
        OSError: it cannot be opened.
    """
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise UnsafeError("not a regular file", path=path, remedy="look at what it is, and remove it")
        if status.st_size > limit:
            raise UnsafeError(
                "too large for what it should be", path=path, expected=f"at most {limit} bytes", found=status.st_size
            )
        return os.fdopen(fd, "rb")
    except BaseException:
        os.close(fd)
        raise
