from __future__ import annotations

import ctypes
import errno
import logging
import os
import signal
import struct
import subprocess
import sys
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardkit.errors import CapabilityError, ConfigError, DeviceError, ShortReadError, StorageError
from shardkit.extent import Extent, align_up
from shardkit.storage.coalesce import coalesce
from shardkit.storage.cufile_errors import CUFILE_CODES, cufile_code_in, errno_in, explain_cufile_error
from shardkit.storage.gds import GdsReader, gds_mode
from shardkit.storage.gds_batch import BatchReads, BatchRefusedError, CuFileBatches
from shardkit.storage.gds_call import MANY, SMALL_BYTES, TASK_BYTES, for_batches, task_bytes
from shardkit.storage.gds_facts import (
    COMPAT,
    GDS,
    POSIX,
    HostFacts,
    delivered_by,
    driver_facts,
    gds_refusal,
    mode_of,
    mount_refusal,
)
from shardkit.storage.gds_library import KvikLibrary, Span, host_facts
from shardkit.storage.probe import Mount
from shardkit.storage.reader import ReadOp, address_of
from shardkit.testing.faulty_files import Reply
from shardkit.testing.host_device import HostDevice
from shardkit.testing.host_gds import HostGds, driver
from shardkit.testing.readers import ReaderContract
from shardkit.testing.reading import in_child, open_descriptors

NVME = Mount(file_system="ext4", point="/data", source="/dev/nvme0n1p1", options=("rw",))


class AnyMemory(HostDevice):
    """The contract reads into plain memory; a real GPU's is tested on one."""

    def may_touch(self, address, nbytes, *, on_device):
        return True


def reader_over(*paths, device=None, **options):
    """Return a reader over a stand-in, and both."""
    library = HostGds(**options)
    device = device or HostDevice()
    return GdsReader(list(paths), device, library=library), library, device


def read(reader, device, wanted, *, max_bytes=1 << 20):
    """Read (file, offset, length) rows into device memory and return the bytes of each."""
    plan = coalesce(*np.asarray(wanted, np.int64).T, align=reader.align, gap_bytes=0, max_bytes=max_bytes)
    memory = device.memory(plan.buffer_bytes)
    reader.read_into(plan.ops(memory))
    return [bytes(memory[at : at + row[2]]) for at, row in zip(plan.buffer_start.tolist(), wanted, strict=True)]


@pytest.fixture
def data(tmp_path):
    """Two files of 4 MiB and a bit."""
    random = np.random.default_rng(5)
    paths = [tmp_path / "a.bin", tmp_path / "b.bin"]
    for path in paths:
        path.write_bytes(random.bytes((4 << 20) + 777))
    return paths


class Contract(ReaderContract):
    options: dict = {}  # noqa: RUF012 - set by each subclass

    def make_reader(self, paths):
        return GdsReader(paths, AnyMemory(), library=HostGds(**self.options), max_open=self.options.get("max_open"))

    # A GPU does not survive a fork; see test_a_child_process_is_refused_with_the_reason.
    test_a_child_process_reads_with_its_parents_reader = None

    @pytest.fixture
    def failing(self, faulty):
        faulty.script("a", Reply(error=errno.EIO), forever=True)
        return faulty.path / "a", 8192


class TestGdsReader(Contract):
    pass


class TestGdsReaderWithBatches(Contract):
    @pytest.fixture(autouse=True)
    def few_are_many(self, monkeypatch):
        monkeypatch.setattr("shardkit.storage.gds_call.MANY", 2)

    def make_reader(self, paths):
        library = HostGds(facts=driver(batch=5), batches=True)
        return GdsReader(paths, AnyMemory(), library=library, max_open=3)

    # cuFile does not tell which read of a batch hangs: the first one of it is told.
    test_the_oldest_read_is_told_while_it_hangs = None


# What is read


def test_a_request_never_passes_the_end_of_its_file(data):
    reader, library, device = reader_over(data[0], threshold=0)
    size = data[0].stat().st_size
    plain = data[0].read_bytes()
    assert read(reader, device, [(0, 0, size)], max_bytes=1 << 30) == [plain]
    assert read(reader, device, [(0, size - 1, 1)]) == [plain[-1:]]
    assert library.sizes == [size, 777]
    reader.close()


