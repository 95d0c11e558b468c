"""One shard, judged: what is left of it, what of that is proved, and what has to be written."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, TypeVar

from shardkit.errors import StorageError
from shardkit.format.checksum import hash64
from shardkit.repairing.damaged_file import DamagedFile
from shardkit.repairing.lost import Lost
from shardkit.repairing.old_rows import cover
from shardkit.repairing.result import ShardOutcome
from shardkit.repairing.threads import Turns
from shardkit.repairing.walk import Rules, walk

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

    from shardkit.format.index import RecordBatch
    from shardkit.repairing.identify import ShardFile
    from shardkit.repairing.lost import LostLog
    from shardkit.repairing.old_rows import OldRows
    from shardkit.repairing.salvage import Salvage
    from shardkit.repairing.survey import LogicalShard, Survey
    from shardkit.repairing.threads import Threads

__all__ = ["Prepared", "name_keys", "prepare", "proved_by_digest"]

_T = TypeVar("_T")


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
    losses: list[Lost] = field(default_factory=list)
    """What the log has not got yet."""

    def sealed(self, size: int, digest: str) -> ShardOutcome:
        """Return the outcome when the shard has been written, and what that proves."""
        outcome = replace(self.outcome, bytes=size)
        if self.shard.digest is None or outcome.proof != "payloads" or outcome.lost:
            return outcome
        return replace(outcome, proof="digest" if digest == self.shard.digest else "json-damaged")


def prepare(
    survey: Survey, holders: Sequence[ShardFile | None], rules: Rules, log: LostLog, threads: Threads,
    work: Callable[[Prepared], _T],
) -> Generator[tuple[Prepared, _T]]:  # fmt: skip
    """Yield every shard in order, and what was made of it; to be closed, however it is left.

    Args:
        survey: the dataset.
        holders: the file of each of its shards.
        rules: of the dataset; learn the keys and the labels that are kept.
        log: takes what is lost.
        threads: judge several shards at a time, and work on them.
        work: called with each shard in one of the threads, while its file is open.

    Raises:
        StorageError: a file changed meanwhile.
        ShardkitError: one cannot be opened, or as `work`.
    """
    turns = Turns(threads.check)

    def one(number: int) -> tuple[Prepared, _T]:
        try:
            return _worked(survey, number, holders[number], rules, turns, threads.check, work)
        finally:
            turns.over(number)

    with contextlib.closing(threads.in_order(one, range(len(survey.shards)))) as shards:
        for prepared, made in shards:
            for lost in prepared.losses:
                log.add(lost)
            prepared.losses.clear()
            for label in () if prepared.rows is None else prepared.rows.column("label").unique().to_pylist():
                rules.classes.take(label)
            yield prepared, made


def _worked(
    survey: Survey, number: int, holder: ShardFile | None, rules: Rules, turns: Turns, check: Callable[[], None],
    work: Callable[[Prepared], _T],
) -> tuple[Prepared, _T]:  # fmt: skip
    shard = survey.shards[number]
    old = survey.rows(shard)
    if holder is None:
        prepared = _missing(shard, old)
        return prepared, work(prepared)
    if old is not None and not old.proven and not any(old.with_key(p.key) is not None for p in holder.probes):
        old = None  # the rows of another shard
    with DamagedFile(os.path.join(survey.folder, holder.name)) as file:
        judging = _Judging(file, shard, holder, old, rules, check)
        if judging.needs_turn:
            turns.wait(number)
        prepared = judging.judge()
        turns.over(number)
        made = work(prepared)
        if file.changed() or file.size != holder.size:
            raise StorageError("the shard changed while it was repaired", path=file.path,
                               remedy="run again when nothing writes to it")  # fmt: skip
    return prepared, made


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


def _missing(shard: LogicalShard, old: OldRows | None) -> Prepared:
    rows = [] if old is None else list(map(old.row, range(len(old))))
    losses = [Lost(row.key, shard.name, row.sample_offset, "missing-shard", "the shard is not there") for row in rows]
    if not losses:
        samples = "an unknown number of" if shard.record is None else str(shard.record.samples)
        losses = [Lost(None, shard.name, 0, "missing-shard", f"{samples} samples, and no index names them")]
    outcome = ShardOutcome(name=shard.name, file=None, state="missing", proof="none", lost=len(losses))
    return Prepared(shard=shard, holder=None, file=None, outcome=outcome, losses=losses)


class _Judging:
    """What is left of one shard."""

    def __init__(
        self, file: DamagedFile, shard: LogicalShard, holder: ShardFile, old: OldRows | None, rules: Rules,
        check: Callable[[], None],
    ) -> None:  # fmt: skip
        self._file, self._shard, self._holder, self._old, self._rules = file, shard, holder, old, rules
        self._check = check
        self._losses: list[Lost] = []
        self._proved = proved_by_digest(shard, holder)
        self._covered = (
            self._proved and old is not None and old.proven and len(old) > 0 and cover(old, file.size, rules.classes)
        )
        self.needs_turn = not self._covered and (self._proved or old is None or not old.proven or self._learns(old))
        """Whether what counts depends on earlier shards: a sample on their keys, a class on its first name."""

    def judge(self) -> Prepared:
        shard, holder, file, old = self._shard, self._holder, self._file, self._old
        outcome = ShardOutcome(name=shard.name, file=holder.name, state="whole", proof="digest", bytes=file.size)
        if self._covered and old is not None:
            outcome = replace(outcome, samples=len(old))
            return Prepared(shard=shard, holder=holder, file=file, outcome=outcome, rows=old.batch)
        salvage = self._sourced() if self._proved and old is not None and not old.proven else None
        if salvage is None:
            salvage = walk(
                file, shard.name, None if self._proved else old, self._rules, self._losses.append, self._check
            )
        found = replace(outcome, samples=salvage.samples, lost=salvage.lost, without_source=salvage.without_source)
        if not salvage.samples:
            if not salvage.lost:
                self._losses.append(Lost(None, shard.name, 0, "headers", "no sample in the whole file"))
            found = replace(found, state="nothing", proof="none", lost=max(salvage.lost, 1), bytes=0)
            return Prepared(shard=shard, holder=holder, file=file, outcome=found, losses=self._losses)
        whole = salvage.identical and holder.digest is not None
        found = replace(found, state="whole" if whole else "salvaged", proof=self._proof(salvage, whole=whole))
        return Prepared(
            shard=shard, holder=holder, file=file, outcome=found, rows=salvage.rows(), losses=self._losses,
            salvage=None if whole else salvage,
        )  # fmt: skip

    def _learns(self, old: OldRows) -> bool:
        return any(map(self._rules.classes.learns, old.batch.column("label").unique().to_pylist()))

    def _proof(self, salvage: Salvage, *, whole: bool) -> str:
        if whole and self._proved:
            return "digest"
        old = self._old
        proof = "structure" if old is None else "payloads" if old.proven else "some-payloads"
        if whole and proof == "payloads" and self._shard.digest is not None and not salvage.lost:
            return "json-damaged"
        return proof

    def _sourced(self) -> Salvage | None:
        """Walk a shard that is proved with rows that are not: they may name the sources.

        Returns:
            None when they contradict it.
        """
        tried = replace(self._rules, keys=set(self._rules.keys))
        salvage = walk(self._file, self._shard.name, self._old, tried, lambda _: None, self._check)
        if not salvage.identical:
            return None
        self._rules.keys |= tried.keys
        return replace(salvage, lost=0)
