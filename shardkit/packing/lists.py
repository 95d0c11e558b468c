"""The sources: a list (`.csv`, `.jsonl`, `.parquet`) with `path`, `label` and any further columns."""

from __future__ import annotations

import csv
import json
import math
import os
import re
import stat
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from shardkit.errors import ConfigError, ShardkitError, from_os_error
from shardkit.escaping import escape
from shardkit.format.keys import source_from_path
from shardkit.format.strict_json import refuse_deep
from shardkit.packing.classes import number_classes
from shardkit.packing.refusals import Refusal
from shardkit.packing.scan import LIST_SCHEMA, SourceRows, Sources

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from typing import TextIO

    from shardkit.packing.options import PackOptions

__all__ = ["LIST_EXTENSIONS", "scan_list"]

LIST_EXTENSIONS = (b".csv", b".jsonl", b".parquet")
RESERVED = ("source", "class")
"""Names that the json member uses itself."""
_MAX_LABEL = 2**31 - 1
_MAX_METADATA_BYTES = 16 << 20
_WHOLE = re.compile(r"(-?[0-9]+)(?:\.0+)?")
"""A label number; with a fraction of 0 where a tool made the column a float because labels are missing."""
_BATCH_ROWS = 1 << 12
_BUFFER_BYTES = 1 << 20

Row = dict[str, Any]  # Any: a cell of a user's list


def scan_list(path: bytes, options: PackOptions) -> Sources:
    """Read a list; relative paths start from its folder.

    Raises:
        ConfigError: a missing column, a cell that cannot be used, an unknown class; names the row.
        ShardkitError: the list itself cannot be read.
    """
    if options.labels == "dir":
        raise ConfigError("--labels dir needs a folder; a list has --labels column or none", path=path)
    if not os.path.isfile(path):  # a FIFO could not be read twice
        raise ConfigError("the list is not a regular file", path=path)
    root = os.path.dirname(os.path.abspath(path))
    names = set() if options.labels == "none" else _label_names(path)
    if not names and options.labels == "column":
        raise ConfigError("the list has no label in a column 'label'", path=path, remedy="add it, or --labels none")
    if not names and options.classes is not None:
        raise ConfigError("a class list, but no labels", path=path, remedy="leave the class list away")
    numbers = _class_numbers(names, path, options)
    rows, refused = SourceRows(LIST_SCHEMA), []
    for number, row in enumerate(_rows(path)):
        name = _path_of(row, number, path)
        label = _label_of(row, number, path, numbers, options) if names else None
        status = _status(root, name, number)
        if isinstance(status, Refusal):
            refused.append(status)
        elif status.st_size > options.max_bytes:
            detail = f"{status.st_size} bytes; at most {options.max_bytes}"
            refused.append(Refusal(number, name, "too-large", detail))
        else:
            rows.add(name, label, status, _metadata_of(row, number, path, drop_label=bool(names)), number)
    classes = options.classes if numbers is None else tuple(numbers)
    return Sources(root=root, table=rows.table(), classes=classes, refused=refused)


