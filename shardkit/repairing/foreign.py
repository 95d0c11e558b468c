"""Damaged tars of other tools: every sample that is provably whole is copied, header by header as it stands."""

from __future__ import annotations

import contextlib
import os
from bisect import bisect_left
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeAlias

from shardkit.errors import StorageError
from shardkit.escaping import escape
from shardkit.format.grouping import IMAGE_EXTENSIONS, SampleVerdict, group_members, split_name
from shardkit.format.tar import BLOCK
from shardkit.packing.target import untouched
from shardkit.repairing.damaged_file import DamagedFile
from shardkit.repairing.foreign_walk import walk_foreign
from shardkit.repairing.lost import LOST, Lost, LostLog
from shardkit.repairing.new_dataset import NothingSavedError, refuse_filled
from shardkit.repairing.result import RepairResult, ShardOutcome
from shardkit.repairing.unfinished import Ending, UnfinishedRepair
from shardkit.repairing.write import Workshop, changed_shard
from shardkit.storage.atomic import BufferedFile, commit

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, Sequence

    from shardkit.format.foreign_member import Member
    from shardkit.format.grouping import ForeignSample
    from shardkit.packing.target import Target
    from shardkit.repairing.foreign_walk import Damage
    from shardkit.repairing.identify import ShardFile
    from shardkit.repairing.result import RepairProgress
    from shardkit.repairing.survey import Survey
    from shardkit.repairing.threads import Threads

__all__ = ["look_at_foreign", "save_foreign"]

_CHUNK = 1 << 20
_END = bytes(2 * BLOCK)
_Told: TypeAlias = "tuple[ShardFile, ShardOutcome, Sequence[Lost]]"
_NO_OBSTACLE = {SampleVerdict.NO_IMAGE, SampleVerdict.SEVERAL_IMAGES}


@dataclass(frozen=True, slots=True)
class _Plan:
    """What is saved of one tar."""

    file: ShardFile
    whole: bool
    kept: Sequence[ForeignSample]
    lost: Sequence[Lost]

    def members(self) -> Iterator[Member]:
        """Yield the members that are kept, in stored order."""
        return (member for sample in self.kept for member in sample.members.values())

    def told(self) -> _Told:
        """Return what is said of it; the samples need not be remembered for that."""
        size = sum(member.end - member.start for member in self.members()) + len(_END)
        outcome = ShardOutcome(
            name=escape(self.file.name), file=self.file.name, samples=len(self.kept), lost=len(self.lost),
            state="whole" if self.whole else "salvaged" if self.kept else "nothing",
            proof="structure" if self.whole or self.kept else "none",
            bytes=self.file.size if self.whole else size if self.kept else 0,
        )  # fmt: skip
        return self.file, outcome, self.lost


def look_at_foreign(
    found: Survey, files: Sequence[ShardFile], threads: Threads, progress: RepairProgress
) -> RepairResult:
    """Say what could be saved; write nothing."""

    def look(file: ShardFile) -> _Plan:
        with DamagedFile(os.path.join(found.folder, file.name)) as opened:
            return _plan(opened, file)

    plans = threads.in_order(lambda file: look(file).told(), files)
    return _gather(found, plans, LostLog(None, found.algorithm), progress)


def save_foreign(
    found: Survey, files: Sequence[ShardFile], target: Target, *, link: bool, threads: Threads,
    progress: RepairProgress, ending: Ending,
) -> RepairResult:  # fmt: skip
    """Write the tars anew into the target's folder: whole ones as they are, of others the samples that are whole.

    All of them get their names when all are written; interrupted before that, nothing is left. What an interrupted run
    has left of them is removed by the next. `ending` learns which file gets its name last.

    Raises:
        NothingSavedError: there is nothing to write; the target is as it was.
        ConfigError: the target holds something else.
        ShardkitError: as `shardkit.repairing.run.repair`.
    """
    with target.hold():
        unfinished = UnfinishedRepair(target, found.folder)
        with untouched():
            refuse_filled(target, unfinished.before)
            if not link:
                freed = map(os.fsdecode, unfinished.before or [])
                target.check_space(sum(file.size for file in files), len(files), freed)
            unfinished.sweep()
        workshop = Workshop(target.temporary, found.algorithm, BLOCK, threads.check)
        with BufferedFile(target.temporary(LOST)) as lost:
            plans = threads.in_order(lambda file: _save(found.folder, file, workshop, link=link).told(), files)
            result = _gather(found, plans, LostLog(lost, found.algorithm), progress)
        saved = [shard for shard in result.shards if shard.state != "nothing"]
        if not saved:
            raise NothingSavedError(result)
        moves = [(target.temporary(LOST), target.path(LOST))] if result.counts else []
        moves += [(target.temporary(shard.name), target.path(os.fsdecode(shard.file or b""))) for shard in saved]
        with unfinished.recorded([shard.file for shard in saved if shard.file is not None]):
            ending.last = moves[-1][1]
            commit(moves)  # the list first: no loss is ever hidden
        return replace(result, written=(*(shard.name for shard in saved), *([LOST] if result.counts else [])))


