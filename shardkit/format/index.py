"""The index: one Arrow row a sample, in a file beside each shard and in one file for the whole dataset.

Arrow IPC files, uncompressed and without dictionaries, so that a memory map of one is its columns and that the record
batches of all shards simply follow one another in `index.arrow`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import pyarrow as pa

from shardkit.errors import IndexFormatError, UnsupportedVersionError
from shardkit.escaping import escape
from shardkit.format.arrow_file import BatchBlocks
from shardkit.format.index_columns import (
    FACTS,
    HEADER_COLUMNS,
    SCHEMA,
    WHOLE_IMAGE_COLUMNS,
    RecordBatch,
    SampleRow,
    column_batch,
    joined_batches,
    sample_batch,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

__all__ = [
    "FACTS",
    "FORMAT_VERSION",
    "HEADER_COLUMNS",
    "SCHEMA",
    "WHOLE_IMAGE_COLUMNS",
    "ArrowSink",
    "ByteSink",
    "ByteSource",
    "DatasetIndexReader",
    "IndexHeader",
    "RecordBatch",
    "SampleRow",
    "ShardIndex",
    "check_rows",
    "column_batch",
    "decode_dataset_index",
    "decode_shard_index",
    "encode_shard_index",
    "iter_dataset_index",
    "joined_batches",
    "sample_batch",
    "write_dataset_index",
]

FORMAT_VERSION = 1
"""Of the whole dataset format: shards, indexes and manifest change together."""

_PREFIX = "shardkit."
_END = 2  # of `seek`: from the file's end
_ALIGNED = "aligned"
_VERSION = re.compile(rb"[1-9][0-9]{0,8}")
_NUMBER = re.compile(r"0|[1-9][0-9]{0,18}")


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexHeader:
    """What the schema metadata of a shard's index binds it to."""

    shard: str
    """File name of the shard."""
    shard_bytes: int
    """Size of the shard."""
    digest: str
    """`ALGORITHM:HEX` of the whole shard."""
    align: int
    """What every image's payload offset is a multiple of."""
    layout: str = "aligned"
    """As in the manifest: `foreign` for a shard of another tool."""


@dataclass(frozen=True, slots=True)
class ShardIndex:
    """A decoded shard index."""

    header: IndexHeader
    rows: pa.RecordBatch
    """One row a sample, in stored order; views into the decoded buffer, which it keeps alive."""


class ByteSink(Protocol):
    """Anything that takes bytes in order."""

    def write(self, data: bytes | memoryview, /) -> int:
        """Take all of `data`; not retained."""


def encode_shard_index(rows: Sequence[SampleRow] | pa.RecordBatch, header: IndexHeader) -> bytes:
    """Return the index file of one shard; the rows may be a batch that `sample_batch` has made."""
    batch = rows if isinstance(rows, pa.RecordBatch) else sample_batch(rows)
    schema = SCHEMA.with_metadata(_metadata(header))
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, schema) as writer:
        writer.write_batch(batch.replace_schema_metadata(schema.metadata))
    return bytes(sink.getvalue())


def decode_shard_index(data: pa.Buffer | bytes) -> ShardIndex:
    """Return the rows and the header of a shard's index, checked whole; the inverse of `encode_shard_index`.

    Args:
        data: the whole file; the rows are views into it.

    Raises:
        UnsupportedVersionError: written by a newer shardkit.
        IndexFormatError: not an index of this format.
    """
    reader, blocks = _open(data), _blocks(data)
    if reader.num_record_batches != 1:
        raise IndexFormatError(
            "a shard's index is one record batch", expected=1, found=f"{reader.num_record_batches} batches"
        )
    header, rows = _header(reader), _batch(reader, blocks, 0)
    check_rows(rows, 0)
    return ShardIndex(header, rows)


def write_dataset_index(batches: Iterable[pa.RecordBatch], sink: ByteSink) -> None:
    """Write `index.arrow`: the rows of every shard, one record batch a shard, in shard order.

    Args:
        batches: rows as `decode_shard_index` gives them; held one at a time.
        sink: takes the file's bytes in order.
    """
    schema = SCHEMA.with_metadata({_PREFIX + "format_version": str(FORMAT_VERSION)})
    with pa.ipc.new_file(pa.PythonFile(ArrowSink(sink), mode="w"), schema) as writer:
        for batch in batches:
            writer.write_batch(batch.replace_schema_metadata(schema.metadata))


class ArrowSink:
    """A file object for Arrow, which closes what it is given: the sink stays its owner's."""

    closed = False

    def __init__(self, sink: ByteSink) -> None:
        """Write to `sink`."""
        self.write = sink.write

    def flush(self) -> None:
        """Do nothing: the sink's owner decides."""

    def close(self) -> None:
        """Do nothing: the sink's owner decides."""


def decode_dataset_index(data: pa.Buffer | bytes) -> list[pa.RecordBatch]:
    """Return one record batch a shard, views into `data`, in O(shards).

    Numbers may be read at once. The offsets of the texts (`key`, `source`) are not looked at yet, and Arrow follows
    a wild one out of the buffer: call `check_rows` before Arrow reads a text, or check the offsets of that one.

    Raises:
        UnsupportedVersionError: written by a newer shardkit.
        IndexFormatError: not an index of this format.
    """
    return list(iter_dataset_index(data))


def iter_dataset_index(data: pa.Buffer | bytes) -> Iterator[pa.RecordBatch]:
    """Yield what `decode_dataset_index` returns, each batch as soon as its own few pages of `data` were looked at.

    Raises:
        UnsupportedVersionError: as `decode_dataset_index`, at the first batch.
        IndexFormatError: likewise, or at the damaged one.
    """
    reader, blocks = _open(data), _blocks(data)
    for number in range(reader.num_record_batches):
        yield _batch(reader, blocks, number)


