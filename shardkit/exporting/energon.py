"""Megatron-Energon 7: what `energon prepare` makes in its pass over every shard, and a `dataset.yaml`.

The layout is Energon's internal one and changes with its releases: `VERSION` says which was followed.
"""

from __future__ import annotations

import json
from array import array
from sys import byteorder
from typing import TYPE_CHECKING

from shardkit.errors import ConfigError, IntegrityError
from shardkit.exporting.foreign import cannot, require_names, require_no_files
from shardkit.exporting.kinds import kinds_by_split
from shardkit.exporting.table import DEFAULT_SPLIT, Database, ForeignFile, Table, json_file
from shardkit.format.dataset_record import brace_spec
from shardkit.format.grouping import sample_parts

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from shardkit.exporting.sample import ExportedSample

__all__ = ["VERSION", "energon_files"]

VERSION = "7.4.1"

_FOLDER = ".nv-meta/"
_SPLITS = (DEFAULT_SPLIT, "val", "test")
"""Energon asks for these by name and ends where one is not listed, if only as empty."""
_TABLES = (
    "CREATE TABLE samples (tar_file_id INTEGER NOT NULL, sample_key TEXT NOT NULL UNIQUE, "
    "sample_index INTEGER NOT NULL, byte_offset INTEGER, byte_size INTEGER)",
    "CREATE TABLE sample_parts (tar_file_id INTEGER, sample_index INTEGER, part_name TEXT, "
    "content_byte_offset INTEGER, content_byte_size INTEGER)",
)
_INDEXES = (
    "CREATE INDEX idx_samples_by_tar_and_idx ON samples(tar_file_id, sample_index)",
    "CREATE INDEX idx_sample_parts_seq ON sample_parts(tar_file_id, sample_index, content_byte_offset)",
    "CREATE INDEX idx_sample_parts_full ON sample_parts"
    "(tar_file_id, sample_index, part_name, content_byte_offset, content_byte_size)",
)
_SAMPLE = "INSERT INTO samples VALUES (?, ?, ?, ?, ?)"
_PART = "INSERT INTO sample_parts VALUES (?, ?, ?, ?, ?)"


def energon_files(table: Table) -> Iterator[ForeignFile]:
    """Yield an index a shard, then the folder `.nv-meta`.

    Raises:
        ConfigError: Energon would see other samples in a foreign shard.
    """
    starts = [_starts(table, number) for number in range(len(table.manifest.shards))]
    for shard, offsets in zip(table.manifest.shards, starts, strict=True):
        yield ForeignFile(f"{shard.name}.idx", _little_endian(offsets))
    yield ForeignFile(f"{_FOLDER}index.sqlite", Database(_TABLES, _rows(table, starts), _INDEXES, _repeated(table)))
    yield ForeignFile(f"{_FOLDER}index.uuid", [table.manifest.generation.encode()])
    yield ForeignFile(f"{_FOLDER}dataset.yaml", [_sample_type(table).encode()])
    yield ForeignFile(f"{_FOLDER}split.yaml", [_splits(table).encode()])
    counts = {shard.name: shard.samples for shard in table.manifest.shards}
    yield json_file(f"{_FOLDER}.info.json", {"energon_version": VERSION, "shard_counts": counts})


def _little_endian(offsets: array[int]) -> Iterator[bytes]:
    copy = offsets[:]
    if byteorder == "big":
        copy.byteswap()
    yield copy.tobytes()


def _rows(table: Table, starts: Sequence[array[int]]) -> Iterator[tuple[str, Iterable[Sequence[object]]]]:
    for shard in range(len(table.manifest.shards)):
        samples = list(table.samples(shard))
        # What lies between two samples belongs to the first.
        ends = starts[shard][1:]
        yield _SAMPLE, ((shard, s.key, i, s.start, ends[i] - s.start) for i, s in enumerate(samples))
        yield _PART, ((shard, i, m.extension, m.offset, m.size) for i, s in enumerate(samples) for m in s.members)


def _starts(table: Table, number: int) -> array[int]:
    """Return uint64 [n + 1]: where each sample starts, and where the last member of the shard ends."""
    starts = array("Q", table.starts(number))
    if table.is_foreign:
        samples = list(table.samples(number))
        _require_names(table, number, samples)
        between = table.between(number, samples)
        shard = table.manifest.shards[number]
        require_no_files("energon", shard, between, lambda name: sample_parts(name) is not None)
        starts[-1] = between.end
    return starts


def _require_names(table: Table, number: int, samples: Sequence[ExportedSample]) -> None:
    shard = table.manifest.shards[number]
    for sample in samples:
        require_names("energon", shard, sample)
        for member in sample.members:
            if "\n" in member.name:
                why = "Energon may pass over a name with a line break"
                raise cannot("energon", why, shard, member.name, sample.key)


def _repeated(table: Table) -> ConfigError | IntegrityError:
    if table.is_foreign:
        return ConfigError("no export for energon: it wants every key once, and one stands in several shards",
                           remedy="leave energon out of --to, or write other shards with shardkit convert")  # fmt: skip
    return IntegrityError("a key stands twice in the dataset", remedy="run shardkit verify")


def _sample_type(table: Table) -> str:
    """Return what Energon makes of a sample: an image and its label, or all members for the user's own cooker.

    The fields of a type are looked for under one extension in every sample.
    """
    kinds = [kind for found in kinds_by_split(table).values() for kind in found]
    unlabelled = any(batch.column("label").null_count for batch in table.batches)
    images = {kind.image for kind in kinds}
    if unlabelled or len(images) != 1 or any("cls" not in kind.extensions for kind in kinds):
        return "__module__: megatron.energon\n__class__: CrudeWebdataset\n"
    sample_type = "sample_type:\n  __module__: megatron.energon\n  __class__: ImageClassificationSample\n"
    return f"{sample_type}field_map:\n  image: {json.dumps(images.pop())}\n  label: cls\n"


def _splits(table: Table) -> str:
    splits = table.splits()
    lines = ["split_parts:"]
    for split in dict.fromkeys((*splits, *_SPLITS)):
        names = [shard.name for shard in splits.get(split, ())]
        # A JSON string is a YAML string; one brace expression for any number of shards.
        lines.append(f"  {json.dumps(split)}: [{json.dumps(brace_spec(names)) if names else ''}]")
    return "\n".join([*lines, "exclude: []", ""])
