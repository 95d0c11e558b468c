"""Reading a windowed order: long reads of whole pieces, each once an epoch, and batches that are views into them."""

from __future__ import annotations

import threading
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from shardkit.dataset.batch import EncodedBatch
from shardkit.dataset.shardset import Located
from shardkit.errors import IntegrityError, StorageError

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

    from shardkit.dataset.reading import Payloads, SampleReader, SampleReads
    from shardkit.dataset.source import SampleSource, Step
    from shardkit.dataset.steps import BatchPlan
    from shardkit.dataset.window import Piece, WindowOrder
    from shardkit.storage.buffers import BufferPool

    _Ints = npt.NDArray[np.int64]

__all__ = ["WindowReading"]


class WindowReading:
    """Reads whole pieces of a windowed order, each once an epoch, and cuts the batches out of them.

    A piece is held until a step comes that takes a later piece of the same lane; its memory goes back when the last
    batch with a view into it is released. So the pool needs room for two pieces of each lane that the rank serves, and
    for more where a step takes more than two pieces of a lane.

    The next piece of a lane is read ahead into the second place, as soon as nobody looks at what was there. It needs no
    more room: of a lane there are never more than the held piece and the next one, until a step takes the next one, and
    then it is one of those that the step needs anyway. What a step waits for is thus never kept by what is ahead.
    """

    reads_ahead = True

    def __init__(
        self, source: SampleSource, pool: BufferPool, order: WindowOrder, plan: BatchPlan, *, piece_bytes: int
    ) -> None:
        """Read from `source`, whose order `order` is.

        Args:
            source: samples and order.
            pool: with room for as many pieces as `shardkit.dataset.budget.pieces_held` says.
            order: of the epoch.
            plan: whose steps come; no piece is read ahead that none of them takes.
            piece_bytes: what every piece takes of the pool, so that one always fits into another's place.
        """
        self._source, self._pool, self._order = source, pool, order
        self._piece_bytes = piece_bytes
        self._held: dict[int, _HeldPiece] = {}  # by lane
        self._next: dict[int, _HeldPiece] = {}  # by lane: read ahead, or about to be
        self._planned: dict[int, tuple[Piece, SampleReads]] = {}  # by lane: what is next once there is memory for it
        self._plan, self._epoch, self._begun = plan, 0, 0

    def begin(self, step: Step) -> Callable[[], EncodedBatch]:
        """Plan the pieces that a step takes first and wait for their memory; see `Reading`."""
        parts = []
        pieces = self._order.pieces_of(step.positions)
        wanted = {piece for piece, _, _ in pieces}
        for piece, members, inside in pieces:
            held = self._held.get(piece.lane)
            if held is None or held.piece != piece:
                held = self._held[piece.lane] = self._take(step.epoch, piece, wanted)
            parts.append((held, members, self._order.shuffled(step.epoch, piece, inside)))
        self._epoch, self._begun = step.epoch, max(self._begun, int(step.positions.max(initial=-1)) + 1)
        return partial(self._cut, step, parts)  # no function around the memory, which a traceback would keep

    def ahead(self) -> Callable[[], object] | None:
        """Take the memory of the piece that is needed the soonest and is not here; see `Reading`."""
        if not all(held.there for held in self._held.values()):
            return None  # somebody waits for that, so nothing else is to take of the storage's time
        last = [held.piece for lane, held in self._held.items() if lane not in self._next]
        following = [one for one in map(self._order.following, last) if one is not None]
        places = {self._order.first_position(one): one for one in following}
        # A padded step comes back to the first pieces of lanes, and nothing goes on from there.
        soonest = min((place for place in places if place >= self._begun and self._plan.takes(place)), default=None)
        if soonest is None:
            return None
        piece = places[soonest]
        try:
            held = self._next[piece.lane] = self._hold(self._epoch, piece, timeout_s=0)
        except StorageError:
            return None
        return partial(held.read, self._source.reader)

    def _cut(self, step: Step, parts: list[tuple[_HeldPiece, _Ints, _Ints]]) -> EncodedBatch:
        """Read the pieces that are not there yet, or wait for who reads them, and cut the batch out."""
        count = len(step.positions)
        ids, addresses = np.zeros(count, np.int64), np.zeros(count, np.int64)
        located = Located(
            shard=np.zeros(count, np.int32), offset=ids.copy(), size=ids.copy(), label=ids.copy(),
        )  # fmt: skip
        views: list[Any] = [None] * count
        metadata: list[Any] = [None] * count
        bad = {}
        for held, members, chosen in parts:
            payloads = held.read(self._source.reader)
            ids[members], addresses[members] = held.reads.ids[chosen], payloads.addresses[chosen]
            for name in ("shard", "offset", "size", "label"):
                getattr(located, name)[members] = getattr(held.reads.located, name)[chosen]
            for at, one in zip(members.tolist(), chosen.tolist(), strict=True):
                views[at] = payloads.views[one]
                if payloads.metadata is not None:
                    metadata[at] = payloads.metadata[one]
                if one in payloads.bad:
                    bad[at] = payloads.bad[one]
        batch = EncodedBatch(
            samples=self._source.reader.samples, epoch=step.epoch, step=step.number, positions=step.positions,
            ids=ids, attempts=np.zeros(count, np.int64), located=located, addresses=addresses, views=views,
            metadata=metadata if self._source.reader.metadata else None, space=self._source.reader.space.name,
        )  # fmt: skip
        return self._source.finish(batch, bad)

    def _take(self, epoch: int, piece: Piece, wanted: set[Piece]) -> _HeldPiece:
        """Return the piece that was read ahead, or another one after waiting for its memory."""
        ahead = self._next.get(piece.lane)
        if ahead is not None and (ahead.piece == piece or ahead.piece not in wanted):
            del self._next[piece.lane]  # in the second case so that its memory comes back
            if ahead.piece == piece:
                return ahead
        del ahead
        return self._hold(epoch, piece)

    def _hold(self, epoch: int, piece: Piece, *, timeout_s: float | None = None) -> _HeldPiece:
        planned = self._planned.get(piece.lane)
        reads = planned[1] if planned is not None and planned[0] == piece else self._reads(epoch, piece)
        self._planned[piece.lane] = piece, reads  # there may be no memory for it yet, at several tries
        # Of shards that stay in GPU memory nothing is read into the pool, and of others all pieces take as much.
        nbytes = self._piece_bytes if reads.nbytes else 0
        memory = self._pool.acquire(nbytes, timeout_s=timeout_s) if nbytes else memoryview(bytearray())
        del self._planned[piece.lane]
        return _HeldPiece(piece, reads, memory)

    def _reads(self, epoch: int, piece: Piece) -> SampleReads:
        samples = self._source.reader.samples
        reads = self._source.reader.plan(samples.ids(self._order.members(epoch, piece)))
        if reads.nbytes > self._piece_bytes:  # memory was counted by the index's `sample_size`
            raise IntegrityError(
                "the index states samples smaller than their members",
                path=samples.shard_paths[int(reads.located.shard[0])],
                offset=int(reads.located.offset[0]), key=samples.keys(reads.ids[:1])[0],
                expected=f"at most {self._piece_bytes} bytes for {len(reads.ids)} samples from here on",
                found=reads.nbytes, remedy="run shardkit verify",
            )  # fmt: skip
        return reads


class _HeldPiece:
    """A piece in memory, or on its way there."""

    def __init__(self, piece: Piece, reads: SampleReads, memory: memoryview) -> None:
        self.piece, self.reads = piece, reads
        self._memory = memory
        self._payloads: Payloads | None = None
        self._lock = threading.Lock()

    @property
    def there(self) -> bool:
        """Whether it was read."""
        return self._payloads is not None

    def read(self, reader: SampleReader) -> Payloads:
        """Return its payloads; the first caller reads them, the others wait. A failed read is tried by each of them."""
        with self._lock:
            if self._payloads is None:
                self._payloads = reader.read(self.reads, self._memory)
                self._memory = memoryview(b"")  # the views hold it
            return self._payloads
