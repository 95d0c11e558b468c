"""What an export starts from: the manifest, and the index rows of each shard as its members.

Foreign shards have members that no column names: they are in the DALI index beside the shard (`exporting.foreign`).
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardkit.errors import UnsafeError
from shardkit.escaping import escape
from shardkit.exporting.between import Between
from shardkit.exporting.foreign import foreign_samples, load_index
from shardkit.exporting.sample import ExportedSample, outside, wrong
from shardkit.format.dali_index import IndexedMember
from shardkit.format.keys import is_safe_key
from shardkit.format.tar import BLOCK

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from shardkit.errors import ShardkitError
    from shardkit.format.dataset_record import Manifest, ShardRecord
    from shardkit.format.index import RecordBatch

__all__ = ["DEFAULT_SPLIT", "Database", "ForeignFile", "Table", "json_file"]

DEFAULT_SPLIT = "train"
"""The one split of a dataset whose manifest has none, and that is no part of a split."""

_SPLIT = re.compile(r"[A-Za-z0-9_]{1,64}")
_NUMBERS = ("sample_offset", "sample_size", "json_offset", "json_size", "offset", "size")


@dataclass(frozen=True, slots=True)
class Database:
    """An SQLite file to be made: tables, rows, then indexes, which are built faster over rows that are there."""

    tables: Sequence[str]
    """Statements that make the tables."""
    rows: Iterable[tuple[str, Iterable[Sequence[object]]]]
    """Statements that insert, each with its rows; walked once, one shard in memory at a time."""
    indexes: Sequence[str]
    """Statements that make the indexes."""
    repeated: ShardkitError
    """Raised when a row repeats what must be there once."""


@dataclass(frozen=True, slots=True)
class ForeignFile:
    """One file of another tool's format."""

    name: str
    """Relative to the folder of the shards, with `/`."""
    content: Iterable[bytes] | Database
    """Its bytes in order; walked once."""


@dataclass(frozen=True, slots=True)
class Table:
    """The one table that every format is made from."""

    folder: str
    """Of the dataset."""
    manifest: Manifest
    batches: Sequence[RecordBatch]
    """Checked rows, a batch a shard, in the manifest's order."""

    def between(self, number: int, samples: Iterable[ExportedSample]) -> Between:
        """Return what lies between the members of a foreign shard, whose `samples` are given."""
        shard = self.manifest.shards[number]
        listed = (member for sample in samples for member in sample.members)
        return Between(os.path.join(self.folder, shard.name), listed, shard.bytes)

    @property
    def is_foreign(self) -> bool:
        """Whether another tool made the shards."""
        return self.manifest.layout == "foreign"

    def splits(self) -> Mapping[str, Sequence[ShardRecord]]:
        """Return the shards of each split; all are one where the manifest has no splits: the part, or `train`.

        Raises:
            UnsafeError: a split whose name cannot be part of a file name everywhere.
        """
        part = self.manifest.options.get("part")
        # A conversion's parts may have a "-" in their names, which Hugging Face's splits may not.
        whole = DEFAULT_SPLIT if part is None else str(part).replace("-", "_")
        for split in self.manifest.splits or (whole,):
            if not _SPLIT.fullmatch(split):
                raise UnsafeError(
                    "a split's name goes into file names", expected="1 to 64 of A-Z a-z 0-9 _", found=escape(split)
                )
        if not self.manifest.splits:
            return {whole: self.manifest.shards}
        records = {shard.name: shard for shard in self.manifest.shards}
        return {split: [records[name] for name in names] for split, names in self.manifest.splits.items()}

    def starts(self, number: int) -> list[int]:
        """Return where each sample of one shard starts, and where the last one ends; without a look at its members."""
        batch = self.batches[number]
        starts: list[int] = batch.column("sample_offset").to_numpy().tolist()
        return [*starts, starts[-1] + int(batch.column("sample_size")[-1].as_py())] if starts else [0]

    def samples(self, number: int) -> Iterator[ExportedSample]:
        """Yield the samples of one shard, in stored order.

        Raises:
            IntegrityError: a key that some reader would misread, a member outside its shard, or a DALI index that is
                not the manifest's.
        """
        batch, shard = self.batches[number], self.manifest.shards[number]
        if self.is_foreign:
            yield from foreign_samples(shard, batch, load_index(self.folder, self.manifest, shard))
            return
        numbers = [batch.column(name).to_numpy().tolist() for name in _NUMBERS]
        labels = batch.column("label").to_pylist()
        end = 0
        for key, label, start, size, *places in zip(batch.column("key").to_pylist(), labels, *numbers, strict=True):
            members = _members(key, label, start, *places)
            if start < end or outside(members, start, start + size):
                raise wrong(shard, key, "a member that lies outside its sample")
            if not is_safe_key(key):
                raise wrong(shard, key, "a key that some reader would misread")
            end = start + size
            yield ExportedSample(key, start, end, members, members[-1])
        if end > shard.bytes:
            raise wrong(shard, shard.last_key, "a sample that lies outside its shard")


def _members(
    key: str, label: int | None, start: int, json_offset: int, json_size: int, offset: int, size: int
) -> list[IndexedMember]:
    members = []
    if label is not None:
        members.append(IndexedMember("cls", start + BLOCK, len(str(label)), f"{key}.cls"))
    if json_offset:
        members.append(IndexedMember("json", json_offset, json_size, f"{key}.json"))
    members.append(IndexedMember("jpg", offset, size, f"{key}.jpg"))
    return members


def json_file(name: str, document: Mapping[str, object]) -> ForeignFile:
    """Return a JSON file with the fields in their order."""
    return ForeignFile(name, [json.dumps(document, indent=1).encode() + b"\n"])
