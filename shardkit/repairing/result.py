"""What a repair found, proved, saved and lost."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias

from shardkit.errors import IntegrityError, SourceError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from shardkit.format.manifest import Manifest
    from shardkit.repairing.lost import Lost

__all__ = ["PROOFS", "RepairProgress", "RepairResult", "ShardOutcome", "State"]

State: TypeAlias = Literal["whole", "salvaged", "nothing", "missing"]
"""`whole`: the file is the shard, byte for byte as far as can be seen. `salvaged`: a new shard of its whole samples.
`nothing`: no whole sample was found. `missing`: there is no file."""

PROOFS = {
    "digest": "every byte proved by the shard's digest",
    "payloads": "payloads proved against the old index; json members only as they are",
    "json-damaged": "payloads proved against the old index; a json member is damaged, and nothing says which",
    "some-payloads": "payloads proved where the old index has them, others only as they are",
    "structure": "structure proved, payloads only as they are",
    "none": "nothing is left to prove",
}
"""Code to what was proved of the samples that are kept. Codes never change their meaning."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardOutcome:
    """What became of one shard."""

    name: str
    """File name of the shard."""
    file: bytes | None
    """Name of the file that held it; None when it is missing."""
    state: State
    proof: str
    """A key of `PROOFS`."""
    samples: int = 0
    """Samples that are kept."""
    lost: int = 0
    """Records in the list of losses."""
    bytes: int = 0
    """Size of the shard as it is now."""
    without_source: int = 0
    """Samples whose original path nobody knows any more."""


class RepairProgress(Protocol):
    """Told how far a repair has come; called from any thread, one call at a time."""

    def begin(self, total: int) -> None:
        """Take the bytes to go through, once."""

    def advance(self, count: int) -> None:
        """Take the bytes gone through since the last call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RepairResult:
    """What a repair did, or, as a dry run, would do."""

    shards: Sequence[ShardOutcome]
    counts: Mapping[str, int]
    """Reason -> lost samples and gaps."""
    first: Sequence[Lost] = field(default_factory=tuple)
    """The first 10,000 of them; `lost.jsonl` has all."""
    notes: Sequence[str] = ()
    """What was wrong beside the shards, and what was left alone."""
    rejected_lost: bool = False
    """The list of the sources that the pack refused is damaged: nothing can make it again."""
    written: Sequence[str] = ()
    """Names of the files that were written; empty for a dry run, or when nothing was missing."""
    manifest: Manifest | None = None
    """Of the repaired dataset; None for a dry run, for tars of another tool, or when nothing could be saved."""

    @property
    def lost(self) -> int:
        """Lost samples, and gaps that nothing names."""
        return sum(self.counts.values())

    @property
    def exit_code(self) -> int:
        """4 when nothing could be saved from a shard; 3 when something was lost, or is known to be damaged; else 0."""
        if any(shard.state in ("nothing", "missing") for shard in self.shards):
            return IntegrityError.exit_code
        damaged = any(shard.proof == "json-damaged" for shard in self.shards)
        return SourceError.exit_code if self.counts or self.rejected_lost or damaged else 0
