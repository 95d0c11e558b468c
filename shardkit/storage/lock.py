"""One writer a folder: an advisory lock that ends with its process, however that ends."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import stat
from typing import Self

from shardkit.errors import CapabilityError, LockedError, ShardkitError, UnsafeError, from_os_error
from shardkit.escaping import escape

__all__ = ["FolderLock"]

_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EINVAL}
_WORD_BYTES = 200


class FolderLock:
    """Holds `path` by flock(2), once it is taken, until it is closed or the process ends. A context manager.

    The kernel drops the lock of a dead holder, so no age or process number is ever judged. On NFS the kernel turns
    flock into a lock at the server, so two hosts exclude each other too.
    """

    def __init__(self, path: bytes) -> None:
        """Name the file; nothing is touched."""
        self.path = path
        self._fd = -1

    @property
    def held(self) -> bool:
        """Whether it is taken, and its file has the name: a lock on one that has not excludes nobody."""
        try:
            return self._fd >= 0 and os.path.samestat(os.fstat(self._fd), os.lstat(self.path))
        except FileNotFoundError:
            return False

    def take(self) -> None:
        """Take the lock, or fail at once.

        Raises:
            LockedError: another process holds it; says which, as far as it left word.
            UnsafeError: something other than a file has the name.
            CapabilityError: the folder's file system has no locks.
            FileNotFoundError: the folder is not there.
            ShardkitError: as `from_os_error` maps it.
        """
        try:
            while not self.held:  # a finished run unlinks its lock file
                self.close()
                self._fd = _opened(self.path)  # and not locked before: a signal may come behind any step
                _take(self._fd, self.path)
        except BaseException as error:
            self.close()
            if isinstance(error, OSError) and not isinstance(error, FileNotFoundError | ShardkitError):
                raise from_os_error(error, "cannot lock the target", path=self.path) from error
            raise
        # What holds is the lock, not the word: a full disk must not keep anyone from making room.
        with contextlib.suppress(OSError):
            os.ftruncate(self._fd, 0)
            os.write(self._fd, f"process {os.getpid()} on {socket.gethostname()}\n".encode())

    def close(self) -> None:
        """Let go; the file stays. Idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            with contextlib.suppress(OSError):  # nothing that matters was written
                os.close(fd)

    def __enter__(self) -> Self:
        """Take the lock, and return it."""
        self.take()
        return self

    def __exit__(self, *_: object) -> None:
        """Let go."""
        self.close()


def _opened(path: bytes) -> int:
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        return os.open(path, flags, 0o666)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
            raise _no_file(path) from error
        raise


def _no_file(path: bytes) -> UnsafeError:
    return UnsafeError(
        "something else has the name of the lock", path=path, expected="a regular file, or nothing",
        remedy="look at what it is, and remove it",
    )  # fmt: skip


def _take(fd: int, path: bytes) -> None:
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        raise _no_file(path)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        holder = escape(os.pread(fd, _WORD_BYTES, 0).strip()) or "an unnamed process"
        raise LockedError(
            "another run holds the target", path=os.path.dirname(path), found=holder,
            remedy="wait for it, or stop it; a dead run holds nothing",
        ) from error  # fmt: skip
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        raise CapabilityError(
            "the target's file system has no locks", path=path, found=errno.errorcode[error.errno or 0],
            remedy="mount it with locks (flock), or pack to another file system and move the dataset",
        ) from error  # fmt: skip
