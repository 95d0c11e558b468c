"""The folder that is extracted into: every step goes from an open folder to one below it, and no link is followed."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from typing import TYPE_CHECKING, Self

from shardkit.errors import ConfigError, ShardkitError, UnsafeError
from shardkit.extracting.names import WORK
from shardkit.format.checksum import crc32c
from shardkit.running.work_folder import WorkFolder
from shardkit.storage.atomic import fsync_dir, os_errors

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["Occupied", "Tree"]

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_EXISTING = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_NEW = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_RUN = b"run-"
_CHUNK_BYTES = 1 << 20
_IN_THE_WAY = {errno.ELOOP, errno.ENOTDIR, errno.EISDIR, errno.ENOTEMPTY, errno.ENXIO}


class Occupied(ConfigError):
    """Something else has the name of a file or folder of the tree."""


class Tree:
    """A folder, locked for one extraction. Threads may share it.

    What is being written lies in `.shardkit/run-*/` and is swept by the next run when this one is killed.
    """

    def __init__(self, folder: bytes) -> None:
        """Name the folder; nothing is touched.

        Args:
            folder: absolute path; a link there is followed, since the caller named it.
        """
        self.folder = folder
        self._scratch_name = _RUN + os.urandom(4).hex().encode()
        self._held = WorkFolder(folder, self._path(WORK))
        self._root = self._work = self._scratch = -1
        self._touched: set[bytes] = {b""}

    @contextlib.contextmanager
    def hold(self) -> Iterator[Self]:
        """Make the folder when it is not there, and lock it; give the tree.

        Afterwards nothing temporary is left, nor the folder itself when it was made here and nothing is in it.

        Raises:
            ConfigError: it is no folder.
            LockedError: another run holds it.
            UnsafeError: something else has the name of the work folder.
            ShardkitError: it cannot be written; as `from_os_error` maps it.
        """
        try:
            with self._held.left(self._sweep):
                with os_errors("cannot write to the target", self.folder):
                    self._held.take()
                    self._root = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                    self._work = os.open(WORK, _FOLDER, dir_fd=self._root)
                    self._sweep()
                    os.mkdir(self._scratch_name, dir_fd=self._work)
                    self._scratch = os.open(self._scratch_name, _FOLDER, dir_fd=self._work)
                yield self
        finally:
            for fd in (self._scratch, self._work, self._root):
                if fd >= 0:
                    os.close(fd)

    @contextlib.contextmanager
    def folder_of(self, path: bytes, *, make: bool = True) -> Iterator[tuple[int, bytes]]:
        """Open the folder that a path lies in; give its descriptor, and the last part of the path.

        Args:
            path: relative and safe (`shardkit.extracting.names.fault_of`).
            make: make the folders that are missing.

        Raises:
            Occupied: a link or a file has the name of a folder.
            ShardkitError: as `from_os_error` maps it.
        """
        *folders, last = path.split(b"/")
        held = [os.dup(self._root)]  # out of the list before it is closed: Ctrl-C in between closes none twice
        try:
            for number, part in enumerate(folders):
                here = b"/".join(folders[: number + 1])
                with self._told("cannot open a folder", here, "a folder"):
                    held.append(_enter(held[-1], part, make=make))
                os.close(held.pop(0))
                self._touched.add(here)
            yield held[-1], last
        finally:
            while held:
                os.close(held.pop())

    def create(self, number: int) -> tuple[int, bytes]:
        """Create a temporary file; return its descriptor, the caller's, and its name."""
        name = b"%d" % number
        with os_errors("cannot write", self._path(WORK, self._scratch_name, name)):
            return os.open(name, _NEW, 0o666, dir_fd=self._scratch), name

    def discard(self, name: bytes) -> None:
        """Remove a temporary file; never hides the error that led here."""
        with contextlib.suppress(OSError):
            os.unlink(name, dir_fd=self._scratch)

    def place(self, temporary: bytes, path: bytes) -> None:
        """Give a temporary file its final name, instead of a file or link that has it.

        Raises:
            Occupied: a folder has the name, or a link or file the name of a folder above it.
            ShardkitError: as `from_os_error` maps it.
        """
        with self.folder_of(path) as (fd, last), self._told("cannot give a file its final name", path, "no folder"):
            os.rename(temporary, last, src_dir_fd=self._scratch, dst_dir_fd=fd)

    def has(self, path: bytes) -> bool:
        """Tell whether anything has a name.

        Raises:
            Occupied: a link or a file has the name of a folder above it.
            ShardkitError: as `from_os_error` maps it.
        """
        with self.folder_of(path) as (folder, last), os_errors("cannot look at a name", self._path(path)):
            try:
                os.stat(last, dir_fd=folder, follow_symlinks=False)
            except FileNotFoundError:
                return False
            return True

    def state(self, path: bytes, size: int, checksum: int) -> str:
        """Return what has a name: `absent` for nothing, `same` for a file of that size and CRC-32C, else `other`.

        Raises:
            Occupied: a link or a file has the name of a folder above it.
            ShardkitError: as `from_os_error` maps it.
        """
        try:
            with self.folder_of(path) as (folder, last):
                fd = os.open(last, _EXISTING, dir_fd=folder)
        except FileNotFoundError:
            return "absent"
        except OSError as error:
            if isinstance(error, ShardkitError) or error.errno not in {*_IN_THE_WAY, errno.EACCES, errno.EPERM}:
                raise
            return "other"
        try:
            with os_errors("cannot read a file of the target", self._path(path)):
                status = os.fstat(fd)
                whole = stat.S_ISREG(status.st_mode) and status.st_size == size and _checksum(fd) == checksum
            return "same" if whole else "other"
        finally:
            os.close(fd)

    def sync_file(self, path: bytes) -> None:
        """Write a file to the disk.

        Raises:
            ShardkitError: as `from_os_error` maps it; then it may be lost, whatever a second try says.
        """
        with self.folder_of(path, make=False) as (folder, last), os_errors("cannot write", self._path(path)):
            fd = os.open(last, _EXISTING, dir_fd=folder)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)

    def sync_folders(self) -> int:
        """Make the names in every folder that was opened durable; return the number of folders below the root."""
        for folder in sorted(self._touched, reverse=True):
            fsync_dir(self._path(folder) if folder else self.folder)
        for made in self._held.made:
            fsync_dir(os.path.dirname(made))
        return len(self._touched) - 1

    def _path(self, *parts: bytes) -> bytes:
        return os.path.join(self.folder, *parts)

    @contextlib.contextmanager
    def _told(self, what: str, path: bytes, expected: str) -> Iterator[None]:
        with os_errors(what, self._path(path)):
            try:
                yield
            except OSError as error:
                if error.errno not in _IN_THE_WAY:
                    raise
                raise Occupied(
                    "something else has a name that is needed", path=self._path(path), expected=expected,
                    found=os.strerror(error.errno or 0), remedy="look at what it is, or choose another folder",
                ) from error  # fmt: skip

    def _sweep(self) -> bool:
        """Remove the temporary files of this run and of those that crashed; that is all, then."""
        if self._work < 0:
            return True
        for name in _names(self._work):
            if not name.startswith(_RUN):
                continue
            with contextlib.suppress(FileNotFoundError):
                try:
                    fd = os.open(name, _FOLDER, dir_fd=self._work)
                    try:
                        for entry in _names(fd):
                            os.unlink(entry, dir_fd=fd)
                    finally:
                        os.close(fd)
                    os.rmdir(name, dir_fd=self._work)
                except OSError as error:
                    if error.errno not in _IN_THE_WAY:
                        raise
                    raise UnsafeError(
                        "something else has the name of an earlier run's folder", path=self._path(WORK, name),
                        expected="a folder with files", remedy="look at what it is, and remove it",
                    ) from error  # fmt: skip
        return True


def _names(folder: int) -> list[bytes]:
    # btrfs shows an open folder as it was when it was opened.
    fd = os.open(b".", _FOLDER, dir_fd=folder)
    try:
        return [os.fsencode(name) for name in os.listdir(fd)]
    finally:
        os.close(fd)


def _enter(fd: int, part: bytes, *, make: bool) -> int:
    try:
        return os.open(part, _FOLDER, dir_fd=fd)
    except FileNotFoundError:
        if not make:
            raise
    with contextlib.suppress(FileExistsError):  # another thread was quicker
        os.mkdir(part, dir_fd=fd)
    return os.open(part, _FOLDER, dir_fd=fd)


def _checksum(fd: int) -> int:
    value = 0
    while chunk := os.read(fd, _CHUNK_BYTES):
        value = crc32c(chunk, value)
    return value
