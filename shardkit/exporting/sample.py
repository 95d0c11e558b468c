"""One sample as a format describes it, and what an index cannot mean by it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardkit.errors import IntegrityError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardkit.format.dali_index import IndexedMember
    from shardkit.format.dataset_record import ShardRecord

__all__ = ["ExportedSample", "outside", "wrong"]


@dataclass(frozen=True, slots=True)
class ExportedSample:
    """One sample as it lies in its shard."""

    key: str
    start: int
    """First byte of its first header."""
    end: int
    """First byte after its last block."""
    members: Sequence[IndexedMember]
    """In stored order."""
    image: IndexedMember
    """That of the members which is the image."""


def outside(members: Sequence[IndexedMember], start: int, end: int) -> bool:
    """Tell whether a member lies outside the bytes of its sample."""
    return any(one.offset < start or one.offset + one.size > end for one in members)


def wrong(shard: ShardRecord, key: str, what: str) -> IntegrityError:
    """Return the error of an index that has `what`."""
    return IntegrityError(f"the index has {what}", path=shard.name, key=key, remedy="run shardkit verify")
