"""Index files and a manifest that are missing, beside shards that are whole: new names only, nothing is replaced."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from shardkit.errors import ConfigError, UnsafeError
from shardkit.format.checksum import hex_digest
from shardkit.format.dataset_record import DATASET_INDEX, MANIFEST, REJECTED, SHARD_FILES
from shardkit.format.manifest import FileRecord, dump_manifest
from shardkit.packing.target import UNCHANGED
from shardkit.repairing.lost import LostLog
from shardkit.repairing.new_dataset import load_refused, make_manifest, notes_of
from shardkit.repairing.prepare import Prepared, prepare
from shardkit.repairing.result import RepairProgress, RepairResult, ShardOutcome
from shardkit.repairing.write import Workshop, place_new, stage_index
from shardkit.storage.atomic import BufferedFile
from shardkit.storage.regular import open_regular

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardkit.format.dataset_record import ShardRecord
    from shardkit.packing.target import Target
    from shardkit.repairing.identify import ShardFile
    from shardkit.repairing.survey import Survey
    from shardkit.repairing.threads import Threads
    from shardkit.repairing.unfinished import Ending
    from shardkit.repairing.walk import Rules

__all__ = ["complete_in_place"]

_SHOWN = 5


def complete_in_place(
    found: Survey, holders: Sequence[ShardFile | None], rules: Rules, target: Target, threads: Threads,
    progress: RepairProgress, ending: Ending,
) -> RepairResult:  # fmt: skip
    """Write what is missing beside the shards; `ending` learns which file gets its name last.

    Raises:
        ConfigError: something is damaged, not only missing: then nothing was changed.
        ShardkitError: as `shardkit.repairing.run.repair`.
    """
    with target.hold():
        place = _Place(found, Workshop(target.temporary, found.algorithm, rules.align, threads.check), target)
        log = LostLog(None, found.algorithm)
        with contextlib.closing(prepare(found, holders, rules, log, threads, place.index)) as shards:
            for prepared, record in shards:
                place.take(prepared, record)
                progress.advance(0 if prepared.holder is None else prepared.holder.size)
        refused = load_refused(found)
        if refused.lost:
            place.problems.append(f"{REJECTED} is damaged or gone")
        place.refuse()
        index = place.stage_all()
        manifest = make_manifest(found, rules, place.records, index, refused, log)
        place.stage(MANIFEST, dump_manifest(manifest).encode("ascii"))
        place.refuse()
        written = place.finish(ending)
        return RepairResult(
            shards=tuple(place.outcomes), counts={}, notes=notes_of(found, rules), written=written, manifest=manifest
        )


def _right(prepared: Prepared) -> bool:
    return prepared.holder is not None and prepared.holder.name == os.fsencode(prepared.outcome.name)


@dataclass(slots=True)
class _Place:
    found: Survey
    workshop: Workshop
    target: Target
    records: list[ShardRecord] = field(default_factory=list)
    outcomes: list[ShardOutcome] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    """Names that are free, in the order in which the files get them."""

    def index(self, prepared: Prepared) -> ShardRecord | None:
        """Write the indexes of a whole shard out of sight; None for one that is not whole, or has another's name."""
        outcome, rows = prepared.outcome, prepared.rows
        if outcome.state != "whole" or outcome.proof == "json-damaged" or not _right(prepared) or rows is None:
            return None
        digest = "" if prepared.holder is None or prepared.holder.digest is None else prepared.holder.digest
        return self.workshop.index(outcome.name, outcome.bytes, digest, rows)

    def take(self, prepared: Prepared, record: ShardRecord | None) -> None:
        """See which indexes of a shard are missing."""
        outcome = prepared.outcome
        self.outcomes.append(outcome)
        if record is None:
            what = outcome.state if outcome.state != "whole" or _right(prepared) else "under another name"
            self.problems.append(f"{outcome.name} is {'damaged' if what in ('salvaged', 'nothing', 'whole') else what}")
            return
        self.records.append(record)
        for extension, file in zip(SHARD_FILES[1:], (record.index, record.dali_index), strict=True):
            self._compare(record.stem + extension, file)

    def stage_all(self) -> FileRecord:
        """Write `index.arrow` out of sight, and see whether it is missing; return its record."""
        indexes = [self.target.temporary(record.stem + ".arrow") for record in self.records]
        index = stage_index(self.target.temporary(DATASET_INDEX), indexes, self.found.algorithm)
        self._compare(DATASET_INDEX, index)
        return index

    def stage(self, name: str, data: bytes) -> None:
        """Write a file out of sight, and see whether it is missing."""
        with BufferedFile(self.target.temporary(name)) as file:
            file.write(data)
        self._compare(name, FileRecord(bytes=len(data), digest=hex_digest(self.found.algorithm, data)))

    def _compare(self, name: str, wanted: FileRecord) -> None:
        path = self.target.path(name)
        if not os.path.lexists(path):
            self.missing.append(name)
            return
        try:
            with open_regular(path) as file:
                same = hex_digest(self.found.algorithm, file.read()) == wanted.digest
        except (OSError, UnsafeError):
            same = False
        if not same:
            other = "states other files than can be made again (original paths, say, stand in indexes alone)"
            wrong = other if name == MANIFEST and self.found.manifest_whole else "is damaged"
            self.problems.append(f"{name} {wrong}")

    def refuse(self) -> None:
        """Stop when something is damaged: beside the shards, only what is missing can be written."""
        if self.problems:
            rest = len(self.problems) - _SHOWN
            more = [f"and {rest} more"] if rest > 0 else []
            raise ConfigError(
                "there is more than missing index files", path=self.target.folder, kept=UNCHANGED,
                found=", ".join([*self.problems[:_SHOWN], *more]),
                remedy="give --out DIR: a repaired dataset is written there; --dry-run says what can be saved",
            )  # fmt: skip

    def finish(self, ending: Ending) -> tuple[str, ...]:
        """Give the missing files their names, the manifest last."""
        ending.last = self.target.path(self.missing[-1]) if self.missing else None
        for name in self.missing:
            place_new(self.target.temporary(name), self.target.path(name))
        return tuple(self.missing)
