"""`shardkit.export`: other tools' index files from one index table, in seconds."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from shardkit.dataset.folder import DATASET_INDEX, check_shards, map_index, read_manifest
from shardkit.errors import ConfigError, IntegrityError, ShardkitError
from shardkit.escaping import escape
from shardkit.exporting.formats import FORMATS
from shardkit.exporting.record import RECORD, dump_record
from shardkit.exporting.report import ExportedFile, ExportReport
from shardkit.exporting.table import ForeignFile, Table
from shardkit.exporting.target import StagedFile, Target
from shardkit.format.checksum import hex_digest
from shardkit.format.dataset_record import SHARD_FILES
from shardkit.format.index import check_rows
from shardkit.local_path import local_path

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from shardkit.exporting.report import State
    from shardkit.format.manifest import Manifest

__all__ = ["export"]

_UNCHANGED = "nothing was changed"
_SHOWN = 5


def export(
    path: str | os.PathLike[str],
    to: str | Iterable[str],
    *,
    out: str | os.PathLike[str] | None = None,
    overwrite: bool = False,
    progress: Callable[[str], object] | None = None,
) -> ExportReport:
    """Write other tools' index files of a dataset; no payload is read.

    Memory: the rows of one shard, and 8 bytes a sample for `energon`. All files are whole and compared before the first
    gets its name. Of foreign shards only headers that stand between the members of samples and after the last are read,
    for `wids`, `energon` and `huggingface`.

    Args:
        path: the dataset's folder.
        to: names of formats (`shardkit.exporting.formats.FORMATS`): one, or several.
        out: folder for the files, made when missing; the dataset's own by default. Their bytes are the same
            wherever they lie: names of shards are relative, so they belong beside the shards.
        overwrite: replace files that no export has written, too.
        progress: called with the name of each file before it is made.

    Raises:
        ConfigError: unknown formats, no finished dataset, files that are not an export's and differ, or
            shards that a tool would read otherwise; names all of these formats.
        IntegrityError: the index or the size of a shard is not what the manifest says.
        LockedError: another export writes into the folder.
        ShardkitError: the target cannot be written; as `from_os_error` maps it.
    """
    formats = _known_formats(to)
    source = os.fspath(path)
    table = _open_table(source)
    target = Target(os.path.abspath(os.fsencode(source)) if out is None else local_path(out))
    with target.hold():
        try:
            staged = _stage(target, table, formats, progress)
            recorded, states = _compare(target, staged, overwrite)
            if read_manifest(source).generation != table.manifest.generation:
                raise ConfigError("the dataset was replaced while it was exported", path=source, remedy="export again")
            changed = [file for (_, file), state in zip(staged, states, strict=True) if state != "unchanged"]
            digests = recorded | {file.name: file.digest for _, file in staged}
            record = target.stage(ForeignFile(RECORD, [dump_record(table.manifest.generation, digests)]))
            if changed or digests != recorded:
                changed.append(record)  # last: what it names is in place
        except ShardkitError as error:
            error.kept = _UNCHANGED
            raise
        target.put(changed)
    files = [
        ExportedFile(name, file.name, file.bytes, state) for (name, file), state in zip(staged, states, strict=True)
    ]
    return ExportReport(
        dataset=source, folder=os.fsdecode(target.folder), generation=table.manifest.generation,
        samples=table.manifest.totals.samples, files=files,
    )  # fmt: skip


def _known_formats(to: str | Iterable[str]) -> list[str]:
    names = list(dict.fromkeys([to] if isinstance(to, str) else to))
    unknown = [name for name in names if name not in FORMATS]
    if unknown or not names:
        raise ConfigError("unknown format" if unknown else "no format", expected=", ".join(FORMATS),
                          found=", ".join(escape(str(name)) for name in unknown) or None)  # fmt: skip
    return names


def _open_table(path: str) -> Table:
    """Read the manifest and the whole index, and hold them and the sizes of the shards against each other."""
    manifest = read_manifest(path)
    memory, batches = map_index(path, manifest)
    file = os.path.join(path, DATASET_INDEX)
    digest = hex_digest(manifest.digest_algorithm, memory.data)
    if digest != manifest.index.digest:
        raise IntegrityError(
            "the index is not the manifest's", path=file, expected=f"digest {manifest.index.digest}", found=digest,
            remedy="run shardkit verify",
        )  # fmt: skip
    for number, batch in enumerate(batches):
        check_rows(batch, number)
    _check_sizes(path, manifest)
    return Table(path, manifest, batches)


def _check_sizes(path: str, manifest: Manifest) -> None:
    # An index of a longer shard makes DALI read past the end of the file, and fall.
    check_shards([os.path.join(path, shard.name) for shard in manifest.shards], manifest)


def _stage(
    target: Target, table: Table, formats: Sequence[str], progress: Callable[[str], object] | None
) -> list[tuple[str, StagedFile]]:
    """Stage the files of every format; a refused one does not hide that others are refused, too.

    Raises:
        ConfigError: some are; says why of each, and which are left.
    """
    staged: list[tuple[str, StagedFile]] = []
    refused: dict[str, ConfigError] = {}
    taken = _own_names(table.manifest)
    for name in formats:
        others = dict(taken)
        try:
            for file in FORMATS[name](table):
                _take(taken, file.name, name)
                if progress is not None:
                    progress(file.name)
                staged.append((name, target.stage(file)))
        except ConfigError as error:
            refused[name], taken = error, others
    if refused:
        raise _all_refused(refused, formats)
    return staged


def _take(taken: dict[str, str], file: str, name: str) -> None:
    owner = taken.setdefault(file, name)
    if owner != name:
        raise ConfigError(
            "two files of one name", path=file, expected=f"{owner}'s", found=f"{name}'s",
            remedy="write other shards with shardkit convert",
        )  # fmt: skip


def _all_refused(refused: Mapping[str, ConfigError], formats: Sequence[str]) -> ConfigError:
    if len(refused) == 1:
        return next(iter(refused.values()))
    rest = ",".join(name for name in formats if name not in refused)
    return ConfigError(
        f"{len(refused)} of {len(formats)} formats are refused: {'; '.join(map(str, refused.values()))}",
        remedy=f"what can be exported is --to {rest}" if rest else None,
    )


def _own_names(manifest: Manifest) -> dict[str, str]:
    """Return name to owner of the dataset's own files: shards of other tools may be called like an export of another.

    The index of DALI is both, and the same.
    """
    names = {f"{shard.stem}{end}": "the dataset" for shard in manifest.shards for end in SHARD_FILES}
    return names | {f"{shard.stem}.idx": "dali" for shard in manifest.shards}


def _compare(
    target: Target, staged: Sequence[tuple[str, StagedFile]], overwrite: bool
) -> tuple[dict[str, str], list[State]]:
    """Return what earlier exports have written, and what becomes of each file.

    Raises:
        ConfigError: a file would replace what no export has written.
    """
    record = target.record()
    recorded = record or {}
    found = [target.compare(file, recorded.get(file.name)) for _, file in staged]
    strangers = [file.name for (_, file), state in zip(staged, found, strict=True) if state is None]
    if record is None:
        strangers.append(RECORD)
    if strangers and not overwrite:
        more = [f"and {len(strangers) - _SHOWN} more"] if len(strangers) > _SHOWN else []
        raise ConfigError(
            "the target holds files that no export has written", path=target.folder,
            found=", ".join([*map(escape, strangers[:_SHOWN]), *more]),
            remedy="move them away, or replace them with --overwrite",
        )  # fmt: skip
    return recorded, [state or "replaced" for state in found]
