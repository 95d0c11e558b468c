"""How the host comes at payloads, wherever they lie: in its own memory, or in a GPU's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import numpy as np

from shardkit.errors import ConfigError
from shardkit.storage.buffers import aligned_memory
from shardkit.storage.reader import HOST, address_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    import numpy.typing as npt

    from shardkit.storage.device import Device
    from shardkit.storage.reader import MemorySpace, Reader

    _Ints = npt.NDArray[np.int64]
    _Bytes = npt.NDArray[np.uint8]

__all__ = ["DeviceSpace", "HostSpace", "Space", "device_memory", "space_of"]

_AT_ONCE = 16 << 20  # bytes that are looked at together: enough for the bus's speed, and a bound on what it takes
_DEVICE_ALIGN = 4096  # of `Device.memory`


class Space(Protocol):
    """Memory that payloads are read into. Threads may share it."""

    @property
    def name(self) -> MemorySpace:
        """As readers call it."""

    @property
    def is_host(self) -> bool:
        """Whether the host may touch what lies there."""

    def allocate(self, nbytes: int, align: int) -> memoryview:
        """Return memory of its own, aligned as demanded; it goes with its last view."""

    def look(self, views: Sequence[_Bytes], addresses: _Ints) -> Iterable[_Bytes]:
        """Return the bytes of payloads in host memory, one after the other; each is valid until the next one.

        Args:
            views: n payloads in this space.
            addresses: [n] where they begin.
        """

    def overwrite(self, view: _Bytes, address: int, data: memoryview) -> None:
        """Put other bytes from host memory into the place of a payload; done when it returns."""


class HostSpace:
    """Host memory: nothing has to be moved."""

    name: MemorySpace = HOST
    is_host = True

    def allocate(self, nbytes: int, align: int) -> memoryview:
        """Return host memory; see `Space`."""
        return aligned_memory(nbytes, align)

    def look(self, views: Sequence[_Bytes], addresses: _Ints) -> Iterable[_Bytes]:
        """Return the payloads themselves; see `Space`."""
        return views

    def overwrite(self, view: _Bytes, address: int, data: memoryview) -> None:
        """Copy; see `Space`."""
        view[:] = np.frombuffer(data, np.uint8)


class DeviceSpace:
    """Memory of a GPU: the host sees copies, which a stream of its own makes."""

    is_host = False

    def __init__(self, device: Device) -> None:
        """Look at memory of `device`, which stays the caller's."""
        self.name: MemorySpace = device.space
        self._device, self._stream = device, device.stream()

    def allocate(self, nbytes: int, align: int) -> memoryview:
        """Return device memory; see `Space`."""
        return device_memory(self._device, nbytes, align)

    def look(self, views: Sequence[_Bytes], addresses: _Ints) -> Iterator[_Bytes]:
        """Yield copies, of which some megabytes are fetched at a time; see `Space`."""
        sizes = [view.size for view in views]
        first = total = 0
        for at, size in enumerate(sizes):
            if total and total + size > _AT_ONCE:
                yield from self._fetched(addresses[first:at].tolist(), sizes[first:at])
                first, total = at, 0
            total += size
        yield from self._fetched(addresses[first:].tolist(), sizes[first:])

    def overwrite(self, view: _Bytes, address: int, data: memoryview) -> None:
        """Upload; see `Space`."""
        if data.nbytes:
            self._stream.upload(address, address_of(data), data.nbytes)
            self._stream.record().wait()

    def _fetched(self, addresses: list[int], sizes: list[int]) -> list[_Bytes]:
        copies = np.empty(sum(sizes), np.uint8)
        found, start, base = [], 0, copies.ctypes.data
        for address, size in zip(addresses, sizes, strict=True):
            if size:
                self._stream.download(base + start, address, size)
            found.append(copies[start : start + size])
            start += size
        if start:
            self._stream.record().wait()
        return found


def device_memory(device: Device, nbytes: int, align: int) -> memoryview:
    """Return device memory of its own, aligned as demanded and to 4096; it goes with its last view.

    Raises:
        CapabilityError: the device has no memory left.
    """
    if align <= _DEVICE_ALIGN:
        return device.memory(nbytes)
    memory = device.memory(nbytes + align)
    skipped = -address_of(memory) % align
    return memory[skipped : skipped + nbytes]


def space_of(reader: Reader, device: Device | None) -> Space:
    """Return the space that a reader reads into.

    Raises:
        ConfigError: it is a GPU's, and `device` is not that GPU.
    """
    if reader.space == HOST:
        return HostSpace()
    if device is None or device.space != reader.space:
        found = "no device" if device is None else device.space
        raise ConfigError("a reader into GPU memory needs that GPU", expected=reader.space, found=found)
    return DeviceSpace(device)
