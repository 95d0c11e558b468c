"""What happened when: spans of host threads and of a GPU's streams, for Perfetto, and NVTX ranges for Nsight Systems.

Off, which it is until somebody calls `start`, a range costs a function call. The environment's `SHARDKIT_NVTX=1` gives
NVTX ranges from the start of the process on; they need the package nvtx.

>>> tracer = start()
>>> with ranges("decode", step=3) as span:
...     span.nbytes = 1000
>>> stop(tracer)
>>> [event["name"] for event in tracer.events() if event["ph"] == "X"]
['decode']
"""

from __future__ import annotations

import functools
import itertools
import json
import logging
import os
import threading
from collections import deque
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from shardkit.errors import CapabilityError, ConfigError, from_os_error

if TYPE_CHECKING:
    from types import TracebackType

__all__ = [
    *("DeviceClock", "Range", "Tracer"),
    *("active", "current_step", "device_span", "ranges", "span", "start", "stop", "use_nvtx"),
]

CAPACITY = 1 << 18
"""Spans that a tracer keeps; of more the oldest go."""
_DEVICE_PIDS = 1 << 30
"""Process numbers of devices in a trace: above any of the kernel's."""

_Foreign: TypeAlias = Any  # nvtx has no types

_log = logging.getLogger(__name__)


class _Span(NamedTuple):
    lane: tuple[int, str]
    """Identity and name of the host thread, or of the stream of `device`."""
    device: str
    """"" for the host."""
    name: str
    start_s: float
    """Of `perf_counter`, as `end_s`."""
    end_s: float
    step: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class DeviceClock:
    """Seconds on a device, tied to the host's clock at one moment: when an event was seen to be done."""

    device: str
    """"cuda:N"."""
    host_s: float
    """`time.perf_counter()` at second 0 of the device's clock."""


class Tracer:
    """Keeps the last spans of all threads. Threads record at the same time; no lock is taken."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        """Keep at most `capacity` spans, some 200 bytes each.

        Raises:
            ConfigError: it is below 1.
        """
        if capacity < 1:
            raise ConfigError("a trace has room for spans", expected="capacity >= 1", found=capacity)
        self._spans: deque[_Span] = deque(maxlen=capacity)
        self._numbers = itertools.count()  # one step of it cannot be cut in two by another thread
        self._recorded = 0
        self._began_s = perf_counter()

    @property
    def dropped(self) -> int:
        """Spans that were recorded and are no longer kept."""
        return max(self._recorded - (self._spans.maxlen or 0), 0)

    def record(self, item: _Span) -> None:
        """Keep a span."""
        self._spans.append(item)
        self._recorded = next(self._numbers) + 1

    def events(self) -> list[dict[str, Any]]:  # Any: JSON values
        """Return the spans as events of Chrome's trace format, with the names of processes and threads before them."""
        spans = list(self._spans.copy())  # in one step: other threads may go on to record
        here, pids = os.getpid(), {"": os.getpid()}
        lanes: dict[tuple[str, tuple[int, str]], int] = {}
        found: list[dict[str, Any]] = []
        for item in sorted(spans, key=lambda item: item.start_s):
            pid = pids.setdefault(item.device, _DEVICE_PIDS + len(pids))
            tid = lanes.setdefault((item.device, item.lane), len(lanes) + 1)
            found.append(_complete(item, pid, tid, self._began_s))
        names = [_named("process_name", pid, 0, name or f"shardkit, process {here}") for name, pid in pids.items()]
        names += [_named("thread_name", pids[device], tid, lane[1]) for (device, lane), tid in lanes.items()]
        return names + found

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write the trace as JSON that https://ui.perfetto.dev and chrome://tracing open.

        Raises:
            ShardkitError: the file cannot be written.
        """
        about = {"spans": len(self._spans), "dropped": self.dropped}
        # Not json.dump, which is Python code: several times as long, and longer still while other threads work.
        text = json.dumps({"traceEvents": self.events(), "displayTimeUnit": "ms", "otherData": about})
        try:
            with open(path, "w", encoding="utf-8") as file:
                file.write(text)
        except OSError as error:
            raise from_os_error(error, "cannot write a trace", path=path) from error


def _complete(item: _Span, pid: int, tid: int, began_s: float) -> dict[str, Any]:
    about: dict[str, int] = {}
    if item.step >= 0:
        about["step"] = item.step
    if item.nbytes:
        about["bytes"] = item.nbytes
    started_us, took_us = (item.start_s - began_s) * 1e6, max(item.end_s - item.start_s, 0.0) * 1e6
    return {
        "ph": "X", "name": item.name, "cat": "device" if item.device else "host", "pid": pid, "tid": tid,
        "ts": round(started_us, 3), "dur": round(took_us, 3), "args": about,
    }  # fmt: skip


def _named(kind: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": name}}


class Range:
    """A `with` block whose time is recorded; step and bytes may still be set inside of it."""

    __slots__ = ("_marked", "_name", "_outer", "_start_s", "nbytes", "step")

    def __init__(self, name: str, step: int, nbytes: int) -> None:
        """Keep what is recorded at the end."""
        self._name = name
        self._start_s = 0.0
        self._marked: _Nvtx | None = None
        self._outer = -1  # step of the range around it
        self.step = step
        """Step of the batch within its epoch; -1 for none."""
        self.nbytes = nbytes
        """Bytes that were moved; 0 for none."""

    def __enter__(self) -> Range:
        """Start the clock."""
        self._outer = _here.step
        if self.step >= 0:
            _here.step = self.step
        self._marked = _nvtx
        if self._marked is not None:
            self._marked.push(self._name)
        self._start_s = perf_counter()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Record the span, also when the block raised."""
        end_s = perf_counter()
        _here.step = self._outer
        if self._marked is not None:
            self._marked.pop()
        if _tracers:
            span(self._name, self._start_s, end_s, step=self.step, nbytes=self.nbytes)


