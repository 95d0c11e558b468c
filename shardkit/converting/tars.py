"""A foreign tar as index rows: what its headers say, and its cls members."""

from __future__ import annotations

import os
import re
from bisect import bisect_left
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from shardkit.converting.facts import NOT_LOOKED_AT, facts_of
from shardkit.errors import FormatError, IndexFormatError, UnsafeError, from_os_error
from shardkit.format.dali_index import parse_dali_index
from shardkit.format.grouping import sample_parts
from shardkit.format.index import SampleRow, sample_batch
from shardkit.format.keys import source_from_path, without_here
from shardkit.indexing.refusals import member_refusal, sample_refusal, shard_refusal, verdict_refusal
from shardkit.indexing.scan import MAX_SHARD_BYTES, scan
from shardkit.packing.refusals import RefusedError
from shardkit.storage.regular import open_regular

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shardkit.format.foreign_member import Member
    from shardkit.format.grouping import ForeignSample
    from shardkit.format.index import RecordBatch
    from shardkit.indexing.refusals import IndexRefusal
    from shardkit.indexing.scan import ShardScan

__all__ = ["ForeignTar", "further_members", "read_tar"]

_USED = frozenset({"cls", "json"})
_MAX_CLS_BYTES = 64
_LABEL = re.compile(rb"[ \t\r\n]*([0-9]{1,10})[ \t\r\n]*")
_MAX_LABEL = (1 << 31) - 1


@dataclass(slots=True)
class ForeignTar:
    """What stands in a tar."""

    bytes: int
    mtime_ns: int
    rows: RecordBatch
    """`shardkit.format.index.SCHEMA`; checksums are 0, and facts where nobody asked for them."""
    refused: list[tuple[int, str | None, IndexRefusal]] = field(default_factory=list)
    """Number of the row that would have been there, key, and what `shardkit index` says of the sample or the member; at
    last, without a key, that no sample is left."""
    others: dict[str, list[int]] = field(default_factory=dict)
    """Extension to the rows that have such a further member."""


def read_tar(path: str, *, facts: bool) -> ForeignTar:
    """Return what a tar holds, without reading an image, or only its header.

    Args:
        path: of the tar.
        facts: read each image's header.

    Raises:
        FormatError: it is no whole tar.
        UnsafeError: tar readers disagree about it, it is over a limit, or no regular file.
        ShardkitError: the system failed to read it.
    """
    found = scan(path)
    name = os.path.basename(path)
    try:
        with open_regular(path, MAX_SHARD_BYTES) as file:
            status = os.fstat(file.fileno())
            if status.st_size != found.file_bytes:
                raise FormatError("a shard changed while it was scanned", path=path)
            # Images lie apart: pages read ahead would be more of them than their headers.
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
            tar = ForeignTar(status.st_size, status.st_mtime_ns, sample_batch([]))
            _take(tar, name, found, file.fileno(), facts=facts)
            return tar
    except UnsafeError as error:
        error.path = path
        raise
    except OSError as error:
        raise from_os_error(error, "cannot read a shard", path=path) from error


def further_members(path: str, rows: RecordBatch) -> dict[str, list[int]]:
    """Return what else the samples of an indexed foreign shard have, beside image, label and json: extension to rows.

    Args:
        path: its DALI index, which names every member.
        rows: its index.

    Raises:
        IndexFormatError: the DALI index is damaged, or of other samples.
        ShardkitError: the system failed to read it.
    """
    try:
        with open_regular(path) as file:
            samples = parse_dali_index(file.read())
        if len(samples) != rows.num_rows:
            raise IndexFormatError("a DALI index of another length", expected=rows.num_rows, found=len(samples))
    except IndexFormatError as error:
        error.path = path
        raise
    except OSError as error:
        raise from_os_error(error, "cannot read a DALI index", path=path) from error
    places = zip(rows.column("offset").to_pylist(), rows.column("json_offset").to_pylist(), strict=True)
    others: dict[str, list[int]] = {}
    for row, (members, known) in enumerate(zip(samples, places, strict=True)):
        for member in members:
            if member.offset not in known and member.extension != "cls":
                others.setdefault(f".{member.extension}", []).append(row)
    return others


def _take(tar: ForeignTar, name: str, found: ShardScan, fd: int, *, facts: bool) -> None:
    rows: list[SampleRow] = []
    refused = [(_member_key(member), member_refusal(name, member)) for member in found.refused]
    for sample in found.samples:
        key = _text(sample.key)
        if not sample.usable or sample.image is None:
            refused.append((key, verdict_refusal(name, sample.key, sample.start, sample.verdicts)))
            continue
        try:
            row = _row(name, sample, sample.image, fd, facts=facts)
        except RefusedError as why:
            refused.append((key, sample_refusal(name, sample.key, sample.start, why.reason, why.detail)))
            continue
        for other in sample.members:
            if other != sample.image and other not in _USED:
                tar.others.setdefault(f".{other}", []).append(len(rows))
        rows.append(row)
    refused.sort(key=lambda one: one[1].offset)
    if not rows:
        file = source_from_path(os.fsencode(name))
        refused.append((None, shard_refusal(file, "no-samples", "no sample of the shard can be used")))
    starts = [row.sample_offset for row in rows]
    tar.refused = [(bisect_left(starts, one.offset), key, one) for key, one in refused]
    tar.rows = sample_batch(rows)


def _row(name: str, sample: ForeignSample, image_extension: str, fd: int, *, facts: bool) -> SampleRow:
    image, text = sample.members[image_extension], sample.members.get("json")
    known = facts_of(lambda count: os.pread(fd, count, image.offset), image.size) if facts else NOT_LOOKED_AT
    return SampleRow(
        key=_text(sample.key), label=_label(sample.members, fd),
        offset=image.offset, size=_fits(image, 32), crc32c=0, sample_offset=sample.start,
        sample_size=sample.end - sample.start, json_offset=0 if text is None else text.offset,
        json_size=0 if text is None else _fits(text, 32),
        source=source_from_path(os.fsencode(f"{name}/{without_here(image.name)}")), **known,
    )  # fmt: skip


def _fits(member: Member, bits: int) -> int:
    if member.size >= 1 << bits:
        raise RefusedError("too-large", f"a member of {member.size} bytes")
    return member.size


def _label(members: Mapping[str, Member], fd: int) -> int | None:
    member = members.get("cls")
    if member is None:
        return None
    data = os.pread(fd, min(member.size, _MAX_CLS_BYTES + 1), member.offset)
    match = _LABEL.fullmatch(data) if len(data) <= _MAX_CLS_BYTES else None
    if match is None or int(match[1]) > _MAX_LABEL:
        raise RefusedError("bad-label", f"the cls member is {ascii(bytes(data[:20]))[1:]}")
    return int(match[1])


def _text(key: str) -> str:
    """Return a key as an index can hold it: bytes that are no UTF-8 are written out."""
    return os.fsencode(key).decode("utf-8", "backslashreplace")


def _member_key(member: Member) -> str | None:
    parts = sample_parts(member.name)
    return None if parts is None else _text(parts[0])
