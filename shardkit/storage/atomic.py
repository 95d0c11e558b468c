"""Files that are whole or absent: a temporary name, fsync, rename, fsync of the folder.

After a failed write, fsync or close the temporary file is thrown away: the kernel reports such an error once, and a
second fsync that succeeds proves nothing.
"""

from __future__ import annotations

import contextlib
import errno
import os
from typing import TYPE_CHECKING, Self

from shardkit.errors import FORBIDDEN, ShardkitError, StorageError, from_os_error

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = [
    "BufferedFile",
    "commit",
    "fsync_dir",
    "make_folders",
    "os_errors",
    "remove",
    "replace_file",
]

_FAILED_WRITE = "cannot write"
_NO_SYNC = {errno.EINVAL, errno.ENOTSUP}


def fsync_dir(folder: bytes) -> None:
    """Make the names in `folder` durable: a renamed file is not, until its folder is.

    Raises:
        ShardkitError: as `from_os_error` maps it.
    """
    with os_errors("cannot sync a folder", folder):
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        except OSError as error:
            # A file system that knows no sync of a folder (some network ones) has nothing more to offer.
            if error.errno not in _NO_SYNC:
                raise
        finally:
            os.close(fd)


def make_folders(path: bytes, made: list[bytes]) -> None:
    """Make `path` and whatever is missing above it, durably.

    Args:
        path: of a folder.
        made: gets what is made, the outermost first, each one before it is there: a signal may come behind any step.

    Raises:
        OSError: a folder cannot be made; those above it stay.
    """
    missing = []
    while not _is_there(path):
        missing.append(path)
        path = os.path.dirname(path)
    for folder in reversed(missing):
        made.append(folder)
        try:
            os.mkdir(folder)
        except FileExistsError:  # another process was quicker
            made.pop()
        # A folder that may be written but not listed cannot be opened, so it cannot be synced either.
        try:
            fsync_dir(os.path.dirname(folder))
        except StorageError as error:
            if error.errno not in FORBIDDEN:
                raise


def _is_there(path: bytes) -> bool:
    # os.path.lexists says no, too, when the system does not know: for any path, up to the root and on and on.
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def commit(temporaries: list[tuple[bytes, bytes]]) -> None:
    """Rename synced temporary files to their final names and make the names durable.

    Args:
        temporaries: (temporary, final) paths in one file system; the final ones in one folder.

    Raises:
        ShardkitError: as `from_os_error` maps it.
    """
    for temporary, final in temporaries:
        with os_errors("cannot give a file its final name", final):
            os.rename(temporary, final)
    fsync_dir(os.path.dirname(temporaries[0][1]))


def remove(path: bytes) -> None:
    """Unlink `path`; no error when it is not there."""
    with os_errors("cannot remove a file", path), contextlib.suppress(FileNotFoundError):
        os.unlink(path)


class BufferedFile:
    """A new file at a temporary name, written in order through the page cache, synced when closed."""

    def __init__(self, path: bytes) -> None:
        """Create `path`; a leftover of that name is removed first.

        Raises:
            ShardkitError: as `from_os_error` maps it.
        """
        self.path = path
        remove(path)
        with os_errors(_FAILED_WRITE, path):
            self._file = open(path, "xb", buffering=1 << 20)  # noqa: SIM115 - closed by close or discard

    def write(self, data: bytes | memoryview, /) -> int:
        """Take all of `data`; not retained."""
        with os_errors(_FAILED_WRITE, self.path):
            return self._file.write(data)

    def close(self) -> None:
        """Write everything to the disk.

        Raises:
            ShardkitError: as `from_os_error` maps it; the file is then removed.
        """
        try:
            with os_errors(_FAILED_WRITE, self.path):
                self._file.flush()
                os.fsync(self._file.fileno())
                self._file.close()
        except BaseException:
            self.discard()
            raise

    def discard(self) -> None:
        """Close and unlink, whatever state the file is in; never hides the error that led here."""
        with contextlib.suppress(OSError):
            self._file.close()
        with contextlib.suppress(ShardkitError):
            remove(self.path)

    def __enter__(self) -> Self:
        """Return the open file."""
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Sync and close, or discard after an error."""
        if kind is None:
            self.close()
        else:
            self.discard()


def replace_file(path: bytes, data: bytes, temporary: bytes) -> None:
    """Make `path` hold `data`, durably and at once.

    Raises:
        ShardkitError: as `from_os_error` maps it; `path` is then what it was.
    """
    with BufferedFile(temporary) as file:
        file.write(data)
    commit([(temporary, path)])


@contextlib.contextmanager
def os_errors(what: str, path: bytes, offset: int | None = None) -> Iterator[None]:
    """Raise what the system says meanwhile as `from_os_error` maps it."""
    try:
        yield
    except ShardkitError:
        raise
    except OSError as error:
        raise from_os_error(error, what, path=path, offset=offset) from error