def _gather(found: Survey, plans: Generator[_Told], log: LostLog, progress: RepairProgress) -> RepairResult:
    """Let plans be carried out, and return what came of them."""
    outcomes, names = [], set()
    with contextlib.closing(plans):
        for file, outcome, losses in plans:
            outcomes.append(outcome)
            names.add(file.name)
            for lost in losses:
                log.add(lost)
            progress.advance(file.size)
    others = [name for name in found.entries if name.endswith(b".tar") and name not in names]
    return RepairResult(
        shards=tuple(outcomes), counts=dict(log.counts), first=tuple(log.first),
        notes=tuple(f"{escape(name)} is no file" for name in others),
    )  # fmt: skip


def _save(folder: bytes, file: ShardFile, workshop: Workshop, *, link: bool) -> _Plan:
    """Write what can be saved of a tar under a temporary name."""
    path, name = os.path.join(folder, file.name), escape(file.name)
    with DamagedFile(path) as opened:
        plan = _plan(opened, file)
        if plan.whole and file.digest is not None:
            workshop.copy(path, name, file.digest, link=link)
        elif plan.kept:
            with BufferedFile(workshop.temporary(name)) as new:
                for member in plan.members():
                    for at in range(member.start, member.end, _CHUNK):
                        workshop.check()
                        count = min(_CHUNK, member.end - at)
                        new.write(opened.read(at, count).ljust(count, b"\0"))  # a cut may have taken padding
                new.write(_END)
        if opened.changed():
            raise changed_shard(path)
    return plan


def _plan(opened: DamagedFile, file: ShardFile) -> _Plan:
    members, damages = walk_foreign(opened)
    samples = group_members(members)
    if not damages and file.digest is not None:
        return _Plan(file, True, samples, ())
    shard, faults = escape(file.name), _beside_damages(opened, samples, damages)
    kept: list[ForeignSample] = []
    lost: list[Lost] = []
    for number, sample in enumerate(samples):
        fault = faults.get(number) or _of_itself(sample)
        if fault is None and file.digest is None and not _readable(opened, sample):
            fault = "read-error", "the system failed to read it"
        if fault is None:
            kept.append(sample)
        else:
            lost.append(Lost(sample.key, shard, sample.start, *fault))
    named = {one.key for one in lost}
    for damage in damages:
        key = _key(damage)
        if key is None or key not in named:
            lost.append(Lost(key, shard, damage.start, damage.reason, damage.detail))
    return _Plan(file, False, kept, sorted(lost, key=lambda one: one.offset))


def _beside_damages(
    opened: DamagedFile, samples: Sequence[ForeignSample], damages: Sequence[Damage]
) -> dict[int, tuple[str, str]]:
    """Return reason and detail of the samples that reach to a damage and are not provably whole, by their numbers."""
    starts = [sample.start for sample in samples]
    wanted = set[str]().union(*map(_parts, samples)) if len(samples) > 1 else {"any other sample of this tar"}
    faults: dict[int, tuple[str, str]] = {}
    for damage in damages:
        behind = bisect_left(starts, damage.start)
        around = behind > 0 and samples[behind - 1].end > damage.start
        for number in range(max(behind - 1, 0), min(behind + (not around), len(samples))):
            sample = samples[number]
            lacking = sorted(wanted - _parts(sample))
            if sample.key == _key(damage):
                faults[number] = damage.reason, damage.detail
            elif lacking:
                faults[number] = damage.reason, f"beside a damage, and without {', '.join(lacking)}: {damage.detail}"
            elif any(m.end == damage.start and not _stands(opened, m) for m in sample.members.values()):
                faults[number] = damage.reason, f"the damage may reach into its last member: {damage.detail}"
    return faults


def _parts(sample: ForeignSample) -> set[str]:
    """Return what a sample has; one image of any kind is as good as another."""
    images = {extension for extension in sample.members if extension in IMAGE_EXTENSIONS}
    others = sample.members.keys() - images
    return others | ({"an image"} if images else set()) | (images if len(images) > 1 else set())


def _stands(opened: DamagedFile, member: Member) -> bool:
    """Tell whether a payload that ends where a damage begins still ends as one does: with NUL bytes only behind it."""
    if not member.size:
        return True
    at = member.end - BLOCK
    try:
        last, behind = opened.read(at, BLOCK), opened.read(member.end, BLOCK)
    except StorageError:
        return False
    payload, padding = last[: member.offset + member.size - at], last[member.offset + member.size - at :]
    zeroed = len(behind) > 0 and not behind.strip(b"\0")
    return not padding.strip(b"\0") and not (zeroed and payload.endswith(b"\0"))


def _of_itself(sample: ForeignSample) -> tuple[str, str] | None:
    """Return what was wrong with a sample before anything was damaged, if it keeps readers from taking it."""
    verdicts = sorted(sample.verdicts - _NO_OBSTACLE, key=lambda verdict: verdict.code)
    if not verdicts:
        return None
    return "duplicate" if verdicts == [SampleVerdict.DUPLICATE_KEY] else "members", verdicts[0].value


def _key(damage: Damage) -> str | None:
    """Return the key of the sample whose member the file cuts off."""
    parts = None if damage.member is None else split_name(damage.member.name)
    return None if parts is None else parts[0]


def _readable(opened: DamagedFile, sample: ForeignSample) -> bool:
    try:
        for member in sample.members.values():
            for at in range(member.start, member.end, _CHUNK):
                opened.read(at, min(_CHUNK, member.end - at))
    except StorageError:
        return False
    return True
