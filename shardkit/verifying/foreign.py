"""A foreign shard, held against its rows: what they say must stand there, wherever that is."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from shardkit.errors import FormatError, StorageError, UnsafeError
from shardkit.escaping import escape
from shardkit.extent import Extent
from shardkit.format.checksum import new_digest
from shardkit.format.foreign_tar import ForeignTarParser
from shardkit.format.grouping import group_members, split_name
from shardkit.format.keys import source_from_path
from shardkit.format.member_digest import members_digest
from shardkit.verifying.folder import trouble
from shardkit.verifying.report import LEVELS, Finding, FindingLog, Level
from shardkit.verifying.sample_checks import Sample, check_decoding, check_facts, check_payload
from shardkit.verifying.window import Window

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from shardkit.format.foreign_member import Member
    from shardkit.format.grouping import ForeignSample
    from shardkit.storage.sequential import SequentialReader
    from shardkit.verifying.folder import Folder
    from shardkit.verifying.index_checks import IndexedShard, ShardFacts
    from shardkit.verifying.sample_checks import SampleCheck

__all__ = ["check_foreign_shard"]

_MAX_LABEL_BYTES = 64


@dataclass(slots=True, kw_only=True)
class _Row(Sample):
    """One sample as its row states it; `start` is where its first header stands."""

    end: int
    """The first byte after its last block."""


@dataclass(slots=True, kw_only=True)
class _Pass:
    """A shard on its way through a pass, and what is known at its end."""

    level: Level
    facts: ShardFacts
    rows: Mapping[int, _Row]
    """By payload offset."""
    log: FindingLog = field(default_factory=FindingLog)
    members: list[Member] = field(default_factory=list)
    labels: dict[int, bytes] = field(default_factory=dict)
    """What short cls members hold, by their payload offset."""

    def reaches(self, level: Level) -> bool:
        return LEVELS.index(self.level) >= LEVELS.index(level)

    def finding(self, code: str, message: str, *, offset: int | None = None, expected: str | int | None = None,
                found: str | int | None = None, region: str = "file") -> Finding:  # fmt: skip
        return Finding(code=code, file=self.facts.name, shard=self.facts.name, offset=offset, region=region,
                       message=message, expected=expected, found=found)  # fmt: skip


def check_foreign_shard(
    folder: Folder, level: Level, facts: ShardFacts, indexed: IndexedShard | None, reader: SequentialReader
) -> FindingLog:
    """Return what is wrong with a foreign shard's file, which is read once, from front to back.

    Args:
        folder: the dataset.
        level: `structure` or a higher one.
        facts: what the shard must be.
        indexed: its rows; None when no whole index is left.
        reader: the open shard.
    """
    rows = {} if indexed is None else {sample.offset: sample for sample in _samples(indexed, reader)}
    done = _Pass(level=level, facts=facts, rows=rows)
    if reader.size != facts.bytes:
        what = "bytes were appended" if reader.size > facts.bytes else "the end is missing"
        done.log.add(done.finding("shard-size", what, offset=min(reader.size, facts.bytes),
                                  expected=f"{facts.bytes} bytes", found=f"{reader.size} bytes"))  # fmt: skip
        return done.log
    digest = new_digest(facts.algorithm) if facts.has_checksums and done.reaches("checksum") else None
    with contextlib.closing(reader.blocks([Extent(0, reader.size)] if reader.size else [])) as blocks:
        window = Window(blocks, reader.size, lambda count: folder.arrived(count, reader), digest)
        try:
            _walk(done, window, reader.size)
            window.drain()
        except StorageError as error:
            done.log.add(trouble(error, facts.name, facts.name))
            return done.log
    if not done.log.total and indexed is not None:
        done.log.extend(_compare(done))
    if not done.log.total:
        found = facts.digest
        if digest is not None:
            found = digest.hexdigest()
        elif not facts.has_checksums:
            found = members_digest(facts.algorithm, reader.size, [done.members])
        if found != facts.digest:
            message = "the rows are right by themselves, but the shard is not the one that was indexed"
            done.log.add(done.finding("shard-digest", message, expected=facts.digest, found=found))
    return done.log


def _walk(done: _Pass, window: Window, size: int) -> None:
    """Go through the members, looking at the images that have a row and at labels."""
    checks: list[SampleCheck] = []
    if done.facts.has_checksums and done.reaches("checksum"):
        checks = [check_payload, check_facts]
    if done.reaches("decode"):
        checks.append(check_decoding)
    try:
        parser = ForeignTarParser(size)
        while (wanted := parser.wanted) is not None:
            member = parser.feed(bytes(window.take(wanted.offset, wanted.end)))
            if member is None:
                continue
            done.members.append(member)
            parts = split_name(member.name)
            if parts is not None and parts[1] == "cls" and member.size <= _MAX_LABEL_BYTES:
                done.labels[member.offset] = bytes(window.take(member.offset, member.offset + member.size))
            sample = done.rows.get(member.offset)
            if sample is not None and sample.size == member.size and checks:
                sample.payload = window.take(member.offset, member.offset + member.size)
                _look(checks, sample, done.log)
    except (FormatError, UnsafeError) as error:
        found = None if error.found is None else escape(str(error.found))[:200]
        done.log.add(done.finding("tar", escape(error.what), offset=error.offset, found=found, region="header"))


def _look(checks: list[SampleCheck], sample: Sample, log: FindingLog) -> None:
    for check in checks:
        before = log.total
        log.extend(check(sample))
        if log.total > before:  # one damage, one finding: wrong bytes are not asked what they show
            return


def _compare(done: _Pass) -> Iterator[Finding]:
    """Every row states a sample that stands there as a whole, under its key and with its label."""
    by_image = {member.offset: group for group in group_members(done.members) for member in group.members.values()}
    for row in done.rows.values():
        group = by_image.get(row.offset)
        problem = "there is no member" if group is None else _problem(row, group, done.labels)
        if problem is not None:
            yield row.finding("members", row.offset, f"not what the row states: {problem}", region="header")


def _problem(row: _Row, group: ForeignSample, labels: Mapping[int, bytes]) -> str | None:
    """Return in words what a row states wrongly about its sample; None when it is right."""
    image = next(member for member in group.members.values() if member.offset == row.offset)
    json, cls = group.members.get("json"), group.members.get("cls")
    if (group.key, image.size) != (row.key, row.size):
        return f"the key or the size of the image ({escape(group.key)}, {image.size} bytes)"
    if source_from_path(image.name.encode("utf-8", "surrogateescape")) != row.source:
        return f"the name of the image ({escape(image.name)})"
    if (group.start, group.end) != (row.start, row.end):
        return f"where the sample lies ({group.start} to {group.end})"
    if row.json_offset and (json is None or (json.offset, json.size) != (row.json_offset, row.json_size)):
        return "where the json member lies"
    if row.label is not None:
        text = labels.get(cls.offset, b"").strip() if cls is not None else b""
        if not text.isdigit() or int(text) != row.label:
            return f"the label ({ascii(text)[2:-1]})"
    return None


def _samples(indexed: IndexedShard, reader: SequentialReader) -> Iterator[_Row]:
    rows = indexed.rows
    numbers = (rows.label, rows.labelled, rows.json_offset, rows.json_size, rows.sample_offset, rows.sample_size,
               rows.offset, rows.size, rows.crc32c)  # fmt: skip
    texts = (rows.keys(), rows.sources(), rows.facts(0, len(rows)))
    for key, source, facts, label, labelled, json_at, json_size, start, length, offset, size, checksum in zip(
        *texts, *(column.tolist() for column in numbers), strict=True
    ):
        yield _Row(
            shard=indexed.facts.name, key=key, previous_key=None, label=label if labelled else None, class_name=None,
            source=source, json_offset=json_at, json_size=json_size, padding=0, end=start + length,
            offset=offset, size=size, crc32c=checksum, facts=facts, start=start, before=b"", payload=memoryview(b""),
            hole_in=reader.first_hole,
        )  # fmt: skip
