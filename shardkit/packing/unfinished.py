"""One pack between its plan and its manifest: what is kept of an earlier run, made, committed, and put on record."""

from __future__ import annotations

import contextlib
import dataclasses
from collections import Counter
from typing import TYPE_CHECKING, Literal

import numpy as np
import pyarrow as pa

from shardkit.errors import ConfigError, IntegrityError, ManifestError, ShardkitError, SourceError
from shardkit.format.checksum import new_digest
from shardkit.format.dataset_record import MANIFEST, REJECTED, SHARD_FILES
from shardkit.format.index import ArrowSink
from shardkit.format.manifest import dump_manifest
from shardkit.packing.journal import pack_journal
from shardkit.packing.labels import LabelCount
from shardkit.packing.listing import count_labels, make_manifest, write_index, write_refusals
from shardkit.packing.record import PackRecord, difference
from shardkit.packing.refusals import every_refused
from shardkit.packing.result import PackResult
from shardkit.packing.sharing import decide
from shardkit.packing.target import UNCHANGED
from shardkit.packing.workers import PlanFile
from shardkit.storage.atomic import BufferedFile, commit, fsync_dir, os_errors, remove, replace_file
from shardkit.version import __version__

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardkit.format.manifest import Manifest, ShardRecord
    from shardkit.packing.options import ShardOptions
    from shardkit.packing.plan import Plan
    from shardkit.packing.refusals import Refusal
    from shardkit.packing.result import PackProgress
    from shardkit.packing.supply import Supply
    from shardkit.packing.target import Target
    from shardkit.packing.workers import Workers
    from shardkit.packing.write import ShardResult
    from shardkit.storage.clone import Reflink

__all__ = ["UnfinishedPack"]

_INDEX_BYTES_A_SAMPLE = 512
_INDEX_BYTES_A_SHARD = 16 << 10
"""Roughly what the indexes take, with the rounding to whole blocks; a check of the free space need not know better."""


