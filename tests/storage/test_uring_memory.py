from __future__ import annotations

import logging
import mmap
import os
import resource

import numpy as np

from shardkit.storage import uring_ring
from shardkit.storage.reader import DIRECT, ReadOps
from shardkit.storage.uring import UringReader
from shardkit.testing.rings import as_nobody, blocks, needs_root, needs_uring, private_memory, status_kib, write_through

pytestmark = needs_uring


def test_registered_memory_is_what_the_reads_go_to(disk, monkeypatch):
    """After MADV_DONTNEED a process sees fresh pages, while fixed reads go to those that were pinned before."""
    monkeypatch.setattr(uring_ring, "_PIECE", 64 * 1024)
    data = os.urandom(256 * 1024)
    reader = UringReader([write_through(disk / "a", data)])
    memory = private_memory(256 * 1024)
    pinned = status_kib("VmPin")
    reader.register(memoryview(memory))
    ops = blocks(memory, list(range(0, len(data), 8192)), 8192)
    reader.read_into(ops)
    assert memory[:] == data
    assert reader.registered == [len(data)]
    assert status_kib("VmPin") == pinned + 256
    memory.madvise(mmap.MADV_DONTNEED)
    reader.read_into(ops)
    assert memory[:] == bytes(len(data))
    across = np.arange(64 * 1024 - 4096, len(data) - 8192, 64 * 1024)  # those lie in two pieces, so in no buffer
    reader.read_into(
        ReadOps(
            file=np.zeros_like(across), offset=across, length=np.full_like(across, 8192),
            need=np.full_like(across, 8192), start=across, buffer=memoryview(memory),
        )
    )  # fmt: skip
    for start in across.tolist():
        assert memory[start : start + 8192] == data[start : start + 8192]
    reader.close()
    assert status_kib("VmPin") == pinned
    memory.madvise(mmap.MADV_DONTNEED)


def test_memory_that_is_not_registered_is_read_into_as_well(disk):
    data = os.urandom(256 * 1024)
    reader = UringReader([write_through(disk / "a", data)], rings=1)
    known, unknown, later = (private_memory(len(data)) for _ in range(3))
    reader.register(memoryview(known))
    offsets = list(range(0, len(data), 4096))
    for memory in (known, unknown, later):
        reader.read_into(blocks(memory, offsets, 4096))
        assert memory[:] == data
    reader.register(memoryview(later))
    for memory in (later, known, unknown):
        memory[:] = bytes(len(data))
        reader.read_into(blocks(memory, offsets, 4096))
        assert memory[:] == data
    assert reader.registered == [2 * len(data)]
    reader.close()


@needs_root
def test_too_little_lockable_memory_is_said_once_and_read_without(disk, monkeypatch):
    data = os.urandom(1 << 20)
    write_through(disk / "a", data)
    disk.chmod(0o755)
    monkeypatch.chdir(disk)  # the folders above are root's

    def law() -> str:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (256 * 1024, 256 * 1024))
        said = list[str]()
        handler = logging.Handler()
        handler.emit = lambda record: said.append(record.getMessage())
        logging.getLogger("shardkit.storage.uring_pool").addHandler(handler)
        reader = UringReader(["a"], rings=2)
        memory = private_memory(len(data))
        reader.register(memoryview(memory))
        for _ in range(3):
            reader.read_into(blocks(memory, list(range(0, len(data), 8192)), 8192))
        right, counters = memory[:] == data, reader.counters[DIRECT]
        reader.close()
        return f"{right} {counters} {reader.registered} {said}"

    answer = as_nobody(law)
    assert answer.startswith(f"True {3 << 20} [] ['io_uring does not register 1048576 bytes for up to 2 rings (ENOMEM)")
    assert "(RLIMIT_MEMLOCK) is 256 KiB; raise it: ulimit -l 2048" in answer
    assert answer.count("ulimit") == 1
