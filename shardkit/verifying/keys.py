"""Uniqueness of keys over a whole dataset, in eight bytes a key."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from shardkit.escaping import escape
from shardkit.verifying.report import Finding

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from shardkit.verifying.rows import Rows

__all__ = ["hash_keys", "repeated_keys"]

Hashes = npt.NDArray[np.int64]


def hash_keys(rows: Rows) -> Hashes:
    """Return a hash of each key, int64 [n]. Python's own: keyed anew in every process, so nobody can aim at it."""
    return np.fromiter(map(hash, rows.keys()), np.int64, len(rows))


def repeated_keys(
    names: Sequence[str], hashes: Sequence[Hashes], rows_of: Callable[[int], Rows | None]
) -> Iterator[Finding]:
    """Yield a finding for each key that stood before, in stored order.

    Args:
        names: file names of the shards.
        hashes: of the keys of each shard, in stored order.
        rows_of: returns the rows of a shard by its place; called only for shards with a hash that repeats, since equal
            hashes may still be of different keys.
    """
    ordered = np.sort(np.concatenate(hashes)) if hashes else np.empty(0, np.int64)
    repeated = np.unique(ordered[1:][ordered[1:] == ordered[:-1]])
    if not len(repeated):
        return
    first_at: dict[str, str] = {}
    for number, (name, shard_hashes) in enumerate(zip(names, hashes, strict=True)):
        at = np.flatnonzero(np.isin(shard_hashes, repeated))
        rows = rows_of(number) if len(at) else None
        if rows is None:
            continue
        for row in at.tolist():
            key = rows.key(row)
            if key not in first_at:
                first_at[key] = name
                continue
            yield Finding(
                code="key-duplicate", file=name.removesuffix(".tar") + ".arrow", shard=name, region="rows", key=key,
                message=f"the key stands before, in {escape(first_at[key])}",
            )  # fmt: skip
