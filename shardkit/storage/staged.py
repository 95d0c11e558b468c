"""Reads into a GPU's memory by way of the host's: any reader of host memory, a pinned ring, and one copy a batch."""

from __future__ import annotations

import contextlib
import mmap
import os
import sys
import threading
from dataclasses import dataclass
from time import sleep
from typing import TYPE_CHECKING, Literal

from shardkit.errors import CapabilityError, ConfigError, DeviceError, StorageError, forget_frames
from shardkit.extent import align_down
from shardkit.storage.buffers import BufferPool
from shardkit.storage.pieces import Piece, plan_pieces
from shardkit.storage.reader import address_of, columns
from shardkit.storage.ring import host_ring
from shardkit.storage.stream_spans import StreamSpans
from shardkit.tracing import current_step, ranges

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from shardkit.storage.device import Device, Event
    from shardkit.storage.reader import MemorySpace, OpColumns, Pending, Reader, ReadOp

__all__ = ["StagedReader"]

_POLL_S = 0.002
_PINNED_SHARE = 8
"""A pinned ring of an eighth of what was asked for is better than all of it unpinned: pieces only get smaller."""


class StagedReader:
    """A `Reader` into device memory: host reader, ring, copy.

    The calls share the ring. One takes at most two parts of it at a time, each at most half of it, so that the next
    part is read while the last one is copied; a call that waits for room holds none.
    """

    def __init__(
        self,
        reader: Reader,
        device: Device,
        *,
        ring_bytes: int,
        staging: Literal["pinned", "managed"] = "pinned",
        paths: Sequence[str | os.PathLike[str]] = (),
    ) -> None:
        """Make the ring.

        Args:
            reader: into host memory; belongs to this one now, which closes it.
            device: whose memory the destinations lie in.
            ring_bytes: of the ring. A batch over half of it is read in pieces.
            staging: what the ring is: host memory that is pinned; or memory that the driver moves to the device
                before it is copied there (`cudaMallocManaged`), which is there to be compared.
            paths: the reader's files, for what is told of a device that fails.

        Raises:
            ConfigError: `staging` is no such name, or the ring is below two pages.
            CapabilityError: there is no memory for the ring.
        """
        if staging not in {"pinned", "managed"}:
            raise ConfigError("there is no such staging", expected="pinned or managed", found=repr(staging))
        self.space: MemorySpace = device.space
        self.align, self.span_bytes = reader.align, reader.span_bytes
        self._reader, self._paths, self._process = reader, [os.fspath(path) for path in paths], os.getpid()
        self._stream = device.stream(urgent=True)
        self._spans, self._turn = StreamSpans(device, self._stream, "copy"), threading.Lock()
        self._calls, self._closed, self._lock = set[object](), False, threading.Lock()
        unit = max(self.align, mmap.PAGESIZE)
        if ring_bytes < 2 * unit:
            raise ConfigError("a ring has at least two parts", expected=f">= {2 * unit} bytes", found=ring_bytes)
        self.pinned = False
        """Whether the ring is pinned host memory; if not, copies are slow."""
        self._managed = staging == "managed"
        if self._managed:
            self._pool = BufferPool(ring_bytes, align=unit, memory=device.managed)
            self._copy = self._stream.copy
        else:
            ring = host_ring(ring_bytes, device, least=ring_bytes // _PINNED_SHARE)
            self._pool = BufferPool(ring_bytes, align=unit, memory=lambda _: ring.memory)
            self._copy, self.pinned = self._stream.upload, ring.pinned
            reader.register(self._pool.memory)
        self._most = align_down(self._pool.budget_bytes // 2, unit)

    @property
    def ring_bytes(self) -> int:
        """Bytes of the ring; fewer than asked for where the system had no more."""
        return self._pool.budget_bytes

    @property
    def counters(self) -> Mapping[str, int]:
        """Bytes delivered so far, by the way that they took into host memory."""
        return self._reader.counters

    def read_into(self, ops: Sequence[ReadOp], /) -> None:
        """Carry out every op; see `Reader`. An error of an op that is longer than half of the ring names a part of it.

        Raises:
            DeviceError: a copy failed; with the first op of its piece.
            CapabilityError: this process is a fork of the one that opened the reader.
        """
        call = object()
        try:
            self._enter(call)
            rows = columns(ops)
            self._require_aligned(rows)
            self._carry_out(plan_pieces(rows, most=self._most))
        finally:
            self._calls.discard(call)

    def register(self, memory: memoryview, /) -> None:
        """Do nothing: reads go into the ring, which the host reader knows."""

    def oldest(self) -> Pending | None:
        """Return the read that has run the longest; see `Reader`."""
        return self._reader.oldest()

    def close(self) -> None:
        """Wait for the calls in progress; give back every descriptor, thread and the ring; idempotent."""
        # Of a fork's calls none runs; and while the interpreter ends no thread does.
        if self._process == os.getpid() and not sys.is_finalizing():
            with self._lock:
                self._closed = True
            while self._calls:
                sleep(_POLL_S)
        self._reader.close()
        self._pool.close()

    def _enter(self, call: object) -> None:
        if self._process != os.getpid():
            raise CapabilityError(
                "a reader into a GPU's memory does not survive a fork, as the GPU does not",
                found=f"opened by process {self._process}, used in {os.getpid()}",
                remedy="open it in the child, and start children by the spawn method",
            )  # fmt: skip
        with self._lock:
            if self._closed:
                raise ConfigError("the reader is closed", remedy="open another one")
            self._calls.add(call)

    def _require_aligned(self, ops: OpColumns) -> None:
        wrong = (((ops.offset | ops.length | ops.address) & (self.align - 1)) != 0) & (ops.length != 0)
        if wrong.any():
            at = int(wrong.argmax())
            raise ConfigError(
                "a staged read is not aligned", path=self._path(int(ops.file[at])), offset=int(ops.offset[at]),
                expected=f"offset, length and address in multiples of {self.align}",
                found=f"length {int(ops.length[at])}, address {int(ops.address[at]):#x}",
            )  # fmt: skip

    def _carry_out(self, pieces: list[Piece]) -> None:
        flights = list[_Flight]()
        try:
            for piece in pieces:
                part = self._part(piece.nbytes, flights)
                try:
                    with ranges("stage", current_step(), piece.nbytes):
                        self._reader.read_into(piece.ops(part))
                    self._launch(piece, part, flights)
                except BaseException as error:
                    forget_frames(error)
                    _give_back(part)
                    raise
                while len(flights) > 1:
                    self._land(flights)
            while flights:
                self._land(flights)
        finally:
            for flight in flights:  # there was an error: the copies end before it is told, whatever becomes of them
                with contextlib.suppress(DeviceError):
                    flight.event.wait()
                _give_back(flight.part)

    def _part(self, nbytes: int, flights: list[_Flight]) -> memoryview:
        """Return a part of the ring; when there is no room, only after this call's own copies have made some."""
        while flights:
            try:
                return self._pool.acquire(nbytes, timeout_s=0)
            except StorageError:
                self._land(flights)
        return self._pool.acquire(nbytes)

    def _launch(self, piece: Piece, part: memoryview, flights: list[_Flight]) -> None:
        """Begin the copies of a piece that was read; if that fails, none of them is left."""
        at = address_of(part)
        try:
            with self._turn:  # else one call's event would wait for copies of another one's, and its span have them
                begun = self._spans.begin()
                if self._managed and piece.nbytes:
                    self._stream.prefetch(at, piece.nbytes)
                for target, start, nbytes in piece.copies:
                    self._copy(target, at + start, nbytes)
                event = self._spans.end(begun, "copy", step=current_step(), nbytes=piece.nbytes)
            flights.append(_Flight(piece, part, event))
        except BaseException as error:
            with contextlib.suppress(DeviceError):
                self._stream.synchronize()
            self._tell_where(error, piece)
            raise

    def _land(self, flights: list[_Flight]) -> None:
        """Wait for the oldest copies and give their part of the ring back."""
        flight = flights[0]
        try:
            with ranges("copy", current_step(), flight.piece.nbytes):
                flight.event.wait()
            self._spans.note()
        except DeviceError as error:
            self._tell_where(error, flight.piece)
            raise
        del flights[0]
        _give_back(flight.part)

    def _tell_where(self, error: BaseException, piece: Piece) -> None:
        if isinstance(error, DeviceError) and error.path is None and len(piece.file):
            error.path, error.offset = self._path(int(piece.file[0])), int(piece.offset[0])

    def _path(self, file: int) -> str | None:
        return self._paths[file] if 0 <= file < len(self._paths) else None


@dataclass(frozen=True, slots=True, eq=False)
class _Flight:
    """Copies on their way."""

    piece: Piece
    part: memoryview
    """Of the ring; on loan until they are done."""
    event: Event


def _give_back(part: memoryview) -> None:
    """End a loan, though an error may be kept whose traceback knows the part."""
    with contextlib.suppress(BufferError):
        part.release()
