"""Two hundred epochs, early breaks, and violent ends: nothing grows and nothing is left."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
import time

import pytest

from shardkit.errors import StorageError
from shardkit.testing.faulty_files import Reply, faulty_files
from shardkit.testing.images import coloured, write_pictures
from shardkit.testing.mounts import NoMountsError
from shardkit.torch import ShardLoader


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_pictures(tmp_path_factory.mktemp("endurance") / "ds", coloured(40))


def standing():
    """Descriptors, tasks and resident kB of this process."""
    gc.collect()
    with open("/proc/self/status") as status:
        resident = next(int(line.split()[1]) for line in status if line.startswith("VmRSS"))
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), resident


@pytest.mark.parametrize("io", ["buffered", "direct", "uring"])
@pytest.mark.parametrize("shuffle", ["global", "window"])
def test_two_hundred_epochs_leave_descriptors_threads_and_memory_flat(folder, io, shuffle):
    options = {"size": 16, "decoder": "cpu", "threads": 2, "shuffle": shuffle, "window_extents": 4}
    with ShardLoader(folder, 8, io=io, extent_bytes=4000, **options) as loader:
        for epoch in range(230):
            for step, _ in enumerate(loader):
                if epoch % 3 == 1 and step == epoch % 5:
                    break
            if epoch == 29:
                files, tasks, resident = standing()
        after = standing()
    assert after[0] <= files
    assert after[1] <= tasks
    assert after[2] <= resident + 4096
    assert loader.epoch == 230


def test_forty_dali_epochs_do_too(folder):
    with ShardLoader(folder, 8, size=16) as loader:
        for epoch in range(50):
            for step, _ in enumerate(loader):
                if epoch % 3 == 1 and step == 1:
                    break
            if epoch == 9:
                files, tasks, resident = standing()
        after = standing()
    assert after[0] <= files
    assert after[1] <= tasks
    assert after[2] <= resident + 16384


KILLED = """
import sys
from shardkit.torch import ShardLoader
for images, labels in ShardLoader(sys.argv[1], 8, size=16, io=sys.argv[2]):
    print("batch", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("io", ["buffered", "uring"])
def test_sigkill_leaves_no_process_and_nothing_in_shared_memory(folder, io):
    shared = set(os.listdir("/dev/shm"))
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(folder), io], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    assert process.stdout.readline() == "batch\n"
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=20)
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)
    # Other programs come and go, and joblib's name their process.
    new = set(os.listdir("/dev/shm")) - shared
    assert [name for name in new if not name.startswith("sem.loky-") or f"-{process.pid}-" in name] == []


@pytest.fixture
def hanging(folder, tmp_path):
    """A dataset whose shard lies on a file system that keeps answers back: (dataset, that file system)."""
    with contextlib.ExitStack() as stack:
        try:
            files = stack.enter_context(faulty_files(tmp_path / "fuse"))
        except NoMountsError as error:
            pytest.skip(str(error))
        dataset = shutil.copytree(folder, tmp_path / "ds")
        for shard in dataset.glob("*.tar"):
            shard.rename(files.backing / shard.name)
            shard.symlink_to(files.path / shard.name)
        yield dataset, files
        files.release()


def test_a_read_that_hangs_is_reported_with_its_path_and_the_run_goes_on(hanging, caplog):
    dataset, files = hanging
    name = min(path.name for path in dataset.glob("*.tar"))
    with ShardLoader(dataset, 8, size=16, decoder="cpu", io="buffered", stuck_after=0.2) as loader:
        files.script(name, Reply(hang=True))
        threading.Timer(1.0, files.release).start()
        with caplog.at_level(logging.WARNING):
            assert len(list(loader)) == len(loader)
    said = [record.getMessage() for record in caplog.records if "has not ended" in record.getMessage()]
    assert len(said) == 1
    assert name in said[0]


def test_a_read_that_hangs_is_an_error_after_the_timeout_and_everything_ends(hanging):
    dataset, files = hanging
    name = min(path.name for path in dataset.glob("*.tar"))
    loader = ShardLoader(dataset, 8, size=16, decoder="cpu", io="buffered", timeout=0.5)
    files.script(name, Reply(hang=True), forever=True)
    started = time.monotonic()
    with pytest.raises(StorageError, match=rf"a read does not end: .*{name}:") as caught:
        next(iter(loader))
    assert "within 0.5 s" in str(caught.value)
    loader.close()
    assert time.monotonic() - started < 4
    files.release()
    deadline = time.monotonic() + 20  # what was left behind ends when the storage answers
    while any(thread.name.startswith("shardkit") for thread in threading.enumerate()):
        assert time.monotonic() < deadline
        time.sleep(0.05)


LEFT = """
import sys
from shardkit.torch import ShardLoader
loader = ShardLoader(sys.argv[1], 8, size=16, decoder="cpu", io=sys.argv[2], timeout=0.5)
print("ready", flush=True)
sys.stdin.readline()
try:
    next(iter(loader))
except Exception as error:
    print(type(error).__name__, flush=True)
"""


@pytest.mark.parametrize("io", ["buffered", "direct"])  # io_uring is not used on FUSE
def test_a_process_ends_although_a_read_hangs(hanging, io):
    dataset, files = hanging
    name = min(path.name for path in dataset.glob("*.tar"))
    process = subprocess.Popen(
        [sys.executable, "-c", LEFT, str(dataset), io], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "ready\n"
    files.script(name, Reply(hang=True), forever=True)
    out, _ = process.communicate("\n", timeout=30)
    assert out == "StorageError\n"
    assert process.returncode == 0
