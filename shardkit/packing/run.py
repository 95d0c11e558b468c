"""Packing as a whole: scan, plan, make shards in parallel, commit them one by one, the manifest last."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Any

from shardkit.errors import ConfigError, from_os_error
from shardkit.escaping import escape
from shardkit.local_path import local_path
from shardkit.packing.files import FileSupply
from shardkit.packing.lists import LIST_EXTENSIONS, scan_list
from shardkit.packing.lossless import require_turbojpeg
from shardkit.packing.options import PackOptions
from shardkit.packing.plan import Plan, make_plan, plan_batches
from shardkit.packing.refusals import first_refused, stop_error
from shardkit.packing.result import PackPlan, PackProgress, PackResult
from shardkit.packing.scan import scan_tree
from shardkit.packing.target import UNCHANGED, Target, untouched
from shardkit.packing.unfinished import UnfinishedPack
from shardkit.packing.workers import Workers
from shardkit.running.progress import Silent
from shardkit.storage.clone import Reflink, check_reflink

if TYPE_CHECKING:
    from shardkit.format.manifest import Manifest
    from shardkit.packing.scan import Sources

__all__ = [
    "PackPlan",
    "PackProgress",
    "PackResult",
    "Reflink",
    "begin",
    "check_run",
    "complete",
    "make_options",
    "name_from_folder",
    "one_limit",
    "pack",
    "plan_pack",
    "refuse_used",
    "run_pack",
]

Path = str | os.PathLike[str] | bytes
_SAMPLE_KEYS = 5


def pack(
    src: Path, dst: Path, *, jobs: int | None = None, resume: bool = False, overwrite: bool = False,
    reflink: Reflink = "never", progress: PackProgress | None = None,
    **options: object,
) -> Manifest:  # fmt: skip
    """Pack a folder, or a list, of JPEGs into aligned, indexed shards.

    Args:
        src: a folder (classes are its first folder level), or a `.csv`, `.jsonl` or `.parquet` list.
        dst: folder of the dataset; made when it is not there.
        jobs: worker processes; default the number of usable CPUs. The output is the same for any number.
        resume: go on with the unfinished pack of the same sources and options that lies in `dst`.
        overwrite: replace what an earlier pack left in `dst`.
        reflink: `auto` lets shards share whole blocks with the source files where the file system does that, `always`
            fails where it does not, `never` copies. The output is the same bytes; what is shared lies where the source
            lies, so shards are slower to read in order.
        progress: told how far the pack is.
        **options: fields of `shardkit.packing.options.PackOptions`.

    Returns:
        The manifest; `manifest.totals.refused` sources are listed in `rejected.jsonl`.

    Raises:
        ConfigError: options or sources that cannot be served, or a `dst` that holds something else.
        SourceError: a source was refused with `on_error="fail"`, or every source was.
        TargetFullError: no space; finished shards are kept for `resume`.
        CapabilityError: blocks cannot be shared, with `reflink="always"`, or there is no TurboJPEG library, with
            `baseline=True`.
        StorageError: the system failed a write, or does not allow it.
        LockedError: another pack into `dst` is running.
        WorkerError: a worker died.
    """
    chosen = make_options(dst, options)
    return run_pack(
        src, dst, chosen, jobs=jobs, resume=resume, overwrite=overwrite, reflink=reflink, progress=progress
    ).manifest


def make_options(dst: Path, options: dict[str, Any]) -> PackOptions:
    """Return checked options, the name taken from `dst` where none is given."""
    if options.get("name") is None:
        options = {**options, "name": name_from_folder(dst)}
    try:
        return PackOptions(**one_limit(options))
    except TypeError as error:
        raise ConfigError(str(error).replace("PackOptions.__init__()", "pack()")) from error


def name_from_folder(dst: Path) -> str:
    """Return the name that a dataset has when none is given: its folder's, in the letters that a name may have."""
    base = os.path.basename(os.path.abspath(os.fsencode(dst))).decode("ascii", "replace").lower()
    return re.sub(r"[^a-z0-9_-]+", "-", base).strip("-_")[:64] or "data"


def one_limit(options: dict[str, Any]) -> dict[str, Any]:
    """Return options where a demanded number of shards, or of samples in one, takes the default size's place.

    Raises:
        ConfigError: two of them are demanded.
    """
    for limit in ("shard_samples", "shards"):
        if options.get(limit) is not None:
            if options.get("shard_size") is not None:
                raise ConfigError("give one of --shard-size, --shard-samples and --shards")
            options = {**options, "shard_size": None}
    if options.get("shard_size", 0) is None and not any(options.get(x) for x in ("shard_samples", "shards")):
        options = {name: value for name, value in options.items() if name != "shard_size"}
    return options