def test_a_span_that_needs_nothing_is_not_read(data):
    reader, library, device = reader_over(data[0])
    reader.read_into([ReadOp(0, Extent(1 << 40, 4096), device.memory(4096), 0)])
    assert library.calls["pread"] == 0
    reader.close()


def test_many_small_spans_are_batches_of_what_the_driver_takes(data):
    reader, library, device = reader_over(*data, facts=driver(batch=20), batches=True)
    wanted = [(n % 2, 40_960 * n, 20_000) for n in range(50)]
    plain = [path.read_bytes() for path in data]
    assert read(reader, device, wanted) == [plain[f][o : o + n] for f, o, n in wanted]
    assert library.batches.sizes == [20, 20, 10]
    assert library.calls["pread"] == 0
    assert reader.counters["cufile compat"] == 50 * 20_480
    reader.close()
    assert library.batches.closed
    assert library.batches.files == {}


def test_small_and_long_spans_of_one_call_go_their_own_ways(data):
    reader, library, device = reader_over(*data, facts=driver(), batches=True)
    wanted = [(0, 40_960 * n, 20_000) for n in range(MANY)] + [(1, 0, 1 << 20), (1, 2 << 20, 1 << 20)]
    plain = [path.read_bytes() for path in data]
    assert read(reader, device, wanted) == [plain[f][o : o + n] for f, o, n in wanted]
    assert library.batches.sizes == [MANY]
    assert library.sizes == [1 << 20, 1 << 20]
    reader.close()


def test_few_small_spans_are_no_batch():
    length, need = np.full(MANY, 4096), np.full(MANY, 10)
    assert for_batches(length, need, has_batches=True).all()
    assert not for_batches(length[1:], need[1:], has_batches=True).any()
    assert not for_batches(length, need, has_batches=False).any()
    mixed = np.append(length, [SMALL_BYTES, 4096])
    assert for_batches(mixed, np.append(need, [1, 0]), has_batches=True).tolist() == [True] * MANY + [False, False]


def test_batches_that_do_not_work_are_tried_once_and_said_once(data, caplog):
    reader, library, device = reader_over(*data, facts=driver(), batches=True)
    library.batches.refusal = "CU_FILE_BATCH_NOCOMPAT_ERROR: no"
    wanted = [(0, 40_960 * n, 20_000) for n in range(50)]
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert read(reader, device, wanted) == [data[0].read_bytes()[o : o + n] for _, o, n in wanted]
    assert [record.getMessage() for record in caplog.records] == [
        "batches of cuFile are not used: CU_FILE_BATCH_NOCOMPAT_ERROR: no; KvikIO's threads read small spans, too"
    ]
    assert library.calls["pread"] == 150
    reader.close()
    assert library.batches.files == {}


def test_what_fails_in_a_batch_is_read_once_more_alone(data):
    reader, library, device = reader_over(*data, facts=driver(), batches=True)
    library.batches.failing = {40_960 * 3, 40_960 * 40}
    wanted = [(0, 40_960 * n, 20_000) for n in range(50)]
    assert read(reader, device, wanted) == [data[0].read_bytes()[o : o + n] for _, o, n in wanted]
    assert library.calls["pread"] == 2
    assert sum(reader.counters.values()) == 50 * 20_480
    reader.close()


def test_no_thread_is_left_with_a_short_rest_of_a_long_read(data):
    reader, library, device = reader_over(data[0])
    size = data[0].stat().st_size
    assert TASK_BYTES < size < TASK_BYTES + 4096
    assert read(reader, device, [(0, 0, size)], max_bytes=1) == [data[0].read_bytes()]
    assert library.requests == [(2 << 20) + 4096, size - (2 << 20) - 4096]
    reader.close()


