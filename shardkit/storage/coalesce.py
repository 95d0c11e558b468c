"""Pure planning: which aligned ranges to read so that many wanted ranges arrive in few reads."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shardkit.errors import ConfigError
from shardkit.storage.reader import ReadOps

__all__ = ["ReadPlan", "coalesce"]

_Ints = npt.NDArray[np.int64]
_LIMIT = 1 << 62  # offset + length + align stays inside int64 below it
_SHORT = 64 << 10  # bytes; a request below it takes about as long as one of it


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadPlan:
    """S spans to read for N wanted extents, and where each extent lies in them. All arrays are int64."""

    span_file: _Ints
    """[S] file of each span; ascending."""
    span_offset: _Ints
    """[S] first byte in the file; a multiple of the alignment, ascending within a file."""
    span_length: _Ints
    """[S] bytes; a multiple of the alignment. 0 for a span that only empty extents asked for."""
    span_need: _Ints
    """[S] leading bytes up to the end of the last extent in the span."""
    span_start: _Ints
    """[S] where each span starts in one buffer of `buffer_bytes` that holds all spans back to back."""
    extent_span: _Ints
    """[N] the span that holds each extent, in the order of the input."""
    extent_start: _Ints
    """[N] bytes from the start of that span to the extent."""

    @property
    def buffer_bytes(self) -> int:
        """Bytes of all spans together."""
        return int(self.span_length.sum())

    @property
    def buffer_start(self) -> _Ints:
        """[N] bytes from the start of the shared buffer to each extent."""
        placed: _Ints = self.span_start[self.extent_span] + self.extent_start
        return placed

    def ops(self, buffer: memoryview) -> ReadOps:
        """Return one op a span, laid back to back into `buffer` as `span_start` says.

        Args:
            buffer: at least `buffer_bytes` writable bytes; its address is aligned as the reader demands.

        Raises:
            ConfigError: the buffer is too small.
        """
        return ReadOps(
            file=self.span_file, offset=self.span_offset, length=self.span_length, need=self.span_need,
            start=self.span_start, buffer=buffer,
        )  # fmt: skip


def coalesce(
    file: npt.ArrayLike, offset: npt.ArrayLike, length: npt.ArrayLike, *, align: int, gap_bytes: int, max_bytes: int
) -> ReadPlan:
    """Return aligned spans that hold every extent, joined greedily in file order.

    Two neighbours share a span when the gap between their aligned ranges is at most `gap_bytes` and the span stays at
    most `max_bytes` long; an extent that is longer than that alone keeps its length and takes in what lies inside it.
    Where that leaves a rest below 64 KiB, the span before it gives some of its extents away, so that both are long.
    Extents may repeat, overlap and be empty.

    Args:
        file: [N] integers, the file of each extent.
        offset: [N] integers, first byte.
        length: [N] integers, bytes.
        align: bytes; a power of two that every span's offset and length are multiples of. 1 for no rule.
        gap_bytes: unwanted bytes that are cheaper to read than a second request; 0 joins only what touches.
        max_bytes: bytes of the longest span that joining may make.

    Raises:
        ConfigError: a bound is negative or beyond 2**62, or the columns differ in length.

    >>> plan = coalesce([0, 0, 1], [9000, 100, 0], [10, 10, 5], align=4096, gap_bytes=4096, max_bytes=1 << 20)
    >>> plan.span_offset.tolist(), plan.span_length.tolist(), plan.span_need.tolist()
    ([0, 0], [12288, 4096], [9010, 5])
    >>> plan.extent_span.tolist(), plan.extent_start.tolist()
    ([0, 0, 1], [9000, 100, 0])
    """
    files, offsets, lengths = (np.asarray(column, dtype=np.int64) for column in (file, offset, length))
    _check(files, offsets, lengths, align, gap_bytes, max_bytes)
    start = offsets & -align
    end = np.where(lengths > 0, (offsets + lengths + (align - 1)) & -align, start)
    order = np.lexsort((-end, start, files))
    sorted_file, sorted_start, sorted_end = files[order], start[order], end[order]
    reach = _reach(sorted_file, sorted_end)
    first = _cut(sorted_file, sorted_start, sorted_end, reach, align, gap_bytes, max_bytes)

    last = np.append(first[1:], len(order)) - 1 if len(first) else first
    span_of_sorted = np.repeat(np.arange(len(first)), np.diff(np.append(first, len(order))))
    extent_span = np.empty(len(order), np.int64)
    extent_span[order] = span_of_sorted
    span_offset = sorted_start[first]
    span_length = reach[last] - span_offset
    wanted_end = np.where(lengths > 0, offsets + lengths, start)[order]
    need = np.maximum.reduceat(wanted_end, first) - span_offset if len(first) else first
    # An empty extent has no byte to point at; its own offset could lie past the end of its span.
    inside = np.where(lengths > 0, offsets, start) - span_offset[extent_span]
    return ReadPlan(
        span_file=sorted_file[first],
        span_offset=span_offset,
        span_length=span_length,
        span_need=need,
        span_start=np.cumsum(span_length) - span_length,
        extent_span=extent_span,
        extent_start=inside,
    )


def _check(files: _Ints, offsets: _Ints, lengths: _Ints, align: int, gap_bytes: int, max_bytes: int) -> None:
    if align < 1 or align & (align - 1):
        raise ConfigError("an alignment is a power of two", found=align)
    if gap_bytes < 0 or max_bytes < 1:
        raise ConfigError("spans are joined over a gap of >= 0 to >= 1 bytes", found=f"{gap_bytes}, {max_bytes}")
    if not files.shape == offsets.shape == lengths.shape or files.ndim != 1:
        found = f"{files.shape}, {offsets.shape}, {lengths.shape}"
        raise ConfigError("file, offset and length are columns of one length", found=found)
    for name, column in (("file", files), ("offset", offsets), ("length", lengths)):
        # Seen as unsigned, a negative number is beyond every limit: one pass finds both.
        wrong = column.view(np.uint64) >= _LIMIT
        if wrong.any():
            raise ConfigError(f"a {name} is out of range", expected="0..2**62", found=int(column[wrong][0]))


def _reach(file: _Ints, end: _Ints) -> _Ints:
    """Return the largest end so far within each file, for extents sorted by file and start."""
    # The maximum runs over ranks, which rise with the file, so it starts anew at each file by itself.
    by_end = np.lexsort((end, file))
    rank = np.empty(len(end), np.int64)
    rank[by_end] = np.arange(len(end))
    reach: _Ints = end[by_end[np.maximum.accumulate(rank)]] if len(end) else end
    return reach


def _cut(file: _Ints, start: _Ints, end: _Ints, reach: _Ints, align: int, gap_bytes: int, max_bytes: int) -> _Ints:
    """Return the index of the first extent of each span, for extents sorted by file, start and descending end."""
    if not len(start):
        return start
    apart = np.ones(len(start), np.bool_)
    apart[1:] = (file[1:] != file[:-1]) | (start[1:] - reach[:-1] > gap_bytes)
    group = np.flatnonzero(apart)
    stop = np.append(group[1:], len(start))
    # Only a group longer than max_bytes is walked. An extent opens a new span by reaching further than all before it,
    # so the reach of a span is the reach of its group and one binary search finds where each span ends.
    wide = np.flatnonzero(reach[stop - 1] - start[group] > max_bytes)
    cuts: list[int] = []
    for low, high in zip(group[wide].tolist(), stop[wide].tolist(), strict=True):
        at = low
        while True:
            limit = start[at] + max(max_bytes, int(end[at] - start[at]))
            at += int(reach[at:high].searchsorted(limit, side="right"))
            if at >= high:
                break
            cuts.append(at)
    if not cuts:
        return group
    first = np.sort(np.concatenate((group, np.asarray(cuts, dtype=np.int64))))
    length = reach[np.append(first[1:], len(start)) - 1] - start[first]
    for at in np.flatnonzero(~apart[first] & (length < _SHORT))[::-1].tolist():
        low, border, *rest = first[at - 1 : at + 2].tolist()
        first[at] = _balanced(low, border, rest[0] if rest else len(start), start, reach, align, max_bytes)
    return first


def _balanced(low: int, border: int, high: int, start: _Ints, reach: _Ints, align: int, max_bytes: int) -> int:
    """Return where extents [low, high) are best cut in two instead of at `border`: the shorter span is the longest."""
    begin, end = int(start[low]), int(reach[high - 1])
    starts, before, after = start[low + 1 : border], reach[low : border - 1], reach[low + 1 : border]
    left, right = before - begin, end - starts
    # A span may begin with an extent that reaches further than all before it. What overlaps is read twice: a block.
    may = (after > before) & (starts >= before - align) & (right <= max_bytes)
    shorter = np.where(may, np.minimum(left, right), 0)
    best = int(shorter.argmax()) if len(shorter) else 0
    now = min(int(reach[border - 1]) - begin, end - int(start[border]))
    return low + 1 + best if len(shorter) and shorter[best] > now else border
