"""All samples of all inputs as one long index: mapped where there is one, else made of the tars' headers.

What is in memory at a time are numbers of a few bytes a sample; texts stay in the mapped indexes, or in the file that
the scan of the tars is spilled to.
"""

from __future__ import annotations

import dataclasses
import os
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from shardkit.converting.tables import scan_table
from shardkit.converting.tars import further_members, read_tar
from shardkit.dataset.folder import map_index, read_manifest
from shardkit.errors import FormatError, IntegrityError, UnsafeError
from shardkit.format.index import HEADER_COLUMNS, SCHEMA, ArrowSink, check_rows, sample_batch
from shardkit.format.keys import is_safe_key, key_from_path, path_from_source, source_from_path, without_here
from shardkit.indexing.scan import MAX_SHARD_BYTES
from shardkit.packing.refusals import Refusal
from shardkit.storage.atomic import BufferedFile, os_errors

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from shardkit.converting.inputs import Input
    from shardkit.converting.options import ConvertOptions, KeyRule
    from shardkit.converting.tables import TableSpec
    from shardkit.converting.tars import ForeignTar
    from shardkit.packing.options import OnError

__all__ = ["Gathered", "InputShard", "Rejected", "final_key", "gather", "member_path"]

Ints = npt.NDArray[np.int64]
_NO_ROWS = sample_batch([])
_PLACES = ("offset", "size", "json_offset", "json_size")


@dataclass(frozen=True, slots=True, kw_only=True)
class InputShard:
    """A shard whose samples are converted, or a foreign dataset as a whole."""

    path: bytes
    """Absolute; of a foreign dataset `TableSpec.name`."""
    bytes: int
    mtime_ns: int
    rows: pa.RecordBatch
    """`SCHEMA`; of a tar without an index only `shardkit.format.index.HEADER_COLUMNS` are filled."""
    classes: tuple[str, ...] | None
    """Names of its labels."""
    checked: bool
    """Whether `crc32c` is known for every row."""
    table: TableSpec | None = None
    """How the rows of a foreign dataset are read."""
    others: Mapping[str, Ints] = field(default_factory=dict)
    """Extension to the rows that have such a further member, which no shard of shardkit's has."""

    @property
    def name(self) -> str:
        """The file name as text."""
        return source_from_path(os.path.basename(self.path))


@dataclass(frozen=True, slots=True)
class Rejected:
    """A sample, a member of none, or a whole tar, that could not even become a source."""

    refusal: Refusal
    shard: bytes
    """Path of its shard."""
    key: str | None
    """Its key in the shard; None for a whole tar, or a member whose name has none."""


class Gathered:
    """The samples of all inputs, numbered through."""

    def __init__(self, shards: Sequence[InputShard], rejected: list[Rejected], known: frozenset[str]) -> None:
        """Take the shards in their order."""
        self.shards = shards
        self.rejected = rejected
        self.known = known
        """Columns of the index that every input fills."""
        counts = np.array([shard.rows.num_rows for shard in shards], np.int64)
        self.starts: Ints = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])

    def __len__(self) -> int:
        """Return the number of samples."""
        return int(self.starts[-1])

    def runs(self, ids: Ints) -> Iterator[tuple[int, Ints]]:
        """Yield shard number and rows in it, for rising sample numbers."""
        edges = np.searchsorted(ids, self.starts)
        for number in np.flatnonzero(np.diff(edges)).tolist():
            yield number, ids[edges[number] : edges[number + 1]] - self.starts[number]

    def column(self, name: str) -> Any:  # noqa: ANN401 - numpy's dtype follows from the column
        """Return a column of numbers, [n]; null reads as -1."""
        empty = [np.zeros(0, np.int64)]
        return np.concatenate([*empty, *(_numbers(shard.rows.column(name)) for shard in self.shards)])

    def others(self, chosen: npt.NDArray[np.bool_]) -> Counter[str]:
        """Return the further members of some samples, bool [n], counted by extension."""
        counts: Counter[str] = Counter()
        for shard, start in zip(self.shards, self.starts.tolist(), strict=False):
            for extension, rows in shard.others.items():
                counts[extension] += int(chosen[start + rows].sum())
        return +counts

    def take(self, ids: Ints, names: Sequence[str]) -> tuple[dict[str, list[Any]], list[int]]:
        """Return some columns of some samples as Python objects, in the order of `ids`, and the shard of each."""
        order = np.argsort(ids, kind="stable")
        pieces, numbers = [], np.empty(len(ids), np.int64)
        at = 0
        for number, rows in self.runs(ids[order]):
            pieces.append(self.shards[number].rows.select(names).take(pa.array(rows)).replace_schema_metadata(None))
            numbers[order[at : at + len(rows)]] = number
            at += len(rows)
        table = pa.Table.from_batches(pieces).combine_chunks().take(pa.array(np.argsort(order, kind="stable")))
        return table.to_pydict(), numbers.tolist()