def plan_pack(src: Path, dst: Path, options: PackOptions) -> PackPlan:
    """Return what a pack would do, without touching `dst` or reading an image.

    Raises:
        ConfigError: as `pack`.
    """
    source, _ = _paths(src, dst)
    sources = _scan(source, options)
    plan = make_plan(sources, options)
    head = Plan(order=plan.order[:_SAMPLE_KEYS], bounds=plan.bounds[:1].repeat(2), bytes=plan.bytes[:1], payload=0)
    head.bounds[1] = len(head.order)
    rows = next(plan_batches(sources, head, options.key)).to_pydict()
    labels = sources.count_labels()
    return PackPlan(
        name=options.name, samples=len(plan.order), payload=plan.payload, bytes=plan.bytes.tolist(),
        counts=(plan.bounds[1:] - plan.bounds[:-1]).tolist(), classes=sources.classes,
        labelled=labels.labelled, empty_classes=labels.empty,
        keys=[(key, escape(path)) for key, path in zip(rows["key"], rows["path"], strict=True)],
        refused=sources.refused, skipped=sources.skipped,
    )  # fmt: skip


def run_pack(
    src: Path, dst: Path, options: PackOptions, *, jobs: int | None = None, resume: bool = False,
    overwrite: bool = False, reflink: Reflink = "never", progress: PackProgress | None = None,
) -> PackResult:  # fmt: skip
    """Pack with checked options; `pack` says what happens."""
    source, folder = _paths(src, dst)
    jobs = check_run(jobs, resume=resume, overwrite=overwrite)
    check_reflink(reflink)
    if options.baseline:
        require_turbojpeg()
    target = Target(folder)
    with target.hold(), Workers(jobs) as workers:
        with untouched():
            refuse_used(target, resume=resume, overwrite=overwrite)
            sources = _scan(source, options)
            if sources.refused and options.on_error == "fail":
                raise stop_error(first_refused(sources.refused))
            supply = FileSupply(sources, options.key)
            plan = make_plan(sources, options)
            pack = UnfinishedPack(target, options, supply, plan, progress or Silent(), reflink)
        return begin(pack, resume=resume) or complete(pack, workers)


def check_run(jobs: int | None, *, resume: bool, overwrite: bool) -> int:
    """Return how many shards are made at a time.

    Raises:
        ConfigError: none, or two wishes that exclude each other.
    """
    if resume and overwrite:
        raise ConfigError("--resume keeps what is there and --overwrite removes it: give one of them")
    jobs = len(os.sched_getaffinity(0)) if jobs is None else jobs
    if jobs < 1:
        raise ConfigError("jobs is at least 1", found=jobs)
    return jobs


def begin(pack: UnfinishedPack, *, resume: bool) -> PackResult | None:
    """Bring the target into the state of an unfinished pack; return its result where all is done already.

    Raises:
        ShardkitError: as `pack`.
    """
    with untouched():
        if resume and pack.target.finished:
            return pack.already_complete()
    with pack.told():
        pack.prepare(resume=resume)
    return None


def complete(pack: UnfinishedPack, workers: Workers) -> PackResult:
    """Make what is missing of a pack that has begun, and its manifest last.

    Raises:
        ShardkitError: as `pack`.
    """
    with pack.told():
        pack.make(workers)
        return pack.finish()


def _paths(src: Path, dst: Path) -> tuple[bytes, bytes]:
    """Return both paths, absolute, after refusing one inside the other."""
    source, target = os.path.abspath(os.fsencode(src)), local_path(dst)
    try:
        os.stat(source)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise ConfigError("the source is not there", path=source) from error
    except OSError as error:
        raise from_os_error(error, "cannot look at the source", path=source, kept=UNCHANGED) from error
    real_source, real_target = os.path.realpath(source), os.path.realpath(target)
    if real_source == real_target or real_target.startswith(real_source.rstrip(b"/") + b"/"):
        raise ConfigError("the target lies inside the source: a second pack would pack the first", path=target,
                          remedy="choose a folder outside")  # fmt: skip
    if real_source.startswith(real_target.rstrip(b"/") + b"/"):
        raise ConfigError("the source lies inside the target", path=source, remedy="choose a target outside")
    return source, target


def _scan(source: bytes, options: PackOptions) -> Sources:
    if os.path.isdir(source):
        if options.labels == "column":
            raise ConfigError("--labels column needs a list; a folder has --labels dir or none", path=source)
        return scan_tree(source, options)
    if os.path.splitext(source)[1].lower() in LIST_EXTENSIONS:
        return scan_list(source, options)
    raise ConfigError("the source is neither a folder nor a list", path=source,
                      expected="a folder, or a .csv, .jsonl or .parquet file")  # fmt: skip


def refuse_used(target: Target, *, resume: bool, overwrite: bool) -> None:
    """Refuse a target with a dataset, or an unfinished one, that nothing was said about.

    Raises:
        ConfigError: says what may be given.
    """
    if overwrite or resume:
        return
    if target.finished:
        raise ConfigError("the target holds a finished dataset", path=target.folder,
                          remedy="choose another folder, or give --overwrite to replace it")  # fmt: skip
    if target.in_progress:
        raise ConfigError("the target holds an unfinished pack", path=target.folder,
                          remedy="give --resume to go on, or --overwrite to start again")  # fmt: skip
