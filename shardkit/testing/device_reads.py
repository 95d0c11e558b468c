"""Readers into a device's memory under the contract of readers: what arrived there is copied to the host."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING

import pytest

from shardkit.errors import CapabilityError
from shardkit.extent import Extent
from shardkit.storage.buffers import aligned_memory
from shardkit.storage.reader import HOST, MemorySpace, Pending, ReadOp, ReadOps, address_of
from shardkit.testing.readers import ReaderContract
from shardkit.testing.reading import in_child, read_extents

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from shardkit.storage.device import Device
    from shardkit.storage.reader import Reader

__all__ = ["DeviceReaderContract", "ThroughDevice"]

_PAGE = 4096


class DeviceReaderContract(ReaderContract):
    """Laws of a reader of device memory: those of any other, by way of the device, but for one about forks."""

    @abstractmethod
    def open_device(self) -> Device:
        """Return the device."""

    @abstractmethod
    def make_device_reader(self, paths: Sequence[Path], device: Device) -> Reader:
        """Open the backend under test over `paths`."""

    def make_reader(self, paths: Sequence[Path]) -> ThroughDevice:
        """Open it in a way that the laws can see what arrives."""
        device = self.open_device()
        return ThroughDevice(self.make_device_reader(paths, device), device)

    def test_a_child_process_reads_with_its_parents_reader(self, reader: Reader, truth: list[bytes]) -> None:
        """It does not: it is refused, with the reason, and its parent reads on."""
        assert isinstance(reader, ThroughDevice)
        inner, op = reader.reader, ReadOp(0, Extent(0, 4096), aligned_memory(4096, 4096), 4096)

        def refused() -> bool:
            with pytest.raises(CapabilityError, match="fork"):
                inner.read_into([op])
            inner.close()  # gives back what the child has of it, and waits for nobody
            return True

        assert read_extents(reader, [(0, 0, 9)]) == [truth[0][:9]]
        assert in_child(refused)
        assert read_extents(reader, [(0, 0, 9)]) == [truth[0][:9]]


class ThroughDevice:
    """A `Reader` into host memory over one into a device's.

    Destinations lie on the device as they lie on the host: at addresses with the same remainder by a page, and those
    of one buffer in one buffer. Only the bytes that an op needs are copied back.
    """

    space: MemorySpace = HOST

    def __init__(self, reader: Reader, device: Device) -> None:
        """Wrap a reader, which is closed with this one."""
        self.reader = reader
        """Into the device's memory."""
        self.align, self.span_bytes = reader.align, reader.span_bytes
        self._device, self._stream = device, device.stream()

    @property
    def counters(self) -> Mapping[str, int]:
        """Those of the reader."""
        return self.reader.counters

    def read_into(self, ops: Sequence[ReadOp], /) -> None:
        """Read into device memory and copy it."""
        if isinstance(ops, ReadOps):
            memory = self._like(ops.buffer)
            self.reader.read_into(
                ReadOps(
                    file=ops.file, offset=ops.offset, length=ops.length, need=ops.need, start=ops.start, buffer=memory
                )
            )
            pairs = [(op.dst, memory[start:]) for op, start in zip(ops, ops.start.tolist(), strict=True)]
        else:
            pairs = [(op.dst, self._like(op.dst)) for op in ops]
            staged = zip(ops, pairs, strict=True)
            self.reader.read_into([ReadOp(op.file, op.span, memory, op.need) for op, (_, memory) in staged])
        for op, (dst, memory) in zip(ops, pairs, strict=True):
            self._stream.download(address_of(dst), address_of(memory), op.need)
        self._stream.synchronize()

    def register(self, memory: memoryview, /) -> None:
        """Do nothing: the reader never sees it."""

    def oldest(self) -> Pending | None:
        """Ask the reader."""
        return self.reader.oldest()

    def close(self) -> None:
        """Close the reader."""
        self.reader.close()

    def _like(self, memory: memoryview) -> memoryview:
        remainder = address_of(memory) % _PAGE
        return self._device.memory(remainder + memory.nbytes)[remainder:]
