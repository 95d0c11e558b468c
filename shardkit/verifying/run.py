"""`shardkit.verify`: prove that a dataset is what its manifest says."""

from __future__ import annotations

import contextlib
import os
import stat
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from shardkit.errors import ConfigError, from_os_error
from shardkit.storage.sequential import OpenSequential, SequentialReader
from shardkit.verifying.folder import Folder
from shardkit.verifying.images import warnings_are_errors
from shardkit.verifying.indexes import check_indexes, load_rows
from shardkit.verifying.keys import Hashes, hash_keys, repeated_keys
from shardkit.verifying.report import LEVELS, Finding, FindingLog, Level, Report
from shardkit.verifying.shard import check_shard
from shardkit.verifying.survey import PlannedShard, Survey, survey_dataset

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

__all__ = ["KEY_CHECKS", "verify"]

KEY_CHECKS = {"duplicates": repeated_keys}
"""What must hold between the keys of all shards."""


@dataclass(frozen=True, slots=True)
class _Outcome:
    """What came of one shard."""

    log: FindingLog
    hashes: Hashes
    """Of its keys, int64 [n]; empty when no whole index is left."""
    foreign: bool
    """Whether another tool made it, as far as an index says so."""


def verify(
    path: str | os.PathLike[str],
    level: Level = "checksum",
    *,
    jobs: int | None = None,
    progress: Callable[[int], object] | None = None,
    direct: bool | None = None,
    on_finding: Callable[[Finding], object] | None = None,
    opener: OpenSequential | None = None,
) -> Report:
    """Return everything that is wrong with a dataset, to its end whatever is found on the way.

    Memory: for each job three blocks of 4 MiB, one sample and the rows of one shard; for the dataset eight bytes a key.

    Args:
        path: the dataset's folder.
        level: `index` (manifest and indexes), `structure` (and every header and padding byte), `checksum` (and every
            image's CRC-32C and every shard's digest), `decode` (and Pillow decodes every image).
        jobs: shards that are read at the same time; as many as this process has cores by default.
        progress: called with the number of bytes just read, from any thread, one call at a time.
        direct: True demands O_DIRECT; False reads through the page cache, which hides damage on the disk below it; None
            takes O_DIRECT where the file system has it.
        on_finding: called with each finding that the report keeps, in its order, in this thread.
        opener: opens a file instead of `SequentialReader`; then `direct` is not looked at.

    Raises:
        ConfigError: no such folder, level or number of jobs.
        StorageError: the folder may not be looked at.
        UnsupportedVersionError: the dataset was written by a newer shardkit.
        CapabilityError: O_DIRECT was demanded and is not to be had.
    """
    if level not in LEVELS:
        raise ConfigError("unknown level", expected=" or ".join(LEVELS), found=repr(level))
    if jobs is not None and jobs < 1:
        raise ConfigError("at least one job", found=jobs)
    _require_folder(path)
    folder = Folder(os.fspath(path), opener or (lambda name: SequentialReader(name, direct=direct)), progress)
    log = FindingLog(on_finding)
    survey = survey_dataset(folder, log)
    samples = 0
    if survey is not None:
        with contextlib.ExitStack() as stack:
            if survey.dataset_index is not None:
                stack.enter_context(survey.dataset_index)
            if level == "decode":
                stack.enter_context(warnings_are_errors())
            samples = _check_shards(survey, level, jobs or len(os.sched_getaffinity(0)), log)
    return Report(
        dataset=os.fspath(path), level=level,
        generation=survey.manifest.generation if survey is not None and survey.manifest else None,
        shards=len(survey.shards) if survey is not None else 0, samples=samples, bytes_read=folder.bytes_read,
        read_path=folder.read_path, findings=tuple(log.findings), counts=dict(sorted(log.counts.items())),
        checksums=survey is None or survey.manifest is None or survey.manifest.has_checksums,
    )  # fmt: skip


def _require_folder(path: str | os.PathLike[str]) -> None:
    try:
        there = stat.S_ISDIR(os.stat(path).st_mode)
    except (FileNotFoundError, NotADirectoryError, ValueError):
        there = None
    except OSError as error:
        raise from_os_error(error, "cannot look at the dataset", path=path) from error
    if not there:
        what = "there is no such folder" if there is None else "a dataset is a folder"
        raise ConfigError(what, path=path, remedy="give the folder that its manifest.json lies in")


def _check_shards(survey: Survey, level: Level, jobs: int, log: FindingLog) -> int:
    """Check every shard, then the keys of all; return the number of rows."""
    hashes, foreign = [], survey.is_foreign
    with contextlib.closing(_outcomes(survey, level, min(jobs, len(survey.shards)))) as outcomes:
        for outcome in outcomes:
            log.absorb(outcome.log)
            hashes.append(outcome.hashes)
            foreign |= outcome.foreign
    if foreign:  # other tools make keys unique in their shard, and no further
        return sum(map(len, hashes))
    names = [shard.name for shard in survey.shards]
    for check in KEY_CHECKS.values():
        log.extend(check(names, hashes, lambda number: load_rows(survey, survey.shards[number])))
    return sum(map(len, hashes))


def _outcomes(survey: Survey, level: Level, jobs: int) -> Generator[_Outcome, None, None]:
    """Yield what comes of each shard, in stored order."""

    def check(shard: PlannedShard) -> _Outcome:
        return _check_one(survey, level, shard)

    if jobs <= 1:
        yield from map(check, survey.shards)
        return
    with ThreadPoolExecutor(jobs, "verify") as pool:
        try:
            yield from pool.map(check, survey.shards)
        except BaseException:
            survey.folder.stopped.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _check_one(survey: Survey, level: Level, shard: PlannedShard) -> _Outcome:
    checked = check_indexes(survey, shard)
    if checked.facts is not None:
        checked.log.absorb(check_shard(survey.folder, level, checked.facts, checked.indexed))
    hashes = hash_keys(checked.indexed.rows) if checked.indexed is not None else np.empty(0, np.int64)
    return _Outcome(checked.log, hashes, checked.facts is not None and checked.facts.layout == "foreign")
