"""How the reading threads end: at once, whatever they wait for; and what is said of a read that does not end."""

from __future__ import annotations

import logging
import shutil
import threading
import time

import pytest

from shardkit.dataset.source import BatchReading
from shardkit.errors import StorageError
from shardkit.storage.backends import open_reader
from shardkit.storage.reader import Pending
from shardkit.testing.datasets import draft_dataset
from shardkit.testing.faulty_files import HANG, faulty_files
from shardkit.testing.mounts import NoMountsError

LONG = 20.0
"""Seconds: longer than any machine takes for what does not wait."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return draft_dataset((24,), sizes=(401, 512, 4096, 9001, 30000)).write(tmp_path_factory.mktemp("fetch") / "ds")


class Hanging(BatchReading):
    """A reading whose reads do not end before it is let go."""

    def __init__(self, source, pool):
        super().__init__(source, pool)
        self.let_go = threading.Event()
        Hanging.last = self

    def begin(self, step):
        read = super().begin(step)
        return lambda: self.let_go.wait(LONG) and read()


def count(fetcher):
    """Take every batch that is left."""
    taken = 0
    while (batch := fetcher.get(wait=True)) is not None:
        batch.release()
        taken += 1
    return taken


# --- the end ---------------------------------------------------------------------------------------------------------


def test_close_ends_threads_that_wait_for_a_place(fetch, stack, folder, settle, reading_threads):
    on = stack(folder)
    fetcher = fetch([[i % 24] for i in range(50)], on=on, depth=1, patience_s=LONG)
    settle(lambda: on.pool.lent_bytes >= 3 * 4096)
    started = time.monotonic()
    assert fetcher.close()
    assert fetcher.close()
    assert time.monotonic() - started < LONG / 2  # they are woken, not waited for
    assert not reading_threads()
    assert fetcher.get(wait=True) is None


def test_close_ends_a_thread_that_waits_for_memory(fetch, stack, folder, settle):
    on = stack(folder, pool_bytes=64 << 10)
    fetcher = fetch([[3]] * 20, on=on, depth=20, patience_s=LONG)  # 9001 bytes each
    settle(lambda: on.pool.lent_bytes > 48 << 10)
    started = time.monotonic()
    assert fetcher.close()
    assert time.monotonic() - started < LONG / 2
    assert on.pool.lent_bytes == 0


def test_close_from_another_thread_ends_a_wait(fetch):
    fetcher = fetch([[0]], reading=Hanging, patience_s=0.05)
    closer = threading.Timer(0.1, fetcher.close)
    closer.start()
    assert fetcher.get(wait=True) is None
    Hanging.last.let_go.set()
    closer.join()


def test_close_leaves_a_read_behind_that_does_not_end(fetch, settle, reading_threads):
    fetcher = fetch([[0], [1]], reading=Hanging, patience_s=0.05)
    settle(lambda: len(reading_threads()) == 2)
    started = time.monotonic()
    assert not fetcher.close()
    assert 0.05 <= time.monotonic() - started < LONG / 2  # the read hangs for longer
    assert reading_threads()
    Hanging.last.let_go.set()  # the fixture sees the threads end and the memory come back
    settle(lambda: not reading_threads())
    assert fetcher.close()


def test_a_batch_that_is_not_released_holds_up_a_thread_but_not_close(fetch, stack, folder):
    on = stack(folder, pool_bytes=12 << 10)
    fetcher = fetch([[3]] * 3, on=on, patience_s=0.05)
    batch = fetcher.get(wait=True)
    started = time.monotonic()
    assert not fetcher.close()
    assert time.monotonic() - started < LONG / 2
    batch.release()


# --- reads that are stuck --------------------------------------------------------------------------------------------


def test_a_stuck_read_is_reported_once_with_its_path(fetch, caplog):
    looks = []

    def oldest():
        looks.append(1)
        if len(looks) == 5:
            Hanging.last.let_go.set()
        return Pending("/data/a\nb.tar", 4096, 31.0)

    fetcher = fetch([[0], [1]], reading=Hanging, oldest=oldest, stuck_after_s=0.05)
    with caplog.at_level(logging.WARNING):
        assert count(fetcher) == 2
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 1
    assert told[0].startswith("/data/a\\nb.tar:4096: a read has not ended for 31 s")


@pytest.mark.parametrize("pending", [None, Pending("/data/a.tar", 0, 0.01)])
def test_a_read_that_is_young_is_not_reported(fetch, caplog, pending):
    fetcher = fetch([[0]], reading=Hanging, oldest=lambda: pending, stuck_after_s=0.05, timeout_s=0.05)
    threading.Timer(0.3, Hanging.last.let_go.set).start()
    with caplog.at_level(logging.WARNING):
        assert count(fetcher) == 1
    assert not caplog.records


def test_a_stuck_read_is_an_error_after_the_timeout(fetch):
    fetcher = fetch([[0]], reading=Hanging, oldest=lambda: Pending("/data/a.tar", 8192, 61.0), timeout_s=0.1)
    started = time.monotonic()
    with pytest.raises(StorageError, match=r"/data/a\.tar:8192.*within 0\.1 s.*61\.0 s"):
        fetcher.get(wait=True)
    assert time.monotonic() - started < LONG / 2
    Hanging.last.let_go.set()


@pytest.mark.parametrize("io", ["buffered", "direct"])
def test_a_server_that_does_not_answer_is_named(fetch, stack, folder, tmp_path, settle, reading_threads, caplog, io):
    try:
        with faulty_files(tmp_path / "server") as server:
            shutil.copy(folder / "tiny-000000.tar", server.backing)
            path = server.path / "tiny-000000.tar"
            server.script(path.name, HANG, forever=True)
            on = stack(folder, storage=lambda _: open_reader(io, [path])[0])
            fetcher = fetch([[0], [1]], on=on, stuck_after_s=0.1, timeout_s=0.5)
            with pytest.raises(StorageError, match=r"server/mounted/tiny-000000\.tar:\d+.*within 0\.5 s"):
                fetcher.get(wait=True)
            assert not fetcher.close()
            server.script(path.name)
            server.release()
            settle(lambda: not reading_threads())
    except NoMountsError as error:
        pytest.skip(f"a file system that fails on demand needs root and FUSE: {error}")
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == [str(path)]
