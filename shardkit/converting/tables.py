"""Other frameworks' datasets as inputs: their columns chosen, their rows as index rows, their pictures by number.

Rows are read twice, as the library gives them: once for sizes, labels and checksums, and once for the images.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import pyarrow as pa

from shardkit.converting.facts import NOT_LOOKED_AT, facts_of, wants_facts
from shardkit.converting.huggingface import open_huggingface
from shardkit.converting.litdata import LitDataTable
from shardkit.converting.mds import MdsTable
from shardkit.converting.row_names import RowNames, stored_type
from shardkit.errors import CapabilityError, ConfigError, FormatError, ShardkitError, from_os_error
from shardkit.escaping import escape
from shardkit.format.checksum import crc32c
from shardkit.format.index import SampleRow, sample_batch
from shardkit.format.keys import source_from_path
from shardkit.format.strict_json import refuse_deep
from shardkit.packing.refusals import Refusal, RefusedError
from shardkit.running.arrow_start import with_pandas

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from shardkit.converting.columns import Column, ForeignTable, Kind
    from shardkit.converting.options import ConvertOptions
    from shardkit.format.index import RecordBatch

__all__ = ["TABLES", "OpenTables", "ScannedTable", "TableKind", "TableSpec", "scan_table"]

TableKind = Literal["mds", "litdata", "hf"]
TABLES: dict[str, Callable[[str], ForeignTable]] = {"mds": MdsTable, "litdata": LitDataTable, "hf": open_huggingface}
_PICTURES: tuple[Kind, ...] = ("image", "bytes")
_LABELS: tuple[Kind, ...] = ("int", "class")
_KEYS: tuple[Kind, ...] = ("text", "int")
_JSONS: tuple[Kind, ...] = ("text",)
_MAX_LABEL = (1 << 31) - 1
_ROWS = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class TableSpec:
    """A foreign dataset and what of it is what; crosses to worker processes."""

    kind: str
    path: str
    image: str
    label: str | None
    key: str | None
    metadata: tuple[str, ...]
    text: str | None = None
    """Column that holds the json member as it is."""

    @property
    def name(self) -> bytes:
        """What stands for the path of a shard."""
        return os.fsencode(f"{self.kind}:{self.path}")

    def image_of(self, row: dict[str, Any]) -> bytes:
        """Return the image of a row.

        Raises:
            RefusedError: it has none.
        """
        data = row.get(self.image)
        if not isinstance(data, bytes | bytearray | memoryview):
            raise RefusedError("no-image", "the row holds no bytes of an image")
        return bytes(data)

    def json_of(self, row: dict[str, Any]) -> bytes:
        """Return the json member of a row: its other columns; nothing where there are none.

        Raises:
            RefusedError: JSON cannot hold them.
        """
        if self.text is not None:
            return _whole_text(row.get(self.text))
        if not self.metadata:
            return b""
        values = {name: row.get(name) for name in self.metadata}
        try:
            text = json.dumps(values, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
            refuse_deep(text)
            return text.encode("utf-8")
        except (TypeError, ValueError, RecursionError) as error:
            raise RefusedError("bad-json", f"JSON cannot hold the row: {str(error)[:160]}") from error


def _whole_text(value: object) -> bytes:
    if not isinstance(value, str | None):
        raise RefusedError("bad-json", f"the json column holds a {type(value).__name__}")
    try:
        return (value or "").encode("utf-8")
    except UnicodeEncodeError as error:
        raise RefusedError("bad-json", "the json column holds what is no UTF-8") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class ScannedTable:
    """What a foreign dataset holds."""

    spec: TableSpec
    rows: RecordBatch
    """`shardkit.format.index.SCHEMA`; a row's number is its offset."""
    classes: tuple[str, ...] | None
    bytes: int
    mtime_ns: int
    refused: list[tuple[str, Refusal]]
    """Key and refusal of what could not become a source."""
    others: tuple[str, ...]
    """Columns without a place."""


