"""Pure planning: which ops of a batch go through a ring together, and which copies take them on from there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from shardkit.storage.reader import OpColumns, ReadOps

if TYPE_CHECKING:
    import numpy.typing as npt

    _Ints: TypeAlias = npt.NDArray[np.int64]

__all__ = ["Piece", "plan_pieces"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Piece:
    """Ops that are read into one part of the ring, and the copies that take them from there. Columns: int64 [M]."""

    file: _Ints
    """[M] as in `OpColumns`."""
    offset: _Ints
    """[M] as in `OpColumns`."""
    length: _Ints
    """[M] as in `OpColumns`."""
    need: _Ints
    """[M] as in `OpColumns`."""
    start: _Ints
    """[M] bytes from the start of the part to each op's bytes."""
    nbytes: int
    """Bytes of the part."""
    copies: list[tuple[int, int, int]]
    """Address on the device, bytes from the start of the part, bytes; neighbours on the device go in one copy."""

    def ops(self, part: memoryview) -> ReadOps:
        """Return the ops with a part of the ring as their destination."""
        return ReadOps(
            file=self.file, offset=self.offset, length=self.length, need=self.need, start=self.start, buffer=part
        )


def plan_pieces(ops: OpColumns, *, most: int) -> list[Piece]:
    """Cut a batch into pieces that fit into a part of the ring, in the order of the ops.

    Within a piece the bytes lie back to back in the order of their addresses on the device, so that ops whose
    destinations touch are one copy. An op that is longer than a part is cut, too.

    Args:
        ops: the batch; the addresses are the device's.
        most: bytes of the largest part; a multiple of the reader's alignment.
    """
    rows = _cut_long(ops, most)
    ends, pieces, low, done = np.cumsum(rows.length), list[Piece](), 0, 0
    while low < len(ends):
        high = int(ends.searchsorted(done + most, side="right"))
        pieces.append(_piece(rows, slice(low, high)))
        low, done = high, int(ends[high - 1])
    return pieces


def _cut_long(ops: OpColumns, most: int) -> OpColumns:
    if int(ops.length.max(initial=0)) <= most:
        return ops
    parts = np.maximum(-(-ops.length // most), 1)
    which = np.repeat(np.arange(len(parts)), parts)
    done = (np.arange(len(which)) - np.repeat(np.cumsum(parts) - parts, parts)) * most
    length = np.minimum(ops.length[which] - done, most)
    return OpColumns(
        file=ops.file[which], offset=ops.offset[which] + done, length=length,
        need=np.clip(ops.need[which] - done, 0, length), address=ops.address[which] + done,
    )  # fmt: skip


def _piece(rows: OpColumns, some: slice) -> Piece:
    length, address = rows.length[some], rows.address[some]
    order = np.lexsort((length, address))  # an empty op before the one that begins where it lies
    sizes, targets = length[order], address[order]
    starts = np.cumsum(sizes) - sizes
    start = np.empty_like(starts)
    start[order] = starts
    nbytes = int(length.sum())
    first = np.flatnonzero(np.append(True, targets[1:] != (targets + sizes)[:-1]))
    run_bytes = np.diff(np.append(starts[first], nbytes))
    copies = zip(targets[first].tolist(), starts[first].tolist(), run_bytes.tolist(), strict=True)
    return Piece(
        file=rows.file[some], offset=rows.offset[some], length=length, need=rows.need[some], start=start,
        nbytes=nbytes, copies=[copy for copy in copies if copy[2]],
    )  # fmt: skip
