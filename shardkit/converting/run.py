"""Converting as a whole: gather, select, plan each part, then pack's own engine makes and commits its shards."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shardkit.converting.gather import gather
from shardkit.converting.inputs import check_columns, checked_inputs
from shardkit.converting.options import ConvertOptions
from shardkit.converting.outputs import find_output
from shardkit.converting.selection import select
from shardkit.converting.supply import MemberSupply, plan_part
from shardkit.errors import ConfigError, ShardkitError, from_os_error
from shardkit.escaping import escape
from shardkit.packing.lossless import require_turbojpeg
from shardkit.packing.plan import Plan
from shardkit.packing.refusals import first_refused, stop_error
from shardkit.packing.result import PackPlan, PackProgress, PackResult
from shardkit.packing.run import begin, check_run, complete, name_from_folder, one_limit, refuse_used
from shardkit.packing.target import Target, untouched
from shardkit.packing.unfinished import UnfinishedPack
from shardkit.packing.workers import Workers
from shardkit.running.progress import Silent
from shardkit.storage.clone import Reflink, check_reflink

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from shardkit.converting.gather import Gathered
    from shardkit.converting.selection import Selection
    from shardkit.format.manifest import Manifest

__all__ = ["Conversion", "ConversionPlan", "convert", "make_options", "plan_conversion", "run_conversion"]

Path = str | os.PathLike[str]
_SAMPLE_KEYS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversion:
    """What a conversion did."""

    parts: Mapping[str | None, PackResult]
    """Part of the split to what was made of it; one part None where nothing is split."""
    passed_over: Counter[str]
    """Samples that nobody asked for, and further members that were dropped, by kind."""

    @property
    def manifests(self) -> dict[str | None, Manifest]:
        """The manifest of each part."""
        return {name: result.manifest for name, result in self.parts.items()}

    @property
    def refused(self) -> int:
        """Samples that are in a `rejected.jsonl`."""
        return sum(manifest.totals.refused for manifest in self.manifests.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversionPlan:
    """What a conversion would do."""

    parts: Mapping[str | None, PackPlan]
    passed_over: Counter[str]


def convert(
    src: Path | Sequence[Path], dst: Path, *, jobs: int | None = None, resume: bool = False, overwrite: bool = False,
    reflink: Reflink = "never", progress: PackProgress | None = None,
    **options: object,
) -> Conversion:  # fmt: skip
    """Make aligned, indexed shards of datasets, foreign WebDataset tars, other frameworks' datasets, and trees.

    Args:
        src: a dataset's folder, a tar, a glob, a brace expression, a list of them in a `.txt` file; or several.
            `mds:DIR`, `litdata:DIR` and `hf:DIR` are datasets of MosaicML, LitData and Hugging Face, `tree:DIR` is a
            folder of images as `shardkit.pack` takes it.
        dst: folder of the new dataset; with `split`, of one dataset a part, in a folder of the part's name.
        jobs: worker processes; default the number of usable CPUs. The output is the same for any number.
        resume: go on with the unfinished conversion of the same inputs and options that lies in `dst`.
        overwrite: replace what an earlier one left in `dst`.
        reflink: `auto` lets new shards share whole blocks with the inputs where the file system does that, `always`
            fails where it does not, `never` copies. The output is the same bytes; what is shared lies where the input
            lies, so shuffled shards are slower to read in order.
        progress: told how far it is; begins anew with each part.
        **options: fields of `shardkit.converting.options.ConvertOptions`.

    Returns:
        The manifest of each part, and what was left out; refused samples are listed in each part's `rejected.jsonl`.

    Raises:
        ConfigError: options or inputs that cannot be served, or a `dst` that holds something else.
        FormatError: an input is damaged: an index, or with `on_error="fail"` a tar.
        IntegrityError: a dataset's manifest, index and shards disagree.
        UnsafeError: an input is a command, a URL, or over a limit.
        SourceError: a sample was refused with `on_error="fail"`, or every one was.
        TargetFullError: no space; finished shards are kept for `resume`.
        CapabilityError: blocks cannot be shared, with `reflink="always"`, or there is no TurboJPEG library, with
            `baseline=True`; or the library that reads an input is not installed.
        StorageError: the system failed a read of an index, or a write, or does not allow it.
        LockedError: another run into `dst` is going on.
        WorkerError: a worker died.
    """
    output = find_output(dst)
    if output is not None:
        raise ConfigError("this writes shards of shardkit's", found=escape(os.fspath(dst)),
                          remedy=f"call shardkit.convert_to({output.kind!r}, src, dst)")  # fmt: skip
    sources = [src] if isinstance(src, str | os.PathLike) else list(src)
    chosen = make_options(dst, options)
    return run_conversion(
        sources, dst, chosen, jobs=jobs, resume=resume, overwrite=overwrite, reflink=reflink, progress=progress
    )


def make_options(dst: Path, options: dict[str, Any]) -> ConvertOptions:
    """Return checked options, the name taken from `dst` where none is given."""
    if options.get("name") is None:
        options = {**options, "name": name_from_folder(dst)}
    if options.get("part") is not None:
        raise ConfigError("part is not for the caller to give")
    try:
        return ConvertOptions(**one_limit(options))
    except TypeError as error:
        raise ConfigError(str(error).replace("ConvertOptions.__init__()", "convert()")) from error


def plan_conversion(src: Sequence[Path], dst: Path, options: ConvertOptions) -> ConversionPlan:
    """Return what a conversion would do, without touching `dst` or reading an image.

    Raises:
        ShardkitError: as `convert`.
    """
    inputs = checked_inputs(src, os.path.abspath(os.fspath(dst)))
    check_columns(inputs, options, "never")
    samples = gather(inputs, options, None)
    selection = select(samples, options)
    parts = {name: _part_plan(samples, selection, name, _part_options(options, name)) for name in selection.parts}
    return ConversionPlan(parts=parts, passed_over=selection.passed_over)


def _part_plan(samples: Gathered, selection: Selection, name: str | None, options: ConvertOptions) -> PackPlan:
    plan = plan_part(samples, selection, name, options)
    supply = MemberSupply(samples, selection, name, options.key)
    head = Plan(order=plan.order[:_SAMPLE_KEYS], bounds=plan.bounds[:1].repeat(2), bytes=plan.bytes[:1], payload=0)
    head.bounds[1] = len(head.order)
    rows = next(supply.batches(head)).to_pydict()
    labels = selection.count_labels(name)
    return PackPlan(
        name=options.name, samples=len(plan.order), payload=plan.payload, bytes=plan.bytes.tolist(),
        counts=(plan.bounds[1:] - plan.bounds[:-1]).tolist(), classes=selection.classes,
        labelled=labels.labelled, empty_classes=labels.empty,
        keys=[(key, escape(path)) for key, path in zip(rows["key"], rows["path"], strict=True)],
        refused=supply.refused, skipped=Counter(),
    )  # fmt: skip


def run_conversion(
    src: Sequence[Path], dst: Path, options: ConvertOptions, *, jobs: int | None = None, resume: bool = False,
    overwrite: bool = False, reflink: Reflink = "never", progress: PackProgress | None = None,
) -> Conversion:  # fmt: skip
    """Convert with checked options; `convert` says what happens."""
    jobs = check_run(jobs, resume=resume, overwrite=overwrite)
    check_reflink(reflink)
    if options.baseline:
        require_turbojpeg()
    folder = os.path.abspath(os.fspath(dst))
    names: list[str | None] = list(options.split) if options.split else [None]
    targets = {name: Target(os.fsencode(folder if name is None else os.path.join(folder, name))) for name in names}
    with contextlib.ExitStack() as stack:
        inputs = checked_inputs(src, folder)
        check_columns(inputs, options, reflink)
        if options.split:
            refuse_used(Target(os.fsencode(folder)), resume=False, overwrite=False)
        _refuse_other_parts(folder, options)
        holds = {name: stack.enter_context(contextlib.ExitStack()) for name in targets}
        for name, target in targets.items():
            holds[name].enter_context(target.hold())
        with untouched():
            for target in targets.values():
                refuse_used(target, resume=resume, overwrite=overwrite)
            samples = gather(inputs, options, targets[names[0]].temporary("inputs.arrow"))
            selection = select(samples, options)
            refused = [refusal for part in selection.refused.values() for refusal in part]
            if refused and options.on_error == "fail":
                raise stop_error(first_refused(refused))
            packs = {
                name: _unfinished(target, samples, selection, name, options, progress or Silent(), reflink)
                for name, target in targets.items()
            }
        # All begin before one is made: nobody finds a new part beside an old one, which may hold the same samples.
        made = {name: begin(pack, resume=resume) for name, pack in packs.items()}
        for name, pack in packs.items():
            if made[name] is None:
                with Workers(jobs) as workers:
                    made[name] = complete(pack, workers)
            holds[name].close()  # what comes after it cannot make this part unfinished again
    parts = {name: result for name, result in made.items() if result is not None}
    return Conversion(parts=parts, passed_over=selection.passed_over)


def _unfinished(
    target: Target, samples: Gathered, selection: Selection, name: str | None, options: ConvertOptions,
    progress: PackProgress, reflink: Reflink,
) -> UnfinishedPack:  # fmt: skip
    of_part = _part_options(options, name)
    supply = MemberSupply(samples, selection, name, options.key)
    return UnfinishedPack(target, of_part, supply, plan_part(samples, selection, name, of_part), progress, reflink)


def _part_options(options: ConvertOptions, name: str | None) -> ConvertOptions:
    if name is None:
        return options
    return dataclasses.replace(options, name=f"{options.name}-{name}", part=name)


def _refuse_other_parts(folder: str, options: ConvertOptions) -> None:
    """Refuse to write beside parts of another split: they are nobody's to replace, and may hold the same samples.

    Raises:
        ConfigError: names one.
    """
    try:
        names = sorted(os.listdir(folder))
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as error:
        raise from_os_error(error, "cannot list the target", path=folder) from error
    for name in [name for name in names if name not in (options.split or ())]:
        part = Target(os.fsencode(os.path.join(folder, name)))
        if _recorded(part).get("part") == name:
            raise ConfigError("the target holds a part of another split, which may hold the same samples",
                              path=part.folder, remedy="choose another folder, or remove that part first")  # fmt: skip


def _recorded(target: Target) -> Mapping[str, Any]:
    """Return the options of the dataset in a folder, finished or not; nothing where none can be read."""
    with contextlib.suppress(ShardkitError):
        if target.finished:
            return target.load_manifest().options
        record = target.read_record() if target.in_progress else None
        return {} if record is None else record.options
    return {}