class UnfinishedPack:
    """One pack, with its target held."""

    def __init__(
        self, target: Target, options: ShardOptions, supply: Supply, plan: Plan, progress: PackProgress,
        reflink: Reflink = "never",
    ) -> None:  # fmt: skip
        """Spill the plan to a temporary file; the target is as it was.

        Raises:
            ShardkitError: `reflink` is `always`, and does not work.
        """
        self.reflink = decide(reflink, options, supply, target.folder)
        self.target = target
        self.options = options
        self.supply = supply
        self.plan = plan
        self.progress = progress
        self.done: dict[int, ShardResult] = {}
        """Finished shards by their number."""
        self.kept = 0
        """How many of them an earlier run had finished."""
        self._made_payload = self._shared_bytes = 0
        self.record = self._spill_plan()
        self.journal = pack_journal(target.journal, self.record.identity)
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
            if kept is not None and kept != UNCHANGED and not isinstance(error, SourceError):
                error.remedy = _with_resume(error.remedy)
            raise
        except BaseException as error:  # Ctrl-C, SIGTERM, a bug
            kept = self._kept()
            if kept is not None:
                error.add_note(kept)
                if kept != UNCHANGED:
                    error.add_note(f"{_with_resume(None)} to go on")
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
        finished = set(self.done)
        with contextlib.suppress(ShardkitError):  # one may have got its line just before the end
            finished |= self.journal.synced()
        return f"{len(finished)} of {self.plan.shards} shards are finished and kept"

    def prepare(self, *, resume: bool) -> None:
        """Bring the target into the state of an unfinished pack with this plan.

        Raises:
            ConfigError: the target holds something that this pack may not replace or go on with.
            TargetFullError: what is missing does not fit.
        """
        if resume and self.target.in_progress:
            self._go_on()
        else:
            self._start_anew()
        self._stage = "making"
        self.kept = len(self.done)

    def _go_on(self) -> None:
        self._refuse_other_record()
        for number, result in self.journal.read().items():
            record = result.record
            if number < self.plan.shards and (record is None or self.target.holds(record, self.options.digest)):
                self.done[number] = result
        names = [name for result in self.done.values() for name in _files(result.record)]
        others = {*self.target.owned_files(self.options.name), *self._replaced()} - set(names)
        self.target.refuse_strangers([*names, *others])
        self._check_space([])
        self._stage = "making"
        commit([(self.target.temporary("plan.arrow"), self.target.plan)])
        # Made, but not acknowledged: they are made again. Or of the dataset that this pack replaces.
        self.target.remove_files(others)

    def _start_anew(self) -> None:
        replaced = self._replaced()
        self.target.refuse_strangers(replaced)
        self._check_space(replaced)
        self._stage = "beginning"
        self.target.begin(dataclasses.replace(self.record, replaces=replaced))

    def _replaced(self) -> list[str]:
        """Return the files of the pack that lies in the target."""
        if self.target.finished:
            try:
                manifest = self.target.load_manifest()
            except ManifestError:
                return self.target.owned_files(self.options.name)
            if manifest.layout != "aligned":
                raise ConfigError(
                    "the target holds shards that another tool made and shardkit indexed: they are not replaced",
                    path=self.target.folder, remedy="choose another folder",
                )  # fmt: skip
            return [name for shard in manifest.shards for name in _files(shard)]
        if not self.target.in_progress:
            return []
        record = self.target.read_record()
        if record is None:
            return self.target.owned_files(self.options.name)
        return [*self.target.owned_files(str(record.options.get("name"))), *record.replaces]

    def _refuse_other_record(self) -> None:
        before = self.target.read_record()
        if before is None:
            raise ConfigError(
                "the record of the unfinished pack is damaged, or of another version", path=self.target.record,
                remedy="give --overwrite to start again",
            )  # fmt: skip
        found = difference(before, self.record)
        if found:
            raise ConfigError(
                "the unfinished pack had other sources or options", path=self.target.folder, found=found,
                remedy="run it with those, or give --overwrite to start again",
            )  # fmt: skip

    def _check_space(self, replaced: list[str]) -> None:
        if self.options.resize is not None or self.options.baseline or self.reflink != "never":
            return  # nobody knows how large the images will be, or how many of their blocks are there
        missing = np.array([i not in self.done for i in range(self.plan.shards)])
        samples, shards = int(np.diff(self.plan.bounds)[missing].sum()), int(missing.sum())
        needed = int(self.plan.bytes[missing].sum())
        needed += samples * _INDEX_BYTES_A_SAMPLE + shards * _INDEX_BYTES_A_SHARD
        self.target.check_space(needed, shards, replaced)

    def make(self, workers: Workers) -> None:
        """Make the shards that are missing, and commit each.

        Raises:
            ShardkitError: what a worker met, or what hindered a commit.
        """
        self.progress.begin(len(self.plan.order), self.plan.payload)
        plan = PlanFile(
            path=self.target.plan,
            origin=self.supply.origin,
            work=self.target.scratch,
            options=self.options,
            reflink=self.reflink,
        )
        # Of sources, as the whole is: what is stored of them may be smaller.
        for number, (samples, payload) in plan.amounts(self.done):
            self.progress.advance(samples, payload, len(self.done[number].refused))
        missing = [i for i in range(self.plan.shards) if i not in self.done]
        for number, result in workers.make(plan, missing, self.progress.advance):
            if result.record is not None:
                self._made_payload += result.record.payload
                self._shared_bytes += result.shared_bytes
                self.target.commit_shard(result.record)
            self.journal.append(number, result)
            self.done[number] = result

    def finish(self) -> PackResult:
        """Write what names the shards: the refusals, the dataset's index, and last the manifest.

        Raises:
            SourceError: every source was refused, so that there is no dataset.
        """
        results = [self.done[i] for i in range(self.plan.shards)]
        shards = [result.record for result in results if result.record is not None]
        refused = self.supply.refused + [refusal for result in results for refusal in result.refused]
        rejected = write_refusals(self.target, refused, self.options.digest)
        if not shards:
            self._stage = "refused"
            remove(self.target.record)
            raise every_refused(refused, self.target.path(REJECTED), "see the file for each reason")
        labels = LabelCount(self.supply.classes)
        index = write_index(self.target, shards, self.options.digest, labels)
        manifest = make_manifest(self.record, shards, index, rejected, len(refused))
        text = dump_manifest(manifest).encode("ascii")
        self._stage = "sealing"
        replace_file(self.target.manifest, text, self.target.temporary(MANIFEST))
        return self._result(manifest, refused, labels)

    def already_complete(self) -> PackResult:
        """Return the result of a finished pack after making sure that it is this one, and there.

        Raises:
            ConfigError: it is another one.
            IntegrityError: a shard is not there as it was written.
        """
        manifest = self.target.load_manifest()
        before = PackRecord(
            shardkit=self.record.shardkit, options=manifest.options, plan=self.record.plan,
            classes=None if manifest.classes is None else list(manifest.classes),
        )  # fmt: skip
        found = difference(before, self.record)
        if found:
            raise ConfigError(
                "the target holds a finished dataset of other sources or options", path=self.target.folder,
                found=found, remedy="give --overwrite to replace it",
            )  # fmt: skip
        for shard in manifest.shards:
            if not self.target.holds(shard, manifest.digest_algorithm):
                raise IntegrityError(
                    "the dataset is finished, but a shard of it is damaged or gone",
                    path=self.target.path(shard.name),
                    remedy="shardkit verify says what is wrong; --overwrite packs it again",
                )  # fmt: skip
        fsync_dir(self.target.folder)  # the run that wrote the manifest may have failed to
        self.kept = len(manifest.shards)
        labels = LabelCount(self.supply.classes)
        count_labels(self.target, manifest.shards, manifest.digest_algorithm, labels)
        return self._result(manifest, [], labels)

    def _result(self, manifest: Manifest, refused: list[Refusal], labels: LabelCount) -> PackResult:
        return PackResult(
            manifest=manifest, refused=Counter(r.reason for r in refused), skipped=self.supply.skipped,
            kept=self.kept, made_payload=self._made_payload, labelled=labels.labelled, empty_classes=labels.empty,
            shared_bytes=self._shared_bytes,
        )  # fmt: skip

    def _spill_plan(self) -> PackRecord:
        """Write the plan under a temporary name; return what must be the same to go on with it."""
        full, portable = new_digest("xxh3-128"), new_digest("xxh3-128")
        with (
            BufferedFile(self.target.temporary("plan.arrow")) as file,
            pa.ipc.new_file(pa.PythonFile(ArrowSink(file), mode="w"), self.supply.schema) as writer,
        ):
            for batch in self.supply.batches(self.plan):
                writer.write_batch(batch)
                self.supply.update_identity(batch, full, portable)
        # The manifest's record leaves times out: two copies of a tree pack into equal bytes.
        options = {**self.options.recorded(), "source_list": f"xxh3-128:{portable.hexdigest()}"}
        classes = None if self.supply.classes is None else list(self.supply.classes)
        return PackRecord(shardkit=__version__, options=options, classes=classes, plan=full.hexdigest())


def _files(record: ShardRecord | None) -> list[str]:
    return [] if record is None else [record.stem + extension for extension in SHARD_FILES]


def _with_resume(remedy: str | None) -> str:
    if not remedy:
        return "run again with --resume"
    return remedy if "--resume" in remedy else f"{remedy}, then run again with --resume"
