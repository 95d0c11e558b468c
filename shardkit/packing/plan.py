"""Which source goes into which shard, and where: decided before anything is written.

Pure, vectorised, and in bounded memory: the plan of ten million sources is their table, one permutation and one
64-bit hash a key; it then lies in an Arrow file with one record batch a shard, which is all that a worker opens.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from json.encoder import encode_basestring
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from shardkit.errors import ConfigError, SourceError
from shardkit.escaping import escape
from shardkit.format.checksum import hash64
from shardkit.format.keys import key_from_path, source_from_path
from shardkit.format.layout import sample_bytes, shard_bytes
from shardkit.format.remedy import remedy_without_manifest
from shardkit.format.tar import BLOCK
from shardkit.packing.cuts import cut_shards, shard_ends
from shardkit.packing.refusals import every_refused, first_refused
from shardkit.packing.scan import names_taken
from shardkit.running.sorted_numbers import repeated, sorted_pieces
from shardkit.running.spool import spans, spooled
from shardkit.splitmix import finalise, unfinalise

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardkit.format.checksum import Digest
    from shardkit.packing.options import KeyRule, PackOptions, ShardOptions
    from shardkit.packing.scan import Sources

__all__ = [
    "PLAN_SCHEMA",
    "Plan",
    "arrange",
    "cls_payload",
    "json_payload",
    "make_plan",
    "plan_batches",
    "shard_name",
    "update_identity",
]

Ints = npt.NDArray[np.int64]

PLAN_SCHEMA = pa.schema(
    [
        pa.field("key", pa.large_utf8()),
        pa.field("path", pa.large_binary()),
        pa.field("label", pa.int32()),
        pa.field("size", pa.int64()),
        pa.field("mtime_ns", pa.int64()),
        pa.field("json", pa.large_binary()),  # payload of the json member, or null for none
        pa.field("number", pa.int64()),
    ]
)
_ROWS = 1 << 14
"""Sources that are Python objects at a time."""
_REMEDIES = {"no-class": "give --labels none to pack them without a class", "too-large": "give a larger --max-bytes"}
"""Of sources that are refused before they are read, by reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Where every source goes."""

    order: Ints
    """int64 [n]: row of the source table for each position of the dataset."""
    bounds: Ints
    """int64 [shards + 1]: shard s holds the positions from bounds[s] to bounds[s + 1]."""
    bytes: Ints
    """int64 [shards]: size of each shard if nothing is refused, changed or re-encoded."""
    payload: int
    """Bytes of all images."""

    @property
    def shards(self) -> int:
        """Number of shards."""
        return len(self.bounds) - 1


def shard_name(dataset: str, number: int) -> str:
    """Return the file name of a shard.

    >>> shard_name("photos", 3)
    'photos-000003.tar'
    """
    return f"{dataset}-{number:06d}.tar"


def cls_payload(label: int) -> bytes:
    """Return the payload of a cls member: ASCII decimal, no newline."""
    return b"%d" % label


def json_payload(path: bytes, class_name: str | None, metadata: bytes | None) -> bytes:
    """Return the payload of a json member: the source, the class, then the list's further columns.

    >>> json_payload(b"a/b.jpg", "a", b'{"caption":"x"}')
    b'{"source":"a/b.jpg","class":"a","caption":"x"}'
    """
    text = '{"source":' + encode_basestring(source_from_path(path))
    if class_name is not None:
        text += ',"class":' + encode_basestring(class_name)
    return text.encode() + (b"}" if metadata is None else b"," + metadata[1:])


def make_plan(sources: Sources, options: PackOptions) -> Plan:
    """Order the sources and cut the order into shards of nearly equal payload under the limit.

    Raises:
        ConfigError: no source at all, or two sources with one key.
        SourceError: every source is refused already.
        UnsafeError: more shards than a million.
    """
    size: Ints = sources.table["size"].to_numpy()
    if not len(size):
        raise _nothing_to_pack(sources)
    _check_keys(sources, options.key)
    return arrange(size, _small_bytes(sources), options)


def arrange(size: Ints, small: Ints, options: ShardOptions, folder: bytes | None = None) -> Plan:
    """Order samples and cut the order into shards of nearly equal payload under the limit.

    Args:
        size: int64 [n], payload bytes of each image, in source order; at least one.
        small: int64 [n], bytes of each sample's cls and json members with their headers.
        options: `shuffle`, `seed`, `align` and the size of shards count here.
        folder: for columns that memory need not hold; None keeps them there.

    Raises:
        ConfigError: more shards than images are demanded.
        UnsafeError: more shards than a million.
        ShardkitError: the folder cannot be written.
    """
    count = len(size)
    if options.shuffle:
        order = spooled(np.int64, folder, _shuffled(count, options.seed, folder))
        size, small = (spooled(np.int64, folder, (column[order[some]] for some in spans(count)))
                       for column in (size, small))  # fmt: skip
    else:
        order = spooled(np.int64, folder, (np.arange(some.start, some.stop) for some in spans(count)))
    each = spooled(np.int64, folder, _bytes_of_each(size, small, options.align))
    bounds = cut_shards(size, small, each, options)
    ends = shard_ends(size, small, each, bounds, options.align)
    bytes_ = np.array([shard_bytes(end, options.align) for end in ends.tolist()], np.int64)
    return Plan(order=order, bounds=bounds, bytes=bytes_, payload=int(size.sum()))


def plan_batches(sources: Sources, plan: Plan, key: KeyRule) -> Iterator[pa.RecordBatch]:
    """Yield the plan of each shard as one record batch of `PLAN_SCHEMA`."""
    for first, last in pairwise(plan.bounds.tolist()):
        pieces = (plan.order[i : min(i + _ROWS, last)] for i in range(first, last, _ROWS))
        batches = [_plan_rows(sources, rows, key) for rows in pieces]
        yield pa.Table.from_batches(batches, PLAN_SCHEMA).combine_chunks().to_batches()[0]


def _plan_rows(sources: Sources, rows: Ints, key: KeyRule) -> pa.RecordBatch:
    names = sources.classes
    part = sources.table.take(pa.array(rows)).to_pydict()
    paths, labels = part["path"], part["label"]
    keys = [_key(key, path, row) for path, row in zip(paths, rows.tolist(), strict=True)]
    jsons = [
        None if label is not None and metadata is None
        else json_payload(path, names[label] if names and label is not None else None, metadata)
        for path, label, metadata in zip(paths, labels, part["metadata"], strict=True)
    ]  # fmt: skip
    numbers = [number or 0 for number in part["number"]]
    columns = [keys, paths, labels, part["size"], part["mtime_ns"], jsons, numbers]
    arrays = [pa.array(c, kind) for c, kind in zip(columns, PLAN_SCHEMA.types, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=PLAN_SCHEMA)


def update_identity(batch: pa.RecordBatch, full: Digest, portable: Digest) -> None:
    """Add a shard's plan to two digests of the source list: with the sources' times and without.

    Two copies of a tree agree in the second; a resumed pack must agree in the first.
    """
    for first in range(0, batch.num_rows, _ROWS):
        columns = batch.slice(first, _ROWS).to_pydict()
        texts = [b"\0".join(text or b"" for text in columns[name]) for name in ("path", "json")]
        labels = np.array([-1 if label is None else label for label in columns["label"]], "<i8")
        for part in (*texts, np.array(columns["size"], "<i8").tobytes(), labels.tobytes()):
            portable.update(b"%d:" % len(part) + part)
            full.update(b"%d:" % len(part) + part)
        full.update(np.array(columns["mtime_ns"], "<i8").tobytes())


def _nothing_to_pack(sources: Sources) -> ConfigError | SourceError:
    if sources.refused:
        return every_refused(sources.refused, sources.root, _REMEDIES.get(first_refused(sources.refused).reason))
    kinds = [f"{count} {kind}" for kind, count in sources.skipped.most_common(5)]
    remedy = names_taken(sources.skipped)
    if sources.skipped[".tar"]:
        remedy = remedy_without_manifest([".tar"]) or remedy
    return ConfigError("there is no JPEG to pack", path=sources.root, found=", ".join(kinds) or "nothing",
                       remedy=remedy)  # fmt: skip


def _key(rule: KeyRule, path: bytes, row: int) -> str:
    if rule == "index":
        return f"{row:09d}"
    return key_from_path(path.rpartition(b"/")[2] if rule == "stem" else path)


def _check_keys(sources: Sources, rule: KeyRule) -> None:
    """Refuse two sources with one key, by sorted hashes: eight bytes a key instead of the key."""
    if rule == "index":
        return
    paths = sources.table["path"]
    hashes = np.empty(len(paths), np.uint64)
    for first in range(0, len(paths), _ROWS):
        part = paths.slice(first, _ROWS).to_pylist()
        hashes[first : first + len(part)] = [hash64(_key(rule, path, 0).encode()) for path in part]
    twice = repeated(hashes, None)
    seen: dict[str, tuple[bytes, int]] = {}
    for row in np.flatnonzero(np.isin(hashes, twice)).tolist() if len(twice) else ():
        path = paths[row].as_py()
        key = _key(rule, path, row)
        if key in seen:
            raise _same_key(sources, key, seen[key], (path, row), rule)
        seen[key] = path, row


def _same_key(sources: Sources, key: str, one: tuple[bytes, int], two: tuple[bytes, int], rule: KeyRule) -> ConfigError:
    remedy = "rename one, or give --key index" if rule == "relpath" else "give --key relpath or --key index"
    found = f"{escape(one[0])} and {escape(two[0])}"
    numbers = [sources.table["number"][row].as_py() for _, row in (one, two)]
    if one[0] == two[0]:
        found, remedy = escape(one[0]), "remove one, or give --key index"
    if None not in numbers:
        found += f" in the rows {numbers[0] + 1} and {numbers[1] + 1} of the list"
    return ConfigError("two sources have one key", key=key, found=found, remedy=remedy)


def _shuffled(count: int, seed: int, folder: bytes | None) -> Iterator[Ints]:
    """Yield a permutation of [0, count) drawn from `seed`, the same for ever: rows sorted by a hash of their number.

    The hash is a bijection, so no two rows tie, and each hash says which row it is of. numpy's own shuffles may change
    between its releases, and with them every packed byte.
    """
    first = np.uint64(hash64(b"shardkit pack order %d" % seed))
    states = (np.arange(some.start, some.stop, dtype=np.uint64) + first for some in spans(count))
    hashes = spooled(np.uint64, folder, map(finalise, states))
    for piece in sorted_pieces(hashes, folder):
        yield (unfinalise(piece) - first).astype(np.int64)


def _bytes_of_each(size: Ints, small: Ints, align: int) -> Iterator[Ints]:
    """Yield `sample_bytes` of one run of all samples, span by span: it asks for no more than the sample before."""
    for some in spans(len(size)):
        first = max(some.start - 1, 0)
        yield sample_bytes(small[first : some.stop], size[first : some.stop], align)[some.start - first :]


def _small_bytes(sources: Sources) -> Ints:
    """Return the bytes of each source's cls and json members with their headers."""
    table, names = sources.table, sources.classes
    small = np.full(table.num_rows, 2 * BLOCK, np.int64)
    if not table["label"].null_count and table["metadata"].null_count == table.num_rows:
        return small
    for first in range(0, table.num_rows, _ROWS):
        part = table.slice(first, _ROWS).to_pydict()
        rows = zip(part["path"], part["label"], part["metadata"], strict=True)
        for row, (path, label, metadata) in enumerate(rows, first):
            if label is None or metadata is not None:
                text = json_payload(path, names[label] if names and label is not None else None, metadata)
                small[row] = BLOCK - (-len(text) // BLOCK) * BLOCK + (0 if label is None else 2 * BLOCK)
    return small
