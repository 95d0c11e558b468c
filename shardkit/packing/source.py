"""One source, read once and whole into the writer's buffer, and checked."""

from __future__ import annotations

import errno
import os
import stat
from typing import TYPE_CHECKING

from shardkit.packing.refusals import RefusedError

if TYPE_CHECKING:
    import mmap

__all__ = ["ATTEMPTS", "Identity", "identity", "open_source", "read_source"]

Identity = tuple[int, int, int, int]
"""Device, inode, size in bytes, modification time in ns: what must not change while a source is read."""

ATTEMPTS = 2
"""How often a source that changes while it is read is read."""


def identity(status: os.stat_result) -> Identity:
    """Return what must be the same before and after a read."""
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def open_source(path: bytes) -> tuple[int, os.stat_result]:
    """Open a regular file for reading, without ever waiting for a FIFO's writer.

    Raises:
        RefusedError: it is not there, not readable, or not a regular file.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError as error:
        raise _refused(error) from error
    status = os.fstat(fd)
    if stat.S_ISREG(status.st_mode):
        return fd, status
    os.close(fd)
    raise RefusedError("not-a-file", "it is no longer a regular file")


def read_source(fd: int, path: bytes, size: int, buffer: mmap.mmap, start: int) -> Identity | None:
    """Read `size` bytes to `buffer[start:]` and return whose bytes they are.

    Args:
        fd: the open file.
        path: its path, asked again afterwards: a file that was replaced by another is a change too.
        size: bytes that the file had when it was opened.
        buffer: host memory; one byte more than `size` is writable after `start`, to notice growth.
        start: where the payload goes.

    Returns:
        The identity after the read, or None when the file did not have exactly `size` bytes, or lost its name.

    Raises:
        RefusedError: the system failed to read.
    """
    done = 0
    try:
        with memoryview(buffer) as view:
            while done <= size:
                count = os.preadv(fd, [view[start + done : start + size + 1]], done)
                if not count:
                    break
                done += count
        return identity(os.stat(path)) if done == size else None
    except FileNotFoundError:
        return None
    except OSError as error:
        raise _refused(error, done) from error


def _refused(error: OSError, offset: int | None = None) -> RefusedError:
    name = errno.errorcode.get(error.errno or 0, "?")
    where = "" if offset is None else f" at byte {offset}"
    gone = error.errno in (errno.ENOENT, errno.ENOTDIR)
    return RefusedError("missing" if gone else "unreadable", f"{error.strerror} ({name}){where}")
