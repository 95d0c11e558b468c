"""What the journal of an unfinished pack says of a finished shard."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from shardkit.format.keys import path_from_source, source_from_path
from shardkit.format.manifest import FileRecord, ShardRecord
from shardkit.packing.refusals import Refusal
from shardkit.packing.write import ShardResult
from shardkit.running.journal import Journal

if TYPE_CHECKING:
    from shardkit.running.journal import Document

__all__ = ["pack_journal"]


def pack_journal(path: bytes, plan: bytes) -> Journal[ShardResult]:
    """Return the journal at `path`, of the plan of this identity: shards by their number in the plan."""
    return Journal(path, plan, dump=_document, load=_result)


def _document(result: ShardResult) -> Document:
    return {
        "record": None if result.record is None else dataclasses.asdict(result.record),
        "refused": [[r.number, source_from_path(r.path), r.reason, r.detail] for r in result.refused],
    }


def _result(document: Document) -> ShardResult:
    fields = document["record"]
    record = None
    if fields is not None:
        files = {name: FileRecord(**fields[name]) for name in ("index", "dali_index")}
        record = ShardRecord(**{**fields, **files})
    refused = [Refusal(n, path_from_source(path), reason, detail) for n, path, reason, detail in document["refused"]]
    return ShardResult(record=record, refused=refused)
