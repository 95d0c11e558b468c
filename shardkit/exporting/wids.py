"""wids: `shardindex.json`, the list of shards that `ShardListDataset` takes; one more a split.

`md5sum` is left out: the manifest has no MD5, and wids stores it without looking at it.

wids takes name and size of a member from the fields of its own header, and passes over extended ones. Every file with a
dot in its name is one of a sample to it. Its index only counts samples: where it would count others, it would hand out
wrong ones.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardkit.exporting.foreign import cannot, require_names, require_no_files
from shardkit.exporting.table import ForeignFile, Table, json_file

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from shardkit.format.dataset_record import ShardRecord

__all__ = ["wids_files"]

_NAME_BYTES = 100


def wids_files(table: Table) -> Iterator[ForeignFile]:
    """Yield the index of all shards, and that of each split that the manifest states.

    Raises:
        ConfigError: wids would see other samples in a foreign shard.
    """
    for number in range(len(table.manifest.shards)) if table.is_foreign else ():
        _require_same_samples(table, number)
    name = table.manifest.name
    yield _index("shardindex.json", name, table.manifest.shards)
    if table.manifest.splits:
        for split, shards in table.splits().items():
            yield _index(f"shardindex-{split}.json", f"{name}-{split}", shards)


def _require_same_samples(table: Table, number: int) -> None:
    shard = table.manifest.shards[number]
    samples = list(table.samples(number))
    for sample in samples:
        require_names("wids", shard, sample)
        for member in sample.members:
            if len(member.name) > _NAME_BYTES or not member.name.isascii() or "\n" in member.name:
                why = f"wids reads names of up to {_NAME_BYTES} ASCII characters in one line"
                raise cannot("wids", why, shard, member.name, sample.key)
    between = table.between(number, samples)
    require_no_files("wids", shard, between, lambda name: "." in name)
    if between.restated is not None:
        why = "wids does not look at the extended header that gives a member another name or size"
        raise cannot("wids", why, shard, between.restated)


def _index(file: str, name: str, shards: Sequence[ShardRecord]) -> ForeignFile:
    listed = [{"url": shard.name, "nsamples": shard.samples, "filesize": shard.bytes} for shard in shards]
    return json_file(file, {"__kind__": "wids-shard-index-v1", "wids_version": 1, "name": name, "shardlist": listed})
