"""Hugging Face `datasets`: a folder of `save_to_disk`, or of Arrow files, read through the library's memory maps."""

from __future__ import annotations

import os
from typing import Any

from shardkit.converting.columns import Column, class_names, missing, read_object, refuse_splits, stay_inside
from shardkit.converting.parquet import ParquetTable, parquet_files
from shardkit.errors import ConfigError, FormatError, ShardkitError, UnsafeError
from shardkit.escaping import escape

__all__ = ["HuggingFaceTable", "open_huggingface"]

_INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
_TEXTS = ("string", "large_string")
_VALUES = ("bool", "float16", "float32", "float64")
_BYTES = ("binary", "large_binary")


def open_huggingface(path: str) -> HuggingFaceTable | ParquetTable:
    """Open what lies in a folder, or a Parquet file.

    Raises:
        ShardkitError: as the tables do.
    """
    saved = ("state.json", "dataset_dict.json")
    if not any(os.path.exists(os.path.join(path, name)) for name in saved):
        files = parquet_files(path)
        if files:
            return ParquetTable(files)
    return HuggingFaceTable(path)


class HuggingFaceTable:
    """A local folder; no hub and no script is ever asked."""

    in_order = False

    def __init__(self, path: str) -> None:
        """Open it.

        Raises:
            CapabilityError: `datasets` is not installed.
            ConfigError: it holds several splits, or no Arrow files.
            FormatError: it is damaged.
            UnsafeError: its files lie outside the folder.
        """
        self.files = _files(path)
        try:
            import datasets
        except Exception as error:  # what it imports may fail in any way
            raise missing("Hugging Face datasets", "hf", error) from error
        try:
            if os.path.exists(os.path.join(path, "state.json")):
                found = datasets.load_from_disk(path, keep_in_memory=False)
            else:
                found = datasets.concatenate_datasets([datasets.Dataset.from_file(file) for file in self.files])
            found.data.validate(full=True)  # a damaged offset would lead anywhere in memory
            self.columns = tuple(_column(datasets, path, name, feature) for name, feature in found.features.items())
            for column in self.columns:
                if column.kind == "image":
                    found = found.cast_column(column.name, datasets.Image(decode=False))
            known = [column.name for column in self.columns if column.kind != "other"]
            self._rows = found.with_format(None).select_columns(known)
        except (MemoryError, ShardkitError):
            raise
        except Exception as error:  # whatever a damaged file makes of the library
            detail = escape(f"{type(error).__name__}: {error}"[:200])
            raise FormatError("datasets cannot open the dataset", path=path, found=detail) from error

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self._rows)

    def row(self, number: int) -> dict[str, Any]:
        """Return a row, images as the bytes that are stored; raises what the library raises."""
        row = self._rows[number]
        for column in self.columns:
            if column.kind == "image":
                # A path alone would name any file of the machine's: what it names is not opened.
                row[column.name] = (row[column.name] or {}).get("bytes")
        return dict(row)


def _files(path: str) -> list[str]:
    if os.path.exists(os.path.join(path, "dataset_dict.json")):
        splits = read_object(os.path.join(path, "dataset_dict.json")).get("splits")
        shown = [escape(str(name)[:40]) for name in splits] if isinstance(splits, list) else []
        raise ConfigError("a folder of several splits", path=path, found=", ".join(shown[:8]),
                          remedy="convert one, e.g. hf:DIR/train")  # fmt: skip
    state = os.path.join(path, "state.json")
    if os.path.exists(state):
        listed = read_object(state).get("_data_files")
        if not isinstance(listed, list) or not listed or not all(isinstance(each, dict) for each in listed):
            raise FormatError("the dataset names no files", path=state)
        stated = [str(each.get("filename")) for each in listed]
        for name in stated:
            if not stay_inside(name):
                raise UnsafeError("the dataset names a file outside its folder", path=state, found=escape(name[:80]))
        return [_there(os.path.join(path, name)) for name in stated]
    names = sorted(name for name in os.listdir(path) if name.endswith(".arrow"))
    if not names:
        refuse_splits("hf", path, _holds_files)
        raise ConfigError("no dataset of Hugging Face's", path=path, expected="save_to_disk's, Arrow or Parquet files",
                          remedy="name the folder of the files; one of images is for shardkit pack")  # fmt: skip
    return [_there(os.path.join(path, name)) for name in names]


def _holds_files(folder: str) -> bool:
    return any(name == "state.json" or name.endswith((".arrow", ".parquet")) for name in os.listdir(folder))


def _there(file: str) -> str:
    if not os.path.isfile(file):
        raise FormatError("a file of the dataset is not there", path=file)
    return file


def _column(datasets: Any, path: str, name: str, feature: Any) -> Column:  # noqa: ANN401 - the library has no types
    if isinstance(feature, datasets.Image):
        return Column(name, "image")
    if isinstance(feature, datasets.ClassLabel):
        return Column(name, "class", class_names(feature.names, path))
    kind = feature.dtype if isinstance(feature, datasets.Value) else None
    if kind in _INTEGERS:
        return Column(name, "int")
    if kind in _TEXTS:
        return Column(name, "text")
    if kind in _BYTES:
        return Column(name, "bytes")
    return Column(name, "json" if kind in _VALUES else "other")
