"""Reading a windowed order: long reads of whole pieces, each once an epoch, and batches that are views into them."""

from __future__ import annotations

import contextlib
import threading
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from shardkit.dataset.reading import Payloads
from shardkit.dataset.shardset import Located
from shardkit.dataset.source import encoded_batch
from shardkit.errors import IntegrityError, StorageError

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

    from shardkit.dataset.batch import EncodedBatch
    from shardkit.dataset.reading import Fetched, SampleReader, SampleReads
    from shardkit.dataset.source import SampleSource, Step
    from shardkit.dataset.steps import BatchPlan
    from shardkit.dataset.window import Piece, WindowOrder
    from shardkit.storage.buffers import BufferPool

    _Ints = npt.NDArray[np.int64]
    _What: TypeAlias = tuple[int, Piece]
    """A piece of an epoch."""

__all__ = ["WindowReading"]


class WindowReading:
    """Reads whole pieces of a windowed order, each once an epoch, and cuts the batches out of them.

    A piece is held until a step comes that takes a later piece of the same lane; its memory goes back when the last
    batch with a view into it is released. So no step waits for ever in a pool that has room for two pieces of each lane
    that the rank serves, and for more where a step takes more than two pieces of a lane.

    The next piece of a lane is read ahead as soon as the bytes of the present one are here, and it is planned before.
    It needs no more room: of a lane there are never more than the held piece and the next one, until a step takes the
    next one, and then it is one of those that the step needs anyway. What a step waits for is thus never kept by what
    is ahead. But a batch on the border of two pieces keeps the old one until it is handed out; with room for a third
    one the storage need not wait for that. Where epochs follow each other, the next epoch's first piece comes behind a
    lane's last one in the same way.
    """

    reads_ahead = True

    def __init__(
        self, source: SampleSource, pool: BufferPool, order: WindowOrder, plan: BatchPlan, *, piece_bytes: int,
        endless: bool = False,
    ) -> None:  # fmt: skip
        """Read from `source`, whose order `order` is.

        Args:
            source: samples and order.
            pool: with room for as many pieces as `shardkit.dataset.budget.pieces_held` says.
            order: of the epoch.
            plan: whose steps come; no piece is read ahead that none of them takes.
            piece_bytes: what every piece takes of the pool, so that one always fits into another's place.
            endless: whether the next epoch's steps follow an epoch's last one.
        """
        self._source, self._pool, self._order = source, pool, order
        self._piece_bytes = piece_bytes
        self._held: dict[int, _HeldPiece] = {}  # by lane
        self._next: dict[int, _HeldPiece] = {}  # by lane: read ahead, or about to be
        self._planned: dict[int, tuple[_What, SampleReads]] = {}  # by lane: what is read next
        self._plan, self._endless = plan, endless
        self._begun = 0, 0  # epoch, and the position behind the last one of it that a step took
        self._ended = -1  # epoch whose last step was begun

    def begin(self, step: Step) -> Callable[[], EncodedBatch]:
        """Plan the pieces that a step takes first and wait for their memory; see `Reading`."""
        if step.epoch != self._begun[0]:  # a padded step may have come into the lanes of other ranks
            self._held = {lane: held for lane, held in self._held.items() if self._plan.takes(lane)}
        parts = []
        pieces = self._order.pieces_of(step.positions)
        wanted = {(step.epoch, piece) for piece, _, _ in pieces}
        for piece, members, inside in pieces:
            held = self._held.get(piece.lane)
            if held is None or held.what != (step.epoch, piece):
                held = self._held[piece.lane] = self._take((step.epoch, piece), wanted)
            parts.append((held, members, self._order.shuffled(step.epoch, piece, inside)))
        self._begun = max(self._begun, (step.epoch, int(step.positions.max(initial=-1)) + 1))
        if step.number == self._plan.steps - 1:
            self._ended = step.epoch
        with contextlib.suppress(Exception):  # a step that needs it fails at that, too, and tells
            self._plan_next()
        return partial(self._cut, step, parts)  # no function around the memory, which a traceback would keep

    def ahead(self) -> Callable[[], object] | None:
        """Take the memory of the piece that is needed the soonest and is not here; see `Reading`."""
        if not all(held.fetched for held in self._held.values()):
            return None  # somebody waits for that, so nothing else is to take of the storage's time
        soonest = self._soonest()
        if soonest is None:
            return None
        try:
            held = self._next[soonest[1].lane] = self._hold(soonest, timeout_s=0)
        except StorageError:
            return None
        return partial(held.fetch, self._source.reader)

    def _soonest(self) -> _What | None:
        """Return the piece that is needed the soonest of those that are neither here nor on their way."""
        last = [held.what for lane, held in self._held.items() if lane not in self._next]
        following = [what for what in map(self._following, last) if what is not None]
        return min(following, key=lambda what: (what[0], self._place(what[1])), default=None)

    def _plan_next(self) -> None:
        """Plan the piece that is read next, before there is memory for it."""
        soonest = self._soonest()
        if soonest is not None:
            self._planned_reads(soonest)

    def _following(self, what: _What) -> _What | None:
        """Return what a lane needs behind one of its pieces; None when no step takes more of it."""
        epoch, piece = what
        following = self._order.following(piece)
        # A padded step comes back to the first pieces of lanes, and nothing goes on from there.
        if following is not None and self._takes(following) and (epoch, self._place(following)) >= self._begun:
            return epoch, following
        if not self._endless or (self._plan.padded and self._ended < epoch):
            return None  # a padded step needs the room for what it comes back to
        first = self._order.first(piece.lane)
        return None if first is None or not self._takes(first) else (epoch + 1, first)

    def _takes(self, piece: Piece) -> bool:
        return self._plan.takes(self._place(piece))

    def _place(self, piece: Piece) -> int:
        return self._order.first_position(piece)

    def _cut(self, step: Step, parts: list[tuple[_HeldPiece, _Ints, _Ints]]) -> EncodedBatch:
        """Read the pieces that are not there yet, or wait for who reads them, and cut the batch out.

        What has to be looked at is the step's own samples and no others, so that all steps have the same to do.
        """
        reader = self._source.reader
        found = [(members, *held.read(reader, chosen)) for held, members, chosen in parts]
        if not found:  # a rank that the last step has nothing for
            reads = reader.plan(step.positions)
            found = [(step.positions, reads, reader.cut(reads, memoryview(bytearray()), None))]
        ids, located, payloads = _joined(found)
        return self._source.finish(encoded_batch(self._source, step, ids, located, payloads), payloads.bad)

    def _take(self, what: _What, wanted: set[_What]) -> _HeldPiece:
        """Return the piece that was read ahead, or another one after waiting for its memory."""
        lane = what[1].lane
        ahead = self._next.get(lane)
        if ahead is not None and (ahead.what == what or ahead.what not in wanted):
            del self._next[lane]  # in the second case so that its memory comes back
            if ahead.what == what:
                return ahead
        del ahead
        return self._hold(what)

    def _hold(self, what: _What, *, timeout_s: float | None = None) -> _HeldPiece:
        reads = self._planned_reads(what)
        # Of shards that stay in GPU memory nothing is read into the pool, and of others all pieces take as much.
        nbytes = self._piece_bytes if reads.nbytes else 0
        memory = self._pool.acquire(nbytes, timeout_s=timeout_s) if nbytes else memoryview(bytearray())
        del self._planned[what[1].lane]
        return _HeldPiece(what, reads, memory)

    def _planned_reads(self, what: _What) -> SampleReads:
        """Return what a piece needs to be read, planned once though there may be no memory for it at several tries."""
        planned = self._planned.get(what[1].lane)
        if planned is None or planned[0] != what:
            planned = self._planned[what[1].lane] = what, self._reads(*what)
        return planned[1]

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

    def __init__(self, what: _What, reads: SampleReads, memory: memoryview) -> None:
        self.what, self.reads = what, reads
        self.fetched = False
        """Whether its bytes are there."""
        self._memory = memory
        self._known: Fetched = None
        self._lock = threading.Lock()

    def fetch(self, reader: SampleReader) -> None:
        """Have its bytes there; the first caller reads them, the others wait. A failed read is tried by each."""
        with self._lock:
            if not self.fetched:
                self._known = reader.fetch(self.reads, self._memory)
                self.fetched = True

    def read(self, reader: SampleReader, chosen: _Ints) -> tuple[SampleReads, Payloads]:
        """Return some of its samples, int64 [k] places in it, and their payloads, likewise."""
        self.fetch(reader)
        reads, known = self.reads.of(chosen), None if self._known is None else self._known[chosen]
        return reads, reader.cut(reads, self._memory, known)


def _joined(parts: list[tuple[_Ints, SampleReads, Payloads]]) -> tuple[_Ints, Located, Payloads]:
    """Return the ids, places and payloads of a batch from those of its pieces, each with its places in the batch."""
    if len(parts) == 1:  # as it is for most steps
        _, reads, payloads = parts[0]
        return reads.ids, reads.located, payloads
    order = np.argsort(np.concatenate([members for members, _, _ in parts]))
    views = [view for _, _, payloads in parts for view in payloads.views]
    metadata = [fields for _, _, payloads in parts for fields in payloads.metadata or ()]
    located = {
        name: np.concatenate([getattr(reads.located, name) for _, reads, _ in parts])[order]
        for name in ("shard", "offset", "size", "label")
    }
    payloads = Payloads(
        views=[views[one] for one in order],
        addresses=np.concatenate([payloads.addresses for _, _, payloads in parts])[order],
        metadata=[metadata[one] for one in order] if metadata else None,
        bad={int(members[one]): why for members, _, payloads in parts for one, why in payloads.bad.items()},
    )
    return np.concatenate([reads.ids for _, reads, _ in parts])[order], Located(**located), payloads
