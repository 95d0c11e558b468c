"""LitData: `index.json` and chunks, whose items are split by `litdata`'s own loader, without its caches and threads."""

from __future__ import annotations

import json
import os
from bisect import bisect_right
from itertools import accumulate
from typing import Any

from shardkit.converting.columns import (
    Column,
    Kind,
    check_count,
    dataset_index,
    missing,
    read_object,
    stay_inside,
)
from shardkit.converting.compressed import MAX_BYTES, BoundedZstd, CompressedFiles
from shardkit.converting.litdata_footer import LitDataFooter, has_footer
from shardkit.errors import ConfigError, FormatError, UnsafeError
from shardkit.escaping import escape

__all__ = ["LitDataTable"]

_KINDS: dict[str, Kind] = {"jpeg": "image", "bytes": "bytes", "int": "int", "str": "text"}
_FORMATS = {"int": "int", "text": "str"}
_FRAMED_COUNT = 12
"""Offset of the number of samples in a chunk of frames; in every other it is the first."""
_PICKLES = ("pickle", "graph")
_LEAF: dict[str, object] = {"type": None, "context": None, "children_spec": []}


class LitDataTable:
    """A local folder that `litdata.optimize` wrote, of samples that are flat dicts."""

    def __init__(self, path: str) -> None:
        """Open it.

        Raises:
            CapabilityError: `litdata` is not installed.
            ConfigError: it is encrypted, of tokens, or of samples that are no flat dicts.
            FormatError: it is damaged.
            UnsafeError: a column of pickles, or a chunk outside the folder.
        """
        index = dataset_index("litdata", path)
        document = read_object(index)
        config, chunks = document.get("config"), document.get("chunks")
        if not isinstance(config, dict) or not isinstance(chunks, list) or not chunks:
            raise FormatError("no LitData dataset: its index names no chunks", path=index)
        if config.get("encryption"):
            raise ConfigError("a LitData dataset with encryption is not converted", path=index,
                              remedy="write it without by litdata.optimize")  # fmt: skip
        if not isinstance(config.get("compression"), str | None):
            raise FormatError("the index names no compression", path=index, expected="e.g. \"zstd\"",
                              found=ascii(config["compression"])[:40])  # fmt: skip
        self.columns = _columns(config, index)
        self.in_order = bool(config.get("compression"))
        level = (config.get("compression_level") or "chunk") if self.in_order else None
        whole = level == "chunk"
        self.files = [index, *_chunks(path, chunks, index, level)]
        try:
            from litdata.streaming.item_loader import PyTreeLoader
            from litdata.streaming.serializers import BytesSerializer, IntegerSerializer, StringSerializer
            from litdata.utilities._pytree import treespec_loads
        except Exception as error:  # what it imports may fail in any way
            raise missing("LitData", "litdata", error) from error
        self._ends: list[int] = list(accumulate(chunk["chunk_size"] for chunk in chunks))
        formats = [_FORMATS.get(column.kind, "bytes") for column in self.columns]
        compression = {name: config.get(name) for name in ("compression", "compression_level")}
        self._packed = CompressedFiles(lambda _: config["compression"]) if whole else None
        self._chunks = chunks
        self._footer: LitDataFooter | None = None
        self._footers = [level != "batch" and has_footer(file) for file in self.files[1:]]
        self._loader = PyTreeLoader()
        try:
            self._loader.setup(
                {"data_format": formats, "data_spec": treespec_loads(config["data_spec"])} | compression, chunks,
                {"bytes": BytesSerializer(), "int": IntegerSerializer(), "str": StringSerializer()},
            )  # fmt: skip
        except Exception as error:  # what it makes of an index that is none of its own
            raise FormatError("an entry of the index is none of LitData's", path=index,
                              found=escape(str(error)[:200])) from error  # fmt: skip
        self._loader._framed_decompressor = BoundedZstd()
        self._loader.set_mmap_allowed_chunks(set(range(len(chunks))))  # else each row reads its chunk whole

    def __len__(self) -> int:
        """Return the number of samples."""
        return self._ends[-1]

    def row(self, number: int) -> dict[str, Any]:
        """Return a sample; raises what the loader raises."""
        chunk = bisect_right(self._ends, number)
        file = self.files[1 + chunk]
        begin = self._ends[chunk - 1] if chunk else 0
        entry = self._chunks[chunk]
        if self._footers[chunk]:
            if self._footer is None or self._footer.file != file:
                names = [column.name for column in self.columns]
                self._footer = LitDataFooter(file, entry["chunk_size"], names)
            return self._footer.row(number - begin)
        if self._packed is not None:
            header = 4 * (entry["chunk_size"] + 2)
            sizes = (header, entry["chunk_bytes"] + header)  # older writers did not count the header
            data = self._packed.sample(file, number - begin, entry["chunk_size"], sizes)
            unpacked: dict[str, Any] = self._loader.load_item_from_bytes(data, chunk)
            return unpacked
        row: dict[str, Any] = self._loader.load_item_from_chunk(number, chunk, file, begin, os.path.getsize(file))
        return row


