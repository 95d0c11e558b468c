"""A shard's content as index rows and index files, and what of it is refused."""

from __future__ import annotations

import operator
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from shardkit.errors import FormatError, UnsafeError
from shardkit.format.checksum import hex_digest
from shardkit.format.dali_index import IndexedMember, encode_dali_index
from shardkit.format.dataset_record import FileRecord, ShardRecord
from shardkit.format.index import FACTS, IndexHeader, SampleRow, encode_shard_index, joined_batches, sample_batch
from shardkit.format.keys import source_from_path
from shardkit.format.tar import BLOCK, tail_bytes
from shardkit.indexing.images import MAX_IMAGE_BYTES, NO_FACTS
from shardkit.indexing.passes import ShardContent, read_shard
from shardkit.indexing.refusals import IndexRefusal, member_refusal, sample_refusal, shard_refusal
from shardkit.storage.atomic import BufferedFile

if TYPE_CHECKING:
    from collections.abc import Callable

    from shardkit.format.grouping import ForeignSample
    from shardkit.format.index import RecordBatch
    from shardkit.indexing.inputs import ShardFile
    from shardkit.indexing.options import IndexOptions

__all__ = ["ShardOutcome", "index_shard"]

_BATCH_ROWS = 4096
_NOT_IN_LINES = re.compile(rb"[^!-~]")
_SURROGATE = re.compile("[\ud800-\udfff]")
_FACTS_IN_ROW = operator.itemgetter(*(FACTS.index(name) for name in SampleRow._fields if name in FACTS))
"""Facts in the order in which they follow each other in a row, from `width` to `media_type`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardOutcome:
    """What became of a shard."""

    record: ShardRecord | None
    """None when no sample of it can be used: then there are no index files."""
    mtime_ns: int
    """Of the shard as it was read."""
    refused: list[IndexRefusal] = field(default_factory=list)
    """In stored order."""
    unlabelled: int = 0
    """Rows without a label."""
    odd_images: int = 0
    """Rows whose image is a JPEG without its end, or with bytes that are none; they are rows all the same."""
    odd_metadata: int = 0
    """Rows whose json member is not one JSON object, so that it is no metadata."""
    error: FormatError | UnsafeError | None = field(default=None, compare=False)
    """Why the shard as a whole was refused; None after a resume, too."""


def index_shard(
    shard: ShardFile, options: IndexOptions, temporary: Callable[[str], bytes], arrived: Callable[[int], object]
) -> ShardOutcome:
    """Read a shard and write its two indexes under temporary names, synced, ready to be renamed.

    Args:
        shard: what to read.
        options: how.
        temporary: gives the temporary path of a file by its final name.
        arrived: as `read_shard` takes it.

    Raises:
        ShardkitError: the shard cannot be read, or the target failed; no temporary file is left. A shard that is no
            whole tar is an outcome, and no error.
    """
    try:
        content = read_shard(shard.path, options, arrived)
    except (FormatError, UnsafeError) as error:
        reason = "unsafe-shard" if isinstance(error, UnsafeError) else "damaged-shard"
        refused = [shard_refusal(shard.name, reason, _told(error))]
        # Kept for the case that there is no other shard; without its frames, which hold what was read.
        return ShardOutcome(record=None, mtime_ns=0, refused=refused, error=error.with_traceback(None))
    return _write(shard, content, options, temporary)


def _told(error: FormatError | UnsafeError) -> str:
    """Return what an error says, without the path: equal runs write equal refusals, wherever the shards lie."""
    parts = [error.what if error.offset is None else f"{error.what}, at byte {error.offset}"]
    parts += [
        f"{name} {value}" for name, value in (("expected", error.expected), ("found", error.found)) if value is not None
    ]
    return "; ".join(parts)


def _write(
    shard: ShardFile, content: ShardContent, options: IndexOptions, temporary: Callable[[str], bytes]
) -> ShardOutcome:
    rows = _Rows(shard.name, content, options)
    rows.take_all()
    if not rows.taken:
        rows.refused.append(shard_refusal(shard.name, "no-samples", "no sample of the shard can be used"))
        return ShardOutcome(record=None, mtime_ns=content.mtime_ns, refused=rows.refused)
    batch, algorithm = rows.batch(), options.digest
    full = options.facts == "full"
    header = IndexHeader(
        shard=shard.name, shard_bytes=content.bytes, align=BLOCK, layout="foreign",
        digest=f"{algorithm if full else 'members-' + algorithm}:{content.digest}",
    )  # fmt: skip
    files = []
    for extension, data in (
        (".arrow", encode_shard_index(batch, header)),
        (".idx", encode_dali_index(_lines(sample) for sample in rows.taken)),
    ):
        with BufferedFile(temporary(shard.stem + extension)) as file:
            file.write(data)
        files.append(FileRecord(bytes=len(data), digest=hex_digest(algorithm, data)))
    record = ShardRecord(
        name=shard.name, bytes=content.bytes, digest=content.digest, samples=len(rows.taken), payload=rows.payload,
        padding=rows.padding, index=files[0], dali_index=files[1], first_key=rows.taken[0].key,
        last_key=rows.taken[-1].key,
    )  # fmt: skip
    return ShardOutcome(
        record=record, mtime_ns=content.mtime_ns, refused=rows.refused, unlabelled=batch.column("label").null_count,
        odd_images=rows.odd_images, odd_metadata=rows.odd_metadata,
    )  # fmt: skip


class _Rows:
    """The loop over a shard's samples, and what it collects."""

    def __init__(self, shard: str, content: ShardContent, options: IndexOptions) -> None:
        self.refused: list[IndexRefusal] = []
        self.taken: list[ForeignSample] = []
        self.payload = self.padding = self.odd_images = self.odd_metadata = 0
        self._shard = shard
        self._content = content
        self._labels = options.labels == "cls"
        self._rows: list[SampleRow] = []
        self._batches: list[RecordBatch] = []

    def take_all(self) -> None:
        """Make a row of each sample that can be used, and a refusal of all else."""
        self.refused = [member_refusal(self._shard, member) for member in self._content.refused]
        for sample in self._content.samples:
            refusal = self._refusal(sample)
            if refusal is not None:
                self.refused.append(refusal)
                continue
            self._rows.append(self._row(sample))
            self.taken.append(sample)
            if len(self._rows) == _BATCH_ROWS:
                self._flush()
        self.refused.sort(key=lambda refusal: refusal.offset)

    def batch(self) -> RecordBatch:
        """Return the rows, at least one."""
        self._flush()
        return joined_batches(self._batches)

    def _flush(self) -> None:
        if self._rows:
            self._batches.append(sample_batch(self._rows))
            self._rows = []

    def _refusal(self, sample: ForeignSample) -> IndexRefusal | None:
        if not sample.usable or sample.image is None:
            return sample_refusal(self._shard, sample)
        size = sample.members[sample.image].size
        if not sample.key.isascii() and _SURROGATE.search(sample.key):
            return sample_refusal(self._shard, sample, "bad-key", "the key is not UTF-8")
        if not size:
            return sample_refusal(self._shard, sample, "empty", "the image has no bytes")
        if size > MAX_IMAGE_BYTES:
            return sample_refusal(self._shard, sample, "too-large", f"{size} bytes; at most {MAX_IMAGE_BYTES}")
        cls = sample.members.get("cls") if self._labels else None
        if cls is not None and self._content.labels.get(cls.offset) is None:
            return sample_refusal(self._shard, sample, "bad-label", "the cls member is no class number")
        return None

    def _row(self, sample: ForeignSample) -> SampleRow:
        assert sample.image is not None
        image, json = sample.members[sample.image], sample.members.get("json")
        cls = sample.members.get("cls") if self._labels else None
        if json is not None and json.offset not in self._content.objects:
            json = None
            self.odd_metadata += 1
        seen = self._content.images.get(image.offset, NO_FACTS)
        self.payload += image.size
        self.padding += tail_bytes(image.size)
        self.odd_images += not seen.whole
        start = sample.start
        # By place: by name it would be a good part of the time that a small sample takes.
        return SampleRow._make((
            sample.key, None if cls is None else self._content.labels[cls.offset], image.offset, image.size,
            seen.crc32c, start, sample.end - start, 0 if json is None else json.offset,
            0 if json is None else json.size, *_FACTS_IN_ROW(seen.facts), _source(image.name),
        ))  # fmt: skip


def _source(name: str) -> str:
    if name.isascii() and "%" not in name:
        return name
    return source_from_path(name.encode("utf-8", "surrogateescape"))


def _lines(sample: ForeignSample) -> list[IndexedMember]:
    """Return the members of a sample as DALI's index names them; what would break its lines is written as `%HH`."""
    members = [pair for pair in sample.members.items() if pair[0]]
    # All at once: most samples have nothing to escape. An extension is a piece of its name.
    if _breaks_lines("".join([member.name for _, member in members])):
        return [IndexedMember(_word(end), member.offset, member.size, _word(member.name)) for end, member in members]
    return [IndexedMember(end, member.offset, member.size, member.name) for end, member in members]


def _breaks_lines(text: str) -> bool:
    return not (text.isascii() and text.isprintable()) or " " in text


def _word(text: str) -> str:
    raw = text.encode("utf-8", "surrogateescape")
    return _NOT_IN_LINES.sub(lambda m: b"%%%02X" % m[0][0], raw).decode("ascii")
