"""timm: `_info.json`, the splits that its webdataset reader looks up in the folder of the shards."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardkit.exporting.table import ForeignFile, Table, json_file

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["timm_files"]


def timm_files(table: Table) -> Iterator[ForeignFile]:
    """Yield the one file."""
    splits = {
        split: {
            "name": split,
            "num_samples": sum(shard.samples for shard in shards),
            "filenames": [shard.name for shard in shards],
            "shard_lengths": [shard.samples for shard in shards],
        }
        for split, shards in table.splits().items()
    }
    yield json_file("_info.json", {"splits": splits})
