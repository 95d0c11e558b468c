"""Where one shard ends and the next begins: shards of nearly equal payload under a limit. Pure and vectorised.

The columns may be larger than memory: a span of each is looked at after another.

Everywhere here `size` is int64 [n], payload bytes of each image in stored order; `small`, int64 [n], the bytes of its
cls and json members with their headers; `each`, int64 [n], `sample_bytes` of one run of all. Bounds are int64
[shards + 1]: shard s holds the positions from bounds[s] to bounds[s + 1].
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from shardkit.errors import ConfigError, UnsafeError
from shardkit.format.layout import sample_bytes, shard_bytes
from shardkit.format.tar import BLOCK
from shardkit.running.spool import spans

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardkit.packing.options import ShardOptions

__all__ = ["MAX_SHARDS", "cut_shards", "equal_payload", "shard_ends"]

Ints = npt.NDArray[np.int64]

MAX_SHARDS = 1_000_000
"""What six digits of a shard's name can number."""


def cut_shards(size: Ints, small: Ints, each: Ints, options: ShardOptions) -> Ints:
    """Return the bounds of the shards: their number or samples as demanded, or as few as the limit lets be.

    Raises:
        ConfigError: more shards than images are demanded.
        UnsafeError: more shards than a million.
    """
    count = len(size)
    if options.shard_samples is not None:
        shards = -(-count // options.shard_samples)
        _refuse_many(shards)
        return np.arange(shards + 1) * count // shards
    if options.shards is not None:
        if options.shards > count:
            raise ConfigError("more shards than images", expected=f"at most {count}", found=options.shards)
        _refuse_many(options.shards)
        return equal_payload(size, options.shards)
    limit, align = options.shard_size or 0, options.align
    # An image larger than the limit cannot be cut: it has a shard of its own, and the runs between are cut alone.
    doubtful = limit - 2 * shard_bytes(0, align) - align
    maybe = np.concatenate([some.start + np.flatnonzero(each[some] > doubtful) for some in spans(count)])
    large = maybe[[shard_bytes(end, align) > limit for end in _alone(size[maybe], small[maybe], align).tolist()]]
    edges = np.unique(np.concatenate([[0], large, large + 1, [count]])).tolist()
    _refuse_many(len(edges) - 1)
    bounds = [np.zeros(1, np.int64)]
    for first, last in pairwise(edges):
        run = slice(first, last)
        bounds.append(first + _cut_run(size[run], small[run], each[run], limit, align)[1:])
    cut = np.concatenate(bounds)
    _refuse_many(len(cut) - 1)
    return cut


def _cut_run(size: Ints, small: Ints, each: Ints, limit: int, align: int) -> Ints:
    """Return the bounds of the fewest shards of nearly equal payload under the limit, which each image fits alone."""

    def attempt(shards: int) -> tuple[Ints, bool]:
        bounds = equal_payload(size, shards)
        largest = int(shard_ends(size, small, each, bounds, align).max())
        return bounds, shard_bytes(largest, align) <= limit

    count = len(size)
    low = min(count, max(1, int(each.sum()) // limit))
    bounds, fits = attempt(low)
    step = 1
    while not fits and low < count:
        # Cuts fall between images, so more shards than the quotient may be needed: find how many, then the fewest.
        high = min(count, low + step)
        bounds, fits = attempt(high)
        low, step, missed = high, 2 * step, low
        while fits and low - missed > 1:
            middle = (missed + low) // 2
            fewer, fit = attempt(middle)
            low, missed, bounds = (middle, missed, fewer) if fit else (low, middle, bounds)
    return bounds


def _refuse_many(shards: int) -> None:
    if shards > MAX_SHARDS:
        raise UnsafeError("too many shards", expected=f"at most {MAX_SHARDS}", found=shards,
                          remedy="raise --shard-size, or name fewer --shards")  # fmt: skip


def equal_payload(size: Ints, shards: int) -> Ints:
    """Cut at the end of an image that is nearest to each multiple of the fair share; a shard has at least one image.

    An image larger than the share counts as one share, since no cut can make its shard smaller: the others then share
    what is left. So a shard's payload differs from the share by at most the largest image that is not larger than it.
    """
    share, total = _fair_share(size, shards)
    quotient, rest = divmod(total, shards)
    steps = np.arange(1, shards)
    cuts = _nearest_ends(size, share, steps * quotient + steps * rest // shards)  # no product of more than 63 bits
    # At least one image a shard: push cuts apart from the left, then back from the right.
    cuts = np.maximum.accumulate(cuts - steps) + steps
    cuts = np.minimum(cuts, len(size) - shards + steps)
    return np.concatenate([[0], cuts, [len(size)]]).astype(np.int64)


def _weights(size: Ints) -> Iterator[Ints]:
    """Yield what each image weighs, span by span: an empty file, too, must move the cut on."""
    return (size[some] + 1 for some in spans(len(size)))


def _fair_share(size: Ints, shards: int) -> tuple[int, int]:
    """Return the largest weight that counts, and what all weigh together when none counts for more."""
    share, large, rest = int(size.max()) + 1, -1, 0
    while (found := sum(int((weight > share).sum()) for weight in _weights(size))) != large or large < 0:
        large = found
        rest = sum(int(weight[weight <= share].sum()) for weight in _weights(size))
        share = -(-rest // (shards - large))
    return share, sum(int(np.minimum(weight, share).sum()) for weight in _weights(size))


def _nearest_ends(size: Ints, share: int, targets: Ints) -> Ints:
    """Return behind which images the sum of the weights is nearest to each of some rising targets, int64 [targets]."""
    cuts, first, before = np.empty(len(targets), np.int64), 0, 0
    for weight in _weights(size):
        ends = np.concatenate([[before], before + np.cumsum(np.minimum(weight, share))])
        here = slice(*np.searchsorted(targets, ends[[0, -1]], side="right"))
        after = np.searchsorted(ends[1:], targets[here], side="left")
        nearer = (first + after > 0) & (targets[here] - ends[after] < ends[after + 1] - targets[here])
        cuts[here] = first + after - nearer + 1
        first, before = first + len(weight), int(ends[-1])
    return cuts


def _alone(size: Ints, small: Ints, align: int) -> Ints:
    """Return the bytes of each sample when it is the first of a shard."""
    return sample_bytes(small, np.zeros_like(size), align) - (-size // BLOCK) * BLOCK


def shard_ends(size: Ints, small: Ints, each: Ints, bounds: Ints, align: int) -> Ints:
    """Return where the last sample of each shard ends; `each` is `sample_bytes` of one run of all."""
    firsts = bounds[:-1]
    ends = np.add.reduceat(each, firsts)
    return ends - each[firsts] + _alone(size[firsts], small[firsts], align)