def _numbers(column: pa.Array) -> Ints:
    kept = column.fill_null(-1) if column.null_count else column
    values: Ints = kept.to_numpy(zero_copy_only=False).astype(np.int64)
    return values


def final_key(rule: KeyRule, key: str, shard: bytes, number: int) -> str:
    """Return the key that a sample has in its new shard.

    Args:
        rule: see `ConvertOptions.key`.
        key: in the shard that it comes from.
        shard: path of that shard.
        number: of the sample among all.
    """
    if rule == "index":
        return f"{number:09d}"
    key = without_here(key)
    if rule == "shard":
        key = f"{os.fsdecode(os.path.basename(shard)).removesuffix('.tar')}/{key}"
    return key if is_safe_key(key) else key_from_path(os.fsencode(key) + b".jpg")


def member_path(shard: InputShard, key: str) -> bytes:
    """Return what a refusal calls a sample: the shard's file name, a slash, the key."""
    return os.path.basename(shard.path) + b"/" + key.encode()


def gather(inputs: Sequence[Input], options: ConvertOptions, spill: bytes | None) -> Gathered:
    """Map or scan every input.

    Args:
        inputs: in their order.
        options: whether a tar that cannot be taken ends the run or is refused as a whole, and which columns of foreign
            datasets are meant.
        spill: file for what is found in tars and foreign datasets; None keeps it in memory.

    Raises:
        CapabilityError: the library that reads a foreign dataset is not installed.
        ConfigError: a folder is no dataset, or its columns are not clear.
        FormatError: an index is damaged; or a tar, with on_error "fail".
        IntegrityError: manifest, index and shards of a dataset disagree.
        UnsafeError: as FormatError, for what is over a limit.
        ShardkitError: the system failed a read.
    """
    rejected: list[Rejected] = []
    shards: list[InputShard] = []
    scanned: list[tuple[int, int]] = []
    found, known = 0, frozenset(SCHEMA.names)
    with _Spill(spill) as store:
        for each in inputs:
            if each.kind == "dataset":
                new, filled = _dataset_shards(each.path, options.on_error, found, rejected)
                known &= filled
                shards += new
                found += sum(shard.rows.num_rows for shard in new)
                continue
            if each.kind != "tar":
                shard, rows = _table_shard(each, options, found, rejected)
                scanned.append((len(shards), store.add(rows)))
                shards.append(shard)
                found += rows.num_rows
                continue
            tar = _read_tar(each.path, options.on_error, found, rejected)
            if tar is None or not tar.rows.num_rows:
                continue
            scanned.append((len(shards), store.add(tar.rows)))
            shards.append(
                InputShard(path=os.fsencode(each.path), bytes=tar.bytes, mtime_ns=tar.mtime_ns, rows=_NO_ROWS,
                           classes=None, checked=False, others=_arrays(tar.others))
            )  # fmt: skip
            found += tar.rows.num_rows
    batches = store.batches()
    for place, number in scanned:
        shards[place] = dataclasses.replace(shards[place], rows=batches[number])
    return Gathered(shards, rejected, known & HEADER_COLUMNS if scanned else known)


def _arrays(others: Mapping[str, Sequence[int]]) -> dict[str, Ints]:
    return {extension: np.array(rows, np.int64) for extension, rows in others.items()}


def _dataset_shards(
    path: str, on_error: OnError, found: int, rejected: list[Rejected]
) -> tuple[list[InputShard], frozenset[str]]:
    """Return a dataset's shards, and the columns that its index fills; a shard of another size is `rejected`."""
    manifest = read_manifest(path)
    _, batches = map_index(path, manifest)
    classes = None if manifest.classes is None else tuple(manifest.classes)
    shards = []
    for number, (record, batch) in enumerate(zip(manifest.shards, batches, strict=True)):
        file = os.path.join(path, record.name)
        with os_errors("a shard of the dataset cannot be found", os.fsencode(file)):
            status = os.stat(file)
        check_rows(batch, number)  # texts are read from it, and Arrow would follow a damaged offset anywhere
        _check_numbers(file, batch, min(record.bytes, MAX_SHARD_BYTES), classes)
        if status.st_size != record.bytes:
            rejected.append(_other_size(file, status.st_size, record.bytes, on_error, found))
            if not manifest.has_checksums:
                continue  # nothing would show whether it is the shard that was indexed at all
        others = {}
        if manifest.layout == "foreign":
            others = further_members(os.path.join(path, f"{record.stem}.idx"), batch)
        shards.append(
            InputShard(path=os.fsencode(file), bytes=status.st_size, mtime_ns=status.st_mtime_ns, rows=batch,
                       classes=classes, checked=manifest.has_checksums, others=_arrays(others))
        )  # fmt: skip
        found += batch.num_rows
    return shards, manifest.known_columns