def _chunks(path: str, chunks: list[Any], index: str, level: object) -> list[str]:
    """Return the paths of the chunks, compressed as `level` says: as a whole (`chunk`), in frames (`batch`), or not."""
    files = []
    for chunk in chunks:
        name, count = (chunk.get("filename"), chunk.get("chunk_size")) if isinstance(chunk, dict) else (None, None)
        if (
            not isinstance(name, str)
            or isinstance(count, bool)
            or not isinstance(count, int)
            or not 0 <= count < 1 << 32
        ):
            raise FormatError("an entry of the index is none of LitData's", path=index)
        if not stay_inside(name):
            raise UnsafeError("the index names a chunk outside its folder", path=index, found=escape(name[:80]))
        files.append(os.path.join(path, name))
        if level != "chunk":
            check_count(files[-1], count, _FRAMED_COUNT if level == "batch" else 0)
        elif not os.path.isfile(files[-1]):
            raise FormatError("a file of the dataset is not there", path=files[-1])
        elif not (isinstance(size := chunk.get("chunk_bytes"), int) and 4 * count <= size):
            raise FormatError("an entry of the index states no size that its samples fit into", path=index)
        elif size > MAX_BYTES:
            raise UnsafeError("a chunk that is too large for its offsets", path=files[-1],
                              expected=f"at most {MAX_BYTES} bytes", found=size)  # fmt: skip
    return files


def _columns(config: dict[str, Any], index: str) -> tuple[Column, ...]:
    """Return the columns; the structure of a sample is held against what a flat dict has before anything unpacks it."""
    formats = config.get("data_format")
    if not isinstance(formats, list) or not all(isinstance(each, str) for each in formats):
        raise FormatError("no LitData dataset: its index names no formats", path=index)
    for each in formats:
        if each.split(":")[0] in _PICKLES or each.split(":")[-1] in _PICKLES:
            raise UnsafeError("a column of pickles: reading one would run what it says", path=index,
                              found=escape(each[:80]))  # fmt: skip
    try:
        _, spec = json.loads(config["data_spec"])
        flat = spec["type"] == "builtins.dict" and spec["children_spec"] == [_LEAF] * len(formats)
        names = json.loads(spec["context"]) if flat else None
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise FormatError("the index says nothing about the samples", path=index, found=str(error)[:200]) from error
    loader = config.get("item_loader") or "PyTreeLoader"
    if not isinstance(names, list) or len(names) != len(formats) or loader != "PyTreeLoader":
        raise ConfigError("only samples that are flat dicts are converted", path=index,
                          expected='e.g. {"image": ..., "label": 3}')  # fmt: skip
    if not all(isinstance(name, str) for name in names):
        raise FormatError("a column has a name", path=index)
    return tuple(Column(name, _KINDS.get(each, "other")) for name, each in zip(names, formats, strict=True))
