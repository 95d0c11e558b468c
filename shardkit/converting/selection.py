"""Which samples are converted, into which part, under which key and label.

Columns of all samples may be larger than memory: pieces of them are looked at one after another, and what is found is
spooled.
"""

from __future__ import annotations

import itertools
import os
from collections import Counter
from dataclasses import dataclass
from fractions import Fraction
from json.encoder import encode_basestring
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from shardkit.converting.gather import final_key, member_path, numbers
from shardkit.converting.labels import LEFT_OUT, NO_LABEL, Relabelling
from shardkit.errors import ConfigError, SourceError
from shardkit.escaping import escape
from shardkit.format.checksum import hash64
from shardkit.format.class_names import class_numbers
from shardkit.format.expression import iter_masks
from shardkit.format.tar import BLOCK
from shardkit.format.where import parse_where, require_columns
from shardkit.packing.labels import LabelCount
from shardkit.packing.refusals import Refusal
from shardkit.running.sorted_numbers import repeated
from shardkit.running.spool import Spool, spans, spooled

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from shardkit.converting.gather import Gathered, InputShard
    from shardkit.converting.options import ConvertOptions

__all__ = ["Selection", "part_of_key", "select", "small_bytes"]

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
_SPLIT_SALT = b"shardkit split "
_ROWS = 1 << 14
_SHOWN = 5
_SUSPECTED = 4096
"""Hashes of two keys or more that are looked into at a time: of an input that is named twice all are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """What is converted."""

    classes: tuple[str, ...] | None
    labels: Ints
    """int64 [n], new label of every sample, kept or not; `NO_LABEL` for none."""
    parts: Mapping[str | None, Ints]
    """Part to the numbers of its samples, rising; one part None where nothing is split."""
    refused: Mapping[str | None, list[Refusal]]
    passed_over: Counter[str]
    """Samples that nobody asked for, further members of those that somebody did, and what in trees is no image by name,
    by kind."""

    def count_labels(self, part: str | None) -> LabelCount:
        """Return how many samples of a part have a label, and which classes none has."""
        count, ids = LabelCount(self.classes), self.parts[part]
        for some in spans(len(ids)):
            labels = self.labels[ids[some]]
            count.see(labels[labels != NO_LABEL])
        return count


def select(samples: Gathered, options: ConvertOptions) -> Selection:
    """Return what of the samples is converted.

    Raises:
        ConfigError: a condition on columns that the inputs do not fill, classes that disagree, a class without a new
            one, two samples with one key, members that have no place, or a part without a sample.
        SourceError: a part without a sample, since some were refused.
        ShardkitError: the folder of `Gathered` cannot be written.
    """
    passed_over = Counter(samples.skipped)
    asked_for = _asked_for(samples, options.where)
    passed_over["by --where"] = len(samples) - int(asked_for.sum())
    relabelling = Relabelling(options, [shard.classes for shard in samples.shards])
    labels = spooled(np.int64, samples.folder, _new_labels(samples, relabelling))
    chosen = spooled(np.bool_, samples.folder, (
        asked_for[some] & (labels[some] != LEFT_OUT) for some in spans(len(samples))
    ))  # fmt: skip
    passed_over["by --labels"] = len(samples) - passed_over["by --where"] - int(chosen.sum())
    _take_others(samples.others(chosen), options, passed_over)
    kept, large = _under(samples, chosen, options.max_bytes)
    names: list[str | None] = list(options.split) if options.split else [None]
    parts = dict(zip(names, _checked_keys(samples, kept, options), strict=True))
    refused = _refused(samples, large, options, names)
    for name, of_part in parts.items():
        if not len(of_part):
            raise _empty(samples, passed_over, refused, parts, name)
    return Selection(classes=relabelling.classes, labels=labels, parts=parts, refused=refused, passed_over=+passed_over)


def part_of_key(key: str, split: Mapping[str, str]) -> int:
    """Return the number of the part that a key belongs to, whatever other keys there are, and in every release.

    >>> part_of_key("cats/tom", {"train": "0.5", "val": "0.5"})
    0
    """
    draw = hash64(_SPLIT_SALT + key.encode())
    return next((number for number, edge in enumerate(_edges(split)) if draw < edge), len(split) - 1)


def _edges(split: Mapping[str, str]) -> list[int]:
    """Return the first hash behind each part."""
    edges, total = [], Fraction(0)
    for share in split.values():
        total += Fraction(share)
        edges.append(int(total * (1 << 64)))
    return edges


def _asked_for(samples: Gathered, where: str | None) -> Bools:
    if where is None:
        every = (np.ones(some.stop - some.start, np.bool_) for some in spans(len(samples)))
        return spooled(np.bool_, samples.folder, every)
    require_columns(where, samples.known)
    return spooled(np.bool_, samples.folder, _masks(samples, where))


def _masks(samples: Gathered, where: str) -> Iterator[Bools]:
    """Yield which samples a condition asks for, run by run; a class's name means what it does in the sample's input."""
    for _, run in itertools.groupby(samples.shards, lambda shard: id(shard.classes)):
        shards = list(run)
        condition = parse_where(where, number_of=class_numbers(shards[0].classes, shards[0].path))
        yield from (mask for (mask,) in iter_masks([shard.rows for shard in shards], [condition]))


def _new_labels(samples: Gathered, relabelling: Relabelling) -> Iterator[Ints]:
    for shard, _, rows in samples.pieces():
        yield relabelling.apply(numbers(rows.column("label")), shard.classes)


def _under(samples: Gathered, chosen: Bools, max_bytes: int) -> tuple[Bools, Ints]:
    """Return which of the samples that were chosen are no larger, bool [n], and the numbers of those that are."""
    kept, large = Spool(np.bool_, samples.folder), Spool(np.int64, samples.folder)
    for _, first, rows in samples.pieces():
        marks = chosen[first : first + rows.num_rows]
        fits = numbers(rows.column("size")) <= max_bytes
        kept.append(marks & fits)
        large.append(first + np.flatnonzero(marks & ~fits))
    return kept.array(), large.array()


def _take_others(others: Counter[str], options: ConvertOptions, passed_over: Counter[str]) -> None:
    if others and options.other_members == "refuse":
        shown = ", ".join(f"{count} {escape(name)}" for name, count in others.most_common(_SHOWN))
        raise ConfigError("members or columns that a sample of shardkit's has no place for", found=shown,
                          remedy="give --other-members drop to leave them out")  # fmt: skip
    passed_over.update({f"{escape(name)} members": count for name, count in others.items()})


def _checked_keys(samples: Gathered, kept: Bools, options: ConvertOptions) -> list[Ints]:
    """Return the numbers of each part's samples, rising, after refusing two with one key, by sorted hashes."""
    folder = samples.folder
    edges = np.array(_edges(options.split or {})[:-1], np.uint64)
    hashes, parts = Spool(np.uint64, folder), [Spool(np.int64, folder) for _ in range(len(edges) + 1)]
    for _, ids, keys in _keyed(samples, kept, options):
        hashes.append(_hashes(keys))
        if options.split:
            places = np.searchsorted(edges, _hashes(keys, _SPLIT_SALT), side="right")
            for number, part in enumerate(parts):
                part.append(ids[places == number])
        else:
            parts[0].append(ids)
    twice = repeated(hashes.array(), folder)
    for first in range(0, len(twice), _SUSPECTED):
        _refuse_twins(samples, kept, twice[first : first + _SUSPECTED], options)
    return [part.array() for part in parts]