@given(st.integers(1, 20 * TASK_BYTES))
def test_tasks_of_a_read_are_few_and_whole_blocks_and_none_is_a_short_rest(length):
    size = task_bytes(length)
    tasks = [min(size, length - done) for done in range(0, length, size)]
    assert size % 4096 == 0
    assert size <= TASK_BYTES
    assert len(tasks) == -(-length // TASK_BYTES)
    assert size - tasks[-1] < 4096 * len(tasks)


# Registered memory


def test_memory_is_registered_once_and_given_back_at_the_end(data):
    reader, library, device = reader_over(*data, facts=driver(), batches=True)
    memory = device.memory(4 << 20)
    reader.register(memory)
    reader.register(memory)
    assert library.registered == [(address_of(memory), 4 << 20)]
    assert reader.registered == 4 << 20
    plan = coalesce(*np.asarray([(0, 40_960 * n, 20_000) for n in range(50)]).T, align=4096, gap_bytes=0, max_bytes=1)
    reader.read_into(plan.ops(memory[8192:]))
    assert library.batches.bases == {address_of(memory)}, "cuFile finds registered memory by its start"
    reader.close()
    assert library.registered == []


def test_memory_that_cannot_be_registered_is_read_into_all_the_same(data, caplog):
    reader, library, device = reader_over(data[0])
    library.to_fail["register"] = "CU_FILE_GPU_MEMORY_PINNING_FAILED"
    with caplog.at_level(logging.WARNING):
        reader.register(device.memory(8192))
    assert "no more memory of the GPU could be pinned" in caplog.text
    assert read(reader, device, [(0, 0, 100)]) == [data[0].read_bytes()[:100]]
    assert reader.registered == 0
    reader.close()


# What fails


@pytest.mark.parametrize(
    "said", ["cuFile error at: x: CU_FILE_IO_NOT_SUPPORTED", "no idea", "POSIX error: Invalid argument"]
)
def test_a_file_on_which_cufile_fails_is_read_through_host_memory_alone(data, caplog, said):
    reader, library, device = reader_over(*data)
    library.to_fail["a.bin"] = said
    plain = [path.read_bytes() for path in data]
    wanted = [(0, 4096, 50_000), (1, 0, 60_000)]
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert read(reader, device, wanted) == [plain[0][4096:54_096], plain[1][:60_000]]
    assert reader.refused == 1
    assert library.calls["pread"] == 3, "the file is not tried again"
    assert len(caplog.records) == 1
    assert "a.bin cannot be read into the GPU's memory" in caplog.text
    assert sum(reader.counters.values()) == 2 * (50_000 + align_up(60_000, 4096))
    reader.close()


def test_a_file_that_kvikio_cannot_open_is_read_through_host_memory(data):
    reader, library, device = reader_over(*data)
    library.to_fail["open"] = "cuFile error at: x: CU_FILE_INVALID_FILE_TYPE"
    assert read(reader, device, [(0, 0, 50_000)]) == [data[0].read_bytes()[:50_000]]
    del library.to_fail["open"]
    assert read(reader, device, [(1, 0, 50_000)]) == [data[1].read_bytes()[:50_000]]
    assert (reader.refused, library.calls["pread"]) == (1, 1)
    reader.close()


@pytest.mark.parametrize(
    "said", ["POSIX error on pread: Interrupted system call", "Stale file handle", "Too many open files"]
)
def test_what_passes_refuses_no_file(data, said):
    reader, library, device = reader_over(data[0])
    library.to_fail["a.bin"] = said
    assert read(reader, device, [(0, 0, 50_000)]) == [data[0].read_bytes()[:50_000]]
    assert reader.refused == 0
    library.to_fail.clear()
    assert read(reader, device, [(0, 0, 50_000)]) == [data[0].read_bytes()[:50_000]]
    assert library.calls["pread"] == 2
    reader.close()


@pytest.mark.parametrize("threshold", [0, 1 << 30])
def test_what_the_storage_says_has_errno_path_and_offset_and_is_asked_once(data, threshold):
    reader, library, device = reader_over(*data, threshold=threshold)
    library.to_fail["b.bin"] = "POSIX error on pread: Input/output error"
    with pytest.raises(StorageError, match="EIO") as caught:
        read(reader, device, [(0, 0, 50_000), (1, 8192, 50_000), (1, 1 << 20, 50_000)])
    assert (caught.value.errno, caught.value.path, caught.value.offset) == (errno.EIO, str(data[1]), 8192)
    assert (reader.refused, reader.counters["page cache"]) == (0, 50_000 + 3248 if threshold == 0 else 53_248)
    reader.close()


def test_a_count_that_is_too_small_is_read_once_more_through_host_memory(data):
    reader, library, device = reader_over(data[0], threshold=0)
    library.short["a.bin"] = 5000
    assert read(reader, device, [(0, 0, 50_000)]) == [data[0].read_bytes()[:50_000]]
    assert reader.refused == 1
    reader.close()


def test_a_file_cut_between_the_look_at_it_and_the_read_is_a_short_read(data, monkeypatch):
    reader, library, device = reader_over(data[0], threshold=0)
    real = library.open

    def open_and_cut(path):
        found = real(path)
        os.truncate(data[0], 5000)
        return found

    monkeypatch.setattr(library, "open", open_and_cut)
    with pytest.raises(ShortReadError, match="found 904 bytes; the file has 5000, it had 4195081"):
        read(reader, device, [(0, 4096, 50_000)])
    reader.close()


def test_a_file_that_was_removed_is_still_read_and_another_of_its_name_is_not(data):
    reader, _, device = reader_over(data[0])
    plain = data[0].read_bytes()
    assert read(reader, device, [(0, 0, 100)]) == [plain[:100]]
    data[0].unlink()
    data[0].write_bytes(b"x" * len(plain))
    assert read(reader, device, [(0, 50_000, 50_000)]) == [plain[50_000:100_000]]
    reader.close()


def test_a_copy_to_the_device_that_fails_is_raised(data):
    reader, library, device = reader_over(data[0])
    library.to_fail["a.bin"] = "no idea"
    device.fail_next("upload")
    with pytest.raises(DeviceError, match="upload"):
        read(reader, device, [(0, 0, 50_000)])
    assert reader.refused == 0
    reader.close()


def test_ctrl_c_waits_for_what_is_under_way(data):
    reader, library, device = reader_over(data[0], threshold=0)
    started, go_on = threading.Event(), threading.Event()
    real = HostGds.fail

    def slow(what):
        if what.endswith("a.bin"):
            started.set()
            assert go_on.wait(20)
        real(library, what)

    library.fail = slow

    def interrupt():
        assert started.wait(20)
        signal.raise_signal(signal.SIGINT)
        threading.Timer(0.3, go_on.set).start()

    thread = threading.Thread(target=interrupt)
    thread.start()
    memory = device.memory(1 << 20)
    with pytest.raises(KeyboardInterrupt):
        reader.read_into([ReadOp(0, Extent(0, 1 << 20), memory, 1 << 20)])
    assert go_on.is_set(), "the read writes into the memory until it is over"
    assert bytes(memory) == data[0].read_bytes()[: 1 << 20]
    thread.join()
    library.fail = lambda what: real(library, what)
    assert read(reader, device, [(0, 0, 10)]) == [data[0].read_bytes()[:10]]
    reader.close()


# Processes, descriptors


def test_a_child_process_is_refused_with_the_reason_and_touches_nothing(data):
    reader, library, device = reader_over(*data, facts=driver(), batches=True)
    wanted = [(n % 2, 40_960 * n, 20_000) for n in range(50)]
    expected = read(reader, device, wanted)

    def law():
        with pytest.raises(CapabilityError, match="does not survive a fork"):
            reader.read_into([])
        with pytest.raises(CapabilityError, match="does not survive a fork"):
            reader.register(memoryview(bytearray(1)))
        reader.close()
        return library.open_files == 2 and not library.batches.closed and reader.oldest() is None

    assert in_child(law)
    assert read(reader, device, wanted) == expected
    reader.close()


def test_every_descriptor_of_a_file_goes_with_it(data):
    before = open_descriptors()
    reader, library, device = reader_over(*data, facts=driver(), batches=True)
    read(reader, device, [(n % 2, 40_960 * n, 20_000) for n in range(50)])
    assert len(open_descriptors()) == len(before) + 8, "four a file"
    reader.close()
    assert open_descriptors() == before
    assert library.open_files == 0


@pytest.mark.parametrize("options", [{"threads": 0}, {"max_open": 0}])
def test_numbers_below_one_are_refused(data, options):
    with pytest.raises(ConfigError, match="at least one"):
        GdsReader(data, HostDevice(), library=HostGds(), **options)


# What is told


@pytest.mark.parametrize(
    ("facts", "direct", "counted"),
    [
        (None, False, {"page cache": 53_248}),
        (None, True, {"direct": 53_248}),
        (driver(), True, {"cufile compat": 53_248}),
        (driver(nvidia_fs=(2, 24)), True, {"cufile compat": 53_248}),  # the files do not lie on NVMe here
    ],
)
def test_counters_tell_the_way_that_the_driver_tells(data, monkeypatch, facts, direct, counted):
    reader, _, device = reader_over(data[0], facts=facts, goes_direct=direct)
    monkeypatch.setattr(
        "shardkit.storage.gds_files.mount_of", lambda path: Mount(file_system="tmpfs", point="/", source="x")
    )
    read(reader, device, [(0, 0, 50_000)])
    assert {way: count for way, count in reader.counters.items() if count} == counted
    reader.close()


def test_bytes_on_nvme_with_nvidia_fs_are_counted_as_gds(data, monkeypatch):
    reader, _, device = reader_over(data[0], facts=driver(nvidia_fs=(2, 24)))
    monkeypatch.setattr("shardkit.storage.gds_files.mount_of", lambda path: NVME)
    assert reader.mode == GDS
    read(reader, device, [(0, 0, 50_000), (0, 1 << 20, 10)])
    assert {way: count for way, count in reader.counters.items() if count} == {"gds": 53_248, "page cache": 4096}
    reader.close()


@pytest.mark.parametrize(
    ("mode", "length", "has_direct", "goes_direct", "ways"),
    [
        (GDS, 16_384, True, False, ("gds", "gds")),
        (GDS, 16_383, True, False, ("page cache", "page cache")),
        (GDS, 16_383, True, True, ("direct", "page cache")),
        (GDS, 1 << 20, False, True, ("page cache", "page cache")),
        (COMPAT, 1 << 20, True, True, ("cufile compat", "cufile compat")),
        (POSIX, 1 << 20, True, True, ("direct", "page cache")),
        (POSIX, 1 << 20, True, False, ("page cache", "page cache")),
    ],
)
def test_the_way_follows_from_what_kvikio_does(mode, length, has_direct, goes_direct, ways):
    assert delivered_by(mode, length, threshold=16_384, has_direct=has_direct, goes_direct=goes_direct) == ways


def test_the_driver_is_read_as_its_header_has_it():
    raw = struct.pack("=IIQQIIIIIIII", 2, 24, 4, 16384, 1 << 4, 3, 1 << 1 | 1 << 4, 131072, 1024, 33554432, 128, 0)
    facts = driver_facts(raw.ljust(256, b"\0"), p2pdma=True)
    assert (facts.nvidia_fs, facts.status, facts.p2p, facts.batch, facts.p2pdma) == ((2, 24), 16, True, 128, True)


@pytest.mark.gpu  # where the library is; it needs no GPU
def test_the_structures_are_those_of_the_header(tmp_path):
    cufile = pytest.importorskip("cuda.bindings.cufile")
    assert (cufile.io_params_dtype.itemsize, cufile.io_events_dtype.itemsize, cufile.descr_dtype.itemsize) == (
        64,
        24,
        24,
    )
    assert cufile.io_params_dtype["u"].fields["batch"][0].names == (
        "dev_ptr_base", "file_offset", "dev_ptr_offset", "size_",
    )  # fmt: skip
    assert {int(code) for code in cufile.OpError} == set(CUFILE_CODES)
    for code in cufile.OpError:
        assert explain_cufile_error(int(code))[0].endswith(code.name)


@pytest.mark.parametrize(
    ("facts", "mode"),
    [
        (None, POSIX),
        (driver(), COMPAT),
        (driver(nvidia_fs=(2, 24)), GDS),
        (driver(p2pdma=True), GDS),
    ],
)
def test_the_mode_is_what_the_driver_says(facts, mode):
    assert mode_of(facts) == mode


FACTS = {"nvidia_fs": "2.24.2", "p2pdma": False, "missing": None, "mounts": (NVME,)}


@pytest.mark.parametrize(
    ("changes", "refusal"),
    [
        ({}, None),
        ({"nvidia_fs": None}, "nvidia-fs is not loaded"),
        ({"nvidia_fs": None, "p2pdma": True}, None),
        ({"missing": "the package kvikio is not installed"}, "kvikio is not installed"),
        ({"mounts": (NVME, Mount(file_system="tmpfs", point="/x", source="tmpfs"))}, "does not serve tmpfs"),
    ],
)
def test_gds_is_refused_with_the_fact_that_speaks_against_it(changes, refusal):
    found = gds_refusal(HostFacts(**{**FACTS, **changes}))
    assert found is None if refusal is None else refusal in (found or "")


@pytest.mark.parametrize(
    ("file_system", "source", "options", "p2pdma_only", "status", "refusal"),
    [
        ("ext4", "/dev/nvme0n1", ("rw", "data=ordered"), False, None, None),
        ("ext4", "/dev/nvme0n1", ("rw", "data=journal"), False, None, "data=journal"),
        ("xfs", "/dev/md0", (), False, None, None),
        ("xfs", "/dev/md0", (), True, None, "md0, which is no local NVMe drive"),
        ("ext4", "/dev/vda1", (), False, None, "vda1, which is no local NVMe drive"),
        ("ext4", "/dev/loop3", (), False, None, "loop3"),
        ("overlay", "overlay", (), False, None, "does not serve overlay"),
        ("nfs4", "server:/x", (), False, None, None),
        ("nfs4", "server:/x", (), False, 1 << 2, None),
        ("nfs4", "server:/x", (), False, 1 << 0, "not set up for nfs4"),
        ("lustre", "server:/x", (), True, None, "PCI P2PDMA does not serve lustre"),
    ],
)
def test_a_mount_is_refused_with_the_fact_that_speaks_against_it(
    file_system, source, options, p2pdma_only, status, refusal
):
    mount = Mount(file_system=file_system, point="/d", source=source, options=options)
    found = mount_refusal(mount, p2pdma_only=p2pdma_only, status=status)
    assert found is None if refusal is None else refusal in (found or "")


@pytest.mark.parametrize(
    ("config", "variable", "told"),
    [
        ('{\n  // "use_pci_p2pdma": true\n  "use_pci_p2pdma": false,\n}', None, False),
        ('{\n    "use_pci_p2pdma" : true,\n}', None, True),
        ('{\n    "use_pci_p2pdma" : true,\n}', "false", False),
        ("{}", "true", True),
        ('{"properties": {"use_pci_p2pdma": true}}', None, True),
        ('{"properties": {"use_pci_p2pdma": true}}', "", True),
        ('{"use_pci_p2pdma": tru', None, False),
    ],
)
def test_p2pdma_is_looked_up_where_cufile_looks(tmp_path, monkeypatch, config, variable, told):
    (tmp_path / "cufile.json").write_text(config)
    monkeypatch.setenv("CUFILE_ENV_PATH_JSON", str(tmp_path / "cufile.json"))
    monkeypatch.delenv("CUFILE_USE_PCIP2PDMA", raising=False)
    if variable is not None:
        monkeypatch.setenv("CUFILE_USE_PCIP2PDMA", variable)
    assert host_facts([str(tmp_path)]).p2pdma is told


# What errors say


def test_every_status_has_a_name_a_meaning_and_a_remedy():
    for code, (name, meaning, remedy) in CUFILE_CODES.items():
        assert name.startswith("CU_FILE_")
        assert meaning
        assert remedy
        assert explain_cufile_error(-code) == explain_cufile_error(code) == (name, meaning, remedy)
    assert explain_cufile_error(5999)[0] == "cuFile status 5999"


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("INTERNAL_ERROR (5030): internal error", 5030),
        ("cuFile error at: /src/file_handle.cpp:5013: unsupported file type", 5018),
        ("KvikIO failure at: x.cpp:88: POSIX error on pread: EOF", None),
    ],
)
def test_a_status_is_found_in_what_a_library_says(text, code):
    words = {"unsupported file type": 5018, "error": 5030}
    found = cufile_code_in(text.replace(":5013:", ":88:"), words)
    assert found == code


