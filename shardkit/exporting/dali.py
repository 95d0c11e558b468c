"""DALI: the text index of each shard, as `pack` writes it and as DALI's own `wds2idx` makes it.

Foreign shards have theirs since they were indexed; only that has all their members.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardkit.exporting.foreign import foreign_samples, load_index
from shardkit.exporting.table import ForeignFile, Table
from shardkit.format.dali_index import encode_dali_index

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["dali_files"]


def dali_files(table: Table) -> Iterator[ForeignFile]:
    """Yield a file a shard."""
    for number, shard in enumerate(table.manifest.shards):
        yield ForeignFile(f"{shard.stem}.idx", _text(table, number))


def _text(table: Table, number: int) -> Iterator[bytes]:
    if table.is_foreign:
        shard = table.manifest.shards[number]
        index = load_index(table.folder, table.manifest, shard)
        for _ in foreign_samples(shard, table.batches[number], index):
            pass  # an index that does not fit its shard would give other bytes, without an error
        yield index.data
        return
    yield encode_dali_index(sample.members for sample in table.samples(number))
