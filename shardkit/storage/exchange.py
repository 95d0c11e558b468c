"""Two names in one file system that swap what they stand for, at once: a folder cannot be replaced otherwise."""

from __future__ import annotations

import ctypes
import errno
import os

from shardkit.storage.atomic import os_errors

__all__ = ["exchange"]

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
_NOT_HERE = {errno.EINVAL, errno.ENOSYS, errno.ENOTSUP}


def exchange(one: bytes, other: bytes) -> bool:
    """Swap two files or folders by renameat2(2); return False where kernel or file system cannot, and nothing is done.

    Raises:
        ShardkitError: as `from_os_error` maps it.
    """
    call = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if call is None:  # a C library without it
        return False
    if call(_AT_FDCWD, one, _AT_FDCWD, other, _RENAME_EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in _NOT_HERE:
        return False
    with os_errors("cannot exchange two folders", other):
        raise OSError(number, os.strerror(number))
