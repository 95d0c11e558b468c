"""The folder that is packed into: what may be there, what is swept, what is finished."""

from __future__ import annotations

import contextlib
import json
import os
import re
import stat
from typing import TYPE_CHECKING

from shardkit.errors import (
    ConfigError,
    ShardkitError,
    TargetFullError,
    UnsafeError,
)
from shardkit.escaping import escape
from shardkit.format.checksum import hex_digest
from shardkit.format.dataset_record import DATASET_INDEX, MANIFEST, REJECTED, SHARD_FILES, is_file_name
from shardkit.format.manifest import MAX_MANIFEST_BYTES, Manifest, ShardRecord, load_manifest
from shardkit.packing.record import PackRecord, load_record
from shardkit.running.sealed_record import seal
from shardkit.running.work_folder import WorkFolder
from shardkit.storage.atomic import commit, fsync_dir, os_errors, remove, replace_file
from shardkit.storage.regular import open_regular

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

__all__ = ["UNCHANGED", "Target", "untouched"]

UNCHANGED = "nothing was changed"
_FORMAT_FILES = tuple(extension.encode() for extension in SHARD_FILES)
_FIXED = tuple(name.encode() for name in (MANIFEST, DATASET_INDEX, REJECTED))
_SHARD_FILE = re.compile(rb"(.+)-[0-9]{6,}\.(tar|arrow|idx)")
_RUN = b"run-"
_FILES_A_SHARD = len(SHARD_FILES)


