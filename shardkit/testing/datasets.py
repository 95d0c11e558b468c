"""Small datasets, built in memory from the format alone: what a packer should have written, to be damaged at will.

A `Draft` is a whole dataset before its digests: change its bytes or its rows, and `write` seals the lie, so that no
digest tells on it. Damage a written folder (`shardkit.testing.damage`) and every digest does.
"""

from __future__ import annotations

import base64
import io
import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from shardkit.format.checksum import crc32c, hex_digest
from shardkit.format.dali_index import IndexedMember, encode_dali_index
from shardkit.format.dataset_record import FileRecord, Manifest, ShardRecord, Totals
from shardkit.format.index import (
    IndexHeader,
    SampleRow,
    ShardIndex,
    decode_shard_index,
    encode_shard_index,
    write_dataset_index,
)
from shardkit.format.layout import place_sample, shard_bytes
from shardkit.format.manifest import dump_manifest
from shardkit.format.tar import BLOCK, encode_header, encode_padding, tail_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

__all__ = ["Draft", "DraftSample", "DraftShard", "draft_dataset", "draft_shard", "tiny_jpeg"]

# 8 x 8 gray and 16 x 24 colour (4:2:0), baseline, made with Pillow. Facts: media type (jpeg), width, height, SOF,
# components, subsampling (gray, 4:2:0), precision, scans, restart interval, orientation, Adobe transform.
_GRAY = base64.b64decode(
    "/9j/4AAQSkZJRgABAQAAAQABAAD/2wBDABALDA4MChAODQ4SERATGCgaGBYWGDEjJR0oOjM9PDkzODdASFxOQERXRTc4UG1RV19iZ2hnPk1xeXBk"
    "eFxlZ2P/wAALCAAIAAgBAREA/8QAFAABAAAAAAAAAAAAAAAAAAAAAf/EABgQAAIDAAAAAAAAAAAAAAAAAAADBmOh/9oACAEBAAA/ABEOrw//2Q=="
)
_COLOUR = base64.b64decode(
    "/9j/4AAQSkZJRgABAQAAAQABAAD/2wBDAFA3PEY8MlBGQUZaVVBfeMiCeG5uePWvuZHI//////////////////////////////////////////"
    "//////////2wBDAVVaWnhpeOuCguv/////////////////////////////////////////////////////////////////////////wAARCAAYA"
    "BADASIAAhEBAxEB/8QAFQABAQAAAAAAAAAAAAAAAAAAAAL/xAAeEAACAQQDAQAAAAAAAAAAAAAAAaEDERIhIkFCcf/EABUBAQEAAAAAAAAAAAA"
    "AAAAAAAEA/8QAFxEBAQEBAAAAAAAAAAAAAAAAABEBIf/aAAwDAQACEQMRAD8AnGlbUIcF04LWT8qRapq2viCpGNK2oQ4LpwAO8Mf/2Q=="
)
_FACT_NAMES = ("media_type", "width", "height", "sof", "components", "subsampling", "precision", "scans",
               "restart_interval", "orientation", "adobe_transform")  # fmt: skip
_GRAY_FACTS = dict(zip(_FACT_NAMES, (1, 8, 8, 0, 1, 7, 8, 1, 0, 0, -1), strict=True))
_COLOUR_FACTS = dict(zip(_FACT_NAMES, (1, 16, 24, 0, 3, 3, 8, 1, 0, 0, -1), strict=True))
_APP0_END = 20
_COMMENT_BYTES = 32_000
_T = TypeVar("_T")


def tiny_jpeg(number: int = 0, size: int | None = None) -> bytes:
    """Return a JPEG that every decoder takes: gray when `number` is even, else colour.

    Args:
        number: kind of image, and the text of a comment in it, so that no two are alike.
        size: bytes; at least 400. The smallest that there is by default.
    """
    image = _COLOUR if number % 2 else _GRAY
    comments = [b"image %d " % number]
    missing = 0 if size is None else size - len(image) - 4 - len(comments[0])
    while missing > _COMMENT_BYTES + 4:
        comments.append(b"*" * _COMMENT_BYTES)
        missing -= _COMMENT_BYTES + 4
    comments[0] += b"*" * missing
    segments = [b"\xff\xfe" + (len(comment) + 2).to_bytes(2, "big") + comment for comment in comments]
    return image[:_APP0_END] + b"".join(segments) + image[_APP0_END:]


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftSample:
    """One sample to lay down."""

    key: str
    jpeg: bytes
    label: int | None = None
    metadata: Mapping[str, Any] | None = None
    """The json member; None for no such member."""
    source: str | None = None
    """The row's source; the key with `.jpg` by default."""
    facts: Mapping[str, int] = field(default_factory=lambda: _GRAY_FACTS)
    """Columns of the index that say what the image is."""


