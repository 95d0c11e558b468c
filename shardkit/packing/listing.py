"""The files that name a dataset's shards, written when all shards are there: refusals, index, manifest."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardkit.errors import IntegrityError
from shardkit.format.checksum import hex_digest
from shardkit.format.dataset_record import DATASET_INDEX, REJECTED
from shardkit.format.index import decode_shard_index
from shardkit.format.manifest import FileRecord, Manifest, Totals
from shardkit.packing.refusals import encode_refusals
from shardkit.running.dataset_index import write_index_file
from shardkit.storage.atomic import commit, os_errors, remove, replace_file

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy as np
    import numpy.typing as npt

    from shardkit.format.index import RecordBatch
    from shardkit.format.manifest import ShardRecord
    from shardkit.packing.labels import LabelCount
    from shardkit.packing.record import PackRecord
    from shardkit.packing.refusals import Refusal
    from shardkit.packing.target import Target

__all__ = ["count_labels", "make_manifest", "write_index", "write_refusals"]


def write_refusals(target: Target, refused: Sequence[Refusal], algorithm: str) -> FileRecord | None:
    """Write `rejected.jsonl`; return its record, or None when nothing was refused: then there is no such file."""
    path = target.path(REJECTED)
    if not refused:
        remove(path)
        return None
    data = encode_refusals(refused)
    replace_file(path, data, target.temporary(REJECTED))
    return FileRecord(bytes=len(data), digest=hex_digest(algorithm, data))


def write_index(target: Target, shards: Sequence[ShardRecord], algorithm: str, labels: LabelCount) -> FileRecord:
    """Write `index.arrow` from the shards' indexes, one after the other; return its record. All labels are counted.

    Raises:
        IntegrityError: a shard's index is not what was written.
    """

    def counted() -> Iterator[RecordBatch]:
        for rows in _rows(target, shards, algorithm):
            labels.see(_labels(rows))
            yield rows

    temporary = target.temporary(DATASET_INDEX)
    record = write_index_file(temporary, counted(), algorithm)
    commit([(temporary, target.path(DATASET_INDEX))])
    return record


def count_labels(target: Target, shards: Sequence[ShardRecord], algorithm: str, labels: LabelCount) -> None:
    """Count all labels, as the shards' indexes say.

    Raises:
        IntegrityError: a shard's index is not what was written.
    """
    for rows in _rows(target, shards, algorithm):
        labels.see(_labels(rows))


def _labels(rows: RecordBatch) -> npt.NDArray[np.int32]:
    found: npt.NDArray[np.int32] = rows.column("label").drop_null().to_numpy()
    return found


def make_manifest(
    record: PackRecord, shards: Sequence[ShardRecord], index: FileRecord, rejected: FileRecord | None, refused: int
) -> Manifest:
    """Return the manifest of a pack that was told `record` and has refused that many sources."""
    size, payload = sum(s.bytes for s in shards), sum(s.payload for s in shards)
    padding = sum(s.padding for s in shards)
    options = record.options
    return Manifest(
        shardkit=record.shardkit, name=options["name"], align=options["align"], digest_algorithm=options["digest"],
        seed=options["seed"], options=options, classes=record.classes, index=index, rejected=rejected, shards=shards,
        totals=Totals(
            shards=len(shards), samples=sum(s.samples for s in shards), payload=payload,
            headers=size - payload - padding, padding=padding, bytes=size, refused=refused,
        ),
    )  # fmt: skip


def _rows(target: Target, shards: Sequence[ShardRecord], algorithm: str) -> Iterator[RecordBatch]:
    return (decode_shard_index(_read_index(target, shard, algorithm)).rows for shard in shards)


def _read_index(target: Target, record: ShardRecord, algorithm: str) -> bytes:
    path = target.path(record.stem + ".arrow")
    with os_errors("cannot read a shard's index", path), open(path, "rb") as file:
        data = file.read()
    found = hex_digest(algorithm, data)
    if found != record.index.digest:
        raise IntegrityError("a shard's index changed while the dataset was packed", path=path,
                             expected=record.index.digest, found=found, remedy="run again with --resume")  # fmt: skip
    return data
