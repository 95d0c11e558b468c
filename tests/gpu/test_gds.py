from __future__ import annotations

import logging
import multiprocessing
import os
import time

import numpy as np
import pytest

from shardkit.errors import CapabilityError, ConfigError, ShortReadError, StorageError
from shardkit.extent import Extent, align_up
from shardkit.storage.coalesce import coalesce
from shardkit.storage.device_backends import open_device_reader
from shardkit.storage.gds import GdsReader, gds_mode
from shardkit.storage.gds_call import MANY
from shardkit.storage.gds_library import KvikLibrary
from shardkit.storage.reader import ReadOp, address_of
from shardkit.testing.reading import SIZES, SPAN, in_child

pytestmark = pytest.mark.gpu

MIB = 1 << 20
WAYS = {"GDS": "gds", "cuFile compat": "cufile compat", "POSIX": "page cache"}


@pytest.fixture(scope="module", autouse=True)
def kvikio_is_there():
    pytest.importorskip("kvikio")


@pytest.fixture
def files(tmp_path):
    random = np.random.default_rng(7)
    paths = [tmp_path / f"{size}.bin" for size in SIZES]
    for path, size in zip(paths, SIZES, strict=True):
        path.write_bytes(random.bytes(size))
    return paths


@pytest.fixture
def large(tmp_path):
    path = tmp_path / "large.bin"
    path.write_bytes(np.random.default_rng(8).bytes(64 * MIB + 777))
    return path


@pytest.fixture
def open_reader(device):
    readers = []

    def opened(paths, **options):
        readers.append(GdsReader(paths, device, **options))
        return readers[-1]

    yield opened
    for reader in readers:
        reader.close()


def on_host(device, memory):
    """Return a copy of device memory."""
    host = np.empty(memory.nbytes, np.uint8)
    stream = device.stream()
    stream.download(host.ctypes.data, address_of(memory), memory.nbytes)
    stream.synchronize()
    return host.tobytes()


def filled(device, nbytes, value=0xA5):
    """Return device memory of one value."""
    memory, host = device.memory(nbytes), np.full(nbytes, value, np.uint8)
    stream = device.stream()
    stream.upload(address_of(memory), host.ctypes.data, nbytes)
    stream.synchronize()
    return memory


def read(reader, device, wanted, *, gap_bytes=0, max_bytes=MIB, memory=None):
    columns = np.asarray(wanted, np.int64).reshape(-1, 3).T
    plan = coalesce(*columns, align=reader.align, gap_bytes=gap_bytes, max_bytes=max_bytes)
    memory = device.memory(plan.buffer_bytes) if memory is None else memory[: plan.buffer_bytes]
    reader.read_into(plan.ops(memory))
    found = on_host(device, memory) if memory.nbytes else b""
    return [found[at : at + row[2]] for at, row in zip(plan.buffer_start.tolist(), wanted, strict=True)]


@pytest.mark.parametrize("length", [1, 4095, 4096, 4097, 16_383, 16_384, SPAN, SPAN + 1])
def test_bytes_are_those_of_plain_reading(open_reader, device, files, length):
    reader = open_reader(files)
    wanted = [
        (file, offset, min(length, size - offset))
        for file, size in enumerate(SIZES)
        for offset in (0, 4095, 4096, 4097, size - 1, max(size - length, 0))
    ]
    truth = [path.read_bytes() for path in files]
    assert read(reader, device, wanted) == [truth[f][o : o + n] for f, o, n in wanted]
    assert reader.refused == 0


def test_long_spans_to_the_end_of_the_file(open_reader, device, large):
    reader, plain = open_reader([large]), large.read_bytes()
    wanted = [(0, 0, 20 * MIB), (0, 20 * MIB, len(plain) - 20 * MIB)]
    assert read(reader, device, wanted, max_bytes=1 << 30) == [plain[: 20 * MIB], plain[20 * MIB :]]
    assert reader.refused == 0
    assert sum(reader.counters.values()) == len(plain)


