"""The batches of an epoch: which samples, read how, and with substitutes in the place of bad ones."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Protocol

import numpy as np

from shardkit.dataset.bad import ATTEMPTS, BadSamples, substitute_position
from shardkit.dataset.batch import EncodedBatch
from shardkit.errors import FormatError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import numpy.typing as npt

    from shardkit.dataset.order import Order
    from shardkit.dataset.reading import Payloads, SampleReader, SampleReads
    from shardkit.dataset.shardset import Located
    from shardkit.storage.buffers import BufferPool

    _Ints = npt.NDArray[np.int64]

__all__ = ["BatchReading", "Reading", "SampleSource", "Step", "encoded_batch"]


@dataclass(frozen=True, slots=True)
class Step:
    """One step of an epoch for one rank."""

    epoch: int
    number: int
    """From 0."""
    positions: _Ints
    """[n] places in the epoch."""


class SampleSource:
    """What every way of reading an epoch shares: samples, their order, and what becomes of bad ones."""

    def __init__(self, reader: SampleReader, order: Order, bad: BadSamples, *, seed: int) -> None:
        """Join them; all stay the caller's. `seed` chooses the substitutes."""
        self.reader, self.order, self.bad = reader, order, bad
        self._seed = seed

    def ids(self, epoch: int, positions: _Ints) -> _Ints:
        """Return the ids of the samples at places of an epoch; int64 [n]."""
        return self.reader.samples.ids(self.order.at(epoch, positions))

    def finish(self, batch: EncodedBatch, bad: Mapping[int, str]) -> EncodedBatch:
        """Return a batch without the samples that are bad or known to be."""
        unusable = {**self.bad.known(batch.ids), **bad}
        if not unusable:
            return batch
        try:
            return self._replaced(batch, unusable, lasting=True)
        except BaseException:
            batch.release()
            raise

    def replace(self, batch: EncodedBatch, bad: Mapping[int, str]) -> EncodedBatch:
        """Return a batch in which substitutes stand in for bad samples; see `shardkit.pipeline.decoder.BatchSource`."""
        return self._replaced(batch, bad, lasting=False)

    def _replaced(self, batch: EncodedBatch, bad: Mapping[int, str], *, lasting: bool) -> EncodedBatch:
        places = sorted(bad)
        first = int((batch.attempts[places] == 0).sum())
        batch = batch.substituted({at: self._substitute(batch, at, bad[at], lasting=lasting) for at in places})
        self.bad.count_substitutions(first)
        return batch

    def _substitute(self, batch: EncodedBatch, at: int, reason: str, *, lasting: bool) -> EncodedBatch:
        """Read the next usable substitute for one place: a batch of one."""
        self.bad.note(int(batch.ids[at]), reason, batch.place(at), lasting=lasting)
        position, epoch = int(batch.positions[at]), batch.epoch
        for attempt in range(int(batch.attempts[at]), ATTEMPTS):
            other = substitute_position(position, attempt, self.order.n, seed=self._seed, epoch=epoch)
            ids = self.ids(epoch, np.asarray([other], np.int64))
            if self.bad.known(ids):
                continue
            reads, payloads = self.reader.read_alone(ids)
            here = Step(epoch, batch.step, batch.positions[at : at + 1])
            one = encoded_batch(self, here, reads.ids, reads.located, payloads)
            if not payloads.bad:
                one.attempts[:] = attempt + 1
                return one
            self.bad.note(int(ids[0]), payloads.bad[0], one.place(0), lasting=True)
        path, offset = batch.place(at)
        raise FormatError(
            "no sample can stand in for a bad one", path=path, offset=offset, key=batch.key(at),
            expected=f"a usable one among {ATTEMPTS} of the epoch", found=f"{len(self.bad.by_key)} bad ones so far",
            remedy="run shardkit verify --level decode",
        )  # fmt: skip


class Reading(Protocol):
    """A way to read steps, of one epoch or of those that follow each other."""

    reads_ahead: bool
    """Whether `ahead` ever has work, so that it is worth a thread."""

    def begin(self, step: Step) -> Callable[[], EncodedBatch]:
        """Plan a step and wait for its memory. Called for one step after the other, so memory is asked for in order.

        Returns:
            What reads it: called once, in any thread, at the same time as that of other steps.
        """

    def ahead(self) -> Callable[[], object] | None:
        """Take, without waiting, the memory of what later steps will need; never called at the same time as `begin`.

        Returns:
            What reads it: called once, in any thread, at the same time as `begin` and what that returns. Where it
            fails, a step that needs it reads it again. None: there is nothing to read, or no memory for it now.
        """


class BatchReading:
    """Reads the samples of each step for themselves: for orders without any locality, or with all of it."""

    reads_ahead = False

    def __init__(self, source: SampleSource, pool: BufferPool) -> None:
        """Read from `source` into memory of `pool`."""
        self._source, self._pool = source, pool

    def begin(self, step: Step) -> Callable[[], EncodedBatch]:
        """Plan a step and wait for its memory; see `Reading`."""
        source = self._source
        reads = source.reader.plan(source.ids(step.epoch, step.positions))
        memory = self._pool.acquire(reads.nbytes) if reads.nbytes else memoryview(bytearray())
        # Not a function of its own around the memory: the traceback of an error would keep such a one, and all of that.
        return partial(self._read, step, reads, memory)

    def ahead(self) -> None:
        """Read nothing ahead: steps share nothing, and each is read as soon as there is room for it."""

    def _read(self, step: Step, reads: SampleReads, memory: memoryview) -> EncodedBatch:
        payloads = self._source.reader.read(reads, memory)
        return self._source.finish(encoded_batch(self._source, step, reads.ids, reads.located, payloads), payloads.bad)


def encoded_batch(source: SampleSource, step: Step, ids: _Ints, located: Located, payloads: Payloads) -> EncodedBatch:
    """Return the batch of a step, whose samples lie in the order of its positions."""
    return EncodedBatch(
        samples=source.reader.samples, epoch=step.epoch, step=step.number, positions=step.positions, ids=ids,
        attempts=np.zeros(len(ids), np.int64), located=located, addresses=payloads.addresses, views=payloads.views,
        metadata=payloads.metadata, space=source.reader.space.name,
    )  # fmt: skip
