"""What `shardkit.testing.host_device` stands in for elsewhere: memory, copies, pinning and events of a real GPU."""

from __future__ import annotations

import gc
import os
import threading
import time
from typing import TYPE_CHECKING

import numpy as np
import pytest

from shardkit.errors import CapabilityError
from shardkit.storage.buffered import BufferedReader
from shardkit.storage.buffers import BufferPool, aligned_memory
from shardkit.storage.coalesce import coalesce
from shardkit.storage.direct import DirectReader
from shardkit.storage.reader import address_of
from shardkit.storage.ring import host_ring
from shardkit.storage.staged import StagedReader
from shardkit.testing.device_reads import DeviceReaderContract
from shardkit.testing.reading import in_child

if TYPE_CHECKING:
    from pathlib import Path

    from shardkit.storage.cuda import CudaDevice

pytestmark = pytest.mark.gpu

MIB = 1 << 20


class TestStagedReaderOnTheGpu(DeviceReaderContract):
    @pytest.fixture(autouse=True)
    def on_the_gpu(self, device: CudaDevice) -> None:
        self.device = device
        downloaded(device, device.memory(10))  # whatever the driver opens at first use is open then

    def open_device(self):
        return self.device

    def make_device_reader(self, paths, device):
        return StagedReader(BufferedReader(paths), device, ring_bytes=MIB // 2, paths=paths)


def downloaded(device: CudaDevice, memory: memoryview) -> bytes:
    host, stream = aligned_memory(memory.nbytes, 4096), device.stream()
    stream.download(address_of(host), address_of(memory), memory.nbytes)
    stream.record().wait()
    return bytes(host)


@pytest.fixture
def data() -> bytes:
    return np.random.default_rng(2).bytes(8 * MIB)


@pytest.fixture
def path(tmp_path: Path, data: bytes) -> Path:
    path = tmp_path / "a.bin"
    with path.open("wb") as file:
        file.write(data)
        os.fsync(file.fileno())
    return path


def test_bytes_go_there_and_back(device, data):
    stream, host = device.stream(), host_ring(8 * MIB, device).memory
    memory, other = device.memory(8 * MIB), device.memory(8 * MIB)
    host[:] = data
    stream.upload(address_of(memory), address_of(host), 8 * MIB)
    stream.copy(address_of(other), address_of(memory), 8 * MIB)
    event = stream.record()
    event.wait()
    assert event.done()
    assert downloaded(device, other) == data


def test_memory_is_page_aligned_and_goes_with_its_last_view(device):
    before = device.free_bytes
    memory = device.memory(1 << 30)
    assert (memory.nbytes, address_of(memory) % 4096) == (1 << 30, 0)
    part = memory[5:10]
    del memory
    assert before - device.free_bytes >= 1 << 30
    del part
    gc.collect()
    assert before - device.free_bytes < 1 << 29


def test_memory_that_there_is_not_is_a_matter_of_capability(device):
    with pytest.raises(CapabilityError, match="bytes are free"):
        device.memory(1 << 50)
    assert device.memory(10).nbytes == 10


def test_a_pool_lends_device_memory(device):
    with BufferPool(64 * MIB, memory=device.memory) as pool:
        parts = [pool.acquire(1000) for _ in range(3)]
        assert len({address_of(part) for part in parts}) == 3
        assert all(address_of(part) % 4096 == 0 for part in parts)
        parts.clear()
        assert pool.lent_bytes == 0


def test_a_ring_is_pinned_near_the_gpu(device, caplog):
    ring = host_ring(64 * MIB, device)
    assert ring.pinned, caplog.text
    assert ring.node in {device.numa_node, None}


def test_pinned_memory_is_unpinned_before_it_is_unmapped(device):
    for _ in range(50):  # an address that comes again and is still registered would be refused
        ring = host_ring(4 * MIB, device)
        assert ring.pinned
        del ring


def test_pinned_copies_are_faster_than_others(device):
    size, stream, memory = 256 * MIB, device.stream(urgent=True), device.memory(256 * MIB)
    ring, pageable = host_ring(size, device), host_ring(size, None)
    assert (ring.pinned, pageable.pinned) == (True, False)

    def seconds(host: memoryview) -> float:
        first = stream.record(timed=True)
        stream.upload(address_of(memory), address_of(host), size)
        last = stream.record(timed=True)
        last.wait()
        return last.since(first)

    assert min(seconds(ring.memory) for _ in range(3)) < min(seconds(pageable.memory) for _ in range(3))


def test_who_waits_for_a_copy_sleeps_and_lets_other_threads_run(device):
    size, stream = 1 << 30, device.stream()
    ring, memory = host_ring(size, device), device.memory(size)
    if not ring.pinned or ring.memory.nbytes < size:
        pytest.skip("there is no such ring here")
    for _ in range(8):
        stream.upload(address_of(memory), address_of(ring.memory), size)
    event, turns, over = stream.record(), [0], threading.Event()
    assert not event.done()

    def other() -> None:
        while not over.wait(0.001):
            turns[0] += 1

    beside = threading.Thread(target=other)
    beside.start()
    wall, cpu = time.perf_counter(), time.thread_time()
    event.wait()
    cpu, wall = time.thread_time() - cpu, time.perf_counter() - wall
    over.set()
    beside.join()
    assert wall > 0.02
    assert cpu < wall / 4
    assert turns[0] >= 5


@pytest.mark.parametrize(
    ("reader", "staging"), [(BufferedReader, "pinned"), (DirectReader, "pinned"), (BufferedReader, "managed")]
)
def test_every_batch_arrives_whole_whatever_was_in_the_ring_before(device, path, data, reader, staging):
    try:
        inner = reader([path])
    except CapabilityError as error:
        pytest.skip(f"{error} (pytest --basetemp)")
    staged = StagedReader(inner, device, ring_bytes=3 * MIB, staging=staging, paths=[path])
    random = np.random.default_rng(4)
    with BufferPool(16 * MIB, memory=device.memory) as pool:
        for _ in range(200):
            count = int(random.integers(1, 60))
            offsets = random.integers(0, len(data) - 70_000, count)
            lengths = random.integers(1, 70_000, count)
            plan = coalesce([0] * count, offsets, lengths, align=staged.align, gap_bytes=0, max_bytes=1 << 17)
            memory = pool.acquire(plan.buffer_bytes)
            staged.read_into(plan.ops(memory))
            found = downloaded(device, memory)
            for start, offset, length in zip(plan.buffer_start.tolist(), offsets, lengths, strict=True):
                assert found[start : start + length] == data[offset : offset + length]
            del memory
    staged.close()


def test_a_forked_child_is_refused(device):
    stream = device.stream()

    def refused() -> bool:
        for call in (lambda: device.memory(1), stream.record, lambda: device.pin(aligned_memory(4096, 4096))):
            with pytest.raises(CapabilityError, match="does not survive a fork"):
                call()
        return True

    assert in_child(refused)
    assert device.memory(1).nbytes == 1