def test_only_the_destination_is_written(open_reader, device, files):
    reader, memory = open_reader(files), filled(device, 7 * 4096)
    reader.read_into(
        [
            ReadOp(3, Extent(4096, 4096), memory[4096:8192], 4096),
            ReadOp(0, Extent(0, 4096), memory[5 * 4096 : 6 * 4096], 10),
        ]
    )
    found = on_host(device, memory)
    for page in (0, 2, 3, 4, 6):
        assert found[page * 4096 : (page + 1) * 4096] == b"\xa5" * 4096
    assert found[4096:8192] == files[3].read_bytes()[4096:8192]
    assert found[5 * 4096 : 5 * 4096 + 10] == files[0].read_bytes()[:10]


def test_many_small_spans_in_any_order(open_reader, device, large, caplog):
    """One sample each: by the batches of cuFile, or by KvikIO's threads where those refuse; the log says which."""
    reader, plain = open_reader([large]), large.read_bytes()
    memory = device.memory(64 * MIB)
    reader.register(memory)
    random = np.random.default_rng(3)
    with caplog.at_level(logging.INFO):
        for _ in range(4):
            offsets = random.permutation(512)[:256] * 131_072 + random.integers(0, 5000, 256)
            wanted = [(0, int(offset), 90_000) for offset in offsets]
            assert read(reader, device, wanted, memory=memory) == [plain[o : o + n] for _, o, n in wanted]
    assert reader.refused == 0
    assert sum("batches of cuFile are not used" in record.getMessage() for record in caplog.records) <= 1


@pytest.mark.parametrize("by_batch", [True, False])
def test_both_ways_of_small_spans_give_the_same_and_their_speeds_are_told(
    open_reader, device, large, monkeypatch, record_property, by_batch
):
    monkeypatch.setattr("shardkit.storage.gds_call.MANY", MANY if by_batch else 1 << 30)
    reader, plain = open_reader([large]), large.read_bytes()
    wanted = [(0, number * 131_072, 90_000) for number in range(256)]
    memory = device.memory(64 * MIB)
    reader.register(memory)
    plan = coalesce(*np.asarray(wanted).T, align=4096, gap_bytes=0, max_bytes=1)
    rates = []
    for _ in range(6):
        began = time.perf_counter()
        reader.read_into(plan.ops(memory))
        rates.append(plan.buffer_bytes / (time.perf_counter() - began) / 1e9)
    batches = reader._shared.batches is not None
    told = f"{'batches' if by_batch and batches else 'futures'}: {sorted(rates)[3]:.2f} GB/s by {reader.mode}"
    record_property("rate", told)
    logging.getLogger(__name__).warning(told)
    found = on_host(device, memory)
    for at, (_, offset, length) in zip(plan.buffer_start.tolist(), wanted, strict=True):
        assert found[at : at + length] == plain[offset : offset + length]


def test_memory_that_is_registered_is_read_into_again_and_again(open_reader, device, large):
    reader, plain = open_reader([large]), large.read_bytes()
    memory = device.memory(8 * MIB)
    reader.register(memory)
    reader.register(memory)
    assert reader.registered in {0, 8 * MIB}
    for step in range(6):
        start = step * 4 * MIB
        assert read(reader, device, [(0, start, 4 * MIB)], memory=memory[step * 4096 :]) == [
            plain[start : start + 4 * MIB]
        ]
    reader.close()
    assert reader.registered == 0


def test_a_truncated_file_shows_both_sizes(open_reader, device, files):
    reader, truth = open_reader(files), files[1].read_bytes()
    assert read(reader, device, [(1, SPAN, SPAN)]) == [truth[SPAN : 2 * SPAN]]
    os.truncate(files[1], SPAN + 5)
    with pytest.raises(ShortReadError, match=f"found 5 bytes; the file has {SPAN + 5}, it had {SIZES[1]}") as caught:
        read(reader, device, [(1, SPAN, SPAN)])
    assert (caught.value.path, caught.value.offset) == (str(files[1]), SPAN)
    assert read(reader, device, [(0, 0, 9)]) == [files[0].read_bytes()[:9]]