class OpenTables:
    """Foreign datasets, opened when they are first asked for."""

    def __init__(self, specs: Sequence[TableSpec]) -> None:
        """Take what there is; nothing is opened."""
        self._specs = {spec.name: spec for spec in specs}
        self._open: dict[bytes, ForeignTable] = {}

    def spec(self, name: bytes) -> TableSpec | None:
        """Return the foreign dataset of that name; None for a shard's path."""
        return self._specs.get(name)

    def row(self, name: bytes, number: int) -> dict[str, Any]:
        """Return a row.

        Raises:
            RefusedError: it cannot be read.
            ShardkitError: the dataset cannot be opened.
        """
        table = self._open.get(name)
        if table is None:
            table = self._open[name] = _opened(self._specs[name].kind, self._specs[name].path)
        return _row(table, number)


def _opened(kind: str, path: str) -> ForeignTable:
    with_pandas()  # the library that reads it may want it, here or in a worker
    try:
        return TABLES[kind](path)
    except (MemoryError, ShardkitError):
        raise
    except OSError as error:
        raise from_os_error(error, "cannot open a dataset", path=path) from error


def _row(table: ForeignTable, number: int) -> dict[str, Any]:
    try:
        return table.row(number)
    except (MemoryError, ShardkitError):
        raise
    except Exception as error:  # whatever a damaged file makes of the library
        raise RefusedError("unreadable", escape(f"{type(error).__name__}: {error}"[:160])) from error


def scan_table(kind: str, path: str, options: ConvertOptions, first: int) -> ScannedTable:
    """Read a foreign dataset once; `first` is the number of its first sample among those of all inputs.

    Raises:
        CapabilityError: its library is not installed, or memory is too little for it.
        ConfigError: which columns are meant is not clear.
        FormatError: it is damaged.
        UnsafeError: it holds pickles, or leads out of its folder.
        ShardkitError: the system failed a read.
    """
    try:
        return _scanned(_opened(kind, path), kind, path, options, first)
    except MemoryError as error:
        raise CapabilityError("too little memory to read the dataset", path=path) from error


def _scanned(table: ForeignTable, kind: str, path: str, options: ConvertOptions, first: int) -> ScannedTable:
    if not len(table):
        raise ConfigError("the dataset has no samples", path=path)
    if options.shuffle and table.in_order:
        raise ConfigError("rows that are packed together are read in order", path=path,
                          remedy="convert without --shuffle, then shuffle the result")  # fmt: skip
    spec, label = _chosen(table.columns, kind, path, options)
    width = max(9, len(str(len(table) - 1)))
    refused: list[tuple[str, Refusal]] = []
    facts = wants_facts(options.where)
    names, batches, rows, count = RowNames(), [], [], first
    folder = os.fsencode(f"{os.path.basename(path)}/")
    for number in range(len(table)):
        key = f"{number:0{width}d}"
        try:
            row = _row(table, number)
            key = key if spec.key is None else _key(row.get(spec.key))
            stated = None if label is None else _label(label, row[label.name])
            place = _place(folder, key)
            rows.append(_index_row(spec, row, number, key, stated, place, convert=options.convert, facts=facts))
            names.note(key)
            count += 1
        except RefusedError as error:
            refused.append((key, Refusal(count, _place(folder, key), error.reason, error.detail)))
        if len(rows) == _ROWS:
            batches.append(sample_batch(rows))
            rows = []
    batches = [names.named(batch) for batch in (*batches, sample_batch(rows))]
    merged = pa.Table.from_batches(batches).combine_chunks().to_batches()
    size, mtime = _state(table.files)
    others = tuple(column.name for column in table.columns if _has_no_place(column, spec))
    return ScannedTable(
        spec=spec, rows=merged[0] if merged else sample_batch([]), classes=None if label is None else label.classes,
        bytes=size, mtime_ns=mtime, refused=refused, others=others,
    )  # fmt: skip


def _index_row(
    spec: TableSpec, row: dict[str, Any], number: int, key: str, label: int | None, place: bytes, *, convert: bool,
    facts: bool,
) -> SampleRow:  # fmt: skip
    image, text = spec.image_of(row), spec.json_of(row)
    if len(image) >= 1 << 32 or len(text) >= 1 << 32:
        raise RefusedError("too-large", f"{max(len(image), len(text))} bytes")
    known = facts_of(lambda count: image[:count], len(image)) if facts else NOT_LOOKED_AT
    return SampleRow(
        key=key, label=label, offset=number, size=len(image), crc32c=crc32c(image), sample_offset=0, sample_size=0,
        json_offset=0, json_size=len(text), source=source_from_path(place),
        **{**known, "media_type": stored_type(image, convert=convert)},
    )  # fmt: skip


