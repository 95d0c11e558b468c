"""The folder of a run's work in progress: made where it is missing, and locked against a second run."""

from __future__ import annotations

import contextlib
import errno
import os
import stat

from shardkit.errors import ConfigError, ShardkitError, StorageError, UnsafeError, from_os_error
from shardkit.storage.atomic import make_folders
from shardkit.storage.lock import FolderLock

__all__ = ["lock_work_folder", "no_folder_error", "remove_folders"]

_ATTEMPTS = 100


def lock_work_folder(folder: bytes, work: bytes, lock: bytes) -> tuple[FolderLock, list[bytes]]:
    """Make the folders that are missing and lock them; return the lock and what was made.

    Args:
        folder: the target, for messages.
        work: the folder in it that only runs use.
        lock: the file in that.

    Raises:
        LockedError: another run holds it.
        ConfigError: the target is no folder, or a link to nothing.
        UnsafeError: something else has the name of the work folder or of the lock.
        ShardkitError: as `from_os_error` maps it.
    """
    made: list[bytes] = []
    try:
        for _ in range(_ATTEMPTS):  # a run that is just ending may take a folder with it between any two steps
            with contextlib.suppress(FileNotFoundError):
                made += _make_folders(folder, work)
                return FolderLock(lock), made
            if os.path.islink(folder):
                raise ConfigError("the target is a link to nothing", path=folder)
        raise no_folder_error(folder)
    except BaseException:
        remove_folders(made)
        raise


def no_folder_error(folder: bytes) -> StorageError:
    """Return the error for a target that is not there and of which the system says so, too, when it is to be made."""
    return StorageError(
        "cannot create the target", path=folder, found="ENOENT (No such file or directory)",
        remedy="choose a folder in which files can be made: /proc and its like take none", errno=errno.ENOENT,
    )  # fmt: skip


def _make_folders(folder: bytes, work: bytes) -> list[bytes]:
    try:
        made = make_folders(work)
        is_folder = stat.S_ISDIR(os.lstat(work).st_mode)
    except (FileNotFoundError, ShardkitError):
        raise
    except (NotADirectoryError, FileExistsError) as error:
        raise ConfigError("the target is not a folder", path=folder) from error
    except OSError as error:
        raise from_os_error(error, "cannot create the target", path=folder) from error
    if not is_folder:
        # A link would have us sweep, and write, wherever it leads.
        raise UnsafeError("something else has the name of the work folder", path=work, expected="a folder",
                          remedy="look at what it is, and remove it")  # fmt: skip
    return made


def remove_folders(made: list[bytes]) -> None:
    """Remove the folders that are empty."""
    with contextlib.suppress(OSError):
        for folder in reversed(made):
            if os.path.lexists(folder):
                os.rmdir(folder)