class ByteSource(Protocol):
    """A binary file that is open for reading and can seek."""

    @property
    def closed(self) -> bool:
        """True when it can no longer be read."""

    def read(self, size: int = -1, /) -> bytes:
        """Return up to `size` bytes."""

    def seek(self, offset: int, whence: int = 0, /) -> int:
        """Go to an offset."""

    def tell(self) -> int:
        """Return the offset."""


class DatasetIndexReader:
    """`index.arrow`, one record batch at a time: in memory are the rows of one shard, however many there are."""

    def __init__(self, source: ByteSource) -> None:
        """Read the footer.

        Args:
            source: the file; stays its owner's, and open as long as the reader is used.

        Raises:
            UnsupportedVersionError: written by a newer shardkit.
            IndexFormatError: not an index of this format; its cause is the OSError of `source` when that failed.
        """
        self._reader = _open(pa.PythonFile(source, mode="r"))
        self._source = source
        try:
            self._blocks = BatchBlocks(self._read, source.seek(0, _END))
        except OSError as error:
            raise IndexFormatError("not an Arrow IPC file", found=_first_line(error)) from error

    def __len__(self) -> int:
        """Return the number of record batches: one a shard."""
        return int(self._reader.num_record_batches)

    def batch(self, number: int) -> pa.RecordBatch:
        """Return one shard's rows, every text of them checked.

        Raises:
            IndexFormatError: they are damaged; its cause is the OSError of the source when that failed.
        """
        batch = _batch(self._reader, self._blocks, number)
        check_rows(batch, number)
        return batch

    def _read(self, offset: int, length: int) -> bytes:
        self._source.seek(offset)
        return self._source.read(length)


def check_rows(rows: pa.RecordBatch, number: int) -> None:
    """Check every text of a batch, in O(rows): about 10 ms for a million.

    Args:
        rows: a batch from `decode_dataset_index`.
        number: its place, for the message.

    Raises:
        IndexFormatError: an offset outside the buffer, or a text that is not UTF-8.
    """
    try:
        rows.validate(full=True)
    except (pa.ArrowException, ValueError) as error:
        raise IndexFormatError(f"record batch {number} of the index is damaged", found=_first_line(error)) from error


def _open(data: pa.Buffer | bytes | pa.NativeFile) -> pa.RecordBatchFileReader:
    try:
        reader = pa.ipc.open_file(data if isinstance(data, pa.NativeFile) else pa.BufferReader(data))
        metadata = reader.schema.metadata or {}
        same_columns = reader.schema.equals(SCHEMA)
    except (pa.ArrowException, ValueError, OSError) as error:
        raise IndexFormatError("not an Arrow IPC file", found=_first_line(error)) from error
    version = metadata.get((_PREFIX + "format_version").encode(), b"")
    if not _VERSION.fullmatch(version):
        raise IndexFormatError(
            "an Arrow file that is not a shardkit index", expected=f"metadata {_PREFIX}format_version"
        )
    if int(version) > FORMAT_VERSION:
        raise UnsupportedVersionError(
            "an index of a newer format", expected=f"at most {FORMAT_VERSION}", found=int(version),
            remedy="upgrade shardkit",
        )  # fmt: skip
    if not same_columns:
        raise IndexFormatError("an index with other columns", expected=f"the columns of version {FORMAT_VERSION}")
    return reader


def _blocks(data: pa.Buffer | bytes) -> BatchBlocks:
    view = memoryview(data)
    return BatchBlocks(lambda offset, length: bytes(view[offset : offset + length]), len(view))


def _batch(reader: pa.RecordBatchFileReader, blocks: BatchBlocks, number: int) -> pa.RecordBatch:
    try:
        blocks.refuse_compressed(number)
        batch = reader.get_batch(number)
        batch.validate()  # buffers long enough for the rows; no look at the rows themselves
        nulls = [name for name in SCHEMA.names if name != "label" and batch.column(name).null_count]
    except IndexFormatError:
        raise
    except (pa.ArrowException, ValueError, OSError) as error:
        raise IndexFormatError(f"record batch {number} of the index is damaged", found=_first_line(error)) from error
    if nulls:
        raise IndexFormatError(f"record batch {number} of the index has nulls", found=", ".join(nulls))
    return batch


def _metadata(header: IndexHeader) -> dict[str, str]:
    metadata = {
        _PREFIX + "format_version": str(FORMAT_VERSION),
        _PREFIX + "shard": header.shard,
        _PREFIX + "shard_bytes": str(header.shard_bytes),
        _PREFIX + "digest": header.digest,
        _PREFIX + "align": str(header.align),
    }
    return metadata if header.layout == _ALIGNED else metadata | {_PREFIX + "layout": header.layout}


def _header(reader: pa.RecordBatchFileReader) -> IndexHeader:
    texts = {k.decode("utf-8", "replace"): v.decode("utf-8", "replace") for k, v in reader.schema.metadata.items()}
    shard, size, digest, align = (texts.get(_PREFIX + name, "") for name in ("shard", "shard_bytes", "digest", "align"))
    if not shard or not digest or not _NUMBER.fullmatch(size) or not _NUMBER.fullmatch(align):
        raise IndexFormatError("the index does not name its shard", expected="shard, shard_bytes, digest and align")
    layout = texts.get(_PREFIX + "layout", _ALIGNED)
    return IndexHeader(shard=shard, shard_bytes=int(size), digest=digest, align=int(align), layout=layout)


def _first_line(error: Exception) -> str:
    return escape((str(error).splitlines() or [type(error).__name__])[0][:200])
