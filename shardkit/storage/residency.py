"""How much of a file the page cache holds already. Asking reads nothing, or one page where the kernel is old."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import os
from typing import TYPE_CHECKING

from shardkit.extent import align_down
from shardkit.splitmix import mix

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["cached_bytes", "cached_share", "held_share", "open_to_ask"]

_CACHESTAT = 451
"""Number of the system call, the same on every architecture; Linux 6.5."""
_WINDOW = 1 << 20
_WINDOWS = 64
_PAGE = os.sysconf("SC_PAGE_SIZE")
_NOT_CACHED = {errno.EAGAIN}


class _Range(ctypes.Structure):
    _fields_ = (("offset", ctypes.c_uint64), ("length", ctypes.c_uint64))


class _Counts(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_uint64) for name in ("cache", "dirty", "writeback", "evicted", "recent"))


def cached_bytes(descriptor: int, offset: int, length: int) -> int | None:
    """Return how many bytes of a range the page cache holds, in whole pages; None when the kernel does not tell.

    It does not before Linux 6.5, and later ones only tell who owns the file or may write it.
    """
    wanted, counts = _Range(offset, length), _Counts()
    arguments = (ctypes.c_uint(descriptor), ctypes.byref(wanted), ctypes.byref(counts), ctypes.c_uint(0))
    if _libc().syscall(ctypes.c_long(_CACHESTAT), *arguments) != 0:
        return None
    return int(counts.cache) * _PAGE


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def cached_share(files: Sequence[tuple[str, int]], *, seed: int) -> float | None:
    """Return the share of the bytes of all files that the page cache holds, from a sample; None when nothing tells.

    Args:
        files: (path, bytes) of each.
        seed: of the places that are looked at; another one each time, because looking at a page may read it.
    """
    total = sum(size for _, size in files)
    shares: list[float] = []
    for at in sorted(mix(mix(seed) + number) % total for number in range(_WINDOWS if total else 0)):
        path, offset, size = _place(files, at)
        with contextlib.suppress(OSError):
            descriptor = open_to_ask(path)
            try:
                start = align_down(offset, _WINDOW)
                share = held_share(descriptor, start, min(_WINDOW, size - start), look_at=offset)
            finally:
                os.close(descriptor)
            if share is not None:
                shares.append(share)
    return sum(shares) / len(shares) if shares else None


def _place(files: Sequence[tuple[str, int]], at: int) -> tuple[str, int, int]:
    """Return the file, the offset in it, and its size, for a byte of all files laid end to end."""
    for path, size in files:
        if at < size:
            return path, at, size
        at -= size
    raise ValueError(at)


def open_to_ask(path: str) -> int:
    """Open a file of which it is asked what is cached, so that asking reads no more than the page that is looked at."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    with contextlib.suppress(OSError):  # a hint, which not every file system takes
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
    return descriptor


def held_share(descriptor: int, offset: int, length: int, *, look_at: int | None = None) -> float | None:
    """Return the share of a range that the page cache holds, 0 to 1; None when nothing tells.

    Where the kernel does not count pages, one page stands for all: a read that may not wait fails where it is not
    there. Some kernels start to read it then: one page only after `open_to_ask`.

    Args:
        descriptor: the open file.
        offset: first byte of the range.
        length: bytes; >= 1.
        look_at: a byte of the page that stands for all; None takes the first one.
    """
    held = cached_bytes(descriptor, offset, length)
    if held is not None:
        return min(held / length, 1.0)
    try:
        os.preadv(descriptor, [bytearray(1)], offset if look_at is None else look_at, os.RWF_NOWAIT)
    except OSError as error:
        return 0.0 if error.errno in _NOT_CACHED else None
    return 1.0
