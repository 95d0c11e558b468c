"""Files that another program may have put there: found by name, opened only when regular, and never waited for."""

from __future__ import annotations

import contextlib
import glob
import os
import stat
from typing import BinaryIO

from shardkit.errors import ConfigError, UnsafeError, from_os_error
from shardkit.escaping import escape

__all__ = ["folders_with", "matching_paths", "open_regular", "read_named"]

_MAX_GLOB_LENGTH = 4096
_MAX_STARS = 16
_MAX_FOLDERS = 1000


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
            raise UnsafeError(
                "not a regular file", path=path,
                remedy="look at what it is; what comes out of a pipe must be written into a file first",
            )  # fmt: skip
        if status.st_size > limit:
            raise UnsafeError(
                "too large for what it should be", path=path, expected=f"at most {limit} bytes", found=status.st_size
            )
        return os.fdopen(fd, "rb")
    except BaseException:
        os.close(fd)
        raise


def read_named(path: str | bytes, what: str, limit: int = 1 << 40) -> bytes:
    """Return what stands in a file that the caller named.

    Args:
        path: the file.
        what: it is, for messages: `the class list`.
        limit: as `open_regular`.

    Raises:
        ConfigError: it is not there, or a folder.
        UnsafeError: it is something else than a file, or too large.
        StorageError: it cannot be read, or may not be.
    """
    try:
        with open_regular(path, limit) as file:
            return file.read()
    except (FileNotFoundError, NotADirectoryError) as error:
        raise ConfigError(f"{what} is not there", path=path, remedy="name a file that exists") from error
    except UnsafeError as error:
        if not os.path.isdir(path):
            raise
        raise ConfigError(f"{what} is a folder", path=path, remedy="name a file") from error
    except OSError as error:
        raise from_os_error(error, f"cannot read {what}", path=path) from error


def matching_paths(path: str) -> list[str]:
    """Return what a glob matches, sorted by the bytes of the names; the path itself when it is there, or no glob.

    Raises:
        ConfigError: nothing matches.
        UnsafeError: the glob is too long to be tried.
    """
    if not glob.has_magic(path) or os.path.lexists(path):
        return [path]
    if len(path) > _MAX_GLOB_LENGTH or path.count("*") > _MAX_STARS:
        raise UnsafeError("too long for a glob", found=escape(path[:80]), remedy="name the files one by one")
    matches = sorted(glob.glob(path, recursive=False), key=os.fsencode)
    if not matches:
        raise ConfigError("nothing matches", found=escape(path))
    return matches


def folders_with(folder: str, name: str) -> list[str]:
    """Return the paths of the folders in `folder` that hold a file `name`; none where the system does not say.

    At most a thousand entries are looked at.
    """
    with contextlib.suppress(OSError, ValueError):
        inner = [os.path.join(folder, entry) for entry in sorted(os.listdir(folder))[:_MAX_FOLDERS]]
        return [path for path in inner if os.path.isfile(os.path.join(path, name))]
    return []
