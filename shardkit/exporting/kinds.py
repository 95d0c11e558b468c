"""Which members the samples have: for tools that take their columns from a few samples, or pass over some."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from shardkit.exporting.table import Table
    from shardkit.format.dataset_record import ShardRecord

__all__ = ["Kind", "kinds_by_split"]


class Kind(NamedTuple):
    """The samples of one shard whose members have the same extensions."""

    shard: ShardRecord
    row: int
    """Of the first of them, in its shard."""
    key: str
    """Of the first of them."""
    image: str
    """Extension of the member that is the image."""
    extensions: frozenset[str]
    """Of all members, the image's too, as the tar writes them."""


def kinds_by_split(table: Table) -> Mapping[str, Sequence[Kind]]:
    """Return the kinds of samples in each split, shard by shard, in the order in which they first stand there.

    Raises:
        IntegrityError: as `Table.samples`, for foreign shards.
    """
    find = _kinds_listed if table.is_foreign else _kinds_in_columns
    numbers = {shard.name: number for number, shard in enumerate(table.manifest.shards)}
    return {
        split: [kind for shard in shards for kind in find(table, numbers[shard.name])]
        for split, shards in table.splits().items()
    }


def _kinds_listed(table: Table, number: int) -> Iterator[Kind]:
    """Yield those of a foreign shard: its DALI index lists the members of every sample."""
    seen: set[tuple[str, ...]] = set()
    for row, sample in enumerate(table.samples(number)):
        found = (sample.image.extension, *[member.extension for member in sample.members])
        if found not in seen:
            seen.add(found)
            shard = table.manifest.shards[number]
            yield Kind(shard, row, sample.key, sample.image.extension, frozenset(found))


def _kinds_in_columns(table: Table, number: int) -> Iterator[Kind]:
    """Yield those of a shard of shardkit's: what may be missing there is a label or metadata."""
    batch, shard = table.batches[number], table.manifest.shards[number]
    labelled = batch.column("label").is_valid().to_pylist()
    described = (batch.column("json_offset").to_numpy() != 0).tolist()
    seen: set[tuple[bool, bool]] = set()
    for row, found in enumerate(zip(labelled, described, strict=True)):
        if found not in seen:
            seen.add(found)
            extensions = {"jpg", *itertools.compress(("cls", "json"), found)}
            yield Kind(shard, row, batch.column("key")[row].as_py(), "jpg", frozenset(extensions))
