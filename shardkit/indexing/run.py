"""`shardkit.index`: foreign shards become a dataset where they lie."""

from __future__ import annotations

import dataclasses
import os
import re
from typing import TYPE_CHECKING

from shardkit.errors import ConfigError, FormatError
from shardkit.indexing.before import Comparison, changed_error, compare_with_before
from shardkit.indexing.inputs import find_shards
from shardkit.indexing.options import Facts, IndexOptions, Labels
from shardkit.indexing.target import Target, untouched
from shardkit.indexing.unfinished import OnError, UnfinishedIndex
from shardkit.local_path import local_path
from shardkit.running.progress import Silent

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from shardkit.format.manifest import Manifest
    from shardkit.indexing.inputs import ShardFile
    from shardkit.indexing.result import IndexProgress, IndexResult

__all__ = ["index", "run_index"]

_SHOWN = 5
_Path = str | os.PathLike[str]


def index(
    tars: _Path | Iterable[_Path], *, out: _Path | None = None, name: str | None = None, facts: Facts = "full",
    labels: Labels = "cls", image_ext: Sequence[str] | None = None, digest: str | None = None, jobs: int | None = None,
    on_error: OnError = "skip", resume: bool = False, overwrite: bool = False, accept_changes: bool = False,
    progress: IndexProgress | None = None,
) -> Manifest:  # fmt: skip
    """Make a dataset of existing WebDataset shards, where they lie; no shard is copied or changed.

    Memory: for each job three blocks of 4 MiB, the largest image, and about 2 kB for each member of a shard.

    Args:
        tars: tars, folders that hold some, or globs or brace expressions; one, or several.
        out: folder for the indexes, made when missing, with a link to each shard; by default the folder in which all
            the shards lie.
        name: of the dataset; by default that of the folder.
        facts: `full` reads every byte once, for CRC-32C, digests and JPEG facts; `header` reads the beginning of each
            image, for its facts; `none` reads no image.
        labels: `cls` for the number in that member, `none` for no labels.
        image_ext: what may be a sample's image, the preferred first; jpg, jpeg, png and webp by default.
        digest: algorithm, `xxh3-128` or `sha256`.
        jobs: shards that are read at the same time; default the number of usable CPUs, and four times that where not
            every byte is read. The result is the same for any.
        on_error: what is refused is left out and listed in `rejected.jsonl`, or ends the run.
        resume: go on with the unfinished run of the same shards and options that lies in the folder.
        overwrite: replace index files that are there already. Shards that an index with checksums names are read once
            more before, and compared with it; not for `facts` other than `full`.
        accept_changes: with `overwrite`, index shards that changed since as they are now.
        progress: told how far the run is.

    Returns:
        The manifest; `manifest.totals.refused` lines are in `rejected.jsonl`.

    Raises:
        ConfigError: arguments that cannot be served, or a folder that holds something else.
        SourceError: something was refused with `on_error="fail"`, or everything was.
        IntegrityError: with `overwrite`, a shard has other bytes than the index that is there states.
        TarFormatError: a shard is no whole tar, with `on_error="fail"` or when there is no other.
        UnsafeError: likewise for what is over a limit, or read differently by different tools.
        LockedError: another run holds the folder.
        TargetFullError: no space; what is finished is kept for `resume`.
        StorageError: the system failed a read or a write.
    """
    return run_index(
        [tars] if isinstance(tars, str | os.PathLike) else tars, out=out, name=name, facts=facts, labels=labels,
        image_ext=image_ext, digest=digest, jobs=jobs, on_error=on_error, resume=resume, overwrite=overwrite,
        accept_changes=accept_changes, progress=progress,
    ).manifest  # fmt: skip


