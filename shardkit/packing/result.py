"""What a pack would do, what it did, and how far it is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Sequence

    from shardkit.format.manifest import Manifest
    from shardkit.packing.refusals import Refusal

__all__ = ["PackPlan", "PackProgress", "PackResult"]


class PackProgress(Protocol):
    """Told how far a pack has come; called in the caller's thread."""

    def begin(self, samples: int, source_bytes: int) -> None:
        """Take what there is to do, once, when the plan is made."""

    def advance(self, samples: int, source_bytes: int, refused: int) -> None:
        """Take what was done since the last call; `samples` counts refused ones too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackPlan:
    """What a pack would do."""

    name: str
    samples: int
    payload: int
    """Bytes of all images."""
    bytes: Sequence[int]
    """Size of each shard, if nothing is refused or re-encoded."""
    counts: Sequence[int]
    """Samples in each shard."""
    classes: Sequence[str] | None
    """Class names; None where there are none."""
    labelled: int
    """Samples that have a label."""
    empty_classes: Sequence[str]
    """Names of the classes that no sample has."""
    keys: Sequence[tuple[str, str]]
    """The first few keys with their sources."""
    refused: Sequence[Refusal]
    skipped: Counter[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class PackResult:
    """What a pack did."""

    manifest: Manifest
    refused: Counter[str]
    """Reason code to number of sources."""
    skipped: Counter[str]
    """Kind to number of entries that were no images by name."""
    kept: int
    """Shards that an earlier, interrupted run had finished."""
    made_payload: int
    """Bytes of the images that this run packed."""
    labelled: int
    """Samples that have a label."""
    empty_classes: Sequence[str]
    """Names of the classes that no sample has."""
    shared_bytes: int = 0
    """Those of them that are blocks of their sources and were not written: `--reflink`."""
