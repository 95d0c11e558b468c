"""One shard, proven: its indexes first, then one pass over its bytes."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from shardkit.errors import StorageError
from shardkit.extent import Extent
from shardkit.format.checksum import new_digest
from shardkit.format.tar import BLOCK
from shardkit.verifying.folder import Folder, changed, trouble
from shardkit.verifying.foreign import check_foreign_shard
from shardkit.verifying.index_checks import IndexedShard, ShardFacts, fits
from shardkit.verifying.report import LEVELS, Finding, FindingLog, Level
from shardkit.verifying.sample_checks import SAMPLE_CHECKS, Sample, SampleCheck, zeros_finding
from shardkit.verifying.window import Window

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from shardkit.storage.sequential import SequentialReader

__all__ = ["SHARD_CHECKS", "ShardPass", "check_shard"]

GAP_BYTES = 256 << 10
"""A payload at least this long is passed over by a level that does not look at it; reading it would cost less below."""


_ROWS_AT_ONCE = 8192
"""Rows that are Python objects at the same time: a row takes ten times the bytes that its columns do."""


@dataclass(slots=True, kw_only=True)
class ShardPass:
    """A shard on its way through a pass, and what is known at its end."""

    facts: ShardFacts
    size: int
    """Bytes that the file has."""
    last_key: str | None = None
    image_end: int = 0
    """End of the block padding of the last image."""
    tail_start: int = 0
    """Offset of `tail`: the end of the last payload."""
    tail: bytes = b""
    """From there to the end of the shard; empty when it was not reached."""
    lost: str | None = None
    """Key of the first sample that is not there any more."""
    whole: int | None = None
    """Samples that are there; None when there are no rows."""
    samples: int = 0
    has_json: bool = False
    digest: str | None = None
    """Hex digest; None when it was not computed."""
    localised: bool = False
    """Another check has seen damage in this shard's bytes."""

    def finding(
        self,
        code: str,
        message: str,
        expected: str | None = None,
        found: str | None = None,
        *,
        offset: int | None = None,
        region: str = "file",
        key: str | None = None,
    ) -> Finding:
        """Return a finding about the shard's file."""
        name = self.facts.name
        return Finding(code=code, file=name, shard=name, offset=offset, region=region, key=key, message=message,
                       expected=expected, found=found)  # fmt: skip


def check_size(shard: ShardPass) -> Iterator[Finding]:
    """A shard has the size that its record states."""
    stated = shard.facts.bytes
    if shard.size == stated:
        return
    what = "bytes were appended" if shard.size > stated else "the end is missing"
    if shard.lost is not None and shard.whole is not None:
        what += f": {shard.whole} of {shard.samples} samples are whole"
    yield shard.finding(
        "shard-size", what, f"{stated} bytes", f"{shard.size} bytes", offset=min(shard.size, stated), key=shard.lost
    )


def check_tail(shard: ShardPass) -> Iterator[Finding]:
    """After the last payload there are only zeros."""
    finding = zeros_finding(shard.facts.name, shard.tail_start, shard.tail, shard.image_end, shard.last_key)
    if finding is not None:
        yield finding


def check_digest(shard: ShardPass) -> Iterator[Finding]:
    """A shard has its digest; told only when no other check has seen where it differs."""
    if shard.digest in (None, shard.facts.digest) or shard.localised:
        return
    message, region = "the bytes are damaged or of another pack, and there are no rows to say where", "file"
    if shard.whole is not None and shard.has_json:
        message, region = "headers, labels, padding and images are right: the damage is in a json member", "json"
    elif shard.whole is not None:
        message = "every part is right by itself, but the shard is not the one that was packed"
    yield shard.finding("shard-digest", message, shard.facts.digest, shard.digest, region=region)


SHARD_CHECKS: dict[str, tuple[Level, Callable[[ShardPass], Iterator[Finding]]]] = {
    "size": ("index", check_size),
    "tail": ("structure", check_tail),
    "digest": ("checksum", check_digest),
}
"""What must hold for every shard's file, and the cheapest level that looks."""


_OF_BYTES = ("header", "cls", "json", "padding", "payload", "end")
"""Findings that say where a shard's bytes are wrong. Others, such as `decode`, may be true of the packed bytes."""


@dataclass(slots=True, kw_only=True)
class _Work:
    """What a pass over one shard needs."""

    folder: Folder
    level: Level
    facts: ShardFacts
    indexed: IndexedShard | None
    log: FindingLog = field(default_factory=FindingLog)

    def reaches(self, level: Level) -> bool:
        return LEVELS.index(self.level) >= LEVELS.index(level)


def check_shard(folder: Folder, level: Level, facts: ShardFacts, indexed: IndexedShard | None) -> FindingLog:
    """Return what is wrong with a shard's file.

    Args:
        folder: the dataset.
        level: how thoroughly to look.
        facts: what the shard must be.
        indexed: its rows; None when no whole index is left, and then only the digest is compared.
    """
    work = _Work(folder=folder, level=level, facts=facts, indexed=indexed)
    size = folder.size_of(facts.name, facts.name)
    if isinstance(size, Finding):
        work.log.add(size)
        return work.log
    if not work.reaches("structure"):
        _finish(work, ShardPass(facts=facts, size=size))
        return work.log
    try:
        with folder.open(facts.name) as reader:
            if facts.layout == "foreign":
                work.log.absorb(check_foreign_shard(folder, level, facts, indexed, reader))
            else:
                _finish(work, _stream(work, reader))
            if reader.changed():
                work.log = FindingLog()
                work.log.add(changed(facts.name, facts.name))
    except StorageError as error:
        work.log.add(trouble(error, facts.name, facts.name))
    return work.log


