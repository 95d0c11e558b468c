"""Shuffling by windows: long extents in random order, some of them pooled, the samples of the pool in random order.

For storage that wants long reads (network file systems, disks). The samples of the data set form a ring, the first one
after the last one. Each epoch cuts the ring into extents of consecutive samples, from a random sample on, and permutes
the extents: their samples, in that order, make one long stream. The stream is cut into one equal segment a lane, and
into windows of `window_extents` extents; within each piece of a segment that lies in one window the samples are
permuted. So all that a lane hands out between two window borders comes out of one window, which is read once, in long
reads, and any position can still be computed by itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from shardkit.dataset.arguments import require_range
from shardkit.dataset.order import MAX_SAMPLES, permute, permute_parts, require_positions
from shardkit.splitmix import STEP, U64, finalise, mix

if TYPE_CHECKING:
    import numpy.typing as npt

    _Ints: TypeAlias = npt.NDArray[np.int64]

__all__ = ["Piece", "WindowOrder"]

_SALT = 0x77696E646F77  # keeps what is drawn here apart from other draws from the same seed, and each from the others:
_RING, _EXTENTS, _PIECES = 0, 1, 2


@dataclass(frozen=True, slots=True)
class Piece:
    """The part of one lane's segment that lies in one window: what is read together and shuffled together."""

    lane: int
    """0..lanes - 1."""
    start: int
    """First position in the stream of permuted extents."""
    end: int
    """The position after the last one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowOrder:
    """The windowed order of n samples; see the head of this file. O(1) memory.

    The extent that closes the ring may be shorter than the others. It is always the last one of the stream, so that a
    place in the stream tells its extent by a division; since the ring is cut elsewhere in each epoch, it holds other
    samples each time, and no sample has a place of its own.
    """

    n: int
    """Samples; 1..`MAX_SAMPLES`."""
    seed: int
    """0..2**64 - 1."""
    lanes: int
    """Position p of the epoch belongs to lane p mod `lanes`; >= 1."""
    extent_samples: int
    """Consecutive samples of an extent; >= 1."""
    window_extents: int
    """Extents whose samples are shuffled together; >= 1."""

    def __post_init__(self) -> None:
        """Refuse what is out of range."""
        for name, value, low, high in (
            ("n", self.n, 1, MAX_SAMPLES),
            ("seed", self.seed, 0, U64),
            ("lanes", self.lanes, 1, MAX_SAMPLES),
            ("extent_samples", self.extent_samples, 1, MAX_SAMPLES),
            ("window_extents", self.window_extents, 1, MAX_SAMPLES),
        ):
            require_range(name, value, low, high)

    @property
    def extents(self) -> int:
        """Extents of an epoch, the short one among them."""
        return -(-self.n // self.extent_samples)

    @property
    def window_samples(self) -> int:
        """Samples of a whole window; at most n."""
        return min(self.extent_samples * self.window_extents, self.n)

    def at(self, epoch: int, positions: _Ints) -> _Ints:
        """Return the samples at `positions`; see `shardkit.dataset.order.Order`."""
        _, stream, start, end = self._places(positions)
        if start.size and (start == start[0]).all():
            start, end = start[:1], end[:1]  # one piece, of which one network is made rather than one a position
        return self._samples(epoch, start + self._shuffled(epoch, start, end, stream - start))

    def pieces_of(self, positions: _Ints) -> list[tuple[Piece, _Ints, _Ints]]:
        """Return the pieces that positions fall into: lane by lane, and in the order in which a lane comes to them.

        Args:
            positions: int64 [k], each in [0, n).

        Returns:
            For each piece: the piece, the indices into `positions` that fall into it, and their places in the piece
            before it is shuffled, counted from its start; int64 each.

        Raises:
            ConfigError: a position lies outside the epoch.
        """
        lane, stream, start, end = self._places(positions)
        order = np.argsort(start, kind="stable")
        apart = np.flatnonzero(np.diff(start[order])) + 1
        found = []
        for members in np.split(order, apart) if len(order) else ():
            piece = Piece(*(int(column[members[0]]) for column in (lane, start, end)))
            found.append((piece, members, stream[members] - piece.start))
        return found

    def pieces(self, lane: int) -> list[Piece]:
        """Return all pieces of a lane, in order."""
        found, piece = [], self.first(lane)
        while piece is not None:
            found.append(piece)
            piece = self.following(piece)
        return found

    def first(self, lane: int) -> Piece | None:
        """Return the piece that a lane begins with; None for a lane without samples."""
        return self._piece(lane, int(self._segment_start(np.int64(lane))))

    def following(self, piece: Piece) -> Piece | None:
        """Return the piece that a lane comes to after one of its pieces; None after the last one."""
        return self._piece(piece.lane, piece.end)

    def _piece(self, lane: int, start: int) -> Piece | None:
        """Return the piece of a lane that begins at a place of the stream; None where the lane ends there."""
        stop = int(self._segment_start(np.int64(lane + 1)))
        border = start - start % self.window_samples + self.window_samples
        return Piece(lane, start, min(border, stop)) if start < stop else None

    def first_position(self, piece: Piece) -> int:
        """Return the lowest position of the epoch that falls into a piece."""
        row = piece.start - int(self._segment_start(np.int64(piece.lane)))
        return row * self.lanes + piece.lane

    def members(self, epoch: int, piece: Piece) -> _Ints:
        """Return the samples of a piece, extents in stream order, each in ring order; int64 [m]."""
        return self._samples(epoch, np.arange(piece.start, piece.end))

    def shuffled(self, epoch: int, piece: Piece, inside: _Ints) -> _Ints:
        """Return which members of a piece its places hold: indices into `members`, int64 [k], as `inside`."""
        return self._shuffled(epoch, np.array([piece.start]), np.array([piece.end]), inside)

    def _shuffled(self, epoch: int, start: _Ints, end: _Ints, inside: _Ints) -> _Ints:
        """Shuffle places of pieces, each within its own; `start` and `end` are of each place, or [1] for all."""
        require_range("an epoch", epoch, 0, U64)
        states = (start + 1).astype(np.uint64) * np.uint64(STEP) + np.uint64(mix(self._seed(_PIECES) + epoch))
        return permute_parts(inside, end - start, finalise(states))

    def _samples(self, epoch: int, places: _Ints) -> _Ints:
        """Return the samples at places of the stream of permuted extents."""
        slot, within = np.divmod(places, self.extent_samples)
        ring = self._extents(epoch, slot) * self.extent_samples + within
        cut = mix(self._seed(_RING) + epoch) % self.n
        return (ring + cut) % self.n

    def _extents(self, epoch: int, slots: _Ints) -> _Ints:
        """Return which extents of the ring the slots of the stream hold. The short extent, if any, keeps its slot."""
        whole = self.n // self.extent_samples
        moved = np.flatnonzero(slots < whole)
        if not moved.size:
            return slots
        seed, asked = self._seed(_EXTENTS), slots[moved]
        low, high = int(asked.min()), int(asked.max())
        extents = slots.copy()
        if high - low < asked.size:  # a lane's slots lie close together, and each of them has many samples
            extents[moved] = permute(np.arange(low, high + 1), whole, seed=seed, epoch=epoch)[asked - low]
        else:
            extents[moved] = permute(asked, whole, seed=seed, epoch=epoch)
        return extents

    def _seed(self, purpose: int) -> int:
        return mix(mix(_SALT + purpose) + self.seed)

    def _places(self, positions: _Ints) -> tuple[_Ints, _Ints, _Ints, _Ints]:
        """Return of each position: its lane, its place in the stream before shuffling, start and end of its piece."""
        require_positions(positions, self.n)
        row, lane = np.divmod(positions, self.lanes)
        first = self._segment_start(lane)
        stream = first + row
        low = stream - stream % self.window_samples
        start = np.maximum(first, low)
        end = np.minimum(self._segment_start(lane + 1), low + self.window_samples)
        return lane, stream, start, end

    def _segment_start(self, lane: _Ints | np.int64) -> _Ints:
        """Return where lanes' segments start: the first n mod `lanes` of them are longer by one sample."""
        share, longer = divmod(self.n, self.lanes)
        start: _Ints = lane * share + np.minimum(lane, longer)
        return start