@pytest.mark.parametrize(
    ("text", "number"),
    [
        (
            "Unable to open file. Linux system/library function call error at: x:7: No such file or directory",
            errno.ENOENT,
        ),
        ("POSIX error on pread: Input/output error", errno.EIO),
        ("cuFile error at: x:7: Stale file handle", errno.ESTALE),
        ("no more room in the file", None),
    ],
)
def test_an_error_number_is_found_in_what_a_library_says(text, number):
    assert errno_in(text) == number


# Without a GPU


def test_a_device_that_is_no_gpu_is_refused(data):
    with pytest.raises(
        CapabilityError, match="needs an NVIDIA GPU; found a device that is 'host memory'; take io='auto'"
    ):
        GdsReader(data, HostDevice())


def test_nothing_of_kvikio_is_loaded_without_a_gpu(tmp_path):
    script = (
        "import sys\n"
        "from shardkit.errors import CapabilityError\n"
        "from shardkit.storage import device_backends, gds\n"
        "from shardkit.testing.host_device import HostDevice\n"
        "for call in (lambda: gds.GdsReader(['x'], HostDevice()), gds.gds_mode):\n"
        "    try:\n"
        "        call()\n"
        "    except CapabilityError as error:\n"
        "        print(error.what)\n"
        "print([name for name in sys.modules if name.startswith(('kvikio', 'cuda'))])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=tmp_path, check=True, timeout=60
    )
    assert done.stdout.splitlines() == [
        "GPUDirect Storage needs an NVIDIA GPU", "nothing in this process has opened cuFile yet", "[]",
    ]  # fmt: skip
    assert list(tmp_path.iterdir()) == []


