"""AIStore: `aistore.jsonl`, every member as an entry of a GetBatch request.

The cluster's own shard index cannot come from outside: it is bound to the checksum that the bucket computes, and is
used only where the cluster has marked the object. `ais bucket shard-index build` makes it.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from shardkit.exporting.foreign import require_names
from shardkit.exporting.table import ForeignFile, Table

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["aistore_files"]


def aistore_files(table: Table) -> Iterator[ForeignFile]:
    """Yield the one file.

    Raises:
        ConfigError: the name of a member of a foreign shard is not known.
    """
    yield ForeignFile("aistore.jsonl", _lines(table))


def _lines(table: Table) -> Iterator[bytes]:
    for number, shard in enumerate(table.manifest.shards):
        name = json.dumps(shard.name)
        yield "".join(f'{{"objname": {name}, "archpath": {member}}}\n' for member in _names(table, number)).encode()


def _names(table: Table, number: int) -> Iterator[str]:
    """Yield the members' names as JSON."""
    for sample in table.samples(number):
        if table.is_foreign:
            require_names("aistore", table.manifest.shards[number], sample)
            yield from (json.dumps(member.name) for member in sample.members)
        else:  # a safe key and an extension: nothing in it is escaped
            yield from (f'"{member.name}"' for member in sample.members)
