"""Pictures that are members of shards: planned from index rows, read by offset, held against their checksum."""

from __future__ import annotations

import contextlib
import json
import os
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from shardkit.converting.tables import OpenTables
from shardkit.errors import ShardkitError, UnsafeError, from_os_error
from shardkit.format.checksum import crc32c
from shardkit.format.keys import path_from_source, source_from_text
from shardkit.format.strict_json import MAX_JSON_BYTES, parse_json_object
from shardkit.packing.files import FileOrigin, FilePicture
from shardkit.packing.plan import json_payload
from shardkit.packing.refusals import RefusedError
from shardkit.packing.source import judged
from shardkit.storage.clone import Place
from shardkit.storage.regular import open_regular

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from typing import BinaryIO

    from shardkit.converting.tables import TableSpec
    from shardkit.packing.options import ShardOptions
    from shardkit.packing.supply import MakeRoom, Picture

__all__ = ["MEMBER_SCHEMA", "MemberOrigin", "MemberPicture"]

MEMBER_SCHEMA = pa.schema(
    [
        pa.field("key", pa.large_utf8()),
        pa.field("label", pa.int32()),
        pa.field("number", pa.int64()),  # of the sample among those of all inputs
        pa.field("path", pa.large_binary()),  # what a refusal calls it
        pa.field("source", pa.large_utf8()),
        pa.field("shard", pa.large_binary()),  # absolute path; of a foreign dataset or a tree what stands for it
        pa.field("shard_bytes", pa.int64()),
        pa.field("mtime_ns", pa.int64()),  # of the shard; in a tree of the file
        pa.field("offset", pa.int64()),  # in a foreign dataset the row's number
        pa.field("size", pa.int64()),
        pa.field("crc32c", pa.int64()),  # null where nobody knows it
        pa.field("json_offset", pa.int64()),
        pa.field("json_size", pa.int64()),  # 0 for no such member
    ]
)
"""The plan of a conversion."""
_ROWS = 4096
_OPEN_SHARDS = 64
"""Shards that a worker has open: a shuffled plan takes its samples from all of them."""
_MAX_SHARD_BYTES = 1 << 46


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberOrigin:
    """Shards that samples are taken from."""

    classes: tuple[str, ...] | None
    """Class names in the new labels' order; a json member that states another class of its sample is mended."""
    tables: tuple[TableSpec, ...] = ()
    """Foreign datasets among the shards."""
    trees: Mapping[bytes, FileOrigin] = field(default_factory=dict)
    """Trees among them, by what stands for each."""

    @contextlib.contextmanager
    def pictures(self, rows: pa.RecordBatch, options: ShardOptions) -> Iterator[Iterator[Picture]]:
        """Give the pictures of a shard's plan, in stored order; the shards that they lie in are closed afterwards."""
        with _OpenShards() as shards:
            yield self._pictures(rows, shards, OpenTables(self.tables), options.max_bytes)

    def _pictures(
        self, rows: pa.RecordBatch, shards: _OpenShards, tables: OpenTables, max_bytes: int
    ) -> Iterator[Picture]:
        for first in range(0, rows.num_rows, _ROWS):
            for row in rows.slice(first, _ROWS).to_pylist():
                name = None if self.classes is None or row["label"] is None else self.classes[row["label"]]
                if (tree := self.trees.get(row["shard"])) is not None:
                    yield _file_picture(row, tree, max_bytes)
                elif tables.spec(row["shard"]) is None:
                    yield MemberPicture(row, name, shards)
                else:
                    yield RowPicture(row, name, shards, tables)


def _file_picture(row: dict[str, Any], tree: FileOrigin, max_bytes: int) -> FilePicture:
    text = None if row["label"] is not None else json_payload(row["path"], None, None)
    return FilePicture(tree, max_bytes, row["key"], row["path"], row["label"], text, row["number"])


