"""The dataset as a whole: its manifest, the files in its folder, and what must hold between the two."""

from __future__ import annotations

import os
import re
import threading
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, BinaryIO

from shardkit.errors import FormatError, ManifestError, StorageError, UnsupportedVersionError, from_os_error
from shardkit.escaping import escape
from shardkit.format.dataset_record import DATASET_INDEX, MANIFEST, REJECTED
from shardkit.format.index import DatasetIndexReader
from shardkit.format.manifest import load_manifest
from shardkit.format.remedy import remedy_without_manifest
from shardkit.storage.regular import folders_with
from shardkit.verifying.folder import Folder, LoadedFile, trouble
from shardkit.verifying.index_checks import FILE_CHECKS
from shardkit.verifying.report import Finding, FindingLog

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from types import TracebackType

    from shardkit.format.dataset_record import Manifest, ShardRecord
    from shardkit.format.index import RecordBatch

__all__ = ["DATASET_CHECKS", "DatasetIndex", "PlannedShard", "Survey", "load_checked", "survey_dataset"]

WORK_FOLDER = ".shardkit"


@dataclass(frozen=True, slots=True)
class PlannedShard:
    """A shard to look at."""

    number: int
    """Its place in stored order; the record batch of `index.arrow` that holds its rows."""
    name: str
    record: ShardRecord | None
    """None without a usable manifest."""

    @property
    def stem(self) -> str:
        """File name without `.tar`; the index files are named after it."""
        return self.name.removesuffix(".tar")


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """What is known about the dataset before a shard is looked at."""

    folder: Folder
    entries: Sequence[str]
    """Names in the folder, sorted."""
    manifest: Manifest | None
    """None when it is damaged or not there: then the files alone must agree with one another."""
    shards: Sequence[PlannedShard]
    rejected: LoadedFile | None = None
    dataset_index: DatasetIndex | None = None

    @property
    def is_foreign(self) -> bool:
        """Whether the manifest says that another tool made the shards."""
        return self.manifest is not None and self.manifest.layout == "foreign"

    @property
    def algorithm(self) -> str | None:
        """Of the manifest's digests."""
        return self.manifest.digest_algorithm if self.manifest else None


class DatasetIndex:
    """`index.arrow`, read a shard at a time by several threads."""

    def __init__(self, file: BinaryIO) -> None:
        """Take over an open file.

        Raises:
            FormatError: it is not an index.
        """
        self._file = file
        self._lock = threading.Lock()
        self._reader = DatasetIndexReader(file)

    def __len__(self) -> int:
        """Return the number of record batches."""
        return len(self._reader)

    def batch(self, number: int) -> RecordBatch:
        """Return the rows of one shard.

        Raises:
            FormatError: they are damaged.
        """
        with self._lock:
            return self._reader.batch(number)

    def __enter__(self) -> DatasetIndex:
        """Return the index."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the file."""
        self._file.close()


def survey_dataset(folder: Folder, log: FindingLog) -> Survey | None:
    """Read everything but the shards and their indexes; return None when there is nothing to go on with.

    Raises:
        UnsupportedVersionError: written by a newer shardkit.
        ShardkitError: the folder cannot be listed.
    """
    try:
        entries = sorted(os.listdir(folder.path))
    except OSError as error:
        raise from_os_error(error, "cannot list the dataset", path=folder.path) from error
    if MANIFEST not in entries:
        log.add(_no_manifest(folder, entries))
        if WORK_FOLDER in entries or not _stems(entries):
            return None
        manifest = None
    else:
        manifest = _manifest(folder, log)
    shards = _planned(manifest, entries)
    survey = Survey(folder=folder, entries=entries, manifest=manifest, shards=shards)
    survey = replace(survey, rejected=_rejected(survey, log), dataset_index=_dataset_index(survey, log))
    for check in DATASET_CHECKS.values():
        log.extend(check(survey))
    return survey


def _no_manifest(folder: Folder, entries: Sequence[str]) -> Finding:
    advice = "restore it from a copy, or pack again"
    if WORK_FOLDER in entries:
        advice = "the pack did not finish: run the same `shardkit pack` again with --resume"
    elif remedy := remedy_without_manifest(entries, folders_with(os.fsdecode(folder.path), MANIFEST)):
        advice = remedy
    elif not _stems(entries):
        advice = "there are no shards either: is this the right folder?"
    return Finding(code="no-manifest", file=MANIFEST, message=f"the dataset is not complete; {advice}")


def _manifest(folder: Folder, log: FindingLog) -> Manifest | None:
    loaded = folder.load(MANIFEST, record=None, algorithm=None)
    if isinstance(loaded, Finding):
        log.add(loaded)
        return None
    try:
        if loaded.data is None:
            raise ManifestError("the manifest is too large", found=f"{loaded.size} bytes")
        manifest = load_manifest(loaded.data)
    except UnsupportedVersionError as error:
        error.path = folder.join(MANIFEST)
        raise
    except ManifestError as error:
        log.add(_manifest_finding(error))
        return None
    return manifest


def _manifest_finding(error: ManifestError) -> Finding:
    told = {name: None if value is None else escape(str(value))[:200] for name, value in
            (("expected", error.expected), ("found", error.found))}  # fmt: skip
    message = f"{error.what}; what follows is held against the indexes alone"
    return Finding(code="manifest", file=MANIFEST, message=message, expected=told["expected"], found=told["found"])


def _planned(manifest: Manifest | None, entries: Sequence[str]) -> Sequence[PlannedShard]:
    if manifest is not None:
        return [PlannedShard(i, record.name, record) for i, record in enumerate(manifest.shards)]
    return [PlannedShard(i, f"{stem}.tar", None) for i, stem in enumerate(_stems(entries))]


