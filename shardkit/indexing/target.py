"""The folder that the indexes are written to: what may be there, what is swept, what is finished.

Shards are never written, moved or removed. In a folder that is not theirs each gets a symbolic link, so that the folder
is a dataset for every reader.
"""

from __future__ import annotations

import contextlib
import json
import os
from typing import TYPE_CHECKING

from shardkit.errors import ConfigError, ShardkitError, UnsafeError
from shardkit.escaping import escape
from shardkit.format.checksum import hex_digest
from shardkit.format.dataset_record import DATASET_INDEX, MANIFEST, REJECTED, is_file_name
from shardkit.format.manifest import MAX_MANIFEST_BYTES, load_manifest
from shardkit.indexing.record import IndexRecord, load_record
from shardkit.indexing.refusals import OF_SHARDS
from shardkit.running.sealed_record import seal
from shardkit.running.work_folder import WorkFolder
from shardkit.storage.atomic import commit, fsync_dir, os_errors, remove, replace_file
from shardkit.storage.regular import open_regular

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from shardkit.format.manifest import Manifest, ShardRecord
    from shardkit.indexing.inputs import ShardFile

__all__ = ["INDEX_ENDS", "UNCHANGED", "Target", "untouched"]

UNCHANGED = "nothing was changed"
INDEX_ENDS = (".arrow", ".idx")
"""Of the index files beside a shard."""
_RUN = b"run-"
_MAX_REJECTED_BYTES = 1 << 26
_MAX_TOLD = 200
_PACKS = (b"plan.json", b"plan.arrow")
"""Of a pack in progress, in the same work folder."""


