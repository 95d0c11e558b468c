"""What a verification found: findings with a stable code and a place, counted, and the exit code they mean."""

from __future__ import annotations

import dataclasses
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from shardkit.errors import IntegrityError, StorageError
from shardkit.escaping import escape

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

__all__ = ["CODES", "LEVELS", "MAX_KEPT", "TROUBLE", "Finding", "FindingLog", "Level", "ReadPath", "Report"]

Level = Literal["index", "structure", "checksum", "decode"]
LEVELS: tuple[Level, ...] = ("index", "structure", "checksum", "decode")
"""From the cheapest to the most thorough; each includes those before it."""

ReadPath = Literal["direct", "page cache", "mixed", "none"]

MAX_KEPT = 10_000
"""Findings that a report keeps; all are counted."""

CODES: Mapping[str, str] = {
    "no-manifest": "the folder has no manifest.json: it is not a complete dataset",
    "manifest": "manifest.json is not what was written",
    "missing-file": "a file that belongs to the dataset is not there",
    "extra-file": "a shard, an index or a list of refusals that the manifest does not name",
    "not-a-file": "a folder, FIFO, socket or device under the name of a file",
    "file-size": "a file beside the shards is longer or shorter than the manifest says",
    "file-digest": "a file beside the shards is not the one whose digest the manifest states",
    "rejected-lines": "rejected.jsonl does not have as many lines as the manifest counts refusals",
    "index-format": "a shard's index, or index.arrow, cannot be decoded",
    "index-header": "a shard's index was made for other bytes, or for another shard",
    "shard-name": "a shard is not called NAME-NUMBER.tar, or the numbers do not rise",
    "row-geometry": "the rows of an index do not cover their shard from its first byte to its end blocks",
    "key-unsafe": "a key that some reader would misread",
    "key-duplicate": "a key that stands twice in the dataset",
    "label-range": "a label that is not the number of a class",
    "source-text": "a source that is not written as the format says",
    "shard-record": "what the manifest says about a shard is not what its index adds up to",
    "dali-index": "the text index of DALI is not the one that the rows give",
    "dataset-index": "index.arrow does not hold the rows of the shards' indexes",
    "no-rows": "no whole index of this shard is left: it cannot be checked sample by sample",
    "shard-size": "a shard is longer or shorter than its record says",
    "header": "a tar header is not the canonical one for this member",
    "cls": "a cls member does not hold its sample's label",
    "json": "a json member is not one JSON object, or states another source or class than its row",
    "padding": "padding that is not what the format writes there",
    "tar": "a foreign shard is no whole tar any more",
    "members": "a foreign shard does not hold the members that its rows state",
    "end": "the end blocks of a shard, or the zeros after them, are not zero",
    "payload": "an image's bytes do not have the CRC-32C of their row",
    "shard-digest": "a shard's bytes do not have their digest, and no other check saw where",
    "facts": "an image is not what its row says about size, coding or orientation",
    "bomb": "an image declares more pixels than Pillow agrees to decode",
    "decode": "Pillow fails to decode an image, or warns",
    "read-error": "the system failed to read a file; what was not read is not proven",
    "changed": "a file changed while it was verified; nothing is said about it",
}
"""Every code of a finding, and what it means. Codes never change their meaning."""

TROUBLE = frozenset({"read-error", "changed"})
"""Codes that say nothing about damage: the bytes could not be judged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One fact that should not be."""

    code: str
    """A key of `CODES`."""
    file: str
    """File name inside the dataset's folder that `offset` counts in."""
    message: str
    """What is wrong, in words; names in it are escaped."""
    shard: str | None = None
    """File name of the shard that is concerned; None for the whole dataset."""
    offset: int | None = None
    """Byte in `file`: the first wrong one where that is known, else the start of the region."""
    region: str = "file"
    """The part of the file: `file`, `rows`, `header`, `cls`, `json`, `padding`, `payload` or `end`."""
    key: str | None = None
    """Key of the sample that is concerned, as its row states it."""
    expected: str | int | None = None
    found: str | int | None = None

    @property
    def damage(self) -> bool:
        """True when the bytes are wrong; False when they could not be judged."""
        return self.code not in TROUBLE

    def __str__(self) -> str:
        """Return one line for a terminal: code, place, what is wrong, expected, found."""
        offset = "" if self.offset is None else f":{self.offset}"
        key = "" if self.key is None else f" [sample {escape(self.key)}]"
        text = f"{self.code}: {escape(self.file)}{offset}{key} {self.region}: {self.message}"
        if self.expected is not None:
            text += f"; expected {self.expected}"
        return text if self.found is None else f"{text}; found {self.found}"


class FindingLog:
    """Findings as they come: all of them counted, the first ones kept."""

    def __init__(self, notify: Callable[[Finding], object] | None = None, kept: int = MAX_KEPT) -> None:
        """Start empty.

        Args:
            notify: called with each finding that is kept.
            kept: how many stay in memory.
        """
        self._notify = notify
        self._kept = kept
        self.counts: Counter[str] = Counter()
        self.findings: list[Finding] = []

    def add(self, finding: Finding) -> None:
        """Count a finding, and keep it while there is room."""
        self.counts[finding.code] += 1
        if len(self.findings) < self._kept:
            self.findings.append(finding)
            if self._notify is not None:
                self._notify(finding)

    def extend(self, findings: Iterable[Finding]) -> None:
        """Add each finding of an iterator as it comes."""
        for finding in findings:
            self.add(finding)

    def absorb(self, other: FindingLog) -> None:
        """Add the counts of another log, and its findings while there is room; each of those is told to `notify`."""
        self.counts += other.counts
        room = other.findings[: self._kept - len(self.findings)]
        self.findings += room
        if self._notify is not None:
            for finding in room:
                self._notify(finding)

    @property
    def total(self) -> int:
        """Number of all findings, kept or not."""
        return self.counts.total()


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The outcome of one verification; equal datasets, levels and read paths give equal reports."""

    dataset: str
    """Path as it was given."""
    level: Level
    generation: str | None
    """Of the manifest; None without a usable one."""
    shards: int
    """Shards that were looked at."""
    samples: int
    """Rows in their indexes."""
    bytes_read: int
    read_path: ReadPath
    """How the bytes came: `direct` past the page cache, `page cache`, `mixed`, or `none` were read."""
    findings: tuple[Finding, ...]
    """The first `MAX_KEPT`: those of the whole dataset, then shard by shard in stored order."""
    counts: Mapping[str, int]
    """Code to number of findings, kept or not; codes in alphabetical order."""
    checksums: bool = True
    """False for foreign shards that were indexed without: then no level proves the bytes of an image."""

    @property
    def exit_code(self) -> int:
        """0 when all is proven; 4 when there is damage; 6 when some bytes could not be read and the rest is right."""
        if any(code not in TROUBLE for code in self.counts):
            return IntegrityError.exit_code
        return StorageError.exit_code if self.counts else 0

    @property
    def total_findings(self) -> int:
        """Number of all findings, kept or not."""
        return sum(self.counts.values())

    def to_json(self) -> dict[str, Any]:
        """Return JSON values; the schema is in docs/verify.md."""
        return {
            "dataset": self.dataset,
            "level": self.level,
            "generation": self.generation,
            "exit_code": self.exit_code,
            "shards": self.shards,
            "samples": self.samples,
            "bytes_read": self.bytes_read,
            "read_path": self.read_path,
            "checksums": self.checksums,
            "total_findings": self.total_findings,
            "counts": dict(self.counts),
            "findings": [dataclasses.asdict(finding) for finding in self.findings],
        }
