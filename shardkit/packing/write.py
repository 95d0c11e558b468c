"""One shard: its planned sources, read, checked and written in one pass, with its indexes."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pyarrow as pa

from shardkit.format.checksum import crc32c, hex_digest, new_digest
from shardkit.format.dali_index import IndexedMember, encode_dali_index
from shardkit.format.index import FACTS, IndexHeader, SampleRow, encode_shard_index, sample_batch
from shardkit.format.layout import SampleLayout, place_sample, shard_bytes
from shardkit.format.manifest import FileRecord, ShardRecord
from shardkit.format.media_type import sniff_media_type
from shardkit.format.tar import BLOCK, encode_header, encode_padding, tail_bytes
from shardkit.packing.admission import admit
from shardkit.packing.plan import cls_payload
from shardkit.packing.refusals import Refusal, RefusedError, stop_error
from shardkit.packing.sharing import Room
from shardkit.storage.atomic import BufferedFile
from shardkit.storage.sequential_writer import SequentialWriter, new_buffers

if TYPE_CHECKING:
    import mmap

    from shardkit.format.jpeg import JpegFacts
    from shardkit.packing.options import ShardOptions
    from shardkit.packing.supply import Origin, Picture
    from shardkit.storage.clone import Reflink

__all__ = [
    "BUFFERS",
    "BUFFER_BYTES",
    "Progress",
    "ShardJob",
    "ShardResult",
    "end_shard",
    "read_ahead",
    "write_indexes",
    "write_shard",
]

BUFFERS = 3
BUFFER_BYTES = 16 << 20
"""Bytes of one of a worker's buffers: most photographs fit. A larger source gets a buffer of its own meanwhile."""
_REPORT_S = 0.05
"""Seconds between two words on progress; a worker whose parent is gone ends at the next."""
_AHEAD = 16
"""Sources that the kernel is told of before they are read."""
_BATCH_ROWS = 4096
_ZEROS = bytes(1 << 20)
_FACTS = [name for name in FACTS if name != "media_type"]
_NO_FACTS = {name: -1 if name == "adobe_transform" else 0 for name in _FACTS}

Progress = Callable[[int, int, int], None]
"""Called now and then with samples, source bytes and refusals since the last call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardJob:
    """What a worker needs to make one shard."""

    name: str
    """File name of the shard."""
    origin: Origin
    """Where the pictures are read."""
    work: bytes
    """Folder for temporary files, in the target's file system."""
    rows: pa.RecordBatch
    """The shard's plan, of the supply's schema, in stored order."""
    options: ShardOptions
    reflink: Reflink = "never"
    """Whether the shard shares blocks with its sources; not `auto` where that is known not to work."""

    def temporary(self, extension: str) -> bytes:
        """Return the temporary path of the shard or of one of its indexes."""
        return os.path.join(self.work, (self.name.removesuffix(".tar") + extension + ".tmp").encode())


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardResult:
    """What became of a shard."""

    record: ShardRecord | None
    """None when every source was refused: then there is no file."""
    refused: list[Refusal] = field(default_factory=list)
    shared_bytes: int = 0
    """Bytes of its images that are blocks of their sources; not known any more of a shard that was kept."""


def write_shard(job: ShardJob, progress: Progress, buffers: list[mmap.mmap] | None = None) -> ShardResult:
    """Write a shard and its two indexes under temporary names, synced, ready to be renamed.

    Args:
        job: what to write.
        progress: told of samples as they are packed.
        buffers: `BUFFERS` of `BUFFER_BYTES` to work in, reused from shard to shard.

    Raises:
        SourceError: a source was refused and the options say to stop.
        ShardkitError: the target failed; no temporary file is left.
    """
    digest = new_digest(job.options.digest)
    writer = SequentialWriter(job.temporary(".tar"), buffers or new_buffers(BUFFERS, BUFFER_BYTES), digest.update)
    packer = _Packer(job, writer)
    try:
        packer.pack_all(progress)
        if not packer.samples:
            writer.discard()
            return ShardResult(record=None, refused=packer.refused)
        end_shard(writer, job.options.align)
        size = writer.offset
        writer.finish()
    except BaseException:
        writer.discard()
        raise
    record = _write_indexes(job, packer, size, digest.hexdigest())
    return ShardResult(record=record, refused=packer.refused, shared_bytes=packer.shared_bytes)


