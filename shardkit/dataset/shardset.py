"""A packed dataset, opened: every sample by its number or its key, and the index as columns."""

from __future__ import annotations

import operator
import os
import threading
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from shardkit.dataset.columns import Column, Rows, TextColumn, make_absent, map_column
from shardkit.dataset.folder import check_shards, map_index, read_manifest
from shardkit.errors import ConfigError, IntegrityError, ShardkitError
from shardkit.extent import Extent
from shardkit.format.checksum import crc32c
from shardkit.format.index import SCHEMA
from shardkit.format.strict_json import parse_json_object
from shardkit.storage.backends import open_reader
from shardkit.storage.reader import Reader, ReadOp

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType

    import numpy.typing as npt

    from shardkit.format.manifest import Manifest

__all__ = ["Columns", "Dataset", "Located", "Sample", "open_dataset", "parse_metadata"]


@dataclass(frozen=True, slots=True)
class Sample:
    """One sample, read and checked."""

    key: str
    label: int | None
    """Class number; None where the dataset has no labels."""
    jpeg: bytes
    """The image file's bytes, as they were packed."""
    metadata: dict[str, Any] | None
    """The json member; Any: JSON values. None where the sample has no such member."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Located:
    """Where the images of n samples lie. int64 [n] each, int32 for the shard; owned by the caller."""

    shard: npt.NDArray[np.int32]
    """Number of the shard, an index into `Dataset.shard_paths`."""
    offset: npt.NDArray[np.int64]
    """Bytes from the start of the shard to the payload."""
    size: npt.NDArray[np.int64]
    """Bytes of the payload."""
    label: npt.NDArray[np.int64]
    """Class number; -1 for a sample without one."""


class Columns(Mapping[str, Column | TextColumn]):
    """The index by column name; each column is mapped when it is first asked for."""

    def __init__(self, batches: Sequence[Any], rows: Rows, memory: npt.NDArray[np.uint8]) -> None:
        """Bind to a map of the index and the record batches made of it; Any: pyarrow has no types."""
        self._batches = batches
        self._rows = rows
        self._memory = memory
        self._made: dict[str, Column | TextColumn] = {}

    def __getitem__(self, name: str) -> Column | TextColumn:
        """Return a column.

        Raises:
            KeyError: the index has no such column.
        """
        if name not in SCHEMA.names:
            raise KeyError(name)
        if name not in self._made:  # two threads may both make it; the columns are equal
            self._made[name] = map_column(name, self._batches, self._rows, self._memory)
        return self._made[name]

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names, in the order of the index."""
        return iter(SCHEMA.names)

    def __len__(self) -> int:
        """Return the number of columns."""
        return len(SCHEMA.names)

    @property
    def batches(self) -> Sequence[Any]:
        """The record batches that the columns are made of, one a shard, texts unchecked; Any: pyarrow has no types."""
        return self._batches

    def numbers(self, name: str) -> Column:
        """Return a column of numbers."""
        column = self[name]
        if not isinstance(column, Column):
            raise TypeError(f"column {name!r} holds texts")
        return column

    def texts(self, name: str) -> TextColumn:
        """Return a column of texts."""
        column = self[name]
        if not isinstance(column, TextColumn):
            raise TypeError(f"column {name!r} holds numbers")
        return column

    def release(self) -> None:
        """Take the map out of the resident memory of this process; whoever reads on brings it back."""
        make_absent(self._memory)


def open_dataset(path: str | os.PathLike[str]) -> Dataset:
    """Open a packed dataset, in time and memory that depend on the number of its shards only.

    The index is checked against the manifest: its size, a batch a shard, each shard's number of rows, first and last
    key; and every shard for presence and size. Digests are the business of `shardkit verify`.

    Args:
        path: the dataset's folder.

    Raises:
        ConfigError: the folder is none, is no dataset, or its pack was not finished.
        FormatError: the manifest or the index is damaged, or made by a newer shardkit.
        IntegrityError: manifest, index and shards disagree.
        StorageError: the system failed to read one of them.
    """
    return Dataset(path)


