"""Repairing as a whole: what is there, what is proved, then the new files, the manifest last."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING, TypeAlias

from shardkit.errors import FORBIDDEN, ConfigError, ShardkitError, TargetFullError
from shardkit.escaping import escape
from shardkit.format.remedy import remedy_without_manifest
from shardkit.local_path import local_path
from shardkit.packing.target import UNCHANGED, Target
from shardkit.repairing.foreign import look_at_foreign, save_foreign
from shardkit.repairing.identify import assign, count_classes, infer_align, is_foreign, look_at_files
from shardkit.repairing.in_place import complete_in_place
from shardkit.repairing.lost import LostLog
from shardkit.repairing.members import ClassNames
from shardkit.repairing.new_dataset import NothingSavedError, write_new
from shardkit.repairing.prepare import name_keys, prepare
from shardkit.repairing.result import RepairProgress, RepairResult
from shardkit.repairing.survey import survey
from shardkit.repairing.threads import Threads
from shardkit.repairing.unfinished import Ending
from shardkit.repairing.walk import Rules
from shardkit.running.progress import Silent

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardkit.repairing.identify import ShardFile
    from shardkit.repairing.survey import Survey

__all__ = ["RepairProgress", "RepairResult", "repair"]

Path: TypeAlias = str | os.PathLike[str] | bytes
_MAX_BYTES = 128 << 20
_KEPT = "no file of the dataset was changed"
_DONE = "every file is in its place, but a power cut could undo that"


def repair(
    dataset: Path, *, out: Path | None = None, dry_run: bool = False, link: bool = False, max_bytes: int | None = None,
    jobs: int | None = None, progress: RepairProgress | None = None,
) -> RepairResult:  # fmt: skip
    """Make a packed dataset whole again from what its shards still hold; the dataset itself is never changed.

    Args:
        dataset: its folder.
        out: folder of the repaired dataset; made when it is not there. None writes only index files and a manifest that
            are missing, beside shards that are whole.
        dry_run: look, and write nothing.
        link: give shards that are whole a second name instead of a copy, where the file system can.
        max_bytes: of an image for which no index vouches; default what the pack was told, else 128 MiB.
        jobs: shards that are read and written at a time, each in a thread; default the number of usable CPUs. Any
            number gives the same bytes.
        progress: told how far it is.

    Raises:
        ConfigError: no dataset, an option, a target that cannot be taken, or damage or another tool's tars, with which
            only `out` can help.
        UnsupportedVersionError: written by a newer shardkit.
        TargetFullError: no space; the dataset is as it was.
        StorageError: the system failed a read or a write.
        LockedError: another run holds the target.
    """
    folder = os.path.abspath(os.fsencode(dataset))
    target = None if out is None else _target(folder, local_path(out))
    if max_bytes is not None and not 0 < max_bytes < 1 << 32:
        raise ConfigError("max_bytes is 1 to 4 GiB - 1, the format's limit for an image", found=max_bytes)
    threads = Threads(jobs)
    told = progress or Silent()
    told.begin(2 * _tar_bytes(folder))
    ending = Ending()
    with _told(ending), survey(folder, lambda _: None) as found:
        files = look_at_files(found, threads, told.advance)
        try:
            if is_foreign(found, files):
                return _foreign(found, files, target, threads, told, ending, dry_run=dry_run, link=link)
            holders = assign(found, files)
            rules = _rules(found, files, max_bytes)
            name_keys(found, rules)
            if dry_run:
                return _look(found, holders, rules, threads, told)
            if target is None:
                return _in_place(found, holders, rules, threads, told, ending)
            return write_new(found, holders, rules, target, link=link, threads=threads, progress=told, ending=ending)
        except NothingSavedError as nothing:
            return nothing.result


@contextlib.contextmanager
def _told(ending: Ending) -> Iterator[None]:
    """Let whatever ends the run early say that no file was changed and what to do, or that all is done."""
    try:
        yield
    except ShardkitError as error:
        if isinstance(error, TargetFullError):
            error.remedy = "free space (or raise the quota or the file size limit) and run again"
        error.kept = error.kept or (_DONE if ending.reached else _KEPT)
        raise
    except BaseException as error:  # Ctrl-C, SIGTERM, a bug
        error.add_note(_DONE if ending.reached else f"{_KEPT}; run again")
        raise


def _target(folder: bytes, out: bytes) -> Target:
    real, inside = os.path.realpath(out), os.path.realpath(folder)
    if real == inside or real.startswith(inside.rstrip(b"/") + b"/"):
        raise ConfigError("the target lies inside the dataset", path=out, remedy="choose a folder outside")
    return Target(out)


def _tar_bytes(folder: bytes) -> int:
    try:
        return sum(
            entry.stat().st_size for entry in os.scandir(folder) if entry.name.endswith(b".tar") and entry.is_file()
        )
    except OSError:
        return 0  # the survey says what is wrong


def _rules(found: Survey, files: list[ShardFile], max_bytes: int | None) -> Rules:
    manifest = found.manifest
    if found.align is None:
        found.align = infer_align(files)
    classes = ClassNames(manifest.classes if manifest else None, derived=manifest is None)
    if manifest is None:
        count_classes(found, files, classes, found.align)
        classes.settle()
    options = manifest.options if manifest else {}
    told = options.get("max_bytes")
    labelled = any(probe.label is not None for file in files for probe in file.probes)
    return Rules(
        align=found.align, classes=classes, whole_images=options.get("check") != "none",
        max_bytes=max_bytes or (told if isinstance(told, int) and told > 0 else _MAX_BYTES),
        labelled=labelled or bool(manifest and manifest.classes),
    )  # fmt: skip


def _foreign(
    found: Survey, files: list[ShardFile], target: Target | None, threads: Threads, progress: RepairProgress,
    ending: Ending, *, dry_run: bool, link: bool,
) -> RepairResult:  # fmt: skip
    if target is None:
        raise ConfigError(
            "tars of another tool are repaired in a new folder only", path=found.folder,
            remedy=f"{remedy_without_manifest(['.tar'])}; or, when some are damaged, give --out: whole ones are copied "
            "there, and of damaged ones the samples that are whole",
        )  # fmt: skip
    if dry_run:
        return look_at_foreign(found, files, threads, progress)
    return save_foreign(found, files, target, link=link, threads=threads, progress=progress, ending=ending)


def _look(
    found: Survey, holders: list[ShardFile | None], rules: Rules, threads: Threads, progress: RepairProgress
) -> RepairResult:
    log = LostLog(None, found.algorithm)
    outcomes = []
    with contextlib.closing(prepare(found, holders, rules, log, threads, lambda _: None)) as shards:
        for prepared, _ in shards:
            outcomes.append(prepared.outcome)
            progress.advance(0 if prepared.holder is None else prepared.holder.size)
    return RepairResult(shards=outcomes, counts=dict(log.counts), first=tuple(log.first), notes=tuple(found.notes))


def _in_place(
    found: Survey, holders: list[ShardFile | None], rules: Rules, threads: Threads, progress: RepairProgress,
    ending: Ending,
) -> RepairResult:  # fmt: skip
    for unfinished in (b"plan.json", b"plan.arrow"):
        if os.path.lexists(os.path.join(found.folder, b".shardkit", unfinished)):
            raise ConfigError(
                "an unfinished pack lies here", path=found.folder, kept=UNCHANGED,
                remedy="go on with it by `shardkit pack --resume`, or give --out to save what there is",
            )  # fmt: skip
    try:
        return complete_in_place(found, holders, rules, Target(found.folder), threads, progress, ending)
    except ShardkitError as error:
        if error.errno in FORBIDDEN:
            error.remedy = f"give --out: nothing can be written into {escape(found.folder)}"
        raise
