"""What an indexing run did, and how far it is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections import Counter

    from shardkit.format.manifest import Manifest

__all__ = ["IndexProgress", "IndexResult"]


class IndexProgress(Protocol):
    """Told how far a run has come; called from any thread, one call at a time."""

    def begin(self, shards: int, shard_bytes: int) -> None:
        """Take what there is to do, once; what an earlier run has finished is not counted."""

    def advance(self, shards: int, shard_bytes: int) -> None:
        """Take what was done since the last call; bytes that were passed over count as well."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexResult:
    """What an indexing run did."""

    manifest: Manifest
    folder: str
    """Absolute path of the dataset's folder."""
    refused: Counter[str]
    """Reason code to number of lines in `rejected.jsonl`."""
    by_shard: dict[str, Counter[str]]
    """The same, by the shard's file name."""
    kept: int
    """Shards that an earlier, interrupted run had finished."""
    left_out: int
    """Shards without a sample that can be used."""
    unlabelled: int
    """Samples without a label."""
    odd_images: int
    """Samples whose image is no whole JPEG although it begins like one."""
    odd_metadata: int
    """Samples whose json member is not one JSON object."""
    changed: tuple[str, ...] = ()
    """Names of the shards that were indexed although their bytes are not those of the index that was replaced."""
    uncompared: str | None = None
    """Why the shards were not held against the index that was replaced; None when they were, or there was none."""
