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

from shardkit.converting.columns import is_text
from shardkit.converting.facts import HEAD_FACTS, wants_facts
from shardkit.converting.indexed import check_numbers, doubt_about
from shardkit.converting.tables import scan_table
from shardkit.converting.tars import further_members, read_tar
from shardkit.converting.trees import tree_name, walk_tree
from shardkit.dataset.folder import map_index, read_manifest
from shardkit.errors import FormatError, IntegrityError, ManifestError, UnsafeError
from shardkit.escaping import escape
from shardkit.format.dataset_record import MANIFEST
from shardkit.format.index import HEADER_COLUMNS, SCHEMA, ArrowSink, check_rows, sample_batch
from shardkit.format.keys import is_safe_key, key_from_path, path_from_source, source_from_path, without_here
from shardkit.indexing.refusals import with_tar_remedy
from shardkit.indexing.scan import MAX_SHARD_BYTES
from shardkit.packing.refusals import Refusal
from shardkit.running.spool import mapped
from shardkit.storage.atomic import BufferedFile, os_errors

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from shardkit.converting.inputs import Input
    from shardkit.converting.options import ConvertOptions, KeyRule
    from shardkit.converting.tables import TableSpec
    from shardkit.converting.tars import ForeignTar
    from shardkit.converting.trees import TreeFiles
    from shardkit.packing.options import OnError

__all__ = ["Gathered", "InputShard", "Rejected", "final_key", "gather", "member_path", "numbers"]

Ints = npt.NDArray[np.int64]
_NO_ROWS = sample_batch([])
_ROWS = 1 << 14
"""Samples that are Python objects at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InputShard:
    """A shard whose samples are converted, a foreign dataset as a whole, or some files of a tree."""

    path: bytes
    """Absolute; of a foreign dataset `TableSpec.name`, of a tree `tree_name`."""
    bytes: int
    mtime_ns: int
    rows: pa.RecordBatch
    """`SCHEMA`; checksums and facts are 0 where there is no index, or nobody asked for them."""
    classes: tuple[str, ...] | None
    """Names of its labels."""
    checked: bool
    """Whether `crc32c` is known for every row."""
    table: TableSpec | None = None
    """How the rows of a foreign dataset are read."""
    tree: TreeFiles | None = None
    """How the files of a tree are."""
    others: Mapping[str, npt.NDArray[np.uint8]] = field(default_factory=dict)
    """Extension to which rows have such a further member, which no shard of shardkit's has: one bit a row."""

    @property
    def name(self) -> str:
        """The file name as text."""
        return source_from_path(os.path.basename(self.path))

    def mtime_of(self, row: int) -> int:
        """Return when what holds a row was last written, in ns."""
        return self.mtime_ns if self.tree is None else int(self.tree.mtimes[row])


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

    def __init__(
        self, shards: Sequence[InputShard], rejected: list[Rejected], known: frozenset[str],
        skipped: Mapping[str, int], folder: bytes | None = None,
    ) -> None:  # fmt: skip
        """Take the shards in their order."""
        self.shards = shards
        self.rejected = rejected
        self.known = known
        """Columns of the index that every input fills, or has filled if `where` asks for them."""
        self.skipped = skipped
        """Entries of trees that are not images by name, counted by kind."""
        self.folder = folder
        """For columns of numbers that memory need not hold; None keeps them there."""
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

    def pieces(self) -> Iterator[tuple[InputShard, int, pa.RecordBatch]]:
        """Yield all samples in order, some of a shard at a time: the shard, the number of the first one, their rows."""
        for shard, start in zip(self.shards, self.starts.tolist(), strict=False):
            for first in range(0, shard.rows.num_rows, _ROWS):
                yield shard, start + first, shard.rows.slice(first, _ROWS)

    def numbers(self, name: str, ids: Ints) -> Ints:
        """Return a column of numbers for rising sample numbers, int64 [k]; null reads as -1."""
        found = np.empty(len(ids), np.int64)
        at = 0
        for number, rows in self.runs(ids):
            some = self.shards[number].rows.column(name).slice(rows[0], rows[-1] - rows[0] + 1)
            found[at : at + len(rows)] = numbers(some)[rows - rows[0]]
            at += len(rows)
        return found

    def others(self, chosen: npt.NDArray[np.bool_]) -> Counter[str]:
        """Return the further members of some samples, bool [n], counted by extension."""
        counts: Counter[str] = Counter()
        for shard, start in zip(self.shards, self.starts.tolist(), strict=False):
            of_shard = chosen[start : start + shard.rows.num_rows]
            for extension, bits in shard.others.items():
                counts[extension] += int((np.unpackbits(bits, count=len(of_shard)) & of_shard).sum())
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


