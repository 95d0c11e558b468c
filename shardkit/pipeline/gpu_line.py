"""The threads that turn encoded batches into pixels on a GPU: prepare, decode, finish, and Pillow for the rest.

- prepare: replaces bad samples, looks at headers, and sorts: what the engines take, and what they do not.
- decode: gives jobs to a back end and takes what it has decoded; a thread a back end. Nothing else, and no work an
  image: while such a thread waits for the interpreter's lock, the engines stand still.
- finish: launches the kernel that makes whole images into their places of the batch, hands the batch over with the
  event behind it, and only then waits, asleep, for that event. Before it has passed nothing is let go that the GPU
  reads, so the back end never gets memory that is still in use: engines do not keep the order of streams.
- Pillow's threads: images that the engines do not take, or have refused. Its word is final, and what it refuses is
  replaced.

A batch travels in parts, each finished by itself, so that one that does not fit into the back end's memory takes turns.
"""

from __future__ import annotations

import contextlib
import queue
from collections import deque
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from shardkit.errors import DeviceError
from shardkit.format.jpeg_header import fault
from shardkit.pipeline.cpu import image_or_reason
from shardkit.pipeline.gpu_backend import Job, Undecodable
from shardkit.pipeline.gpu_canvas import facts_of
from shardkit.pipeline.gpu_flight import GpuFlight, GpuTally, HostPart, Part
from shardkit.pipeline.gpu_threads import without_frames
from shardkit.pipeline.workers import Cancelled
from shardkit.storage.device import lost_error
from shardkit.tracing import ranges

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import numpy.typing as npt

    from shardkit.dataset.batch import EncodedBatch
    from shardkit.pipeline.decoder import BatchSource
    from shardkit.pipeline.gpu_backend import Backend, Decoded, Shares
    from shardkit.pipeline.gpu_canvas import Facts
    from shardkit.pipeline.gpu_finish import GpuFinisher
    from shardkit.pipeline.gpu_inspection import Inspection
    from shardkit.pipeline.gpu_threads import LineThreads
    from shardkit.pipeline.workers import Workers
    from shardkit.storage.device import Event

    _Ints = npt.NDArray[np.int64]

__all__ = ["GpuLine"]


@dataclass(slots=True, eq=False)
class _Lane:
    """A back end, and the parts that are started in it, oldest first; one thread's at a time."""

    backend: Backend
    started: deque[Part] = field(default_factory=deque)