def run_index(
    tars: Iterable[_Path], *, out: _Path | None = None, name: str | None = None, facts: Facts = "full",
    labels: Labels = "cls", image_ext: Sequence[str] | None = None, digest: str | None = None, jobs: int | None = None,
    on_error: OnError = "skip", resume: bool = False, overwrite: bool = False, accept_changes: bool = False,
    progress: IndexProgress | None = None,
) -> IndexResult:  # fmt: skip
    """Index shards; `index` says what happens."""
    if resume and overwrite:
        raise ConfigError("--resume keeps what is there and --overwrite removes it: give one of them")
    if accept_changes and not overwrite:
        raise ConfigError("--accept-changes goes with --overwrite: only an index that is replaced is compared")
    if on_error not in ("skip", "fail"):
        raise ConfigError("unknown on_error", expected="skip or fail", found=ascii(on_error))
    if jobs is None:
        # Whoever seeks waits for the disk most of the time.
        jobs = len(os.sched_getaffinity(0)) * (1 if facts == "full" else 4)
    if jobs < 1:
        raise ConfigError("jobs is at least 1", found=jobs)
    shards = find_shards(tars)
    folder = _folder(shards, out)
    given = {"image_extensions": image_ext, "digest": digest}
    options = IndexOptions(
        name=_name_of(folder) if name is None else name, facts=facts, labels=labels,
        **{option: value for option, value in given.items() if value is not None},  # type: ignore[arg-type]
    )  # fmt: skip
    target = Target(os.fsencode(folder))
    with target.hold():
        run = UnfinishedIndex(target, options, shards, progress or Silent())
        with untouched():
            _refuse_used(target, shards, resume=resume, overwrite=overwrite)
            if resume and target.finished:
                return run.already_complete()
            compared = compare_with_before(target, options, shards) if overwrite else Comparison()
            if compared.changed and not accept_changes:
                raise changed_error(target.folder, compared.changed)
        with run.told():
            run.prepare(resume=resume, overwrite=overwrite)
            run.make(jobs, on_error)
            result = run.finish()
    return dataclasses.replace(result, changed=compared.changed, uncompared=compared.why_not)


def _folder(shards: Sequence[ShardFile], out: _Path | None) -> str:
    """Return the folder of the dataset, absolute."""
    if out is not None:
        text = os.fspath(out)
        if not text or "\0" in text:
            raise ConfigError("--out is the name of a folder", found="an empty one")
        return os.fsdecode(local_path(text))
    folders = list(dict.fromkeys(os.path.dirname(shard.path) for shard in shards))
    if len(folders) > 1:
        raise ConfigError(
            "the shards lie in several folders", path=folders[1], expected=f"all in one, such as {folders[0]!a}",
            remedy="give a folder for the indexes with --out, or make a dataset of each folder",
        )  # fmt: skip
    return folders[0]


def _name_of(folder: str) -> str:
    base = os.path.basename(folder).lower()
    return re.sub(r"[^a-z0-9_-]+", "-", base).strip("-_")[:64] or "data"


def _refuse_used(target: Target, shards: Sequence[ShardFile], *, resume: bool, overwrite: bool) -> None:
    if overwrite or resume:
        return
    if target.finished:
        raise ConfigError("the folder holds a dataset", path=target.folder, found=_later(target, shards),
                          remedy="give --overwrite to replace its indexes, or another folder with --out")  # fmt: skip
    if target.in_progress:
        raise ConfigError("the folder holds an unfinished run", path=target.folder,
                          remedy="give --resume to go on, or --overwrite to start again")  # fmt: skip


def _later(target: Target, shards: Sequence[ShardFile]) -> str | None:
    """Say which shards the finished dataset does not have, and why; None when it has all, or cannot be read."""
    try:
        manifest = target.load_manifest()
    except FormatError:
        return None
    known = {record.name for record in manifest.shards}
    missing = [shard.name for shard in shards if shard.name not in known]
    if not missing or manifest.layout != "foreign":
        return None
    refused = target.refused_shards()
    kinds = {
        "shards that it refused": [f"{name} ({refused[name]})" for name in missing if name in refused],
        "shards that the dataset does not have": [name for name in missing if name not in refused],
    }
    return "; ".join(f"{what}: {_some(names)}" for what, names in kinds.items() if names)


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} others" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
