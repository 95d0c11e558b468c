"""The thread that keeps DALI busy: batches go in as chunks, crops come out, and what cannot be decoded is replaced.

A batch is fed in chunks for two reasons: the first are finished while the next are decoded, and DALI gives up a whole
run when one image of it fails, so that a bad image costs a chunk and not a batch. One graph serves a run, of one epoch
or many (building it takes milliseconds); it is fed by hand, and `external_source` looks at our memory without a copy
(`no_copy`). A list of arrays is the cheapest thing to feed: 4 µs an image, where a TensorListCPU of tensors takes 22.
"""

from __future__ import annotations

import contextlib
import logging
import re
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from shardkit.format.jpeg_header import fault, is_plain_jpeg
from shardkit.pipeline.cpu import put_by_pillow
from shardkit.pipeline.dali_library import guarded, telling_line
from shardkit.pipeline.finish import put_all
from shardkit.pipeline.flight import Flight, Tally
from shardkit.pipeline.workers import Cancelled, Outcome, Workers

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy.typing as npt

    from shardkit.dataset.batch import EncodedBatch
    from shardkit.pipeline.dali_library import Dali
    from shardkit.pipeline.decoder import BatchSource
    from shardkit.pipeline.finish import Finisher

__all__ = ["DecodingLine"]

_Foreign: TypeAlias = Any  # DALI has no types: pipelines, nodes of their graphs, tensors
_JPEG, _ANCHOR, _SHAPE = "jpeg", "anchor", "shape"
_CHUNK, _CHUNK_A_THREAD = 32, 4
_TASK = 8  # images that one task finishes
_NAMED = re.compile(r"sample #(\d+)")

_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Chunk:
    """Places of a batch that are decoded together, and what is looked at meanwhile."""

    flight: Flight
    places: list[int]
    views: list[npt.NDArray[np.uint8]]
    crops: tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]] | None = None
    pillow: list[Outcome[str | None]] | None = None
    """Tasks, one a place, where Pillow decodes in DALI's stead; their results say why an image cannot be decoded."""


