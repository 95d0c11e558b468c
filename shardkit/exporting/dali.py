"""DALI: the text index of each shard, as `pack` writes it and as DALI's own `wds2idx` makes it."""

from __future__ import annotations

from typing import TYPE_CHECKING

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
    yield encode_dali_index(sample.members for sample in table.samples(number))
