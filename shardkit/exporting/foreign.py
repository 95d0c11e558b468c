"""The samples of a foreign shard: rows of the index, and their members from the DALI index beside the shard.

That index writes a byte outside of `!` to `~` as `%HH`, and a percent sign as itself. The key of a row says what the
part up to the first dot was. Behind it a `%` may stand for either, which only the shard itself could tell.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, NamedTuple

from shardkit.errors import ConfigError, IntegrityError, ShardkitError, from_os_error
from shardkit.escaping import escape
from shardkit.exporting.sample import ExportedSample, outside, wrong
from shardkit.format.checksum import hex_digest
from shardkit.format.dali_index import IndexedMember, listed_word, parse_dali_index
from shardkit.format.foreign_member import MemberKind
from shardkit.storage.regular import open_regular

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from shardkit.exporting.between import Between
    from shardkit.format.dataset_record import Manifest, ShardRecord
    from shardkit.format.index import RecordBatch

__all__ = ["DaliIndex", "cannot", "foreign_samples", "load_index", "require_names", "require_no_files"]

_SHOWN = 200

_COLUMNS = ("sample_offset", "sample_size", "offset", "size")


class DaliIndex(NamedTuple):
    """The index file beside a shard."""

    data: bytes
    samples: Sequence[Sequence[IndexedMember]]
    """What its lines say."""


def load_index(folder: str, manifest: Manifest, shard: ShardRecord) -> DaliIndex:
    """Return the DALI index of a shard.

    Raises:
        IntegrityError: it is not the manifest's.
        IndexFormatError: it is none.
        StorageError: it is not there, or the system failed to read it.
    """
    path, expected = os.path.join(folder, f"{shard.stem}.idx"), shard.dali_index
    remedy = "index the shards again: shardkit index --overwrite"
    try:
        with open_regular(path) as file:
            data = file.read(expected.bytes + 1)
    except OSError as error:
        failed = from_os_error(error, "the DALI index of a shard cannot be read", path=path)
        failed.remedy = remedy
        raise failed from error
    digest = hex_digest(manifest.digest_algorithm, data)
    if digest != expected.digest:
        raise IntegrityError("the DALI index of a shard is not the manifest's", path=path,
                             expected=f"digest {expected.digest}", found=digest, remedy=remedy)  # fmt: skip
    try:
        return DaliIndex(data, parse_dali_index(data))
    except ShardkitError as error:
        error.path, error.remedy = path, remedy
        raise


def foreign_samples(shard: ShardRecord, rows: RecordBatch, index: DaliIndex) -> Iterator[ExportedSample]:
    """Yield the samples of a foreign shard with all their members, in stored order.

    Names and extensions are those in the tar, but where `require_names` refuses them.

    Raises:
        IntegrityError: the two indexes contradict each other, or a member lies outside its shard.
    """
    if len(index.samples) != len(rows):
        raise wrong(shard, shard.last_key, "not one row a line of the DALI index")
    columns = [rows.column(name).to_numpy().tolist() for name in _COLUMNS]
    end = 0
    for key, start, bytes_, offset, size, listed in zip(
        rows.column("key").to_pylist(), *columns, index.samples, strict=True
    ):
        members = [_member(shard, key, one) for one in listed]
        if start < end or outside(members, start, start + bytes_):
            raise wrong(shard, key, "a member that lies outside its sample")
        image = next((one for one in members if (one.offset, one.size) == (offset, size)), None)
        if image is None:
            raise wrong(shard, key, "an image that the DALI index does not have")
        end = start + bytes_
        yield ExportedSample(key, start, end, members, image)
    if end > shard.bytes:
        raise wrong(shard, shard.last_key, "a sample that lies outside its shard")


def _member(shard: ShardRecord, key: str, listed: IndexedMember) -> IndexedMember:
    """Return a member as the tar names it."""
    before = f"{key}."
    if listed.name.startswith(before):
        extension = listed.name[len(before) :]
        if extension == listed.extension:
            return listed
    else:
        before = f"{listed_word(key)}."
        if not listed.name.startswith(before):
            raise wrong(shard, key, "a key that the DALI index does not have")
        extension = listed.name[len(before) :]
    if extension.lower() != listed.extension.lower():
        raise wrong(shard, key, "a key that the DALI index does not have")
    return IndexedMember(extension, listed.offset, listed.size, f"{key}.{extension}")


def require_names(tool: str, shard: ShardRecord, sample: ExportedSample) -> None:
    """Refuse a sample of a foreign shard that has a member whose name is not known to the byte.

    Raises:
        ConfigError: names it.
    """
    for member in sample.members:
        if "%" in member.extension:
            raise cannot(tool, "the name of a member is known only with escapes", shard, member.name, sample.key)


def require_no_files(tool: str, shard: ShardRecord, between: Between, counts: Callable[[str], bool]) -> None:
    """Refuse a foreign shard with a file that no sample of the dataset has, and that the tool would take for one's.

    Args:
        tool: as `--to` names it.
        shard: for the message.
        between: what lies between the members; walked to its end.
        counts: tells whether the tool takes a file of a name for one of a sample.

    Raises:
        ConfigError: names the first.
        ShardkitError: as `Between.members`.
    """
    for member in between.members():
        if member.kind is MemberKind.FILE and counts(member.name):
            raise cannot(tool, "a file that is in no sample of the dataset would be in one there", shard, member.name)


def cannot(
    tool: str, why: str, shard: ShardRecord, found: str, key: str | None = None, *, expected: str | None = None,
    instead: str = "write other shards with shardkit convert",
) -> ConfigError:  # fmt: skip
    """Return the refusal of one format: that it cannot be made for a shard, and why.

    Args:
        tool: as `--to` names it.
        why: without a name of the shard's in it.
        shard: where it was found.
        found: the name of a member, or extensions; escaped here, and so `expected`.
        key: of the sample.
        expected: what the tool would read alike.
        instead: what to do, other than to leave the tool out.
    """
    return ConfigError(
        f"no export for {tool}: {why}", path=shard.name, key=key,
        expected=None if expected is None else escape(expected[:_SHOWN]), found=escape(found[:_SHOWN]),
        remedy=f"leave {tool} out of --to, or {instead}",
    )  # fmt: skip
