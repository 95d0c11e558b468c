"""The journal of an unfinished pack: one synced line a finished shard."""

from __future__ import annotations

import dataclasses
import json
import os
from dataclasses import dataclass
from typing import Any

from shardkit.format.checksum import hex_digest
from shardkit.format.keys import path_from_source, source_from_path
from shardkit.format.manifest import FileRecord, ShardRecord
from shardkit.packing.refusals import Refusal
from shardkit.packing.write import ShardResult
from shardkit.storage.atomic import fsync_dir, os_errors
from shardkit.storage.regular import open_regular

__all__ = ["Journal", "JournalEntry"]

_DIGEST = "xxh3-128"


@dataclass(frozen=True, slots=True)
class JournalEntry:
    """A shard whose files stand under their final names."""

    number: int
    """Number of the shard in the plan."""
    result: ShardResult


class Journal:
    """An append-only file; what was appended is on the disk when `append` returns.

    A line is a digest and a JSON object. The digest covers the plan's identity too: a line that a crash has torn, that
    was damaged later, or that belongs to another plan is no line of this journal.
    """

    def __init__(self, path: bytes, plan: bytes) -> None:
        """Use `path`, which need not exist, for the plan of this identity."""
        self.path = path
        self._plan = plan

    def append(self, entry: JournalEntry) -> None:
        """Write one line and sync it.

        Raises:
            ShardkitError: as `from_os_error` maps it.
        """
        text = json.dumps(_document(entry)).encode()
        # The newline in front parts it from a torn line that a crash may have left.
        line = b"\n%s %s\n" % (self._check(text), text)
        with os_errors("cannot write the journal", self.path):
            fd = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
            try:
                new = not os.fstat(fd).st_size
                while line:
                    line = line[os.write(fd, line) :]
                os.fsync(fd)
            finally:
                os.close(fd)
        if new:
            fsync_dir(os.path.dirname(self.path))

    def read(self) -> list[JournalEntry]:
        """Return what was finished, the last line of each shard; lines that are not whole count as not there.

        Raises:
            ShardkitError: as `from_os_error` maps it.
        """
        entries: dict[int, JournalEntry] = {}
        with os_errors("cannot read the journal", self.path):
            try:
                file = open_regular(self.path)
            except FileNotFoundError:
                return []
            with file:
                for line in file:
                    check, _, text = line.removesuffix(b"\n").partition(b" ")
                    if check == self._check(text):
                        entry = _entry(json.loads(text))
                        entries[entry.number] = entry
        return list(entries.values())

    def _check(self, text: bytes) -> bytes:
        return hex_digest(_DIGEST, self._plan + text).encode()


def _document(entry: JournalEntry) -> dict[str, Any]:
    record = entry.result.record
    return {
        "number": entry.number,
        "record": None if record is None else dataclasses.asdict(record),
        "refused": [[r.number, source_from_path(r.path), r.reason, r.detail] for r in entry.result.refused],
    }


def _entry(document: dict[str, Any]) -> JournalEntry:
    fields = document["record"]
    record = None
    if fields is not None:
        files = {name: FileRecord(**fields[name]) for name in ("index", "dali_index")}
        record = ShardRecord(**{**fields, **files})
    refused = [Refusal(n, path_from_source(path), reason, detail) for n, path, reason, detail in document["refused"]]
    return JournalEntry(document["number"], ShardResult(record=record, refused=refused))
