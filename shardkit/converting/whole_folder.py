"""A folder that is there whole or not at all: written beside its place, synced, and renamed to it at the end."""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, NoReturn

from shardkit.converting.known_files import dataset_files
from shardkit.converting.outputs import KINDS
from shardkit.errors import ConfigError, ShardkitError, StorageError, TargetFullError, from_os_error
from shardkit.running.work_folder import WorkFolder
from shardkit.storage.atomic import fsync_dir, os_errors, remove
from shardkit.storage.exchange import exchange

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardkit.converting.outputs import Output, OutputKind

__all__ = ["WholeFolder", "raise_error", "untouched"]

_SYNCS = 8
"""Files that are synced at a time."""
_NAMES = 4096
"""Files that wait for that at a time."""
_UNTOUCHED = "nothing was changed"
_FREE_SPACE = "free space (or raise the quota or the file size limit), or convert elsewhere"
_REMOVED = "nothing was changed: what was written beside the target is removed, and the next run begins anew"


class WholeFolder:
    """The folder of a foreign dataset or a tree, and the work folder beside it: lock, new dataset, replaced dataset.

    What a killed run leaves is the work folder, `.NAME.shardkit`; the next run into the same target removes it, or puts
    the replaced dataset back where the kill fell between two renames.
    """

    def __init__(self, output: Output) -> None:
        """Name the folder; nothing is touched."""
        self.kind = output.kind
        self.folder = os.path.realpath(output.path)
        parent, name = os.path.split(self.folder)
        self.work = os.path.join(parent, f".{name}.shardkit")
        self.staged = os.path.join(self.work, "new")
        """Where the new dataset is written."""
        self._old = os.path.join(self.work, "old")
        """A replaced dataset, whole."""
        self._gone = os.path.join(self.work, "gone")
        """What is left of one that is being removed."""

    @contextlib.contextmanager
    def hold(self, *, overwrite: bool) -> Iterator[None]:
        """Hold the target for one run, with an empty folder `staged`; afterwards nothing temporary is left.

        Args:
            overwrite: a dataset of the same kind may be there.

        Raises:
            ConfigError: something is there, or the target can be no folder.
            LockedError: another run holds it.
            UnsafeError: something else has the name of the work folder.
            ShardkitError: it cannot be written; as `from_os_error` maps it.
        """
        if not os.path.basename(self.folder):
            raise ConfigError("the target is a folder with a name", path=self.folder)
        if os.path.ismount(self.folder):
            # What is written beside it would fill the file system around it, and could not be renamed to it.
            raise ConfigError("the target is where a file system is mounted: no new folder can take its place",
                              path=self.folder, kept=_UNTOUCHED, remedy="name a folder in it")  # fmt: skip
        work = WorkFolder(os.fsencode(os.path.dirname(self.folder)), os.fsencode(self.work))
        with work.left(self._clear):
            with untouched():
                work.take()
                self._recover()
                self.replaced(overwrite=overwrite)
                with os_errors("cannot write beside the target", os.fsencode(self.work)):
                    os.mkdir(self.staged)
            yield

    def _clear(self) -> bool:
        """Remove what is temporary; that is all, then."""
        for folder in (self.staged, self._gone):
            shutil.rmtree(folder, ignore_errors=True)
        self._remove_files()
        return True

    def replaced(self, *, overwrite: bool) -> list[str] | None:
        """Return the files of the dataset that is to be replaced; None where nothing is there.

        Raises:
            ConfigError: something is there that may not be replaced.
        """
        with os_errors("cannot look at the target", os.fsencode(self.folder)):
            try:
                mode = os.lstat(self.folder).st_mode
                if not stat.S_ISDIR(mode):
                    raise ConfigError("the target is not a folder", path=self.folder)
                if not os.listdir(self.folder):
                    return None
            except FileNotFoundError:
                return None
        if not overwrite:
            remedy = f"choose another folder, or give --overwrite to replace a {self.kind} dataset"
            remedy = remedy if self.kind != "tree" else "choose another folder: a tree is never replaced"
            raise ConfigError("the target is not empty", path=self.folder, remedy=remedy)
        return dataset_files(self.kind, self.folder)

    def check_space(self, needed: int) -> None:
        """Refuse to start what cannot end.

        Raises:
            TargetFullError: the file system has too few bytes left.
        """
        with os_errors("cannot ask for the free space", os.fsencode(self.work)):
            status = os.statvfs(self.work)
        free = status.f_bavail * status.f_frsize
        if status.f_blocks and free < needed:  # some file systems (FUSE, network ones) state no size
            raise TargetFullError(
                "the target's file system has too little space",
                path=self.folder,
                expected=f"{needed} bytes free",
                found=f"{free} bytes",
                kept=_UNTOUCHED,
            )

    def commit(self, *, overwrite: bool) -> None:
        """Sync the new dataset and give it its name; a dataset that was there before is removed.

        Raises:
            ConfigError: something has come into the target meanwhile.
            ShardkitError: as `from_os_error` maps it; the target is then what it was, or the new dataset.
        """
        with untouched():
            _sync_tree(os.fsencode(self.staged))
            replaced = self.replaced(overwrite=overwrite)
            with os_errors("cannot give the new dataset its name", os.fsencode(self.folder)):
                if replaced is None:
                    os.rename(self.staged, self.folder)  # an empty folder may be there
                elif exchange(os.fsencode(self.staged), os.fsencode(self.folder)):
                    os.rename(self.staged, self._old)
                else:
                    self._rename_both()
        fsync_dir(os.fsencode(os.path.dirname(self.folder)))
        if replaced is not None:
            self._remove_old()

    def _rename_both(self) -> None:
        """Replace the target where no system call does: for a moment nothing has its name."""
        os.rename(self.folder, self._old)
        try:
            os.rename(self.staged, self.folder)
        except BaseException:
            os.rename(self._old, self.folder)
            raise

    def _recover(self) -> None:
        """Bring to an end what a killed run has begun."""
        with os_errors("cannot remove what an earlier run left", os.fsencode(self.work)):
            if os.path.lexists(self._old) and not os.path.lexists(self.folder):
                os.rename(self._old, self.folder)
            self._remove_old()
            if os.path.lexists(self.staged):
                shutil.rmtree(self.staged)
            self._remove_files()

    def _remove_files(self) -> None:
        """Remove what a run keeps beside the new dataset while it plans."""
        for name in os.listdir(self.work):
            if name.endswith(".tmp"):
                remove(os.fsencode(os.path.join(self.work, name)))

    def _remove_old(self) -> None:
        """Remove a replaced dataset; under another name, since half of one could not be told from other files.

        Raises:
            StorageError: it holds files that are none of a dataset's; all of it is still there.
        """
        with os_errors("cannot remove what was replaced", os.fsencode(self._old)):
            if os.path.lexists(self._old):
                if not any(map(self._old_is, KINDS)):  # a killed run may have been one of another kind
                    raise StorageError("what was replaced holds files that came meanwhile", path=self._old,
                                       kept="the new dataset is in its place",
                                       remedy="look at them, and remove the folder")  # fmt: skip
                os.rename(self._old, self._gone)
            if os.path.lexists(self._gone):
                shutil.rmtree(self._gone)

    def _old_is(self, kind: OutputKind) -> bool:
        try:
            return bool(dataset_files(kind, self._old))
        except ConfigError:
            return False


