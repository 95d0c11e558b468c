from __future__ import annotations

import errno
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import shardkit
from shardkit.errors import StorageError, WorkerError
from shardkit.packing.files import FileOrigin
from shardkit.packing.options import PackOptions
from shardkit.packing.workers import PlanFile, Workers
from shardkit.testing.packs import contents, slow_tree, tiny_tree

OPTIONS = {"name": "t", "shards": 4}


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return tiny_tree(tmp_path_factory.mktemp("tree") / "source", images=13)


@pytest.fixture(scope="module")
def slow_source(tmp_path_factory):
    return slow_tree(tmp_path_factory.mktemp("slow") / "source")


@pytest.fixture(scope="module")
def whole(source, tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole") / "dataset"
    shardkit.pack(source, folder, **OPTIONS, jobs=1)
    return contents(folder)


@pytest.fixture
def target(tmp_path):
    return tmp_path / "dataset"


def children(pid=None):
    """Process numbers of the living children; of this process, those that a test has started."""
    whose = pid or os.getpid()
    found = map(int, Path(f"/proc/{whose}/task/{whose}/children").read_text().split())
    return [child for child in found if state(child) not in ("Z", "") and (pid or child not in OTHERS)]


OTHERS = set()
"""Children of this process that other tests keep for later."""


@pytest.fixture(autouse=True)
def _know_the_others():
    OTHERS.clear()
    OTHERS.update(children())


def state(pid):
    """The letter of /proc; empty for a process that is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""


def wait_until(true, seconds=20.0):
    until = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < until, "it does not happen"
        time.sleep(0.005)


class At:
    """Progress that does something once, when the first report arrives."""

    def __init__(self, act):
        self.act = act

    def begin(self, samples, source_bytes):
        pass

    def advance(self, samples, source_bytes, refused):
        act, self.act = self.act, None
        if act:
            act()


@pytest.mark.parametrize("jobs", [2, 3, 4, 9])
def test_any_number_of_workers_makes_the_same_bytes(source, target, whole, jobs):
    """Nine of them find work for four."""
    shardkit.pack(source, target, **OPTIONS, jobs=jobs)
    assert contents(target) == whole
    assert not children()


def test_no_more_workers_start_than_there_are_shards(source, target):
    counts = []
    shardkit.pack(source, target, **OPTIONS, jobs=9, progress=At(lambda: counts.append(len(children()))))
    assert counts[0] <= 4


def test_one_job_needs_no_process(source, target):
    counts = []
    shardkit.pack(source, target, **OPTIONS, jobs=1, progress=At(lambda: counts.append(len(children()))))
    assert counts == [0]


def test_progress_adds_up_whoever_works(source, tmp_path):
    class Sum:
        def __init__(self):
            self.total = None
            self.done = (0, 0, 0)

        def begin(self, samples, source_bytes):
            self.total = (samples, source_bytes)

        def advance(self, *counts):
            self.done = tuple(map(sum, zip(self.done, counts, strict=True)))

    sums = [Sum() for _ in range(2)]
    for jobs, each in enumerate(sums, 1):
        shardkit.pack(source, tmp_path / str(jobs), **OPTIONS, jobs=jobs, progress=each)
    assert sums[0].done == sums[1].done
    assert sums[0].done[0] == sums[0].total[0] == 16
    assert sums[0].done[2] == 3


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_a_worker_that_dies_is_named_and_the_pack_can_go_on(slow_source, target, number):
    options = {"name": "t", "shards": 8, "check": "decode"}

    def kill_all():
        for child in children():
            os.kill(child, number)

    with pytest.raises(WorkerError) as caught:
        shardkit.pack(slow_source, target, **options, jobs=2, progress=At(kill_all))
    assert caught.value.exit_code == 6
    assert f"signal {signal.Signals(number).name}" in str(caught.value)
    assert "while it made t-00000" in str(caught.value)
    assert "of 8 shards are finished and kept" in str(caught.value)
    assert "--resume" in str(caught.value)
    assert not children()
    assert not list(target.glob(".shardkit/run-*"))
    shardkit.pack(slow_source, target, **options, jobs=2, resume=True)
    assert shardkit.verify(target).exit_code == 0


@pytest.mark.parametrize("executable", ["/nowhere/python", "", None, "/"])
def test_a_worker_that_cannot_be_started_is_an_error_with_a_way_out(source, target, monkeypatch, executable):
    monkeypatch.setattr(sys, "executable", executable)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(WorkerError, match=r"cannot be started.*--jobs 1"):
        shardkit.pack(source, target, **OPTIONS, jobs=2)
    assert len(os.listdir("/proc/self/fd")) == before
    assert not target.exists()
    shardkit.pack(source, target, **OPTIONS, jobs=1)


@pytest.mark.parametrize("fails_at", [2, 3])
def test_a_later_worker_that_cannot_be_started_takes_the_others_with_it(source, target, monkeypatch, fails_at):
    """One starts before the plan is made, the others after it."""
    real, calls = subprocess.Popen, []

    def fail(*arguments, **options):
        calls.append(arguments)
        if len(calls) == fails_at:
            raise OSError(errno.EAGAIN, "Resource temporarily unavailable")
        return real(*arguments, **options)

    monkeypatch.setattr(subprocess, "Popen", fail)
    with pytest.raises(WorkerError, match="Resource temporarily unavailable") as caught:
        shardkit.pack(source, target, **OPTIONS, jobs=4)
    assert not children()
    assert len(calls) == fails_at
    assert caught.value.exit_code == 6


def test_a_worker_that_is_no_shardkit_is_an_error_and_no_hang(source, target, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(WorkerError, match="exit status 1"):
        shardkit.pack(source, target, **OPTIONS, jobs=2)
    assert not children()


def test_what_a_worker_meets_is_told_as_if_the_caller_had_met_it(source, target):
    """The scratch folder vanishes, as when another host cleans up."""
    import shutil

    def sweep():
        for folder in target.glob(".shardkit/run-*"):
            while folder.exists():  # a worker may begin a file meanwhile
                shutil.rmtree(folder, ignore_errors=True)

    with pytest.raises(StorageError, match=r"run-[0-9a-f]{8}/t-00000") as caught:
        shardkit.pack(source, target, name="t", shards=16, jobs=2, progress=At(sweep))
    assert caught.value.errno == errno.ENOENT
    assert "shards are finished and kept" in caught.value.kept


def test_a_plan_that_is_gone_or_damaged_is_an_error_of_the_plan(tmp_path):
    path = os.fsencode(tmp_path / "plan.arrow")
    origin = FileOrigin(root=b"/", inside=None)
    plan = PlanFile(path=path, origin=origin, work=b"/", options=PackOptions(name="t"))
    assert pickle.loads(pickle.dumps(plan)) == plan
    with pytest.raises(StorageError, match=r"cannot read the plan.*plan\.arrow"):
        plan.job(0)
    (tmp_path / "plan.arrow").write_bytes(b"no plan at all" * 100)
    with pytest.raises(StorageError, match=r"the plan is damaged.*plan\.arrow"):
        plan.job(0)


def test_workers_end_with_the_context_that_holds_them():
    with Workers(2):
        assert len(children()) == 1  # the other one is a thread
    assert not children()
    with pytest.raises(KeyError), Workers(2):
        raise KeyError
    assert not children()


PARENT = """
import sys, time
from shardkit.packing.run import pack
pack(sys.argv[1], sys.argv[2], name="t", shards=2, check="decode", jobs=2)
"""


def test_workers_do_not_outlive_a_killed_parent(slow_source, target):
    """They are in the middle of a shard, and would be for half a second."""
    with subprocess.Popen([sys.executable, "-c", PARENT, slow_source, target]) as parent:
        wait_until(lambda: len(list(target.glob(".shardkit/run-*/t-*.tar.tmp"))) == 2)
        workers = children(parent.pid)
        assert len(workers) == 1
        parent.kill()
    start = time.monotonic()
    wait_until(lambda: not any(map(state, workers)), 5)
    assert time.monotonic() - start < 2
    assert not list(target.glob("t-*"))


def test_a_worker_that_wakes_up_in_a_new_run_disturbs_nothing(slow_source, target):
    """Its temporary files had the same names, its plan was another one."""
    with subprocess.Popen([sys.executable, "-c", PARENT, slow_source, target]) as parent:
        wait_until(lambda: len(list(target.glob(".shardkit/run-*/t-*.tar.tmp"))) == 2)
        workers = children(parent.pid)
        for worker in workers:
            os.kill(worker, signal.SIGSTOP)
        parent.kill()

    def wake():
        for worker in workers:
            os.kill(worker, signal.SIGCONT)

    shardkit.pack(slow_source, target, name="t", shards=2, seed=7, jobs=1, overwrite=True, progress=At(wake))
    wait_until(lambda: not any(map(state, workers)), 5)
    assert shardkit.verify(target).exit_code == 0
    assert not (target / ".shardkit").exists()


def test_a_signal_before_the_thread_is_started_is_what_is_told(monkeypatch):
    def interrupted(_):
        raise KeyboardInterrupt

    with Workers(1) as workers, monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            workers._start_thread()
