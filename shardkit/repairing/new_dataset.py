"""The repaired dataset in a folder of its own, with the commit protocol of a pack; interrupted, it begins again."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from typing import TYPE_CHECKING

from shardkit.errors import ConfigError, UnsafeError
from shardkit.format.checksum import hex_digest
from shardkit.format.dataset_record import DATASET_INDEX, MANIFEST, REJECTED, SHARD_FILES
from shardkit.format.manifest import FileRecord, Manifest, Totals, dump_manifest
from shardkit.format.strict_json import parse_json_object
from shardkit.packing.target import Target, untouched
from shardkit.repairing.lost import LOST, LostLog
from shardkit.repairing.prepare import Prepared, prepare, proved_by_digest
from shardkit.repairing.result import RepairProgress, RepairResult, ShardOutcome
from shardkit.repairing.unfinished import Ending, UnfinishedRepair
from shardkit.repairing.write import Workshop, changed_shard, stage_index
from shardkit.storage.atomic import BufferedFile, commit, replace_file
from shardkit.storage.regular import open_regular
from shardkit.version import __version__

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardkit.format.dataset_record import ShardRecord
    from shardkit.repairing.identify import ShardFile
    from shardkit.repairing.survey import Survey
    from shardkit.repairing.threads import Threads
    from shardkit.repairing.walk import Rules

__all__ = ["NothingSavedError", "Refused", "load_refused", "make_manifest", "notes_of", "refuse_filled", "write_new"]

_MAX_REFUSED_BYTES = 1 << 30


class NothingSavedError(Exception):
    """No sample of any shard was whole: there is no dataset to write; never seen outside."""

    def __init__(self, result: RepairResult) -> None:
        """Carry what was found."""
        super().__init__(result)
        self.result = result


class Refused:
    """The list of sources that the pack had refused: as it was, absent, or lost."""

    def __init__(self, data: bytes | None, record: FileRecord | None, *, lost: bool) -> None:
        """Keep the bytes and their record; None for no list."""
        self.data = data
        self.record = record
        self.lost = lost

    @property
    def lines(self) -> int:
        """Number of refused sources."""
        return 0 if self.data is None else self.data.count(b"\n")


def load_refused(found: Survey) -> Refused:
    """Return the list of refusals when it is what the manifest says; without a manifest, when each line is one."""
    wanted = found.manifest.rejected if found.manifest else None
    if found.manifest is not None and wanted is None:
        return Refused(None, None, lost=False)
    try:
        with open_regular(os.path.join(found.folder, REJECTED.encode()), _MAX_REFUSED_BYTES) as file:
            data = file.read()
    except (OSError, UnsafeError):
        if wanted is not None:
            found.notes.append(f"{REJECTED} is not there, or cannot be read")
        return Refused(None, None, lost=wanted is not None)
    record = FileRecord(bytes=len(data), digest=hex_digest(found.algorithm, data))
    if record == wanted or (wanted is None and _is_list(data)):
        return Refused(data, record, lost=False)
    found.notes.append(f"{REJECTED} is damaged: left out")
    return Refused(None, None, lost=True)


def _is_list(data: bytes) -> bool:
    try:
        lines = data.decode("utf-8").split("\n")
        return lines.pop() == "" and all(parse_json_object(x).keys() == {"path", "reason", "detail"} for x in lines)
    except ValueError:
        return False


def refuse_filled(target: Target, before: Sequence[bytes] | None) -> None:
    """Refuse a folder that holds a dataset, or anything that a repair would write.

    Args:
        target: the folder.
        before: files of an interrupted repair, which the next one removes; None where there was none.

    Raises:
        ConfigError: it does.
    """
    if before is not None:
        target.refuse_strangers([*map(os.fsdecode, before), MANIFEST, DATASET_INDEX, REJECTED])
        return
    if target.finished:
        raise ConfigError("the target holds a dataset", path=target.folder, remedy="choose another folder")
    target.refuse_strangers([])
    if os.path.lexists(target.path(LOST)):
        raise ConfigError("the target holds a list of losses", path=target.path(LOST), remedy="choose another folder")


def write_new(
    found: Survey, holders: Sequence[ShardFile | None], rules: Rules, target: Target, *, link: bool,
    threads: Threads, progress: RepairProgress, ending: Ending,
) -> RepairResult:  # fmt: skip
    """Write the repaired dataset into the target's folder; `ending` learns which file gets its name last.

    Raises:
        NothingSavedError: there is nothing to write; the target is as it was.
        ConfigError: the target holds something else.
        ShardkitError: as `shardkit.repairing.run.repair`.
    """
    with target.hold():
        new = _NewDataset(found, rules, target, threads, ending, link=link)
        with untouched():
            new.begin(holders)
        names = [os.fsencode(shard.stem + extension) for shard in found.shards for extension in SHARD_FILES]
        with new.unfinished.recorded(names):
            return new.write(holders, progress)


class _NewDataset:
    def __init__(
        self, found: Survey, rules: Rules, target: Target, threads: Threads, ending: Ending, *, link: bool
    ) -> None:
        self.found, self.rules, self.target, self.link = found, rules, target, link
        self.threads, self.ending = threads, ending
        self.unfinished = UnfinishedRepair(target, found.folder)
        self.workshop = Workshop(target.temporary, found.algorithm, rules.align, threads.check)
        self.refused = load_refused(found)
        self.records: list[ShardRecord] = []
        self.outcomes: list[ShardOutcome] = []

    def begin(self, holders: Sequence[ShardFile | None]) -> None:
        """Take the folder: empty, or what an interrupted repair of the same dataset has left, which is removed."""
        before = self.unfinished.before
        refuse_filled(self.target, before)
        whole = [h for s, h in zip(self.found.shards, holders, strict=True) if h and proved_by_digest(s, h)]
        if not self.link:
            freed = map(os.fsdecode, before or [])
            self.target.check_space(sum(holder.size for holder in whole), len(self.found.shards), freed)
        self.unfinished.sweep()

    def write(self, holders: Sequence[ShardFile | None], progress: RepairProgress) -> RepairResult:
        """Write and commit shard after shard, then what names them."""
        with BufferedFile(self.target.temporary(LOST)) as file:
            log = LostLog(file, self.found.algorithm)
            with contextlib.closing(prepare(self.found, holders, self.rules, log, self.threads, self._make)) as shards:
                for prepared, (outcome, record) in shards:
                    if record is not None:
                        self.records.append(record)
                        self.target.commit_shard(record)
                    self.outcomes.append(outcome)
                    progress.advance(0 if prepared.holder is None else prepared.holder.size)
        if not self.records:
            raise NothingSavedError(self._result(log, None, []))
        written = [record.stem + extension for record in self.records for extension in SHARD_FILES]
        if log.counts:
            commit([(self.target.temporary(LOST), self.target.path(LOST))])
            written.append(LOST)
        if self.refused.data is not None:
            replace_file(self.target.path(REJECTED), self.refused.data, self.target.temporary(REJECTED))
            written.append(REJECTED)
        staged = self.target.temporary(DATASET_INDEX)
        index = stage_index(staged, [self.target.path(r.stem + ".arrow") for r in self.records], self.found.algorithm)
        commit([(staged, self.target.path(DATASET_INDEX))])
        manifest = make_manifest(self.found, self.rules, self.records, index, self.refused, log)
        self.ending.last = self.target.manifest
        replace_file(self.target.manifest, dump_manifest(manifest).encode("ascii"), self.target.temporary(MANIFEST))
        return self._result(log, manifest, [*written, DATASET_INDEX, MANIFEST])

    def _make(self, prepared: Prepared) -> tuple[ShardOutcome, ShardRecord | None]:
        """Write one shard and its indexes under temporary names."""
        outcome, file, rows = prepared.outcome, prepared.file, prepared.rows
        if file is None or rows is None:
            return outcome, None
        name, digest = outcome.name, prepared.holder.digest if prepared.holder else None
        size = file.size
        if prepared.salvage is None and digest is not None:
            self.workshop.copy(file.path, name, digest, link=self.link)
        elif prepared.salvage is not None:
            size, digest = self.workshop.rebuild(file, name, prepared.salvage)
            outcome = prepared.sealed(size, digest)
        if file.changed():
            raise changed_shard(file.path)
        return outcome, self.workshop.index(name, size, str(digest), rows)

    def _result(self, log: LostLog, manifest: Manifest | None, written: list[str]) -> RepairResult:
        return RepairResult(
            shards=tuple(self.outcomes), counts=dict(log.counts), first=tuple(log.first),
            notes=notes_of(self.found, self.rules), rejected_lost=self.refused.lost, written=tuple(written),
            manifest=manifest,
        )  # fmt: skip


def notes_of(found: Survey, rules: Rules) -> tuple[str, ...]:
    """Return what a person is told of a finished repair beside its shards."""
    nameless = "the names of the classes are lost: no json member states them; the labels are kept"
    return (*found.notes, nameless) if rules.classes.nameless else tuple(found.notes)


def make_manifest(
    found: Survey, rules: Rules, records: Sequence[ShardRecord], index: FileRecord, refused: Refused, log: LostLog
) -> Manifest:
    """Return the manifest of the repaired dataset: the old one, where nothing but indexes was made again."""
    old = found.manifest
    size, payload = sum(r.bytes for r in records), sum(r.payload for r in records)
    padding = sum(r.padding for r in records)
    totals = Totals(
        shards=len(records), samples=sum(r.samples for r in records), payload=payload,
        headers=size - payload - padding, padding=padding, bytes=size, refused=refused.lines,
    )  # fmt: skip
    names = {record.name for record in records}
    splits = {s: [name for name in shards if name in names] for s, shards in (old.splits if old else {}).items()}
    new = Manifest(
        shardkit=old.shardkit if old else __version__, name=found.name, align=rules.align,
        digest_algorithm=found.algorithm, seed=old.seed if old else 0, options=dict(old.options) if old else {},
        classes=rules.classes.result(), splits=splits, index=index, rejected=refused.record, shards=list(records),
        totals=totals,
    )  # fmt: skip
    if old is not None and new.generation == old.generation and not log.counts and refused.record == old.rejected:
        return new
    told = {
        "generation": old.generation if old else None, "lost": log.counts.total(),
        "lost_list": f"{found.algorithm}:{log.record.digest}" if log.counts else None,
    }  # fmt: skip
    return dataclasses.replace(new, options={**new.options, "repair": told})
