from __future__ import annotations

import ctypes
import errno
import itertools
import logging
import mmap
import os
import platform
import threading
import time

import numpy as np
import pytest

from shardkit.errors import ShortReadError, StorageError
from shardkit.storage import uring_drive, uring_ring
from shardkit.storage.coalesce import coalesce
from shardkit.storage.reader import DIRECT, PAGE_CACHE, ReadOps
from shardkit.storage.uring import UringReader
from shardkit.testing.reading import read_extents
from shardkit.testing.rings import blocks, needs_uring, private_memory, read_for_ever, write_through

pytestmark = needs_uring


@pytest.mark.parametrize("depth", [1, 2, 5, 64, 300])
def test_more_ops_than_fit_into_the_ring(disk, depth):
    data = os.urandom(1 << 20)
    reader = UringReader([write_through(disk / "a", data)], depth=depth)
    random = np.random.default_rng(depth)
    wanted = [(0, int(offset), 3000) for offset in random.integers(0, len(data) - 3000, 400)]
    assert read_extents(reader, wanted, max_bytes=1) == [data[o : o + n] for _, o, n in wanted]
    reader.close()


def test_the_bytes_do_not_come_from_the_page_cache(disk):
    data = os.urandom(50_000)
    reader = UringReader([write_through(disk / "a", data)])
    assert read_extents(reader, [(0, 100, 40_000)]) == [data[100:40_100]]
    assert reader.counters[DIRECT] >= 40_100
    assert reader.counters[PAGE_CACHE] == 0
    reader.close()


@pytest.mark.parametrize("most", [4096, 8192, 65_536])
def test_reads_longer_than_a_request_can_be_are_continued(disk, monkeypatch, most):
    monkeypatch.setattr(uring_drive, "_MOST", most)
    data = os.urandom(200_001)
    reader = UringReader([write_through(disk / "a", data)])
    assert read_extents(reader, [(0, 5, 150_000), (0, 190_000, 10_001)]) == [data[5:150_005], data[190_000:]]
    with pytest.raises(ShortReadError, match="found 200001 bytes"):
        read_extents(reader, [(0, 0, 200_002)])
    assert sum(reader.counters.values()) >= 160_001
    reader.close()


def test_a_short_read_through_the_page_cache_is_continued(blocks_of_4096):
    """Memory that may not be written ends a read early, as the kernel tells only at the next one."""
    data, size = os.urandom(65 * 1024), 64 * 1024
    reader = UringReader([write_through(blocks_of_4096 / "a", data)], align=512)
    memory = private_memory(size)
    libc = ctypes.CDLL(None, use_errno=True)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    assert libc.mprotect(ctypes.c_void_p(start + 32 * 1024), 4096, mmap.PROT_READ) == 0
    with pytest.raises(StorageError, match="EFAULT") as caught:
        reader.read_into(blocks(memory, [512], size))  # which this device refuses: so it takes the other way
    assert reader.refused == 1
    assert caught.value.offset == 512 + 32 * 1024
    assert memory[: 32 * 1024] == data[512 : 512 + 32 * 1024]
    reader.close()


def answer(monkeypatch, change) -> list[tuple[int, int]]:
    """Let the kernel's results pass through `change(number, result)`; returns the (offset, length) of each request."""
    put, reap, asked, numbers = uring_ring.Ring.put, uring_ring.Ring.reap, list[tuple[int, int]](), itertools.count()

    def watched(self, tag, descriptor, place, offset, address, length):
        asked.extend(zip(offset.tolist(), length.tolist(), strict=True))
        put(self, tag, descriptor, place, offset, address, length)

    def changed(self):
        tags, results = reap(self)
        return tags, np.array([change(next(numbers), result) for result in results.tolist()], np.int64)

    monkeypatch.setattr(uring_ring.Ring, "put", watched)
    monkeypatch.setattr(uring_ring.Ring, "reap", changed)
    return asked


@pytest.mark.parametrize("most", [512, 700, 4096, 5000])
def test_short_answers_are_continued_at_a_block(disk, monkeypatch, most):
    data = os.urandom(60_000)
    reader = UringReader([write_through(disk / "a", data)], align=512)
    asked = answer(monkeypatch, lambda _, result: min(result, most))
    assert read_extents(reader, [(0, 1000, 59_000), (0, 0, 100)]) == [data[1000:], data[:100]]
    assert len(asked) >= 59_000 // most
    assert all(offset % 512 == 0 and length % 512 == 0 for offset, length in asked)
    assert reader.counters[PAGE_CACHE] == 0
    reader.close()


def test_an_answer_shorter_than_a_block_sends_the_file_to_the_page_cache(disk, monkeypatch):
    data = os.urandom(60_000)
    reader = UringReader([write_through(disk / "a", data)], align=4096)
    answer(monkeypatch, lambda number, result: 100 if number == 0 else result)
    assert read_extents(reader, [(0, 0, 50_000)]) == [data[:50_000]]
    assert (reader.refused, reader.counters) == (1, {DIRECT: 0, PAGE_CACHE: 53_248})
    reader.close()


