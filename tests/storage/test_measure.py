from __future__ import annotations

import mmap
import os
from dataclasses import replace

import numpy as np
import pytest

from shardkit.errors import CapabilityError
from shardkit.storage.buffered import BufferedReader
from shardkit.storage.direct import DirectReader
from shardkit.storage.measure import SpanSource, measure
from shardkit.storage.reader import DIRECT, PAGE_CACHE
from shardkit.storage.residency import cached_bytes
from shardkit.testing.reading import open_descriptors

MIB = 1 << 20
WAYS = {"buffered": BufferedReader, "direct": DirectReader}


def sized(paths):
    return [(str(path), path.stat().st_size) for path in paths]


def drawn(source, count):
    memory = memoryview(mmap.mmap(-1, count * source.span))
    ops = source.draw(count, memory)
    return list(zip(ops.file.tolist(), ops.offset.tolist(), strict=True))


class Watched:
    """A way that keeps the readers that it has opened, and what they have read when they were closed."""

    def __init__(self, kind):
        self.kind, self.readers = kind, []

    def __call__(self, paths):
        self.readers.append(self.kind(paths))
        return self.readers[-1]

    def read(self):
        return {name: sum(reader.counters.get(name, 0) for reader in self.readers) for name in (DIRECT, PAGE_CACHE)}


@pytest.mark.parametrize("pattern", ["random", "sequential"])
def test_every_way_reads_and_all_together_stay_in_the_budget(large_files, pattern):
    ways = {name: Watched(kind) for name, kind in WAYS.items()}
    before = open_descriptors()
    rates = measure(sized(large_files), ways, pattern=pattern, seed=1, budget_bytes=20 * MIB, budget_s=10)
    assert set(rates) == set(ways)
    assert all(0.001 < rate < 1000 for rate in rates.values())
    buffered, direct = (way.read() for way in ways.values())
    assert buffered[PAGE_CACHE] > 4 * MIB
    assert direct[DIRECT] > 4 * MIB
    assert direct[PAGE_CACHE] == 0
    assert buffered[PAGE_CACHE] + direct[DIRECT] <= 20 * MIB
    assert open_descriptors() == before


def test_no_time_means_one_small_batch_each(large_files):
    ways = {name: Watched(kind) for name, kind in WAYS.items()}
    rates = measure(sized(large_files), ways, pattern="random", seed=1, budget_s=0)
    assert set(rates) == set(ways)
    assert [sum(way.read().values()) for way in ways.values()] == [8 * 98_304] * 2


def test_ways_take_turns_on_spans_of_their_own(large_files, monkeypatch):
    monkeypatch.setattr("shardkit.storage.measure._APART", float("inf"))  # two equal ways may differ by chance
    order, places = [], []

    class Noted(BufferedReader):
        def read_into(self, ops):
            order.append(self.name)
            places.extend((op.file, op.span.offset) for op in ops)
            super().read_into(ops)

    first, second = (type(name, (Noted,), {"name": name}) for name in ("first", "second"))
    measure(sized(large_files), {"first": first, "second": second}, pattern="random", seed=1, budget_s=10)
    assert order == ["first", "second", "second", "first", "first", "second"]
    assert len(set(places)) == len(places)


def test_a_way_that_cannot_be_had_or_fails_is_left_out(large_files):
    def refused(_):
        raise CapabilityError("not here")

    class Failing(BufferedReader):
        def read_into(self, ops):
            raise CapabilityError("not here, either")

    ways = {"refused": refused, "failing": Failing, "buffered": BufferedReader}
    assert set(measure(sized(large_files), ways, pattern="random", seed=1)) == {"buffered"}


def test_a_way_past_the_cache_that_ends_up_in_it_is_left_out(blocks_of_4096):
    paths = [blocks_of_4096 / name for name in "ab"]
    for path in paths:
        path.write_bytes(os.urandom(4 * MIB))

    class HalfABlockOff(DirectReader):
        """Reads at places that this device refuses."""

        def __init__(self, paths):
            super().__init__(paths, align=512)

        def read_into(self, ops):
            super().read_into(replace(ops, offset=ops.offset + 512))

    os.sync()
    for path in paths:
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    rates = measure(sized(paths), {"direct": HalfABlockOff, "buffered": BufferedReader}, pattern="random", seed=1)
    assert set(rates) == {"buffered"}


def test_nothing_is_told_of_files_that_are_too_small(tmp_path):
    (tmp_path / "a").write_bytes(b"abc")
    assert measure(sized([tmp_path / "a"]), WAYS, pattern="random", seed=1) == {}
    assert measure([], WAYS, pattern="sequential", seed=1) == {}


@pytest.mark.parametrize("pattern", ["random", "sequential"])
def test_spans_lie_inside_files_and_never_repeat(large_files, pattern):
    source = SpanSource(sized(large_files), pattern, seed=5)
    spans = [span for _ in range(4) for span in drawn(source, 15)]
    source.close()
    assert len(set(spans)) == len(spans) == 60
    for file, offset in spans:
        assert offset % source.span == 0
        assert offset + source.span <= large_files[file].stat().st_size
    assert {file for file, _ in spans} == {0, 1}


def test_the_seed_decides_the_places(large_files):
    places = []
    for seed in (5, 5, 6):
        source = SpanSource(sized(large_files), "random", seed=seed)
        places.append(drawn(source, 30))
        source.close()
    assert places[0] == places[1] != places[2]


def test_sequential_spans_follow_each_other(large_files):
    source = SpanSource(sized(large_files), "sequential", seed=5)
    line = np.array([file * 40 * MIB + offset for file, offset in drawn(source, 8)])
    source.close()
    assert ((np.diff(line) == MIB).sum()) >= 6  # one jump where the last file ends and the first begins


@pytest.mark.parametrize("kernel", ["new", "old"])
def test_what_is_cached_is_not_drawn(large_files, kernel, request):
    with large_files[0].open("rb") as file:
        if kernel == "old":
            request.getfixturevalue("without_cachestat")
        elif cached_bytes(file.fileno(), 0, 4096) is None:
            pytest.skip("this kernel does not tell what is cached (Linux 6.5)")
        while file.read(MIB):
            pass
    source = SpanSource(sized(large_files), "random", seed=5)
    spans = drawn(source, 60)
    source.close()
    assert spans
    assert {file for file, _ in spans} == {1}