class Target:
    """Paths in the folder and the moves between its states: absent, in progress, finished.

    Work in progress lies in `.shardkit/`, as a pack's does, under the same lock: the record of what the run was told,
    the journal, and temporary files in a folder that only this run has.
    """

    def __init__(self, folder: bytes) -> None:
        """Name the folder; nothing is touched."""
        self.folder = folder
        self.work = os.path.join(folder, b".shardkit")
        self.manifest = self.path(MANIFEST)
        self.record = os.path.join(self.work, b"index.json")
        self.journal = os.path.join(self.work, b"index.journal")
        self._scratch = os.path.join(self.work, _RUN + os.urandom(4).hex().encode())

    def path(self, name: str) -> bytes:
        """Return the final path of a file."""
        return os.path.join(self.folder, os.fsencode(name))

    def temporary(self, name: str) -> bytes:
        """Return the temporary path of a file."""
        return os.path.join(self._scratch, os.fsencode(name) + b".tmp")

    @property
    def finished(self) -> bool:
        """Whether a manifest is there."""
        return _exists(self.manifest)

    @property
    def in_progress(self) -> bool:
        """Whether an unfinished run is there: a record of one, and no manifest."""
        return not self.finished and _exists(self.record)

    @contextlib.contextmanager
    def hold(self) -> Iterator[None]:
        """Hold the folder for one run; afterwards nothing temporary is left, nor a trace of a run without a record.

        Raises:
            LockedError: another run holds it.
            ConfigError: it is no folder, or a pack in progress lies in it.
            UnsafeError: something else has the name of the work folder or of the lock.
            ShardkitError: it cannot be written; as `from_os_error` maps it.
        """
        work, failed = WorkFolder(self.folder, self.work), False
        with work.left(lambda: self._clear(failed=failed)):
            try:
                with untouched():
                    work.take()
                    with os_errors("cannot write to the target", self._scratch):
                        self._refuse_pack()
                        self._sweep()
                        os.mkdir(self._scratch)
                yield
            except Exception:  # of a signal it is seen whether it came in time
                failed = True
                raise

    def _refuse_pack(self) -> None:
        if any(_exists(os.path.join(self.work, name)) for name in _PACKS):
            raise ConfigError("a pack is unfinished in this folder", path=self.folder,
                              remedy="finish it with --resume, or choose another folder with --out")  # fmt: skip

    def _clear(self, *, failed: bool) -> bool:
        """Remove what is temporary, and a run that is finished or never had a record; tell whether that is all."""
        self._sweep()
        if _exists(self.record) and (failed or not self.finished):
            return False
        for path in (self.record, self.journal):
            remove(path)
        return not any(_exists(os.path.join(self.work, name)) for name in _PACKS)

    def _sweep(self) -> None:
        """Remove the temporary files of this run and of those that crashed."""
        for name in os.listdir(self.work):
            folder = os.path.join(self.work, name)
            if name.startswith(_RUN) and not os.path.islink(folder):
                for entry in os.listdir(folder):
                    remove(os.path.join(folder, entry))
                os.rmdir(folder)

    def load_manifest(self) -> Manifest:
        """Return the manifest of a finished dataset.

        Raises:
            ManifestError: it is damaged.
            UnsupportedVersionError: a newer shardkit wrote it.
        """
        with (
            os_errors("cannot read the manifest", self.manifest),
            open_regular(self.manifest, MAX_MANIFEST_BYTES) as file,
        ):
            data = file.read()
        try:
            return load_manifest(data)
        except ShardkitError as error:
            error.path = self.manifest
            raise

    def refused_shards(self) -> dict[str, str]:
        """Return the file names of the shards that the finished dataset refused as a whole, and why, escaped.

        What of `rejected.jsonl` cannot be read counts as not there: it is only told.
        """
        found = {}
        with (
            contextlib.suppress(OSError, UnsafeError, ValueError, KeyError, TypeError, RecursionError),
            open_regular(self.path(REJECTED), _MAX_REJECTED_BYTES) as file,
        ):
            for line in file:
                one = json.loads(line)
                if one["reason"] in OF_SHARDS:
                    found[str(one["path"])] = escape(f"{one['reason']}: {one['detail']}"[:_MAX_TOLD])
        return found

    def read_record(self) -> IndexRecord | None:
        """Return what the unfinished run was told; None when the record is damaged.

        Raises:
            UnsafeError: it names files that are no shard's.
        """
        with os_errors("cannot read the record of a run", self.record), open_regular(self.record) as file:
            record = load_record(file.read())
        for name in record.replaces if record else ():
            if not is_file_name(name) or not name.endswith((".tar", *INDEX_ENDS)):
                raise UnsafeError(
                    "a record of the target names a file that is no shard's", path=self.record, found=escape(name),
                    remedy="look at who wrote it, and choose another folder",
                )  # fmt: skip
        return record

    def begin(self, record: IndexRecord) -> None:
        """Turn the folder into an unfinished run of `record`, without the files that it replaces.

        Up to the removal of the manifest an earlier dataset is whole; from then on the record names what is left
        of it to remove.
        """
        remove(self.journal)
        replace_file(self.record, seal(record), self.temporary("index.json"))
        remove(self.manifest)
        fsync_dir(self.folder)
        self.remove_files(record.replaces)

    def remove_files(self, names: Iterable[str]) -> None:
        """Remove indexes and links, and the files that are made from all of them; never a shard."""
        for name in (*names, DATASET_INDEX, REJECTED):
            path = self.path(name)
            if not name.endswith(".tar") or os.path.islink(path):
                remove(path)

    def strangers(self, shards: Sequence[ShardFile]) -> list[str]:
        """Return the names that this run would write and that are there already."""
        names = [DATASET_INDEX, REJECTED, *(shard.stem + end for shard in shards for end in INDEX_ENDS)]
        names += [shard.name for shard in shards if self._wants_link(shard)]
        with os_errors("cannot list the target", self.folder):
            there = {os.fsdecode(name) for name in os.listdir(self.folder)}
        return sorted(name for name in names if name in there)

    def refuse_files_for_links(self, shards: Iterable[ShardFile]) -> None:
        """Refuse a folder where something that is no link has the name of a link: it may be a shard.

        Raises:
            ConfigError: names it.
        """
        for shard in shards:
            path = self.path(shard.name)
            if self._wants_link(shard) and os.path.lexists(path) and not os.path.islink(path):
                raise ConfigError("another file has the name of a shard", path=path, found="no link",
                                  remedy="choose another folder with --out")  # fmt: skip

    def _wants_link(self, shard: ShardFile) -> bool:
        return os.path.realpath(self.folder) != os.fsencode(os.path.realpath(os.path.dirname(shard.path)))

    def commit_shards(self, shards: Iterable[ShardFile]) -> None:
        """Give the indexes of some shards, one at least, their final names, and what lies elsewhere a link before."""
        names = []
        for shard in shards:
            if self._wants_link(shard):
                self._make_link(shard)
                names.append(shard.name)
            names += [shard.stem + end for end in INDEX_ENDS]
        commit([(self.temporary(name), self.path(name)) for name in names])

    def _make_link(self, shard: ShardFile) -> None:
        link = self.temporary(shard.name)
        # Relative, so that both may move together; from the folder's real place, as the system resolves it.
        leads = os.path.relpath(os.path.realpath(shard.path), os.fsdecode(os.path.realpath(self.folder)))
        with os_errors("cannot make a link to a shard", link):
            os.symlink(os.fsencode(leads), link)

    def holds(self, shard: ShardFile, record: ShardRecord, algorithm: str) -> bool:
        """Tell whether a shard's indexes are there as recorded, and the shard is the one that was found."""
        try:
            if not os.path.samefile(self.path(shard.name), shard.path) or shard.bytes != record.bytes:
                return False
            for end, file in zip(INDEX_ENDS, (record.index, record.dali_index), strict=True):
                with open_regular(self.path(record.stem + end)) as stored:
                    if hex_digest(algorithm, stored.read()) != file.digest:
                        return False
        except (OSError, UnsafeError):
            return False
        return True


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
