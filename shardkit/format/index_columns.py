"""The columns of the index, and rows as one record batch of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pyarrow as pa

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import TypeAlias

    import numpy.typing as npt

    Column: TypeAlias = npt.NDArray[np.bytes_] | npt.NDArray[np.object_] | npt.NDArray[np.integer]

__all__ = [
    "FACTS",
    "HEADER_COLUMNS",
    "SCHEMA",
    "WHOLE_IMAGE_COLUMNS",
    "RecordBatch",
    "SampleRow",
    "column_batch",
    "joined_batches",
    "sample_batch",
]

RecordBatch = pa.RecordBatch
"""The rows of one shard, for annotations where Arrow itself is not imported."""


class SampleRow(NamedTuple):
    """One sample, as the index records it; the fields are the schema's, in its order."""

    key: str
    """Unique in the dataset; safe in every reader (`shardkit.format.keys`)."""
    label: int | None
    """Class number; None where the dataset has no labels."""
    offset: int
    """Bytes from the start of the shard to the image's payload."""
    size: int
    """Bytes of the image's payload."""
    crc32c: int
    """CRC-32C of the image's payload; 0 where nobody knows it (`Manifest.has_checksums`)."""
    sample_offset: int
    """Bytes from the start of the shard to the sample's first header."""
    sample_size: int
    """Bytes from there to the end of the image's last block."""
    json_offset: int
    """Bytes from the start of the shard to the json member's payload; 0 when there is none."""
    json_size: int
    """Bytes of the json member's payload; 0 when there is none."""
    width: int
    """Pixels of a stored row, before any EXIF rotation; 0 when unknown."""
    height: int
    """Stored rows; 0 when unknown."""
    sof: int
    """Number n of the SOFn marker: 0 baseline, 1 extended, 2 progressive, ..."""
    components: int
    """Colour components."""
    subsampling: int
    """Code of `shardkit.format.jpeg.SUBSAMPLINGS`."""
    precision: int
    """Bits a component."""
    scans: int
    """Number of scans; 255 stands for more."""
    restart_interval: int
    """MCUs between restart markers; 0 for none."""
    orientation: int
    """EXIF orientation, 1 to 8; 0 when the file states none."""
    adobe_transform: int
    """Colour transform of the Adobe segment, 0 to 2; -1 without such a segment."""
    media_type: int
    """Code of `shardkit.format.media_type.MEDIA_TYPES`: what the bytes are."""
    source: str
    """Path relative to the packed folder (`shardkit.format.keys.source_from_path`)."""


_ARROW_TYPES: dict[str, pa.DataType] = {
    "key": pa.utf8(),
    "label": pa.int32(),
    "offset": pa.uint64(),
    "size": pa.uint32(),
    "crc32c": pa.uint32(),
    "sample_offset": pa.uint64(),
    "sample_size": pa.uint64(),
    "json_offset": pa.uint64(),
    "json_size": pa.uint32(),
    "width": pa.uint32(),
    "height": pa.uint32(),
    "sof": pa.uint8(),
    "components": pa.uint8(),
    "subsampling": pa.uint8(),
    "precision": pa.uint8(),
    "scans": pa.uint8(),
    "restart_interval": pa.uint16(),
    "orientation": pa.uint8(),
    "adobe_transform": pa.int8(),
    "media_type": pa.uint8(),
    "source": pa.utf8(),
}

SCHEMA = pa.schema([pa.field(name, kind, nullable=name == "label") for name, kind in _ARROW_TYPES.items()])
"""Fields of an index without its metadata; only `label` may be null."""

HEADER_COLUMNS = frozenset(
    {"key", "label", "size", "source", "offset", "sample_offset", "sample_size", "json_offset", "json_size"}
)
"""Columns that tar headers alone fill: the others take a look at the images."""
WHOLE_IMAGE_COLUMNS = frozenset({"crc32c", "scans"})
"""Columns that take every byte of an image."""
FACTS = (
    "media_type",
    "width",
    "height",
    "sof",
    "components",
    "subsampling",
    "precision",
    "scans",
    "restart_interval",
    "orientation",
    "adobe_transform",
)
"""The columns that say what an image is, by the names of `shardkit.format.jpeg.JpegFacts`."""


def sample_batch(rows: Sequence[SampleRow]) -> pa.RecordBatch:
    """Return rows as one record batch of `SCHEMA`: a fifth of their memory."""
    columns = list(zip(*rows, strict=True)) or [()] * len(SCHEMA)
    arrays = [pa.array(column, kind) for column, kind in zip(columns, _ARROW_TYPES.values(), strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=SCHEMA)


def joined_batches(batches: Sequence[pa.RecordBatch]) -> pa.RecordBatch:
    """Return the rows of one or more batches, at least one row, as one batch."""
    return pa.Table.from_batches(batches).combine_chunks().to_batches()[0]


def column_batch(columns: Mapping[str, Column], absent: Mapping[str, npt.NDArray[np.bool_]]) -> pa.RecordBatch:
    """Return columns as one record batch of `SCHEMA`.

    Args:
        columns: each [rows], by the names of `SCHEMA`: numbers that fit its types; texts as such, or as UTF-8.
        absent: where a column is null, each [rows].
    """
    arrays = []
    for name, kind in _ARROW_TYPES.items():
        column, nulls = columns[name], absent.get(name)
        if column.dtype.kind in "iu":
            column = (column if nulls is None else np.where(nulls, 0, column)).astype(str(kind))
            arrays.append(pa.array(column, kind, mask=nulls))
        else:
            texts = pa.array(column, kind if column.dtype.kind == "O" else pa.binary())
            arrays.append(texts.cast(kind))
    return pa.RecordBatch.from_arrays(arrays, schema=SCHEMA)
