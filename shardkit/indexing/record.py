"""What an unfinished run was told, and its journal: only a run that is told the same may go on with it."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from shardkit.format.checksum import hex_digest
from shardkit.format.manifest import load_shard
from shardkit.format.strict_json import dump_json
from shardkit.indexing.refusals import REASONS, IndexRefusal
from shardkit.indexing.rows import ShardOutcome
from shardkit.running.journal import Journal
from shardkit.running.sealed_record import are_file_names, are_texts, unseal

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shardkit.running.journal import Document

__all__ = ["IndexRecord", "difference", "index_journal", "load_record"]

_DIGEST = "xxh3-128"
_COUNTS = ("unlabelled", "odd_images", "odd_metadata")


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexRecord:
    """Everything that the written bytes follow from, the shards' own bytes apart."""

    shardkit: str
    """Version."""
    options: Mapping[str, Any]
    """As the manifest records them; Any: JSON values."""
    shards: list[str]
    """File names, in order."""
    replaces: list[str] = field(default_factory=list, compare=False)
    """Names of an earlier run's files, which this one removes before it makes its own."""

    @property
    def identity(self) -> bytes:
        """A digest that parts this run's journal from any other's."""
        return hex_digest(_DIGEST, dump_json([self.shardkit, self.options, self.shards]).encode()).encode()


def load_record(data: bytes) -> IndexRecord | None:
    """Return the record whose `seal` this is; None when it is damaged, or of a shardkit that records more."""
    try:
        record = IndexRecord(**(unseal(data) or {}))
    except TypeError:
        return None
    lists = are_texts(record.shards) and are_file_names(record.replaces)
    return record if isinstance(record.options, dict) and lists and isinstance(record.shardkit, str) else None


def difference(before: IndexRecord, now: IndexRecord) -> str:
    """Say in what two runs differ; an empty text when one may go on with the other."""
    old, new = before.options, now.options
    names = sorted(name for name in old.keys() | new.keys() if old.get(name) != new.get(name))
    texts = [f"{name} was {json.dumps(old.get(name))} and is {json.dumps(new.get(name))}" for name in names]
    if before.shardkit != now.shardkit:
        texts.append(f"shardkit was {before.shardkit} and is {now.shardkit}")
    if before.shards != now.shards:
        texts.append("other shards, or in another order")
    return ", ".join(texts)


def index_journal(path: bytes, identity: bytes) -> Journal[ShardOutcome]:
    """Return the journal at `path`, of the run of this identity: shards by their place among those of the run."""
    return Journal(path, identity, dump=_document, load=_outcome)


def _document(outcome: ShardOutcome) -> Document:
    record = outcome.record
    return {
        "mtime_ns": outcome.mtime_ns,
        "record": None if record is None else dataclasses.asdict(record),
        "refused": [[one.path, one.reason, one.detail, one.offset] for one in outcome.refused],
        "counts": [getattr(outcome, name) for name in _COUNTS],
    }  # fmt: skip


def _outcome(document: Document) -> ShardOutcome:
    record = None if document["record"] is None else load_shard(document["record"])
    refused = [_refusal(*fields) for fields in document["refused"]]
    counts = dict(zip(_COUNTS, document["counts"], strict=True))
    if not all(isinstance(number, int) for number in (document["mtime_ns"], *counts.values())):
        raise ValueError("no counts")
    return ShardOutcome(record=record, mtime_ns=document["mtime_ns"], refused=refused, **counts)


def _refusal(path: object, reason: object, detail: object, offset: object) -> IndexRefusal:
    texts = isinstance(path, str) and isinstance(reason, str) and isinstance(detail, str)
    if not texts or reason not in REASONS or not isinstance(offset, int):
        raise ValueError("no refusal")
    return IndexRefusal(path=str(path), reason=str(reason), detail=str(detail), offset=offset)
