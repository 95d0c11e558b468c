from __future__ import annotations

import pytest

from shardkit.errors import CapabilityError, ConfigError, StorageError
from shardkit.storage.backends import IO_NAMES, Choice, choose, open_reader
from shardkit.storage.buffered import BufferedReader
from shardkit.storage.direct import DirectReader
from shardkit.storage.probe import Mount, PathFacts
from shardkit.testing.reading import read_extents

GIB = 1 << 30


def facts(file_system: str = "ext4", align: int | None = 512, refusal: str | None = None) -> PathFacts:
    mount = Mount(file_system=file_system, point="/data", source="/dev/sda")
    return PathFacts(path="/data/a", mount=mount, direct_align=align, direct_refusal=refusal)


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "a.bin"
    path.write_bytes(b"abcdef")
    return path


@pytest.mark.parametrize(
    ("total", "available", "backend"),
    [(0, GIB, "buffered"), (GIB // 2 - 1, GIB, "buffered"), (GIB // 2, GIB, "direct"), (9 * GIB, GIB, "direct")],
)
def test_auto_takes_the_page_cache_below_half_of_the_memory(total, available, backend):
    choice = choose([facts()], total_bytes=total, available_bytes=available)
    assert choice.backend == backend
    assert f"{total >> 20} MiB of data" in choice.reason
    assert "1024 MiB of available memory" in choice.reason


@pytest.mark.parametrize(
    ("fact", "reason"),
    [
        (facts("tmpfs", align=None), "tmpfs lies in memory already"),
        (facts("ramfs", align=None, refusal="EINVAL"), "ramfs lies in memory already"),
        (facts("squashfs", align=None, refusal="EINVAL (Invalid argument)"), "squashfs refuses direct reads: EINVAL"),
        (facts("ecryptfs", align=0), "ecryptfs has no direct reads"),
    ],
)
def test_auto_never_takes_direct_reads_where_one_file_has_none(fact, reason):
    choice = choose([facts(), fact], total_bytes=100 * GIB, available_bytes=GIB)
    assert choice.backend == "buffered"
    assert choice.reason.startswith(reason)


def test_auto_stays_with_the_page_cache_when_memory_is_unknown():
    choice = choose([facts()], total_bytes=5 << 20, available_bytes=None)
    assert choice == Choice("buffered", "5 MiB of data; how much memory is available is not known")


@pytest.mark.parametrize(("io", "kind"), [("buffered", BufferedReader), ("direct", DirectReader)])
def test_a_name_gives_that_backend(path, io, kind):
    reader, choice = open_reader(io, [path])
    assert isinstance(reader, kind)
    assert choice == Choice(io, "demanded by name")
    assert read_extents(reader, [(0, 2, 3)]) == [b"cde"]
    reader.close()


def test_auto_gives_what_it_says(path):
    reader, choice = open_reader("auto", [path, path])
    assert isinstance(reader, {"buffered": BufferedReader, "direct": DirectReader}[choice.backend])
    assert choice.reason
    assert read_extents(reader, [(1, 2, 3)]) == [b"cde"]
    reader.close()


def test_what_is_demanded_and_cannot_be_had_is_an_error_and_no_other_way(ramfs):
    (ramfs / "a").write_bytes(b"abc")
    with pytest.raises(CapabilityError, match="ramfs") as caught:
        open_reader("direct", [ramfs / "a"])
    assert caught.value.exit_code == 7
    reader, choice = open_reader("auto", [ramfs / "a"])
    assert choice == Choice("buffered", "ramfs lies in memory already")
    reader.close()


@pytest.mark.parametrize("io", ["", "Direct", "mmap", "cuda"])
def test_an_unknown_name_is_refused_with_the_known_ones(path, io):
    with pytest.raises(ConfigError, match=rf"expected {' or '.join(IO_NAMES)}; found {io!r}") as caught:
        open_reader(io, [path])
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("io", ["auto", "direct"])
def test_a_missing_file_is_named(path, io):
    with pytest.raises(StorageError, match=r"gone\.bin"):
        open_reader(io, [path.parent / "gone.bin", path])


def test_threads_and_descriptors_are_passed_on(path):
    for io in ("buffered", "direct"):
        with pytest.raises(ConfigError, match="thread"):
            open_reader(io, [path], threads=0)
        with pytest.raises(ConfigError, match="descriptor"):
            open_reader(io, [path], max_open=0)


@pytest.mark.parametrize("io", IO_NAMES)
def test_no_files_at_all_can_be_opened(io):
    reader, _ = open_reader(io, [])
    reader.read_into([])
    reader.close()
