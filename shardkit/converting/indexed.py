"""Whether the shards of a dataset are those that its index speaks of."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from shardkit.errors import FormatError, IntegrityError, ShortReadError, UnsafeError
from shardkit.indexing.scan import digest_of_members

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pyarrow as pa

    from shardkit.format.manifest import Manifest, ShardRecord

__all__ = ["check_numbers", "doubt_about"]

_PLACES = ("offset", "size", "json_offset", "json_size")


def doubt_about(file: str, size: int, record: ShardRecord, manifest: Manifest) -> IntegrityError | None:
    """Return what shows that a shard is not the one that was indexed.

    Without checksums its headers tell: an image of the same size in another's place would get that one's label.
    """
    if size != record.bytes:
        return IntegrityError(
            "a shard has another size than the manifest says", expected=f"{record.bytes} bytes", found=f"{size} bytes",
            remedy="--on-error skip takes what is whole of it",
        )  # fmt: skip
    if manifest.has_checksums:
        return None
    expected = f"members of digest {record.digest}"
    try:
        digest = digest_of_members(file, manifest.digest_algorithm)
        found = None if digest == record.digest else digest
    except (FormatError, IntegrityError, ShortReadError, UnsafeError) as error:
        found = error.what
    if found is None:
        return None
    remedy = "index it again: shardkit index --overwrite"
    return IntegrityError("a shard is not the one that was indexed", expected=expected, found=found, remedy=remedy)


def check_numbers(path: str, batch: pa.RecordBatch, size: int, classes: Sequence[str] | None) -> None:
    """Refuse an index whose rows lead out of their shard, or to a class that is not there."""
    columns = {name: batch.column(name).to_numpy(zero_copy_only=False) for name in _PLACES}
    wrong = np.zeros(batch.num_rows, bool)
    for start, length in (("offset", "size"), ("json_offset", "json_size")):
        left = np.uint64(size) - np.minimum(columns[start], np.uint64(size))
        wrong |= (columns[start] > size) | (columns[length] > left)
    labels = batch.column("label")
    numbers = labels.fill_null(0).to_numpy(zero_copy_only=False)
    known = len(classes) if classes is not None else 1 << 31
    wrong |= ((numbers < 0) | (numbers >= known)) & labels.is_valid().to_numpy(zero_copy_only=False)
    if wrong.any():
        row = int(wrong.argmax())
        raise IntegrityError(
            "a row of the index leads out of its shard, or to a class that is not there", path=path,
            key=batch.column("key")[row].as_py(), remedy="run shardkit verify, then shardkit repair",
        )  # fmt: skip
