"""One pass over a dataset, the stream of batches that it comes out of, and what it adds to the loader's sums."""

from __future__ import annotations

import contextlib
import os
import threading
import time
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeAlias

from shardkit.dataset.state import Position
from shardkit.errors import ConfigError
from shardkit.torch.ranks import require_own_process
from shardkit.tracing import ranges

if TYPE_CHECKING:
    from collections.abc import Callable

    from shardkit.dataset.fetch import Fetcher
    from shardkit.pipeline.decoder import DecodedBatch

__all__ = ["Ahead", "Batch", "Epoch", "LoaderStats", "Progress", "Stream", "outside"]

_POLL_S = 0.002
_ENDING = "shardkit-end"

Batch: TypeAlias = tuple[Any, ...]
"""Images and labels, and with fields the extras: tensors [B, 3, S, S] and [B], and a dict. Any: they differ in type."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderStats:
    """What a loader has done so far, over all its epochs."""

    batches: int
    """Batches handed out."""
    samples: int
    """Samples in them."""
    bytes: Mapping[str, int]
    """Bytes read, by the path that they took: "direct" (past the page cache), "page cache"."""
    wait_read_s: float
    """Seconds for which nothing was in the decoder because the next batch was not read yet."""
    wait_decode_s: float
    """Seconds for which the training loop waited for pixels, reading aside."""
    io: str
    """The way of reading in use."""
    io_reason: str
    """Why it was chosen."""
    decoder: str
    """The decoder in use."""
    decoder_reason: str
    """Why it was chosen."""
    decoded_by: Mapping[str, int]
    """Images by who decoded them: what DALI cannot make out goes to Pillow."""
    bad: Mapping[str, str]
    """Why a sample could not be used, by its key."""
    substitutions: int
    """How often another sample stood in for one of them."""
    crc_retries: int
    """Images that were read wrong at first, and right past the page cache; counted with check="crc"."""
    buffer_budget_bytes: int
    """The most memory that encoded batches may take."""
    buffer_bytes: int
    """What they take now."""
    memory: Mapping[str, int]
    """Bytes that were taken, by place: "host" and "pinned" of host memory; of the GPU's "gpu encoded" for encoded
    images on their way, "gpu cache" for shards that stay, "gpu decoder" for what the decoder keeps, but for what nvJPEG
    and DALI take for themselves. The batches are PyTorch's."""
    cache: Mapping[str, int]
    """What `cache_gpu` was worth: "hits" and "hit bytes" of images that were there, "misses" of those that had to be
    read into it, "read bytes" with what lay between them, "shards" that it keeps; empty without."""


class Progress:
    """Where a loader is, and its sums over all epochs."""

    def __init__(self) -> None:
        """Start at nothing."""
        self.position = Position(0, 0)
        """Behind the last batch that was handed out."""
        self.next = Position(0, 0)
        """Where the next iteration starts."""
        self.loaded: Position | None = None
        """Of the state that was loaded last, until a batch is asked for."""
        self.batches = self.samples = 0
        self.wait_read_s = self.wait_decode_s = 0.0
        self.stuck = False
        """A read did not end when its epoch did; nothing may wait for it."""


class Stream:
    """Decoded batches from a position on, and the threads that read and decode them, which end when it is dropped."""

    def __init__(
        self, fetcher: Fetcher, decoding: Iterator[DecodedBatch], start: Position, progress: Progress, *, endless: bool
    ) -> None:
        """Take over a running `fetcher` and the decoder's run on it.

        Args:
            fetcher: reads.
            decoding: gives the batches, whose pixels are what is handed out: a `Batch`.
            start: position of the first one.
            progress: is told of a read that does not end.
            endless: whether the next epoch's batches follow an epoch's last one.
        """
        self.fetcher, self.decoding, self.endless = fetcher, decoding, endless
        self.position = start
        """Where the epoch that takes it over begins."""
        self._end = weakref.finalize(self, outside, os.getpid(), _end, decoding, fetcher, progress)

    @property
    def alive(self) -> bool:
        """Whether it was not closed."""
        return self._end.alive

    def close(self) -> None:
        """End its threads and give back their memory; idempotent."""
        self._end()


class Ahead:
    """What an epoch that is over leaves to the next one: a stream whose first batches are being read and decoded."""

    def __init__(self) -> None:
        """Begin without any."""
        self._stream: Stream | None = None

    def leave(self, stream: Stream) -> None:
        """Keep a stream."""
        self._stream = stream

    def take(self, position: Position) -> Stream | None:
        """Return the stream if its next batch is at a position; else close it."""
        stream, self._stream = self._stream, None
        # Closed it is when Ctrl-C came while it was left: the epoch that was over did not know yet.
        if stream is not None and not (stream.alive and stream.position == position):
            stream.close()
            return None
        return stream

    def close(self) -> None:
        """Close the stream; idempotent."""
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.close()


