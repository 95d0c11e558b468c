"""What an extraction did, what it could not do, and how far it is."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from shardkit.errors import SourceError

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["MAX_KEPT", "REASONS", "ExtractProgress", "ExtractResult", "Failure", "Tally"]

MAX_KEPT = 10_000
"""Failures that are listed; all are counted."""

REASONS = {
    "damaged": "the image's bytes do not have the CRC-32C of their row, the row points outside its shard, or the index "
    "has no checksums and the headers before the image say something else",
    "read-error": "the system failed to read the shard there",
    "unsafe-name": "its name would lead out of the target, or no file can have it",
    "same-name": "an earlier sample has the same name",
    "occupied": "the target holds another file, a link or a folder under that name",
}
"""Why a sample is not extracted. Codes never change their meaning."""


class ExtractProgress(Protocol):
    """Told how far an extraction has come; called in the caller's thread."""

    def begin(self, samples: int, payload: int) -> None:
        """Take what there is to do, once."""

    def advance(self, samples: int, payload: int) -> None:
        """Take what was done since the last call; failed samples count, too."""


@dataclass(frozen=True, slots=True)
class Failure:
    """A sample that was left out."""

    key: str
    reason: str
    """A key of `REASONS`."""
    message: str
    """The one line of the error; names in it are escaped."""


@dataclass(slots=True)
class Tally:
    """Counts of a running extraction. Threads share it."""

    made: int = 0
    """Files that were written."""
    made_bytes: int = 0
    shared_bytes: int = 0
    """Those of them that are blocks of the shard."""
    kept: int = 0
    """Files that were there already, with the right bytes."""
    counts: Counter[str] = field(default_factory=Counter)
    """Reason -> samples left out."""
    failures: dict[int, Failure] = field(default_factory=dict)
    """Sample number -> failure: the first ones that were met, at most `MAX_KEPT`."""
    failed: set[int] = field(default_factory=set)
    """Every sample that was left out."""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, size: int, shared: int | None) -> None:
        """Count a file that is whole: so many of its bytes are blocks of the shard, or None for one that was there."""
        with self._lock:
            if shared is None:
                self.kept += 1
            else:
                self.made += 1
                self.made_bytes += size
                self.shared_bytes += shared

    def fail(self, row: int, failure: Failure) -> None:
        """Count a sample that is left out."""
        with self._lock:
            self.counts[failure.reason] += 1
            self.failed.add(row)
            if len(self.failures) < MAX_KEPT:
                self.failures[row] = failure


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtractResult:
    """What an extraction did; equal datasets and targets give equal results."""

    samples: int
    """Samples that were asked for."""
    checksums: bool
    """Whether each image was held against its CRC-32C; else, as the index has none, its headers against the index."""
    made: int
    made_bytes: int
    shared_bytes: int
    """Those of them that are blocks of the shards and were not written: `--reflink`."""
    kept: int
    """Files that an earlier run had written."""
    folders: int
    """Folders below the target that hold a file of it."""
    renamed: int
    """Samples that are not called by their source, or not byte for byte."""
    unstated: int
    """Samples with a label whose path does not begin with their class."""
    counts: Mapping[str, int]
    """Reason -> samples left out, in alphabetical order."""
    failures: tuple[Failure, ...]
    """At most `MAX_KEPT`, in stored order."""

    @property
    def failed(self) -> int:
        """Samples that were left out."""
        return sum(self.counts.values())

    @property
    def exit_code(self) -> int:
        """0 when every sample is a file; 3 when some were left out."""
        return SourceError.exit_code if self.counts else 0
