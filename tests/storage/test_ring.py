from __future__ import annotations

import ctypes
import logging
import os
import re
import resource
import subprocess
import sys
import weakref
from pathlib import Path

import numpy as np
import pytest

from shardkit.errors import ConfigError
from shardkit.storage import ring as module
from shardkit.storage.reader import address_of
from shardkit.storage.ring import host_ring, processors
from shardkit.testing.host_device import HostDevice
from shardkit.testing.rings import as_nobody, needs_root

MIB = 1 << 20
RESERVED = Path("/proc/sys/vm/nr_hugepages")


def field(memory: memoryview, name: str) -> int:
    """KiB that the kernel tells of the map of some memory."""
    text, at = Path("/proc/self/smaps").read_text(), address_of(memory)
    for each in re.split(r"(?m)^(?=[0-9a-f]+-[0-9a-f]+ )", text):
        bounds = re.match("([0-9a-f]+)-([0-9a-f]+) ", each)
        if bounds and int(bounds[1], 16) <= at < int(bounds[2], 16):
            return int(re.search(rf"(?m)^{name}: *(\d+) kB", each)[1])
    raise AssertionError(f"{at:#x} is not mapped")


def resident(address: int, nbytes: int) -> int:
    """Bytes of some memory that are there."""
    pages = (ctypes.c_ubyte * (nbytes // 4096))()
    assert ctypes.CDLL(None).mincore(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), pages) == 0
    return sum(page & 1 for page in pages) * 4096


def policy(memory: memoryview) -> str:
    """What the kernel tells of the NUMA policy of the map of some memory."""
    at, best = address_of(memory), (0, "")
    for line in Path("/proc/self/numa_maps").read_text().splitlines():
        start, said, *_ = line.split()
        if int(start, 16) <= at:
            best = max(best, (int(start, 16), said))
    return best[1]


@pytest.fixture(autouse=True)
def no_reserved_pages(tmp_path, monkeypatch):
    """Whatever this machine's administrator did; `reserved` asks the machine again."""
    monkeypatch.setattr(module, "_RESERVED", tmp_path)


@pytest.mark.parametrize(("nbytes", "size"), [(1, 2 * MIB), (2 * MIB, 2 * MIB), (2 * MIB + 1, 4 * MIB)])
def test_a_ring_is_two_mebibytes_aligned_and_all_there(nbytes, size):
    ring = host_ring(nbytes, None)
    assert (ring.memory.nbytes, address_of(ring.memory) % (2 * MIB)) == (size, 0)
    assert (ring.memory.readonly, ring.memory.format, ring.memory.contiguous) == (False, "B", True)
    assert resident(address_of(ring.memory), size) == size
    assert (ring.pinned, ring.node) == (False, None)
    ring.memory[-3:] = b"abc"


def test_every_part_of_a_large_ring_is_touched_before_use(monkeypatch):
    monkeypatch.setattr(module, "_A_THREAD", 8 * MIB)  # several threads
    ring = host_ring(70 * MIB, None)
    assert resident(address_of(ring.memory), 70 * MIB) == 70 * MIB


def test_a_kernel_that_cannot_populate_is_helped(monkeypatch, caplog):
    monkeypatch.setattr(module, "_POPULATE_WRITE", 99)
    with caplog.at_level(logging.INFO):
        ring = host_ring(20 * MIB, None)
    assert resident(address_of(ring.memory), 20 * MIB) == 20 * MIB
    assert not caplog.records


def test_the_ring_goes_with_its_last_view():
    device = HostDevice()
    memory = host_ring(64 * MIB, device).memory
    assert list(device.pinned.values()) == [64 * MIB]
    at, part = address_of(memory), memory[5:9]
    del memory
    assert at in device.pinned
    del part
    assert device.pinned == {}
    assert not is_mapped(at)


def is_mapped(address: int) -> bool:
    present = (ctypes.c_ubyte * 1)()
    return ctypes.CDLL(None).mincore(ctypes.c_void_p(address), ctypes.c_size_t(1), present) == 0


def test_what_ends_with_the_ring_ends_before_it_is_unmapped():
    class Watching(HostDevice):
        def pin(self, memory):
            at = address_of(memory)
            weakref.finalize(memory.obj, lambda: seen.append(is_mapped(at)))

    seen = list[bool]()
    memory = host_ring(2 * MIB, Watching()).memory
    assert is_mapped(address_of(memory))
    del memory
    assert seen == [True]


# Pages


def test_transparent_huge_pages_are_used_where_the_kernel_has_them():
    ring = host_ring(16 * MIB, None)
    setting = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not setting.exists() or "[never]" in setting.read_text():
        assert ring.pages == "small"
        return
    assert ring.pages == "transparent"
    assert field(ring.memory, "AnonHugePages") > 0


@pytest.mark.parametrize("setting", ["", "always madvise [never]"])
def test_without_them_the_pages_are_small_which_is_told(tmp_path, monkeypatch, caplog, setting):
    (tmp_path / "enabled").write_text(setting)
    monkeypatch.setattr(module, "_TRANSPARENT", tmp_path / "enabled")
    assert host_ring(2 * MIB, None).pages == "small"
    (record,) = caplog.records
    assert "lies in small pages" in record.message
    assert record.message.endswith("not there" if not setting else f"echo madvise > {tmp_path / 'enabled'}")


@pytest.fixture
def reserved(monkeypatch):
    """Really reserves eight huge pages, and gives them back."""
    monkeypatch.undo()
    if (module._RESERVED / "free_hugepages").read_text() != "0\n":
        pytest.skip("somebody has reserved huge pages here already")
    try:
        before = RESERVED.read_text()
        RESERVED.write_text(str(int(before) + 8))
    except OSError as error:
        pytest.skip(f"huge pages are reserved by root: {error}")
    try:
        if int(RESERVED.read_text()) < int(before) + 8:
            pytest.skip("the kernel found no eight huge pages")
        yield
    finally:
        RESERVED.write_text(before)


def test_reserved_huge_pages_are_used_when_they_suffice(reserved):
    device = HostDevice(numa_node=0)
    ring = host_ring(16 * MIB, device)
    assert (ring.pages, ring.pinned, ring.memory.nbytes) == ("hugetlb", True, 16 * MIB)
    assert field(ring.memory, "KernelPageSize") == 2048
    assert field(ring.memory, "Private_Hugetlb") * 1024 == 16 * MIB
    ring.memory[:] = bytes(16 * MIB)
    again = host_ring(2 * MIB, None)  # all pages are taken
    assert again.pages != "hugetlb"
    del ring
    assert host_ring(2 * MIB, None).pages == "hugetlb"


def test_too_few_reserved_huge_pages_are_said_once(reserved, caplog):
    with caplog.at_level(logging.INFO):
        ring = host_ring(64 * MIB, None)
    assert ring.pages != "hugetlb"
    assert [record.getMessage() for record in caplog.records] == [
        f"{16 * MIB} bytes of reserved huge pages are too few for a ring of {64 * MIB}"
    ]


def test_reserved_huge_pages_that_the_kernel_does_not_give_are_done_without(reserved, monkeypatch, caplog):
    monkeypatch.setattr(module, "_POPULATE_WRITE", 99)  # so that nothing says whether a touch would end the process
    with caplog.at_level(logging.INFO):
        ring = host_ring(2 * MIB, None)
    assert ring.pages != "hugetlb"
    assert "gets none of the reserved huge pages: [Errno 22]" in caplog.text


# Nodes


def test_the_memory_lies_on_the_devices_node():
    ring = host_ring(4 * MIB, HostDevice(numa_node=0))
    assert ring.node == 0
    try:
        said = policy(ring.memory)
    except OSError:
        pytest.skip("this kernel tells no NUMA policies")
    assert said in {"prefer:0", "prefer=static:0"}


def test_no_node_is_no_policy():
    assert host_ring(4 * MIB, HostDevice()).node is None


def test_a_node_that_cannot_be_had_is_said_once(caplog):
    ring = host_ring(4 * MIB, HostDevice(numa_node=900))
    assert (ring.node, ring.pinned) == (None, True)
    assert [record.getMessage() for record in caplog.records] == [
        "a ring cannot be bound to NUMA node 900: Invalid argument"
    ]


@pytest.mark.parametrize(("nodes", "node", "said"), [("0\n", 0, 0), ("0-1\n", None, 1)])
def test_a_container_that_forbids_it_matters_where_there_are_several_nodes(
    tmp_path, monkeypatch, caplog, nodes, node, said
):
    (tmp_path / "has_memory").write_text(nodes)
    monkeypatch.setattr(module, "_MBIND", {})
    monkeypatch.setattr(module, "_NODE", tmp_path)
    assert host_ring(4 * MIB, HostDevice(numa_node=0)).node == node
    assert len(caplog.records) == said


def test_pages_are_touched_by_processors_of_the_node(tmp_path, monkeypatch):
    here = sorted(os.sched_getaffinity(0))
    (tmp_path / "node7").mkdir()
    (tmp_path / "node7" / "cpulist").write_text(f"{here[-1]}\n")
    monkeypatch.setattr(module, "_NODE", tmp_path)
    real, seen = os.sched_setaffinity, list[set[int]]()
    monkeypatch.setattr(os, "sched_setaffinity", lambda who, which: (seen.append(which), real(who, which)))
    host_ring(4 * MIB, HostDevice(numa_node=7))
    assert seen == [{here[-1]}]
    assert sorted(os.sched_getaffinity(0)) == here


@pytest.mark.parametrize(
    ("text", "found"), [("", set()), ("\n", set()), ("3\n", {3}), ("0-1,4,8-9\n", {0, 1, 4, 8, 9})]
)
def test_lists_of_the_kernel_are_read(text, found):
    assert processors(text) == found


# Pinning


def test_a_ring_that_cannot_be_pinned_keeps_its_size(caplog):
    device = HostDevice()
    device.fail_next("pin")
    ring = host_ring(16 * MIB, device)
    assert (ring.pinned, ring.memory.nbytes, device.calls["pin"]) == (False, 16 * MIB, 1)
    assert len(caplog.records) == 1
    assert "is not pinned, so copies from it are slow: the device refuses 'pin'" in caplog.text


def test_a_ring_may_shrink_to_be_pinned(caplog):
    device = HostDevice()
    for _ in range(2):
        device.fail_next("pin")
    ring = host_ring(16 * MIB, device, least=3 * MIB)
    assert (ring.pinned, ring.memory.nbytes) == (True, 4 * MIB)
    assert resident(address_of(ring.memory), 16 * MIB) == 4 * MIB  # the rest was given back
    assert len(caplog.records) == 1
    assert f"of a ring of {16 * MIB} bytes only {4 * MIB} could be pinned" in caplog.text


def test_it_does_not_shrink_further_than_it_may(caplog):
    device = HostDevice()
    for _ in range(3):
        device.fail_next("pin")
    ring = host_ring(16 * MIB, device, least=8 * MIB)
    assert (ring.pinned, ring.memory.nbytes, device.calls["pin"]) == (False, 16 * MIB, 2)


@needs_root
def test_the_limit_of_locked_memory_makes_a_smaller_ring_or_one_that_is_not_pinned():
    def law() -> tuple[object, ...]:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (5 * MIB, 5 * MIB))
        small = host_ring(16 * MIB, HostDevice(lock=True), least=2 * MIB)
        facts = small.pinned, small.memory.nbytes // MIB, field(small.memory, "Locked")
        del small
        none = host_ring(16 * MIB, HostDevice(lock=True))
        return *facts, none.pinned, none.memory.nbytes // MIB

    assert as_nobody(law) == "(True, 4, 4096, False, 16)"