def _other_size(file: str, size: int, stated: int, on_error: OnError, found: int) -> Rejected:
    """Return the refusal of a shard as such: its rows are kept, and refused one by one where they are not there."""
    what = "a shard has another size than the manifest says"
    if on_error == "fail":
        raise IntegrityError(what, path=file, expected=f"{stated} bytes", found=f"{size} bytes",
                             remedy="--on-error skip takes what is whole of it")  # fmt: skip
    detail = f"{what}; expected {stated} bytes; found {size} bytes"
    path = os.fsencode(file)
    return Rejected(Refusal(found, os.path.basename(path), "damaged-shard", detail), path, None)


def _table_shard(
    table: Input, options: ConvertOptions, found: int, rejected: list[Rejected]
) -> tuple[InputShard, pa.RecordBatch]:
    """Return a foreign dataset, without and with its rows; refusals are added."""
    scanned = scan_table(table.kind, table.path, options)
    name = scanned.spec.name
    for key, one in scanned.refused:
        rejected.append(Rejected(Refusal(found + one.number, one.path, one.reason, one.detail), name, key))
    shard = InputShard(
        path=name, bytes=scanned.bytes, mtime_ns=scanned.mtime_ns, rows=_NO_ROWS, classes=scanned.classes, checked=True,
        table=scanned.spec, others={f".{name}": np.arange(scanned.rows.num_rows) for name in scanned.others},
    )  # fmt: skip
    return shard, scanned.rows


def _check_numbers(path: str, batch: pa.RecordBatch, size: int, classes: Sequence[str] | None) -> None:
    """Refuse an index whose rows lead out of their shard, or to a class that is not there."""
    columns = {name: batch.column(name).to_numpy(zero_copy_only=False) for name in _PLACES}
    wrong = np.zeros(batch.num_rows, bool)
    for start, length in (("offset", "size"), ("json_offset", "json_size")):
        left = np.uint64(size) - np.minimum(columns[start], np.uint64(size))
        wrong |= (columns[start] > size) | (columns[length] > left)
    labels = batch.column("label")
    numbers = labels.fill_null(0).to_numpy(zero_copy_only=False)
    known = len(classes) if classes is not None else 1 << 31
    wrong |= ((numbers < 0) | (numbers >= known)) & labels.is_valid().to_numpy(zero_copy_only=False)
    if wrong.any():
        row = int(wrong.argmax())
        raise IntegrityError(
            "a row of the index leads out of its shard, or to a class that is not there", path=path,
            key=batch.column("key")[row].as_py(), remedy="run shardkit verify, then shardkit repair",
        )  # fmt: skip


def _read_tar(path: str, on_error: OnError, found: int, rejected: list[Rejected]) -> ForeignTar | None:
    """Return what stands in a tar, its refusals added to `rejected`; None when it is refused as a whole."""
    try:
        tar = read_tar(path)
    except (FormatError, UnsafeError) as error:
        if on_error == "fail":
            raise
        # Without the path: equal runs write equal refusals, wherever the shards lie.
        error.path = None
        reason = "unsafe-shard" if isinstance(error, UnsafeError) else "damaged-shard"
        file = os.path.basename(os.fsencode(path))
        rejected.append(Rejected(Refusal(found, file, reason, str(error)), os.fsencode(path), None))
        return None
    for row, key, one in tar.refused:
        refusal = Refusal(found + row, path_from_source(one.path), one.reason, one.detail)
        rejected.append(Rejected(refusal, os.fsencode(path), key))
    return tar


class _Spill:
    """Record batches on their way through a file, so that only their pages that are asked for take memory."""

    def __init__(self, path: bytes | None) -> None:
        """Write to `path`, or to memory."""
        self._path = path
        self._count = 0
        self._sink = pa.BufferOutputStream() if path is None else None
        self._file: BufferedFile | None = None
        self._writer: pa.RecordBatchFileWriter | None = None

    def add(self, batch: pa.RecordBatch) -> int:
        """Write a batch; return its number."""
        if self._writer is None:
            if self._path is not None:
                self._file = BufferedFile(self._path)
            sink = self._sink if self._file is None else pa.PythonFile(ArrowSink(self._file), mode="w")
            self._writer = pa.ipc.new_file(sink, SCHEMA)
        self._writer.write_batch(batch)
        self._count += 1
        return self._count - 1

    def batches(self) -> list[pa.RecordBatch]:
        """Return what was added, mapped."""
        if not self._count:
            return []
        source = self._sink.getvalue() if self._sink is not None else pa.memory_map(os.fsdecode(self._path or b""))
        reader = pa.ipc.open_file(source)
        return [reader.get_batch(number) for number in range(self._count)]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._writer is not None:
            self._writer.close()
        if self._file is not None:
            self._file.close() if kind is None else self._file.discard()