def _hashes(keys: list[str], salt: bytes = b"") -> npt.NDArray[np.uint64]:
    return np.array([hash64(salt + key.encode()) for key in keys], np.uint64)


def _keyed(samples: Gathered, kept: Bools, options: ConvertOptions) -> Iterator[tuple[InputShard, Ints, list[str]]]:
    """Yield samples that are kept, some of a shard at a time: it, their numbers, their keys in their new shards."""
    for shard, first, rows in samples.pieces():
        some = np.flatnonzero(kept[first : first + rows.num_rows])
        texts = rows.column("key").take(pa.array(some)).to_pylist()
        ids = first + some
        pairs = zip(texts, ids.tolist(), strict=True)
        yield shard, ids, [final_key(options.key, text, shard.path, number) for text, number in pairs]


def _refuse_twins(samples: Gathered, kept: Bools, twice: npt.NDArray[np.uint64], options: ConvertOptions) -> None:
    """Refuse the first sample with the key of another, of those whose keys have one of some hashes."""
    seen: dict[str, tuple[InputShard, str]] = {}
    for shard, ids, keys in _keyed(samples, kept, options):
        suspects = np.flatnonzero(np.isin(_hashes(keys), twice))
        sources = samples.take(ids[suspects], ["source"])[0]["source"] if len(suspects) else []
        for place, source in zip(suspects.tolist(), sources, strict=True):
            if keys[place] in seen:
                raise _same_key(keys[place], seen[keys[place]], (shard, source), options)
            seen[keys[place]] = shard, source


