"""Many small reads in one call of cuFile's: its batch API, which KvikIO's Python does not have."""

from __future__ import annotations

import contextlib
import ctypes
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np

from shardkit.storage.cufile_errors import cufile_code_in, explain_cufile_error

if TYPE_CHECKING:
    import numpy.typing as npt

    _Ints: TypeAlias = npt.NDArray[np.int64]

__all__ = ["BatchReads", "BatchRefusedError", "Batches", "CuFileBatches"]

_Foreign: TypeAlias = Any  # cuda.bindings has no types

_FD, _BATCH, _READ = 1, 1, 0  # CU_FILE_HANDLE_TYPE_OPAQUE_FD, CUFILE_BATCH, CUFILE_READ
_COMPLETE = 16  # CUFILE_COMPLETE
_ENDED = _COMPLETE | 4 | 8 | 32 | 64  # invalid, cancelled, timed out, failed
_POLL_S = 0.0005
_MOST = 256


class BatchRefusedError(Exception):
    """Batches do not work here; says why in one clause."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BatchReads:
    """N reads, int64 [N] each."""

    handle: _Ints
    """[N] of the file, from `Batches.register`."""
    offset: _Ints
    """[N] first byte in the file."""
    length: _Ints
    """[N] bytes; they end within the file."""
    base: _Ints
    """[N] device address of the registered memory, or of the destination itself."""
    start: _Ints
    """[N] bytes from there to the destination."""

    def __len__(self) -> int:
        """Return N."""
        return len(self.handle)


class Batches(Protocol):
    """Reads many ranges at once. Threads may share it."""

    @property
    def most(self) -> int:
        """Reads of one call."""

    def register(self, descriptor: int) -> int:
        """Make a file known that is open with O_DIRECT, and return its handle.

        Raises:
            BatchRefusedError: cuFile does not serve it.
        """

    def forget(self, handle: int) -> None:
        """Undo `register`; the descriptor is still open."""

    def read(self, reads: BatchReads) -> _Ints:
        """Read, and return the bytes that arrived for each, where it failed -1 or less; nothing is under way then.

        Less than -1 is the system's error number with its sign turned, or a status of cuFile's.

        Raises:
            BatchRefusedError: batches do not work; nothing is under way.
        """

    def close(self) -> None:
        """Give everything back; no call may be under way."""


class CuFileBatches:
    """The real `Batches`, on `cuda.bindings.cufile`."""

    def __init__(self, cufile: _Foreign, *, most: int) -> None:
        """Make nothing yet.

        Args:
            cufile: the module; its driver is open.
            most: reads of one batch, as the driver says.
        """
        self._cufile = cufile
        self.most = min(max(most, 1), _MOST)
        self._idle: list[int] = []
        self._lock = threading.Lock()

    def register(self, descriptor: int) -> int:
        """Make a file known."""
        about = np.zeros(1, self._cufile.descr_dtype)
        about["type"] = _FD
        about["handle"]["fd"] = descriptor
        try:
            return int(self._cufile.handle_register(about.ctypes.data))
        except self._cufile.cuFileError as error:
            raise _refused(error) from error

    def forget(self, handle: int) -> None:
        """Undo it."""
        self._cufile.handle_deregister(handle)

    def read(self, reads: BatchReads) -> _Ints:
        """Submit one batch and wait for all of it."""
        requests = np.zeros(len(reads), self._cufile.io_params_dtype)
        requests["mode"], requests["opcode"] = _BATCH, _READ
        requests["fh"], requests["cookie"] = reads.handle, np.arange(len(reads))
        place = requests["u"]["batch"]
        place["dev_ptr_base"], place["dev_ptr_offset"] = reads.base, reads.start
        place["file_offset"], place["size_"] = reads.offset, reads.length
        try:
            batch = self._take()
        except self._cufile.cuFileError as error:
            raise _refused(error) from error
        try:
            self._cufile.batch_io_submit(batch, len(requests), requests.ctypes.data, 0)
            arrived = self._collect(batch, len(requests))
        except BaseException as error:
            self._end(batch)
            if isinstance(error, self._cufile.cuFileError):
                raise _refused(error) from error
            raise
        with self._lock:
            self._idle.append(batch)
        return arrived

    def close(self) -> None:
        """Destroy every batch."""
        with self._lock:
            idle, self._idle = self._idle, []
        for batch in idle:
            self._cufile.batch_io_destroy(batch)

    def _take(self) -> int:
        with self._lock:
            if self._idle:
                return self._idle.pop()
        return int(self._cufile.batch_io_set_up(self.most))

    def _collect(self, batch: int, count: int) -> _Ints:
        events = np.zeros(count, self._cufile.io_events_dtype)
        arrived, pending = np.full(count, -1, np.int64), np.ones(count, np.bool_)
        while left := int(np.count_nonzero(pending)):
            number = ctypes.c_uint(left)
            # Without a time limit it returns when all that are left have ended; other threads run meanwhile.
            self._cufile.batch_io_get_status(batch, left, ctypes.addressof(number), events.ctypes.data, 0)
            seen = events[: min(number.value, count)]
            ended = seen[(seen["status"] & _ENDED) != 0]
            count_or_error = ended["ret"].astype(np.int64)
            well = (ended["status"] == _COMPLETE) | (count_or_error < 0)
            arrived[ended["cookie"]] = np.where(well, count_or_error, -1)
            pending[ended["cookie"]] = False
            if not len(ended):
                time.sleep(_POLL_S)
        return arrived

    def _end(self, batch: int) -> None:
        """Make sure that nothing of a failed batch is under way."""
        with contextlib.suppress(self._cufile.cuFileError):
            self._cufile.batch_io_cancel(batch)
        self._cufile.batch_io_destroy(batch)


def _refused(error: Exception) -> BatchRefusedError:
    code = cufile_code_in(str(error))
    if code is None:
        return BatchRefusedError(str(error))
    name, meaning, _ = explain_cufile_error(code)
    return BatchRefusedError(f"{name}: {meaning}")
