"""The thread that keeps DALI busy: batches go in as chunks, crops come out, and what cannot be decoded is replaced.

A batch is fed in chunks for two reasons: the first are finished while the next are decoded, and DALI gives up a whole
run when one image of it fails, so that a bad image costs a chunk and not a batch. One graph serves an epoch (building
it takes milliseconds); it is fed by hand, and `external_source` looks at our memory without a copy (`no_copy`). A list
of arrays is the cheapest thing to feed: 4 µs an image, where a TensorListCPU of tensors takes 22.
"""

from __future__ import annotations

import re
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from shardkit.format.jpeg import JpegRefusal, inspect_jpeg
from shardkit.pipeline.cpu import put_by_pillow
from shardkit.pipeline.finish import Pixels, put_all
from shardkit.pipeline.header import fault, is_plain_jpeg

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy.typing as npt

    from shardkit.dataset.batch import EncodedBatch
    from shardkit.pipeline.crops import Crops
    from shardkit.pipeline.dali_library import Dali
    from shardkit.pipeline.decoder import BatchSource
    from shardkit.pipeline.finish import Canvas, Finisher

__all__ = ["DecodingLine", "Flight"]

_Foreign: TypeAlias = Any  # DALI has no types: pipelines, nodes of their graphs, tensors
_JPEG, _ANCHOR, _SHAPE = "jpeg", "anchor", "shape"
_CHUNK, _CHUNK_A_THREAD = 32, 4
_TASK = 8  # images that one task finishes: starting a task takes some 20 µs
_NAMED = re.compile(r"sample #(\d+)")


@dataclass(slots=True, eq=False)
class Flight:
    """A batch in the line."""

    batch: EncodedBatch
    """With the substitutes that it has so far; its memory is released when all of it is decoded."""
    canvas: Canvas
    crops: Crops | None = None
    """Of the samples in `batch`; None without random crops."""
    left: int = 0
    """Chunks that are not decoded yet."""
    finishing: list[Future[None]] = field(default_factory=list)
    decoded: Future[None] = field(default_factory=Future)

    def wait(self) -> Pixels:
        """Wait until it is decoded and finished, and return the canvas's pixels.

        Raises:
            ShardkitError: a bad sample is not replaced.
        """
        self.decoded.result()
        for task in self.finishing:
            task.result()
        return self.canvas.pixels

    def fail(self, error: BaseException) -> None:
        """Let who waits see an error."""
        if not self.decoded.done():
            self.decoded.set_exception(error)


@dataclass(slots=True, eq=False)
class _Chunk:
    """Places of a batch that are decoded together, and what is looked at meanwhile."""

    flight: Flight
    places: list[int]
    views: list[npt.NDArray[np.uint8]]
    crops: tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]] | None = None
    pillow: list[Future[str | None]] | None = None
    """Tasks, one a place, where Pillow decodes in DALI's stead; their results say why an image cannot be decoded."""