def end_shard(writer: SequentialWriter, align: int) -> None:
    """Write the two zero blocks and the zeros up to a whole record."""
    missing = shard_bytes(writer.offset, align) - writer.offset
    while missing:
        count = min(missing, len(_ZEROS))
        writer.reserve(count)
        writer.buffer[writer.position : writer.position + count] = _ZEROS[:count]
        writer.advance(count)
        missing -= count


def _write_indexes(job: ShardJob, packer: _Packer, size: int, digest: str) -> ShardRecord:
    algorithm = job.options.digest
    header = IndexHeader(shard=job.name, shard_bytes=size, digest=f"{algorithm}:{digest}", align=job.options.align)
    return write_indexes(packer.all_rows(), header, job.temporary, packer.payload_bytes, packer.header_bytes)


def write_indexes(
    rows: pa.RecordBatch, header: IndexHeader, temporary: Callable[[str], bytes], payload_bytes: int, header_bytes: int
) -> ShardRecord:
    """Write both indexes of a shard under temporary names, synced; return the shard's record.

    Args:
        rows: at least one.
        header: what the index binds to.
        temporary: gives the temporary path for `.arrow` and for `.idx`.
        payload_bytes: of all images.
        header_bytes: of all headers and small members, with their block padding.
    """
    algorithm, _, digest = header.digest.partition(":")
    files = []
    for extension, data in ((".arrow", encode_shard_index(rows, header)), (".idx", encode_dali_index(_members(rows)))):
        with BufferedFile(temporary(extension)) as file:
            file.write(data)
        files.append(FileRecord(bytes=len(data), digest=hex_digest(algorithm, data)))
    keys = rows.column("key")
    return ShardRecord(
        name=header.shard, bytes=header.shard_bytes, digest=digest, samples=rows.num_rows, payload=payload_bytes,
        padding=header.shard_bytes - payload_bytes - header_bytes, index=files[0], dali_index=files[1],
        first_key=keys[0].as_py(), last_key=keys[-1].as_py(),
    )  # fmt: skip


def _members(rows: pa.RecordBatch) -> Iterator[list[IndexedMember]]:
    """Yield the members of each sample; few are Python objects at a time."""
    names = ("key", "label", "sample_offset", "json_offset", "json_size", "offset", "size")
    for first in range(0, rows.num_rows, _BATCH_ROWS):
        columns = rows.select(names).slice(first, _BATCH_ROWS).to_pydict()
        for key, label, start, json_offset, json_size, offset, size in zip(*columns.values(), strict=True):
            members = [IndexedMember("jpg", offset, size, f"{key}.jpg")]
            if json_offset:
                members.insert(0, IndexedMember("json", json_offset, json_size, f"{key}.json"))
            if label is not None:
                members.insert(0, IndexedMember("cls", start + BLOCK, len(cls_payload(label)), f"{key}.cls"))
            yield members


def read_ahead(pictures: Iterator[Picture]) -> Iterator[Picture]:
    """Yield the pictures, each announced to the kernel while some others are packed: a cold disk is then never idle."""
    waiting: deque[Picture] = deque()
    for picture in pictures:
        picture.announce()
        waiting.append(picture)
        if len(waiting) > _AHEAD:
            yield waiting.popleft()
    yield from waiting