class MemberPicture:
    """An image member with the json member of its sample."""

    __slots__ = ("_class_name", "_row", "_shards", "key", "label", "number", "path", "source")

    def __init__(self, row: dict[str, Any], class_name: str | None, shards: _OpenShards) -> None:
        """Take a row of `MEMBER_SCHEMA`; nothing is opened."""
        self._row = row
        self._class_name = class_name
        self._shards = shards
        self.key: str = row["key"]
        self.label: int | None = row["label"]
        self.number: int = row["number"]
        self.path: bytes = row["path"]
        self.source: str = row["source"]

    def announce(self) -> None:
        """Let the kernel start to read the member."""
        with contextlib.suppress(OSError, RefusedError, ShardkitError):
            fd = self._open()
            os.posix_fadvise(fd, self._row["offset"], self._row["size"], os.POSIX_FADV_WILLNEED)

    def json(self) -> bytes | None:
        """Return the json member as it is, unless it states another class than the sample's new one.

        Raises:
            RefusedError: it cannot be read, or is no JSON object.
            ShardkitError: this process has run out of descriptors or memory.
        """
        size: int = self._row["json_size"]
        if not size:
            return None if self.label is not None else json_payload(path_from_source(self.source), None, None)
        if size > MAX_JSON_BYTES:
            raise RefusedError("bad-json", f"{size} bytes; at most {MAX_JSON_BYTES}")
        text = self._text(size)
        try:
            document = parse_json_object(text.decode("utf-8"))
            # What a json member says of its origin is what the index says: `verify` holds one against the other.
            stated = document.get("source")
            self.source = source_from_text(stated) if isinstance(stated, str) else self.source
        except ValueError as error:
            raise RefusedError("bad-json", f"the json member is no JSON object: {str(error)[:160]}") from error
        stated = document.get("class")
        if self._class_name is None or not isinstance(stated, str) or stated == self._class_name:
            return bytes(text)
        mended = json.dumps({**document, "class": self._class_name}, ensure_ascii=False, separators=(",", ":"))
        return mended.encode("utf-8", "surrogatepass")

    def read(self, make_room: MakeRoom) -> int:
        """Read the image and compare it with its checksum, where that is known.

        Raises:
            RefusedError: why it is not taken.
            ShardkitError: this process has run out of descriptors or memory.
        """
        size: int = self._row["size"]
        if not size:
            raise RefusedError("empty", "no bytes at all")
        self._stay_inside(self._row["offset"] + size)
        buffer, start = make_room(size)
        shared = make_room.share(Place(self._open(), self._row["offset"], self._row["shard"]), size)
        with memoryview(buffer) as whole, whole[start : start + size] as view:
            self._fill(view[shared:], self._row["offset"] + shared)
            stated, actual = self._row["crc32c"], None if self._row["crc32c"] is None else crc32c(view)
        if stated != actual:
            raise RefusedError("damaged", f"CRC-32C {actual:08x} where the index has {stated:08x}")
        return size

    def _text(self, size: int) -> bytes | bytearray:
        self._stay_inside(self._row["json_offset"] + size)
        text = bytearray(size)
        self._fill(memoryview(text), self._row["json_offset"])
        return text

    def _stay_inside(self, end: int) -> None:
        """Refuse what does not lie in its shard: the shard was cut since its index was written."""
        if end > self._row["shard_bytes"]:
            raise RefusedError("damaged", f"it ends at byte {end}, its shard at byte {self._row['shard_bytes']}")

    def _open(self) -> int:
        return self._shards.descriptor(self._row["shard"])

    def _fill(self, view: memoryview, offset: int) -> None:
        """Read bytes of the shard, which must not have changed since it was planned."""
        path, done = self._row["shard"], 0
        fd = self._open()
        try:
            while done < len(view):
                count = os.preadv(fd, [view[done:]], offset + done)
                if not count:
                    raise RefusedError("changed", f"its shard ended at byte {offset + done}")
                done += count
            status = os.fstat(fd)
        except OSError as error:
            raise judged(error, path, offset + done) from error
        if (status.st_size, status.st_mtime_ns) != (self._row["shard_bytes"], self._row["mtime_ns"]):
            raise RefusedError("changed", "its shard has changed since it was planned")


class RowPicture(MemberPicture):
    """An image of a foreign dataset, by the number of its row."""

    __slots__ = ("_tables", "_values")

    def __init__(self, row: dict[str, Any], class_name: str | None, shards: _OpenShards, tables: OpenTables) -> None:
        """Take a row of `MEMBER_SCHEMA`; nothing is opened."""
        super().__init__(row, class_name, shards)
        self._tables = tables
        self._values: tuple[bytes, bytes] | None = None

    def announce(self) -> None:
        """Do nothing: where the bytes lie is the library's to know."""

    def read(self, make_room: MakeRoom) -> int:
        """Take the image as the library gives it, which must be what was planned.

        Raises:
            RefusedError: why it is not taken.
            ShardkitError: the dataset cannot be opened any more.
        """
        image, _ = self._read()
        if not image:
            raise RefusedError("empty", "no bytes at all")
        if crc32c(image) != self._row["crc32c"]:
            raise RefusedError("changed", "its row has changed since it was planned")
        buffer, start = make_room(len(image))
        buffer[start : start + len(image)] = image
        return len(image)

    def _text(self, size: int) -> bytes:
        _, text = self._read()
        if len(text) != size:
            raise RefusedError("changed", "its row has changed since it was planned")
        return text

    def _read(self) -> tuple[bytes, bytes]:
        if self._values is None:
            spec = self._tables.spec(self._row["shard"])
            assert spec is not None
            row = self._tables.row(spec.name, self._row["offset"])
            self._values = spec.image_of(row), spec.json_of(row)
        return self._values


class _OpenShards:
    """Descriptors of the shards used last."""

    def __init__(self) -> None:
        self._files: OrderedDict[bytes, BinaryIO] = OrderedDict()

    def descriptor(self, path: bytes) -> int:
        """Return an open descriptor of a shard.

        Raises:
            RefusedError: it is no longer a regular file.
            ShardkitError: it cannot be opened; that says nothing about its samples, which all lie in it.
        """
        file = self._files.get(path)
        if file is not None:
            self._files.move_to_end(path)
            return file.fileno()
        try:
            file = open_regular(path, _MAX_SHARD_BYTES)
        except UnsafeError as error:
            raise RefusedError("not-a-file", "its shard is no longer a regular file") from error
        except OSError as error:
            raise from_os_error(error, "cannot open a shard", path=path) from error
        self._files[path] = file
        if len(self._files) > _OPEN_SHARDS:
            _close(self._files.popitem(last=False)[1])
        return file.fileno()

    def __enter__(self) -> _OpenShards:
        return self

    def __exit__(self, *_: object) -> None:
        while self._files:
            _close(self._files.popitem()[1])


def _close(file: BinaryIO) -> None:
    with contextlib.suppress(OSError):  # nothing was written through it
        file.close()
