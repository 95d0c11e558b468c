"""open_clip: `sizes.json`, which says how many samples each shard beside it holds."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardkit.exporting.table import ForeignFile, Table, json_file

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["openclip_files"]


def openclip_files(table: Table) -> Iterator[ForeignFile]:
    """Yield the one file."""
    yield json_file("sizes.json", {shard.name: shard.samples for shard in table.manifest.shards})
