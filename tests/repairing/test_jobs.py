"""Several shards at a time: the same bytes, the same words, and nothing left when it is stopped."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import shardkit
from shardkit.errors import ConfigError, StorageError
from shardkit.repairing.members import ClassNames
from shardkit.repairing.threads import Stopped, Threads, Turns
from shardkit.testing.damage import cut, flip_byte
from shardkit.testing.datasets import Draft, DraftSample, draft_dataset, draft_shard, tiny_jpeg
from shardkit.testing.foreign import write_tar
from shardkit.testing.packs import contents, snapshot

ROOT = Path(__file__).parents[2]
BARE = [".arrow", ".idx", ".json"]


def damaged(folder, damage):
    """Write a dataset of seven shards, the first the largest, and damage it."""
    draft_dataset((900, 5, 6, 30, 4, 5, 6), sizes=(401,)).write(folder)
    shards = sorted(folder.glob("*.tar"))
    gone = {"no index": BARE, "no manifest": [".json"], "own indexes only": [".json"], "manifest": []}[damage]
    for path in folder.iterdir():
        if path.suffix in gone or (damage == "own indexes only" and path.name == "index.arrow"):
            path.unlink()
    flip_byte(shards[2], 4200, 0xFF)
    cut(shards[3], shards[3].stat().st_size // 2)
    shards[5].unlink()
    # Samples of the end of an earlier, slower shard: which ones are the second ones must not depend on who was first.
    shards[1].write_bytes(shards[0].read_bytes()[-40 * 4096 :])
    return folder


@pytest.mark.parametrize("damage", ["no index", "no manifest", "own indexes only", "manifest"])
def test_any_number_of_jobs_gives_the_same_bytes_and_words(tmp_path, damage):
    folder = damaged(tmp_path / "ds", damage)
    found = {}
    for jobs in (1, 2, 8):
        result = shardkit.repair(folder, out=tmp_path / f"out{jobs}", jobs=jobs)
        look = shardkit.repair(folder, dry_run=True, jobs=jobs)
        found[jobs] = result, look, contents(tmp_path / f"out{jobs}")
    assert found[1] == found[2] == found[8]
    assert found[1][0].lost > 0
    assert shardkit.verify(tmp_path / "out8").counts == {}


def nameless(folder):
    """Write two shards whose indexes alone lead to the two samples of class 1; one's json member is damaged."""
    shards = []
    for place, labels in enumerate(([0] * 900 + [1], [1, 0])):
        drafts = [
            DraftSample(
                key=f"c/{place}-{i:04}",
                jpeg=tiny_jpeg(i, 401),
                label=label,
                metadata={"source": f"c/{place}-{i:04}.jpg", "class": ("zero", "five")[label]},
            )
            for i, label in enumerate(labels)
        ]
        shards.append(draft_shard(f"tiny-{place:06}.tar", drafts, 4096))
    Draft(name="tiny", align=4096, classes=("zero", "five"), shards=shards, algorithm="xxh3-128").write(folder)
    (folder / "manifest.json").unlink()
    for shard, row in ((shards[0], shards[0].rows[-1]), (shards[1], shards[1].rows[0])):
        with open(folder / shard.name, "r+b") as file:
            for header in (row.sample_offset, row.json_offset - 512):
                os.pwrite(file.fileno(), b"\xee" * 512, header)
    first = shards[0]
    flip_byte(folder / first.name, first.tar.index(b"five", first.rows[-1].json_offset) + 1, 3)  # the i becomes a j
    return folder


def test_the_first_shard_names_a_class_however_many_jobs_there_are(tmp_path):
    folder = nameless(tmp_path / "ds")
    for jobs in (1, 2, 8):
        result = shardkit.repair(folder, out=tmp_path / f"out{jobs}", jobs=jobs)
        assert [(lost.key, lost.detail) for lost in result.first] == [("c/1-0000", "class 'five', expected 'fjve'")]
        assert shardkit.open(tmp_path / f"out{jobs}").classes == ("zero", "fjve")
    assert contents(tmp_path / "out1") == contents(tmp_path / "out2") == contents(tmp_path / "out8")


@pytest.mark.parametrize(
    ("label", "learns"), [(0, False), (1, True), (None, False), (999_999, True), (1_000_000, False)]
)
def test_only_a_label_without_a_name_waits_for_one(label, learns):
    classes = ClassNames(None, derived=True)
    classes.count(0, "zero")
    classes.settle()
    assert classes.learns(label) == learns
    assert classes.fault(label, {"class": "new"}) == ("class 'new', expected 'zero'" if label == 0 else None)
    assert not classes.learns(label)
    assert not ClassNames(["zero"], derived=False).learns(label)


@pytest.mark.parametrize("jobs", [1, 4])
def test_indexes_beside_the_shards_are_made_by_any_number_of_jobs(tmp_path, jobs):
    folder = draft_dataset((3, 2, 4, 1)).write(tmp_path / "ds")
    whole = contents(folder)
    for path in list(folder.iterdir()):
        if path.suffix in BARE and path.name != "manifest.json":
            path.unlink()
    assert shardkit.repair(folder, jobs=jobs).exit_code == 0
    assert contents(folder) == whole


def test_fewer_than_one_job_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="at least one job; found 0"):
        shardkit.repair(tmp_path, jobs=0)


class Stopping:
    """Progress that raises after so many reports."""

    def __init__(self, reports):
        self.left = reports

    def begin(self, total):
        pass

    def advance(self, count):
        self.left -= 1
        if self.left < 0:
            raise KeyboardInterrupt


