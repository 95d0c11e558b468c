from __future__ import annotations

import contextlib

import pytest

from shardkit.errors import CapabilityError, ConfigError, StorageError
from shardkit.storage.backends import IO_NAMES, LITTLE_BYTES, Choice, SystemFacts, choose, open_reader
from shardkit.storage.buffered import BufferedReader
from shardkit.storage.direct import DirectReader
from shardkit.storage.probe import Mount, PathFacts, mount_of
from shardkit.storage.uring import UringReader, uring_refusal
from shardkit.testing.faulty_files import faulty_files
from shardkit.testing.mounts import NoMountsError
from shardkit.testing.reading import read_extents

GIB = 1 << 30


def facts(file_system: str = "ext4", align: int | None = 512, refusal: str | None = None) -> PathFacts:
    mount = Mount(file_system=file_system, point="/data", source="/dev/sda")
    return PathFacts(path="/data/a", mount=mount, direct_align=align, direct_refusal=refusal)


def system(*found: PathFacts, total=GIB, cached=0.0, **measured: float) -> SystemFacts:
    return SystemFacts(files=found or (facts(),), total_bytes=total, cached_share=cached, measured=measured)


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "a.bin"
    path.write_bytes(b"abcdef")
    return path


@pytest.mark.parametrize(
    ("fact", "reason"),
    [
        (facts("tmpfs", align=None), "tmpfs lies in memory already"),
        (facts("ramfs", align=None, refusal="EINVAL"), "ramfs lies in memory already"),
        (facts("squashfs", align=None, refusal="EINVAL (Invalid argument)"), "squashfs refuses direct reads: EINVAL"),
        (facts("ecryptfs", align=0), "ecryptfs has no direct reads"),
    ],
)
def test_auto_never_passes_the_page_cache_by_where_one_file_has_no_direct_reads(fact, reason):
    fast = {"buffered": 1.0, "direct": 9.0, "uring": 9.0}
    for systems in (
        [system(facts(), fact, total=100 * GIB, **fast)],
        [system(total=100 * GIB, **fast), system(fact, total=1, **fast)],
    ):
        choice = choose(systems, available_bytes=GIB)
        assert choice.backend == "buffered"
        assert choice.reason.startswith(reason)
        assert choice.measured == {}


@pytest.mark.parametrize(
    ("shares", "cached"),
    [([0.75], "75%"), ([1.0], "100%"), ([1.0, 0.6], "80%"), ([0.74], None), ([1.0, 0.4], None), ([None], None)],
)
def test_auto_takes_the_page_cache_where_three_quarters_of_the_bytes_lie_in_it(shares, cached):
    choice = choose([system(cached=share, total=100 * GIB) for share in shares], available_bytes=GIB)
    if cached is None:
        assert choice is None  # to be measured
    else:
        assert choice.backend == "buffered"
        assert choice.reason == f"{cached} of {len(shares) * 102400} MiB of data are in the page cache already"


@pytest.mark.parametrize(
    ("total", "available", "measured"),
    [
        (0, GIB, False),
        (0, 0, True),
        (LITTLE_BYTES - 1, GIB, False),
        (LITTLE_BYTES - 1, None, False),
        (LITTLE_BYTES, GIB, True),
        (LITTLE_BYTES - 1, 2 * LITTLE_BYTES - 4, True),  # little, but more than memory can keep
    ],
)
def test_what_is_less_than_a_measurement_reads_is_not_measured(total, available, measured):
    choice = choose([system(total=total)], available_bytes=available)
    assert (choice is None) is measured
    if not measured:
        assert (choice.backend, choice.measured) == ("buffered", {})


