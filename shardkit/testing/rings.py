"""What the tests of io_uring share: memory, reads of blocks, and what this process holds of rings and pinned pages."""

from __future__ import annotations

import mmap
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from shardkit.storage.reader import ReadOps
from shardkit.storage.uring import uring_refusal
from shardkit.testing.reading import in_child, open_descriptors

if TYPE_CHECKING:
    from collections.abc import Callable

    from shardkit.storage.reader import Reader

__all__ = [
    "as_nobody",
    "blocks",
    "needs_root",
    "needs_uring",
    "private_memory",
    "read_for_ever",
    "rings_open",
    "status_kib",
    "write_through",
]

_REFUSED = uring_refusal()
_NOBODY = 65534

needs_uring = pytest.mark.skipif(_REFUSED is not None, reason=f"io_uring cannot be had here: {_REFUSED}")
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can take rights away and turn the switch")


def write_through(path: Path, data: bytes) -> Path:
    """Write a file down to the disk, because blocks that only memory has yet are no matter of direct reads."""
    with path.open("wb") as file:
        file.write(data)
        os.fsync(file.fileno())
    return path


def private_memory(size: int) -> mmap.mmap:
    """Return page-aligned memory of this process alone."""
    return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def blocks(memory: mmap.mmap, offsets: list[int], length: int) -> ReadOps:
    """Return reads of file 0, one after the other into memory."""
    offset = np.array(offsets, np.int64)
    size = np.full(len(offset), length, np.int64)
    start = np.arange(len(offset)) * length
    return ReadOps(
        file=np.zeros_like(offset), offset=offset, length=size, need=size, start=start, buffer=memoryview(memory)
    )


def read_for_ever(reader: Reader, ops: ReadOps) -> None:
    """Read the same until something is raised."""
    while True:
        reader.read_into(ops)


def status_kib(key: str) -> int:
    """Return a number of /proc/self/status, in KiB."""
    found = re.search(rf"^{key}:\s+(\d+)", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found, key
    return int(found[1])


def rings_open() -> list[str]:
    """Return the descriptors of rings that this process has."""
    return [number for number, name in open_descriptors().items() if name == "anon_inode:[io_uring]"]


def as_nobody(function: Callable[[], object]) -> str:
    """Return what a function returns in a child process without rights, or the error that it raises."""
    reads, writes = os.pipe()

    def law() -> bool:
        os.setgroups([])
        os.setresgid(_NOBODY, _NOBODY, _NOBODY)
        os.setresuid(_NOBODY, _NOBODY, _NOBODY)
        try:
            answer = str(function())
        except BaseException as error:
            answer = f"{type(error).__name__}: {error}"
        return os.write(writes, answer.encode()) > 0

    assert in_child(law)
    os.close(writes)
    with open(reads, encoding="utf-8") as file:
        return file.read()
