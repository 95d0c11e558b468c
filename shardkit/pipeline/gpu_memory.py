"""Small memory beside a GPU's streams: tables that go to the device a batch at a time, and room that only grows.

Allocating, freeing and pinning make the device or the system stop for a moment, so each thread keeps what it has.
"""

from __future__ import annotations

import contextlib
import mmap
from typing import TYPE_CHECKING, Any

import numpy as np

from shardkit.errors import CapabilityError
from shardkit.extent import align_up
from shardkit.storage.buffers import aligned_memory
from shardkit.storage.reader import address_of

if TYPE_CHECKING:
    import numpy.typing as npt

    from shardkit.storage.device import Device, Stream

__all__ = ["Room", "Table"]


class Room:
    """Device memory for one use at a time."""

    def __init__(self, device: Device, nbytes: int = 0) -> None:
        """Take `nbytes` at once."""
        self._device = device
        self._memory = device.memory(nbytes) if nbytes else memoryview(b"")

    @property
    def nbytes(self) -> int:
        """What it takes of the device."""
        return self._memory.nbytes

    def take(self, nbytes: int) -> int:
        """Return the address of `nbytes` or more; no work on what was taken before is left.

        Raises:
            CapabilityError: the device has no memory left.
        """
        if nbytes > self._memory.nbytes:
            self._memory = memoryview(b"")  # first, so that the device never has to have both
            self._memory = self._device.memory(nbytes)
        return address_of(self._memory)


class Table:
    """Rows of one type in pinned memory, and their twin on a device; for one thread, and one use at a time."""

    def __init__(self, device: Device, dtype: npt.DTypeLike, count: int) -> None:
        """Make it for `count` rows; it grows when there are more."""
        self._device, self._dtype = device, np.dtype(dtype)
        self._room = Room(device)
        self._make(max(count, 1))

    @property
    def nbytes(self) -> int:
        """What it takes of the device."""
        return self._room.nbytes

    def upload(self, stream: Stream, rows: npt.NDArray[Any]) -> int:
        """Send rows on a stream, and return where they will be; no work on the rows before is left."""
        address = self.reserve(len(rows))
        self.send(stream, rows, address)
        return address

    def send(self, stream: Stream, rows: npt.NDArray[Any], address: int) -> None:
        """Send rows to an address of the caller's; likewise."""
        if len(rows) > len(self._rows):
            self._make(len(rows))
        self._rows[: len(rows)] = rows
        stream.upload(address, self._rows.ctypes.data, rows.nbytes)

    def reserve(self, count: int) -> int:
        """Return the device's address of `count` rows that the device is to write."""
        if count > len(self._rows):
            self._make(count)
        return self._room.take(self._rows.nbytes)

    def download(self, stream: Stream, count: int) -> npt.NDArray[Any]:
        """Fetch rows, wait, and return them; valid until the next call."""
        rows = self._rows[:count]
        stream.download(rows.ctypes.data, self.reserve(count), rows.nbytes)
        stream.record().wait()
        return rows

    def _make(self, count: int) -> None:
        memory = aligned_memory(align_up(count * self._dtype.itemsize, mmap.PAGESIZE), mmap.PAGESIZE)
        with contextlib.suppress(CapabilityError):  # then copies are slower, and as right
            self._device.pin(memory)
        self._rows = np.frombuffer(memory, self._dtype, memory.nbytes // self._dtype.itemsize)