class GpuLine:
    """Decodes batches in the order in which they are taken."""

    def __init__(
        self, threads: LineThreads, source: BatchSource, inspection: Inspection, backends: Sequence[Backend],
        shares: Shares, finisher: GpuFinisher, tally: GpuTally,
    ) -> None:  # fmt: skip
        """Join the steps.

        Args:
            threads: that work; `close` ends them.
            source: replaces bad samples.
            inspection: the preparing thread's.
            backends: of one kind, as many as decoding threads; nothing is started in them.
            shares: of a batch, for any of them.
            finisher: the finishing thread's.
            tally: is added to.
        """
        self._threads, self._source, self._inspection = threads, source, inspection
        self._shares, self._finisher, self._tally = shares, finisher, tally
        self._open: list[GpuFlight] = []  # taken and not handed over
        self._parts: deque[Part] = deque()
        self._lanes = [_Lane(backend) for backend in backends]
        self._idle: queue.SimpleQueue[_Lane] = queue.SimpleQueue()
        for lane in self._lanes:
            self._idle.put(lane)
        self._replacing: GpuFlight | None = None
        self._broken: BaseException | None = None
        self._closed = False

    def take(self, batch: EncodedBatch) -> GpuFlight:
        """Let a batch in, and see to its release; called by one thread."""
        flight = GpuFlight(batch, len(batch))
        self._open.append(flight)
        if len(batch):
            self._submit(self._threads.preparing, flight, partial(self._prepare, flight, np.arange(len(batch)), {}))
        else:
            self._submit(self._threads.finishing, flight, partial(self._hand_over, flight, None))
        return flight

    def check(self) -> None:
        """Fail all batches when the GPU is lost: DALI may wait for it without end, and says nothing.

        Raises:
            CapabilityError: this process is a fork of the one that opened the GPU.
        """
        device = self._threads.device
        with device.current():
            lost = device.lost
        for flight in list(self._open) if lost else ():
            flight.fail(lost_error())

    def settle(self) -> None:
        """Wait until the work behind all batches that were handed over is done.

        Raises:
            DeviceError: some of it failed.
        """
        self._threads.finishing.submit(lambda: None).wait()
        if self._broken is not None:
            raise self._broken

    def close(self) -> None:
        """Stop after the jobs that are being decoded, and release all batches.

        A thread that is in a substitute's read for too long is left behind, and so is one that waits for a GPU that is
        lost. Its batch is not released.
        """
        self._closed = True
        with contextlib.ExitStack() as steps:  # the last one first
            steps.callback(self._release)
            for flight in list(self._open):
                steps.callback(flight.done.fail, Cancelled())
            for lane in self._lanes:
                steps.callback(lane.backend.rest)
            steps.callback(self._threads.finishing.close)  # till then it lets go of what the decoding one waits for
            steps.callback(self._threads.pillow.close)
            steps.callback(self._threads.decoding.close)
            self._threads.preparing.close()

    def _release(self) -> None:
        preparing = self._threads.preparing
        if not (self._threads.ended and (preparing.ended or preparing.in_read)):
            return  # Ctrl-C came between two steps of waiting: nothing may be taken from under the GPU
        for flight in self._open:
            if preparing.ended or flight is not self._replacing:
                flight.release()

    def _submit(self, workers: Workers, flight: GpuFlight, work: Callable[[], object]) -> None:
        """Let a thread do work on a flight that nobody waits for any more after an error."""
        workers.submit(self._guarded, flight, [work])

    def _guarded(self, flight: GpuFlight, work: list[Callable[[], object]]) -> None:
        if self._closed or flight.done.done:
            return
        try:
            # PyTorch's current device is what is current here: were it another one, its allocator would wake that up.
            with self._threads.device.current():
                work.pop()()  # an error keeps this frame, which may not keep the work: it holds memory
        except BaseException as error:  # whatever it is, who waits has to see it
            flight.fail(without_frames(error))

    # The preparing thread.

    def _prepare(self, flight: GpuFlight, places: _Ints, bad: Mapping[int, str]) -> None:
        """Replace what is bad, and send places of a batch on."""
        if bad:
            self._replace(flight, bad)
        with ranges("prepare", flight.batch.step):
            facts = facts_of(flight.batch, places)
            taken = self._inspection.taken(flight.batch, places, facts)
            rest = self._feed(flight, places[taken], facts[taken])
            self._feed_pillow(flight, np.concatenate([places[~taken], rest]))

    def _replace(self, flight: GpuFlight, bad: Mapping[int, str]) -> None:
        self._replacing = flight
        with self._threads.preparing.reading():
            batch = self._source.replace(flight.batch, bad)
        # Whoever closes the line may have left this thread behind: nothing of the line may be touched then.
        flight.batch = batch
        if self._closed:
            flight.release()
            raise Cancelled
        self._replacing = None

    def _feed(self, flight: GpuFlight, places: _Ints, facts: Facts) -> _Ints:
        """Send images to the back end; return the places that it does not take."""
        batch, left = flight.batch, np.ones(len(places), np.bool_)
        for share in self._shares(facts.width, facts.height) if len(places) else []:
            left[share.numbers] = False
            some, of_some = places[share.numbers], facts[share.numbers]
            views = [batch.views[at] for at in some.tolist()]
            flight.held.append(views)
            job = Job(
                views, batch.addresses[some], batch.located.size[some], of_some.width, of_some.height,
                of_some.orientation, share.plan,
            )  # fmt: skip
            self._parts.append(Part(flight, some, of_some, job))
            self._threads.decoding.submit(self._decode)
        return places[left]

    def _feed_pillow(self, flight: GpuFlight, places: _Ints) -> None:
        if not len(places):
            return
        payloads = self._inspection.on_host(flight.batch, places)
        part = HostPart(flight, places, facts_of(flight.batch, places), payloads)
        flight.held.append(payloads)
        for number in range(len(places)):
            self._submit(self._threads.pillow, flight, partial(self._by_pillow, part, number))

    def _retry(self, part: Part, bad: Mapping[int, str]) -> None:
        """Send a job that has failed once more, without those that failed it: Pillow judges them."""
        refused = np.zeros(len(part.places), np.bool_)
        refused[list(bad)] = True
        rest = self._feed(part.flight, part.places[~refused], part.facts[~refused])
        self._feed_pillow(part.flight, np.concatenate([part.places[refused], rest]))

    # The decoding threads.

    def _decode(self) -> None:
        """Work until there is no job left, so that between two calls nothing is started."""
        lane = self._idle.get()  # there is one a thread
        try:
            while True:
                self._start(lane)
                if not lane.started:
                    return
                part = lane.started.popleft()
                with ranges("decode", part.flight.batch.step):
                    self._collect(lane, part)
                del part  # what it holds is the finishing thread's business now
        finally:
            self._idle.put(lane)

    def _start(self, lane: _Lane) -> None:
        while len(lane.started) < lane.backend.depth:
            try:
                part = self._parts.popleft()
            except IndexError:  # another lane has it
                return
            if self._closed or part.flight.done.done:
                continue
            try:
                lane.backend.start(part.job)
            except BaseException as error:
                part.flight.fail(without_frames(error))
                continue
            lane.started.append(part)

    def _collect(self, lane: _Lane, part: Part) -> None:
        try:
            images = lane.backend.collect()
        except Undecodable as found:
            self._submit(self._threads.preparing, part.flight, partial(self._retry, part, found.bad))
            return
        except BaseException as error:
            part.flight.fail(without_frames(error))
            return
        self._hand_on(part, images)

    def _rest(self) -> None:
        """Let the back ends rest that have nothing to do; not one that another thread has taken meanwhile."""
        taken = list[_Lane]()
        with contextlib.suppress(queue.Empty):
            while not (self._parts or self._closed):
                taken.append(self._idle.get_nowait())
        for lane in taken:
            try:
                lane.backend.rest()
            finally:
                self._idle.put(lane)

    # Pillow's threads.

    def _by_pillow(self, part: HostPart, number: int) -> None:
        payload = part.payloads[number]
        with ranges("decode by Pillow", part.flight.batch.step):
            image = fault(payload) or image_or_reason(payload)
        del payload
        if not part.put(number, image if isinstance(image, str) else np.array(image)):
            return
        bad = {at: why for at, why in zip(part.places.tolist(), part.images, strict=True) if isinstance(why, str)}
        fine = np.asarray([not isinstance(image, str) for image in part.images])
        flight, images = part.flight, [image for image in part.images if not isinstance(image, str)]
        part.payloads.clear()
        part.images.clear()
        if bad:
            self._submit(self._threads.preparing, flight, partial(self._prepare, flight, np.asarray(list(bad)), bad))
        if images:
            places, facts = part.places[fine], part.facts[fine]
            self._submit(self._threads.finishing, flight, partial(self._finish, flight, places, facts, images))

    # The finishing thread.

    def _hand_on(self, part: Part, images: Decoded) -> None:
        """Give decoded images to the finishing thread; called by the decoding one."""
        flight, places, facts = part.flight, part.places, part.facts
        self._submit(self._threads.finishing, flight, partial(self._finish, flight, places, facts, images))

    def _finish(
        self, flight: GpuFlight, places: _Ints, facts: Facts, images: Decoded | list[npt.NDArray[np.uint8]]
    ) -> None:
        """Make a part into its places, hand the batch over after the last one, and let go when the GPU is through."""
        if self._broken is not None:
            raise self._broken
        try:
            with ranges("finish", flight.batch.step):
                if isinstance(images, list):
                    event = self._finisher.finish_from_host(flight, places, facts, images)
                    self._tally.pillow += len(images)
                else:
                    event = self._finisher.finish(flight, places, facts, images)
                    self._tally.backend += len(images)
                flight.left -= len(places)
                if not flight.left:
                    event = self._hand_over(flight, event)
            self._await(flight, event)
        except BaseException:
            with contextlib.suppress(DeviceError):
                self._finisher.settle()  # the GPU may still look at what is let go now
            raise
        finally:
            del images  # an error's traceback would keep them

    def _hand_over(self, flight: GpuFlight, event: Event | None) -> Event:
        decoded, event = self._finisher.pixels(flight, event)
        flight.release()
        self._open.remove(flight)
        if not self._open:
            self._threads.decoding.submit(self._rest)
        flight.done.set(decoded)
        return event

    def _await(self, flight: GpuFlight, event: Event) -> None:
        """Wait for an event of a batch; when it fails, so does every batch from here on, in the name of this one."""
        try:
            event.wait()
            self._finisher.note()
        except DeviceError as error:
            self._broken = error
            for one in (flight, *self._open):  # this one may have been handed over
                one.fail(error)
            raise
