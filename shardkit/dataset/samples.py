"""The samples that a loader hands out: those of one or more datasets, all or selected, numbered through.

A sample has a number, its place among those selected, which orders permute; and an id, its place among all samples of
all datasets, which stays the same whatever is selected, so that crops and records of bad samples go by it.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from shardkit.dataset.columns import NULL
from shardkit.dataset.shardset import Located
from shardkit.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy.typing as npt

    from shardkit.dataset.shardset import Dataset

    _Ints: TypeAlias = npt.NDArray[np.int64]

__all__ = ["Part", "Samples"]

_ROWS_AT_ONCE = 1 << 18


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """A dataset and which of its samples are wanted."""

    dataset: Dataset
    """Stays the caller's until `Samples` takes it."""
    rows: _Ints | None = None
    """int64 [k], sample numbers of the dataset, each greater than the one before; None for all. Kept, not copied."""

    def __post_init__(self) -> None:
        """Refuse rows that do not rise or that the dataset does not have."""
        rows, total = self.rows, len(self.dataset)
        if rows is None:
            return
        if rows.ndim != 1 or rows.dtype != np.int64:
            raise ConfigError(
                "selected rows are one row of int64", expected="int64 [k]", found=f"{rows.dtype} {list(rows.shape)}"
            )
        if rows.size and not (rows[0] >= 0 and rows[-1] < total and bool((rows[1:] > rows[:-1]).all())):
            raise ConfigError(
                "selected rows are not rising numbers of samples", path=self.dataset.path,
                expected=f"each greater than the one before, within 0..{total - 1}", found=f"{rows[0]}..{rows[-1]}",
            )  # fmt: skip

    def __len__(self) -> int:
        """Return the number of selected samples."""
        return len(self.dataset) if self.rows is None else len(self.rows)

    def unlabelled(self) -> int:
        """Return how many selected samples have no label: as the index counts them, a number a shard.

        Only for a selection of a dataset that has such samples labels are looked at, those of the selection.
        """
        stated: int = sum(batch.column("label").null_count for batch in self.dataset.columns.batches)
        if not stated or self.rows is None:
            return stated
        return sum(int(np.count_nonzero(chunk == NULL)) for chunk in _chunks(self, "label"))


