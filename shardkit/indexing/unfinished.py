"""One run between its record and its manifest: what is kept of an earlier one, read, committed, and put on record."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import threading
from collections import Counter
from typing import TYPE_CHECKING, Literal

from shardkit.errors import ConfigError, IntegrityError, ManifestError, ShardkitError, SourceError
from shardkit.format.dataset_record import DATASET_INDEX, MANIFEST
from shardkit.format.manifest import dump_manifest
from shardkit.indexing.crew import Crew
from shardkit.indexing.listing import make_manifest, write_index, write_refusals
from shardkit.indexing.record import IndexRecord, difference, index_journal
from shardkit.indexing.refusals import NOT_ADJACENT_REMEDY, stop_error, with_tar_remedy
from shardkit.indexing.result import IndexResult
from shardkit.indexing.target import INDEX_ENDS, UNCHANGED
from shardkit.running.first_error import FirstError
from shardkit.storage.atomic import fsync_dir, os_errors, remove, replace_file
from shardkit.version import __version__

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from shardkit.format.manifest import Manifest
    from shardkit.indexing.inputs import ShardFile
    from shardkit.indexing.options import IndexOptions
    from shardkit.indexing.refusals import IndexRefusal
    from shardkit.indexing.result import IndexProgress
    from shardkit.indexing.rows import ShardOutcome
    from shardkit.indexing.target import Target

__all__ = ["OnError", "UnfinishedIndex"]

OnError = Literal["skip", "fail"]


class UnfinishedIndex:
    """One run, with its target held."""

    def __init__(
        self, target: Target, options: IndexOptions, shards: Sequence[ShardFile], progress: IndexProgress
    ) -> None:
        """Take what is to be done; the target is as it was."""
        self.target = target
        self.options = options
        self.shards = shards
        self.progress = progress
        self.done: dict[int, ShardOutcome] = {}
        """What is known of each shard, by its place."""
        self.kept = 0
        """How many of them an earlier run had finished."""
        self.record = IndexRecord(
            shardkit=__version__, options=options.recorded(), shards=[shard.name for shard in shards]
        )
        self.journal = index_journal(target.journal, self.record.identity)
        self._lock = threading.Lock()
        self._stage: Literal["untouched", "beginning", "making", "sealing", "refused"] = "untouched"

    @contextlib.contextmanager
    def told(self) -> Iterator[None]:
        """Let whatever ends the run early say what it leaves on the disk, and how to go on."""
        try:
            with os_errors("the system refused an operation", self.target.folder):
                yield
        except ShardkitError as error:
            kept = self._kept()
            error.kept = kept or error.kept
            if kept is not None and kept != UNCHANGED:
                error.remedy = _with_resume(error.remedy)
            raise
        except BaseException as error:  # Ctrl-C, SIGTERM, a bug
            kept = self._kept()
            if kept is not None:
                error.add_note(kept)
                if kept != UNCHANGED:
                    error.add_note("run again with --resume to go on")
            raise

    def _kept(self) -> str | None:
        """Say what is on the disk; None when that is for the error itself to say."""
        if self._stage == "refused":
            return None
        try:
            if self._stage == "untouched" or (self._stage == "beginning" and not self.target.in_progress):
                return UNCHANGED
            if self._stage == "sealing" and self.target.finished:
                return "every file is in its place, but a power cut could undo that"
        except ShardkitError:
            return None  # nobody knows
        return f"{len(self.done)} of {len(self.shards)} shards are indexed and kept"

    def prepare(self, *, resume: bool, overwrite: bool) -> None:
        """Bring the target into the state of an unfinished run with this record.

        Raises:
            ConfigError: the target holds something that this run may not replace or go on with.
        """
        self.target.refuse_files_for_links(self.shards)
        if resume and self.target.in_progress:
            self._go_on()
        else:
            self._start_anew(overwrite)
        self._stage = "making"
        self.kept = len(self.done)

    def _go_on(self) -> None:
        before = self.target.read_record()
        if before is None:
            raise ConfigError("the record of the unfinished run is damaged, or of another version",
                              path=self.target.record, remedy="give --overwrite to start again")  # fmt: skip
        found = difference(before, self.record)
        if found:
            raise ConfigError("the unfinished run had other shards or options", path=self.target.folder, found=found,
                              remedy="run it with those, or give --overwrite to start again")  # fmt: skip
        for number, outcome in self.journal.read().items():
            if number >= len(self.shards):
                continue
            shard, record = self.shards[number], outcome.record
            if record is not None and self._is_as_read(shard, outcome) and self.target.holds(
                shard, record, self.options.digest
            ):  # fmt: skip
                self.done[number] = outcome
        self._stage = "making"
        kept = {name for number in self.done for name in _files(self.shards[number])}
        self.target.remove_files(name for name in before.replaces if name not in kept)

    def _is_as_read(self, shard: ShardFile, outcome: ShardOutcome) -> bool:
        with os_errors("cannot look at a shard", os.fsencode(shard.path)):
            return os.stat(shard.path).st_mtime_ns == outcome.mtime_ns

    def _start_anew(self, overwrite: bool) -> None:
        replaced = self._replaced(overwrite)
        strangers = [name for name in self.target.strangers(self.shards) if name not in replaced]
        if strangers and not overwrite and not replaced:
            raise ConfigError(
                "the folder holds files that this run would write", path=self.target.folder,
                found=f"{', '.join(strangers[:5])}{' and others' if strangers[5:] else ''}",
                remedy="give --overwrite to replace them, or another folder with --out",
            )  # fmt: skip
        self._stage = "beginning"
        names = sorted({*replaced, *(name for name in strangers if name.endswith((".tar", *INDEX_ENDS)))}
                       - {DATASET_INDEX})  # fmt: skip
        self.target.begin(dataclasses.replace(self.record, replaces=names))

    def _replaced(self, overwrite: bool) -> list[str]:
        """Return the files of the dataset, or the unfinished run, that lies in the target."""
        if self.target.finished:
            try:
                manifest = self.target.load_manifest()
            except ManifestError:
                if not overwrite:
                    raise
                return []
            if manifest.layout != "foreign":
                raise ConfigError(
                    "the folder holds a dataset that shardkit packed: it has its indexes", path=self.target.folder,
                    remedy="load it as it is, or index elsewhere with --out",
                )  # fmt: skip
            return [name for shard in manifest.shards for name in (shard.name, *(shard.stem + e for e in INDEX_ENDS))]
        record = self.target.read_record() if self.target.in_progress else None
        if record is None:
            return []
        stems = [name.removesuffix(".tar") for name in record.shards]
        return [*record.replaces, *(stem + end for stem in stems for end in (".tar", *INDEX_ENDS))]

    def make(self, jobs: int, on_error: OnError) -> None:
        """Index the shards that are missing, and commit each.

        Raises:
            SourceError: something was refused, and `on_error` is "fail"; a damaged shard then raises its own error.
            ShardkitError: what a worker met, or what hindered a commit.
        """
        missing = [number for number in range(len(self.shards)) if number not in self.done]
        self.progress.begin(len(missing), sum(self.shards[number].bytes for number in missing))
        stop = FirstError()
        self._taken(self.done, on_error, stop)
        crew = Crew(self.shards, self.options, self.target, self._arrived)
        with contextlib.closing(crew.index(missing, jobs, stop.matters)) as batches:
            for outcomes in batches:
                # What is ready at the same time shares its syncs: of a large dataset on many processors they are most.
                self._commit(self._taken(dict(outcomes), on_error, stop))
        stop.raise_unless_open()

    @staticmethod
    def _taken(
        outcomes: Mapping[int, ShardOutcome | ShardkitError], on_error: OnError, stop: FirstError
    ) -> dict[int, ShardOutcome]:
        """Return what is to be committed; whatever ends the run goes into `stop`."""
        taken = {}
        for number, outcome in outcomes.items():
            if isinstance(outcome, ShardkitError):
                stop.note(number, outcome)
            elif on_error == "fail" and (error := _refusal(outcome)) is not None:
                stop.note(number, error)
            else:
                taken[number] = outcome
        return taken

    def _commit(self, outcomes: Mapping[int, ShardOutcome]) -> None:
        with_rows = {number: outcome for number, outcome in outcomes.items() if outcome.record is not None}
        if with_rows:
            self.target.commit_shards([self.shards[number] for number in with_rows])
            self.journal.extend(with_rows)
        self.done.update(outcomes)
        for _ in outcomes:
            self._advance(1, 0)

    def _arrived(self, count: int) -> None:
        self._advance(0, count)

    def _advance(self, shards: int, count: int) -> None:
        with self._lock:
            self.progress.advance(shards, count)

    def finish(self) -> IndexResult:
        """Write what names the shards: the refusals, the dataset's index, and last the manifest.

        Raises:
            SourceError: no sample can be used.
            ShardkitError: likewise, and not one shard is a whole tar: the error of the first.
        """
        outcomes = [self.done[number] for number in range(len(self.shards))]
        records = [outcome.record for outcome in outcomes if outcome.record is not None]
        refused = [refusal for outcome in outcomes for refusal in outcome.refused]
        if not records:
            self._stage = "refused"
            remove(self.target.record)
            errors = [outcome.error for outcome in outcomes if outcome.error is not None]
            whole = len(errors) < len(outcomes)
            raise _no_sample(refused) if whole else with_tar_remedy(errors[0], skip=False)
        index = write_index(self.target, records, self.options.digest)
        rejected = write_refusals(self.target, refused, self.options.digest)
        manifest = make_manifest(self.record, records, index, rejected, len(refused))
        text = dump_manifest(manifest).encode("ascii")
        self._stage = "sealing"
        replace_file(self.target.manifest, text, self.target.temporary(MANIFEST))
        return self._result(manifest, outcomes)

    def already_complete(self) -> IndexResult:
        """Return the result of a finished dataset after making sure that it is this one, and there.

        Raises:
            ConfigError: it is another one.
            IntegrityError: a shard or an index is not there as it was.
        """
        manifest = self.target.load_manifest()
        names = [shard.name for shard in manifest.shards]
        by_name = {shard.name: shard for shard in self.shards}
        same = manifest.layout == "foreign" and set(names) <= set(by_name) and (
            bool(manifest.totals.refused) or len(names) == len(by_name)
        )  # fmt: skip
        before = IndexRecord(shardkit=manifest.shardkit, options=manifest.options,
                             shards=self.record.shards if same else names)  # fmt: skip
        found = difference(before, self.record)
        if found:
            raise ConfigError("the folder holds a finished dataset of other shards or options", path=self.target.folder,
                              found=found, remedy="give --overwrite to replace it")  # fmt: skip
        for record in manifest.shards:
            if not self.target.holds(by_name[record.name], record, manifest.digest_algorithm):
                raise IntegrityError(
                    "the dataset is finished, but a shard of it has changed or an index is damaged",
                    path=self.target.path(record.name), remedy="give --overwrite to index again",
                )  # fmt: skip
        fsync_dir(self.target.folder)  # the run that wrote the manifest may have failed to
        self.kept = len(manifest.shards)
        return self._result(manifest, [])

    def _result(self, manifest: Manifest, outcomes: Sequence[ShardOutcome]) -> IndexResult:
        by_shard = {
            shard.name: Counter(refusal.reason for refusal in outcome.refused)
            for shard, outcome in zip(self.shards, outcomes, strict=False) if outcome.refused
        }  # fmt: skip
        sums = {name: sum(getattr(outcome, name) for outcome in outcomes)
                for name in ("unlabelled", "odd_images", "odd_metadata")}  # fmt: skip
        return IndexResult(
            manifest=manifest, folder=os.fsdecode(self.target.folder), refused=sum(by_shard.values(), Counter()),
            by_shard=by_shard, kept=self.kept, left_out=sum(outcome.record is None for outcome in outcomes), **sums,
        )  # fmt: skip


def _refusal(outcome: ShardOutcome) -> ShardkitError | None:
    """Return the error of a run that stops at the first refusal; None when nothing of the shard was refused."""
    if outcome.error is not None:
        return with_tar_remedy(outcome.error, skip=True)
    return stop_error(outcome.refused[0]) if outcome.refused else None


def _no_sample(refused: Sequence[IndexRefusal]) -> SourceError:
    counts = Counter(reason for _, reason in sorted({(one.path, one.reason) for one in refused}))  # not by the piece
    if len(counts) > 1:
        del counts["no-samples"]  # what follows from the others
    found = ", ".join(f"{count} {reason}" for reason, count in counts.most_common())
    remedy = "see docs/index.md for each reason"
    if "not-adjacent" in counts:
        remedy = NOT_ADJACENT_REMEDY
    if "bad-label" in counts:
        remedy = "--labels none takes the samples without a label"
    if "no-image" in counts:
        remedy = "--image-ext names the extensions of images"
    return SourceError("no sample of these shards can be used: there is no dataset", found=found, remedy=remedy)


def _files(shard: ShardFile) -> list[str]:
    return [shard.name, *(shard.stem + end for end in INDEX_ENDS)]


def _with_resume(remedy: str | None) -> str:
    if not remedy:
        return "run again with --resume"
    return remedy if "--resume" in remedy else f"{remedy}, then run again with --resume"
