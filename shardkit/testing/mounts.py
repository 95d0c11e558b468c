"""File systems that tests fill, break and cut the power of: small, mounted by root, gone whatever happens."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import os
import shutil
import struct
import subprocess
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

__all__ = ["LoopMount", "NoMountsError", "loop_mount", "private_mounts", "tmpfs"]

_CLONE_NEWNS = 0x00020000
_SHUTDOWN = 0x8004587D
"""_IOR('X', 125, u32): XFS_IOC_SHUTDOWN, which ext4 has too."""
_NO_LOG_FLUSH = struct.pack("I", 2)
_TIMEOUT_S = 60
_BUSY_S = 5.0


class NoMountsError(Exception):
    """This machine, or this user, cannot mount what was asked for; says why."""


@functools.cache
def private_mounts() -> None:
    """Give this thread, and every process that it starts from now on, mounts that nobody else sees.

    However the process ends, the kernel then takes down what it has mounted.

    Raises:
        NoMountsError: only root may do so, and not in every container.
    """
    if ctypes.CDLL(None, use_errno=True).unshare(_CLONE_NEWNS):
        raise NoMountsError(f"no mounts of one's own: {os.strerror(ctypes.get_errno())}")
    _run("mount", "--make-rprivate", "/")


@dataclass(frozen=True, slots=True)
class LoopMount:
    """A file system in a file."""

    path: Path
    """Where it is mounted."""
    image: Path
    """The file."""
    sector: int
    """Bytes of a sector of its device."""

    def cut_power(self) -> None:
        """Stop the file system as a power cut does: what is not on the disk does not get there, every call fails."""
        fd = os.open(self.path, os.O_RDONLY)
        try:
            fcntl.ioctl(fd, _SHUTDOWN, _NO_LOG_FLUSH)
        finally:
            os.close(fd)

    def remount(self, options: str = "defaults") -> None:
        """Unmount and mount again, so that the journal is replayed.

        Args:
            options: as mount -o takes them.
        """
        _unmount(self.path)
        with _device(self.image, self.sector) as device:
            _run("mount", "-o", options, device, str(self.path))


@contextlib.contextmanager
def tmpfs(at: Path, *, size: int, inodes: int = 0) -> Iterator[Path]:
    """Mount a file system in memory.

    Args:
        at: where; made when it is not there.
        size: bytes.
        inodes: how many files, folders and links it takes; 0 for any number.

    Raises:
        NoMountsError: it cannot be mounted here.
    """
    private_mounts()
    at.mkdir(exist_ok=True)
    _run("mount", "-t", "tmpfs", "-o", f"size={size},nr_inodes={inodes}", "tmpfs", str(at))
    try:
        yield at
    finally:
        _unmount(at)


@contextlib.contextmanager
def loop_mount(
    image: Path, at: Path, kind: Literal["btrfs", "ext4", "xfs"], *, size: int, sector: int = 512
) -> Iterator[LoopMount]:
    """Make a file system in a sparse file and mount it.

    Args:
        image: the file; made, and left for the caller to remove.
        at: where; made when it is not there.
        kind: of the file system.
        size: bytes; mkfs.xfs wants at least 300 MB, mkfs.btrfs 120.
        sector: logical sector of the device in bytes; direct I/O must be aligned to it.

    Raises:
        NoMountsError: a tool is missing, or the kernel or the user's rights do not allow it.
    """
    private_mounts()
    at.mkdir(exist_ok=True)
    with open(image, "wb") as file:
        file.truncate(size)
    block = max(sector, 4096)
    options = {
        "btrfs": ("-q", "-f", "-s", str(block)),
        "ext4": ("-q", "-F", "-b", str(block), "-E", "lazy_itable_init=0,lazy_journal_init=0"),
        "xfs": ("-q", "-f", "-s", f"size={sector}", "-b", f"size={block}"),
    }
    with _device(image, sector) as device:
        _run(f"mkfs.{kind}", *options[kind], device)
        _run("mount", device, str(at))
    try:
        yield LoopMount(at, image, sector)
    finally:
        _unmount(at)


@contextlib.contextmanager
def _device(image: Path, sector: int) -> Iterator[str]:
    """Attach a file as a block device; one that is mounted by then is detached when it is unmounted."""
    device = _run("losetup", "--find", "--show", "--sector-size", str(sector), str(image)).strip()
    try:
        yield device
    finally:
        _run("losetup", "--detach", device)


def _unmount(at: Path) -> None:
    until = time.monotonic() + _BUSY_S
    while True:
        try:
            _run("umount", str(at))
        except NoMountsError:
            if time.monotonic() < until:
                time.sleep(0.1)  # a process that was killed lets its files go a moment later
                continue
            _run("umount", "--lazy", str(at))
            raise TimeoutError(f"{at} is still in use: somebody has a file open, or mapped") from None
        return


def _run(tool: str, *arguments: str) -> str:
    path = shutil.which(tool) or shutil.which(tool, path="/usr/sbin:/sbin")
    if path is None:
        raise NoMountsError(f"{tool} is not installed")
    done = subprocess.run([path, *arguments], capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    if done.returncode:
        raise NoMountsError(f"{tool} failed: {(done.stderr or done.stdout).strip()}")
    return done.stdout
