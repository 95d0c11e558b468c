"""The samples of one part, as shards are planned of them."""

from __future__ import annotations

import os
from collections import Counter
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from shardkit.converting.gather import InputShard, final_key, member_path
from shardkit.converting.labels import NO_LABEL
from shardkit.converting.members import MEMBER_SCHEMA, MemberOrigin
from shardkit.converting.selection import Ints, Selection, small_bytes
from shardkit.format.keys import path_from_source
from shardkit.packing.plan import Plan, arrange
from shardkit.running.spool import spans, spooled

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardkit.converting.gather import Gathered
    from shardkit.converting.options import ConvertOptions, KeyRule
    from shardkit.format.checksum import Digest
    from shardkit.packing.refusals import Refusal

__all__ = ["MemberSupply", "plan_part"]

_ROWS = 1 << 14
"""Samples that are Python objects at a time."""
_TAKEN = ("key", "source", "offset", "size", "crc32c", "json_offset", "json_size")
_TEXTS = ("key", "path", "source")
_NUMBERS = ("label", "size", "crc32c", "json_size")


def plan_part(samples: Gathered, selection: Selection, part: str | None, options: ConvertOptions) -> Plan:
    """Order the samples of a part and cut the order into shards.

    Raises:
        ConfigError: more shards than images are demanded.
        UnsafeError: more shards than a million.
        ShardkitError: the folder of `Gathered` cannot be written.
    """
    ids, folder = selection.parts[part], samples.folder
    size = spooled(np.int64, folder, (samples.numbers("size", ids[some]) for some in spans(len(ids))))
    small = spooled(np.int64, folder, (small_bytes(samples, selection, ids[some]) for some in spans(len(ids))))
    return arrange(size, small, options, folder)


class MemberSupply:
    """Selected samples of shards."""

    def __init__(self, samples: Gathered, selection: Selection, part: str | None, key: KeyRule) -> None:
        """Take the samples of a part and the rule of their keys."""
        self._samples = samples
        self._labels = selection.labels
        self._ids = selection.parts[part]
        self._key = key
        self.classes = selection.classes
        tables = tuple(shard.table for shard in samples.shards if shard.table is not None)
        trees = {shard.path: shard.tree.origin for shard in samples.shards if shard.tree is not None}
        self.origin = MemberOrigin(classes=selection.classes, tables=tables, trees=trees)
        self.schema = MEMBER_SCHEMA
        self.refused: list[Refusal] = list(selection.refused[part])
        self.skipped: Counter[str] = Counter()

    def a_file(self, least: int) -> bytes | None:
        """Return the first shard, or file of a tree, of so many bytes at least."""
        found = (_file_of(shard, least) for shard in self._samples.shards if shard.table is None)
        return next((path for path in found if path is not None), None)

    def batches(self, plan: Plan) -> Iterator[pa.RecordBatch]:
        """Yield the plan of each shard as one record batch of `MEMBER_SCHEMA`: the second pass over the index."""
        for first, last in pairwise(plan.bounds.tolist()):
            pieces = (self._ids[plan.order[at : min(at + _ROWS, last)]] for at in range(first, last, _ROWS))
            yield pa.Table.from_batches(map(self._rows, pieces), MEMBER_SCHEMA).combine_chunks().to_batches()[0]

    def _rows(self, ids: Ints) -> pa.RecordBatch:
        taken, numbers = self._samples.take(ids, _TAKEN)
        shards = [self._samples.shards[number] for number in numbers]
        labels = self._labels[ids].tolist()
        rows = list(zip(taken["key"], shards, ids.tolist(), strict=True))
        columns = {
            **taken,
            "key": [final_key(self._key, key, shard.path, number) for key, shard, number in rows],
            "label": [None if label == NO_LABEL else label for label in labels],
            "number": ids,
            "path": list(map(member_path, shards, taken["key"], taken["source"])),
            "shard": [shard.path for shard in shards],
            "shard_bytes": [shard.bytes for shard in shards],
            "mtime_ns": list(map(InputShard.mtime_of, shards, (ids - self._samples.starts[numbers]).tolist())),
            "crc32c": [crc if shard.checked else None for crc, shard in zip(taken["crc32c"], shards, strict=True)],
        }
        arrays = [pa.array(columns[field.name], field.type) for field in MEMBER_SCHEMA]
        return pa.RecordBatch.from_arrays(arrays, schema=MEMBER_SCHEMA)

    def update_identity(self, batch: pa.RecordBatch, full: Digest, portable: Digest) -> None:
        """Add a shard's plan to two digests: with the inputs' times and offsets, and without."""
        for first in range(0, batch.num_rows, _ROWS):
            part = batch.slice(first, _ROWS).to_pydict()
            texts = [b"\0".join(_bytes(text) for text in part[name]) for name in _TEXTS]
            numbers = [np.array([-1 if x is None else x for x in part[name]], "<i8").tobytes() for name in _NUMBERS]
            for data in (*texts, *numbers):
                for digest in (full, portable):
                    digest.update(b"%d:" % len(data) + data)
            for name in ("offset", "json_offset", "shard_bytes", "mtime_ns"):
                full.update(np.array(part[name], "<i8").tobytes())
            full.update(b"\0".join(os.path.basename(path) for path in part["shard"]))


def _file_of(shard: InputShard, least: int) -> bytes | None:
    if shard.tree is None:
        return shard.path if shard.bytes >= least else None
    large = np.flatnonzero(shard.rows.column("size").to_numpy() >= least)
    if not len(large):
        return None
    source = shard.rows.column("source")[int(large[0])].as_py()
    return os.path.join(shard.tree.origin.root, path_from_source(source))


def _bytes(text: str | bytes) -> bytes:
    return text.encode() if isinstance(text, str) else text