@pytest.mark.parametrize("number", [errno.EAGAIN, errno.EINTR])
def test_what_is_to_be_tried_again_is_tried_again_but_not_for_ever(disk, monkeypatch, number):
    data = os.urandom(60_000)
    reader = UringReader([write_through(disk / "a", data)])
    answer(monkeypatch, lambda count, result: -number if count % 3 else result)
    wanted = [(0, offset, 4096) for offset in range(0, 50_000, 8192)]
    assert read_extents(reader, wanted) == [data[o : o + n] for _, o, n in wanted]
    monkeypatch.setattr(uring_drive, "_PAUSE_S", 0)
    answer(monkeypatch, lambda *_: -number)
    with pytest.raises(StorageError, match=errno.errorcode[number]):
        read_extents(reader, wanted)
    reader.close()


def test_an_op_before_one_that_failed_is_carried_on_and_raised_first(disk, monkeypatch):
    """The second op fails at once; the first is short, is read on, and fails only then."""
    reader = UringReader([write_through(disk / "a", os.urandom(60_000))])
    answers = iter([4096, -errno.EIO, -errno.ENODATA])
    asked = answer(monkeypatch, lambda *_: next(answers))
    with pytest.raises(StorageError, match="ENODATA") as caught:
        read_extents(reader, [(0, 0, 8192), (0, 16_384, 8192)])
    assert caught.value.offset == 4096
    assert asked == [(0, 8192), (16_384, 8192), (4096, 4096)]
    reader.close()


def test_a_file_cut_while_it_is_read_is_a_short_read(disk):
    data = os.urandom(4 << 20)
    path = write_through(disk / "a", data)
    reader = UringReader([path], depth=4)
    memory = private_memory(len(data))
    ops = blocks(memory, list(range(0, len(data), 8192)), 8192)
    cutter = threading.Timer(0.01, os.truncate, (path, 12_288))
    cutter.start()
    with pytest.raises(ShortReadError, match="the file has 12288, it had 4194304 when it was opened"):
        read_for_ever(reader, ops)
    cutter.join()
    assert read_extents(reader, [(0, 100, 12_000)]) == [data[100:12_100]]
    reader.close()


def test_a_file_that_refuses_the_read_is_served_by_the_page_cache_and_counted(blocks_of_4096, disk, caplog):
    data = os.urandom(30_000)
    paths = [
        write_through(blocks_of_4096 / "a", data),
        write_through(disk / "b", data),
        write_through(blocks_of_4096 / "c", data),
    ]
    reader = UringReader(paths, align=512)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            wanted = [(0, 512, 700), (1, 512, 512), (2, 512, 700)]
            assert read_extents(reader, wanted) == [data[512:1212], data[512:1024], data[512:1212]]
    assert reader.refused == 2
    assert reader.counters[PAGE_CACHE] == 6 * 1024
    assert reader.counters[DIRECT] == 3 * 512
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "refuses direct reads of 1024 bytes at 512 (EINVAL)" in caplog.text
    reader.close()


def test_without_order_of_loads_the_bytes_are_the_same(disk, monkeypatch):
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    data = os.urandom(300_000)
    reader = UringReader([write_through(disk / "a", data)], depth=4)
    wanted = [(0, offset, 5000) for offset in range(0, 290_000, 7000)]
    assert read_extents(reader, wanted) == [data[o : o + n] for _, o, n in wanted]
    reader.close()


def test_a_polling_ring_reads_the_same(disk):
    data = os.urandom(1 << 20)
    path = write_through(disk / "a", data)
    reader = UringReader([path], depth=8, rings=1, sqpoll=True)
    for start in range(5):
        wanted = [(0, offset, 5000) for offset in range(start, 1_000_000, 9000)]
        assert read_extents(reader, wanted, max_bytes=1) == [data[o : o + n] for _, o, n in wanted]
        time.sleep(0.03 * start)  # longer in the end than the kernel's thread stays awake
    with pytest.raises(ShortReadError):
        read_extents(reader, [(0, 0, len(data) + 1)])
    reader.close()


def test_the_oldest_read_is_told_while_reads_run(disk):
    data = os.urandom(16 << 20)
    path = write_through(disk / "a", data)
    reader = UringReader([path], depth=1)
    assert reader.oldest() is None
    memory = private_memory(len(data))
    seen, stop = list[object](), threading.Event()

    def look() -> None:
        while not stop.is_set():
            pending = reader.oldest()
            if pending is not None:
                seen.append(pending)
            time.sleep(0.0005)

    looker = threading.Thread(target=look)
    looker.start()
    for _ in range(3):
        reader.read_into(blocks(memory, list(range(0, len(data), 1 << 20)), 1 << 20))
    stop.set()
    looker.join()
    assert seen
    assert all(pending.path == str(path) and pending.offset % (1 << 20) == 0 for pending in seen)
    assert all(0 <= pending.seconds < 10 for pending in seen)
    assert len({pending.offset for pending in seen}) > 1
    assert reader.oldest() is None
    reader.close()


def test_no_object_an_op_is_made(disk, monkeypatch):
    data = os.urandom(1 << 20)
    reader = UringReader([write_through(disk / "a", data)])
    offsets = np.arange(0, len(data), 8192)
    memory = mmap.mmap(-1, len(data))
    plan = coalesce(
        np.zeros_like(offsets), offsets, np.full_like(offsets, 8192), align=reader.align, gap_bytes=0, max_bytes=1
    )
    ops = plan.ops(memoryview(memory))
    monkeypatch.setattr(ReadOps, "__getitem__", lambda *_: pytest.fail("an op was made"))
    reader.read_into(ops)
    assert memory[:] == data
    reader.close()
