"""What must hold for the index of a foreign shard: consistency with itself and with the manifest, no alignment."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from shardkit.errors import IndexFormatError
from shardkit.format.dali_index import parse_dali_index
from shardkit.format.dataset_record import MANIFEST
from shardkit.format.tar import BLOCK
from shardkit.verifying.index_checks import (
    check_dataset_index,
    check_header,
    check_labels,
    check_sources,
    shown,
)
from shardkit.verifying.report import Finding

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from shardkit.format.dali_index import IndexedMember
    from shardkit.verifying.index_checks import IndexedShard

__all__ = ["FOREIGN_INDEX_CHECKS"]


def check_places(shard: IndexedShard) -> Iterator[Finding]:
    """Samples follow one another inside the shard, and each holds its image and its metadata."""
    rows = shard.rows
    if not len(rows):
        yield shard.finding("row-geometry", None, "an index without rows", "at least 1", 0)
        return
    ends = rows.sample_offset + rows.sample_size
    starts = np.concatenate([[0], ends[:-1]])
    wrong = (rows.sample_offset < starts) | (ends < rows.sample_offset) | (ends > shard.facts.bytes)
    for offset, size, is_there in (
        (rows.offset, rows.size, np.ones(len(rows), np.bool_)),
        (rows.json_offset, rows.json_size, rows.json_offset != 0),
    ):
        inside = (offset >= rows.sample_offset + BLOCK) & (offset <= ends - size) & (offset % BLOCK == 0)
        wrong |= is_there & ~inside
    wrong |= (rows.json_offset == 0) & (rows.json_size != 0)
    at = np.flatnonzero(wrong)
    if len(at):
        more = f", and {len(at) - 1} further rows" if len(at) > 1 else ""
        message = f"row {int(at[0])} does not lie inside its sample, or that not behind the one before{more}"
        yield shard.finding("row-geometry", int(at[0]), message)


def check_record(shard: IndexedShard) -> Iterator[Finding]:
    """The manifest's record of a shard is what its rows add up to."""
    record, rows = shard.record, shard.rows
    if record is None or not len(rows):
        return
    sums = {
        "samples": (len(rows), record.samples),
        "payload": (int(rows.size.sum()), record.payload),
        "padding": (int((-rows.size % BLOCK).sum()), record.padding),
        "first_key": (rows.key(0), record.first_key),
        "last_key": (rows.key(-1), record.last_key),
    }
    for what, (expected, found) in sums.items():
        if expected != found:
            message = f"the manifest states another {what} than the rows give"
            yield Finding(code="shard-record", file=MANIFEST, shard=record.name, message=message,
                          expected=shown(expected), found=shown(found))  # fmt: skip


def check_dali_index(shard: IndexedShard) -> Iterator[Finding]:
    """The text index names, for each row, members inside its sample, and among them its image."""
    if shard.dali_index is None:
        return
    file = shard.facts.name.removesuffix(".tar") + ".idx"
    try:
        lines = parse_dali_index(shard.dali_index)
    except IndexFormatError as error:
        yield Finding(code="dali-index", file=file, shard=shard.facts.name, region="rows", message=error.what,
                      expected=shown(error.expected), found=shown(error.found))  # fmt: skip
        return
    rows = shard.rows
    columns = (rows.sample_offset.tolist(), rows.sample_size.tolist(), rows.offset.tolist(), rows.size.tolist())
    problem = None
    if len(lines) != len(rows):
        problem, row, expected, found = "another number of samples than the rows", None, len(rows), len(lines)
    else:
        places = enumerate(zip(lines, *columns, strict=True))
        row = next((number for number, place in places if not _holds(*place)), None)
        if row is not None:
            problem, expected, found = f"line {row + 2} is not what the rows give", None, None
    if problem is not None:
        yield Finding(
            code="dali-index", file=file, shard=shard.facts.name, region="rows",
            key=None if row is None else rows.key(row), message=problem, expected=expected, found=found,
        )  # fmt: skip


def _holds(members: list[IndexedMember], start: int, length: int, offset: int, size: int) -> bool:
    inside = all(start < one.offset and one.offset + one.size <= start + length for one in members)
    return inside and any((one.offset, one.size) == (offset, size) for one in members)


FOREIGN_INDEX_CHECKS: dict[str, Callable[[IndexedShard], Iterator[Finding]]] = {
    "header": check_header,
    "places": check_places,
    "sources": check_sources,
    "labels": check_labels,
    "record": check_record,
    "dali-index": check_dali_index,
    "dataset-index": check_dataset_index,
}
"""What must hold for the index of every foreign shard, at every level."""
