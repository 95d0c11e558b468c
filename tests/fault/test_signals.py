"""Ctrl-C and SIGTERM: the exit code, one line that says what is kept and how to go on, and nothing left running."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import shardkit
from shardkit.testing.packs import contents, slow_tree

SHARDS = 8
OPTIONS = ["--name", "t", "--shards", str(SHARDS), "--check", "decode"]
CODES = {signal.SIGINT: 130, signal.SIGTERM: 143}


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return slow_tree(tmp_path_factory.mktemp("slow") / "source")


@pytest.fixture(scope="module")
def whole(source, tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole") / "dataset"
    shardkit.pack(source, folder, name="t", shards=SHARDS, check="decode", jobs=2)
    return contents(folder)


@pytest.fixture
def target(tmp_path):
    return tmp_path / "dataset"


class Running:
    """`shardkit pack` in a process group of its own, as a shell starts it."""

    def __init__(self, *arguments):
        self.process = subprocess.Popen(
            [sys.executable, "-m", "shardkit", "pack", *map(str, arguments)], stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip
        self.pid = self.process.pid

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for pid in [*self.workers(), self.pid] if self.process.poll() is None else []:
            os.kill(pid, signal.SIGKILL)
        self.process.communicate()

    def workers(self):
        try:
            return [int(pid) for pid in Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()]
        except FileNotFoundError:
            return []

    def wait_for(self, true):
        until = time.monotonic() + 30
        while not true():
            assert self.process.poll() is None, self.process.communicate()
            assert time.monotonic() < until
            time.sleep(0.002)

    def end(self, seconds=15):
        out, error = self.process.communicate(timeout=seconds)
        return self.process.returncode, out, error


def finished(target):
    path = target / ".shardkit" / "journal"
    return len([line for line in path.read_bytes().split(b"\n") if line]) if path.exists() else 0


def judge(running, target, number, source, whole, workers):
    code, out, error = running.end()
    assert code == CODES[number], error
    kept = finished(target)
    how = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated"}[number]
    assert error == (
        f"shardkit: {how}; {kept} of {SHARDS} shards are finished and kept; run again with --resume to go on\n"
    )
    assert out == ""
    assert 0 < kept < SHARDS
    assert not list((target / ".shardkit").glob("run-*"))
    assert not (target / "manifest.json").exists()
    assert not [pid for pid in workers if Path(f"/proc/{pid}").exists()]
    shardkit.pack(source, target, name="t", shards=SHARDS, check="decode", jobs=2, resume=True)
    assert contents(target) == whole


@pytest.mark.parametrize("jobs", [1, 2])
@pytest.mark.parametrize("number", CODES)
def test_a_signal_in_the_middle_keeps_what_is_finished(source, whole, target, number, jobs):
    with Running(source, target, *OPTIONS, "--jobs", jobs) as running:
        running.wait_for(lambda: finished(target))
        workers = running.workers()
        assert len(workers) == jobs - 1  # one works in a thread of the parent
        os.kill(running.pid, number)
        judge(running, target, number, source, whole, workers)


def test_a_signal_to_the_whole_group_is_the_parent_s_to_handle(source, whole, target):
    """As a terminal sends it."""
    with Running(source, target, *OPTIONS, "--jobs", "2") as running:
        running.wait_for(lambda: finished(target))
        workers = running.workers()
        os.killpg(running.pid, signal.SIGINT)
        judge(running, target, signal.SIGINT, source, whole, workers)


def test_a_signal_to_every_process_is_the_parent_s_to_handle(source, whole, target):
    """As a batch system sends it; the workers get it first."""
    with Running(source, target, *OPTIONS, "--jobs", "2") as running:
        running.wait_for(lambda: finished(target))
        workers = running.workers()
        for pid in [*workers, running.pid]:
            os.kill(pid, signal.SIGTERM)
            time.sleep(0.03)
        judge(running, target, signal.SIGTERM, source, whole, workers)


def test_a_second_pack_is_told_who_is_there_and_disturbs_nothing(source, whole, target):
    with Running(source, target, *OPTIONS, "--jobs", "2") as running:
        running.wait_for(lambda: finished(target))
        for flags in ([], ["--resume"], ["--overwrite"]):
            with Running(source, target, *OPTIONS, *flags) as second:
                code, _, error = second.end()
            if running.process.poll() is None:
                assert code == 8
                assert f"found process {running.pid} on " in error
        code, _, error = running.end()
        assert (code, error) == (0, "")
    assert contents(target) == whole


def test_workers_that_hang_do_not_keep_the_parent(source, whole, target):
    with Running(source, target, *OPTIONS, "--jobs", "2") as running:
        running.wait_for(lambda: finished(target))
        workers = running.workers()
        for pid in workers:
            os.kill(pid, signal.SIGSTOP)
        os.kill(running.pid, signal.SIGINT)
        judge(running, target, signal.SIGINT, source, whole, workers)


def test_what_stops_the_group_stops_the_workers(source, whole, target):
    """As Ctrl-Z does: the processors are free until the shell's `fg`."""
    with Running(source, target, *OPTIONS, "--jobs", "2") as running:
        running.wait_for(lambda: finished(target))
        processes = [running.pid, *running.workers()]
        os.killpg(running.pid, signal.SIGSTOP)
        time.sleep(0.1)
        assert [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] for pid in processes] == ["T"] * 2
        os.killpg(running.pid, signal.SIGCONT)
        code, _, error = running.end()
        assert (code, error) == (0, "")
    assert contents(target) == whole