@pytest.mark.parametrize(
    ("buffered", "direct", "uring", "fits", "backend"),
    [
        # The page cache keeps the data: it stays until another way is faster, and fast enough in every epoch.
        (1.0, 1.0, 1.0, True, "buffered"),
        (1.0, 1.19, 1.0, True, "buffered"),
        (1.0, 1.2, 1.0, True, "direct"),
        (0.3, 0.79, 0.5, True, "buffered"),
        (0.3, 0.8, 0.5, True, "direct"),
        (1.0, 1.0, 2.5, True, "uring"),
        (1.0, 2.5, 2.25, True, "uring"),
        (1.0, 2.5, 2.24, True, "direct"),
        (3.0, 1.0, 1.0, True, "buffered"),
        # It cannot keep them: the fastest, and of equally fast ones that with the least work for the processor.
        (1.0, 1.0, 1.0, False, "uring"),
        (1.0, 0.95, 0.905, False, "uring"),
        (1.0, 0.95, 0.89, False, "direct"),
        (1.0, 0.89, 0.5, False, "buffered"),
        (0.5, 1.0, 0.7, False, "direct"),
        (0.5, 0.6, 1.0, False, "uring"),
    ],
)
def test_the_measured_speeds_decide(buffered, direct, uring, fits, backend):
    speeds = {"buffered": buffered, "direct": direct, "uring": uring}
    choice = choose([system(total=GIB, **speeds)], available_bytes=2 * GIB + (4 if fits else 0))
    assert choice.backend == backend
    assert choice.measured == pytest.approx(speeds)


@pytest.mark.parametrize(("enough", "backend"), [(0.8, "direct"), (1.5, "direct"), (1.6, "buffered")])
def test_the_cache_is_given_up_only_for_as_much_as_the_consumer_takes(enough, backend):
    """A GPU's engines wait in every epoch for a disk that is only faster than filling the cache once."""
    systems = [system(buffered=1.2, direct=1.5)]
    choice = choose(systems, available_bytes=10 * GIB, enough=enough)
    assert choice.backend == backend
    assert choose(systems, available_bytes=None, enough=enough).backend == "direct", "there is no cache to give up"


def test_memory_that_is_not_known_keeps_nothing():
    choice = choose([system(buffered=1.0, direct=1.2)], available_bytes=None)
    assert choice.backend == "direct"
    assert "an unknown amount of available memory" in choice.reason


def test_a_way_that_one_file_system_lacks_is_not_taken():
    systems = [system(buffered=1.0, direct=1.5, uring=9.0), system(buffered=1.0, direct=1.5)]
    choice = choose(systems, available_bytes=GIB)
    assert choice.backend == "direct"
    assert set(choice.measured) == {"buffered", "direct"}


def test_speeds_of_several_file_systems_are_weighed_by_bytes():
    slow, fast = system(total=3 * GIB, buffered=1.0, direct=0.5), system(total=GIB, buffered=1.0, direct=8.0)
    choice = choose([slow, fast], available_bytes=GIB)
    assert choice.backend == "buffered"
    assert choice.measured == pytest.approx({"buffered": 1.0, "direct": 4 / (3 / 0.5 + 1 / 8)})


def test_the_reason_tells_the_facts_of_every_file_system():
    other = PathFacts(
        path="/net/a",
        mount=Mount(file_system="nfs4", point="/net", source="x:/"),
        direct_align=None,
        direct_refusal=None,
    )
    systems = [system(cached=0.11, buffered=1.0, direct=1.5), system(other, cached=None, buffered=0.25, direct=0.5)]
    reason = choose(systems, available_bytes=10 * GIB, uring="it is off").reason
    assert reason.startswith("2048 MiB of data are less than half of 10240 MiB of available memory")
    assert "ext4 at /data: 11% cached, buffered 1.00, direct 1.50 GB/s" in reason
    assert "nfs4 at /net: buffered 0.25, direct 0.50 GB/s" in reason
    assert reason.endswith("no uring: it is off")


def kinds():
    known = {"buffered": BufferedReader, "direct": DirectReader, "uring": UringReader}
    assert set(known) == set(IO_NAMES) - {"auto"}
    refusal = uring_refusal()
    skip = pytest.mark.skipif(refusal is not None, reason=f"io_uring: {refusal}")
    return [pytest.param(io, kind, marks=[skip] if io == "uring" else []) for io, kind in known.items()]


@pytest.mark.parametrize(("io", "kind"), kinds())
def test_a_name_gives_that_backend(path, io, kind):
    reader, choice = open_reader(io, [path])
    assert isinstance(reader, kind)
    assert choice == Choice(io, "demanded by name")
    assert read_extents(reader, [(0, 2, 3)]) == [b"cde"]
    reader.close()