def test_a_removed_file_is_read_on_and_one_that_was_never_there_is_named(open_reader, device, files, tmp_path):
    reader, truth = open_reader([*files, tmp_path / "gone.bin"]), files[2].read_bytes()
    assert read(reader, device, [(2, 0, 9)]) == [truth[:9]]
    files[2].unlink()
    assert read(reader, device, [(2, SPAN, SPAN)]) == [truth[SPAN : 2 * SPAN]]
    with pytest.raises(StorageError, match=r"gone\.bin"):
        read(reader, device, [(len(files), 0, 9)])


def test_a_reader_of_few_open_files_reads_them_all(open_reader, device, files):
    reader = open_reader(files, max_open=2)
    for _ in range(3):
        wanted = [(file, 4096, 20_000) for file in range(len(files))]
        assert read(reader, device, wanted) == [path.read_bytes()[4096:24_096] for path in files]
    assert reader.refused == 0


def test_counters_tell_the_mode_that_the_driver_tells(open_reader, device, large):
    reader = open_reader([large])
    read(reader, device, [(0, 0, 8 * MIB)])
    assert reader.mode == gds_mode()
    way = WAYS[reader.mode]
    assert reader.counters[way] + reader.counters["direct"] + reader.counters["cufile compat"] >= 8 * MIB
    assert sum(reader.counters.values()) == 8 * MIB


def test_a_file_system_in_memory_is_served_too(open_reader, device):
    path = f"/dev/shm/shardkit-test-{os.getpid()}"
    data = os.urandom(300_001)
    try:
        with open(path, "wb") as file:
            file.write(data)
        reader = open_reader([path])
        assert read(reader, device, [(0, 0, 300_001), (0, 5, 100)]) == [data, data[5:105]]
    finally:
        os.unlink(path)


def test_managed_memory_can_be_read_into(open_reader, device, files):
    reader, memory = open_reader(files), device.managed(align_up(SPAN, 4096))
    reader.read_into([ReadOp(0, Extent(0, SPAN), memory[:SPAN], SPAN)])
    assert on_host(device, memory[:SPAN]) == files[0].read_bytes()[:SPAN]


def test_a_fork_is_refused_and_does_no_harm(open_reader, device, files):
    reader = open_reader(files)
    assert read(reader, device, [(0, 0, 9)]) == [files[0].read_bytes()[:9]]

    def law():
        with pytest.raises(CapabilityError, match="does not survive a fork"):
            reader.read_into([])
        with pytest.raises(CapabilityError):
            KvikLibrary(device, threads=None)
        reader.close()
        return True

    assert in_child(law)
    child = multiprocessing.get_context("fork").Process(target=os.getpid)  # ends as interpreters end
    child.start()
    child.join(30)
    assert child.exitcode == 0
    assert read(reader, device, [(0, 0, SPAN)]) == [files[0].read_bytes()[:SPAN]]


def test_a_closed_reader_is_refused_and_another_works(open_reader, device, files):
    reader = open_reader(files)
    reader.close()
    reader.close()
    with pytest.raises(ConfigError, match="closed"):
        reader.read_into([])
    assert read(open_reader(files), device, [(0, 0, 9)]) == [files[0].read_bytes()[:9]]


def test_no_log_of_cufile_lies_in_the_working_directory(open_reader, device, files):
    read(open_reader(files), device, [(0, 0, SPAN)])
    assert not os.path.exists("cufile.log")
    assert os.environ["CUFILE_LOGFILE_PATH"]


def test_gds_by_name_and_auto(device, large):
    plain = large.read_bytes()
    for io in ("gds", "auto", "buffered"):
        reader, choice = open_device_reader(io, [large], device, ring_bytes=16 * MIB)
        assert choice.backend != "auto"
        assert (choice.backend == "gds") == (io == "gds" or (io == "auto" and gds_mode() == "GDS"))
        assert read(reader, device, [(0, 4096, 5 * MIB), (0, 60 * MIB, MIB)]) == [
            plain[4096 : 4096 + 5 * MIB], plain[60 * MIB : 61 * MIB],
        ]  # fmt: skip
        reader.close()