# Memory


def test_a_ring_takes_at_most_half_of_what_is_available(monkeypatch, caplog):
    monkeypatch.setattr(module, "available_memory", lambda: 13 * MIB)
    assert host_ring(64 * MIB, None).memory.nbytes == 6 * MIB
    assert "has to do with" in caplog.text
    monkeypatch.setattr(module, "available_memory", lambda: 0)
    assert host_ring(64 * MIB, None).memory.nbytes == 2 * MIB


LIMITED = """
import resource, sys
from shardkit.errors import CapabilityError
from shardkit.storage.ring import host_ring
used = int(open("/proc/self/statm").read().split()[0]) * 4096
limit = used + int(sys.argv[1]) * (1 << 20)
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
try:
    print(host_ring(1 << 30, None).memory.nbytes >> 20)
except CapabilityError as error:
    print(error)
"""


@pytest.mark.parametrize(("room", "said"), [(400, "256"), (1, "cannot map memory for a buffer")])
def test_a_process_that_may_map_less_gets_a_smaller_ring(room, said):
    ran = subprocess.run(
        [sys.executable, "-c", LIMITED, str(room)], capture_output=True, text=True, check=True, timeout=60
    )
    assert ran.stdout.startswith(said)


@pytest.mark.parametrize("nbytes", [0, -1])
def test_a_ring_of_nothing_is_refused(nbytes):
    with pytest.raises(ConfigError, match=f"found {nbytes}"):
        host_ring(nbytes, None)


def test_a_device_that_is_no_longer_there_is_not_hidden():
    class Gone(HostDevice):
        def pin(self, memory):
            raise MemoryError

    with pytest.raises(MemoryError):
        host_ring(2 * MIB, Gone())


def test_fresh_memory_is_zeroed():
    ring = host_ring(4 * MIB, None)
    assert not np.frombuffer(ring.memory, np.uint8).any()


def test_a_ring_is_there_where_no_thread_can_be_had(monkeypatch):
    def refuse(_):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr("threading.Thread.start", refuse)
    assert host_ring(4 * MIB, None).memory.nbytes == 4 * MIB