class DecodingLine:
    """Decodes batches in the order in which they are taken; a chunk with a bad image goes through once more."""

    def __init__(
        self, dali: Dali, finisher: Finisher, source: BatchSource, threads: ThreadPoolExecutor, *, batch_size: int
    ) -> None:
        """Build the graph.

        Args:
            dali: the library.
            finisher: makes squares of crops.
            source: replaces bad samples.
            threads: finish; stays the caller's.
            batch_size: the most images of a batch.
        """
        self._finisher, self._source, self._threads = finisher, source, threads
        self._spec, self._cut = finisher.spec, finisher.cut
        self._chunk = min(batch_size, max(_CHUNK, _CHUNK_A_THREAD * self._spec.thread_count))
        self._pipe = self._graph(dali)
        self._taken: deque[Flight] = deque()
        self._chunks: deque[_Chunk] = deque()
        self._given_up: list[_Chunk] = []
        self._closed = False
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="shardkit-decode")

    def take(self, batch: EncodedBatch) -> Flight:
        """Let a batch in; called by one thread."""
        flight = Flight(batch, self._finisher.begin(len(batch)))
        self._taken.append(flight)
        self._thread.submit(self._advance, flight)
        return flight

    def close(self) -> None:
        """Stop after the chunk that is being decoded. Batches that are not through stay the caller's."""
        self._closed = True
        self._thread.shutdown(cancel_futures=True)
        self._pipe = None  # waits for DALI, which looks at the memory of chunks
        for flight in (*(chunk.flight for chunk in self._chunks), *self._taken):
            flight.decoded.cancel()
        for chunk in (*self._chunks, *self._given_up):
            chunk.views.clear()  # also when an error's traceback keeps the chunk

    def _advance(self, flight: Flight) -> None:
        """Work until a batch is decoded; those taken meanwhile are fed before, so that DALI never runs dry."""
        worked_on = flight
        try:
            while not (self._closed or flight.decoded.done()):
                while self._taken:
                    worked_on = self._taken.popleft()
                    self._start(worked_on, range(len(worked_on.batch)))
                if self._chunks:
                    chunk = self._chunks.popleft()
                    worked_on = chunk.flight
                    self._collect(chunk)
        except BaseException as error:  # whatever it is, who waits has to see it
            for broken in {flight, worked_on, *self._taken, *(chunk.flight for chunk in self._chunks)}:
                broken.fail(error)

    def _start(self, flight: Flight, places: Sequence[int], bad: Mapping[int, str] | None = None) -> None:
        """Replace what is bad, look at places of a batch, and feed them."""
        try:
            self._replace(flight, bad or {})
            while found := {at: why for at in places if (why := fault(flight.batch.views[at])) is not None}:
                self._replace(flight, found)
        except Exception as error:  # the source's; other batches go on
            flight.fail(error)
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
        if bad:
            flight.batch = self._source.replace(flight.batch, bad)
            flight.crops = None

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
        put, canvas, crops = self._threads.submit, flight.canvas, flight.crops
        chunk.pillow = [put(put_by_pillow, canvas, at, v, crops) for at, v in zip(places, chunk.views, strict=True)]
        self._add(chunk)

    def _add(self, chunk: _Chunk) -> None:
        chunk.flight.left += 1
        self._chunks.append(chunk)

    def _collect(self, chunk: _Chunk) -> None:
        """Wait for the oldest chunk: what is decoded is finished by the threads, what cannot be goes once more."""
        flight = chunk.flight
        bad, again = self._by_dali(chunk) if chunk.pillow is None else _by_pillow(chunk, chunk.pillow)
        flight.left -= 1
        if flight.decoded.done():
            return
        if again and not bad:
            self._feed_pillow(flight, again)
        elif again:
            self._start(flight, again, bad)
        else:
            self._end_of(flight)

    def _by_dali(self, chunk: _Chunk) -> tuple[dict[int, str], list[int]]:
        """Take a chunk out of the graph; return its bad places, with the reason, and those to decode once more."""
        try:
            (images,) = self._pipe.share_outputs()
        except RuntimeError as error:
            self._given_up.append(chunk)  # DALI may look at it until the next run is through
            return _named(chunk, error), chunk.places
        self._finish(chunk, [np.asarray(images[number]) for number in range(len(chunk.places))])
        self._pipe.release_outputs()  # for its queue; the memory stays whoever's holds an image
        for done in (chunk, *self._given_up):
            done.views.clear()
        self._given_up.clear()
        return {}, []

    def _finish(self, chunk: _Chunk, images: list[npt.NDArray[np.uint8]]) -> None:
        flight, places = chunk.flight, chunk.places
        mirror = flight.crops.mirror[places].tolist() if flight.crops is not None else [0] * len(places)
        for first in range(0, len(places), _TASK):
            part = slice(first, first + _TASK)
            task = self._threads.submit(put_all, flight.canvas, places[part], images[part], mirror[part])
            flight.finishing.append(task)

    def _end_of(self, flight: Flight) -> None:
        if not flight.left and not flight.decoded.done():
            flight.batch.release()
            flight.decoded.set_result(None)

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
        return pipe


def _named(chunk: _Chunk, error: RuntimeError) -> dict[int, str]:
    """Return the place that DALI's message names, with the reason; none when it names none."""
    number = int(named[1]) if (named := _NAMED.search(str(error))) else -1
    if not 0 <= number < len(chunk.places):
        return {}
    try:
        inspect_jpeg(chunk.views[number].data)
    except JpegRefusal as refusal:
        return {chunk.places[number]: refusal.detail}
    return {chunk.places[number]: "DALI cannot decode it, although its markers are whole"}


def _by_pillow(chunk: _Chunk, tasks: list[Future[str | None]]) -> tuple[dict[int, str], list[int]]:
    """Wait for images that Pillow decodes; return as `_by_dali`."""
    bad = {at: why for at, task in zip(chunk.places, tasks, strict=True) if (why := task.result()) is not None}
    chunk.views.clear()
    return bad, list(bad)
