"""How much memory encoded batches take: enough that the largest of them fits, counted before anything is read."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from shardkit.dataset.reading import GAP_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    import numpy.typing as npt

    from shardkit.dataset.samples import Samples
    from shardkit.dataset.steps import BatchPlan
    from shardkit.dataset.window import WindowOrder

    _Ints = npt.NDArray[np.int64]

__all__ = ["batch_budget", "piece_bytes", "pieces_held", "pieces_wanted"]


def batch_budget(samples: Samples, *, batch_size: int, slots: int, align: int, metadata: bool) -> int:
    """Return the bytes for `slots` batches of usual size, and in any case for the two largest that can come.

    Looks once at the sizes of all samples: about 10 ms a million.

    Args:
        samples: whose sizes.
        batch_size: samples of a batch.
        slots: batches that hold memory at the same time; >= 2.
        align: of the reader.
        metadata: whether json members are read, too.
    """
    parts = ("size", "json_size") if metadata else ("size",)
    largest = total = 0
    for name in parts:
        top, of_all = _largest_and_total(samples.size_chunks(name), batch_size)
        largest, total = largest + int(top.sum()), total + of_all
    # An extent is widened to the alignment at both ends, and read together with the gap to the next one.
    extra = batch_size * len(parts) * (2 * align + GAP_BYTES)
    usual = batch_size * total // len(samples) * 5 // 4
    return max(slots * usual, 2 * largest) + slots * extra


def piece_bytes(samples: Samples, order: WindowOrder, *, align: int) -> int:
    """Return the most bytes that reading a piece of a windowed order can take.

    A piece lies in one window and in one lane's segment, so it takes of a limited number of extents. Each epoch cuts
    the ring of samples elsewhere, so of every `extent_samples` neighbours the largest extent that could begin among
    them counts. No two extents of an epoch do; only the short one that closes the ring begins close to the next one,
    and with those that follow it, it lies within as many whole extents that begin in its place.

    Args:
        samples: whose sizes; looked at once, of small datasets twice: about 20 ms a million.
        order: of these samples.
        align: of the reader.
    """
    # What lies between two samples is read along when it is small; without a selection that is nothing.
    extra = 2 * align + (0 if all(part.rows is None for part in samples.parts) else GAP_BYTES)
    length = order.extent_samples
    segment = -(-order.n // order.lanes)
    count = min(order.window_extents, _met(segment, length))
    if count >= order.extents:
        return _stored(samples) + extra * order.n
    top, _ = _largest_and_total(_largest_extents(samples, length, extra), count)
    most = int(top.sum())
    # Two extents may lie close together, and in a small dataset so may the two ends of the one that closes the ring.
    left = most + count * GAP_BYTES
    close = count - (samples.total_payload > left or _stored(samples) > left)  # the payload alone is known at once
    return most + align + close * GAP_BYTES


def _stored(samples: Samples) -> int:
    """Return the bytes of all samples, headers and padding among them."""
    return _largest_and_total(samples.size_chunks("sample_size"), 1)[1]


def pieces_held(plan: BatchPlan, order: WindowOrder) -> int:
    """Return how many pieces of a windowed order a rank holds at most when it begins a step, the old ones among them.

    Args:
        plan: the steps of the rank.
        order: of their positions.
    """
    lanes = plan.lanes // plan.world_size
    most = lanes * max(2, _met(plan.batch_size // lanes, order.window_samples))
    if plan.padded:  # the last step goes on with the first positions of the epoch, perhaps in other lanes
        most = max(most, lanes + len(order.pieces_of(plan.positions(plan.steps - 1))))
    return most


def pieces_wanted(plan: BatchPlan, order: WindowOrder) -> int:
    """Return for how many pieces a rank takes memory where it can be had: `pieces_held`, and one more of a lane.

    A batch on the border of two pieces keeps the old one until the new one is here. Meanwhile there is another to read,
    except in lanes that have two or fewer in an epoch. So most often it is three pieces a lane, and there two.

    Args:
        plan: the steps of the rank.
        order: of their positions.
    """
    lanes = plan.lanes // plan.world_size
    return pieces_held(plan, order) + (lanes if order.n > 2 * order.lanes * order.window_samples else 0)


def _met(count: int, length: int) -> int:
    """Return how many stretches of `length` places `count` neighbours lie in at most."""
    return (count + 2 * length - 2) // length


def _largest_extents(samples: Samples, length: int, extra: int) -> Iterator[_Ints]:
    """Yield the bytes of the largest extent that begins in each stretch of `length` samples, some at a time."""
    head = left = np.zeros(0, np.int64)
    for chunk in samples.size_chunks("sample_size"):
        sizes = chunk.astype(np.int64) + extra
        head = head if len(head) >= length else np.concatenate([head, sizes])
        left = np.concatenate([left, sizes])
        ready = max(len(left) - length + 1, 0) // length * length
        yield _largest_runs(left[: ready + length - 1], length)
        left = left[ready:]
    yield _largest_runs(np.concatenate([left, head[: length - 1]]), length)  # the ring closes


def _largest_runs(sizes: _Ints, length: int) -> _Ints:
    """Return the largest sum of `length` neighbours, for the first `length` starts, the next ones, and so on."""
    ends = np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)])
    sums = ends[length:] - ends[:-length]
    return np.maximum.reduceat(sums, np.arange(0, len(sums), length)) if len(sums) else sums


def _largest_and_total(chunks: Iterable[npt.NDArray[np.integer]], count: int) -> tuple[_Ints, int]:
    """Return the `count` largest of all values, rising, and the sum of all."""
    top, total = np.zeros(0, np.int64), 0
    for chunk in chunks:
        total += int(chunk.sum(dtype=np.int64))
        kept = chunk if len(chunk) <= count else np.partition(chunk, len(chunk) - count)[-count:]
        top = np.concatenate([top, kept.astype(np.int64)])
        if len(top) > 64 * count:
            top = np.partition(top, len(top) - count)[-count:]
    return np.sort(top)[-count:], total