def test_auto_gives_what_it_says(path):
    reader, choice = open_reader("auto", [path, path])
    assert isinstance(reader, BufferedReader)
    assert choice == Choice("buffered", "0 MiB of data are too little to measure, and stay in the page cache")
    assert read_extents(reader, [(1, 2, 3)]) == [b"cde"]
    reader.close()


def test_what_is_demanded_and_cannot_be_had_is_an_error_and_no_other_way(ramfs):
    (ramfs / "a").write_bytes(b"abc")
    for io in ("direct", "uring"):
        with pytest.raises(CapabilityError, match=r"ramfs|io_uring") as caught:
            open_reader(io, [ramfs / "a"])
        assert caught.value.exit_code == 7
    reader, choice = open_reader("auto", [ramfs / "a"])
    assert choice == Choice("buffered", "ramfs lies in memory already")
    reader.close()


def test_a_packed_image_is_read_through_the_page_cache(squashfs):
    data = (squashfs / "a").read_bytes()
    with pytest.raises(CapabilityError, match="squashfs: EINVAL"):
        open_reader("direct", [squashfs / "a"])
    reader, choice = open_reader("auto", [squashfs / "a"])
    assert choice == Choice("buffered", "squashfs refuses direct reads: EINVAL (Invalid argument) at open")
    assert read_extents(reader, [(0, 5000, 70_000)]) == [data[5000:75_000]]
    reader.close()


@pytest.mark.parametrize("pattern", ["random", "sequential"])
def test_auto_measures_files_that_are_not_cached_and_opens_what_it_says(large_files, pattern):
    reader, choice = open_reader("auto", large_files, pattern=pattern)
    assert type(reader).__name__.lower() == f"{choice.backend}reader"
    assert set(choice.measured) == {"buffered", "direct"} | ({"uring"} if uring_refusal() is None else set())
    assert all(0.001 < rate < 1000 for rate in choice.measured.values())
    assert f" at {mount_of(large_files[0]).point}: 0% cached, " in choice.reason
    with large_files[1].open("rb") as file:
        file.seek(999)
        assert read_extents(reader, [(1, 999, 5000)]) == [file.read(5000)]
    reader.close()


def test_auto_does_not_measure_what_is_cached(large_files):
    for path in large_files:
        path.read_bytes()
    reader, choice = open_reader("auto", large_files)
    assert choice == Choice("buffered", "100% of 80 MiB of data are in the page cache already")
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


def test_an_unknown_pattern_is_refused(path):
    with pytest.raises(ConfigError, match="expected random or sequential; found 'zigzag'"):
        open_reader("auto", [path], pattern="zigzag")


def test_auto_knows_what_is_cached_where_the_kernel_does_not_count(large_files, without_cachestat):
    large_files[0].read_bytes()
    reader, choice = open_reader("auto", large_files)
    assert choice.measured
    reader.close()
    for path in large_files:
        path.read_bytes()
    reader, choice = open_reader("auto", large_files)
    assert choice.measured == {}
    assert choice.reason.endswith("of 80 MiB of data are in the page cache already")
    reader.close()


def test_threads_and_descriptors_are_passed_on(path):
    for io in ("buffered", "direct"):
        with pytest.raises(ConfigError, match="thread"):
            open_reader(io, [path], threads=0)
        with pytest.raises(ConfigError, match="descriptor"):
            open_reader(io, [path], max_open=0)


@pytest.mark.parametrize(("io", "_"), [("auto", None), *kinds()])
def test_no_files_at_all_can_be_opened(io, _):
    reader, _ = open_reader(io, [])
    reader.read_into([])
    reader.close()


def test_auto_takes_no_uring_where_its_reads_are_wrong(tmp_path):
    with contextlib.ExitStack() as stack:
        try:
            files = stack.enter_context(faulty_files(tmp_path / "fuse"))
        except NoMountsError as error:
            pytest.skip(str(error))
        path = files.backing / "large"
        with path.open("wb") as file:
            file.truncate(2 * LITTLE_BYTES)
        reader, choice = open_reader("auto", [files.path / path.name])
        reader.close()
        assert choice.backend != "uring"
        assert "uring" not in choice.measured
        assert "no uring: not on fuse" in choice.reason
