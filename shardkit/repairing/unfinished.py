"""A repair into a new folder, as long as it goes on: what it may leave there, and for the next one to remove."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING

from shardkit.errors import ConfigError, UnsafeError
from shardkit.escaping import escape
from shardkit.format.dataset_record import DATASET_INDEX, REJECTED, SHARD_FILES
from shardkit.format.keys import path_from_source, source_from_path
from shardkit.format.strict_json import dump_json, parse_json_object
from shardkit.packing.target import untouched
from shardkit.repairing.lost import LOST
from shardkit.storage.atomic import fsync_dir, os_errors, remove, replace_file
from shardkit.storage.regular import open_regular

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from shardkit.packing.target import Target

__all__ = ["Ending", "UnfinishedRepair"]

_MARKER = b"repair.json"
_MAX_BYTES = 1 << 30
_NAMED = tuple(extension.encode() for extension in SHARD_FILES)


class Ending:
    """What holds of a run that is ended early: asked of the file that gets its name when all others have theirs."""

    def __init__(self) -> None:
        """Begin with a run that has such a file yet to write."""
        self.last: bytes | None = None
        """Path of that file; set when nothing is left but to name it."""

    @property
    def reached(self) -> bool:
        """Whether every file has its name."""
        return self.last is not None and os.path.lexists(self.last)


class UnfinishedRepair:
    """The record, in the target's work folder, of the names that a repair may give to files."""

    def __init__(self, target: Target, dataset: bytes) -> None:
        """Look for the record of an earlier repair of the same dataset.

        Args:
            target: held by this run.
            dataset: the folder that is repaired.

        Raises:
            ConfigError: there is one of another dataset.
            UnsafeError: it names files that are no shards' or indexes'.
        """
        self._target, self._dataset = target, dataset
        self._marker = os.path.join(target.work, _MARKER)
        self.before = self._read()
        """Names of the files that an interrupted repair may have left; None when there was none."""

    def sweep(self) -> None:
        """Remove what an interrupted repair has left."""
        if self.before is None:
            return
        remove(self._target.manifest)
        for name in (*self.before, *map(os.fsencode, (DATASET_INDEX, REJECTED, LOST))):
            remove(os.path.join(self._target.folder, name))
        fsync_dir(self._target.folder)
        self._end()

    @contextlib.contextmanager
    def recorded(self, names: Sequence[bytes]) -> Iterator[None]:
        """Have the names that this repair may give on record until all files have theirs, or it ends and none has."""
        try:
            with untouched():
                self._begin(names)
            yield
        except BaseException:
            given = (os.path.join(self._target.folder, name) for name in (*names, os.fsencode(LOST)))
            if not any(map(os.path.lexists, given)):
                self._end()
            raise
        self._end()

    def _begin(self, names: Sequence[bytes]) -> None:
        record = {"dataset": source_from_path(self._dataset), "names": list(map(source_from_path, names))}
        replace_file(self._marker, dump_json(record).encode(), self._target.temporary("repair.json"))

    def _end(self) -> None:
        remove(self._marker)

    def _read(self) -> list[bytes] | None:
        with os_errors("cannot read the record of a repair", self._marker):
            try:
                with open_regular(self._marker, _MAX_BYTES) as file:
                    data = file.read()
            except FileNotFoundError:
                return None
        try:
            record = parse_json_object(data.decode("ascii"))
            names, dataset = [path_from_source(name) for name in record["names"]], record["dataset"]
        except (AttributeError, KeyError, TypeError, ValueError):
            raise ConfigError(
                "a record of an unfinished repair is damaged", path=self._marker, kept="nothing was changed",
                remedy="choose another folder, or empty this one",
            ) from None  # fmt: skip
        if dataset != source_from_path(self._dataset):
            raise ConfigError(
                "an unfinished repair of another dataset lies here", path=self._target.folder,
                found=escape(str(dataset))[:200], remedy="choose another folder",
            )  # fmt: skip
        for name in names:
            if b"/" in name or b"\0" in name or not name.endswith(_NAMED):
                raise UnsafeError(
                    "a record of the target names a file that is no shard's", path=self._marker, found=escape(name),
                    remedy="look at who wrote it, and choose another folder",
                )  # fmt: skip
        return names
