"""One shard, judged: what is left of it, what of that is proved, and what has to be written."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from shardkit.errors import StorageError
from shardkit.format.checksum import hash64
from shardkit.repairing.damaged_file import DamagedFile
from shardkit.repairing.lost import Lost, LostLog
from shardkit.repairing.old_rows import cover
from shardkit.repairing.result import ShardOutcome
from shardkit.repairing.walk import Rules, walk

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from shardkit.format.index import RecordBatch
    from shardkit.repairing.identify import ShardFile
    from shardkit.repairing.old_rows import OldRows
    from shardkit.repairing.salvage import Salvage
    from shardkit.repairing.survey import LogicalShard, Survey

__all__ = ["Prepared", "name_keys", "prepare", "proved_by_digest"]


@dataclass(slots=True, kw_only=True)
class Prepared:
    """A shard, ready to be written."""

    shard: LogicalShard
    holder: ShardFile | None
    file: DamagedFile | None
    """Open as long as the caller works on the shard; None when it is missing."""
    outcome: ShardOutcome
    rows: RecordBatch | None = None
    """Of the new index; None when nothing is kept."""
    salvage: Salvage | None = None
    """Where the samples of a new shard lie; None when the file is whole."""

    def sealed(self, size: int, digest: str) -> ShardOutcome:
        """Return the outcome when the shard has been written, and what that proves."""
        outcome = replace(self.outcome, bytes=size)
        if self.shard.digest is None or outcome.proof != "payloads" or outcome.lost:
            return outcome
        return replace(outcome, proof="digest" if digest == self.shard.digest else "json-damaged")


def prepare(survey: Survey, holders: Sequence[ShardFile | None], rules: Rules, log: LostLog) -> Iterator[Prepared]:
    """Yield every shard in order; each one's file is closed when the next is asked for.

    Raises:
        StorageError: a file changed meanwhile.
        ShardkitError: one cannot be opened.
    """
    for shard, holder in zip(survey.shards, holders, strict=True):
        old = survey.rows(shard)
        if holder is None:
            yield _missing(shard, old, log)
            continue
        if old is not None and not old.proven and not any(old.with_key(p.key) is not None for p in holder.probes):
            old = None  # the rows of another shard
        with DamagedFile(os.path.join(survey.folder, holder.name)) as file:
            yield _judge(file, shard, holder, old, rules, log)
            if file.changed() or file.size != holder.size:
                raise StorageError("the shard changed while it was repaired", path=file.path,
                                   remedy="run again when nothing writes to it")  # fmt: skip


def proved_by_digest(shard: LogicalShard, holder: ShardFile) -> bool:
    """Tell whether a file is the shard, byte for byte."""
    return shard.digest is not None and (holder.digest, holder.size) == (shard.digest, shard.size)


def name_keys(survey: Survey, rules: Rules) -> None:
    """Let no sample without a proven row take the key of one that has one; only when there are both kinds."""
    proven, without = [], False
    for shard in survey.shards:
        rows = survey.rows(shard)
        without |= rows is None or not rows.proven
        if rows is not None and rows.proven:
            proven.append(shard)
    for shard in proven if without else ():
        rows = survey.rows(shard)
        if rows is not None:
            rules.keys.update(hash64(key.encode()) for key in rows.batch.column("key").to_pylist())


def _missing(shard: LogicalShard, old: OldRows | None, log: LostLog) -> Prepared:
    count = 0 if old is None else len(old)
    for number in range(count):
        row = old.row(number) if old is not None else None
        if row is not None:
            log.add(Lost(row.key, shard.name, row.sample_offset, "missing-shard", "the shard is not there"))
    if not count:
        samples = "an unknown number of" if shard.record is None else str(shard.record.samples)
        log.add(Lost(None, shard.name, 0, "missing-shard", f"{samples} samples, and no index names them"))
    outcome = ShardOutcome(name=shard.name, file=None, state="missing", proof="none", lost=max(count, 1))
    return Prepared(shard=shard, holder=None, file=None, outcome=outcome)


def _judge(
    file: DamagedFile, shard: LogicalShard, holder: ShardFile, old: OldRows | None, rules: Rules, log: LostLog
) -> Prepared:
    proved = proved_by_digest(shard, holder)
    outcome = ShardOutcome(name=shard.name, file=holder.name, state="whole", proof="digest", bytes=file.size)
    if proved and old is not None and old.proven and len(old) and cover(old, file.size, rules.classes):
        for label in old.batch.column("label").unique().to_pylist():
            rules.classes.take(label)
        outcome = replace(outcome, samples=len(old))
        return Prepared(shard=shard, holder=holder, file=file, outcome=outcome, rows=old.batch)
    salvage = _sourced(file, shard, old, rules) if proved and old is not None and not old.proven else None
    if salvage is None:
        salvage = walk(file, shard.name, None if proved else old, rules, log.add)
    found = replace(outcome, samples=salvage.samples, lost=salvage.lost, without_source=salvage.without_source)
    if not salvage.samples:
        if not salvage.lost:
            log.add(Lost(None, shard.name, 0, "headers", "no sample in the whole file"))
        found = replace(found, state="nothing", proof="none", lost=max(salvage.lost, 1), bytes=0)
        return Prepared(shard=shard, holder=holder, file=file, outcome=found)
    proof = "structure" if old is None else "payloads" if old.proven else "some-payloads"
    whole = salvage.identical and holder.digest is not None
    if whole and proved:
        proof = "digest"
    elif whole and proof == "payloads" and shard.digest is not None and not salvage.lost:
        proof = "json-damaged"
    found = replace(found, state="whole" if whole else "salvaged", proof=proof)
    return Prepared(
        shard=shard, holder=holder, file=file, outcome=found, rows=salvage.rows(), salvage=None if whole else salvage
    )


def _sourced(file: DamagedFile, shard: LogicalShard, old: OldRows, rules: Rules) -> Salvage | None:
    """Walk a shard that is proved with rows that are not: they may name the sources. None when they contradict it."""
    tried = replace(rules, keys=set(rules.keys))
    salvage = walk(file, shard.name, old, tried, lambda _: None)
    if not salvage.identical:
        return None
    rules.keys |= tried.keys
    return replace(salvage, lost=0)
