"""What the journal of an unfinished pack says of a finished shard."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from shardkit.format.keys import path_from_source, source_from_path
from shardkit.format.manifest import load_shard
from shardkit.packing.refusals import REASONS, Refusal
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
    record = None if document["record"] is None else load_shard(document["record"])
    return ShardResult(record=record, refused=[_refusal(*fields) for fields in document["refused"]])


def _refusal(number: object, path: object, reason: object, detail: object) -> Refusal:
    if not isinstance(number, int) or not isinstance(path, str) or reason not in REASONS or not isinstance(detail, str):
        raise ValueError("no refusal")
    return Refusal(number, path_from_source(path), str(reason), detail)
