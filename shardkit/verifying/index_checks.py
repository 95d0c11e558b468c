"""What must hold between a shard's index, its record in the manifest, and the other indexes: no shard is read here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from shardkit.errors import IndexFormatError
from shardkit.escaping import escape
from shardkit.format.dali_index import IndexedMember, encode_dali_index
from shardkit.format.dataset_record import DATASET_INDEX, MANIFEST
from shardkit.format.keys import is_safe_key, path_from_source
from shardkit.format.tar import BLOCK
from shardkit.verifying.report import Finding

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from shardkit.format.dataset_record import ShardRecord
    from shardkit.format.index import IndexHeader, RecordBatch
    from shardkit.verifying.folder import LoadedFile
    from shardkit.verifying.rows import Geometry, Rows

__all__ = [
    "FILE_CHECKS",
    "INDEX_CHECKS",
    "MEMBERS",
    "IndexedShard",
    "ShardFacts",
    "check_dataset_index",
    "check_header",
    "check_labels",
    "check_sources",
    "fits",
    "shown",
]

MEMBERS = "members-"
"""Stands before the algorithm of a digest that covers what stands where in a shard."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardFacts:
    """What a shard must be, by the manifest or, without one, by its own index."""

    name: str
    bytes: int
    algorithm: str
    digest: str
    """Hex digest of the whole shard."""
    align: int
    layout: str = "aligned"
    has_checksums: bool = True
    """False for a foreign shard that was indexed without: then `digest` covers what stands where, and no payload."""

    @property
    def stated_digest(self) -> str:
        """The digest as the shard's own index names it."""
        return f"{'' if self.has_checksums else MEMBERS}{self.algorithm}:{self.digest}"


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexedShard:
    """One shard's rows and everything that must agree with them."""

    facts: ShardFacts
    file: str
    """The file that the rows come from: the shard's own index, or `index.arrow` when that is damaged."""
    header: IndexHeader | None
    """None when the rows come from `index.arrow`."""
    record: ShardRecord | None
    """None without a usable manifest."""
    classes: Sequence[str] | None
    rows: Rows
    geometry: Geometry
    dali_index: bytes | None
    """None when it is damaged or not there."""
    dataset_rows: RecordBatch | None
    """The batch of `index.arrow`; None when that is damaged or not there."""

    def finding(
        self,
        code: str,
        row: int | None,
        message: str,
        expected: str | int | None = None,
        found: str | int | None = None,
    ) -> Finding:
        """Return a finding about the rows, or about one of them."""
        key = None if row is None else self.rows.key(row)
        return Finding(
            code=code, file=self.file, shard=self.facts.name, region="rows", key=key,
            message=message, expected=expected, found=found,
        )  # fmt: skip


def check_size(file: LoadedFile) -> Iterator[Finding]:
    """A file has the size that the manifest states."""
    if file.record is not None and file.size != file.record.bytes:
        yield Finding(
            code="file-size", file=file.name, shard=file.shard, message="another size than the manifest says",
            expected=f"{file.record.bytes} bytes", found=f"{file.size} bytes",
        )  # fmt: skip


def check_digest(file: LoadedFile) -> Iterator[Finding]:
    """A file has the digest that the manifest states."""
    if file.record is not None and file.digest is not None and file.digest != file.record.digest:
        yield Finding(
            code="file-digest", file=file.name, shard=file.shard, message="damaged, or of another pack",
            expected=file.record.digest, found=file.digest,
        )  # fmt: skip


FILE_CHECKS: dict[str, Callable[[LoadedFile], Iterator[Finding]]] = {"size": check_size, "digest": check_digest}
"""What must hold for every file beside the shards."""


def check_header(shard: IndexedShard) -> Iterator[Finding]:
    """An index is bound to its shard."""
    if shard.header is None:
        return
    facts, header = shard.facts, shard.header
    pairs: dict[str, tuple[_Shown, _Shown]] = {
        "shard": (facts.name, header.shard),
        "size": (facts.bytes, header.shard_bytes),
        "digest": (facts.stated_digest, header.digest),
        "alignment": (facts.align, header.align),
        "layout": (facts.layout, header.layout),
    }
    for what, (expected, found) in pairs.items():
        if expected != found:
            yield shard.finding(
                "index-header", None, f"the index was made for another {what}", shown(expected), shown(found)
            )


def fits(shard: IndexedShard) -> bool:
    """Tell whether the rows cover the shard exactly, so that a pass over it may trust them for its steps."""
    return next(check_geometry(shard), None) is None


def check_geometry(shard: IndexedShard) -> Iterator[Finding]:
    """Samples follow one another as the layout puts them, from byte 0 to the end blocks."""
    rows, geometry = shard.rows, shard.geometry
    if not len(rows):
        yield shard.finding("row-geometry", None, "an index without rows", "at least 1", 0)
        return
    wrong = rows.small == 0
    columns = ("sample_offset", "sample_size", "json_offset", "offset")
    for column in columns:
        wrong |= getattr(rows, column) != getattr(geometry, column)
    wrong |= (rows.json_offset == 0) & (rows.json_size != 0)
    at = np.flatnonzero(wrong)
    if len(at):
        row = int(at[0])
        pairs = {column: (int(getattr(geometry, column)[row]), int(getattr(rows, column)[row])) for column in columns}
        column = next((name for name, (expected, found) in pairs.items() if expected != found), "json_size")
        expected, found = pairs.get(column, (0, int(rows.json_size[row])))
        more = f", and {len(at) - 1} further rows" if len(at) > 1 else ""
        message = f"row {row} is not where the sizes of the samples put it ({column}){more}"
        if not rows.small[row]:
            message = f"row {row} has neither a label nor a json member{more}"
        yield shard.finding("row-geometry", row, message, expected, found % (1 << 64))  # as the row states it
    elif geometry.shard_bytes != shard.facts.bytes:
        message = "the rows add up to a shard of another size"
        yield shard.finding("row-geometry", None, message, shard.facts.bytes, geometry.shard_bytes)