def test_the_mode_is_not_guessed():
    with pytest.raises(CapabilityError, match="nothing in this process has opened cuFile"):
        gds_mode()


def test_only_what_can_make_a_context_is_taken_for_a_gpu():
    with pytest.raises(CapabilityError):
        KvikLibrary(HostDevice(), threads=None)


@pytest.mark.gpu  # likewise
def test_kvikio_takes_a_span_for_device_memory():
    arrays = pytest.importorskip("kvikio._lib.arr")
    found = arrays.asarray(Span(1 << 40, 12_345))
    assert (found.cuda, found.nbytes, found.contiguous) == (True, 12_345, True)


# Batches of cuFile, over a stand-in for its module


class FakeCuFile:
    """What `cuda.bindings.cufile` has of batches; requests end in odd orders and portions."""

    class cuFileError(Exception):
        pass

    descr_dtype = np.dtype({"names": ["type", "handle", "fs_ops"], "formats": ["<i4", np.dtype({"names": ["fd", "handle"], "formats": ["<i4", "<i8"], "offsets": [0, 0], "itemsize": 8}), "<i8"], "offsets": [0, 8, 16], "itemsize": 24})  # fmt: skip  # noqa: E501
    io_params_dtype = np.dtype({"names": ["mode", "u", "fh", "opcode", "cookie"], "formats": ["<i4", [("batch", [("dev_ptr_base", "<i8"), ("file_offset", "<i8"), ("dev_ptr_offset", "<i8"), ("size_", "<u8")])], "<i8", "<i4", "<i8"], "offsets": [0, 8, 40, 48, 56], "itemsize": 64})  # fmt: skip  # noqa: E501
    io_events_dtype = np.dtype({"names": ["cookie", "status", "ret"], "formats": ["<i8", "<i4", "<u8"], "offsets": [0, 8, 16], "itemsize": 24})  # fmt: skip  # noqa: E501

    def __init__(self):
        self.alive, self.submitted, self.cancelled, self.fail, self.bad = set(), {}, [], None, {}
        self.registered = {}

    def _take(self, dtype, count, where):
        return np.frombuffer((ctypes.c_ubyte * (dtype.itemsize * count)).from_address(where), dtype)

    def handle_register(self, descr):
        (row,) = self._take(self.descr_dtype, 1, descr)
        if row["handle"]["fd"] == 13:
            raise self.cuFileError("IO_NOT_SUPPORTED (5008): no")
        assert (row["type"], row["fs_ops"]) == (1, 0)
        self.registered[900 + int(row["handle"]["fd"])] = True
        return 900 + int(row["handle"]["fd"])

    def handle_deregister(self, handle):
        del self.registered[handle]

    def batch_io_set_up(self, count):
        self._meet("set_up")
        self.alive.add(77 + len(self.alive))
        return 76 + len(self.alive)

    def batch_io_submit(self, batch, count, params, flags):
        self._meet("submit")
        assert batch in self.alive
        assert flags == 0
        self.submitted[batch] = self._take(self.io_params_dtype, count, params).copy()

    def batch_io_get_status(self, batch, least, number, events, timeout):
        self._meet("get_status")
        rows = self.submitted[batch][::-1]
        count = min(3, len(rows), ctypes.c_uint.from_address(number).value)
        self.submitted[batch] = rows[count:][::-1]
        out = self._take(self.io_events_dtype, count, events)
        for event, row in zip(out, rows[:count], strict=True):
            batch_row = row["u"]["batch"]
            assert (row["mode"], row["opcode"]) == (1, 0)
            event["cookie"] = row["cookie"]
            event["status"], event["ret"] = self.bad.get(int(batch_row["file_offset"]), (16, batch_row["size_"]))
        ctypes.c_uint.from_address(number).value = count

    def batch_io_cancel(self, batch):
        self.cancelled.append(batch)

    def batch_io_destroy(self, batch):
        self.alive.remove(batch)

    def _meet(self, call):
        if self.fail == call:
            raise self.cuFileError("BATCH_NOCOMPAT_ERROR (5049): compat mode off error")


