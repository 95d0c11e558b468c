from __future__ import annotations

import errno
import gc
import itertools
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardkit import tracing
from shardkit.errors import CapabilityError, ConfigError, DeviceError, ShortReadError, StorageError
from shardkit.extent import Extent
from shardkit.storage.buffered import BufferedReader
from shardkit.storage.coalesce import coalesce
from shardkit.storage.direct import DirectReader
from shardkit.storage.pieces import plan_pieces
from shardkit.storage.reader import OpColumns, ReadOp, ReadOps, address_of
from shardkit.storage.staged import StagedReader
from shardkit.storage.uring import UringReader
from shardkit.testing.device_reads import DeviceReaderContract
from shardkit.testing.host_device import POISON, HostDevice
from shardkit.testing.reading import in_child
from shardkit.testing.rings import needs_uring

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

MIB = 1 << 20


class TestStagedBufferedReader(DeviceReaderContract):
    def open_device(self):
        return HostDevice(lazy=True)

    def make_device_reader(self, paths, device):
        return StagedReader(BufferedReader(paths), device, ring_bytes=8 * MIB, paths=paths)


class TestStagedDirectReaderInPieces(DeviceReaderContract):
    def open_device(self):
        return HostDevice(lazy=True)

    def make_device_reader(self, paths, device):
        return StagedReader(DirectReader(paths), device, ring_bytes=MIB // 2, paths=paths)

    @pytest.fixture
    def folder(self, disk):
        return disk

    @pytest.fixture
    def failing(self, lost_blocks):
        return lost_blocks, 0


class TestManagedStaging(DeviceReaderContract):
    def open_device(self):
        return HostDevice()

    def make_device_reader(self, paths, device):
        return StagedReader(BufferedReader(paths), device, ring_bytes=MIB, staging="managed", paths=paths)


# The plan


def rows(lengths, addresses, *, offset=0, align=1):
    length = np.array(lengths, np.int64) * align
    offsets = offset + np.cumsum(length) - length
    return OpColumns(
        file=np.arange(len(length)), offset=offsets, length=length, need=length, address=np.array(addresses, np.int64)
    )


def test_destinations_that_touch_are_one_copy_in_whatever_order():
    (piece,) = plan_pieces(rows([10, 20, 30, 5], [1030, 1000, 1040, 2000]), most=100)
    assert piece.copies == [(1000, 0, 20), (1030, 20, 40), (2000, 60, 5)]
    assert (piece.start.tolist(), piece.nbytes) == ([20, 0, 30, 60], 65)


def test_empty_ops_cut_no_copy_in_two():
    (piece,) = plan_pieces(rows([10, 0, 0, 20, 0], [1000, 1010, 1000, 1010, 0]), most=100)
    assert piece.copies == [(1000, 0, 30)]


def test_a_batch_is_cut_where_a_part_is_full_and_keeps_its_order():
    pieces = plan_pieces(rows([40, 40, 40, 100, 1], [0, 40, 80, 120, 220]), most=100)
    assert [piece.file.tolist() for piece in pieces] == [[0, 1], [2], [3], [4]]
    assert [piece.copies for piece in pieces] == [[(0, 0, 80)], [(80, 0, 40)], [(120, 0, 100)], [(220, 0, 1)]]


def test_an_op_longer_than_a_part_is_cut():
    ops = OpColumns(
        file=np.array([3, 4]), offset=np.array([4096, 0]), length=np.array([250, 10]), need=np.array([120, 10]),
        address=np.array([1000, 1250]),
    )  # fmt: skip
    pieces = plan_pieces(ops, most=100)
    told = [(p.file.tolist(), p.offset.tolist(), p.length.tolist(), p.need.tolist()) for p in pieces]
    assert told == [
        ([3], [4096], [100], [100]),
        ([3], [4196], [100], [20]),
        ([3, 4], [4296, 0], [50, 10], [0, 10]),
    ]
    assert [piece.copies for piece in pieces] == [[(1000, 0, 100)], [(1100, 0, 100)], [(1200, 0, 60)]]


def test_no_ops_are_no_pieces():
    assert plan_pieces(rows([], []), most=100) == []


@given(st.lists(st.tuples(st.integers(0, 300), st.integers(0, 3)), max_size=30), st.integers(1, 200), st.randoms())
def test_every_byte_gets_to_its_address_once(shape, most, random):
    addresses, end = [], 1000
    for length, gap in shape:
        addresses.append(end + gap)
        end += gap + length
    order = list(range(len(shape)))
    random.shuffle(order)
    ops = rows([shape[at][0] for at in order], [addresses[at] for at in order])
    wanted = {
        address + byte: offset + byte
        for address, offset, length in zip(ops.address.tolist(), ops.offset.tolist(), ops.length.tolist(), strict=True)
        for byte in range(length)
    }
    found = {}
    for piece in plan_pieces(ops, most=most):
        assert piece.nbytes == int(piece.length.sum()) <= most
        part = np.full(piece.nbytes, -1)
        for offset, start, length in zip(*(c.tolist() for c in (piece.offset, piece.start, piece.length)), strict=True):
            assert (part[start : start + length] == -1).all()
            part[start : start + length] = range(offset, offset + length)
        for target, start, nbytes in piece.copies:
            for byte in range(nbytes):
                assert target + byte not in found
                found[target + byte] = int(part[start + byte])
    assert found == wanted


# Copies


@pytest.fixture
def data() -> bytes:
    return np.random.default_rng(5).bytes(3 * MIB)


@pytest.fixture
def path(tmp_path: Path, data: bytes) -> Path:
    path = tmp_path / "a.bin"
    path.write_bytes(data)
    return path


def batch(device: HostDevice, offsets: list[int], length: int) -> tuple[memoryview, ReadOps]:
    """Reads of file 0 into device memory, back to back."""
    count = len(offsets)
    plan = coalesce([0] * count, offsets, [length] * count, align=1, gap_bytes=0, max_bytes=length)
    memory = device.memory(plan.buffer_bytes)
    return memory, plan.ops(memory)


def test_a_batch_is_one_copy(path, data):
    device = HostDevice(lazy=True)
    reader = StagedReader(BufferedReader([path]), device, ring_bytes=8 * MIB)
    memory, ops = batch(device, list(range(0, 256 * 9000, 9000)), 9000)
    reader.read_into(ops)
    assert bytes(memory) == data[: 256 * 9000]
    assert (device.calls["upload"], device.calls["record"], device.calls["wait"]) == (1, 1, 1)
    reader.close()


def test_the_next_piece_is_read_while_the_last_one_is_copied(path, data):
    device, seen = HostDevice(lazy=True), list[tuple[int, int]]()

    class Watched(BufferedReader):
        def read_into(self, ops, /):
            seen.append((device.calls["upload"], device.calls["wait"]))
            super().read_into(ops)

    reader = StagedReader(Watched([path]), device, ring_bytes=MIB)
    memory, ops = batch(device, list(range(0, 2 * MIB, MIB // 4)), MIB // 4)
    reader.read_into(ops)
    assert bytes(memory) == data[: 2 * MIB]
    assert seen == [(0, 0), (1, 0), (2, 1), (3, 2)]
    reader.close()


@contextmanager
def traced() -> Iterator[list[dict[str, Any]]]:
    """Record; the list has the device's spans when it ends."""
    found, tracer = list[dict[str, Any]](), tracing.start()
    try:
        yield found
    finally:
        tracing.stop(tracer)
    found += [event for event in tracer.events() if event["ph"] == "X" and event["cat"] == "device"]


@pytest.mark.parametrize("staging", ["pinned", "managed"])
def test_a_trace_shows_each_copy_with_its_bytes_and_its_step(path, data, staging):
    device = HostDevice(lazy=True)
    reader = StagedReader(BufferedReader([path]), device, ring_bytes=MIB, staging=staging)
    memory, ops = batch(device, list(range(0, 2 * MIB, MIB // 4)), MIB // 4)
    reader.read_into(ops)
    with traced() as spans:
        with tracing.ranges("read", step=7):
            reader.read_into(ops)
        reader.read_into(ops)
    assert bytes(memory) == data[: 2 * MIB]
    told = [(span["name"], span["args"]) for span in spans]
    assert told == 4 * [("copy", {"step": 7, "bytes": MIB // 2})] + 4 * [("copy", {"bytes": MIB // 2})]
    reader.close()


def test_copies_of_calls_at_the_same_time_do_not_overlap_in_a_trace(path):
    device = HostDevice()
    reader = StagedReader(BufferedReader([path]), device, ring_bytes=8 * MIB)
    memory = device.memory(4 * MIB)
    scattered = [ReadOp(0, Extent(at, 1000), memory[2 * at : 2 * at + 1000], 1000) for at in range(0, MIB, 1000)]
    with traced() as spans, ThreadPoolExecutor(4) as pool:
        for call in [pool.submit(reader.read_into, scattered) for _ in range(12)]:
            call.result()
    assert len(spans) == 12
    for one, after in itertools.pairwise(sorted(spans, key=lambda span: span["ts"])):
        assert one["ts"] + one["dur"] <= after["ts"] + 0.002  # microseconds, rounded to nanoseconds
    reader.close()


def test_an_op_longer_than_the_ring_arrives_whole(path, data):
    device = HostDevice(lazy=True)
    reader = StagedReader(BufferedReader([path]), device, ring_bytes=3 * 4096)
    memory = device.memory(2 * MIB)
    reader.read_into([ReadOp(0, Extent(5, MIB), memory[7 : 7 + MIB], MIB)])
    assert bytes(memory[7 : 7 + MIB]) == data[5 : 5 + MIB]
    assert set(memory[:7]) | set(memory[7 + MIB :]) == {POISON}
    with pytest.raises(ShortReadError) as caught:
        reader.read_into([ReadOp(0, Extent(2 * MIB, MIB + 1), device.memory(MIB + 1), MIB + 1)])
    assert caught.value.path == str(path)
    reader.close()


def test_the_ring_is_pinned_once_and_given_back(path):
    device = HostDevice()
    reader = StagedReader(BufferedReader([path]), device, ring_bytes=8 * MIB)
    assert (list(device.pinned.values()), reader.pinned, reader.ring_bytes) == ([8 * MIB], True, 8 * MIB)
    memory, ops = batch(device, [0, 5000], 100)
    for _ in range(3):
        reader.read_into(ops)
    assert device.calls["pin"] == 1
    reader.close()
    del memory, ops
    assert (device.pinned, device.allocations) == ({}, {})


def test_a_ring_that_cannot_be_pinned_is_used_all_the_same(path, data, caplog):
    device = HostDevice()
    for _ in range(4):  # a ring an eighth as large is tried, too
        device.fail_next("pin")
    reader = StagedReader(BufferedReader([path]), device, ring_bytes=16 * MIB)
    memory, ops = batch(device, [0], 100)
    reader.read_into(ops)
    assert (bytes(memory), reader.pinned, len(caplog.records)) == (data[:100], False, 1)
    reader.close()


def test_managed_memory_is_copied_on_the_device(path, data):
    device = HostDevice(lazy=True)
    reader = StagedReader(BufferedReader([path]), device, ring_bytes=MIB, staging="managed")
    memory, ops = batch(device, [10], 100)
    reader.read_into(ops)
    assert bytes(memory) == data[10:110]
    assert (device.calls["copy"], device.calls["upload"], device.pinned) == (1, 0, {})
    assert device.calls["prefetch"] == 1, "page by page is a quarter of the speed"
    reader.close()
    del memory, ops
    assert device.allocations == {}


@needs_uring
def test_the_ring_is_registered_with_the_host_reader(disk, data):
    path = disk / "a.bin"
    path.write_bytes(data)
    device, inner = HostDevice(lazy=True), UringReader([path])
    reader = StagedReader(inner, device, ring_bytes=4 * MIB)
    memory = device.memory(8192)
    reader.read_into([ReadOp(0, Extent(4096, 8192), memory, 8192)])
    assert bytes(memory) == data[4096 : 4096 + 8192]
    assert inner.registered == [4 * MIB]
    reader.close()


@pytest.mark.parametrize("ring_bytes", [0, 4096, 8191])
def test_a_ring_below_two_pages_is_refused(path, ring_bytes):
    with BufferedClosing(path) as inner, pytest.raises(ConfigError, match=">= 8192 bytes"):
        StagedReader(inner, HostDevice(), ring_bytes=ring_bytes)


def test_there_is_no_third_staging(path):
    with BufferedClosing(path) as inner, pytest.raises(ConfigError, match="found 'mapped'"):
        StagedReader(inner, HostDevice(), ring_bytes=MIB, staging="mapped")


class BufferedClosing(BufferedReader):
    def __init__(self, path):
        super().__init__([path])

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


# Failures


def test_a_child_process_is_told_why_it_gets_nothing(path):
    reader = StagedReader(BufferedReader([path]), HostDevice(), ring_bytes=MIB)
    op = ReadOp(0, Extent(0, 10), memoryview(bytearray(10)), 10)

    def refused() -> bool:
        with pytest.raises(CapabilityError, match=f"does not survive a fork.*opened by process {os.getppid()}"):
            reader.read_into([op])
        return True

    assert in_child(refused)
    reader.close()


@pytest.mark.parametrize("call", ["upload", "record", "wait"])
@pytest.mark.parametrize("failing_piece", [0, 1, 3])
def test_a_device_that_fails_is_told_with_the_first_op_of_the_piece(path, data, call, failing_piece):
    device, pieces = HostDevice(lazy=True), [0]

    class Counting(BufferedReader):
        def read_into(self, ops, /):
            if pieces[0] == failing_piece:
                device.fail_next(call)
            pieces[0] += 1
            super().read_into(ops)

    reader = StagedReader(Counting([path]), device, ring_bytes=MIB, paths=[path])
    memory, ops = batch(device, [1000 + MIB // 4 * at for at in range(8)], MIB // 4)
    with pytest.raises(DeviceError, match="it was told to") as caught:
        reader.read_into(ops)
    # While a piece is read the one before flies: that is what a wait fails for, except at the first.
    piece = max(failing_piece - 1, 0) if call == "wait" else failing_piece
    assert (caught.value.path, caught.value.offset) == (str(path), 1000 + piece * MIB // 2)
    assert reader._stream.waiting == 0  # no copy is left that could come later
    gives_the_ring_back(reader, caught)
    reader.read_into(ops)
    assert bytes(memory) == data[1000 : 1000 + 2 * MIB]
    reader.close()


def test_an_error_of_the_host_reader_waits_for_the_copies_and_keeps_no_part_of_the_ring(path):
    device = HostDevice(lazy=True)
    reader = StagedReader(BufferedReader([path, path.parent / "gone"]), device, ring_bytes=MIB)
    memory, ops = batch(device, list(range(0, 2 * MIB, MIB // 4)), MIB // 4)
    ops.file[6] = 1
    with pytest.raises(StorageError, match="gone") as caught:
        reader.read_into(ops)
    assert caught.value.errno == errno.ENOENT
    assert reader._stream.waiting == 0
    assert bytes(memory[: 3 * MIB // 2]) == path.read_bytes()[: 3 * MIB // 2]  # no copy was left for later
    gives_the_ring_back(reader, caught)
    reader.close()


def gives_the_ring_back(reader: StagedReader, kept: object) -> None:
    """Whoever keeps an error keeps no part of the ring."""
    gc.collect()
    assert kept is not None
    assert reader._pool.lent_bytes == 0


def test_an_error_before_the_copies_leaves_the_destination_alone(path):
    device = HostDevice(lazy=True)
    reader = StagedReader(BufferedReader([path]), device, ring_bytes=MIB)
    memory, ops = batch(device, [3 * MIB - 10], 100)
    with pytest.raises(ShortReadError, match="expected 100 bytes; found 10 bytes"):
        reader.read_into(ops)
    assert set(memory) == {POISON}
    reader.close()


def test_many_calls_share_a_ring_that_holds_one_of_them(path, data):
    device = HostDevice(lazy=True)
    reader = StagedReader(BufferedReader([path], threads=1), device, ring_bytes=MIB // 4)

    def work(seed: int) -> None:
        random = np.random.default_rng(seed)
        for _ in range(10):
            offsets = sorted(random.choice(2 * MIB // 30_000, 12, replace=False) * 30_000)
            memory, ops = batch(device, offsets, 30_000)
            reader.read_into(ops)
            assert bytes(memory) == b"".join(data[at : at + 30_000] for at in offsets)

    with ThreadPoolExecutor(6) as threads:
        for done in [threads.submit(work, seed) for seed in range(6)]:
            done.result(timeout=60)
    assert reader._pool.lent_bytes == 0
    reader.close()


def test_close_waits_for_a_copy(path):
    device, order = HostDevice(lazy=True), list[str]()
    reader = StagedReader(BufferedReader([path]), device, ring_bytes=MIB)
    memory, ops = batch(device, [0], 100)
    with ThreadPoolExecutor(2) as threads:
        with device.turn:  # the copy cannot be carried out, nor given to the stream
            reading = threads.submit(lambda: (reader.read_into(ops), order.append("read")))
            while not reader._calls:
                threading.Event().wait(0.001)
            closing = threads.submit(lambda: (reader.close(), order.append("closed")))
            threading.Event().wait(0.1)
            assert order == []
        reading.result(timeout=30)
        closing.result(timeout=30)
    assert bytes(memory) == path.read_bytes()[:100]
    with pytest.raises(ConfigError, match="the reader is closed"):
        reader.read_into(ops)


def test_addresses_are_those_of_the_device(path):
    device = HostDevice(3, lazy=True)
    reader = StagedReader(BufferedReader([path]), device, ring_bytes=MIB)
    assert (reader.space, device.stream().handle != 0, address_of(device.memory(1)) % 4096) == ("cuda:3", True, 0)
    with pytest.raises(DeviceError, match="an address in the device's memory"):  # host memory is none of it
        reader.read_into([ReadOp(0, Extent(0, 10), memoryview(bytearray(10)), 10)])
    reader.close()