def check_keys(shard: IndexedShard) -> Iterator[Finding]:
    """Every reader takes every key as it stands."""
    for row, key in enumerate(shard.rows.keys()):
        if not is_safe_key(key):
            yield shard.finding("key-unsafe", row, "a key that some reader would misread", "letters, digits, _ - /")


def check_sources(shard: IndexedShard) -> Iterator[Finding]:
    """Every source is the text of exactly one path."""
    for row, source in enumerate(shard.rows.sources()):
        try:
            path_from_source(source)
        except IndexFormatError as error:
            yield shard.finding("source-text", row, "not a source path", shown(error.expected), shown(source))


def check_labels(shard: IndexedShard) -> Iterator[Finding]:
    """A label is the number of a class; without a class list any number from 0 on may be one."""
    rows = shard.rows
    limit = 1 << 31 if shard.record is None or shard.classes is None else len(shard.classes)
    for row in np.flatnonzero(rows.labelled & ((rows.label < 0) | (rows.label >= limit))).tolist():
        expected = f"0 to {limit - 1}" if limit else "no label: the class list is empty"
        yield shard.finding("label-range", row, "not the number of a class", expected, int(rows.label[row]))


def check_record(shard: IndexedShard) -> Iterator[Finding]:
    """The manifest's record of a shard is what its rows add up to."""
    record, rows = shard.record, shard.rows
    if record is None or not len(rows):
        return
    payload = int(rows.size.sum())
    sums = {
        "samples": (len(rows), record.samples),
        "payload": (payload, record.payload),
        "padding": (shard.facts.bytes - payload - int((rows.small + BLOCK).sum()), record.padding),
        "first_key": (rows.key(0), record.first_key),
        "last_key": (rows.key(-1), record.last_key),
    }
    for what, (expected, found) in sums.items():
        if expected != found:
            message = f"the manifest states another {what} than the rows give"
            yield Finding(
                code="shard-record", file=MANIFEST, shard=record.name, message=message,
                expected=shown(expected), found=shown(found),
            )  # fmt: skip


def check_dali_index(shard: IndexedShard) -> Iterator[Finding]:
    """The text index is the one that the rows give, byte for byte."""
    if shard.dali_index is None:
        return
    try:
        expected = encode_dali_index(_members(shard.rows))
    except UnicodeEncodeError:  # a key that is not ASCII, which is told by its own check
        return
    if expected == shard.dali_index:
        return
    file = shard.facts.name.removesuffix(".tar") + ".idx"
    pairs = zip(expected.split(b"\n"), [*shard.dali_index.split(b"\n"), b""], strict=False)
    line, (wanted, got) = next(((i, pair) for i, pair in enumerate(pairs) if pair[0] != pair[1]), (0, (b"", b"")))
    yield Finding(
        code="dali-index", file=file, shard=shard.facts.name, region="rows",
        key=shard.rows.key(line - 1) if 0 < line <= len(shard.rows) else None,
        message=f"line {line + 1} is not what the rows give", expected=shown(wanted), found=shown(got),
    )  # fmt: skip


def _members(rows: Rows) -> Iterator[list[IndexedMember]]:
    columns = (rows.label, rows.labelled, rows.sample_offset, rows.json_offset, rows.json_size, rows.offset, rows.size)
    lists = (column.tolist() for column in columns)
    for key, label, labelled, start, json_at, json_size, offset, size in zip(rows.keys(), *lists, strict=True):
        members = [IndexedMember("jpg", offset, size, f"{key}.jpg")]
        if json_at:
            members.insert(0, IndexedMember("json", json_at, json_size, f"{key}.json"))
        if labelled:
            members.insert(0, IndexedMember("cls", start + BLOCK, len(str(label)), f"{key}.cls"))
        yield members


def check_dataset_index(shard: IndexedShard) -> Iterator[Finding]:
    """`index.arrow` holds the rows of this shard's own index."""
    other, rows = shard.dataset_rows, shard.rows.batch
    if other is None or rows.equals(other):
        return
    if other.num_rows != rows.num_rows:
        column, row, expected, found = "number of rows", None, rows.num_rows, other.num_rows
    else:
        column = next(name for name in rows.schema.names if not rows.column(name).equals(other.column(name)))
        pairs = zip(rows.column(column).to_pylist(), other.column(column).to_pylist(), strict=True)
        row, (expected, found) = next((i, pair) for i, pair in enumerate(pairs) if pair[0] != pair[1])
    yield Finding(
        code="dataset-index", file=DATASET_INDEX, shard=shard.facts.name, region="rows",
        key=None if row is None else shard.rows.key(row),
        message=f"other rows than in the shard's own index ({column})", expected=shown(expected), found=shown(found),
    )  # fmt: skip


INDEX_CHECKS: dict[str, Callable[[IndexedShard], Iterator[Finding]]] = {
    "header": check_header,
    "geometry": check_geometry,
    "keys": check_keys,
    "sources": check_sources,
    "labels": check_labels,
    "record": check_record,
    "dali-index": check_dali_index,
    "dataset-index": check_dataset_index,
}
"""What must hold for every shard's index, at every level."""

_Shown: TypeAlias = str | int | None


def shown(value: object) -> _Shown:
    """Return a value from a file as a finding states it."""
    if value is None or isinstance(value, int):
        return value
    return escape(value if isinstance(value, bytes) else str(value))[:120]
