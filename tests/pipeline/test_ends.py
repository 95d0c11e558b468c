"""How decoding ends: with reads that hang, under Ctrl-C, at the process's end, and what is left of it in memory."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
import tracemalloc

import pytest

from shardkit.errors import StorageError
from shardkit.pipeline.decoder import DecodeSpec
from shardkit.pipeline.workers import Cancelled, Outcome, Workers
from shardkit.testing.hanging_source import HangingSource


def ours():
    return {thread for thread in threading.enumerate() if thread.name.startswith("shardkit-")} - {
        thread for thread in threading.enumerate() if thread.name.startswith(("shardkit-read", "shardkit-fetch"))
    }


@pytest.mark.parametrize("augment", [None, "randaugment"])
def test_a_substitute_that_is_never_read_is_an_error_and_its_thread_is_left_behind(one_bad, name, make, feed, augment):
    name = "dali" if augment else name
    with feed(one_bad, [range(4), range(4, 8), range(8, 12)], on_bad="substitute") as given:
        source, before = HangingSource(given.fetcher), ours()
        run = make(name, DecodeSpec(size=16, train=False, augment=augment)).decode(source, 0)
        started = time.monotonic()
        with pytest.raises(StorageError, match="/x:7"):
            next(run)
        assert time.monotonic() - started < 30
        (left,) = ours() - before  # finishing and augmenting have ended
        assert left.daemon
        source.let_go.set()
        left.join(10)
        assert not left.is_alive()
        given.fetcher.close()
        assert given.pool.lent_bytes == 0


NEVER = """
import sys, threading
sys.path[:0] = sys.argv[3:]
from conftest import feed_decoder, make_decoder
from shardkit.testing.hanging_source import HangingSource
from shardkit.errors import StorageError
from shardkit.pipeline.decoder import DecodeSpec
decoder = make_decoder(sys.argv[2], DecodeSpec(size=16, train=False))
feeding = feed_decoder(sys.argv[1], [range(4), range(4, 8)], on_bad="substitute")
given = feeding.__enter__()
run = decoder.decode(HangingSource(given.fetcher), 0)
try:
    next(run)
except StorageError as error:
    print("raised", flush=True)
