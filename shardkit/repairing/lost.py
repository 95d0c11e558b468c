"""What could not be saved: stable reasons, one line each in `lost.jsonl`."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardkit.format.checksum import new_digest
from shardkit.format.dataset_record import FileRecord
from shardkit.format.strict_json import dump_json

if TYPE_CHECKING:
    from shardkit.storage.atomic import BufferedFile

__all__ = ["LOST", "MAX_KEPT", "REASONS", "Lost", "LostLog"]

LOST = "lost.jsonl"
"""File name of the list."""
MAX_KEPT = 10_000
"""Records that a result holds; the file has all of them."""

REASONS = {
    "missing-shard": "the shard is not there under any name",
    "truncated": "the shard ends before the sample does",
    "payload": "the image's bytes do not have the CRC-32C of the old index",
    "json": "the json member is not what the format says, or states another source or class",
    "image": "the image is not a whole JPEG, and there is no CRC-32C to say otherwise",
    "headers": "headers are damaged, and there is no index to do without them",
    "read-error": "the system failed to read the bytes",
    "duplicate": "an earlier sample has the same key",
    "index": "the old index's row is not one that a dataset can have",
    "members": "of a damaged tar of another tool: members of the sample stand apart, twice, or are refused",
    "too-large": "more bytes than --max-bytes",
}
"""Reason code to what it means; codes never change their meaning."""


@dataclass(frozen=True, slots=True)
class Lost:
    """A sample that is not in the repaired dataset; or, where no key could be read, a gap in a shard."""

    key: str | None
    """None for a gap in which no header names a sample."""
    shard: str
    """File name of the shard that it belonged to."""
    offset: int
    """Byte in the damaged file where it begins, or began."""
    reason: str
    """A key of `REASONS`."""
    detail: str
    """What was found, for a person; may change."""


class LostLog:
    """Counts what is lost, keeps the first records, and writes all of them to a file where there is one."""

    def __init__(self, file: BufferedFile | None, algorithm: str) -> None:
        """Start with nothing lost.

        Args:
            file: takes a line a record; stays its owner's. None writes nothing.
            algorithm: of the file's digest.
        """
        self.counts: Counter[str] = Counter()
        self.first: list[Lost] = []
        self._file = file
        self._digest = new_digest(algorithm)
        self._bytes = 0

    def add(self, lost: Lost) -> None:
        """Take a record."""
        self.counts[lost.reason] += 1
        if len(self.first) < MAX_KEPT:
            self.first.append(lost)
        line = dump_json(lost).encode() + b"\n"
        self._bytes += len(line)
        self._digest.update(line)
        if self._file is not None:
            self._file.write(line)

    @property
    def record(self) -> FileRecord:
        """Size and digest of the list."""
        return FileRecord(bytes=self._bytes, digest=self._digest.hexdigest())
