"""What the tests of readers share: files whose bytes are known, and reading as a loader reads."""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import resource
import signal
import warnings
from abc import ABC, abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import pytest

from shardkit.extent import Extent, align_up
from shardkit.storage.coalesce import coalesce
from shardkit.storage.reader import ReadOp

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from shardkit.storage.reader import Reader

__all__ = [
    "SIZES",
    "SPAN",
    "ReaderCase",
    "Wanted",
    "few_descriptors",
    "in_child",
    "open_descriptors",
    "read_extents",
    "whole_span",
]

SPAN = 64 * 1024
"""Bytes; what the contract takes for a long read."""
SIZES = tuple(3 * SPAN + tail for tail in (0, 1, 511, 512, 4095))
"""Bytes of the files that the contract reads: they end around the borders of blocks."""

Wanted: TypeAlias = tuple[int, int, int]
"""An extent to read: file, offset, length."""


def read_extents(
    reader: Reader, wanted: Sequence[Wanted], *, gap_bytes: int = 0, max_bytes: int = 1 << 20
) -> list[bytes]:
    """Read (file, offset, length) rows as a loader does and return the bytes of each.

    Args:
        reader: reads into host memory.
        wanted: the extents, in any order.
        gap_bytes: as for `coalesce`.
        max_bytes: as for `coalesce`.
    """
    columns = np.asarray(wanted, dtype=np.int64).reshape(-1, 3).T
    plan = coalesce(*columns, align=reader.align, gap_bytes=gap_bytes, max_bytes=max_bytes)
    # Not closed here: the traceback of an error still looks at it.
    view = memoryview(mmap.mmap(-1, plan.buffer_bytes + 1))
    reader.read_into(plan.ops(view))
    starts = plan.buffer_start.tolist()
    return [bytes(view[start : start + length]) for start, (_, _, length) in zip(starts, wanted, strict=True)]


def whole_span(reader: Reader, memory: mmap.mmap, file: int, offset: int, need: int) -> ReadOp:
    """Return one op for `need` bytes at an aligned offset, into the start of `memory`."""
    length = align_up(need, reader.align)
    return ReadOp(file, Extent(offset, length), memoryview(memory)[:length], need)


def open_descriptors() -> dict[str, str]:
    """Return what this process has open now: descriptor -> name."""
    found = {}
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the listing itself had one, which is gone
            found[descriptor] = os.readlink(f"/proc/self/fd/{descriptor}")
    return found


def in_child(law: Callable[[], bool]) -> bool:
    """Return whether `law` holds in a forked child, within 20 seconds."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # newer Pythons warn of any fork beside threads
        child = os.fork()
    if child == 0:
        signal.alarm(20)
        held = False
        with contextlib.suppress(BaseException):
            held = law()
        os._exit(0 if held else 1)
    return os.waitpid(child, 0)[1] == 0


@contextlib.contextmanager
def few_descriptors(free: int) -> Iterator[None]:
    """Leave this process `free` descriptors to open, and give the rest back at the end."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    held = []
    try:
        with open(os.devnull, "rb") as probe:
            resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, probe.fileno() + 256), hard))
            with contextlib.suppress(OSError):
                while True:
                    held.append(fcntl.fcntl(probe, fcntl.F_DUPFD_CLOEXEC, 0))
        for _ in range(free - 1):  # closing the probe freed one
            os.close(held.pop())
        if not free:
            held.append(os.open(os.devnull, os.O_RDONLY))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for descriptor in held:
            os.close(descriptor)


class ReaderCase(ABC):
    """Files to read, and the backend under test over them."""

    @abstractmethod
    def make_reader(self, paths: Sequence[Path]) -> Reader:
        """Open the backend under test over `paths`."""

    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        """Return where files are written; override it where the backend needs a certain file system."""
        return tmp_path

    @pytest.fixture
    def failing(self, tmp_path: Path) -> tuple[Path, int]:
        """Return a file that opens, and an offset in it where the system answers a read with EIO."""
        return Path("/proc/self/mem"), 0

    @pytest.fixture
    def files(self, folder: Path) -> list[Path]:
        """Write files whose sizes lie around a block border; data, because a hole takes any alignment."""
        random = np.random.default_rng(7)
        paths = [folder / f"{size}.bin" for size in SIZES]
        for path, size in zip(paths, SIZES, strict=True):
            path.write_bytes(random.bytes(size))
        return paths

    @pytest.fixture
    def truth(self, files: list[Path]) -> list[bytes]:
        """Return what the files hold."""
        return [path.read_bytes() for path in files]

    @pytest.fixture
    def reader(self, files: list[Path]) -> Iterator[Reader]:
        """Open the files with the backend under test."""
        reader = self.make_reader(files)
        yield reader
        reader.close()