def _place(folder: bytes, key: str) -> bytes:
    return folder + key.encode("utf-8", "backslashreplace")


def _key(value: object) -> str:
    key = str(value) if isinstance(value, int | str) else ""
    if not key or "\0" in key:
        raise RefusedError("bad-path", "the key column holds no key")
    return key.encode("utf-8", "backslashreplace").decode()


def _label(column: Column, value: Any) -> int | None:  # noqa: ANN401 - checked here
    if value is None or (value == -1 and not isinstance(value, bool)):
        return None
    most = _MAX_LABEL if column.classes is None else len(column.classes) - 1
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= most:
        raise RefusedError("bad-label", f"the label is {ascii(value)[:40]}")
    return value


def _state(files: Sequence[str]) -> tuple[int, int]:
    """Return the bytes of some files and when the last was written."""
    try:
        states = [os.stat(file) for file in files]
    except OSError as error:
        raise from_os_error(error, "cannot look at a file of a dataset", path=error.filename) from error
    return sum(state.st_size for state in states), max(state.st_mtime_ns for state in states)


def _chosen(
    columns: Sequence[Column], kind: str, path: str, options: ConvertOptions
) -> tuple[TableSpec, Column | None]:
    """Return which columns are image, label, key and metadata.

    Raises:
        ConfigError: it is not clear, or a column that was named is not there, or of another kind.
    """
    if len({column.name for column in columns}) < len(columns):
        raise FormatError("two columns of one name", path=path)
    key = None if options.key_column is None else _named(columns, "key", options.key_column, _KEYS, path)
    image = _one(columns, "image", options.image_column, _PICTURES, path)
    if image is None:
        raise ConfigError("no column holds images", path=path, found=_shown(columns))
    text = None if options.json_column is None else _named(columns, "json", options.json_column, _JSONS, path)
    free = [column for column in columns if column is not key]
    label = None if options.label_column == "" else _one(free, "label", options.label_column, _LABELS, path)
    used = {column.name for column in (image, label, key) if column is not None}
    rest = [column.name for column in columns if column.name not in used and column.kind not in (*_PICTURES, "other")]
    rest = [] if text is not None else rest
    spec = TableSpec(
        kind=kind, path=path, image=image.name, label=None if label is None else label.name,
        key=None if key is None else key.name, metadata=tuple(rest),
        text=None if text is None else text.name,
    )  # fmt: skip
    return spec, label


def _one(
    columns: Sequence[Column], what: str, name: str | None, kinds: Sequence[Kind], path: str
) -> Column | None:  # fmt: skip
    if name is not None:
        return _named(columns, what, name, kinds, path)
    found = [column for column in columns if column.kind in kinds]
    if len(found) > 1:
        none = ", or '' for none" if what == "label" else ""
        raise ConfigError(f"several columns may be the {what}", path=path, found=_shown(found),
                          remedy=f"give --{what}-column{none}")  # fmt: skip
    return found[0] if found else None


def _named(columns: Sequence[Column], what: str, name: str, kinds: Sequence[Kind], path: str) -> Column:
    found = next((column for column in columns if column.name == name and column.kind in kinds), None)
    if found is None:
        raise ConfigError(f"no column {escape(name[:80])} that can be the {what}", path=path,
                          expected=" or ".join(kinds), found=_shown(columns))  # fmt: skip
    return found


def _shown(columns: Sequence[Column]) -> str:
    more = f" and {len(columns) - 12} more" if len(columns) > 12 else ""
    return ", ".join(f"{escape(column.name[:80])} ({column.kind})" for column in columns[:12]) + more


def _has_no_place(column: Column, spec: TableSpec) -> bool:
    if spec.text is not None:  # then nothing else goes into the json member
        return column.name not in (spec.image, spec.label, spec.key, spec.text)
    return column.name != spec.image and column.kind in (*_PICTURES, "other")
