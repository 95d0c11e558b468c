"""The reading threads: batches in order, a bounded number of them, errors in their turn, and an end."""

from __future__ import annotations

import gc
import os
import random
import threading
import time
from functools import partial

import numpy as np
import pytest

from shardkit.dataset.shardset import open_dataset
from shardkit.dataset.source import BatchReading
from shardkit.errors import ConfigError, FormatError, ShortReadError
from shardkit.testing.damage import flip_byte
from shardkit.testing.datasets import draft_dataset

COUNTS = (7, 1, 12, 4)
TOTAL = sum(COUNTS)
SIZES = (401, 512, 4096, 9001, 30000)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return draft_dataset(COUNTS, sizes=SIZES).write(tmp_path_factory.mktemp("fetch") / "ds")


def batches(fetcher):
    while (batch := fetcher.get(wait=True)) is not None:
        yield batch
        batch.release()


def dawdling(seed):
    """A reading whose steps take their time, each another one."""
    rng = random.Random(seed)

    class Dawdling(BatchReading):
        def begin(self, step):
            return partial(self._slowly, super().begin(step), rng.random() * 0.004, rng.random() * 0.002)

        @staticmethod
        def _slowly(read, before, after):
            time.sleep(before)
            batch = read()
            time.sleep(after)
            return batch

    return Dawdling


# --- what comes out --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("io", ["buffered", "direct"])
def test_batches_are_the_samples_of_their_steps(fetch, stack, folder, io):
    rng = np.random.default_rng(0)
    steps = [rng.integers(0, TOTAL, size) for size in (1, 5, TOTAL * 2, 0)] + [np.arange(TOTAL)]
    seen = []
    with open_dataset(folder) as dataset:
        for batch in batches(fetch(steps, on=stack(folder, io=io))):
            truth = [dataset[i] for i in steps[batch.step]]
            assert [view.tobytes() for view in batch.views] == [sample.jpeg for sample in truth]
            assert batch.labels.tolist() == [sample.label for sample in truth]
            assert [batch.key(i) for i in range(len(batch))] == [sample.key for sample in truth]
            assert batch.positions.tolist() == batch.ids.tolist() == steps[batch.step].tolist()
            seen.append((batch.epoch, batch.step))
    assert seen == [(3, step) for step in range(len(steps))]


@pytest.mark.parametrize("seed", range(6))
def test_batches_come_in_the_order_of_the_steps_whatever_the_timing(fetch, seed):
    steps = [[number % TOTAL, seed] for number in range(60)]
    fetcher = fetch(steps, depth=1 + seed % 3, reading=dawdling(seed))
    found = [(batch.step, batch.ids.tolist()) for batch in batches(fetcher)]
    assert found == list(enumerate(steps))


def test_two_steps_are_read_at_the_same_time(fetch):
    both = threading.Barrier(2, timeout=10)  # breaks when one of them would wait for the other's end

    class Meeting(BatchReading):
        def begin(self, step):
            read = super().begin(step)
            return lambda: (both.wait(), read())[1]

    assert len(list(batches(fetch([[0]] * 6, reading=Meeting)))) == 6


def test_without_waiting_an_unread_batch_is_none(fetch):
    gate = threading.Event()

    def steps():
        gate.wait(10)
        yield [0]

    fetcher = fetch(steps())
    assert fetcher.get(wait=False) is None
    assert fetcher.waited_s == 0
    gate.set()
    assert [batch.ids.tolist() for batch in batches(fetcher)] == [[0]]
    assert fetcher.get(wait=True) is None
    assert fetcher.waited_s > 0


def test_replace_is_the_sources_own(fetch, stack, folder):
    on = stack(folder)
    fetcher = fetch([[1, 2, 3]], on=on)
    batch = fetcher.replace(fetcher.get(wait=True), {1: "it was damaged by hand"})
    assert batch.positions.tolist() == [1, 2, 3]
    assert (batch.ids[0], batch.ids[2]) == (1, 3)
    assert batch.ids[1] != 2
    assert on.bad.by_key == {"c/0002": "it was damaged by hand"}
    batch.release()


# --- bounds ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_no_more_batches_wait_than_the_depth(fetch, stack, folder, depth, settle):
    pulled, on = [], stack(folder)

    def steps():
        for step in range(20):
            pulled.append(step)
            yield [0]

    fetcher = fetch(steps(), on=on, depth=depth)
    settle(lambda: len(pulled) == depth + 2)  # those that wait, and one of each thread that finds no place
    time.sleep(0.1)
    assert len(pulled) == depth + 2
    assert on.pool.lent_bytes <= (depth + 2) * 4096
    assert len(list(batches(fetcher))) == 20