def numbers(column: pa.Array) -> Ints:
    """Return a column of numbers, int64 [n]; null reads as -1."""
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


def member_path(shard: InputShard, key: str, source: str) -> bytes:
    """Return what a refusal calls a sample: the shard's file name, a slash, the key; in a tree the file's path."""
    if shard.tree is not None:
        return path_from_source(source)
    return os.path.basename(shard.path) + b"/" + key.encode()


def gather(inputs: Sequence[Input], options: ConvertOptions, spill: bytes | None) -> Gathered:
    """Map or scan every input.

    Args:
        inputs: in their order.
        options: whether a tar that cannot be taken ends the run or is refused as a whole, and which columns of foreign
            datasets are meant.
        spill: file for what is found where there is no index, in a folder for more; None keeps all in memory.

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
    skipped: Counter[str] = Counter()
    found, known = 0, frozenset(SCHEMA.names)
    facts = wants_facts(options.where)
    with _Spill(spill) as store:
        for each in inputs:
            if each.kind == "dataset":
                new, filled = _dataset_shards(each.path, options.on_error, found, rejected)
                known &= filled
                shards += new
                found += sum(shard.rows.num_rows for shard in new)
                continue
            scan = _scanned(each, options, found, rejected, skipped, facts=facts)
            for shard, rows in scan:
                scanned.append((len(shards), store.add(rows)))
                shards.append(shard)
                found += rows.num_rows
    batches = store.batches()
    for place, number in scanned:
        shards[place] = dataclasses.replace(shards[place], rows=batches[number])
    if scanned:
        known &= HEADER_COLUMNS | HEAD_FACTS  # those of the facts that are asked for are there
    return Gathered(shards, rejected, known, skipped, None if spill is None else os.path.dirname(spill))


def _scanned(
    each: Input, options: ConvertOptions, found: int, rejected: list[Rejected], skipped: Counter[str], *, facts: bool
) -> Iterator[tuple[InputShard, pa.RecordBatch]]:
    """Yield what an input without an index holds, each piece without and with its rows; refusals are added."""
    if each.kind == "tree":
        yield from _tree_pieces(each, options, found, rejected, skipped, facts=facts)
    elif each.kind != "tar":
        yield _table_shard(each, options, found, rejected)
    else:
        tar = _read_tar(each.path, options.on_error, found, rejected, facts=facts)
        if tar is not None and tar.rows.num_rows:
            shard = InputShard(path=os.fsencode(each.path), bytes=tar.bytes, mtime_ns=tar.mtime_ns, rows=_NO_ROWS,
                               classes=None, checked=False, others=_bits(tar.others, tar.rows.num_rows))  # fmt: skip
            yield shard, tar.rows


def _tree_pieces(
    each: Input, options: ConvertOptions, found: int, rejected: list[Rejected], skipped: Counter[str], *, facts: bool
) -> Iterator[tuple[InputShard, pa.RecordBatch]]:
    tree, name = walk_tree(each.path, options), tree_name(each.path)
    skipped.update(tree.skipped)
    for row, key, one in tree.refused():
        rejected.append(Rejected(dataclasses.replace(one, number=found + row), name, key))
    for files, rows in tree.batches(facts=facts):
        yield InputShard(path=name, bytes=0, mtime_ns=0, rows=_NO_ROWS, classes=tree.classes, checked=False,
                         tree=files), rows  # fmt: skip


def _bits(others: Mapping[str, Sequence[int]], count: int) -> dict[str, npt.NDArray[np.uint8]]:
    found = {}
    for extension, rows in others.items():
        marks = np.zeros(count, np.bool_)
        marks[np.array(rows)] = True
        found[extension] = np.packbits(marks)
    return found


def _dataset_shards(
    path: str, on_error: OnError, found: int, rejected: list[Rejected]
) -> tuple[list[InputShard], frozenset[str]]:
    """Return a dataset's shards, and the columns that its index fills; a shard of another size is `rejected`."""
    manifest = read_manifest(path)
    _, batches = map_index(path, manifest)
    classes = None if manifest.classes is None else _texts(path, manifest.classes)
    shards = []
    for number, (record, batch) in enumerate(zip(manifest.shards, batches, strict=True)):
        file = os.path.join(path, record.name)
        with os_errors("a shard of the dataset cannot be found", os.fsencode(file)):
            status = os.stat(file)
        check_rows(batch, number)  # texts are read from it, and Arrow would follow a damaged offset anywhere
        check_numbers(file, batch, min(record.bytes, MAX_SHARD_BYTES), classes)
        doubt = doubt_about(file, status.st_size, record, manifest)
        if doubt is not None:
            rejected.append(_doubted(file, doubt, on_error, found))
            if not manifest.has_checksums:
                continue  # nothing would show whether it is the shard that was indexed at all
        others = {}
        if manifest.layout == "foreign":
            others = further_members(os.path.join(path, f"{record.stem}.idx"), batch)
        shards.append(
            InputShard(path=os.fsencode(file), bytes=status.st_size, mtime_ns=status.st_mtime_ns, rows=batch,
                       classes=classes, checked=manifest.has_checksums, others=_bits(others, batch.num_rows))
        )  # fmt: skip
        found += batch.num_rows
    return shards, manifest.known_columns