@contextlib.contextmanager
def untouched() -> Iterator[None]:
    """Let whatever ends the run here say that the target is what it was."""
    try:
        yield
    except ShardkitError as error:
        if isinstance(error, TargetFullError):
            error.remedy = _FREE_SPACE  # nothing can be resumed
        error.kept = error.kept or _UNTOUCHED
        raise
    except BaseException as error:  # Ctrl-C, SIGTERM, a bug
        error.add_note(_REMOVED)
        raise


def _sync_tree(folder: bytes) -> None:
    """Sync every file and folder; several files at a time: a tree may have millions, and each waits for the disk."""
    with ThreadPoolExecutor(_SYNCS, "sync") as pool:
        for place, _, names in os.walk(folder, topdown=False, onerror=raise_error):
            for first in range(0, len(names), _NAMES):
                paths = (os.path.join(place, name) for name in names[first : first + _NAMES])
                for _ in pool.map(_sync_file, paths):
                    pass
            fsync_dir(place)


def raise_error(error: OSError) -> NoReturn:
    """Raise what `os.walk` met, which otherwise passes over a folder that cannot be listed.

    Raises:
        ShardkitError: always.
    """
    raise from_os_error(error, "cannot list a folder", path=error.filename) from error


def _sync_file(path: bytes) -> None:
    with os_errors("cannot sync a file", path):
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
