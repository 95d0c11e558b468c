"""The folder of a run's work in progress: made where it is missing, and locked against a second run."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from typing import TYPE_CHECKING

from shardkit.errors import ConfigError, ShardkitError, StorageError, UnsafeError, from_os_error
from shardkit.storage.atomic import make_folders, remove
from shardkit.storage.lock import FolderLock

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["LOCK", "WorkFolder", "remove_folders"]

LOCK = b"lock"
"""File name of the lock in a work folder."""
_ATTEMPTS = 100


class WorkFolder:
    """A folder in a target, or beside it, that only runs use, and what a run has made to have it.

    A signal may come behind any step, the one that would tell of a folder or a lock among them: what is made is noted
    before, and what is removed goes by what is there.
    """

    def __init__(self, target: bytes, path: bytes) -> None:
        """Name the folder, and its target for messages; nothing is touched."""
        self.made: list[bytes] = []
        """Folders that were missing, the outermost first."""
        self._target = target
        self._path = path
        self._lock = FolderLock(os.path.join(path, LOCK))
        self._is_folder = False

    def take(self) -> None:
        """Make the folders that are missing and lock them, inside of `left`.

        Raises:
            LockedError: another run holds it.
            ConfigError: the target is no folder, or a link to nothing.
            UnsafeError: something else has the name of the work folder or of the lock.
            ShardkitError: as `from_os_error` maps it.
        """
        for _ in range(_ATTEMPTS):  # a run that is just ending may take a folder with it between any two steps
            with contextlib.suppress(FileNotFoundError):
                self._make()
                self._lock.take()
                return
            if os.path.islink(self._target):
                raise ConfigError("the target is a link to nothing", path=self._target)
        raise StorageError(
            "cannot create the target", path=self._target, found="ENOENT (No such file or directory)",
            remedy="choose a folder in which files can be made: /proc and its like take none", errno=errno.ENOENT,
        )  # fmt: skip

    def _make(self) -> None:
        try:
            make_folders(self._path, self.made)
            self._is_folder = stat.S_ISDIR(os.lstat(self._path).st_mode)
        except (FileNotFoundError, ShardkitError):
            raise
        except (NotADirectoryError, FileExistsError) as error:
            raise ConfigError("the target is not a folder", path=self._target) from error
        except OSError as error:
            raise from_os_error(error, "cannot create the target", path=self._target) from error
        if not self._is_folder:
            # A link would have us sweep, and write, wherever it leads.
            raise UnsafeError("something else has the name of the work folder", path=self._path, expected="a folder",
                              remedy="look at what it is, and remove it")  # fmt: skip

    @contextlib.contextmanager
    def left(self, clear: Callable[[], bool]) -> Iterator[None]:
        """Let go at the end, whatever `take` and the rest came to, and remove the folders that are empty.

        Args:
            clear: called with the lock held; removes what is temporary, and tells whether nothing is to stay. What it
                cannot remove is the next run's to sweep, and no error of what was done here.
        """
        try:
            try:
                yield
            finally:
                self._leave(clear)
        except BaseException:
            self._leave(clear)  # a signal may have come into the first time; there is one
            raise
        finally:
            self._lock.close()

    def _leave(self, clear: Callable[[], bool]) -> None:
        with contextlib.suppress(OSError, ShardkitError):
            if self._is_folder and not self._lock.held:
                self._lock.take()  # unless another run has it; its file may be there without being known here
            if self._lock.held and clear():
                remove(self._lock.path)  # last: whoever finds it gone may start
                self._lock.close()
        remove_folders([*self.made, self._path])


def remove_folders(made: list[bytes]) -> None:
    """Remove the folders that are empty, the last one first."""
    with contextlib.suppress(OSError):
        for folder in reversed(made):
            if os.path.lexists(folder):
                os.rmdir(folder)