def _finish(work: _Work, done: ShardPass) -> None:
    for level, check in SHARD_CHECKS.values():
        if work.reaches(level):
            done.localised = any(work.log.counts[code] for code in _OF_BYTES)
            work.log.extend(check(done))


def _stream(work: _Work, reader: SequentialReader) -> ShardPass:
    """Read the shard once, from front to back, running the checks of every sample."""
    facts = work.facts
    done = ShardPass(facts=facts, size=reader.size)
    end = min(reader.size, facts.bytes)
    usable = work.indexed if work.indexed is not None and fits(work.indexed) else None
    hashed = work.reaches("checksum")
    digest = new_digest(facts.algorithm) if hashed else None
    extents = [Extent(0, end)] if hashed else _framing_extents(usable, end)
    with contextlib.closing(reader.blocks(extents)) as blocks:
        window = Window(blocks, end, lambda count: work.folder.arrived(count, reader), digest)
        try:
            if usable is not None:
                _check_samples(work, usable, window, done, end, reader)
            window.drain()
        except StorageError as error:
            work.log.add(trouble(error, facts.name, facts.name))
            return done
    if digest is not None and end == facts.bytes:
        done.digest = digest.hexdigest()
    return done


def _framing_extents(indexed: IndexedShard | None, end: int) -> Sequence[Extent]:
    """Return what to read when payloads are not looked at: everything but the long ones."""
    if indexed is None:
        return []
    starts = np.concatenate([[0], indexed.geometry.offset + indexed.rows.size])
    stops = np.concatenate([indexed.geometry.offset, [indexed.facts.bytes]])
    cut = np.flatnonzero(starts[1:] - stops[:-1] >= GAP_BYTES)
    firsts, lasts = starts[np.concatenate([[0], cut + 1])], stops[np.concatenate([cut, [len(stops) - 1]])]
    pairs = zip(firsts.tolist(), np.minimum(lasts, end).tolist(), strict=True)
    return [Extent(first, last - first) for first, last in pairs if first < last]


def _check_samples(
    work: _Work, indexed: IndexedShard, window: Window, done: ShardPass, end: int, reader: SequentialReader
) -> None:
    checks = [check for level, check in SAMPLE_CHECKS.values() if work.reaches(level)]
    hashed = work.reaches("checksum")
    rows = indexed.rows
    done.samples, done.whole, done.has_json = len(rows), 0, bool((rows.json_offset > 0).any())
    for sample in _samples(indexed, reader):
        payload_end = sample.offset + sample.size
        if payload_end > end:
            done.lost = sample.key
            break
        sample.before = bytes(window.take(sample.start, sample.offset))
        if hashed:
            sample.payload = window.take(sample.offset, payload_end)
        _run(checks, sample, work.log)
        done.whole, done.last_key, done.tail_start = done.whole + 1, sample.key, payload_end
    if done.lost is None:
        done.image_end = done.tail_start + -done.tail_start % BLOCK
        done.tail = bytes(window.take(done.tail_start, end))


def _run(checks: Sequence[SampleCheck], sample: Sample, log: FindingLog) -> None:
    for check in checks:
        for finding in check(sample):
            log.add(finding)
            if finding.region == "payload":  # one damage, one finding: wrong bytes are not asked what they show
                return


def _samples(indexed: IndexedShard, reader: SequentialReader) -> Iterator[Sample]:
    """Yield every row as a sample that waits for its bytes."""
    rows, geometry = indexed.rows, indexed.geometry
    padding = geometry.offset - BLOCK - geometry.sample_offset - rows.small
    numbers = (
        rows.label,
        rows.labelled,
        rows.json_offset,
        rows.json_size,
        padding,
        rows.offset,
        rows.size,
        rows.crc32c,
    )
    classes = indexed.classes or ()
    start, previous = 0, None
    for first in range(0, len(rows), _ROWS_AT_ONCE):
        lists = [column[first : first + _ROWS_AT_ONCE].tolist() for column in numbers]
        texts = (part(first, _ROWS_AT_ONCE) for part in (rows.keys, rows.sources, rows.facts))
        for key, source, facts, label, labelled, json_at, json_size, pad, offset, size, checksum in zip(
            *texts, *lists, strict=True
        ):
            yield Sample(
                shard=indexed.facts.name, key=key, previous_key=previous, label=label if labelled else None,
                class_name=classes[label] if labelled and 0 <= label < len(classes) else None, source=source,
                json_offset=json_at, json_size=json_size, padding=pad, offset=offset, size=size, crc32c=checksum,
                facts=facts, start=start, before=b"", payload=memoryview(b""), hole_in=reader.first_hole,
            )  # fmt: skip
            start, previous = offset + size, key
