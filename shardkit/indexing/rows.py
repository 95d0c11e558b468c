"""A shard's content as index rows and index files, and what of it is refused."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from shardkit.errors import FormatError, UnsafeError
from shardkit.format.checksum import hex_digest
from shardkit.format.dataset_record import FileRecord, ShardRecord
from shardkit.format.index import IndexHeader, encode_shard_index
from shardkit.format.tar import BLOCK
from shardkit.indexing.passes import ShardContent, read_shard
from shardkit.indexing.refusals import IndexRefusal, member_refusal, shard_refusal
from shardkit.indexing.shard_rows import sample_labels, sample_refusals, shard_rows
from shardkit.storage.atomic import BufferedFile

if TYPE_CHECKING:
    from collections.abc import Callable

    from shardkit.indexing.inputs import ShardFile
    from shardkit.indexing.options import IndexOptions

__all__ = ["ShardOutcome", "index_shard"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardOutcome:
    """What became of a shard."""

    record: ShardRecord | None
    """None when no sample of it can be used: then there are no index files."""
    mtime_ns: int
    """Of the shard as it was read."""
    refused: list[IndexRefusal] = field(default_factory=list)
    """In stored order."""
    unlabelled: int = 0
    """Rows without a label."""
    odd_images: int = 0
    """Rows whose image is a JPEG without its end, or with bytes that are none; they are rows all the same."""
    odd_metadata: int = 0
    """Rows whose json member is not one JSON object, so that it is no metadata."""
    error: FormatError | UnsafeError | None = field(default=None, compare=False)
    """Why the shard as a whole was refused; None after a resume, too."""


def index_shard(
    shard: ShardFile, options: IndexOptions, temporary: Callable[[str], bytes], arrived: Callable[[int], object]
) -> ShardOutcome:
    """Read a shard and write its two indexes under temporary names, synced, ready to be renamed.

    Args:
        shard: what to read.
        options: how.
        temporary: gives the temporary path of a file by its final name.
        arrived: as `read_shard` takes it.

    Raises:
        ShardkitError: the shard cannot be read, or the target failed; no temporary file is left. A shard that is no
            whole tar is an outcome, and no error.
    """
    try:
        content = read_shard(shard.path, options, arrived)
    except (FormatError, UnsafeError) as error:
        reason = "unsafe-shard" if isinstance(error, UnsafeError) else "damaged-shard"
        refused = [shard_refusal(shard.name, reason, _told(error))]
        # Kept for the case that there is no other shard; without its frames, which hold what was read.
        return ShardOutcome(record=None, mtime_ns=0, refused=refused, error=error.with_traceback(None))
    return _write(shard, content, options, temporary)


def _told(error: FormatError | UnsafeError) -> str:
    """Return what an error says, without the path: equal runs write equal refusals, wherever the shards lie."""
    parts = [error.what if error.offset is None else f"{error.what}, at byte {error.offset}"]
    parts += [
        f"{name} {value}" for name, value in (("expected", error.expected), ("found", error.found)) if value is not None
    ]
    return "; ".join(parts)


def _write(
    shard: ShardFile, content: ShardContent, options: IndexOptions, temporary: Callable[[str], bytes]
) -> ShardOutcome:
    samples, notes = content.samples, content.notes
    labels = sample_labels(samples, notes) if options.labels == "cls" else None
    of_samples = sample_refusals(shard.name, samples, labels)
    refused = [member_refusal(shard.name, member) for member in content.refused]
    refused = sorted([*refused, *of_samples.values()], key=lambda refusal: refusal.offset)
    taken = np.delete(np.arange(len(samples)), list(of_samples))
    if not len(taken):
        refused.append(shard_refusal(shard.name, "no-samples", "no sample of the shard can be used"))
        return ShardOutcome(record=None, mtime_ns=content.mtime_ns, refused=refused)
    rows = shard_rows(samples, notes, taken, labels)
    algorithm, full = options.digest, options.facts == "full"
    header = IndexHeader(
        shard=shard.name, shard_bytes=content.bytes, align=BLOCK, layout="foreign",
        digest=f"{algorithm if full else 'members-' + algorithm}:{content.digest}",
    )  # fmt: skip
    files = []
    for extension, data in ((".arrow", encode_shard_index(rows.batch, header)), (".idx", rows.dali_index)):
        with BufferedFile(temporary(shard.stem + extension)) as file:
            file.write(data)
        files.append(FileRecord(bytes=len(data), digest=hex_digest(algorithm, data)))
    first, last = (str(rows.batch.column("key")[row]) for row in (0, len(taken) - 1))
    record = ShardRecord(
        name=shard.name, bytes=content.bytes, digest=content.digest, samples=len(taken), payload=rows.payload,
        padding=rows.padding, index=files[0], dali_index=files[1], first_key=first, last_key=last,
    )  # fmt: skip
    return ShardOutcome(
        record=record, mtime_ns=content.mtime_ns, refused=refused, unlabelled=rows.batch.column("label").null_count,
        odd_images=rows.odd_images, odd_metadata=rows.odd_metadata,
    )  # fmt: skip