def _stems(entries: Sequence[str]) -> Sequence[str]:
    """Return the names, without their endings, of the shards that a folder holds something of."""
    ends = (".tar", ".arrow")
    return sorted({name.rpartition(".")[0] for name in entries if name.endswith(ends) and name != DATASET_INDEX})


def load_checked(
    survey: Survey, name: str, log: FindingLog, *, keep: bool = True, **where: object
) -> LoadedFile | None:
    """Return a file beside the shards when it is there and right by itself; tell what is wrong otherwise.

    Args:
        survey: the dataset.
        name: file name.
        log: takes the findings.
        keep: keep the bytes, not only their digest.
        where: `shard` and `record`, as `Folder.load` takes them.
    """
    loaded = survey.folder.load(name, algorithm=survey.algorithm, keep=keep, **where)  # type: ignore[arg-type]
    if isinstance(loaded, Finding):
        log.add(loaded)
        return None
    before = log.total
    for check in FILE_CHECKS.values():
        log.extend(check(loaded))
    return loaded if log.total == before else None


def _rejected(survey: Survey, log: FindingLog) -> LoadedFile | None:
    if survey.manifest is None or survey.manifest.rejected is None:
        return None
    return load_checked(survey, REJECTED, log, record=survey.manifest.rejected)


def _dataset_index(survey: Survey, log: FindingLog) -> DatasetIndex | None:
    record = survey.manifest.index if survey.manifest else None
    if load_checked(survey, DATASET_INDEX, log, record=record, keep=False) is None:
        return None
    file = None
    try:
        file = open(survey.folder.join(DATASET_INDEX), "rb")  # noqa: SIM115, the index owns it
        return DatasetIndex(file)
    except OSError as error:
        log.add(trouble(StorageError("cannot open", found=error.strerror, errno=error.errno), DATASET_INDEX, None))
    except FormatError as error:
        log.add(index_finding(error, DATASET_INDEX, None))
    if file is not None:
        file.close()
    return None


def index_finding(error: FormatError, name: str, shard: str | None) -> Finding:
    """Return the finding of an index that does not decode; a read that failed on the way is no damage."""
    cause = error.__cause__
    if isinstance(cause, OSError) and cause.errno:
        return trouble(StorageError("cannot read", found=cause.strerror, errno=cause.errno), name, shard)
    found = None if error.found is None else escape(str(error.found))[:200]
    return Finding(code="index-format", file=name, shard=shard, message=escape(error.what), found=found)


def check_extra_files(survey: Survey) -> Iterator[Finding]:
    """The folder holds no shard, index or list of refusals that the manifest does not name.

    Foreign shards lie where they lay, beside whatever lay there: only a list of refusals would be shardkit's.
    """
    if survey.manifest is None:
        return
    ends = (".tar", ".arrow", ".idx", ".tar.idx")  # the last is Megatron-Energon's, which wants it there
    expected = {DATASET_INDEX} | {f"{shard.stem}{end}" for shard in survey.shards for end in ends}
    if survey.manifest.rejected is not None:
        expected.add(REJECTED)
    if survey.is_foreign:
        expected |= {name for name in survey.entries if name != REJECTED}
    for name in survey.entries:
        if (name.endswith((".tar", ".arrow", ".idx")) or name == REJECTED) and name not in expected:
            message = "the manifest does not name this file; move it away if it is not part of the dataset"
            yield Finding(code="extra-file", file=name, message=message)


def check_names(survey: Survey) -> Iterator[Finding]:
    """Shards are called after the dataset, and their numbers rise; foreign ones have the names that they had."""
    if survey.manifest is None or survey.is_foreign:
        return
    pattern = re.compile(re.escape(survey.manifest.name) + r"-([0-9]{6,18})\.tar", re.ASCII)
    last = -1
    for shard in survey.shards:
        match = pattern.fullmatch(shard.name)
        if match is None or int(match[1]) <= last:
            expected = f"{survey.manifest.name}-NUMBER.tar, NUMBER above {last}"
            yield Finding(code="shard-name", file=MANIFEST, shard=shard.name, message="a name out of order",
                          expected=expected, found=shard.name)  # fmt: skip
        else:
            last = int(match[1])


def check_rejected(survey: Survey) -> Iterator[Finding]:
    """The list of refusals has a line for each refusal that the manifest counts."""
    if survey.manifest is None:
        return
    stated = survey.manifest.totals.refused
    if survey.manifest.rejected is None:
        lines = 0
    elif survey.rejected is None or survey.rejected.data is None:
        return
    else:
        lines = survey.rejected.data.count(b"\n")
    if lines != stated:
        message = "not a line for each refusal that the manifest counts"
        yield Finding(code="rejected-lines", file=REJECTED, message=message, expected=stated, found=lines)


def check_batches(survey: Survey) -> Iterator[Finding]:
    """`index.arrow` has a record batch for each shard."""
    index = survey.dataset_index
    if index is not None and len(index) != len(survey.shards):
        message = "not one record batch a shard"
        yield Finding(code="dataset-index", file=DATASET_INDEX, region="rows", message=message,
                      expected=len(survey.shards), found=len(index))  # fmt: skip


DATASET_CHECKS: dict[str, Callable[[Survey], Iterator[Finding]]] = {
    "extra-files": check_extra_files,
    "names": check_names,
    "rejected": check_rejected,
    "batches": check_batches,
}
"""What must hold for the dataset as a whole, before any shard is looked at."""