def _same_key(
    key: str, first: tuple[InputShard, str], second: tuple[InputShard, str], options: ConvertOptions
) -> ConfigError:  # fmt: skip
    (one, source), (two, other) = first, second
    if one.tree is not None and one.path == two.path and source != other:
        return ConfigError("two samples have one key", path=one.path, key=key,
                           found=f"it is that of {escape(source)} and {escape(other)}",
                           remedy="rename one, or give --key index")  # fmt: skip
    if one is not two and os.path.realpath(one.path) == os.path.realpath(two.path):
        return ConfigError("one input is named twice", path=two.path, key=key, remedy="name it once; with --key index "
                           "its samples are taken twice")  # fmt: skip
    ways = ["--key index"]
    if options.key == "keep" and one.name != two.name:  # what --key shard writes before a key
        ways.insert(0, "--key shard")
    if one is two and one.table is not None:
        ways.append("another --key-column, or none")
    found = f"it is twice in {one.name}" if one is two else f"it is in {one.name} and {two.name}"
    return ConfigError("two samples have one key", key=key, found=found, remedy=f"give {' or '.join(ways)}")


def _refused(
    samples: Gathered, large: Ints, options: ConvertOptions, names: list[str | None]
) -> dict[str | None, list[Refusal]]:
    """Return the refusals of each part: a sample's is where it would have been."""
    refused: dict[str | None, list[Refusal]] = {name: [] for name in names}
    split = options.split

    def part(key: str | None, shard: bytes, number: int) -> str | None:
        if not split or key is None:
            return names[0]
        return names[part_of_key(final_key(options.key, key, shard, number), split)]

    for one in samples.rejected:
        refused[part(one.key, one.shard, one.refusal.number)].append(one.refusal)
    wanted = ["key", "source", "size"]
    columns, shards = samples.take(large, wanted) if len(large) else ({name: [] for name in wanted}, [])
    for key, source, size, number, row in zip(*(columns[name] for name in wanted), shards, large.tolist(), strict=True):
        shard = samples.shards[number]
        name = member_path(shard, key, source)
        detail = f"{size} bytes; at most {options.max_bytes}"
        refused[part(key, shard.path, row)].append(Refusal(row, name, "too-large", detail))
    return refused


def _empty(
    samples: Gathered, passed_over: Counter[str], refused: Mapping[str | None, list[Refusal]],
    parts: Mapping[str | None, Ints], part: str | None,
) -> ConfigError | SourceError:  # fmt: skip
    """Return the error of a run of which a part has no sample: another one where some of it were refused."""
    kinds = [f"{count} left out {kind}" for kind, count in (+passed_over).items() if kind.startswith("by ")]
    first = next((refusal for refusals in refused.values() for refusal in refusals), None)
    if first is not None:
        count = sum(map(len, refused.values()))
        kinds.append(f"{count} refused, such as {escape(first.path)} ({first.reason}: {escape(first.detail)})")
    what = "there is no sample to convert" if part is None else f"no sample falls into the part {part}"
    blamed = refused[part] if any(map(len, parts.values())) else first
    return (SourceError if blamed else ConfigError)(
        what, found=", ".join([f"{len(samples)} samples in the inputs", *kinds])
    )


def small_bytes(samples: Gathered, selection: Selection, ids: Ints) -> Ints:
    """Return the bytes that the cls and json members of some samples take with their headers, int64 [k].

    A json member whose class is renamed changes by the difference of the names.
    """
    labels = selection.labels[ids]
    text = samples.numbers("json_size", ids)
    text += _renamed_bytes(samples, selection, ids) * (text > 0)
    bare = np.flatnonzero((text == 0) & (labels == NO_LABEL))
    for first in range(0, len(bare), _ROWS):
        some = bare[first : first + _ROWS]
        columns, _ = samples.take(ids[some], ["source"])
        text[some] = [len(encode_basestring(source).encode()) + len('{"source":}') for source in columns["source"]]
    return np.where(labels == NO_LABEL, 0, 2 * BLOCK) + np.where(text > 0, BLOCK - (-text // BLOCK) * BLOCK, 0)


def _renamed_bytes(samples: Gathered, selection: Selection, ids: Ints) -> Ints:
    """Return by how much the names of the classes of some samples become longer, int64 [k]."""
    grown = np.zeros(len(ids), np.int64)
    lengths = _name_bytes(selection.classes)
    if lengths is None:
        return grown
    old, new, at = samples.numbers("label", ids), selection.labels[ids], 0
    for number, rows in samples.runs(ids):
        run = slice(at, at + len(rows))
        at += len(rows)
        classes = samples.shards[number].classes
        before = _name_bytes(classes)
        if before is None or classes == selection.classes:
            continue
        named = (old[run] >= 0) & (old[run] < len(before)) & (new[run] >= 0) & (new[run] < len(lengths))
        grown[run][named] = lengths[new[run][named]] - before[old[run][named]]
    return grown


def _name_bytes(classes: tuple[str, ...] | None) -> Any:  # noqa: ANN401 - an array, or None
    return None if classes is None else np.array([len(encode_basestring(name).encode()) for name in classes], np.int64)
