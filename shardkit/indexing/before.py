"""The shards against the digests of an index that is to be replaced: the last chance to see what changed since."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardkit.errors import IntegrityError, ManifestError, ShortReadError
from shardkit.escaping import escape
from shardkit.format.checksum import new_digest
from shardkit.indexing.scan import MAX_SHARD_BYTES
from shardkit.storage.atomic import os_errors
from shardkit.storage.regular import open_regular

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardkit.format.manifest import Manifest
    from shardkit.indexing.inputs import ShardFile
    from shardkit.indexing.options import IndexOptions
    from shardkit.indexing.target import Target

__all__ = ["Comparison", "changed_error", "compare_with_before"]

_CHUNK = 4 << 20
_SHOWN = 5


@dataclass(frozen=True, slots=True)
class Comparison:
    """What an index that is replaced says about the shards."""

    changed: tuple[str, ...] = ()
    """Names of the shards whose bytes are others than it states."""
    why_not: str | None = None
    """Why there was an index, but nothing to compare with."""


def compare_with_before(target: Target, options: IndexOptions, shards: Sequence[ShardFile]) -> Comparison:
    """Read the shards that the finished dataset in `target` names as well, and hold each against its digest.

    Nothing is read where the new index is to have no checksums, or the old one has none.

    Raises:
        ShardkitError: a shard cannot be read, or a newer shardkit wrote the manifest.
    """
    if options.facts != "full":
        return Comparison()
    if not target.finished:
        why = "an unfinished run was replaced" if target.in_progress else None
        return Comparison(why_not=why)
    try:
        manifest = target.load_manifest()
    except ManifestError:
        return Comparison(why_not="the manifest of the index before is damaged")
    if manifest.layout != "foreign":
        return Comparison()  # refused where it is to be replaced
    if not manifest.has_checksums:
        return Comparison(why_not="the index before has no checksums")
    return Comparison(tuple(_changed(target, manifest, shards)))


def _changed(target: Target, manifest: Manifest, shards: Sequence[ShardFile]) -> list[str]:
    records = {record.name: record for record in manifest.shards}
    found = []
    for shard in shards:
        record = records.get(shard.name)
        if record is None or not _is_the_one(target, shard):
            continue
        if record.bytes != shard.bytes or _digest(shard, manifest.digest_algorithm) != record.digest:
            found.append(shard.name)
    return found


def _is_the_one(target: Target, shard: ShardFile) -> bool:
    try:
        return os.path.samefile(target.path(shard.name), shard.path)
    except OSError:
        return False


def _digest(shard: ShardFile, algorithm: str) -> str:
    digest = new_digest(algorithm)
    path = os.fsencode(shard.path)
    with os_errors("cannot read a shard", path), open_regular(path, MAX_SHARD_BYTES) as file:
        left = shard.bytes
        while left and (data := file.read(min(_CHUNK, left))):
            digest.update(data)
            left -= len(data)
    if left:
        raise ShortReadError("a shard ended while it was compared", path=path, expected=f"{shard.bytes} bytes",
                             found=f"{shard.bytes - left} bytes")  # fmt: skip
    return digest.hexdigest()


def changed_error(folder: bytes, changed: Sequence[str]) -> IntegrityError:
    """Return the error of a run that would make an index of bytes which are no longer those of the one before."""
    more = f" and {len(changed) - _SHOWN} others" if len(changed) > _SHOWN else ""
    return IntegrityError(
        "shards changed since they were indexed: a new index would call them whole", path=folder,
        expected="the digests of the index that is there",
        found=f"other bytes in {', '.join(map(escape, changed[:_SHOWN]))}{more}",
        remedy="shardkit convert takes what is whole; give --accept-changes to index them as they are now",
    )  # fmt: skip
