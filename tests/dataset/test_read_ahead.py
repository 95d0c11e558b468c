"""Reading ahead in a windowed order: the next piece of each lane, in memory that nobody waits for."""

from __future__ import annotations

import contextlib
import itertools
import signal
import subprocess
import sys
import threading
import time
from functools import partial

import numpy as np
import pytest

from shardkit.dataset.budget import pieces_held, pieces_wanted
from shardkit.dataset.reading import SampleReader
from shardkit.dataset.resident import ResidentShards
from shardkit.dataset.source import SampleSource, Step
from shardkit.dataset.steps import BatchPlan
from shardkit.dataset.window import WindowOrder
from shardkit.dataset.windowed import WindowReading
from shardkit.errors import IntegrityError, StorageError
from shardkit.storage.buffered import BufferedReader
from shardkit.storage.buffers import BufferPool
from shardkit.storage.staged import StagedReader
from shardkit.testing.datasets import draft_dataset
from shardkit.testing.host_device import HostDevice

COUNTS = (20, 1, 27, 13)
TOTAL = sum(COUNTS)
PIECE = 256 << 10
"""Bytes: more than all samples together."""
LONG = 20.0
"""Seconds: longer than any machine takes for what does not wait."""
SHAPES = list(itertools.product((1, 2, 5), (1, 3, 13), (1, 4, 60), (1, 3)))
"""Lanes of a rank, samples of a lane in a step, samples of an extent, extents of a window."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return draft_dataset(COUNTS, sizes=(401, 512)).write(tmp_path_factory.mktemp("ahead") / "ds")


class Watched(BufferedReader):
    """A reader that counts its calls, one a piece, and holds some of them up or fails them."""

    def __init__(self, paths):
        super().__init__(paths)
        self.calls, self.hanging, self.failing = 0, set(), set()
        self.let_go = threading.Event()

    def read_into(self, ops, /):
        number, self.calls = self.calls, self.calls + 1
        if number in self.hanging:
            self.let_go.wait(LONG)
        if number in self.failing:
            path = self._files.paths[int(ops.file[0])]
            raise StorageError("the server went away", path=path, offset=int(ops.offset[0]))
        super().read_into(ops)


class Unwaiting(BufferPool):
    """A pool in which a wait, which would be for ever when nothing more is to come back, is an error."""

    def acquire(self, length, *, timeout_s=None):
        try:
            return super().acquire(length, timeout_s=0)
        except StorageError:
            assert timeout_s == 0
            raise


def window(**changes):
    return WindowOrder(**{"n": TOTAL, "seed": 4, "lanes": 1, "extent_samples": 10, "window_extents": 1, **changes})


def windowed(order, plan=None):
    """Return what makes the reading of an order from a source and a pool."""
    whole = BatchPlan(n=order.n, batch_size=order.lanes, world_size=1, rank=0, lanes=order.lanes, last_batch="partial")
    return partial(WindowReading, order=order, plan=plan or whole, piece_bytes=PIECE)


def by_ones(count=TOTAL):
    return [[position] for position in range(count)]


def first_of(fetcher, count):
    """Take so many batches, and return their positions."""
    taken = []
    for _ in range(count):
        batch = fetcher.get(wait=True)
        taken += batch.positions.tolist()
        batch.release()
    return taken


def shapes(last):
    """Plans and orders of ranks of all kinds."""
    for (own, share, extent, extents), world in itertools.product(SHAPES, (1, 2, 3)):
        if last == "drop" and own * share * world > TOTAL:
            continue
        for rank in range(world):
            plan = BatchPlan(
                n=TOTAL, batch_size=own * share, world_size=world, rank=rank, lanes=own * world, last_batch=last
            )
            yield plan, window(lanes=own * world, extent_samples=extent, window_extents=extents)


def pieces_read(plan, order):
    """Return how many pieces a rank reads in an epoch: those that its steps come to, none of them ahead of its time."""
    held, count = {}, 0
    for step in range(plan.steps):
        for piece, _, _ in order.pieces_of(plan.positions(step)):
            count += held.get(piece.lane) != piece
            held[piece.lane] = piece
    return count


# --- what is read, and when ------------------------------------------------------------------------------------------


def test_the_next_piece_is_read_before_the_present_one_is_handed_out(fetch, stack, folder, settle):
    order = window()
    on = stack(folder, storage=Watched, order=order, pool_bytes=9 * PIECE)
    fetcher = fetch(by_ones(), on=on, depth=1, reading=windowed(order))
    batch = fetcher.get(wait=True)  # the first of ten, and no step behind the fifth is begun until it was asked for
    settle(lambda: on.storage.calls == 2)
    time.sleep(0.05)
    assert on.storage.calls == 2  # one ahead, whatever room there is
    batch.release()
    assert first_of(fetcher, TOTAL - 1) == list(range(1, TOTAL))
    assert fetcher.get(wait=True) is None
    assert on.storage.calls == len(order.pieces(0))


def test_nothing_is_read_ahead_while_a_step_waits_for_the_present_piece(fetch, stack, folder, settle):
    order = window()
    on = stack(folder, storage=Watched, order=order)
    on.storage.hanging = {0}
    fetcher = fetch(by_ones(), on=on, reading=windowed(order))
    settle(lambda: on.storage.calls == 1)
    time.sleep(0.05)
    assert on.storage.calls == 1
    on.storage.let_go.set()
    settle(lambda: on.storage.calls == 2)
    assert first_of(fetcher, TOTAL) == list(range(TOTAL))


def test_a_piece_is_read_ahead_as_soon_as_its_memory_is_free(stack, folder):
    order = window()
    on = stack(folder, storage=Watched, order=order)
    pool = Unwaiting(2 * PIECE)
    reading = windowed(order)(on.source, pool)
    assert reading.ahead() is None  # no step was begun
    first = reading.begin(Step(0, 0, np.arange(10)))()
    reading.ahead()()
    assert reading.ahead() is None  # one a lane
    second = reading.begin(Step(0, 1, np.arange(10, 20)))()
    assert on.storage.calls == 2
    assert reading.ahead() is None  # no memory
    first.release()
    reading.ahead()()
    second.release()
    assert pool.lent_bytes == 2 * PIECE
    third = reading.begin(Step(0, 2, np.arange(20, 30)))()
    assert on.storage.calls == 3
    assert third.ids.tolist() == order.at(0, np.arange(20, 30)).tolist()


def test_a_batch_on_the_border_of_two_pieces_does_not_keep_the_storage_waiting(stack, folder):
    order, plan = window(), BatchPlan(n=TOTAL, batch_size=8, world_size=1, rank=0, lanes=1, last_batch="partial")
    on = stack(folder, storage=Watched, order=order)
    reading = windowed(order, plan)(on.source, Unwaiting(pieces_wanted(plan, order) * PIECE))
    reading.begin(Step(0, 0, np.arange(8)))().release()
    reading.ahead()()
    border = reading.begin(Step(0, 1, np.arange(8, 16)))
    reading.ahead()()  # though the batch still needs the first piece
    assert on.storage.calls == 3
    batch = border()
    assert batch.ids.tolist() == order.at(0, np.arange(8, 16)).tolist()
    batch.release()
    reading.begin(Step(0, 2, np.arange(16, 24)))().release()
    assert on.storage.calls == 3


def test_what_is_read_ahead_is_planned_before_there_is_memory_for_it(stack, folder, monkeypatch):
    order = window()
    on = stack(folder, storage=Watched, order=order)
    reader, done = on.source.reader, []

    def note(name, do):
        monkeypatch.setattr(reader, name, lambda *args: done.append(name) or do(*args))

    for name in ("plan", "fetch"):
        note(name, getattr(reader, name))
    reading = windowed(order)(on.source, on.pool)
    read = reading.begin(Step(0, 0, np.arange(10)))
    assert done == ["plan", "plan"]
    read().release()
    reading.ahead()()
    assert done == ["plan", "plan", "fetch", "fetch"]


@pytest.mark.parametrize("batch_size", [3, 10, 25])
def test_each_step_looks_at_its_own_samples_and_no_step_at_those_of_others(stack, folder, monkeypatch, batch_size):
    order = window()
    plan = BatchPlan(n=TOTAL, batch_size=batch_size, world_size=1, rank=0, lanes=1, last_batch="partial")
    on = stack(folder, order=order, metadata=True)
    reader, looked = on.source.reader, []
    cut = reader.cut
    monkeypatch.setattr(reader, "cut", lambda reads, *rest: looked.extend(reads.ids.tolist()) or cut(reads, *rest))
    reading = windowed(order, plan)(on.source, on.pool)
    for step in range(plan.steps):
        batch = reading.begin(Step(0, step, plan.positions(step)))()
        assert looked == batch.ids.tolist()
        assert batch.metadata == on.reader.read_alone(batch.ids)[1].metadata
        batch.release()
        while (work := reading.ahead()) is not None:
            work()
        looked.clear()


@pytest.mark.parametrize("error", [IntegrityError("an index that lies"), MemoryError("that lies")])
def test_a_piece_that_cannot_be_planned_is_told_by_the_step_that_needs_it(stack, folder, monkeypatch, error):
    order = window()
    on = stack(folder, storage=Watched, order=order)
    reading = windowed(order)(on.source, on.pool)
    plan = on.source.reader.plan

    def planned(ids):
        if set(ids.tolist()) == set(order.at(0, np.arange(10, 20)).tolist()):
            raise error
        return plan(ids)

    monkeypatch.setattr(on.source.reader, "plan", planned)
    reading.begin(Step(0, 0, np.arange(10)))().release()
    with pytest.raises(type(error), match="that lies"):
        reading.begin(Step(0, 1, np.arange(10, 20)))


def test_of_several_lanes_that_comes_first_which_is_needed_first(stack, folder):
    order = window(lanes=2, extent_samples=17)  # segments of 31 and 30: pieces of 17, 14 and of 3, 17, 10
    on = stack(folder, storage=Watched, order=order)
    reading = windowed(order)(on.source, on.pool)
    reading.begin(Step(0, 0, np.arange(2)))().release()
    reading.ahead()()
    before = on.storage.calls
    reading.begin(Step(0, 1, np.arange(2, 8)))().release()  # the second lane's next piece
    assert on.storage.calls == before == 3


def test_what_is_read_for_each_step_by_itself_gets_no_thread_for_it(fetch, reading_threads, settle):
    fetch([[0]] * 20, depth=1)
    settle(reading_threads)
    assert "shardkit-fetch-ahead" not in reading_threads()


# --- every piece once, and never a wait for ever ---------------------------------------------------------------------


@pytest.mark.parametrize("last", ["drop", "pad", "partial"])
def test_with_all_that_can_be_ahead_no_step_waits_for_memory_and_no_piece_is_read_twice(stack, folder, last):
    on = stack(folder, storage=Watched)
    for plan, order in shapes(last):
        source, pool = SampleSource(on.reader, order, on.bad, seed=0), Unwaiting(pieces_held(plan, order) * PIECE)
        reading = windowed(order, plan)(source, pool)
        before = on.storage.calls
        for step in range(plan.steps):
            batch = reading.begin(Step(0, step, plan.positions(step)))()
            assert batch.ids.tolist() == order.at(0, batch.positions).tolist()
            batch.release()
            while (work := reading.ahead()) is not None:
                work()
        assert on.storage.calls - before == pieces_read(plan, order)


@pytest.mark.parametrize("last", ["drop", "pad", "partial"])
def test_epochs_that_follow_each_other_read_each_piece_once_and_wait_for_no_memory(stack, folder, last):
    on = stack(folder, storage=Watched)
    for plan, order in itertools.islice(shapes(last), 0, None, 2):
        source, pool = SampleSource(on.reader, order, on.bad, seed=0), Unwaiting(pieces_held(plan, order) * PIECE)
        reading = windowed(order, plan)(source, pool, endless=True)
        before = on.storage.calls
        for epoch, step in itertools.product(range(3), range(plan.steps)):
            batch = reading.begin(Step(epoch, step, plan.positions(step)))()
            assert batch.ids.tolist() == order.at(epoch, batch.positions).tolist()
            batch.release()
            while (work := reading.ahead()) is not None:
                work()
        read = on.storage.calls - before - 3 * pieces_read(plan, order)
        assert 0 <= read <= plan.lanes // plan.world_size  # what lies ahead of the fourth epoch


def test_the_next_epoch_is_read_ahead_behind_the_last_piece_of_a_lane_and_only_where_it_follows(stack, folder):
    order = window(lanes=2, extent_samples=40)  # segments of 31 and 30 in windows of 40: pieces of 31, and 9 and 21
    on = stack(folder, storage=Watched, order=order)
    for endless, steps, calls in ((False, 2, 3), (True, 1, 4), (True, 2, 5)):
        reading, before = windowed(order)(on.source, on.pool, endless=endless), on.storage.calls
        for step, positions in enumerate((np.arange(2), np.arange(2, TOTAL))[:steps]):
            reading.begin(Step(0, step, positions))().release()
            while (work := reading.ahead()) is not None:
                work()
        assert on.storage.calls - before == calls
        if calls == 5:
            batch = reading.begin(Step(1, 0, np.arange(2)))()
            assert on.storage.calls - before == calls
            assert batch.ids.tolist() == order.at(1, np.arange(2)).tolist()
            batch.release()
        del work, reading


def take_holding(fetcher):
    """Take all batches, hold each as long as a consumer may, and return their positions."""
    found, held = [], []
    while True:
        time.sleep(0.0005)
        if (batch := fetcher.get(wait=False)) is None:
            while held:
                held.pop().release()
            if (batch := fetcher.get(wait=True)) is None:
                return found
        found.append(batch.positions.tolist())
        held.append(batch)


@pytest.mark.parametrize("last", ["drop", "pad", "partial"])
def test_a_consumer_that_holds_what_it_may_gets_all_batches(fetch, stack, folder, last):
    on = stack(folder, storage=Watched)
    for plan, order in itertools.islice(shapes(last), 0, None, 5):
        source, pool = SampleSource(on.reader, order, on.bad, seed=0), BufferPool(pieces_held(plan, order) * PIECE)
        make = partial(windowed(order, plan), source, pool)
        before, steps = on.storage.calls, map(plan.positions, range(plan.steps))
        fetcher = fetch(steps, on=on, depth=2, reading=lambda *_, make=make: make())
        stuck = threading.Timer(LONG, pool.close)  # then a wait for memory is an error
        stuck.start()
        assert take_holding(fetcher) == [plan.positions(step).tolist() for step in range(plan.steps)]
        stuck.cancel()
        assert on.storage.calls - before == pieces_read(plan, order)
        assert fetcher.close()
        assert pool.lent_bytes == 0


def test_steps_that_leave_what_is_ahead_out_get_its_memory(stack, folder):
    order = window()
    on = stack(folder, order=order)
    pool = Unwaiting(2 * PIECE)
    reading = windowed(order)(on.source, pool)
    for number, position in enumerate([0, 35, 15, 60, 0]):
        reading.begin(Step(0, number, np.arange(position, position + 1)))().release()
        while (work := reading.ahead()) is not None:
            work()
        del work


@pytest.mark.parametrize("budget", [15_000, 1 << 20])
def test_shards_that_stay_in_gpu_memory_are_read_ahead_into_their_places(stack, folder, budget):
    device = HostDevice(lazy=True)
    on = stack(
        folder, device=device,
        storage=lambda paths: StagedReader(BufferedReader(paths), device, ring_bytes=1 << 20, paths=paths),
        resident=None,
    )  # fmt: skip
    kept = ResidentShards(on.samples, budget_bytes=budget << 3, align=on.storage.align, allocate=device.memory)
    reader = SampleReader(on.samples, on.storage, device=device, resident=kept)
    order = window()
    pool = Unwaiting(2 * PIECE, memory=device.memory)
    reading = windowed(order)(SampleSource(reader, order, on.bad, seed=0), pool)
    misses = []
    for step in range(TOTAL // 10):
        reading.begin(Step(0, step, np.arange(10 * step, 10 * step + 10)))().release()
        misses.append(kept.counts["misses"])
        while (work := reading.ahead()) is not None:
            work()
        misses.append(kept.counts["misses"])
        if kept.holds_all:
            assert pool.lent_bytes == 0
    assert kept.holds_all == (budget == 1 << 20)
    if kept.holds_all:
        assert misses == [10, 20, 20, 30, 30, 40, 40, 50, 50, 60, 60, 61]


def test_of_what_stays_a_step_checks_what_was_not_checked_before(stack, folder, monkeypatch):
    device = HostDevice(lazy=True)
    on = stack(
        folder, device=device,
        storage=lambda paths: StagedReader(BufferedReader(paths), device, ring_bytes=1 << 20, paths=paths),
    )  # fmt: skip
    kept = ResidentShards(on.samples, budget_bytes=8 << 20, align=on.storage.align, allocate=device.memory)
    reader = SampleReader(on.samples, on.storage, device=device, resident=kept, crc=True)
    order, checked = window(), []
    wrong = reader._crc.wrong
    monkeypatch.setattr(
        reader._crc, "wrong", lambda ids, *rest: checked.extend(ids[~rest[-1]].tolist()) or wrong(ids, *rest)
    )
    known = order.at(0, np.arange(TOTAL))[::3]
    reader.read_alone(known)
    checked.clear()
    reading = windowed(order)(SampleSource(reader, order, on.bad, seed=0), on.pool)
    for step in range(TOTAL):
        reading.begin(Step(0, step, np.arange(step, step + 1)))().release()
    assert checked == [one for one in order.at(0, np.arange(TOTAL)).tolist() if one not in known.tolist()]


# --- failures --------------------------------------------------------------------------------------------------------


def test_a_read_ahead_that_fails_once_is_not_told(fetch, stack, folder, settle):
    order = window()
    on = stack(folder, storage=Watched, order=order, pool_bytes=2 * PIECE)
    on.storage.failing = {1}
    fetcher = fetch(by_ones(), on=on, depth=1, reading=windowed(order))
    batch = fetcher.get(wait=True)
    settle(lambda: on.storage.calls == 2)
    batch.release()
    assert first_of(fetcher, TOTAL - 1) == list(range(1, TOTAL))
    assert fetcher.get(wait=True) is None
    assert on.storage.calls == len(order.pieces(0)) + 1


def test_a_read_that_fails_ahead_and_again_is_told_once_in_its_turn(fetch, stack, folder, settle, reading_threads):
    order = window()
    on = stack(folder, storage=Watched, order=order, pool_bytes=2 * PIECE)
    on.storage.failing = set(range(1, 99))
    fetcher = fetch(by_ones(), on=on, depth=1, reading=windowed(order))
    assert first_of(fetcher, 10) == list(range(10))
    with pytest.raises(StorageError, match="went away") as caught:
        fetcher.get(wait=True)
    assert caught.value.key in on.samples.keys(order.members(3, order.pieces(0)[1]))
    assert fetcher.get(wait=True) is None
    settle(lambda: not reading_threads())
    assert fetcher.close()
    assert on.pool.lent_bytes == 0  # though the error is kept


# --- the end ---------------------------------------------------------------------------------------------------------


def test_close_leaves_a_read_ahead_behind_that_does_not_end(fetch, stack, folder, settle, reading_threads):
    order = window()
    on = stack(folder, storage=Watched, order=order)
    on.storage.hanging = {1}
    fetcher = fetch(by_ones(), on=on, depth=1, oldest=lambda: None, reading=windowed(order), patience_s=0.05)
    first_of(fetcher, 1)
    settle(lambda: on.storage.calls == 2)
    started = time.monotonic()
    assert not fetcher.close()
    assert 0.05 <= time.monotonic() - started < LONG / 2
    assert reading_threads() == ["shardkit-fetch-ahead"]
    assert on.pool.lent_bytes == PIECE
    on.storage.let_go.set()
    settle(lambda: not reading_threads())
    assert fetcher.close()


def test_a_step_waits_for_a_read_ahead_that_is_under_way(fetch, stack, folder, settle):
    order = window()
    on = stack(folder, storage=Watched, order=order)
    on.storage.hanging = {1}
    fetcher = fetch(by_ones(), on=on, depth=2, reading=windowed(order))
    assert first_of(fetcher, 10) == list(range(10))
    time.sleep(0.02)
    assert fetcher.get(wait=False) is None
    on.storage.let_go.set()
    assert first_of(fetcher, TOTAL - 10) == list(range(10, TOTAL))
    assert on.storage.calls == len(order.pieces(0))


@pytest.mark.parametrize("left", [False, True])
def test_the_thread_ends_with_the_epoch(fetch, stack, folder, settle, reading_threads, left):
    order = window()
    on = stack(folder, order=order)
    fetcher = fetch(by_ones(), on=on, reading=windowed(order))
    first_of(fetcher, 15 if left else TOTAL)
    if left:
        assert fetcher.close()
        assert reading_threads() == []
    else:
        assert fetcher.get(wait=True) is None
        settle(lambda: not reading_threads())
        del fetcher
    assert on.pool.lent_bytes == 0


PROGRAM = """
import sys, threading, time
from shardkit.dataset.encoded import EncodedLoader, ReadOptions
from shardkit.dataset.state import Position
from shardkit.storage.buffered import BufferedReader
if sys.argv[2] == "hanging":
    read, calls = BufferedReader.read_into, []
    def read_into(self, ops):
        calls.append(1)
        if len(calls) == 2:
            print("hangs\\n", end="", flush=True)
            time.sleep(60)
        read(self, ops)
    BufferedReader.read_into = read_into