class Samples:
    """The selected samples of one or more datasets, in the order given; threads may share it.

    Arrays that are asked for are new and the caller's, except that `ids` may return its argument.
    """

    def __init__(self, parts: Sequence[Part]) -> None:
        """Take over the datasets of `parts`: `close` closes them.

        Raises:
            ConfigError: there is no part.
        """
        if not parts:
            raise ConfigError("no dataset is given", expected="at least one")
        self.parts: tuple[Part, ...] = tuple(parts)
        """The datasets and their selections."""
        self.shard_paths: tuple[str, ...] = tuple(path for part in parts for path in part.dataset.shard_paths)
        """Absolute path of every shard, dataset after dataset."""
        self.starts: _Ints = _starts(len(part) for part in parts)
        """int64 [parts + 1], the number of each part's first sample, and at the end the number of all."""
        self._first_id: _Ints = _starts(len(part.dataset) for part in parts)
        self._first_shard: list[int] = _starts(len(part.dataset.shard_paths) for part in parts).tolist()
        self._payload: int | None = None

    def __len__(self) -> int:
        """Return the number of selected samples."""
        return int(self.starts[-1])

    def ids(self, numbers: _Ints) -> _Ints:
        """Return the ids of samples: those of the datasets before, and the row in its own.

        Args:
            numbers: int64 [k], each in [0, len).

        Returns:
            int64 [k]; `numbers` itself where nothing is selected.

        Raises:
            IndexError: there is no such sample.
        """
        _require_below(numbers, len(self))
        if all(part.rows is None for part in self.parts):
            return numbers
        ids = np.empty_like(numbers)
        for at, members, inside in _split(numbers, self.starts):
            rows = self.parts[at].rows
            ids[members] = (inside if rows is None else rows[inside]) + self._first_id[at]
        return ids

    def locate(self, ids: _Ints) -> Located:
        """Return where samples lie, and their labels; the shards are indices into `shard_paths`.

        Args:
            ids: int64 [k], as `ids` gives them.

        Raises:
            IndexError: there is no such sample.
            IntegrityError: the index points past the end of a shard.
        """
        split = self._split(ids)
        if len(split) == 1:
            at, _, rows = split[0]
            found = self.parts[at].dataset.locate(rows)
            return found if at == 0 else self._shifted(found, at)
        shard = np.empty(len(ids), np.int32)
        offset, size, label = (np.empty(len(ids), np.int64) for _ in range(3))
        for at, members, rows in split:
            found = self.parts[at].dataset.locate(rows)
            shard[members] = found.shard + np.int32(self._first_shard[at])
            offset[members], size[members], label[members] = found.offset, found.size, found.label
        return Located(shard=shard, offset=offset, size=size, label=label)

    def gather(self, name: str, ids: _Ints) -> _Ints:
        """Return the values of one column of numbers.

        Args:
            name: of the column.
            ids: int64 [k], as `ids` gives them.

        Returns:
            int64 [k]; -1 for a sample without a label.

        Raises:
            KeyError: the index has no such column.
            TypeError: the column holds texts.
            IndexError: there is no such sample.
        """
        values = np.empty(len(ids), np.int64)
        for at, members, rows in self._split(ids):
            values[members] = self.parts[at].dataset.columns.numbers(name)[rows]
        return values

    def keys(self, ids: _Ints) -> list[str]:
        """Return the keys of samples, as their datasets have them: two datasets may have the same one.

        Args:
            ids: int64 [k], as `ids` gives them.

        Raises:
            IndexError: there is no such sample.
            IndexFormatError: a key is damaged.
        """
        split = self._split(ids)
        if len(split) == 1:
            at, _, rows = split[0]
            return self.parts[at].dataset.columns.texts("key")[rows]
        keys = np.empty(len(ids), object)
        for at, members, rows in split:
            keys[members] = self.parts[at].dataset.columns.texts("key")[rows]
        return list(keys)

    @property
    def id_count(self) -> int:
        """How many ids there are, of selected samples and others: each is below it."""
        return int(self._first_id[-1])

    @property
    def shard_bytes(self) -> _Ints:
        """int64 [shards], bytes of each of `shard_paths`."""
        return np.asarray([shard.bytes for part in self.parts for shard in part.dataset.manifest.shards], np.int64)

    def used_shards(self) -> npt.NDArray[np.bool_]:
        """Return which of `shard_paths` hold a selected sample; bool [shards]."""
        used = []
        for part in self.parts:
            starts = _starts(shard.samples for shard in part.dataset.manifest.shards)
            used.append(np.diff(starts if part.rows is None else np.searchsorted(part.rows, starts)) > 0)
        return np.concatenate(used)

    @property
    def total_payload(self) -> int:
        """Bytes of all selected images. For a selection the first call looks at its sizes: 10 to 20 ms a million."""
        if self._payload is None:
            self._payload = sum(
                part.dataset.manifest.totals.payload if part.rows is None
                else sum(int(chunk.sum(dtype=np.int64)) for chunk in _chunks(part, "size"))
                for part in self.parts
            )  # fmt: skip
        return self._payload

    def size_chunks(self, name: str) -> Iterator[npt.NDArray[np.integer[Any]]]:
        """Yield a column of the selected samples, in order and piece by piece: a shard's or a quarter million at most.

        Args:
            name: of a column of numbers without nulls: "size", "json_size".

        Yields:
            [m], of the column's own type (Any: it differs); may be a view into the index, not to be written to.
        """
        for part in self.parts:
            yield from _chunks(part, name)

    def close(self) -> None:
        """Close every dataset; idempotent."""
        for part in self.parts:
            part.dataset.close()

    def __repr__(self) -> str:
        """Return the number of samples and of datasets."""
        return f"<shardkit samples: {len(self)} of {int(self._first_id[-1])} in {len(self.parts)} datasets>"

    def _split(self, ids: _Ints) -> list[tuple[int, _Ints | slice, _Ints]]:
        _require_below(ids, int(self._first_id[-1]))
        return _split(ids, self._first_id)

    def _shifted(self, found: Located, at: int) -> Located:
        shard = found.shard + np.int32(self._first_shard[at])
        return Located(shard=shard, offset=found.offset, size=found.size, label=found.label)


def _starts(counts: Iterator[int] | Sequence[int]) -> _Ints:
    return np.fromiter(accumulate(counts, initial=0), np.int64)


def _split(values: _Ints, starts: _Ints) -> list[tuple[int, _Ints | slice, _Ints]]:
    """Share values out among the runs that begin at `starts`.

    Args:
        values: int64 [k], in [0, starts[-1]).
        starts: int64 [runs + 1], rising from 0.

    Returns:
        For each run that is met: its number, the indices into `values` that fall into it, and those values counted
        from its start.
    """
    if len(starts) == 2:
        return [(0, slice(None), values)]
    run = np.searchsorted(starts, values, side="right") - 1
    met = np.flatnonzero(np.bincount(run)).tolist()
    if len(met) == 1:
        return [(met[0], slice(None), values - starts[met[0]])]
    members = [np.flatnonzero(run == at) for at in met]
    return [(at, some, values[some] - starts[at]) for at, some in zip(met, members, strict=True)]


def _chunks(part: Part, name: str) -> Iterator[npt.NDArray[np.integer[Any]]]:
    column = part.dataset.columns.numbers(name)
    if part.rows is None:
        yield from column.chunks()
        return
    for first in range(0, len(part.rows), _ROWS_AT_ONCE):
        yield column[part.rows[first : first + _ROWS_AT_ONCE]]


def _require_below(numbers: _Ints, total: int) -> None:
    # Seen as unsigned, a negative number is huge: one pass finds both.
    if numbers.size and int(numbers.view(np.uint64).max()) >= total:
        wrong = numbers[(numbers < 0) | (numbers >= total)]
        raise IndexError(f"sample {int(wrong[0])} of {total} samples")