class Epoch(Iterator[Batch]):
    """One iteration: owns a stream, and ends it when it is dropped; at its own end it leaves an endless one."""

    def __init__(self, stream: Stream, steps: int, progress: Progress, ahead: Ahead, owner: object) -> None:
        """Take over a stream.

        Args:
            stream: at the epoch's first batch.
            steps: of a whole epoch.
            progress: is kept up to date.
            ahead: gets the stream at the end.
            owner: stays while the epoch does; closes all that the stream works with when it goes.
        """
        self._owner = owner
        self._inside: int | None = None  # the thread that asks for a batch
        self._stream, self._progress, self._ahead = stream, progress, ahead
        self._number, self._step, self._steps = stream.position.epoch, stream.position.step, steps
        self._last: DecodedBatch | None = None  # without its pixels
        self._taken: Position | None = progress.next  # until the first batch is asked for
        self._ended_by, self._over, self._process = "", False, os.getpid()

    @property
    def alive(self) -> bool:
        """Whether it can still give a batch."""
        return not self._over and self._stream.alive

    @property
    def used(self) -> bool:
        """Whether a batch was asked for."""
        return self._taken is None

    def __next__(self) -> Batch:
        """Return the next batch, or raise what reading or decoding it raised; either end of the epoch closes it."""
        require_own_process(self._process)
        if self._ended_by:
            raise ConfigError(
                f"this iteration is over: {self._ended_by}", remedy="take a loader of its own for each loop"
            )
        progress, stream = self._progress, self._stream
        started, read = time.perf_counter(), stream.fetcher.waited_s
        if self._taken is not None:
            progress.position = self._taken
            if self._taken == progress.next:  # else set_epoch has named another one meanwhile
                progress.next = Position(self._taken.epoch + 1, 0)
        self._taken = progress.loaded = None
        try:
            self._inside = threading.get_ident()
            try:
                with ranges("consumer waits") as span:
                    decoded = self._next(stream)
                    span.step = decoded.batch.step
            finally:
                self._inside = None
        except StopIteration:
            if progress.position == Position(self._number, self._steps):
                progress.position = progress.next
            self._leave(stream)  # of one that began at its end
            self.close()  # an epoch that is over holds nothing
            raise
        except BaseException:
            self.close()
            raise
        waited = stream.fetcher.waited_s - read
        progress.wait_read_s += waited
        progress.wait_decode_s += time.perf_counter() - started - waited
        progress.batches += 1
        progress.samples += len(decoded.batch)
        parts: Batch = decoded.pixels  # by `Renderer`
        self._last, self._step = replace(decoded, pixels=None), decoded.batch.step + 1
        progress.position = Position(decoded.batch.epoch, self._step)
        self._leave(stream)  # here, too: not every training loop asks for what comes behind the last batch
        return parts

    def _next(self, stream: Stream) -> DecodedBatch:
        """Return the next batch, or raise StopIteration, when nothing of the epoch can fail any more."""
        if self._over or (stream.endless and self._step == self._steps):
            if self._last is not None:
                self._last.settle()
                self._last = None
            raise StopIteration
        return next(stream.decoding)

    def _leave(self, stream: Stream) -> None:
        """Leave the stream to the next epoch behind the last batch of this one, if that is the one that comes."""
        following = Position(self._number + 1, 0)
        if stream.endless and self.alive and self._step == self._steps and self._progress.next == following:
            stream.position = following
            self._ahead.leave(stream)
            self._over = True

    def close(self, reason: str = "") -> None:
        """End it; idempotent.

        Args:
            reason: why, if batches may be missed by who iterates; asking for one is an error then.
        """
        if self.alive:
            self._ended_by = reason
        # Another thread may be asking for a batch: what runs cannot be closed.
        while self._inside not in {None, threading.get_ident()}:
            time.sleep(_POLL_S)
        if not self._over:
            self._stream.close()


def outside(process: int, call: Callable[..., None], *arguments: object) -> None:
    """Make a call that waits for our threads: here, or in a thread of its own if this one is among them.

    For finalisers: the garbage collector runs them in any thread, at any place, so also in one that holds what they
    would wait for; and in a forked child, which has none of the threads and nothing to give back.
    """
    if process != os.getpid():
        return
    name = threading.current_thread().name
    if name.startswith("shardkit-") and name != _ENDING:  # who ends things there waits for each before the next
        threading.Thread(target=call, args=arguments, name=_ENDING, daemon=True).start()
    else:
        call(*arguments)


def _end(decoding: Iterator[DecodedBatch], fetcher: Fetcher, progress: Progress) -> None:
    with contextlib.ExitStack() as stack:  # whatever interrupts, every step is made
        stack.callback(_end_reading, fetcher, progress)
        # Decoding first: the reading threads may wait for memory that the decoder gives back.
        closing = getattr(decoding, "close", None)
        if closing is not None:
            closing()


def _end_reading(fetcher: Fetcher, progress: Progress) -> None:
    if not fetcher.close():
        progress.stuck = True