def test_nothing_is_read_ahead_with_a_depth_of_zero(fetch):
    with pytest.raises(ConfigError, match="read ahead"):
        fetch([[0]], depth=0)


def test_memory_and_order_do_not_wait_for_each_other(fetch, stack, folder):
    largest = 2 * (30000 + 2 * 4096)
    for seed in range(200):
        rng = np.random.default_rng(seed)
        on = stack(folder, pool_bytes=largest)
        steps = [rng.integers(0, TOTAL, rng.integers(0, 3)).tolist() for _ in range(12)]
        fetcher = fetch(steps, on=on, depth=int(rng.integers(1, 6)))
        seen = 0
        for batch in batches(fetcher):
            assert batch.ids.tolist() == steps[seen]
            seen += 1
        assert seen == 12
        on.pool.close()
        on.storage.close()
        on.samples.close()


# --- errors ----------------------------------------------------------------------------------------------------------


def open_cut_short(stack, tmp_path, **options):
    """Open a whole data set, and cut it then: a shard of another size is not opened at all."""
    folder = draft_dataset((3, 3), sizes=(5000,)).write(tmp_path / "cut")
    on = stack(folder, **options)
    offset = int(on.samples.gather("offset", np.array([4]))[0])
    os.truncate(folder / "tiny-000001.tar", offset + 100)
    return on, str(folder / "tiny-000001.tar"), offset


@pytest.mark.parametrize("seed", range(4))
def test_an_error_comes_after_the_batches_before_it_and_names_the_sample(fetch, stack, tmp_path, seed):
    on, path, offset = open_cut_short(stack, tmp_path)
    fetcher = fetch([[0, 1], [2, 3], [5, 4, 3, 0], [1], [2]], on=on, depth=4, reading=dawdling(seed))
    for step in range(2):
        batch = fetcher.get(wait=True)
        assert batch.step == step
        batch.release()
    with pytest.raises(ShortReadError) as caught:
        fetcher.get(wait=True)
    assert (caught.value.key, caught.value.path, caught.value.offset) == ("c/0004", path, offset)
    assert fetcher.get(wait=True) is None


def test_an_error_of_the_order_reaches_the_consumer(fetch, settle, reading_threads):
    def steps():
        yield [0]
        raise ConfigError("no such step")

    fetcher = fetch(steps())
    fetcher.get(wait=True).release()
    with pytest.raises(ConfigError, match="no such step"):
        fetcher.get(wait=True)
    settle(lambda: not reading_threads())


def test_an_error_of_a_bad_sample_reaches_the_consumer(fetch, stack, tmp_path):
    folder = draft_dataset((4,)).write(tmp_path / "ds")
    on = stack(folder, on_bad="raise")
    flip_byte(folder / "tiny-000000.tar", int(on.samples.gather("offset", np.array([2]))[0]))
    fetcher = fetch([[0, 1], [3, 2]], on=on)
    fetcher.get(wait=True).release()
    with pytest.raises(FormatError, match=r"tiny-000000\.tar:\d+ \[sample c/0002\]"):
        fetcher.get(wait=True)


def test_after_an_error_no_further_step_is_begun(fetch, stack, tmp_path, settle, reading_threads):
    on, _, _ = open_cut_short(stack, tmp_path)
    begun = []

    class SlowAtFirst(BatchReading):
        def begin(self, step):
            begun.append(step.number)
            read = super().begin(step)
            return partial(self._slowly, read) if step.number == 0 else read

        @staticmethod
        def _slowly(read):
            time.sleep(0.2)
            return read()

    fetcher = fetch([[0], [4], [1], [2]], on=on, reading=SlowAtFirst)
    fetcher.get(wait=True).release()
    with pytest.raises(ShortReadError):
        fetcher.get(wait=True)
    settle(lambda: not reading_threads())
    assert begun == [0, 1]


@pytest.mark.parametrize("fault", ["cut", "bad"])
def test_an_error_that_someone_keeps_does_not_keep_the_memory(fetch, stack, tmp_path, fault, settle, reading_threads):
    on, path, _ = open_cut_short(stack, tmp_path, on_bad="raise")
    if fault == "bad":
        flip_byte(path, int(on.samples.gather("offset", np.array([3]))[0]))
    fetcher = fetch([[0, 1, 2], [4 if fault == "cut" else 3]], on=on)
    fetcher.get(wait=True).release()
    with pytest.raises((ShortReadError, FormatError)) as caught:
        fetcher.get(wait=True)
    kept = caught.value
    settle(lambda: not reading_threads())
    gc.collect()
    assert on.pool.lent_bytes == 0
    assert kept.key is not None