loader = EncodedLoader.open(
    sys.argv[1], ReadOptions(batch_size=1, io="buffered", shuffle="window", extent_bytes=9000, window_extents=1)
)
fetcher = loader.start(Position(0, 0))
fetcher.get(wait=True).release()
if sys.argv[2] == "ends":
    sys.exit()
try:
    epoch = 0
    print("runs\\n", end="", flush=True)
    while True:
        while (batch := fetcher.get(wait=True)) is not None:
            batch.release()
            time.sleep(0.0005)
        epoch += 1
        fetcher = loader.start(Position(epoch, 0))
except KeyboardInterrupt:
    started = time.monotonic()
    loader.close(wait=False)
    soon = time.monotonic() - started < 2
    while left := [one.name for one in threading.enumerate() if one.name.startswith("shardkit-fetch")]:
        if sys.argv[2] == "hanging" or time.monotonic() - started > 20:
            break
        time.sleep(0.01)  # on a busy machine a thread's last steps take their time
    print("left", left, soon)
"""


@contextlib.contextmanager
def started(folder, kind):
    command = [sys.executable, "-c", PROGRAM, str(folder), kind]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("after_s", [0.0, 0.05, 0.11])
def test_ctrl_c_ends_it(folder, after_s):
    with started(folder, "running") as process:
        assert process.stdout.readline() == "runs\n"
        time.sleep(after_s)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=LONG)
    assert out.splitlines()[-1:] == ["left [] True"], err
    assert process.returncode == 0


def test_ctrl_c_while_a_read_ahead_hangs_leaves_that_behind(folder):
    with started(folder, "hanging") as process:
        assert {process.stdout.readline(), process.stdout.readline()} == {"runs\n", "hangs\n"}
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=LONG)  # not the sixty seconds of the read
    assert out.startswith("left ["), err
    assert "'shardkit-fetch-ahead'] True" in out
    assert process.returncode == 0


def test_a_process_that_ends_in_mid_epoch_ends(folder):
    with started(folder, "ends") as process:
        assert process.communicate(timeout=LONG) == ("", "")
    assert process.returncode == 0