class Target:
    """Paths below the target and the moves between its states: absent, in progress, finished.

    Work in progress lies in `.shardkit/`: the lock, the plan, the record of what the pack was told, the journal, and
    the temporary files in a folder that only this run has. A worker that outlives a killed run finds its folder gone.
    """

    def __init__(self, folder: bytes) -> None:
        """Name the folder; nothing is touched."""
        self.folder = folder
        self.work = os.path.join(folder, b".shardkit")
        self.scratch = os.path.join(self.work, _RUN + os.urandom(4).hex().encode())
        """This run's folder for temporary files."""
        self.manifest = self.path(MANIFEST)
        self.plan = os.path.join(self.work, b"plan.arrow")
        self.record = os.path.join(self.work, b"plan.json")
        self.journal = os.path.join(self.work, b"journal")

    def path(self, name: str) -> bytes:
        """Return the final path of a file."""
        return os.path.join(self.folder, os.fsencode(name))

    def temporary(self, name: str) -> bytes:
        """Return the temporary path of a file."""
        return os.path.join(self.scratch, name.encode() + b".tmp")

    @property
    def finished(self) -> bool:
        """Whether a manifest is there."""
        return _exists(self.manifest)

    @property
    def in_progress(self) -> bool:
        """Whether an unfinished pack is there: a record of one, and no manifest."""
        return not self.finished and _exists(self.record)

    @contextlib.contextmanager
    def hold(self) -> Iterator[None]:
        """Hold the folder for one run; afterwards nothing temporary is left, nor a trace of a run without a plan.

        Raises:
            LockedError: another run holds it.
            ConfigError: it is no folder.
            UnsafeError: something else has the name of the work folder or of the lock.
            ShardkitError: it cannot be written; as `from_os_error` maps it.
        """
        work, failed = WorkFolder(self.folder, self.work), False
        with work.left(lambda: self._clear(failed=failed)):
            try:
                with untouched():
                    work.take()
                    with os_errors("cannot write to the target", self.scratch):
                        self.sweep()
                        os.mkdir(self.scratch)
                yield
            except Exception:  # of a signal it is seen whether it came in time
                failed = True
                raise

    def _clear(self, *, failed: bool) -> bool:
        """Remove what is temporary, and a pack that is finished or never had a plan; tell whether that is all."""
        self.sweep()
        if _exists(self.record) and (failed or not self.finished):
            return False
        for path in (self.record, self.journal, self.plan):
            remove(path)
        return True

    def sweep(self) -> None:
        """Remove the temporary files of this run and of those that crashed."""
        for name in self._names(self.work):
            folder = os.path.join(self.work, name)
            if name.startswith(_RUN) and not os.path.islink(folder):
                for entry in self._names(folder):
                    remove(os.path.join(folder, entry))
                with os_errors("cannot remove a folder", folder):
                    os.rmdir(folder)

    def _names(self, folder: bytes) -> list[bytes]:
        with os_errors("cannot list the target", folder):
            return os.listdir(folder)

    def load_manifest(self) -> Manifest:
        """Return the manifest of a finished pack.

        Raises:
            ManifestError: it is damaged.
            UnsupportedVersionError: a newer shardkit wrote it.
        """
        with (
            os_errors("cannot read the manifest", self.manifest),
            open_regular(self.manifest, MAX_MANIFEST_BYTES) as file,
        ):
            return load_manifest(file.read())

    def read_record(self) -> PackRecord | None:
        """Return what the unfinished pack was told; None when that is damaged."""
        with os_errors("cannot read the plan", self.record), open_regular(self.record, MAX_MANIFEST_BYTES) as file:
            record = load_record(file.read())
        if record is not None:
            self._own_names(record.replaces)  # before anything is touched for its sake
        return record

    def begin(self, record: PackRecord) -> None:
        """Turn the folder into an unfinished pack of `record`, without the files that it replaces.

        Up to the removal of the manifest an earlier dataset is whole; from then on the record names what is left
        of it to remove.
        """
        remove(self.journal)
        commit([(self.temporary("plan.arrow"), self.plan)])
        replace_file(self.record, seal(record), self.temporary("plan.json"))
        remove(self.manifest)
        fsync_dir(self.folder)
        self.remove_files(record.replaces)

    def remove_files(self, names: Iterable[str]) -> None:
        """Remove shards or indexes, and the files that are made from all of them."""
        named = self._own_names(names)
        for name in (*named, DATASET_INDEX, REJECTED):
            remove(self.path(name))

    def _own_names(self, names: Iterable[str]) -> list[str]:
        """Return names of shards and indexes in this folder; a record that anybody may have written could name others.

        Raises:
            UnsafeError: a name that leads out of the folder, or is no shard's.
        """
        named = list(names)
        for name in named:
            if not is_file_name(name) or not name.endswith((*SHARD_FILES, REJECTED)):
                raise UnsafeError(
                    "a record of the target names a file that is no shard's", path=self.record, found=escape(name),
                    remedy="look at who wrote it, and choose another folder",
                )  # fmt: skip
        return named

    def refuse_strangers(self, owned: Iterable[str]) -> None:
        """Refuse a folder with shards or indexes that no record of ours names: they would be taken for ours.

        Raises:
            ConfigError: names some of them.
        """
        known = {os.fsencode(name) for name in owned} | set(_FIXED if self.in_progress or self.finished else ())
        strangers = sorted(
            name for name in self._names(self.folder)
            if name not in known
            and (name.endswith(_FORMAT_FILES) or name in _FIXED[:2] or (name == _FIXED[2] and not self._refusals()))
        )  # fmt: skip
        if strangers:
            raise ConfigError(
                "the target holds shards or indexes that are not this pack's", path=self.folder,
                found=", ".join(map(escape, strangers[:5])), remedy="choose an empty folder",
            )  # fmt: skip

    def _refusals(self) -> bool:
        """Tell whether `rejected.jsonl` is a pack's own, as one leaves it that found nothing to pack."""
        with (
            contextlib.suppress(OSError, UnsafeError, ValueError, AttributeError),
            open_regular(self.path(REJECTED)) as file,
        ):
            return set(json.loads(file.readline(1 << 20)).keys()) == {"path", "reason", "detail"}
        return False

    def owned_files(self, name: str) -> list[str]:
        """Return the files of an unfinished pack of that name which are there."""
        matches = ((_SHARD_FILE.fullmatch(entry), entry) for entry in self._names(self.folder))
        return [os.fsdecode(entry) for match, entry in matches if match and match[1] == name.encode()]

    def commit_shard(self, record: ShardRecord) -> None:
        """Give a shard and then its indexes their final names."""
        commit([(self.temporary(record.name), self.path(record.name))])
        indexes = [record.stem + extension for extension in SHARD_FILES[1:]]
        commit([(self.temporary(name), self.path(name)) for name in indexes])

    def holds(self, record: ShardRecord, algorithm: str) -> bool:
        """Tell whether a shard is there as recorded: its size, and its indexes whole."""
        try:
            status = os.lstat(self.path(record.name))
            if not stat.S_ISREG(status.st_mode) or status.st_size != record.bytes:
                return False
            for extension, file in ((".arrow", record.index), (".idx", record.dali_index)):
                with open_regular(self.path(record.stem + extension)) as stored:
                    if hex_digest(algorithm, stored.read()) != file.digest:
                        return False
        except (OSError, UnsafeError):
            return False
        return True

    def check_space(self, needed: int, shards: int, replaced: Iterable[str]) -> None:
        """Refuse to start what cannot end.

        Args:
            needed: bytes of what will be written.
            shards: their number.
            replaced: names of files whose space will be free by then.

        Raises:
            TargetFullError: the file system has too few bytes or inodes left.
        """
        with os_errors("cannot ask for the free space", self.folder):
            status = os.statvfs(self.folder)
        freed = 0
        for name in replaced:
            with contextlib.suppress(OSError):
                freed += os.lstat(self.path(name)).st_size
        free = status.f_bavail * status.f_frsize
        # Some file systems (FUSE, network ones) state no size, or have no inodes to run out of.
        if status.f_blocks and free + freed < needed:
            raise _too_little(self.folder, f"{needed} bytes free", f"{free} bytes", freed)
        inodes = _FILES_A_SHARD * shards + len(_FIXED)
        if status.f_files and not freed and status.f_favail < inodes:
            raise _too_little(self.folder, f"{inodes} free inodes", f"{status.f_favail}", 0)


@contextlib.contextmanager
def untouched() -> Iterator[None]:
    """Let whatever ends the run here say that it has changed nothing yet."""
    try:
        yield
    except ShardkitError as error:
        error.kept = UNCHANGED
        raise
    except BaseException as error:  # Ctrl-C, SIGTERM, a bug
        error.add_note(UNCHANGED)
        raise


def _exists(path: bytes) -> bool:
    """Tell whether a file is there; os.path.lexists says no when the system does not know."""
    with os_errors("cannot look at the target", path):
        try:
            os.lstat(path)
        except (FileNotFoundError, NotADirectoryError):
            return False
    return True


def _too_little(folder: bytes, expected: str, found: str, freed: int) -> TargetFullError:
    return TargetFullError(
        "the target's file system has too little space", path=folder, expected=expected,
        found=found + (f" and {freed} of the dataset that would be replaced" if freed else ""),
        remedy="free space, or choose a target elsewhere",
    )  # fmt: skip
