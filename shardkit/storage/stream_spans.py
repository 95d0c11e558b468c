"""When a GPU did what was put on a stream: spans of a trace, on the GPU's own clock."""

from __future__ import annotations

import threading
from collections import deque
from time import perf_counter
from typing import TYPE_CHECKING, NamedTuple

from shardkit import tracing

if TYPE_CHECKING:
    from shardkit.storage.device import Device, Event, Stream

__all__ = ["StreamSpans"]

_TIED_FOR_S = 1.0
"""Clocks run apart, by some microseconds a second, and an event's time is a float32 of milliseconds."""
_TRIES = 3  # the shortest one ties best: in the others the thread was held up


class _Mark(NamedTuple):
    name: str
    begun: Event
    ended: Event
    step: int
    nbytes: int


class StreamSpans:
    """A stream's row of a trace. While nobody records, no event is timed, and nothing is kept.

    Work is put on the stream between `begin` and `end`, by one thread at a time: else spans of two would overlap.
    Whoever has waited for the work calls `note`; threads may do so at the same time.
    """

    def __init__(self, device: Device, stream: Stream, row: str) -> None:
        """Show the work of `stream`, which is one of `device`, in a row of that name."""
        self._device, self._stream, self._row = device, stream, row
        self._marks: deque[_Mark] = deque()  # in the stream's order
        self._tied: tuple[Event, tracing.DeviceClock] | None = None
        self._idle: Stream | None = None
        self._lock = threading.Lock()

    def begin(self) -> Event | None:
        """Mark the stream before some work, for `end`; None while nobody records.

        Raises:
            DeviceError: the device has failed.
        """
        return self._stream.record(timed=True) if tracing.active() else None

    def end(self, begun: Event | None, name: str, *, step: int = -1, nbytes: int = 0) -> Event:
        """Return an event behind the work, which is a span if it was begun as one.

        Args:
            begun: of `begin`.
            name: of the work.
            step: of the batch; -1 for none.
            nbytes: moved by it; 0 for none.

        Raises:
            DeviceError: the device has failed.
        """
        ended = self._stream.record(timed=begun is not None)
        if begun is not None:
            self._marks.append(_Mark(name, begun, ended, step, nbytes))
        return ended

    def note(self) -> None:
        """Record the spans of work that is over; later work is left for the next call.

        Raises:
            DeviceError: the device has failed.
        """
        if not self._marks:
            return
        with self._lock:
            while self._marks and self._marks[0].ended.done():
                mark = self._marks.popleft()
                zero, clock = self._clock()
                tracing.device_span(
                    clock, self._row, mark.name, mark.begun.since(zero), mark.ended.since(zero), step=mark.step,
                    nbytes=mark.nbytes, handle=self._stream.handle,
                )  # fmt: skip

    def _clock(self) -> tuple[Event, tracing.DeviceClock]:
        """Return an event, and the device's clock that begins with it."""
        if self._tied is None or perf_counter() - self._tied[1].host_s > _TIED_FOR_S:
            self._idle = self._idle or self._device.stream(urgent=True)  # without work: nothing else is waited for
            _, zero, clock = min((self._tie(self._idle) for _ in range(_TRIES)), key=lambda tie: tie[0])
            self._tied = zero, clock
        return self._tied

    def _tie(self, idle: Stream) -> tuple[float, Event, tracing.DeviceClock]:
        """Tie the clocks, to so many seconds."""
        asked = perf_counter()
        zero = idle.record(timed=True)
        idle.synchronize()
        seen = perf_counter()
        return seen - asked, zero, tracing.DeviceClock(self._device.space, seen)
