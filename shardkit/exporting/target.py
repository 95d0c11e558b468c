"""The folder that is exported into: staged out of sight, compared with what is there, then renamed."""

from __future__ import annotations

import contextlib
import os
import stat
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardkit.errors import CapabilityError, StorageError, TargetFullError, UnsafeError
from shardkit.escaping import escape
from shardkit.exporting.database import write_database
from shardkit.exporting.record import RECORD, load_record
from shardkit.exporting.table import Database
from shardkit.format.checksum import new_digest
from shardkit.running.work_folder import LOCK, WorkFolder, remove_folders
from shardkit.storage.atomic import BufferedFile, commit, make_folders, os_errors, remove
from shardkit.storage.regular import open_regular

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardkit.exporting.report import State
    from shardkit.exporting.table import ForeignFile

__all__ = ["StagedFile", "Target"]

_WORK = b".shardkit-export"
_BLOCK = 1 << 20
_RECORD_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class StagedFile:
    """A file that is whole under a temporary name."""

    name: str
    """Its final name, relative to the folder."""
    temporary: bytes
    bytes: int
    digest: str
    """XXH3-128."""


class Target:
    """One folder, held by one run; what it stages is gone when `hold` ends, unless it was put in place."""

    def __init__(self, folder: bytes) -> None:
        """Name the folder; nothing is touched."""
        self.folder = folder
        self._work = os.path.join(folder, _WORK)

    @contextlib.contextmanager
    def hold(self) -> Iterator[None]:
        """Make what is missing of the folder and hold it; a failed run leaves no folder of its own behind.

        Raises:
            LockedError: another export holds it.
            ConfigError: it is no folder.
            UnsafeError: something else has the name of the work folder.
            ShardkitError: it cannot be written; as `from_os_error` maps it.
        """
        work = WorkFolder(self.folder, self._work)
        with work.left(self._sweep):
            try:
                self._take(work)
                self._sweep()
                yield
            except TargetFullError as error:
                error.remedy = "free space (or raise the quota) and run again"
                raise

    @staticmethod
    def _take(work: WorkFolder) -> None:
        try:
            work.take()
        except (CapabilityError, StorageError) as error:
            error.remedy = "export into another folder with --out"
            raise

    def _sweep(self) -> bool:
        """Remove what a killed run, or this one, has left; that is all, then."""
        with os_errors("cannot list the target", self._work):
            names = os.listdir(self._work)
        for name in names:
            if name != LOCK:
                remove(os.path.join(self._work, name))
        return True

    def path(self, name: str) -> bytes:
        """Return the final path of a file."""
        return os.path.join(self.folder, os.fsencode(name))

    def stage(self, file: ForeignFile) -> StagedFile:
        """Write a file under a temporary name, synced.

        Raises:
            ShardkitError: as `from_os_error` maps it, or what is wrong with the table.
        """
        temporary = os.path.join(self._work, file.name.replace("/", "%2F").encode() + b".tmp")
        if isinstance(file.content, Database):
            write_database(temporary, file.content)
        else:
            with BufferedFile(temporary) as stream:
                for chunk in file.content:
                    stream.write(chunk)
        size, digest = _measure(temporary)
        return StagedFile(file.name, temporary, size, digest)

    def record(self) -> dict[str, str] | None:
        """Return the digests of earlier exports; None where something else has the name of the record."""
        path = self.path(RECORD)
        if self._kind(path) == "nothing":
            return {}
        with os_errors("cannot read", path), open_regular(path, _RECORD_BYTES) as file:
            return load_record(file.read())

    def compare(self, file: StagedFile, recorded: str | None) -> State | None:
        """Return what putting the file in place would do; None when it would replace what no export has written.

        Args:
            file: staged.
            recorded: digest of what an earlier export has written there.

        Raises:
            UnsafeError: there is something other than a file, or its folder is none.
        """
        path = self.path(file.name)
        folder = os.path.dirname(path)
        if folder != self.folder and self._kind(folder) not in ("folder", "nothing"):
            raise UnsafeError("a folder of the export is something else", path=folder, expected="a folder, or nothing")
        kind = self._kind(path)
        if kind == "nothing":
            return "written"
        if kind != "file":
            raise UnsafeError("a file of the export is something else", path=path, expected="a file, or nothing",
                              remedy="look at what it is, and move it away")  # fmt: skip
        _, found = _measure(path)
        if found == file.digest:
            return "unchanged"
        return "replaced" if found == recorded else None

    def put(self, files: list[StagedFile]) -> None:
        """Give the files their final names, folder by folder, durably.

        Raises:
            ShardkitError: as `from_os_error` maps it; each file is then the old one or the new one, whole.
        """
        folders: dict[bytes, list[tuple[bytes, bytes]]] = {}
        for file in files:
            final = self.path(file.name)
            folders.setdefault(os.path.dirname(final), []).append((file.temporary, final))
        made: list[bytes] = []
        try:
            for folder, names in folders.items():
                with os_errors("cannot make a folder", folder):
                    make_folders(folder, made)
                commit(names)
        except BaseException:
            remove_folders(made)
            raise

    @staticmethod
    def _kind(path: bytes) -> str:
        """Return what has a name; a link is none of these, wherever it leads."""
        with os_errors("cannot look at the target", path):
            try:
                mode = os.lstat(path).st_mode
            except FileNotFoundError:
                return "nothing"
        return "file" if stat.S_ISREG(mode) else "folder" if stat.S_ISDIR(mode) else escape(path)


def _measure(path: bytes) -> tuple[int, str]:
    digest, size = new_digest("xxh3-128"), 0
    with os_errors("cannot read", path), open_regular(path) as file:
        while block := file.read(_BLOCK):
            digest.update(block)
            size += len(block)
    return size, digest.hexdigest()
