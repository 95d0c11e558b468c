"""MosaicML's MDS: `index.json` and shards, read by `streaming`'s own reader, without its caches and processes."""

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
from shardkit.converting.compressed import MAX_BYTES, CompressedFiles
from shardkit.errors import FormatError, UnsafeError
from shardkit.escaping import escape

__all__ = ["MdsTable"]

_KINDS: dict[str, Kind] = {
    "jpeg": "image", "png": "image", "bytes": "bytes", "int": "int", "str": "text", "json": "json",
}  # fmt: skip


class MdsTable:
    """A local folder that `MDSWriter` wrote."""

    def __init__(self, path: str) -> None:
        """Open it.

        Raises:
            CapabilityError: `streaming` is not installed.
            FormatError: it is damaged.
            UnsafeError: a column of pickles, or a shard outside the folder.
        """
        index = dataset_index("mds", path)
        shards = read_object(index).get("shards")
        if not isinstance(shards, list) or not shards or not all(isinstance(shard, dict) for shard in shards):
            raise FormatError("no MDS dataset: its index names no shards", path=index)
        self.columns = _columns(shards[0], index)
        for what in ("column_names", "column_encodings", "column_sizes"):
            if any(shard.get(what) != shards[0][what] for shard in shards):
                raise FormatError("the shards have different columns", path=index)
        self.files = [index, *(_file(path, shard, index) for shard in shards)]
        try:
            from streaming.base.format.mds.reader import MDSReader
        except Exception as error:  # what it imports may fail in any way
            raise missing("MosaicML streaming", "mds", error) from error
        try:
            # Every column as the bytes that are stored: nothing is decoded as the index says.
            raw = {"column_encodings": ["bytes"] * len(self.columns)}
            self._readers = [MDSReader.from_json(path, "", {**shard, **raw}) for shard in shards]
        except (KeyError, TypeError, ValueError) as error:
            raise FormatError("an entry of the index is none of MDS's", path=index, found=str(error)[:200]) from error
        self._ends: list[int] = list(accumulate(shard["samples"] for shard in shards))
        self._shards = shards
        self._packed = CompressedFiles(lambda file: algorithms[file])
        algorithms = {file: shard.get("compression") for file, shard in zip(self.files[1:], shards, strict=True)}
        self.in_order = any(map(_is_packed, self.files[1:], shards))

    def __len__(self) -> int:
        """Return the number of samples."""
        return self._ends[-1]

    def row(self, number: int) -> dict[str, Any]:
        """Return a sample; raises what reader and decoders raise."""
        shard = bisect_right(self._ends, number)
        place = number - (self._ends[shard - 1] if shard else 0)
        reader, entry, file = self._readers[shard], self._shards[shard], self.files[1 + shard]
        if _is_packed(file, entry):
            data = self._packed.sample(file, place, entry["samples"], (entry["raw_data"]["bytes"],) * 2)
        else:
            data = reader.get_sample_data(place)
        raw = reader.decode_sample(data)
        return {column.name: _value(column.kind, raw[column.name]) for column in self.columns}


def _file(path: str, shard: dict[str, Any], index: str) -> str:
    """Return the path of a shard that is there, whole enough to hold as many samples as the index says."""
    samples, raw, packed = shard.get("samples"), shard.get("raw_data"), shard.get("zip_data")
    records = [record for record in (raw, packed) if isinstance(record, dict)]
    names = [record.get("basename") for record in records]
    if raw not in records or isinstance(samples, bool) or not isinstance(samples, int):
        raise FormatError("an entry of the index is none of MDS's", path=index)
    for name in names:
        if not isinstance(name, str):
            raise FormatError("an entry of the index is none of MDS's", path=index)
        if not stay_inside(name):
            raise UnsafeError("the index names a shard outside its folder", path=index, found=escape(name[:80]))
    files = [os.path.join(path, str(name)) for name in names]
    file = next((file for file in files if os.path.isfile(file)), files[0])
    if not _is_packed(file, shard):
        check_count(file, samples)
    elif not (isinstance(size := records[0].get("bytes"), int) and 0 <= 4 * samples < size):
        raise FormatError("an entry of the index states no size that its samples fit into", path=index)
    elif size > MAX_BYTES:
        raise UnsafeError("a shard that is too large for its offsets", path=file,
                          expected=f"at most {MAX_BYTES} bytes", found=size)  # fmt: skip
    return file


def _is_packed(file: str, shard: dict[str, Any]) -> bool:
    """Tell whether a shard's file is the compressed one; of two that are there the other is taken."""
    return os.path.basename(file) != os.path.basename(str(shard["raw_data"].get("basename")))


def _columns(shard: dict[str, Any], index: str) -> tuple[Column, ...]:
    names, encodings, sizes = (shard.get(f"column_{what}") for what in ("names", "encodings", "sizes"))
    lists = isinstance(names, list) and isinstance(encodings, list) and isinstance(sizes, list)
    if not lists or not len(names or ()) == len(encodings or ()) == len(sizes or ()) > 0:
        raise FormatError("no MDS dataset: its index names no columns", path=index)
    columns = []
    for name, encoding in zip(names or (), encodings or (), strict=True):
        if not isinstance(name, str) or not isinstance(encoding, str):
            raise FormatError("a column has a name and an encoding", path=index)
        if encoding.partition(":")[0] == "pkl":
            raise UnsafeError("a column of pickles: reading one would run what it says", path=index,
                              found=f"{escape(name)} ({escape(encoding)})")  # fmt: skip
        columns.append(Column(name, _KINDS.get(encoding, "other")))
    return tuple(columns)


def _value(kind: Kind, data: bytes) -> Any:  # noqa: ANN401 - of the kind's type
    if kind == "int":
        if len(data) != 8:
            raise ValueError(f"an int of {len(data)} bytes")
        return int.from_bytes(data, "little", signed=True)
    if kind == "text":
        return data.decode("utf-8")
    return json.loads(data) if kind == "json" else data
