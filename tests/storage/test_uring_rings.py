from __future__ import annotations

import os
import re
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from shardkit.errors import StorageError
from shardkit.storage import uring_ring
from shardkit.storage.uring import UringReader
from shardkit.testing.reading import in_child, open_descriptors, read_extents
from shardkit.testing.rings import (
    blocks,
    needs_uring,
    private_memory,
    read_for_ever,
    rings_open,
    status_kib,
    write_through,
)

pytestmark = needs_uring


def test_a_ring_forgets_a_file_at_once(disk):
    before, ring = len(open_descriptors()), uring_ring.Ring(4, files=8)
    with (disk / "unmistakable").open("wb") as file:
        assert [ring.place_of(file.fileno()) for _ in range(2)] == [0, 0]
        information = Path(f"/proc/self/fdinfo/{rings_open()[0]}")
        if "unmistakable" not in information.read_text():
            pytest.skip("this kernel does not tell which files a ring knows")
        ring.forget_file(file.fileno())
        assert "unmistakable" not in information.read_text()
    ring.close(unregister=True)
    assert len(open_descriptors()) == before


def test_without_room_for_registered_files_plain_descriptors_do(disk):
    data = os.urandom(5000)
    paths = [write_through(disk / str(number), data) for number in range(5)]
    ring = uring_ring.Ring(4, files=2)
    files = [path.open("rb") for path in paths]
    assert [ring.place_of(file.fileno()) for file in files] == [0, 1, -1, -1, -1]
    ring.close(unregister=True)
    for file in files:
        file.close()


def test_a_file_whose_descriptor_is_evicted_is_unregistered(disk):
    paths = [write_through(disk / name, name.encode() * 100) for name in ("first", "second", "third")]
    reader = UringReader(paths, max_open=2, rings=1)

    def known() -> set[str]:
        # A line of a registered file is "    3: first" or, on newer kernels, has its whole path.
        ring = rings_open()[0]
        text = Path(f"/proc/self/fdinfo/{ring}").read_text()
        return {name for name in ("first", "second", "third") if re.search(rf"^\s+\d+: .*{name}$", text, re.MULTILINE)}

    assert read_extents(reader, [(0, 0, 5)]) == [b"first"]
    if not known():
        pytest.skip("this kernel does not tell which files a ring knows")
    for files, expected in [((1,), {"first", "second"}), ((2,), {"second", "third"}), ((0, 1, 2), None)]:
        wanted = [(file, 0, 5) for file in files]
        assert read_extents(reader, wanted) == [paths[file].read_bytes()[:5] for file in files]
        assert known() == expected if expected else len(known()) == 2
    reader.close()


def test_a_file_replaced_under_a_registered_descriptor_is_opened_anew(disk):
    paths = [write_through(disk / "a", b"a" * 5000), write_through(disk / "b", b"b" * 5000)]
    reader = UringReader(paths, max_open=1, rings=1)
    assert read_extents(reader, [(0, 0, 3)]) == [b"aaa"]
    assert read_extents(reader, [(1, 0, 3)]) == [b"bbb"]
    write_through(disk / "new", b"c" * 5001)
    (disk / "new").replace(paths[0])
    with pytest.raises(StorageError, match="replaced or cut"):
        read_extents(reader, [(0, 0, 3)])
    reader.close()


def test_nothing_leaks_over_200_readers(disk):
    data = os.urandom(50_000)
    path = write_through(disk / "a", data)
    memory = private_memory(1 << 20)

    def once() -> None:
        reader = UringReader([path])
        reader.register(memoryview(memory))
        reader.read_into(blocks(memory, [0, 4096, 8192], 4096))
        assert memory[:12_288] == data[:12_288]
        reader.close()

    once()
    before = open_descriptors(), threading.active_count(), status_kib("VmPin")
    resident = status_kib("VmRSS")
    for _ in range(200):
        once()
    assert (open_descriptors(), threading.active_count(), status_kib("VmPin")) == before
    assert status_kib("VmRSS") < resident + 4096


def test_callers_take_further_rings_up_to_the_limit(disk):
    data = os.urandom(8 << 20)
    reader = UringReader([write_through(disk / "a", data)], rings=2, depth=2)
    one = len(rings_open())  # a mapping holds a descriptor of its own
    offsets = list(range(0, len(data), 65_536))

    def work() -> bool:
        memory = private_memory(len(data))
        return all(reader.read_into(blocks(memory, offsets, 65_536)) or memory[:] == data for _ in range(3))

    results = list[bool]()
    threads = [threading.Thread(target=lambda: results.append(work())) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [True] * 6
    assert len(rings_open()) == 2 * one
    reader.close()
    assert rings_open() == []


def test_a_child_process_makes_rings_of_its_own_and_closes_its_copies(disk):
    data = os.urandom(50_000)
    reader = UringReader([write_through(disk / "a", data)])
    memory = private_memory(1 << 16)
    reader.register(memoryview(memory))
    reader.read_into(blocks(memory, [0], 4096))
    one = len(rings_open())

    def law() -> bool:
        nothing = rings_open() == []
        reader.read_into(blocks(memory, [8192], 4096))
        own = len(rings_open()) == one and reader.registered == [1 << 16]
        reader.close()
        return nothing and own and memory[:4096] == data[8192:12_288] and rings_open() == []

    for _ in range(3):
        assert in_child(law)
        reader.read_into(blocks(memory, [4096], 4096))
        assert memory[:4096] == data[4096:8192]
    reader.close()


def test_a_ring_is_given_up_although_somebody_looks_at_its_queues():
    """As a thread does that was reading when its process forked: in the child it never lets go."""
    before, ring = open_descriptors(), uring_ring.Ring(4, files=0)
    one = len(rings_open())
    queues = ring._mappings[0]
    with memoryview(queues):
        ring.close(unregister=False)
        assert len(rings_open()) == one - 2 == 1  # the ring's and the other mapping's are closed
    queues.close()
    assert open_descriptors() == before


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # of one that meets a finaliser
def test_ctrl_c_waits_for_the_kernel_and_leaves_the_reader_usable(disk):
    data = os.urandom(4 << 20)
    path = write_through(disk / "a", data)
    offsets = list(range(0, len(data), 65_536))
    before = open_descriptors()
    reader = UringReader([path], depth=16, rings=1)
    memory = private_memory(len(data))
    reader.register(memoryview(memory))
    random = np.random.default_rng(1)

    def interrupt(*_) -> None:
        raise KeyboardInterrupt

    old = signal.signal(signal.SIGALRM, interrupt)
    interrupted = 0
    try:
        for delay in random.uniform(0.0005, 0.008, 40).tolist():
            try:
                signal.setitimer(signal.ITIMER_REAL, delay, 0.5)  # again, since one that meets a finaliser is lost
                read_for_ever(reader, blocks(memory, offsets, 65_536))
            except KeyboardInterrupt:
                signal.setitimer(signal.ITIMER_REAL, 0)
                interrupted += 1
            memory[:] = b"\xa5" * len(data)
            time.sleep(0.002)
            assert memory[:] == b"\xa5" * len(data), "the kernel has written after the read was given up"
            reader.read_into(blocks(memory, offsets[:40], 65_536))
            assert memory[: 40 * 65_536] == data[: 40 * 65_536]
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)
    assert interrupted == 40
    assert reader.oldest() is None
    reader.close()
    assert open_descriptors() == before