def _rows(path: bytes, only: Sequence[str] | None = None) -> Iterator[Row]:
    """Yield the rows; a column outside `only` may be left away."""
    extension = os.path.splitext(path)[1].lower()
    try:
        if extension == b".parquet":
            yield from _parquet_rows(path, only)
        else:
            with open(path, encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
                yield from _csv_rows(file, path) if extension == b".csv" else _jsonl_rows(file, path)
    except ShardkitError:
        raise
    except OSError as error:
        raise from_os_error(error, "cannot read the list", path=path) from error


def _csv_rows(file: TextIO, path: bytes) -> Iterator[Row]:
    reader = csv.reader(file, strict=True)
    try:
        names = next(reader, [])
        _refuse_twins(names, path)
        for cells in reader:
            if cells and len(cells) != len(names):
                what = f"line {reader.line_num} of the list has another number of cells than its first line"
                raise ConfigError(what, path=path, expected=len(names), found=len(cells))
            if cells:
                yield {name: cell for name, cell in zip(names, cells, strict=True) if cell or name == "path"}
    except csv.Error as error:
        raise ConfigError(f"line {reader.line_num} of the list is not CSV: {error}", path=path) from error


def _jsonl_rows(file: TextIO, path: bytes) -> Iterator[Row]:
    for number, line in enumerate(file, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"line {number} of the list is not JSON: {error}", path=path) from error
        if not isinstance(row, dict):
            raise ConfigError(f"line {number} of the list is not a JSON object", path=path)
        yield row


def _parquet_rows(path: bytes, only: Sequence[str] | None) -> Iterator[Row]:
    try:
        # The open file, not its name: Arrow takes only names that are UTF-8.
        with open(path, "rb") as data, pq.ParquetFile(data, buffer_size=_BUFFER_BYTES, pre_buffer=False) as file:
            schema = file.schema_arrow
            _refuse_twins(schema.names, path)
            for field in schema:
                if field.name != "path" and field.type in (pa.binary(), pa.large_binary()):
                    what = f"the column {field.name!r} of the list holds bytes, which JSON cannot"
                    raise ConfigError(what, path=path, remedy="leave it away, or make it text")
            columns = None if only is None else [name for name in only if name in schema.names] or None
            for batch in file.iter_batches(_BATCH_ROWS, columns=columns):
                readable = {name: _readable(batch[name]) for name in batch.schema.names}
                yield from pa.RecordBatch.from_pydict(readable).to_pylist()
    except (pa.ArrowException, ValueError, OSError) as error:
        if isinstance(error, ShardkitError) or getattr(error, "errno", None):
            raise
        what = (str(error).splitlines() or ["it is damaged"])[0][:200]
        raise ConfigError(f"the list cannot be read as Parquet: {what}", path=path) from error


def _readable(column: pa.Array) -> pa.Array:
    """Return a column whose values Python takes alike everywhere.

    What becomes of times and durations depends on pandas, and of half floats on Arrow's version: so times are text,
    durations are numbers of their unit, half floats are floats (and their nulls NaN, which is null at the end).
    """
    if column.type == pa.float16():
        return pa.array(column.to_numpy(zero_copy_only=False).astype(np.float32))
    if pa.types.is_duration(column.type):
        return column.cast(pa.int64())
    return column.cast(pa.string()) if pa.types.is_temporal(column.type) else column


def _refuse_twins(names: list[str], path: bytes) -> None:
    twins = {name for name in names if names.count(name) > 1} if len(set(names)) < len(names) else ()
    for name in sorted(twins):
        raise ConfigError(f"the list has two columns {name!r}", path=path, remedy="rename or remove one")


def _label_names(path: bytes) -> set[str]:
    """Return the labels that occur, as text."""
    names: set[str] = set()
    number = -1
    for number, row in enumerate(_rows(path, only=("path", "label"))):
        name = _label_name(row, number, path)
        if name is not None:
            names.add(name)
    if number < 0:
        raise ConfigError("the list has no rows", path=path)
    return names


def _class_numbers(names: set[str], path: bytes, options: PackOptions) -> dict[str, int] | None:
    """Return class name to label, or None where the labels are numbers.

    A column whose every label is a whole number holds label numbers, unless the class list names them.
    """
    numeric = all(map(_WHOLE.fullmatch, names))
    if numeric and not (options.classes and names <= set(options.classes)):
        return None
    try:
        return number_classes(list(names), options.classes)
    except ConfigError as error:
        error.path = path
        raise


def _label_name(row: Row, number: int, path: bytes) -> str | None:
    """Return a row's label as text, written as class names are everywhere; None when it has none."""
    label = row.get("label")
    if isinstance(label, float) and (math.isnan(label) or label.is_integer()):
        label = None if math.isnan(label) else int(label)
    if label is None or label == "":
        return None
    if isinstance(label, bool) or not isinstance(label, int | str) or (isinstance(label, int) and label < 0):
        what = f"{_row(number)}: a label is a whole number from 0 on, or a class name"
        raise ConfigError(what, path=path, found=repr(label)[:80])
    try:
        return source_from_path(str(label).encode("utf-8", "surrogateescape"))
    except UnicodeEncodeError as error:
        raise ConfigError(f"{_row(number)} has a label that is not text", path=path, found=ascii(label)) from error


def _label_of(row: Row, number: int, path: bytes, numbers: dict[str, int] | None, options: PackOptions) -> int | None:
    name = _label_name(row, number, path)
    if name is None:
        return None
    if numbers is not None:
        if name not in numbers:
            raise ConfigError("the list changed while it was read", path=path)
        return numbers[name]
    limit = _MAX_LABEL if options.classes is None else len(options.classes) - 1
    whole = _WHOLE.fullmatch(name)
    # Python refuses to read thousands of digits; ten are too many already.
    value = int(whole[1]) if whole and len(whole[1]) < 100 else -1
    if not 0 <= value <= limit:
        what = f"{_row(number)} has a label that is no class"
        raise ConfigError(what, path=path, expected=f"0 to {limit}", found=escape(name)[:80])
    return value


def _path_of(row: Row, number: int, path: bytes) -> bytes:
    name = row.get("path")
    if isinstance(name, bytes):
        return name
    if not isinstance(name, str):
        columns = "columns " + ", ".join(list(map(ascii, row))[:8])
        if "path" not in row:
            raise ConfigError(
                f"{_row(number)} has no column 'path'", path=path, found=columns[:200],
                remedy="name the columns, commas between them, in a .csv's first line, or in each row of a .jsonl",
            )  # fmt: skip
        raise ConfigError(f"{_row(number)} has no text in column 'path'", path=path, found=columns[:200])
    try:
        return name.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError as error:
        raise ConfigError(f"{_row(number)} has a path that is not text", path=path, found=ascii(name)[:80]) from error


def _status(root: bytes, name: bytes, number: int) -> os.stat_result | Refusal:
    if not name or b"\0" in name:
        return Refusal(number, name, "bad-path", "empty" if not name else "it has a NUL byte")
    try:
        status = os.stat(os.path.join(root, name))
    except OSError as error:
        reason = "missing" if isinstance(error, FileNotFoundError | NotADirectoryError) else "unreadable"
        return Refusal(number, name, reason, error.strerror or str(error))
    if not stat.S_ISREG(status.st_mode):
        return Refusal(number, name, "not-a-file", "a folder or a special file")
    return status


def _metadata_of(row: Row, number: int, path: bytes, *, drop_label: bool) -> bytes | None:
    kept = {name: value for name, value in row.items() if name != "path" and not (drop_label and name == "label")}
    if not kept:
        return None
    for name in RESERVED:
        if name in kept:
            what = f"the column {name!r} of the list would hide shardkit's own"
            raise ConfigError(what, path=path, remedy="rename it")
    try:
        text = json.dumps(_finite(kept), ensure_ascii=False, allow_nan=False, separators=(",", ":"), default=_text_of)
        refuse_deep(text)
        data = text.encode("utf-8")
    except UnicodeEncodeError as error:
        what = f"{_row(number)} has text that is not UTF-8"
        raise ConfigError(what, path=path, found=ascii(error.object)[:80], remedy="save the list as UTF-8") from error
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"{_row(number)} cannot be kept as JSON: {error}", path=path) from error
    if len(data) > _MAX_METADATA_BYTES:
        raise ConfigError(f"{_row(number)} is too large", path=path, expected=f"at most {_MAX_METADATA_BYTES} bytes",
                          found=f"{len(data)} bytes", remedy="leave a column away")  # fmt: skip
    return data


def _finite(value: object) -> object:
    """Return a cell with null for NaN and infinity, which JSON does not have."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {str(name): _finite(item) for name, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list | tuple) else value


def _text_of(value: object) -> str:
    if isinstance(value, bytes):
        raise TypeError("a column of bytes")
    return str(value)  # dates, decimals, UUIDs: as they print


def _row(number: int) -> str:
    """Name a row as a person counts: from 1, without the line of column names."""
    return f"row {number + 1} of the list"
