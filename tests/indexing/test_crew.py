"""`shardkit.index` with several jobs: the same bytes whoever does them, and nobody is left when it ends."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest

import shardkit
from shardkit.errors import TarFormatError, WorkerError
from shardkit.indexing import crew
from shardkit.indexing.rows import index_shard
from shardkit.indexing.workers import Workers
from shardkit.testing.foreign import foreign_files, write_tar
from shardkit.testing.packs import contents

LONG = 20.0
"""Seconds: longer than any machine takes to start a process."""

CREWS = {
    "processes": {"WORTH_PROCESSES_S": 0.0, "_LOOK_S": 60.0},
    "processes beside the first shard": {"WORTH_PROCESSES_S": 0.0, "index_shard": lambda *given: late(*given)},
    "threads": {"WORTH_PROCESSES_S": 2.0},
    "threads from the beginning": {"_LOOK_S": 1e-5, "threads_worth": lambda jobs, *_: jobs},
}


def late(shard, options, temporary, arrived):
    """Index a shard; in a thread only once there are processes, which know nothing of this."""
    arrived(1)
    until, children = time.monotonic() + LONG, Path(f"/proc/self/task/{os.getpid()}/children")
    while threading.current_thread() is not threading.main_thread() and not children.read_text():
        assert time.monotonic() < until, "no process began"
        time.sleep(0.01)
    return index_shard(shard, options, temporary, arrived)


@pytest.mark.parametrize("how", CREWS)
def test_all_jobs_write_the_same_bytes(shards, tmp_path, monkeypatch, how):
    """Whoever does them."""
    for constant, value in CREWS[how].items():
        monkeypatch.setattr(crew, constant, value)
    found = []
    for jobs in (1, 2, 5):
        shardkit.index(shards, out=tmp_path / str(jobs), name="d", jobs=jobs)
        found.append(contents(tmp_path / str(jobs)))
    assert found[0] == found[1] == found[2]
    assert set(found[0]) == {
        "index.arrow", "manifest.json", *(f"t-{n:03d}{end}" for n in range(3) for end in (".tar", ".arrow", ".idx"))
    }  # fmt: skip


@pytest.mark.parametrize("how", CREWS)
def test_what_a_worker_meets_ends_the_run_and_leaves_no_process(shards, monkeypatch, how):
    for constant, value in CREWS[how].items():
        monkeypatch.setattr(crew, constant, value)
    children = Path(f"/proc/self/task/{os.getpid()}/children")
    before = children.read_text()
    (shards / "t-002.tar").write_bytes(b"no tar")
    with pytest.raises(TarFormatError, match="too short for a tar"):
        shardkit.index(shards, on_error="fail", jobs=2)
    assert not list((shards / ".shardkit").glob("run-*"))
    assert children.read_text() == before
    write_tar(shards / "t-002.tar", foreign_files(14))
    shardkit.index(shards, resume=True, jobs=2)
    assert shardkit.verify(shards).findings == ()


def test_a_worker_that_dies_is_told_with_its_shard(shards, monkeypatch):
    monkeypatch.setattr(crew, "WORTH_PROCESSES_S", 0.0)
    children = Path(f"/proc/self/task/{os.getpid()}/children")
    received = Workers._receive

    def kill_and_receive(self, connection, shard):
        for pid in children.read_text().split():
            os.kill(int(pid), signal.SIGKILL)
        return received(self, connection, shard)

    monkeypatch.setattr(Workers, "_receive", kill_and_receive)
    # Of three shards a thread may take two before there are processes.
    for number in range(3, 9):
        write_tar(shards / f"t-{number:03}.tar", foreign_files(7 * number))
    with pytest.raises(WorkerError, match=r"a worker died: .*/t-\d{3}\.tar; .*signal SIGKILL"):
        shardkit.index(shards, jobs=3)


def test_a_worker_that_dies_while_it_waits_is_told_with_the_shard_it_was_to_get(shards, monkeypatch):
    monkeypatch.setattr(crew, "WORTH_PROCESSES_S", 0.0)
    for number in range(3, 9):
        write_tar(shards / f"t-{number:03}.tar", foreign_files(7 * number))
    give, was_to_get = Workers._give, []

    def kill_and_give(self, connection, number, work, busy):
        self._processes[connection].kill()
        self._processes[connection].wait()
        was_to_get.append(work[0].path)
        give(self, connection, number, work, busy)

    monkeypatch.setattr(Workers, "_give", kill_and_give)
    with pytest.raises(WorkerError, match=r"a worker died: .*signal SIGKILL") as caught:
        shardkit.index(shards, jobs=3)
    assert [caught.value.path] == was_to_get


def test_as_many_shards_are_at_work_as_jobs_say(shards, monkeypatch):
    """One less while the thread is not through that began with the first one."""
    for number in range(3, 30):
        write_tar(shards / f"t-{number:03}.tar", foreign_files(7))
    go_on, ended, at_work = threading.Event(), threading.Event(), []

    def first(*given):
        given[-1](1)  # something has passed
        assert go_on.wait(LONG), "no process has made a shard"
        try:
            return index_shard(*given)
        finally:
            ended.set()

    given, received = Workers._give, Workers._receive

    def give(self, connection, number, work, busy):
        given(self, connection, number, work, busy)
        at_work.append(len(busy) + (not go_on.is_set()))

    def receive(self, connection, shard):
        kind, value = received(self, connection, shard)
        if kind != "arrived" and not ended.is_set():
            assert max(at_work) == 2
            go_on.set()
            assert ended.wait(LONG)
        return kind, value

    for name, value in (("WORTH_PROCESSES_S", 0.0), ("index_shard", first)):
        monkeypatch.setattr(crew, name, value)
    monkeypatch.setattr(crew.os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
    monkeypatch.setattr(Workers, "_give", give)
    monkeypatch.setattr(Workers, "_receive", receive)
    shardkit.index(shards, jobs=2)
    assert max(at_work) == 2
    assert at_work.count(2) > len(at_work) // 2
    assert shardkit.verify(shards).findings == ()
