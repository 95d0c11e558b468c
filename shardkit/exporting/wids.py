"""wids: `shardindex.json`, the list of shards that `ShardListDataset` takes; one more a split.

`md5sum` is left out: the manifest has no MD5, and wids stores it without looking at it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardkit.exporting.table import ForeignFile, Table, json_file

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from shardkit.format.dataset_record import ShardRecord

__all__ = ["wids_files"]


def wids_files(table: Table) -> Iterator[ForeignFile]:
    """Yield the index of all shards, and that of each split that the manifest states."""
    name = table.manifest.name
    yield _index("shardindex.json", name, table.manifest.shards)
    if table.manifest.splits:
        for split, shards in table.splits().items():
            yield _index(f"shardindex-{split}.json", f"{name}-{split}", shards)


def _index(file: str, name: str, shards: Sequence[ShardRecord]) -> ForeignFile:
    listed = [{"url": shard.name, "nsamples": shard.samples, "filesize": shard.bytes} for shard in shards]
    return json_file(file, {"__kind__": "wids-shard-index-v1", "wids_version": 1, "name": name, "shardlist": listed})
