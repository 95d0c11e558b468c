"""Shards that stay in device memory: which they are; each byte is read once, whoever asks, and never overwritten."""

from __future__ import annotations

import ctypes
import itertools
import os
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardkit.dataset.reading import SampleReader
from shardkit.dataset.resident import ResidentShards, choose_places
from shardkit.dataset.runs import gaps, ranges, runs
from shardkit.dataset.samples import Part, Samples
from shardkit.dataset.shardset import open_dataset
from shardkit.errors import ConfigError, IntegrityError, ShortReadError, StorageError
from shardkit.storage.backends import open_reader
from shardkit.storage.staged import StagedReader
from shardkit.testing.damage import flip_byte
from shardkit.testing.datasets import draft_dataset
from shardkit.testing.host_device import HostDevice

COUNTS = (25, 40, 15)
TOTAL = sum(COUNTS)
SIZES = (700, 5000, 401, 40_000, 1300)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return draft_dataset(COUNTS, sizes=SIZES).write(tmp_path_factory.mktemp("resident") / "ds")


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    """Images that share blocks with their neighbours."""
    return draft_dataset(COUNTS, sizes=SIZES, align=512).write(tmp_path_factory.mktemp("dense") / "ds")


class Watching(StagedReader):
    """A reader that keeps what it was asked for, and can be told to fail."""

    def watch(self):
        self.written, self.fail_from, self.calls, self.turn = [], None, itertools.count(), threading.Lock()
        self.sizes = [os.stat(path).st_size for path in self._paths]
        return self

    def read_into(self, ops, /):
        ops = list(ops)
        for op in ops:
            size = self.sizes[op.file]
            assert op.span.offset + op.span.length - size < self.align
            assert op.need == min(op.span.length, size - op.span.offset)
        with self.turn:
            failing = self.fail_from is not None and next(self.calls) >= self.fail_from
            if not failing:
                self.written += [(op.dst.obj, *span_of(op)) for op in ops if op.span.length]
        if failing:
            for op in ops:  # as a read that broke off: what was there is gone
                ctypes.memset(span_of(op)[0], 0xEE, op.span.length)
            raise StorageError("the server went away", path="/nowhere", offset=0)
        super().read_into(ops)


def span_of(op):
    at = np.frombuffer(op.dst, np.uint8).ctypes.data
    return at, at + op.span.length


@pytest.fixture
def keep():
    """A function that opens a data set of which `budget_bytes` stay: reader of samples, what stays, storage, truth."""
    made = []

    def make(folder, *, budget_bytes=1 << 30, io="buffered", **read):
        device, dataset = HostDevice(lazy=True), open_dataset(folder)
        samples = Samples([Part(dataset)])
        storage = Watching(
            open_reader(io, dataset.shard_paths)[0], device, ring_bytes=1 << 20, paths=dataset.shard_paths
        ).watch()
        kept = ResidentShards(
            samples, budget_bytes=budget_bytes, align=storage.align, allocate=device.memory
        )  # fmt: skip
        made.append((storage, dataset))
        return SampleReader(samples, storage, device=device, resident=kept, **read), kept, storage, dataset

    yield make
    for storage, dataset in made:
        storage.close()
        dataset.close()


def found(payloads):
    return [
        ctypes.string_at(at, view.size) for at, view in zip(payloads.addresses.tolist(), payloads.views, strict=True)
    ]


# --- which shards ----------------------------------------------------------------------------------------------------