class Dataset:
    """A packed dataset: a sequence of samples over memory-mapped indexes. Threads may share it; it pickles by path."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Open it; see `open_dataset`."""
        self.path = os.path.abspath(os.fspath(path))
        """Absolute path of the dataset's folder."""
        self.manifest: Manifest = read_manifest(self.path)
        self.generation: str = self.manifest.generation
        """UUID of the content: equal for equal shards and classes."""
        self.shard_paths: tuple[str, ...] = tuple(os.path.join(self.path, s.name) for s in self.manifest.shards)
        """Absolute path of each shard, in order."""
        memory, batches = map_index(self.path, self.manifest)
        self._rows = Rows([shard.samples for shard in self.manifest.shards])
        self.columns = Columns(batches, self._rows, memory)
        """The index: name -> `Column` of numbers, or `TextColumn` for `key` and `source`."""
        self._shard_bytes = np.asarray([shard.bytes for shard in self.manifest.shards], np.int64)
        check_shards(self.shard_paths, self.manifest)
        self._reader: Reader | None = None
        self._lock = threading.Lock()
        self._process = os.getpid()
        self._closed = False

    @property
    def classes(self) -> tuple[str, ...] | None:
        """Class names in label order; None without labels, or without names for them."""
        return None if self.manifest.classes is None else tuple(self.manifest.classes)

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self._rows)

    def __getitem__(self, number: int) -> Sample:
        """Read sample `number`, from 0, or from the end when it is negative; its CRC-32C is checked where there is one.

        Raises:
            IndexError: there is no such sample.
            TypeError: not an integer; a slice is refused, since it would read everything at once.
            IntegrityError: the bytes are not those that were packed; names shard, offset and key.
            StorageError: the shard cannot be read.
            ConfigError: the dataset is closed.
        """
        try:
            wanted = operator.index(number)
        except TypeError:
            raise TypeError(
                f"a dataset gives one sample at a time, by its number, not by {type(number).__name__}; for many rows "
                "of the index take ds.columns[name][a:b]"
            ) from None
        return self._read(self._rows.resolve_one(wanted))

    def __iter__(self) -> Iterator[Sample]:
        """Read every sample, in stored order."""
        return (self._read(number) for number in range(len(self)))

    def by_key(self, key: str) -> Sample:
        """Read the sample that has this key. Looks at all keys: about 15 ms a million.

        Raises:
            KeyError: no sample has it.
            IntegrityError: as for `ds[i]`.
        """
        number = self.columns.texts("key").find(key)
        if number < 0:
            raise KeyError(key)
        return self[number]

    def locate(self, ids: Sequence[int] | npt.NDArray[np.integer[Any]]) -> Located:
        """Return where samples lie and their labels, for all of `ids` at once and without reading a shard.

        Args:
            ids: sample numbers [n], any integer type; negative ones count from the end.

        Raises:
            IndexError: there is no such sample.
            IntegrityError: the index points past the end of a shard.
        """
        numbers = self._rows.resolve(ids)
        shard = self._rows.shard_of(numbers)
        offset = self.columns.numbers("offset").take(numbers, shard).astype(np.int64)
        size = self.columns.numbers("size").take(numbers, shard).astype(np.int64)
        label = self.columns.numbers("label").take(numbers, shard).astype(np.int64)
        outside = (offset < 0) | (offset > self._shard_bytes[shard] - size)
        if outside.any():
            at = int(np.flatnonzero(outside)[0])
            raise self._points_outside(int(numbers[at]), int(shard[at]), int(offset[at]), int(size[at]))
        return Located(shard=shard.astype(np.int32), offset=offset, size=size, label=label)

    def close(self) -> None:
        """Give back descriptors and threads; idempotent. Columns that someone holds stay readable."""
        with self._lock:
            self._closed = True
            reader, self._reader = self._reader, None
        if reader is not None:
            reader.close()

    def __enter__(self) -> Dataset:
        """Return the dataset."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close."""
        self.close()

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle as path and generation: the other process opens the folder itself."""
        return (_open_same, (self.path, self.generation))

    def __repr__(self) -> str:
        """Return path, samples and shards."""
        return f"<shardkit dataset {self.path!r}: {len(self)} samples in {len(self.shard_paths)} shards>"

    def _points_outside(self, number: int, shard: int, offset: int, size: int) -> IntegrityError:
        return IntegrityError(
            "the index points outside its shard",
            path=self.shard_paths[shard],
            offset=max(offset, 0),
            key=self.columns.texts("key")[number],
            expected=f"at most {self._shard_bytes[shard]} bytes",
            found=f"{size} bytes at {offset}",
            remedy="run shardkit verify",
        )

    def _read(self, number: int) -> Sample:
        located = self.locate([number])
        key, shard, offset = self.columns.texts("key")[number], int(located.shard[0]), int(located.offset[0])
        json_offset, json_size = (self.columns.numbers(name)[number] for name in ("json_offset", "json_size"))
        if json_offset + json_size > self._shard_bytes[shard]:
            raise self._points_outside(number, shard, json_offset, json_size)
        jpeg, text = bytearray(int(located.size[0])), bytearray(json_size)
        try:
            self._open_reader().read_into([_op(shard, offset, jpeg), _op(shard, json_offset, text)])
        except ShardkitError as error:
            error.key = key
            raise
        stated, actual = self.columns.numbers("crc32c")[number], crc32c(jpeg)
        if stated != actual and self.manifest.has_checksums:
            raise IntegrityError(
                "an image is not what was packed", path=self.shard_paths[shard], offset=offset, key=key,
                expected=f"CRC-32C {stated:08x}", found=f"{actual:08x}", remedy="run shardkit verify",
            )  # fmt: skip
        metadata = None
        if json_size:
            metadata = parse_metadata(text, path=self.shard_paths[shard], offset=json_offset, key=key)
        label = int(located.label[0])
        return Sample(key, None if label < 0 else label, bytes(jpeg), metadata)

    def _open_reader(self) -> Reader:
        if self._process != os.getpid():  # a forked child, whose parent's other threads may have held the lock
            self._process, self._lock = os.getpid(), threading.Lock()
        with self._lock:
            if self._closed:
                raise ConfigError("the dataset is closed", path=self.path, remedy="open it again")
            if self._reader is None:
                self._reader = open_reader("buffered", self.shard_paths, threads=1)[0]
                weakref.finalize(self, self._reader.close).atexit = False
            return self._reader


def parse_metadata(text: bytes | bytearray | memoryview, *, path: str, offset: int, key: str) -> dict[str, Any]:
    """Return the object that a json member holds; Any: JSON values.

    Args:
        text: its payload.
        path: the shard, for the message.
        offset: of the payload in the shard, for the message.
        key: of the sample, for the message.

    Raises:
        IntegrityError: it is not a JSON object.
    """
    try:
        return parse_json_object(str(text, "utf-8"))
    except ValueError as error:
        raise IntegrityError(
            "a json member is damaged", path=path, offset=offset, key=key, found=str(error)[:200],
            remedy="run shardkit verify",
        ) from error  # fmt: skip


def _open_same(path: str, generation: str) -> Dataset:
    dataset = Dataset(path)
    if dataset.generation != generation:
        raise ConfigError(
            "the dataset was replaced since it was opened", path=path, expected=f"generation {generation}",
            found=dataset.generation,
        )  # fmt: skip
    return dataset


def _op(shard: int, offset: int, dst: bytearray) -> ReadOp:
    return ReadOp(shard, Extent(offset, len(dst)), memoryview(dst), len(dst))
