"""A shard's indexes: found, decoded, replaced by each other where one is damaged, and compared."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from shardkit.errors import ConfigError, FormatError
from shardkit.format.checksum import DIGESTS
from shardkit.format.dataset_record import DATASET_INDEX
from shardkit.format.index import decode_shard_index
from shardkit.format.layout import check_align
from shardkit.verifying.foreign_index import FOREIGN_INDEX_CHECKS
from shardkit.verifying.index_checks import INDEX_CHECKS, MEMBERS, IndexedShard, ShardFacts
from shardkit.verifying.report import Finding, FindingLog
from shardkit.verifying.rows import Rows, geometry_of
from shardkit.verifying.survey import PlannedShard, Survey, index_finding, load_checked

if TYPE_CHECKING:
    from shardkit.format.index import IndexHeader, RecordBatch, ShardIndex

__all__ = ["CheckedIndexes", "check_indexes", "load_rows"]


@dataclass(slots=True)
class CheckedIndexes:
    """What a shard's indexes gave."""

    facts: ShardFacts | None = None
    """None when neither the manifest nor an index says what the shard must be."""
    indexed: IndexedShard | None = None
    """None when no whole index is left."""
    log: FindingLog = field(default_factory=FindingLog)


def check_indexes(survey: Survey, shard: PlannedShard) -> CheckedIndexes:
    """Load and check everything that is said about one shard, without looking at it."""
    checked = CheckedIndexes()
    own = _own_index(survey, shard, checked.log)
    dataset_rows = _dataset_rows(survey, shard, checked.log)
    record = shard.record.dali_index if shard.record else None
    dali_index = load_checked(survey, f"{shard.stem}.idx", checked.log, shard=shard.name, record=record)
    batch = own.rows if own is not None else dataset_rows
    checked.facts = _facts(survey, shard, own.header if own is not None else None, checked.log)
    if batch is None or checked.facts is None:
        message = "no whole index of this shard is left: its samples cannot be checked one by one"
        checked.log.add(Finding(code="no-rows", file=shard.name, shard=shard.name, message=message))
        return checked
    rows = Rows(batch)
    checked.indexed = IndexedShard(
        facts=checked.facts, file=f"{shard.stem}.arrow" if own is not None else DATASET_INDEX,
        header=own.header if own is not None else None, record=shard.record,
        classes=survey.manifest.classes if survey.manifest else None, rows=rows,
        geometry=geometry_of(rows, checked.facts.align, checked.facts.bytes, layout=checked.facts.layout),
        dali_index=dali_index.data if dali_index else None,
        dataset_rows=dataset_rows if own is not None else None,
    )  # fmt: skip
    checks = FOREIGN_INDEX_CHECKS if checked.facts.layout == "foreign" else INDEX_CHECKS
    for check in checks.values():
        checked.log.extend(check(checked.indexed))
    return checked


def load_rows(survey: Survey, shard: PlannedShard) -> Rows | None:
    """Return a shard's rows again, telling nothing."""
    silent = FindingLog()
    own = _own_index(survey, shard, silent)
    batch = own.rows if own is not None else _dataset_rows(survey, shard, silent)
    return None if batch is None else Rows(batch)


def _own_index(survey: Survey, shard: PlannedShard, log: FindingLog) -> ShardIndex | None:
    name = f"{shard.stem}.arrow"
    record = shard.record.index if shard.record else None
    loaded = load_checked(survey, name, log, shard=shard.name, record=record)
    if loaded is None or loaded.data is None:
        return None
    try:
        index = decode_shard_index(loaded.data)
    except FormatError as error:
        log.add(index_finding(error, name, shard.name))
        return None
    return index


def _dataset_rows(survey: Survey, shard: PlannedShard, log: FindingLog) -> RecordBatch | None:
    index = survey.dataset_index
    if index is None or shard.number >= len(index):
        return None
    try:
        return index.batch(shard.number)
    except FormatError as error:
        log.add(index_finding(error, DATASET_INDEX, shard.name))
        return None


def _facts(survey: Survey, shard: PlannedShard, header: IndexHeader | None, log: FindingLog) -> ShardFacts | None:
    """Return what the shard must be: as the manifest says, else as its own index says."""
    record, manifest = shard.record, survey.manifest
    if record is not None and manifest is not None:
        return ShardFacts(
            name=record.name, bytes=record.bytes, algorithm=manifest.digest_algorithm, digest=record.digest,
            align=manifest.align, layout=manifest.layout, has_checksums=manifest.has_checksums,
        )  # fmt: skip
    if header is None:
        return None
    algorithm, _, digest = header.digest.removeprefix(MEMBERS).partition(":")
    try:
        check_align(header.align)
        if algorithm not in DIGESTS or header.shard_bytes < 0:
            raise ConfigError("not a digest and a size", found=header.digest)
    except ConfigError as error:
        message = f"the index does not say what its shard is: {error.what}"
        log.add(Finding(code="index-header", file=f"{shard.stem}.arrow", shard=shard.name, message=message))
        return None
    return ShardFacts(
        name=shard.name, bytes=header.shard_bytes, algorithm=algorithm, digest=digest, align=header.align,
        layout=header.layout, has_checksums=not header.digest.startswith(MEMBERS),
    )  # fmt: skip