@given(
    sizes=st.lists(st.integers(1, 50_000), min_size=1, max_size=20), budget=st.integers(0, 300_000),
    unit=st.sampled_from([4096, 65536]), data=st.data(),
)  # fmt: skip
def test_places_lie_apart_within_the_budget_and_nothing_that_fits_is_left_out(sizes, budget, unit, data):
    wanted = np.array(data.draw(st.lists(st.booleans(), min_size=len(sizes), max_size=len(sizes))), np.bool_)
    places, nbytes = choose_places(np.array(sizes), wanted, budget_bytes=budget, unit=unit)
    assert nbytes <= budget
    taken = sorted((place, place + size) for place, size in zip(places.tolist(), sizes, strict=True) if place >= 0)
    assert all(end <= after for (_, end), (after, _) in itertools.pairwise(taken))
    assert all(place % unit == 0 and end <= nbytes for place, end in taken)
    assert not (places[~wanted] >= 0).any()
    left = [size for size, place, used in zip(sizes, places, wanted, strict=True) if used and place < 0]
    assert all(-(-size // unit) * unit > budget - nbytes for size in left)


def test_a_shard_that_fits_behind_one_that_does_not_is_kept():
    assert choose_places(np.array([10, 90, 20]), np.ones(3, bool), budget_bytes=64, unit=16)[0].tolist() == [0, -1, 16]


# --- every byte once, at the right place -----------------------------------------------------------------------------


@pytest.mark.parametrize("io", ["buffered", "direct"])
@pytest.mark.parametrize("kind", ["folder", "dense"])
@pytest.mark.parametrize("metadata", [False, True])
def test_any_samples_in_any_order_are_right_and_no_byte_is_written_twice(request, keep, kind, io, metadata):
    reader, kept, storage, dataset = keep(request.getfixturevalue(kind), io=io, metadata=metadata)
    truth, rng = list(dataset), np.random.default_rng(1)
    for _ in range(40):
        ids = rng.integers(0, TOTAL, rng.integers(0, 9))
        _, payloads = reader.read_alone(ids)
        assert found(payloads) == [truth[number].jpeg for number in ids]
        assert payloads.metadata == ([truth[number].metadata for number in ids] if metadata else None)
    spans = sorted(span for _, *span in storage.written)
    assert all(end <= after for (_, end), (after, _) in itertools.pairwise(spans))
    assert sum(storage.counters.values()) == kept.counts["read bytes"] <= sum(kept._sizes)


@pytest.mark.parametrize("io", ["buffered", "direct"])
def test_a_shard_may_end_within_a_block(keep, tmp_path, io):
    drafts = (draft_dataset((2,), sizes=(size,), align=512) for size in range(500, 9000, 512))
    draft = next(one for one in drafts if len(one.shards[0].tar) % 4096 and end_of(one) > len(one.shards[0].tar) - 1600)
    reader, _, storage, dataset = keep(draft.write(tmp_path / "ds"), io=io)
    assert found(reader.read_alone(np.array([1]))[1]) == [dataset[1].jpeg]
    assert storage.written  # where the end lies, `Watching` has looked


def end_of(draft):
    return draft.shards[0].rows[-1].offset + draft.shards[0].rows[-1].size


@pytest.mark.parametrize("which", [0, 1, 2])
def test_samples_that_stay_and_others_come_together(keep, folder, which):
    sizes = [path.stat().st_size for path in sorted(folder.glob("*.tar"))]
    reader, kept, storage, dataset = keep(folder, budget_bytes=-(-sizes[which] // 4096) * 4096, metadata=True)
    ids = np.random.default_rng(2).permutation(TOTAL)
    for _ in range(2):
        reads, payloads = reader.read_alone(ids)
        assert found(payloads) == [dataset[number].jpeg for number in ids]
        assert payloads.metadata == [dataset[number].metadata for number in ids]
    assert 0 < kept.counts["hits"] == kept.counts["misses"] == reads.kept.sum() < TOTAL
    assert reads.nbytes < sum(storage.counters.values())


def test_neighbours_come_in_long_reads_that_have_a_limit(keep, tmp_path):
    reader, _, storage, _ = keep(draft_dataset((60,), sizes=(90_000,)).write(tmp_path / "ds"))
    reader.read_alone(np.arange(60))
    lengths = [end - start for _, start, end in storage.written]
    assert len(lengths) == -(-sum(lengths) // storage.span_bytes)
    assert max(lengths) <= storage.span_bytes
    assert max(lengths) - min(lengths) <= 4096  # a block


def test_a_view_keeps_its_bytes_when_all_else_is_gone(keep, folder):
    reader, kept, _, dataset = keep(folder)
    _, payloads = reader.read_alone(np.array([7]))
    kept.close()
    kept.close()
    assert found(payloads) == [dataset[7].jpeg]
    with pytest.raises(ConfigError, match="given back"):
        reader.read_alone(np.array([7]))


# --- several threads, and failures -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["folder", "dense"])
def test_threads_that_want_the_same_read_it_once(request, keep, kind):
    reader, kept, storage, dataset = keep(request.getfixturevalue(kind), crc=True)
    truth = [sample.jpeg for sample in dataset]

    def one(seed):
        rng = np.random.default_rng(seed // 2)  # two of them always ask for the same
        for _ in range(15):
            ids = rng.integers(0, TOTAL, 12)
            _, payloads = reader.read_alone(ids)
            assert payloads.bad == {}
            assert found(payloads) == [truth[number] for number in ids]

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(one, range(8)))
    spans = sorted(span for _, *span in storage.written)
    assert all(end <= after for (_, end), (after, _) in itertools.pairwise(spans))
    assert sum(storage.counters.values()) == kept.counts["read bytes"]


@pytest.mark.parametrize("after", [0, 3, 8])
def test_a_failed_read_leaves_absent_what_it_was_to_bring_and_whole_what_was_there(keep, dense, after):
    reader, _, storage, dataset = keep(dense)
    truth, there = [sample.jpeg for sample in dataset], {}
    storage.fail_from = 2 * after
    for number in np.random.default_rng(5).permutation(TOTAL).tolist():
        try:
            _, payloads = reader.read_alone(np.array([number]))
        except StorageError:
            continue
        there[number] = payloads
    assert all(found(payloads) == [truth[number]] for number, payloads in there.items())
    assert len(there) < TOTAL
    storage.fail_from = None
    for number in range(TOTAL):
        assert found(reader.read_alone(np.array([number]))[1]) == [truth[number]]


def test_who_waited_for_a_read_that_failed_makes_it_itself(keep, folder):
    reader, kept, storage, dataset = keep(folder)
    inside, go = threading.Event(), threading.Event()
    read_into = storage.read_into

    def slow(ops):
        if len(ops) and not inside.is_set():
            inside.set()
            go.wait(10)
            raise StorageError("the server went away")
        read_into(ops)

    storage.read_into = slow
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(reader.read_alone, np.array([3]))
        assert inside.wait(10)
        second = threads.submit(reader.read_alone, np.array([3]))
        while not kept._changed._waiters:
            assert not second.done()
        go.set()
        with pytest.raises(StorageError, match="went away"):
            first.result(10)
        assert found(second.result(10)[1]) == [dataset[3].jpeg]
    assert kept.counts["misses"] == 1


def test_a_shard_that_got_shorter_is_told_with_the_sample(keep, tmp_path):
    folder = draft_dataset((3, 3), sizes=(5000,)).write(tmp_path / "ds")
    reader, _, _, dataset = keep(folder)
    offset = dataset.columns["offset"][4]
    with open(folder / "tiny-000001.tar", "r+b") as file:
        file.truncate(offset + 100)
    with pytest.raises(ShortReadError) as caught:
        reader.read_alone(np.array([4, 0]))
    assert (caught.value.key, caught.value.offset) == ("c/0004", offset)
    assert found(reader.read_alone(np.array([0]))[1]) == [dataset[0].jpeg]


def test_an_image_that_is_wrong_in_the_file_is_told_each_time(keep, tmp_path):
    folder = draft_dataset((3, 3), sizes=(5000,)).write(tmp_path / "ds")
    with open_dataset(folder) as dataset:
        flip_byte(folder / "tiny-000001.tar", dataset.columns["offset"][4] + 2000)
    reader, *_ = keep(folder, crc=True)
    for _ in range(3):
        bad = reader.read_alone(np.array([0, 4, 5]))[1].bad
        assert list(bad) == [1]
        assert "CRC-32C" in bad[1]


def test_json_outside_of_its_shard_is_damage_and_never_another_shards_bytes(keep, tmp_path):
    draft = draft_dataset((3, 3))
    draft.shards[0].rows[1] = draft.shards[0].rows[1]._replace(json_offset=len(draft.shards[0].tar) - 3)
    reader, *_ = keep(draft.write(tmp_path / "ds"), metadata=True)
    with pytest.raises(IntegrityError, match=r"outside its shard.*tiny-000000\.tar.*\[sample c/0001\]"):
        reader.read_alone(np.arange(3))
    assert len(reader.read_alone(np.array([0, 2]))[1].views) == 2


# --- arithmetic ------------------------------------------------------------------------------------------------------

BLOCKS = (st.sets(st.integers(0, 60)) | st.sets(st.integers(0, 60), max_size=9).map(set(range(61)).__sub__)).map(sorted)


@given(rows=st.lists(st.tuples(st.integers(0, 99), st.integers(0, 9))))
def test_ranges_are_those_of_python(rows):
    first, count = (np.array([row[side] for row in rows], np.int64) for side in (0, 1))
    assert ranges(first, count).tolist() == [number for at, many in rows for number in range(at, at + many)]


@given(blocks=BLOCKS, most=st.integers(1, 8), border=st.integers(0, 60))
def test_gaps_are_what_lies_between_near_neighbours_of_one_shard(blocks, most, border):
    column = np.array(blocks, np.int64)
    between, owner = gaps(column, (column >= border).astype(np.int64), most)
    wanted = [
        (number, at) for at, (left, right) in enumerate(itertools.pairwise(blocks))
        if right - left - 1 <= most and (left >= border) == (right >= border) for number in range(left + 1, right)
    ]  # fmt: skip
    assert list(zip(between.tolist(), owner.tolist(), strict=True)) == wanted


@given(blocks=BLOCKS, most=st.integers(1, 8), border=st.integers(0, 60))
def test_runs_hold_every_block_once_are_as_few_as_may_be_and_none_is_a_short_rest(blocks, most, border):
    column = np.array(blocks, np.int64)
    first, count = runs(column, (column >= border).astype(np.int64), most)
    parts = [blocks[at : at + many] for at, many in zip(first.tolist(), count.tolist(), strict=True)]
    assert [number for part in parts for number in part] == blocks
    assert all(part == list(range(part[0], part[0] + len(part))) and len(part) <= most for part in parts)
    assert all((part[0] >= border) == (part[-1] >= border) for part in parts)
    whole = [[len(parts[0])]] if parts else []
    for left, right in itertools.pairwise(parts):
        if left[-1] + 1 != right[0] or (left[0] >= border) != (right[0] >= border):
            whole.append([])
        whole[-1].append(len(right))
    for lengths in whole:
        assert len(lengths) == -(-sum(lengths) // most)
        assert max(lengths) - min(lengths) <= 1