@pytest.mark.parametrize("reports", [0, 3, 7, 8, 10])
def test_a_stopped_run_leaves_no_thread_and_the_next_one_begins_again(tmp_path, reports):
    folder = damaged(tmp_path / "ds", "manifest")
    before = snapshot(folder)
    with pytest.raises(KeyboardInterrupt):
        shardkit.repair(folder, out=tmp_path / "out", jobs=4, progress=Stopping(reports))
    assert not [one.name for one in threading.enumerate() if one.name.startswith("repair")]
    assert snapshot(folder) == before
    left = contents(tmp_path / "out") if (tmp_path / "out").exists() else {}
    assert "manifest.json" not in left
    assert not [name for name in left if name.endswith(".tmp")]
    shardkit.repair(folder, out=tmp_path / "out", jobs=4)
    shardkit.repair(folder, out=tmp_path / "fresh", jobs=1)
    assert contents(tmp_path / "out") == contents(tmp_path / "fresh")


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_a_signal_ends_all_threads_after_a_clean_sweep(tmp_path, name):
    folder = tmp_path / "ds"
    draft_dataset((6000, 6000, 6000, 6000), sizes=(401,)).write(folder)
    for path in folder.iterdir():
        if path.suffix != ".tar":
            path.unlink()
    process = subprocess.Popen(
        [sys.executable, "-m", "shardkit", "repair", folder, "--out", tmp_path / "out", "--jobs", "4"],
        env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    while not list((tmp_path / "out").glob(".shardkit/run-*")) and process.poll() is None:
        time.sleep(0.01)
    process.send_signal(getattr(signal, name))
    _, err = process.communicate(timeout=20)
    assert process.returncode == {"SIGINT": 130, "SIGTERM": 143}[name]
    assert "no file of the dataset was changed; run again" in err
    assert not list((tmp_path / "out").rglob("*.tmp"))


class _Stop(BaseException):
    """A signal."""


def _stopped_at(monkeypatch, step, call):
    """Call; a signal comes behind the operation of that number that changes names. Return its notes, or None."""
    done = itertools.count()

    def stopping(operation):
        def wrapped(*arguments, **options):
            result = operation(*arguments, **options)
            if next(done) == step:
                raise _Stop
            return result

        return wrapped

    with monkeypatch.context() as patch:
        for name in ("rename", "link", "unlink", "mkdir", "rmdir", "fsync"):
            patch.setattr(os, name, stopping(getattr(os, name)))
        try:
            call()
        except _Stop as stop:
            return stop.__notes__
    return None


def _damaged(folder):
    with open(folder / "tiny-000001.tar", "r+b") as file:
        file.seek(600)
        file.write(bytes(64))
    return {"out": folder.with_name("out")}


def _without_indexes(folder):
    for path in folder.iterdir():
        if path.suffix != ".tar":
            path.unlink()
    return {}


def _of_another_tool(folder):
    shutil.rmtree(folder)
    folder.mkdir()
    for name in ("a.tar", "b.tar"):
        write_tar(folder / name, {f"{name}-{n}.jpg": tiny_jpeg(n) for n in range(3)})
    with open(folder / "b.tar", "r+b") as file:
        file.truncate(1600)
    return {"out": folder.with_name("out")}


@pytest.mark.parametrize("prepare", [_damaged, _without_indexes, _of_another_tool])
def test_wherever_a_signal_comes_what_is_said_holds(tmp_path, monkeypatch, prepare):
    options = prepare(draft_dataset((2, 2)).write(tmp_path / "whole" / "ds"))
    expected = tmp_path / "expected" / "ds"
    shutil.copytree(tmp_path / "whole", expected.parent)
    wanted = {name: expected.with_name("out") for name in options}
    shardkit.repair(expected, jobs=1, **wanted)
    made = contents(expected.parent)
    said = set()
    for step in itertools.count():
        folder = tmp_path / f"{step}" / "ds"
        shutil.copytree(tmp_path / "whole", folder.parent)
        given = {name: folder.with_name("out") for name in options}
        notes = _stopped_at(monkeypatch, step, lambda: shardkit.repair(folder, jobs=1, **given))  # noqa: B023
        if notes is None:
            break
        done = notes[-1] == "every file is in its place, but a power cut could undo that"
        said.add(done)
        if not done:
            assert notes[-1] == "no file of the dataset was changed; run again"
            shardkit.repair(folder, jobs=1, **given)
        left = {name: data for name, data in contents(folder.parent).items() if ".shardkit/" not in name}
        assert left == made, step
    assert said == {True, False}
    assert step > 10


def test_results_come_in_order_and_the_first_error_in_that_order_ends_it():
    started = []

    def work(number):
        started.append(number)
        time.sleep(0.05 if number == 1 else 0)
        if number in (1, 2):
            raise StorageError(f"number {number}")
        return number

    threads = Threads(3)
    results = threads.in_order(work, range(100))
    assert next(results) == 0
    with pytest.raises(StorageError, match="number 1"):
        list(results)
    assert len(started) < 20
    with pytest.raises(Stopped):
        threads.check()


def test_a_turn_comes_when_all_before_it_are_over():
    turns, order = Turns(lambda: None), []

    def take(number):
        turns.wait(number)
        order.append(number)
        turns.over(number)

    waiting = [threading.Thread(target=take, args=(number,)) for number in (3, 1)]
    for one in waiting:
        one.start()
    turns.over(2)
    assert order == []
    turns.over(0)
    for one in waiting:
        one.join(5)
    assert order == [1, 3]