def test_a_worker_ignores_the_signal_from_its_first_instruction_on(source, whole, target):
    with Running(source, target, *OPTIONS, "--jobs", "2") as running:
        running.wait_for(lambda: len(running.workers()) == 1)
        for pid in running.workers():
            os.kill(pid, signal.SIGTERM)
            os.kill(pid, signal.SIGINT)
        code, _, error = running.end()
        assert (code, error) == (0, "")
    assert contents(target) == whole


@pytest.mark.parametrize("pause", [0.0, 0.05])
def test_a_signal_that_comes_twice_is_one(source, whole, target, pause):
    """A terminal and a wrapper both send it."""
    with Running(source, target, *OPTIONS, "--jobs", "2") as running:
        running.wait_for(lambda: finished(target))
        workers = running.workers()
        for _ in range(3):
            try:
                os.kill(running.pid, signal.SIGINT)
            except ProcessLookupError:
                break
            time.sleep(pause)
        judge(running, target, signal.SIGINT, source, whole, workers)


CLEANS_UP_FOR_EVER = """
import sys, time
import shardkit.packing.workers as workers
from shardkit.cli.main import main
workers.Workers._end = lambda self, kill: time.sleep(60)
main(sys.argv[1:])
"""


def test_a_later_signal_ends_a_run_whose_clean_up_hangs(source, whole, target):
    """As it does when a worker is in a call to a dead file server, and dies of nothing."""
    command = [sys.executable, "-c", CLEANS_UP_FOR_EVER, "pack", str(source), str(target), *OPTIONS, "--jobs", "2"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        while not finished(target):
            time.sleep(0.002)
        process.send_signal(signal.SIGINT)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(1.2)
        process.send_signal(signal.SIGINT)
        assert process.wait(5) == 130
        assert "stopped at once" in process.stderr.read()
    shardkit.pack(source, target, name="t", shards=SHARDS, check="decode", jobs=2, resume=True)
    assert contents(target) == whole


@pytest.mark.parametrize("number", CODES)
def test_a_signal_during_the_scan_leaves_no_trace(tmp_path, number):
    """A list of half a million files that are not there takes seconds to look through."""
    rows, target = tmp_path / "list.csv", tmp_path / "dataset"
    rows.write_text("path\n" + "".join(f"{row}.jpg\n" for row in range(500_000)))
    with Running(rows, target, "--jobs", "2") as running:
        running.wait_for(lambda: (target / ".shardkit" / "lock").exists() and len(running.workers()) == 1)
        workers = running.workers()
        time.sleep(0.1)
        os.kill(running.pid, number)
        code, _, error = running.end()
        how = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated"}[number]
        assert (code, error) == (CODES[number], f"shardkit: {how}; nothing was changed\n")
    assert not target.exists()
    assert not [pid for pid in workers if Path(f"/proc/{pid}").exists()]


def test_an_interrupted_run_answers_in_json_too(source, target):
    with Running(source, target, *OPTIONS, "--jobs", "2", "--json") as running:
        running.wait_for(lambda: finished(target))
        os.kill(running.pid, signal.SIGINT)
        code, out, _ = running.end()
    answer = json.loads(out)
    assert answer["exit_code"] == code == 130
    assert "are finished and kept" in answer["message"]


def test_an_ignored_signal_stays_ignored(source, whole, target):
    """As `nohup` and a shell's background jobs have it."""
    command = [sys.executable, "-m", "shardkit", "pack", str(source), str(target), *OPTIONS, "--jobs", "2"]
    code = "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_IGN); os.execv(sys.argv[1], sys.argv[1:])"
    with subprocess.Popen([sys.executable, "-c", code, *command], stdout=subprocess.DEVNULL) as process:
        while not finished(target):
            assert process.poll() is None
            time.sleep(0.002)
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0
    assert contents(target) == whole