class DecodingLine:
    """Decodes batches in the order in which they are taken.

    What DALI refuses is shown to Pillow, whole, so that the crop does not decide; what both refuse is replaced.
    """

    def __init__(
        self, dali: Dali, finisher: Finisher, source: BatchSource, finishing: Workers, tally: Tally, *, batch_size: int
    ) -> None:
        """Build the graph.

        Args:
            dali: the library.
            finisher: makes squares of crops.
            source: replaces bad samples.
            finishing: threads that finish; stay the caller's.
            tally: is added to.
            batch_size: the most images of a batch.
        """
        self._finisher, self._source, self._finishing, self._tally = finisher, source, finishing, tally
        self._spec, self._cut = finisher.spec, finisher.cut
        self._chunk = min(batch_size, max(_CHUNK, _CHUNK_A_THREAD * self._spec.thread_count))
        self._pipe = self._graph(dali)
        self._open: list[Flight] = []  # taken and not decoded
        self._taken: deque[Flight] = deque()
        self._chunks: deque[_Chunk] = deque()
        self._given_up: list[_Chunk] = []
        self._replacing: Flight | None = None
        self._closed = False
        self._thread = Workers(1, "shardkit-decode")

    def take(self, batch: EncodedBatch) -> Flight:
        """Let a batch in, and see to its release; called by one thread."""
        flight = Flight(batch, self._finisher.begin(len(batch)))
        self._open.append(flight)
        self._taken.append(flight)
        self._thread.submit(self._advance, flight)
        return flight

    def close(self) -> None:
        """Stop after the chunk that is being decoded, and release all batches.

        A thread that is in a substitute's read for too long is left behind. Its batch is not released.
        """
        self._closed = True
        with contextlib.ExitStack() as steps:  # the last one first
            steps.callback(self._release)
            for flight in list(self._open):
                steps.callback(flight.decoded.fail, Cancelled())
            self._thread.close()

    def _release(self) -> None:
        if not (self._thread.ended or self._thread.in_read):
            return  # Ctrl-C came between two steps of waiting: nothing may be taken from under DALI
        self._pipe = None  # waits for DALI, which looks at the memory of chunks
        for chunk in (*self._chunks, *self._given_up):
            chunk.views.clear()  # also when an error's traceback keeps the chunk
        for flight in self._open:
            if self._thread.ended or flight is not self._replacing:
                flight.batch.release()

    def _advance(self, flight: Flight) -> None:
        """Work until a batch is decoded; those taken meanwhile are fed before, so that DALI never runs dry."""
        worked_on = flight
        try:
            while not (self._closed or flight.decoded.done):
                while self._taken and not self._closed:
                    worked_on = self._taken.popleft()
                    self._start(worked_on, range(len(worked_on.batch)))
                if self._chunks:
                    chunk = self._chunks.popleft()
                    worked_on = chunk.flight
                    self._collect(chunk)
        except BaseException as error:  # whatever it is, who waits has to see it
            for broken in {flight, worked_on, *self._taken, *(chunk.flight for chunk in self._chunks)}:
                broken.decoded.fail(error)

    def _start(self, flight: Flight, places: Sequence[int], bad: Mapping[int, str] | None = None) -> None:
        """Replace what is bad, look at places of a batch, and feed them."""
        try:
            self._replace(flight, bad or {})
            while found := {at: why for at in places if (why := fault(flight.batch.views[at])) is not None}:
                self._replace(flight, found)
        except Exception as error:  # the source's; other batches go on
            flight.decoded.fail(error)
            return
        if flight.crops is None:
            flight.crops = self._finisher.crops(flight.batch)
        plain = [at for at in places if is_plain_jpeg(flight.batch.views[at])]
        other = [] if len(plain) == len(places) else sorted(set(places).difference(plain))
        for first in range(0, len(plain), self._chunk):
            self._feed(flight, plain[first : first + self._chunk])
        if other:
            self._feed_pillow(flight, other)
        self._end_of(flight)

    def _replace(self, flight: Flight, bad: Mapping[int, str]) -> None:
        if not bad:
            return
        self._replacing = flight
        with self._thread.reading():
            batch = self._source.replace(flight.batch, bad)
        # Whoever closes the line may have left this thread behind: nothing of the line may be touched then.
        if self._closed:
            batch.release()
            raise Cancelled
        flight.batch, flight.crops, self._replacing = batch, None, None

    def _feed(self, flight: Flight, places: list[int]) -> None:
        """Start a run of the graph; DALI looks at views and crops until its output is there."""
        chunk = _Chunk(flight, places, [flight.batch.views[at] for at in places])
        self._pipe.feed_input(_JPEG, chunk.views)
        if flight.crops is not None:
            chunk.crops = flight.crops.anchor[places], flight.crops.shape[places]
            self._pipe.feed_input(_ANCHOR, chunk.crops[0])
            self._pipe.feed_input(_SHAPE, chunk.crops[1])
        self._pipe.schedule_run()
        self._add(chunk)

    def _feed_pillow(self, flight: Flight, places: list[int]) -> None:
        chunk = _Chunk(flight, places, [flight.batch.views[at] for at in places])
        put, canvas, crops = self._finishing.submit, flight.canvas, flight.crops
        chunk.pillow = [put(put_by_pillow, canvas, at, v, crops) for at, v in zip(places, chunk.views, strict=True)]
        self._add(chunk)

    def _add(self, chunk: _Chunk) -> None:
        chunk.flight.left += 1
        self._chunks.append(chunk)

    def _collect(self, chunk: _Chunk) -> None:
        """Wait for the oldest chunk: what is decoded is finished by the threads, what is not goes once more."""
        flight = chunk.flight
        again, refused, bad = self._by_dali(chunk) if chunk.pillow is None else self._by_pillow(chunk, chunk.pillow)
        flight.left -= 1
        if flight.decoded.done:
            return
        if again:
            self._feed(flight, again)
        if refused:
            self._feed_pillow(flight, refused)
        if bad:
            self._start(flight, list(bad), bad)
        else:
            self._end_of(flight)

    def _by_dali(self, chunk: _Chunk) -> tuple[list[int], list[int], dict[int, str]]:
        """Take a chunk out of the graph; return the places for DALI once more, those for Pillow, and the bad ones."""
        try:
            (images,) = self._pipe.share_outputs()
        except RuntimeError as error:
            self._given_up.append(chunk)
            # A run that was started before may look at it. DALI does not when nothing runs.
            if all(other.pillow is not None for other in self._chunks):
                self._forget()
            return self._refused(chunk.places, error)
        self._finish(chunk, [np.asarray(images[number]) for number in range(len(chunk.places))])
        self._pipe.release_outputs()  # for its queue; the memory stays whoever's holds an image
        chunk.views.clear()
        self._forget()
        self._tally.dali += len(chunk.places)
        return [], [], {}

    def _forget(self) -> None:
        for done in self._given_up:
            done.views.clear()
        self._given_up.clear()

    def _refused(self, places: list[int], error: RuntimeError) -> tuple[list[int], list[int], dict[int, str]]:
        number = int(named[1]) if (named := _NAMED.search(str(error))) else -1
        if 0 <= number < len(places):
            return places[:number] + places[number + 1 :], [places[number]], {}
        if not self._tally.failed:
            self._tally.failed = True
            _log.warning(
                "DALI has failed and names no image; Pillow decodes what it should have decoded, slower, now and "
                "whenever this happens again: %s", telling_line(error),
            )  # fmt: skip
        return [], places, {}

    def _by_pillow(
        self, chunk: _Chunk, tasks: list[Outcome[str | None]]
    ) -> tuple[list[int], list[int], dict[int, str]]:
        """Wait for images that Pillow decodes; return as `_by_dali`."""
        bad = {at: why for at, task in zip(chunk.places, tasks, strict=True) if (why := task.wait()) is not None}
        chunk.views.clear()
        self._tally.pillow += len(tasks) - len(bad)
        return [], [], bad

    def _finish(self, chunk: _Chunk, images: list[npt.NDArray[np.uint8]]) -> None:
        flight, places = chunk.flight, chunk.places
        mirror = flight.crops.mirror[places].tolist() if flight.crops is not None else [0] * len(places)
        for first in range(0, len(places), _TASK):
            part = slice(first, first + _TASK)
            task = self._finishing.submit(put_all, flight.canvas, places[part], images[part], mirror[part])
            flight.finishing.append(task)

    def _end_of(self, flight: Flight) -> None:
        if not flight.left and not flight.decoded.done:
            flight.batch.release()
            self._open.remove(flight)
            flight.decoded.set(None)

    def _graph(self, dali: Dali) -> _Foreign:
        """Return a built pipeline with the inputs jpeg and, for random crops, anchor and shape; one output."""
        fn, types = dali.fn, dali.types

        def graph() -> _Foreign:
            jpeg = fn.external_source(name=_JPEG, no_copy=True, dtype=types.UINT8, ndim=1)
            if self._cut != "random":
                return fn.decoders.image(jpeg, output_type=types.RGB)
            # The decoder cuts: what lies outside the crop costs entropy decoding only.
            anchor = fn.external_source(name=_ANCHOR, no_copy=True, dtype=types.FLOAT, ndim=1)
            shape = fn.external_source(name=_SHAPE, no_copy=True, dtype=types.FLOAT, ndim=1)
            return fn.decoders.image_slice(jpeg, anchor, shape, axes=[0, 1], output_type=types.RGB)

        # A queue of 1 is what makes `schedule_run` start one run at a time; how many wait is up to the line.
        pipe = dali.pipeline_def(graph)(
            batch_size=self._chunk, num_threads=self._spec.thread_count, device_id=None, prefetch_queue_depth=1
        )
        pipe.build()
        return guarded(pipe, None)