def _texts(path: str, classes: Sequence[str]) -> tuple[str, ...]:
    """Return class names, which go into json members."""
    wrong = next((name for name in classes if not is_text(name)), None)
    if wrong is not None:
        raise ManifestError("a class name is no text", path=os.path.join(path, MANIFEST), found=escape(wrong[:80]))
    return tuple(classes)


def _doubted(file: str, doubt: IntegrityError, on_error: OnError, found: int) -> Rejected:
    """Return the refusal of a shard as such: with checksums its rows are kept, and refused one by one."""
    if on_error == "fail":
        doubt.path = file
        raise doubt
    detail = f"{doubt.what}; expected {doubt.expected}; found {doubt.found}"
    path = os.fsencode(file)
    return Rejected(Refusal(found, os.path.basename(path), "damaged-shard", detail), path, None)


def _table_shard(
    table: Input, options: ConvertOptions, found: int, rejected: list[Rejected]
) -> tuple[InputShard, pa.RecordBatch]:
    """Return a foreign dataset, without and with its rows; refusals are added."""
    scanned = scan_table(table.kind, table.path, options, found)
    name = scanned.spec.name
    rejected += (Rejected(one, name, key) for key, one in scanned.refused)
    every = np.packbits(np.ones(scanned.rows.num_rows, np.bool_))
    shard = InputShard(
        path=name, bytes=scanned.bytes, mtime_ns=scanned.mtime_ns, rows=_NO_ROWS, classes=scanned.classes, checked=True,
        table=scanned.spec, others={f".{name}": every for name in scanned.others},
    )  # fmt: skip
    return shard, scanned.rows


def _read_tar(
    path: str, on_error: OnError, found: int, rejected: list[Rejected], *, facts: bool
) -> ForeignTar | None:  # fmt: skip
    """Return what stands in a tar, its refusals added to `rejected`; None when it is refused as a whole."""
    try:
        tar = read_tar(path, facts=facts)
    except (FormatError, UnsafeError) as error:
        if on_error == "fail":
            raise with_tar_remedy(error, skip=True) from None
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
        if self._path is None:
            assert self._sink is not None
            stored = self._sink.getvalue()
        else:
            with os_errors("cannot read what was found in the inputs", self._path):
                stored = pa.py_buffer(mapped(self._path))
        reader = pa.ipc.open_file(stored)
        return [reader.get_batch(number) for number in range(self._count)]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._writer is not None:
            self._writer.close()
        if self._file is not None:
            self._file.close() if kind is None else self._file.discard()