class _Nothing(Range):
    """What `ranges` returns while nobody records; all threads share it, and what they set is never read."""

    __slots__ = ()

    def __enter__(self) -> Range:
        return self

    def __exit__(self, *_: object) -> None:
        return None


class _Nvtx:
    """Ranges of the package nvtx, in a domain of their own."""

    def __init__(self, library: _Foreign) -> None:
        self._domain = library.get_domain("shardkit")
        self._attributes: dict[str, _Foreign] = {}

    def push(self, name: str) -> None:
        attributes = self._attributes.get(name)
        if attributes is None:
            attributes = self._attributes[name] = self._domain.get_event_attributes(message=name)
        self._domain.push_range(attributes)

    def pop(self) -> None:
        self._domain.pop_range()


class _Here(threading.local):
    """What is known in each thread."""

    step = -1


_NOTHING = _Nothing("", -1, 0)
_tracers: tuple[Tracer, ...] = ()
_asked = False
"""NVTX ranges are wanted whether somebody records or not."""
_nvtx: _Nvtx | None = None
_on = False
_lock = threading.Lock()
_here = _Here()


def ranges(name: str, step: int = -1, nbytes: int = 0) -> Range:
    """Return a `with` block that records its time under a name, in the thread that runs it.

    Args:
        name: of the stage, e.g. "decode".
        step: of the batch; -1 for none.
        nbytes: moved in it; 0 for none.
    """
    return Range(name, step, nbytes) if _on else _NOTHING


def current_step() -> int:
    """Return the step that the innermost range around this place was begun with, of those that were with one; else -1.

    For what is done for a batch and is not told for which, such as a read. It is -1 while nobody records.
    """
    return _here.step


def active() -> bool:
    """Return whether spans are recorded: what only a trace needs, such as timed events, can be left out else."""
    return bool(_tracers)


def span(name: str, start_s: float, end_s: float, *, step: int = -1, nbytes: int = 0) -> None:
    """Record a span of this thread that is over; times of `time.perf_counter`."""
    thread = threading.current_thread()
    item = _Span((thread.ident or 0, thread.name), "", name, start_s, end_s, step, nbytes)
    for tracer in _tracers:
        tracer.record(item)


def device_span(
    clock: DeviceClock, stream: str, name: str, start_s: float, end_s: float, *, step: int = -1, nbytes: int = 0,
    handle: int = 0,
) -> None:  # fmt: skip
    """Record a span of a device's stream.

    Args:
        clock: of the device.
        stream: name of the stream; its spans are a row of the trace.
        name: of the work.
        start_s: on `clock`, as `Event.since` gives it.
        end_s: likewise.
        step: of the batch; -1 for none.
        nbytes: moved by it; 0 for none.
        handle: of the stream: tells streams of one name apart.
    """
    at = clock.host_s
    item = _Span((handle, stream), clock.device, name, at + start_s, at + end_s, step, nbytes)
    for tracer in _tracers:
        tracer.record(item)


def start(capacity: int = CAPACITY) -> Tracer:
    """Begin to record, in all threads of the process; several tracers may do so at the same time.

    Meanwhile NVTX ranges are given, too, where the package nvtx is installed.
    """
    tracer = Tracer(capacity)
    with _lock:
        _set(*_tracers, tracer)
    return tracer


def stop(tracer: Tracer) -> None:
    """End a recording; idempotent. What was recorded stays."""
    with _lock:
        _set(*(other for other in _tracers if other is not tracer))


def use_nvtx() -> None:
    """Give NVTX ranges from now on, whether somebody records or not.

    Raises:
        CapabilityError: the package nvtx is not installed.
    """
    global _asked
    with _lock:
        if _library() is None:
            raise CapabilityError("NVTX ranges need the package nvtx, which is not there", remedy="pip install nvtx")
        _asked = True
        _set(*_tracers)


def _set(*tracers: Tracer) -> None:
    global _tracers, _nvtx, _on
    wanted = bool(tracers) or _asked
    _nvtx = _library() if wanted else None
    _tracers, _on = tracers, wanted


@functools.cache
def _library() -> _Nvtx | None:
    try:
        import nvtx
    except ImportError:
        return None
    return _Nvtx(nvtx)


if os.environ.get("SHARDKIT_NVTX", "0") not in {"", "0"}:
    try:
        use_nvtx()
    except CapabilityError as _error:
        _log.warning("SHARDKIT_NVTX is set, but %s", _error)
