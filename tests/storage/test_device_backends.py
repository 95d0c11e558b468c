from __future__ import annotations

import os

import numpy as np
import pytest

from shardkit.errors import CapabilityError, ConfigError, StorageError
from shardkit.storage import backends, device_backends
from shardkit.storage.backends import FAST_ENOUGH, IO_NAMES, open_reader
from shardkit.storage.coalesce import coalesce
from shardkit.storage.device_backends import DEVICE_IO_NAMES, ENGINES_GBPS, open_device_reader
from shardkit.storage.gds import GdsReader
from shardkit.storage.gds_facts import HostFacts
from shardkit.storage.probe import Mount
from shardkit.storage.staged import StagedReader
from shardkit.testing.host_device import HostDevice
from shardkit.testing.host_gds import HostGds, driver
from shardkit.testing.reading import open_descriptors

NVME = Mount(file_system="ext4", point="/data", source="/dev/nvme0n1p1", options=("rw",))


def on_nvme(paths):
    """What is known on a machine where nothing speaks against GPUDirect Storage."""
    return HostFacts(nvidia_fs="2.24.2", p2pdma=False, missing=None, mounts=(NVME,))


@pytest.fixture
def data(tmp_path):
    path = tmp_path / "a.bin"
    path.write_bytes(os.urandom(300_001))
    return path


@pytest.fixture
def opened(monkeypatch):
    """Let GdsReader read through a stand-in whose driver says this."""

    def use(facts):
        library = HostGds(facts=facts)
        monkeypatch.setattr(
            device_backends, "GdsReader", type("Gds", (GdsReader,), {
                "__init__": lambda self, *paths, **options: GdsReader.__init__(self, *paths, **options, library=library)
            }),
        )  # fmt: skip
        return library

    return use


def read(reader, device, wanted):
    plan = coalesce(*np.asarray(wanted, np.int64).T, align=reader.align, gap_bytes=0, max_bytes=1 << 20)
    memory = device.memory(plan.buffer_bytes)
    reader.read_into(plan.ops(memory))
    return [bytes(memory[at : at + row[2]]) for at, row in zip(plan.buffer_start.tolist(), wanted, strict=True)]


def test_the_names_are_those_of_the_host_and_gds():
    assert (*IO_NAMES, "gds") == DEVICE_IO_NAMES
    assert "gds" not in IO_NAMES


@pytest.mark.parametrize("io", ["direct", "uring"])
def test_direct_reads_do_not_go_into_managed_memory(data, io):
    with pytest.raises(ConfigError, match=r"do not reach managed memory.*pinned"):
        open_device_reader(io, [data], HostDevice(), staging="managed")


@pytest.mark.parametrize(
    ("io", "staging"),
    [("buffered", "pinned"), ("direct", "pinned"), ("auto", "pinned"), ("buffered", "managed"), ("auto", "managed")],
)
def test_a_host_backend_is_staged(data, io, staging):
    device = HostDevice()
    reader, choice = open_device_reader(io, [data], device, staging=staging, ring_bytes=1 << 20)
    assert isinstance(reader, StagedReader)
    assert reader.space == "cuda:0"
    assert choice.backend == (io if io != "auto" else "buffered")
    assert read(reader, device, [(0, 4096, 50_000), (0, 299_000, 1001)]) == [
        data.read_bytes()[4096:54_096], data.read_bytes()[299_000:],
    ]  # fmt: skip
    reader.close()


def test_auto_says_why_there_is_no_gds(data):
    reader, choice = open_device_reader("auto", [data], HostDevice(), ring_bytes=1 << 20)
    assert choice.reason.startswith("0 MiB of data are too little to measure")
    assert "; no gds: the " in choice.reason
    reader.close()


def test_auto_gives_the_page_cache_up_only_for_what_the_engines_take(data, monkeypatch):
    asked, real = [], backends.choose
    monkeypatch.setattr(backends, "choose", lambda *args, **given: asked.append(given) or real(*args, **given))
    for reader, _ in (
        open_device_reader("auto", [data], HostDevice(), ring_bytes=1 << 20), open_reader("auto", [data])
    ):  # fmt: skip
        reader.close()
    assert [given["enough"] for given in asked] == [ENGINES_GBPS, FAST_ENOUGH]
    assert ENGINES_GBPS > FAST_ENOUGH


def test_auto_takes_gds_where_the_driver_has_it(data, opened):
    opened(driver(nvidia_fs=(2, 24), status=1 << 4))
    reader, choice = open_device_reader("auto", [data], HostDevice(), facts=on_nvme)
    assert isinstance(reader, GdsReader)
    assert (choice.backend, choice.reason) == ("gds", "the driver has GPUDirect Storage, and so have the file systems")
    reader.close()


@pytest.mark.parametrize(("said", "way"), [(driver(), "cuFile compat"), (None, "POSIX")])
def test_auto_does_without_gds_where_the_driver_does(data, opened, said, way):
    before = open_descriptors()
    library = opened(said)
    reader, choice = open_device_reader("auto", [data], HostDevice(), facts=on_nvme, ring_bytes=1 << 20)
    assert isinstance(reader, StagedReader)
    assert choice.reason.endswith(f"; no gds: the driver reads by way of {way}")
    assert library.open_files == 0
    reader.close()
    assert open_descriptors() == before


def test_auto_does_without_gds_where_cufile_cannot_be_had(data):
    reader, choice = open_device_reader("auto", [data], HostDevice(), facts=on_nvme, ring_bytes=1 << 20)
    assert choice.reason.endswith("; no gds: GPUDirect Storage needs an NVIDIA GPU (a device that is 'host memory')")
    reader.close()


def test_cufile_is_not_opened_where_a_fact_speaks_against_it(data, opened):
    library = opened(driver(nvidia_fs=(2, 24)))
    reader, _ = open_device_reader("auto", [data], HostDevice(), ring_bytes=1 << 20)
    assert not library.calls
    reader.close()


def test_gds_by_name_is_that_or_an_error(data, opened):
    with pytest.raises(CapabilityError, match="needs an NVIDIA GPU"):
        open_device_reader("gds", [data], HostDevice())
    opened(driver())
    device = HostDevice()
    reader, choice = open_device_reader("gds", [data], device)
    assert (choice.backend, choice.reason) == ("gds", "demanded by name; files are read by way of cuFile compat")
    assert read(reader, device, [(0, 0, 50_000)]) == [data.read_bytes()[:50_000]]
    reader.close()


def test_an_unknown_name_is_refused(data):
    with pytest.raises(ConfigError, match="auto or buffered or direct or uring or gds; found 'fast'"):
        open_device_reader("fast", [data], HostDevice())


def test_a_path_that_is_not_there_is_named(tmp_path):
    with pytest.raises(StorageError, match=r"gone\.bin"):
        open_device_reader("auto", [tmp_path / "gone.bin"], HostDevice())


def test_nothing_stays_open_when_there_is_no_memory_for_the_ring(data):
    before, device = open_descriptors(), HostDevice()
    device.fail_next("managed")
    with pytest.raises(CapabilityError, match="managed"):
        open_device_reader("buffered", [data], device, staging="managed")
    assert open_descriptors() == before