@dataclass(slots=True, kw_only=True)
class DraftShard:
    """A shard in memory. Everything may be changed before it is written."""

    name: str
    """File name."""
    tar: bytearray
    """The whole shard."""
    rows: list[SampleRow]
    members: list[list[IndexedMember]]
    """Lines of the text index."""
    padding: int
    """Bytes of padding, as the manifest counts them."""


@dataclass(slots=True, kw_only=True)
class Draft:
    """A dataset in memory. Everything may be changed before it is written."""

    name: str
    align: int
    classes: tuple[str, ...] | None
    shards: list[DraftShard]
    rejected: bytes | None = b'{"path": "a.png", "reason": "not-jpeg", "detail": "png"}\n'
    refused: int = 1
    algorithm: str = "xxh3-128"
    dataset_rows: dict[int, list[SampleRow]] = field(default_factory=dict)
    """Rows for `index.arrow` that differ from those of the shard with this number; further ones follow the last."""
    headers: dict[int, Callable[[IndexHeader], IndexHeader]] = field(default_factory=dict)
    """Lies in the headers of the shards' indexes."""
    records: dict[int, Callable[[ShardRecord], ShardRecord]] = field(default_factory=dict)
    """Lies in the manifest's records of the shards."""

    def files(self) -> dict[str, bytes]:
        """Return every file of the dataset, sealed: digests, sizes and totals are those of the bytes in it."""
        files: dict[str, bytes] = {}
        records = []
        for number, shard in enumerate(self.shards):
            index, dali = self._indexes(number)
            stem = shard.name.removesuffix(".tar")
            files |= {shard.name: bytes(shard.tar), f"{stem}.arrow": index, f"{stem}.idx": dali}
            records.append(self._record(number, index, dali))
        lists = {number: shard.rows for number, shard in enumerate(self.shards)} | self.dataset_rows
        sink = io.BytesIO()
        write_dataset_index([_index(rows).rows for _, rows in sorted(lists.items())], sink)
        files["index.arrow"] = sink.getvalue()
        if self.rejected is not None:
            files["rejected.jsonl"] = self.rejected
        files["manifest.json"] = dump_manifest(self._manifest(files, records)).encode()
        return files

    def write(self, folder: Path) -> Path:
        """Write every file into a new folder, and return it."""
        folder.mkdir(parents=True)
        for name, data in self.files().items():
            (folder / name).write_bytes(data)
        return folder

    def _header(self, number: int) -> IndexHeader:
        tar = self.shards[number].tar
        digest = f"{self.algorithm}:{hex_digest(self.algorithm, tar)}"
        header = IndexHeader(shard=self.shards[number].name, shard_bytes=len(tar), digest=digest, align=self.align)
        return self.headers.get(number, _truth)(header)

    def _indexes(self, number: int) -> tuple[bytes, bytes]:
        shard = self.shards[number]
        return encode_shard_index(shard.rows, self._header(number)), encode_dali_index(shard.members)

    def _file(self, data: bytes) -> FileRecord:
        return FileRecord(bytes=len(data), digest=hex_digest(self.algorithm, data))

    def _record(self, number: int, index: bytes, dali: bytes) -> ShardRecord:
        shard = self.shards[number]
        record = ShardRecord(
            name=shard.name, bytes=len(shard.tar), digest=hex_digest(self.algorithm, shard.tar),
            samples=len(shard.rows), payload=sum(row.size for row in shard.rows), padding=shard.padding,
            index=self._file(index), dali_index=self._file(dali),
            first_key=shard.rows[0].key, last_key=shard.rows[-1].key,
        )  # fmt: skip
        return self.records.get(number, _truth)(record)

    def _manifest(self, files: Mapping[str, bytes], records: Sequence[ShardRecord]) -> Manifest:
        payload, padding = sum(r.payload for r in records), sum(r.padding for r in records)
        size = sum(r.bytes for r in records)
        totals = Totals(
            shards=len(records), samples=sum(r.samples for r in records), payload=payload,
            headers=size - payload - padding, padding=padding, bytes=size, refused=self.refused,
        )  # fmt: skip
        return Manifest(
            shardkit="0", name=self.name, align=self.align, digest_algorithm=self.algorithm, seed=0, options={},
            classes=self.classes, index=self._file(files["index.arrow"]),
            rejected=None if self.rejected is None else self._file(self.rejected), shards=records, totals=totals,
        )  # fmt: skip


