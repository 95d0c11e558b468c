"""Reading a windowed order: long reads of whole pieces, each once an epoch, and batches that are views into them."""

from __future__ import annotations

import threading
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from shardkit.dataset.batch import EncodedBatch
from shardkit.dataset.shardset import Located
from shardkit.errors import IntegrityError

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

    from shardkit.dataset.reading import Payloads, SampleReader, SampleReads
    from shardkit.dataset.source import SampleSource, Step
    from shardkit.dataset.window import Piece, WindowOrder
    from shardkit.storage.buffers import BufferPool

    _Ints = npt.NDArray[np.int64]

__all__ = ["WindowReading"]


class WindowReading:
    """Reads whole pieces of a windowed order, each once an epoch, and cuts the batches out of them.

    A piece is held until a step comes that takes a later piece of the same lane; its memory goes back when the last
    batch with a view into it is released. So the pool needs room for two pieces of each lane that the rank serves, and
    for more where a step takes more than two pieces of a lane.
    """

    def __init__(self, source: SampleSource, pool: BufferPool, order: WindowOrder, *, piece_bytes: int) -> None:
        """Read from `source`, whose order `order` is.

        Args:
            source: samples and order.
            pool: with room for as many pieces as `shardkit.dataset.budget.pieces_held` says.
            order: of the epoch.
            piece_bytes: what every piece takes of the pool, so that one always fits into another's place.
        """
        self._source, self._pool, self._order = source, pool, order
        self._piece_bytes = piece_bytes
        self._held: dict[int, _HeldPiece] = {}  # by lane

    def begin(self, step: Step) -> Callable[[], EncodedBatch]:
        """Plan the pieces that a step takes first and wait for their memory; see `Reading`."""
        parts = []
        for piece, members, inside in self._order.pieces_of(step.positions):
            held = self._held.get(piece.lane)
            if held is None or held.piece != piece:
                held = self._held[piece.lane] = self._hold(step.epoch, piece)
            parts.append((held, members, self._order.shuffled(step.epoch, piece, inside)))
        return partial(self._cut, step, parts)  # no function around the memory, which a traceback would keep

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
            payloads = held.payloads(self._source.reader)
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

    def _hold(self, epoch: int, piece: Piece) -> _HeldPiece:
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
        # Of shards that stay in GPU memory nothing is read into the pool, and of others all pieces take as much.
        memory = self._pool.acquire(self._piece_bytes) if reads.nbytes else memoryview(bytearray())
        return _HeldPiece(piece, reads, memory)


class _HeldPiece:
    """A piece in memory, or on its way there."""

    def __init__(self, piece: Piece, reads: SampleReads, memory: memoryview) -> None:
        self.piece, self.reads = piece, reads
        self._memory = memory
        self._payloads: Payloads | None = None
        self._lock = threading.Lock()

    def payloads(self, reader: SampleReader) -> Payloads:
        """Return its payloads; the first caller reads them, the others wait. A failed read is tried by each of them."""
        with self._lock:
            if self._payloads is None:
                self._payloads = reader.read(self.reads, self._memory)
                self._memory = memoryview(b"")  # the views hold it
            return self._payloads