def some_reads(count):
    numbers = np.arange(count, dtype=np.int64)
    return BatchReads(
        handle=numbers + 900, offset=numbers * 4096, length=numbers + 1, base=numbers * 0 + 64, start=numbers
    )


def test_events_are_told_apart_whatever_their_order():
    cufile = FakeCuFile()
    batches = CuFileBatches(cufile, most=128)
    cufile.bad = {4096 * 2: (64, 0), 4096 * 5: (16, 2**64 - 5), 4096 * 7: (8, 0)}
    assert batches.read(some_reads(10)).tolist() == [1, 2, -1, 4, 5, -5, 7, -1, 9, 10]
    assert batches.read(some_reads(4)).tolist() == [1, 2, -1, 4]
    assert len(cufile.alive) == 1, "a batch is used again"
    batches.close()
    assert not cufile.alive


@pytest.mark.parametrize("call", ["set_up", "submit", "get_status"])
def test_a_batch_that_fails_leaves_nothing_under_way(call):
    cufile = FakeCuFile()
    cufile.fail = call
    batches = CuFileBatches(cufile, most=128)
    with pytest.raises(BatchRefusedError, match="CU_FILE_BATCH_NOCOMPAT_ERROR: batches are not offered"):
        batches.read(some_reads(10))
    assert not cufile.alive
    assert len(cufile.cancelled) == (call != "set_up")


def test_a_descriptor_becomes_a_handle():
    cufile = FakeCuFile()
    batches = CuFileBatches(cufile, most=0)
    assert (batches.most, batches.register(7)) == (1, 907)
    with pytest.raises(BatchRefusedError, match="CU_FILE_IO_NOT_SUPPORTED"):
        batches.register(13)
    batches.forget(907)
    assert not cufile.registered
