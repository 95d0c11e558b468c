"""What could not be read or did not hold still is no damage: told apart, counted apart, and the run goes on."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from shardkit.errors import CapabilityError, StorageError
from shardkit.testing.damage import PAGE, append, disturbed, failing, flip_byte
from shardkit.testing.datasets import draft_dataset
from shardkit.verifying.run import verify

SHARDS = ("tiny-000000.tar", "tiny-000001.tar")


@pytest.mark.parametrize("at", [0, PAGE, 4 * PAGE])
def test_a_read_error_ends_one_shard_and_no_more(dataset, at):
    report = verify(dataset, jobs=1, opener=failing(SHARDS[0], at))
    assert report.counts == {"read-error": 1}
    assert report.exit_code == 6
    (finding,) = report.findings
    assert (finding.shard, finding.offset, finding.found) == (SHARDS[0], at, "EIO")


def test_damage_before_and_beside_a_read_error_is_damage(dataset):
    flip_byte(dataset / SHARDS[0], 100)
    flip_byte(dataset / SHARDS[1], 100)
    report = verify(dataset, jobs=1, opener=failing(SHARDS[0], 2 * PAGE))
    assert report.counts == {"header": 2, "read-error": 1}
    assert report.exit_code == 4


@pytest.mark.parametrize(
    "name", ["manifest.json", "index.arrow", "rejected.jsonl", "tiny-000000.arrow", "tiny-000000.idx"]
)
def test_a_read_error_beside_the_shards_is_no_damage(dataset, name):
    report = verify(dataset, jobs=1, opener=failing(name))
    assert report.counts == {"read-error": 1}
    assert report.exit_code == 6
    assert report.findings[0].file == name


@pytest.fixture
def strace(require_tool):
    """Return a function that runs `shardkit verify --json` while the kernel fails chosen system calls."""
    tool = require_tool("strace")

    def run(dataset, inject, *options, only=()):
        calls = inject.removeprefix("inject=").partition(":")[0]
        command = [tool, "-f", "-o", os.devnull, "-e", f"trace={calls}", "-e", inject, *only]
        command += [sys.executable, "-m", "shardkit", "verify", str(dataset), "--json", "--jobs=1", *options]
        # strace counts the calls of each thread for itself, and Arrow spreads its reads over as many as it has.
        environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "ARROW_IO_THREADS": "1"}
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
        if "ptrace" in done.stderr:
            pytest.skip("this system does not let strace look")
        return done.returncode, json.loads(done.stdout)

    return run


@pytest.mark.parametrize(("number", "name"), [(1, "manifest.json"), (3, "index.arrow"), (4, "tiny-000000.arrow"),
                                              (6, SHARDS[0]), (9, SHARDS[1])])  # fmt: skip
def test_an_error_of_the_kernel_is_no_damage(strace, dataset, number, name):
    code, report = strace(dataset, f"inject=preadv,preadv2:error=EIO:when={number}", "--no-direct")
    assert code == report["exit_code"] == 6
    assert [(f["code"], f["file"]) for f in report["findings"]] == [("read-error", name)]


@pytest.mark.parametrize("number", [1, 2])
def test_an_error_while_the_dataset_index_is_decoded_is_no_damage(strace, dataset, number):
    only = ("-P", str(dataset / "index.arrow"))
    code, report = strace(dataset, f"inject=read:error=EIO:when={number}", only=only)
    assert (code, report["counts"]) == (6, {"read-error": 1})
    assert report["findings"][0]["file"] == "index.arrow"


def test_an_interrupted_system_call_is_tried_again(strace, dataset):
    code, report = strace(dataset, "inject=preadv,preadv2:error=EINTR:when=2+3", "--no-direct")
    assert (code, report["findings"]) == (0, [])


def test_a_disk_that_refuses_a_direct_read_is_read_through_the_cache(strace, dataset):
    code, report = strace(dataset, "inject=preadv,preadv2:error=EINVAL:when=6")
    if report["read_path"] == "page cache":
        pytest.skip("this file system has no direct reads to refuse")
    assert (code, report["findings"], report["read_path"]) == (0, [], "mixed")
    code, report = strace(dataset, "inject=preadv,preadv2:error=EINVAL:when=6", "--direct")
    assert (code, report["error"]) == (7, "CapabilityError")


@pytest.mark.parametrize("name", [SHARDS[0], "tiny-000000.arrow", "index.arrow", "manifest.json"])
@pytest.mark.parametrize("how", ["written", "replaced", "cut", "removed"])
def test_a_file_that_changes_under_the_read_is_not_called_damaged(dataset, name, how):
    done = threading.Event()

    def change(_):
        if done.is_set():
            return
        done.set()
        path = dataset / name
        if how == "written":
            append(path, b"more")
        elif how == "replaced":
            copy = dataset / "copy"
            copy.write_bytes(path.read_bytes()[::-1])
            copy.rename(path)
        elif how == "cut":
            os.truncate(path, 1000)
        else:
            path.unlink()

    report = verify(dataset, jobs=1, opener=disturbed(name, change))
    assert done.is_set()
    assert report.counts == {"changed": 1}
    assert report.exit_code == 6
    assert report.findings[0].file == name


def test_a_demand_for_direct_reads_is_met_or_refused(dataset):
    if verify(dataset).read_path == "direct":
        assert verify(dataset, direct=True).read_path == "direct"
    else:
        with pytest.raises(CapabilityError):
            verify(dataset, direct=True)


@pytest.mark.parametrize("jobs", [1, 3])
def test_every_number_of_jobs_gives_the_same_report(tmp_path, jobs):
    draft = draft_dataset((3, 1, 4, 2, 5))
    path = draft.write(tmp_path / "ds")
    for shard in draft.shards:
        flip_byte(path / shard.name, shard.rows[-1].offset)
        flip_byte(path / shard.name, 20)
    reports = [verify(path, jobs=jobs, direct=False) for _ in range(5)]
    assert reports == [verify(path, jobs=1, direct=False)] * 5
    assert reports[0].counts == {"header": 5, "payload": 5}


@pytest.mark.parametrize("jobs", [1, 3])
def test_an_interruption_ends_every_thread(tmp_path, jobs):
    path = draft_dataset((3, 3, 3, 3)).write(tmp_path / "ds")
    flip_byte(path / SHARDS[0], 20)
    before = threading.active_count()

    def interrupt(_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        verify(path, jobs=jobs, on_finding=interrupt)
    with pytest.raises(KeyboardInterrupt):
        verify(path, jobs=jobs, progress=interrupt)
    assert threading.active_count() == before


def test_an_interruption_waits_for_no_shard(tmp_path):
    path = draft_dataset((3, 100), sizes=(60_000,)).write(tmp_path / "ds")
    flip_byte(path / SHARDS[0], 20)
    blocks = []

    def slowly(_):
        blocks.append(time.sleep(0.005))

    def interrupt(_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        verify(path, jobs=2, on_finding=interrupt, opener=disturbed(SHARDS[1], slowly))
    assert len(blocks) < 1000 < (path / SHARDS[1]).stat().st_size / PAGE


def test_progress_adds_up_to_the_bytes_that_were_read(dataset):
    counts = []
    report = verify(dataset, jobs=2, progress=counts.append)
    assert sum(counts) == report.bytes_read


def test_no_descriptor_stays_open(dataset):
    flip_byte(dataset / SHARDS[0], 20)
    flip_byte(dataset / "index.arrow", 100)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        verify(dataset)
        verify(dataset, jobs=1, opener=failing(SHARDS[0], PAGE))
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_file_that_may_not_be_opened_is_no_damage(dataset):
    def opener(path):
        if path.endswith(".idx"):
            raise_denied(path)
        return failing("nothing")(path)

    report = verify(dataset, jobs=1, opener=opener)
    assert report.counts == {"read-error": 2}
    assert report.exit_code == 6


def raise_denied(path):
    raise StorageError("cannot open", path=path, found="EACCES", errno=errno.EACCES)