def _truth(value: _T) -> _T:
    return value


def _index(rows: Sequence[SampleRow]) -> ShardIndex:
    header = IndexHeader(shard="any.tar", shard_bytes=0, digest="xxh3-128:0", align=512)
    return decode_shard_index(encode_shard_index(rows, header))


def draft_dataset(
    samples: Sequence[int] = (3, 3), *, name: str = "tiny", align: int = 4096, labels: bool = True,
    metadata: bool = True, sizes: Sequence[int] = (401, 512, 700), algorithm: str = "xxh3-128",
) -> Draft:  # fmt: skip
    """Return a dataset of tiny images.

    Args:
        samples: number of samples in each shard.
        name: of the dataset.
        align: of the images' payloads.
        labels: give every sample one of twelve classes.
        metadata: give every sample a json member; without labels each has one anyway.
        sizes: bytes of the images, in turn.
        algorithm: of the digests.
    """
    shards, number = [], 0
    for place, count in enumerate(samples):
        drafts = []
        for i in range(number, number + count):
            label = i * 5 % 12 if labels else None
            member = {"source": f"c/{i:04}.jpg"} | ({} if label is None else {"class": f"class {label}"})
            drafts.append(
                DraftSample(
                    key=f"c/{i:04}",
                    jpeg=tiny_jpeg(i, sizes[i % len(sizes)]),
                    label=label,
                    metadata=member | {"caption": f"picture {i}"} if metadata or not labels else None,
                    facts=_COLOUR_FACTS if i % 2 else _GRAY_FACTS,
                )
            )
        shards.append(draft_shard(f"{name}-{place:06}.tar", drafts, align))
        number += count
    classes = tuple(f"class {i}" for i in range(12)) if labels else None
    return Draft(name=name, align=align, classes=classes, shards=shards, algorithm=algorithm)


def draft_shard(name: str, samples: Sequence[DraftSample], align: int) -> DraftShard:
    """Lay samples down, one after another, as docs/format.md says."""
    tar = bytearray()
    rows, members, padding = [], [], 0
    for sample in samples:
        row, parts, pad = _lay_down(tar, sample, align)
        rows.append(row)
        members.append(parts)
        padding += pad
    end = len(tar)
    tar += bytes(shard_bytes(end, align) - end)
    return DraftShard(name=name, tar=tar, rows=rows, members=members, padding=padding + len(tar) - end)


def _lay_down(tar: bytearray, sample: DraftSample, align: int) -> tuple[SampleRow, list[IndexedMember], int]:
    """Append one sample; return its row, its members, and its padding as the manifest counts it."""
    small = [] if sample.label is None else [("cls", b"%d" % sample.label)]
    if sample.metadata is not None:
        small.append(("json", json.dumps(sample.metadata).encode()))
    sizes = {extension: len(data) for extension, data in small}
    place = place_sample(len(tar), sizes.get("cls"), sizes.get("json"), len(sample.jpeg), align)
    members = []
    for extension, data in [*small, ("jpg", sample.jpeg)]:
        if extension == "jpg":
            tar += encode_padding(place.padding)
        tar += encode_header(f"{sample.key}.{extension}", len(data))
        members.append(IndexedMember(extension, len(tar), len(data), f"{sample.key}.{extension}"))
        tar += data + bytes(tail_bytes(len(data)))
    row = SampleRow(
        key=sample.key, label=sample.label, offset=place.payload_offset, size=len(sample.jpeg),
        crc32c=crc32c(sample.jpeg), sample_offset=place.start, sample_size=place.end - place.start,
        json_offset=place.json_offset, json_size=sizes.get("json", 0),
        source=sample.source or f"{sample.key}.jpg", **sample.facts,
    )  # fmt: skip
    padding = place.end - place.start - len(sample.jpeg) - BLOCK
    padding -= sum(BLOCK + len(data) + tail_bytes(len(data)) for _, data in small)
    return row, members, padding
