"""One source, read once and whole into the writer's buffer, and checked."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from typing import TYPE_CHECKING

from shardkit.errors import ShardkitError, from_os_error
from shardkit.packing.refusals import RefusedError

if TYPE_CHECKING:
    import mmap

__all__ = ["ATTEMPTS", "Identity", "announce", "identity", "judged", "lies_inside", "open_source", "read_source"]

Identity = tuple[int, int, int, int]
"""Device, inode, size in bytes, modification time in ns: what must not change while a source is read."""

ATTEMPTS = 2
"""How often a source that changes while it is read is read."""
_FLAGS = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_OURS = {errno.EMFILE, errno.ENFILE, errno.ENOMEM}
"""Errors that say nothing about the source: this process, or the machine, has run out of something."""


def identity(status: os.stat_result) -> Identity:
    """Return what must be the same before and after a read."""
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def announce(path: bytes) -> None:
    """Let the kernel start to read a file that is wanted soon; whatever is wrong with it shows when it is read."""
    with contextlib.suppress(OSError):
        fd = os.open(path, _FLAGS)
        try:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_WILLNEED)
        finally:
            os.close(fd)


def open_source(path: bytes) -> tuple[int, os.stat_result]:
    """Open a regular file for reading, without ever waiting for a FIFO's writer.

    Raises:
        RefusedError: it is not there, not readable, or not a regular file.
        ShardkitError: this process has run out of descriptors or memory.
    """
    try:
        fd = os.open(path, _FLAGS)
    except OSError as error:
        raise judged(error, path) from error
    status = os.fstat(fd)
    if stat.S_ISREG(status.st_mode):
        return fd, status
    os.close(fd)
    raise RefusedError("not-a-file", "it is no longer a regular file")


def lies_inside(fd: int, folder: bytes) -> bool:
    """Tell whether an open file lies below a real folder: a link may have taken its name since the scan."""
    try:
        return os.readlink(b"/proc/self/fd/%d" % fd).startswith(folder.rstrip(b"/") + b"/")
    except FileNotFoundError:
        return True  # no /proc to ask


def read_source(
    fd: int, path: bytes, size: int, buffer: mmap.mmap, start: int, done: int = 0
) -> Identity | None:  # fmt: skip
    """Read `size` bytes to `buffer[start:]` and return whose bytes they are.

    Args:
        fd: the open file.
        path: its path, asked again afterwards: a file that was replaced by another is a change too.
        size: bytes that the file had when it was opened.
        buffer: host memory; one byte more than `size` is writable after `start`, to notice growth.
        start: where the payload goes.
        done: bytes of it that lie there already.

    Returns:
        The identity after the read, or None when the file did not have exactly `size` bytes, or lost its name.

    Raises:
        RefusedError: the system failed to read.
        ShardkitError: this process has run out of memory.
    """
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
        raise judged(error, path, done) from error


def judged(error: OSError, path: bytes, offset: int | None = None) -> RefusedError | ShardkitError:
    """Return what an error means: the source is refused, or the run cannot go on."""
    if error.errno in _OURS:
        return from_os_error(error, "cannot read a source", path=path, offset=offset)
    name = errno.errorcode.get(error.errno or 0, "?")
    where = "" if offset is None else f" at byte {offset}"
    gone = error.errno in (errno.ENOENT, errno.ENOTDIR)
    return RefusedError("missing" if gone else "unreadable", f"{error.strerror} ({name}){where}")