class _Packer:
    """The loop over a shard's sources, and what it collects."""

    def __init__(self, job: ShardJob, writer: SequentialWriter) -> None:
        self.job = job
        self.options = job.options
        self.writer = writer
        self.refused: list[Refusal] = []
        self.samples = 0
        self.payload_bytes = 0
        self.shared_bytes = 0
        self.header_bytes = 0  # ustar headers of the members, and the cls and json members' blocks
        self._rows: list[SampleRow] = []
        self._batches: list[pa.RecordBatch] = []

    def pack_all(self, progress: Progress) -> None:
        with self.job.origin.pictures(self.job.rows, self.options) as pictures:
            # What is shared is read from the shard: the source's own pages would be read for nothing.
            self._pack_each(read_ahead(pictures) if self.job.reflink == "never" else pictures, progress)

    def _pack_each(self, pictures: Iterator[Picture], progress: Progress) -> None:
        samples = source_bytes = refusals = 0
        due = time.monotonic() + _REPORT_S
        for picture in pictures:
            samples += 1
            try:
                source_bytes += self._pack(picture)
            except RefusedError as refused:
                refusals += 1
                refusal = Refusal(picture.number, picture.path, refused.reason, refused.detail)
                self.refused.append(refusal)
                if self.options.on_error == "fail":
                    raise stop_error(refusal) from refused
            if time.monotonic() >= due:
                progress(samples, source_bytes, refusals)
                samples = source_bytes = refusals = 0
                due = time.monotonic() + _REPORT_S
        progress(samples, source_bytes, refusals)

    def all_rows(self) -> pa.RecordBatch:
        """Return the index rows of what was packed, at least one."""
        self._flush_rows()
        return pa.Table.from_batches(self._batches).combine_chunks().to_batches()[0]

    def _keep(self, row: SampleRow) -> None:
        """Keep a row: a shard of tiny images has hundreds of thousands, too many to be Python objects at once."""
        self.samples += 1
        self.payload_bytes += row.size
        self._rows.append(row)
        if len(self._rows) == _BATCH_ROWS:
            self._flush_rows()

    def _flush_rows(self) -> None:
        if self._rows:
            self._batches.append(sample_batch(self._rows))
            self._rows = []

    def _pack(self, picture: Picture) -> int:
        """Pack one picture and return its size in bytes; a refused one leaves no trace in the shard."""
        small = [] if picture.label is None else [("cls", cls_payload(picture.label))]
        text = picture.json()
        if text is not None:
            small.append(("json", text))
        sizes = dict.fromkeys(("cls", "json")) | {extension: len(data) for extension, data in small}
        place = place_sample(self.writer.offset, sizes["cls"], sizes["json"], 0, self.options.align)
        head = place.payload_offset - place.start
        room = Room(self.writer, head, self.job.reflink)
        source_size = picture.read(room)
        size, facts = admit(room, source_size, self.options)
        self._put(picture, small, place, size, facts, room.shared)
        return source_size

    def _put(
        self, picture: Picture, small: list[tuple[str, bytes]], place: SampleLayout, size: int,
        facts: JpegFacts | None, shared: int,
    ) -> None:  # fmt: skip
        """Write the headers around the payload that already lies in the buffer, and keep it all."""
        key = picture.key
        parts = [encode_header(f"{key}.{e}", len(data)) + data + bytes(tail_bytes(len(data))) for e, data in small]
        self.header_bytes += sum(map(len, parts)) + BLOCK
        head = b"".join([*parts, encode_padding(place.padding), encode_header(f"{key}.jpg", size)])
        writer, at = self.writer, self.writer.position
        payload, tail = at + len(head), tail_bytes(size)
        writer.buffer[at:payload] = head
        writer.buffer[payload + size : payload + size + tail] = bytes(tail)
        with memoryview(writer.buffer) as view, view[payload : payload + size] as image:
            checksum = crc32c(image)
        media_type = facts.media_type if facts else sniff_media_type(writer.buffer, payload, payload + size)
        stored = dict(small)
        self._keep(
            SampleRow(
                key=key, label=picture.label, offset=place.payload_offset, size=size, crc32c=checksum,
                sample_offset=place.start, sample_size=len(head) + size + tail,
                json_offset=place.json_offset, json_size=len(stored.get("json", b"")),
                media_type=media_type, source=picture.source,
                **({name: getattr(facts, name) for name in _FACTS} if facts else _NO_FACTS),
            )
        )  # fmt: skip
        self.shared_bytes += shared
        writer.advance(len(head) + size + tail, (len(head), shared))