"""


def test_a_process_whose_read_hangs_ends(one_bad, name):
    command = [sys.executable, "-c", NEVER, str(one_bad), name, os.path.dirname(__file__), *sys.path]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout) == (0, "raised\n"), done.stderr[-2000:]


BUSY = """
import sys
sys.path[:0] = sys.argv[3:]
from conftest import feed_decoder, make_decoder
from shardkit.pipeline.decoder import DecodeSpec
decoder = make_decoder(sys.argv[2], DecodeSpec(size=64, train=True))
feeding = feed_decoder(sys.argv[1], [range(12)] * 1000)
given = feeding.__enter__()
run = decoder.decode(given.fetcher, 0)
next(run)
print("working", flush=True)
"""


def test_a_process_that_ends_while_it_decodes_does_not_crash(name, photo_folder):
    command = [sys.executable, "-c", BUSY, str(photo_folder), name, os.path.dirname(__file__), *sys.path]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout) == (0, "working\n"), done.stderr[-2000:]


def interrupt_when(condition, after):
    """Send Ctrl-C to the main thread, once."""

    def run():
        end = time.monotonic() + 20
        while not condition() and time.monotonic() < end:
            time.sleep(0.01)
        time.sleep(after)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # of one that meets a finaliser
def test_ctrl_c_while_the_end_is_waited_for_skips_no_step(one_bad, name, make, feed):
    with feed(one_bad, [range(4), range(4, 8), range(8, 12)], on_bad="substitute") as given:
        source, before = HangingSource(given.fetcher), ours()
        run = make(name, DecodeSpec(size=16, train=False)).decode(source, 0)
        thread = interrupt_when(lambda: source.checks == 2, after=0.2)  # while it waits for the decoding thread
        with pytest.raises(KeyboardInterrupt):
            next(run)
        thread.join()
        assert len(ours() - before) <= 1
        source.let_go.set()
        for left in ours() - before:
            left.join(10)
        assert ours() == before
        given.fetcher.close()
        assert given.pool.lent_bytes == 0


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # of one that meets a finaliser
def test_ctrl_c_in_the_consumer_comes_at_once_and_ends_the_run(one_bad, name, make, feed):
    with feed(one_bad, [range(4), range(4, 8)], on_bad="substitute") as given:
        source, before = HangingSource(given.fetcher), ours()
        run = make(name, DecodeSpec(size=16, train=False)).decode(source, 0)
        thread = interrupt_when(source.inside.is_set, after=0.1)
        with pytest.raises(KeyboardInterrupt):
            next(run)
        thread.join()
        assert source.checks <= 1
        source.let_go.set()
        for left in ours() - before:
            left.join(10)
        assert ours() == before


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # of one that meets a finaliser
def test_workers_are_waited_for_although_ctrl_c_comes():
    """What they look at may be freed behind `close`."""
    workers, done = Workers(1, "shardkit-test"), []
    started = threading.Event()

    def work():
        started.set()
        time.sleep(0.6)
        done.append(1)

    workers.submit(work)
    assert started.wait(20)  # else `close` cancels it
    thread = interrupt_when(started.is_set, after=0.1)
    with pytest.raises(KeyboardInterrupt):
        workers.close()
    assert done == [1]
    thread.join()
    assert workers.close()


def test_work_that_was_not_begun_is_cancelled_and_the_rest_is_done():
    workers, go = Workers(1, "shardkit-test"), threading.Event()
    started = threading.Event()

    def work():
        started.set()
        go.wait()
        return 5

    first, second = workers.submit(work), workers.submit(work)
    started.wait()
    threading.Timer(0.2, go.set).start()
    assert workers.close()
    assert first.wait() == 5
    with pytest.raises(Cancelled):
        second.wait()


@pytest.mark.parametrize(("reads", "lost"), [(False, False), (True, False), (False, True)])
def test_only_a_thread_that_is_in_a_read_or_waits_for_a_lost_gpu_is_left_behind(reads, lost):
    workers = Workers(1, "shardkit-test", hopeless=lambda: lost)
    go, started = threading.Event(), threading.Event()

    def work():
        with workers.reading() if reads else contextlib.nullcontext():
            started.set()
            return go.wait()

    workers.submit(work)
    started.wait()
    threading.Timer(1.5, go.set).start()
    began = time.monotonic()
    assert workers.close() is not (reads or lost)
    assert (time.monotonic() - began < 1.3) is (reads or lost)
    go.set()


def test_an_outcome_raises_what_was_given_and_keeps_the_first():
    outcome = Outcome()
    outcome.fail(ValueError("first"))
    outcome.set(1)
    with pytest.raises(ValueError, match="first"):
        outcome.wait()


def traced():
    return tracemalloc.get_traced_memory()[0]


def test_memory_of_batches_is_bounded_and_goes_with_the_run(photo_folder, name, make, feed):
    one = 24 * 3 * 128 * 128 * 4
    decoder = make(name, DecodeSpec(size=128, train=True))
    tracemalloc.start()
    try:
        with feed(photo_folder, [range(24)] * 14) as given:
            run = decoder.decode(given.fetcher, 0)
            next(run)
            before = traced()  # at least this one is remembered
            kept = [next(run) for _ in range(9)]
            del kept
            assert traced() - before < 4.5 * one
            list(run)
            assert traced() - before < 0.5 * one
        decoder.close()
        decoder.close()
    finally:
        tracemalloc.stop()


FEW_THREADS = """
import threading
from shardkit.pipeline.workers import Workers
begin, left = threading.Thread.start, 3

def start(thread):
    global left
    left -= 1
    if left < 0:
        raise RuntimeError("can't start new thread")
    begin(thread)

threading.Thread.start = start
try:
    Workers(5, "crew")
except Exception:
    print(threading.active_count())
"""


def test_threads_that_cannot_all_be_had_leave_none_behind():
    ran = subprocess.run([sys.executable, "-c", FEW_THREADS], capture_output=True, text=True, check=False, timeout=5)
    assert (ran.returncode, ran.stdout) == (0, "1\n")
