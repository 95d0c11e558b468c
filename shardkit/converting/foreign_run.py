"""Converting to other frameworks' datasets, and to trees: selected and planned as shards are, written otherwise."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from shardkit.converting.foreign_part import LIBRARIES, PartWriter, refused_error
from shardkit.converting.foreign_result import ForeignConversion, ForeignPart
from shardkit.converting.gather import gather
from shardkit.converting.inputs import check_columns, checked_inputs
from shardkit.converting.labels import NO_LABEL
from shardkit.converting.outputs import KINDS, Output, check_given, size_limit, with_layout
from shardkit.converting.run import make_options
from shardkit.converting.selection import select
from shardkit.converting.side_files import check_class_names, write_card
from shardkit.converting.supply import MemberSupply, plan_part
from shardkit.converting.whole_folder import WholeFolder, untouched
from shardkit.converting.writers import WrittenColumns
from shardkit.errors import ConfigError
from shardkit.extracting.names import class_folders, folder_of, name
from shardkit.packing.lossless import require_turbojpeg
from shardkit.packing.refusals import first_refused
from shardkit.running.progress import Silent
from shardkit.running.spool import spans
from shardkit.storage.atomic import os_errors, remove

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardkit.converting.gather import Gathered
    from shardkit.converting.options import ConvertOptions
    from shardkit.converting.outputs import OutputKind
    from shardkit.converting.selection import Selection
    from shardkit.extracting.names import Layout
    from shardkit.packing.result import PackProgress

__all__ = ["convert_to", "run_foreign"]

Path = str | os.PathLike[str]
_BYTES_A_SAMPLE = 256
_ROWS = 1 << 14


def convert_to(
    kind: OutputKind, src: Path | Sequence[Path], dst: Path, *, overwrite: bool = False, dry_run: bool = False,
    progress: PackProgress | None = None, **options: object,
) -> ForeignConversion:  # fmt: skip
    """Write what `convert` takes as a dataset of MosaicML (`mds`), LitData (`litdata`) or Hugging Face (`hf`, Parquet).

    Or as files of a folder (`tree`), named as `shardkit.extracting.run.extract` names them.

    The folder gets its name when all of it is written: an interruption leaves the target as it was.

    Args:
        kind: which.
        src: as `shardkit.convert`.
        dst: folder of the new dataset; with `split`, of a folder a part.
        overwrite: replace a dataset of the same kind that lies in `dst`; never a tree.
        dry_run: write nothing; `files` and `bytes` of the parts are then 0.
        progress: told how far it is; begins anew with each part.
        **options: fields of `shardkit.converting.options.ConvertOptions`, but those that shape shards alone; for a
            tree its `layout`, too.

    Raises:
        CapabilityError: the framework's library is not installed.
        ConfigError: options or inputs that cannot be served, or a `dst` that holds something else.
        SourceError: a sample was refused with `on_error="fail"`, or every one was.
        TargetFullError: no space.
        ShardkitError: as `shardkit.convert`.
    """
    if kind not in KINDS:
        raise ConfigError("unknown kind of dataset", expected=", ".join(KINDS), found=ascii(kind)[:80])
    sources = [src] if isinstance(src, str | os.PathLike) else list(src)
    output = Output(kind, os.path.abspath(os.fspath(dst)))
    given: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    return run_foreign(sources, output, given, overwrite=overwrite, dry_run=dry_run, progress=progress)


def run_foreign(
    src: Sequence[Path], output: Output, given: dict[str, Any], *, overwrite: bool = False, dry_run: bool = False,
    progress: PackProgress | None = None,
) -> ForeignConversion:  # fmt: skip
    """Convert with the options that were given; `convert_to` says what happens."""
    check_given(output.kind, {**given, "overwrite": True} if overwrite else given)
    output = with_layout(output, given.pop("layout", None))
    given = {**given, "shard_size": size_limit(output.kind, given.get("shard_size")), "name": "data", "align": 512}
    options = make_options(output.path, given)
    inputs = checked_inputs(src, output.path)
    check_columns(inputs, options, "never")
    if options.baseline:
        require_turbojpeg()
    if output.kind in LIBRARIES:
        LIBRARIES[output.kind]()
    if dry_run:
        run = _Run(output, options, *_chosen(gather(inputs, options, None), options))
        return run.planned()
    target = WholeFolder(output)
    with target.hold(overwrite=overwrite):
        with untouched():
            spill = os.path.join(target.work, "inputs.arrow.tmp")
            run = _Run(output, options, *_chosen(gather(inputs, options, os.fsencode(spill)), options))
            target.check_space(run.needed)
            remove(os.fsencode(spill))  # it stays mapped
            made = run.write(target.staged, progress or Silent())
        target.commit(overwrite=overwrite)
    return made


def _chosen(samples: Gathered, options: ConvertOptions) -> tuple[Gathered, Selection]:
    """Return the samples and which of them are wanted.

    Raises:
        SourceError: one was refused, with `on_error="fail"`.
        ConfigError: as `select`.
    """
    selection = select(samples, options)
    refused = [refusal for part in selection.refused.values() for refusal in part]
    if refused and options.on_error == "fail":
        raise refused_error(first_refused(refused))
    return samples, selection


def _layout(samples: Gathered, selection: Selection) -> Layout:
    """Return the layout of a tree that keeps the labels: sources, if each begins with the folder of its class.

    Those of other tools' tars begin with the tar's name, and those of tables and lists with anything.
    """
    folders = class_folders(selection.classes or ())
    for ids in selection.parts.values():
        for first in range(0, len(ids), _ROWS):
            some = ids[first : first + _ROWS]
            taken, _ = samples.take(some, ["key", "source"])
            for key, source, label in zip(taken["key"], taken["source"], selection.labels[some].tolist(), strict=True):
                folder = folder_of(label, folders)
                if name("source", key=key, source=source, media_type=None, folder=folder).unstated:
                    return "class"
    return "source"


class _Run:
    """One conversion between selection and commit."""

    def __init__(self, output: Output, options: ConvertOptions, samples: Gathered, selection: Selection) -> None:
        self._output, self._options = output, options
        self._samples, self._selection = samples, selection
        self._plans = {part: plan_part(samples, selection, part, options) for part in selection.parts}
        if output.kind == "tree" and output.layout is None:
            output = self._output = replace(output, layout=_layout(samples, selection))
        self._columns = _columns(samples, selection)
        if output.kind != "hf":
            check_class_names(self._columns.classes or ())

    @property
    def needed(self) -> int:
        """Bytes that will be written, as far as anybody knows."""
        if self._options.resize is not None:
            return 0
        return sum(plan.payload + _BYTES_A_SAMPLE * len(plan.order) for plan in self._plans.values())

    def planned(self) -> ForeignConversion:
        """Return what would be written."""
        parts = {
            part: ForeignPart(samples=len(plan.order), labelled=self._selection.count_labels(part).labelled,
                              payload=plan.payload, files=0, bytes=0,
                              refused=Counter(refusal.reason for refusal in self._selection.refused[part]))
            for part, plan in self._plans.items()
        }  # fmt: skip
        return self._result(parts)

    def write(self, folder: str, progress: PackProgress) -> ForeignConversion:
        """Write every part, each below the folder where they are several.

        Raises:
            SourceError: a sample was refused with `on_error="fail"`, or all of a part were.
            ShardkitError: the system failed a write.
        """
        parts = {}
        writer = PartWriter(self._output, self._columns, self._options)
        with os_errors("cannot write the dataset", os.fsencode(self._output.path)):
            for part, plan in self._plans.items():
                place = folder if part is None else os.path.join(folder, part)
                if part is not None:
                    os.mkdir(place)
                supply = MemberSupply(self._samples, self._selection, part, self._options.key)
                parts[part] = writer.write(part, supply, plan, place, progress)
            if self._output.kind == "hf":
                write_card(folder, list(parts))
        return self._result(parts)

    def _result(self, parts: dict[str | None, ForeignPart]) -> ForeignConversion:
        return ForeignConversion(
            kind=self._output.kind, folder=self._output.path, layout=self._output.layout, parts=parts,
            classes=self._selection.classes, passed_over=self._selection.passed_over,
        )  # fmt: skip


def _columns(samples: Gathered, selection: Selection) -> WrittenColumns:
    """Return the columns of all parts: those that any sample fills."""
    labelled = any(selection.count_labels(part).labelled for part in selection.parts)
    # A sample with neither label nor json member gets one that states its source.
    texts = any(
        (selection.labels[ids[some]] == NO_LABEL).any() or (samples.numbers("json_size", ids[some]) > 0).any()
        for ids in selection.parts.values()
        for some in spans(len(ids))
    )
    return WrittenColumns(labelled, texts, selection.classes)
