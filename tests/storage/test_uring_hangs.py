"""Reads by io_uring that hang: of a disk whose image lies on a file system that keeps answers back."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

from shardkit.storage.uring import UringReader
from shardkit.testing.faulty_files import HANG, FaultyFiles, faulty_files
from shardkit.testing.mounts import NoMountsError
from shardkit.testing.reading import read_extents
from shardkit.testing.rings import needs_uring, write_through

if TYPE_CHECKING:
    from pathlib import Path

    from shardkit.storage.reader import Pending

pytestmark = needs_uring
_IMAGE = "disk.img"


@dataclass(frozen=True)
class HangingDisk:
    """An ext4 with one file, on a device that answers when it is let."""

    path: Path
    content: bytes
    files: FaultyFiles

    def hang(self) -> None:
        self.files.script(_IMAGE, HANG)


@pytest.fixture
def hanging(tmp_path):
    content, source, point = os.urandom(1 << 20), tmp_path / "source", tmp_path / "disk"
    source.mkdir()
    point.mkdir()
    (source / "a").write_bytes(content)
    with contextlib.ExitStack() as stack:
        try:
            files = stack.enter_context(faulty_files(tmp_path / "fuse"))
            with (files.backing / _IMAGE).open("wb") as image:
                image.truncate(8 << 20)
            run("mkfs.ext4", "-q", "-O", "^has_journal", "-d", source, files.backing / _IMAGE)
            # The kernel's thread reads the image as it is asked to, so that FUSE sees each read.
            device = run("losetup", "--find", "--show", "--read-only", "--direct-io=on", files.path / _IMAGE)
        except (NoMountsError, FileNotFoundError, subprocess.CalledProcessError) as error:
            pytest.skip(f"a disk that hangs needs root, FUSE, mkfs.ext4 and losetup: {error}")
        try:
            run("mount", "-o", "ro", device, point)
        finally:
            run("losetup", "--detach", device)  # one that is mounted goes with its mount
        stack.callback(run, "umount", "--lazy", point)  # also when a test failed with the file open
        stack.callback(files.release)
        yield HangingDisk(point / "a", content, files)


def run(*command) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def oldest(reader: UringReader) -> Pending:
    until = time.monotonic() + 20
    while (pending := reader.oldest()) is None:
        assert time.monotonic() < until
        time.sleep(0.005)
    return pending


def test_the_oldest_read_is_told_while_it_hangs(hanging):
    reader = UringReader([hanging.path])
    assert read_extents(reader, [(0, 0, 9000)]) == [hanging.content[:9000]]
    assert reader.oldest() is None
    hanging.hang()
    with ThreadPoolExecutor(1) as threads:
        stuck = threads.submit(read_extents, reader, [(0, 500_000, 10)])
        try:
            hanging.files.wait_for_hung()
            first = oldest(reader)
            time.sleep(0.05)
            later = reader.oldest()
        finally:
            hanging.files.release()
        assert stuck.result(timeout=20) == [hanging.content[500_000:500_010]]
    assert (first.path, first.offset) == (later.path, later.offset) == (str(hanging.path), 499_712)
    assert first.seconds + 0.05 <= later.seconds < 20
    assert reader.oldest() is None
    reader.close()


def test_a_read_that_hangs_holds_up_no_other_call(hanging, disk):
    other = write_through(disk / "b", os.urandom(200_000))
    reader = UringReader([hanging.path, other], depth=1)
    hanging.hang()
    with ThreadPoolExecutor(2) as threads:
        stuck = threads.submit(read_extents, reader, [(0, 0, 10)])
        try:
            hanging.files.wait_for_hung()
            wanted = [(1, offset, 10) for offset in range(0, 190_000, 10_000)]
            free = threads.submit(read_extents, reader, wanted)
            assert free.result(timeout=20) == [other.read_bytes()[offset : offset + 10] for _, offset, _ in wanted]
            assert oldest(reader).path == str(hanging.path)
            assert not stuck.done()
        finally:
            hanging.files.release()
        assert stuck.result(timeout=20) == [hanging.content[:10]]
    reader.close()


def test_close_waits_for_a_read_that_hangs(hanging):
    reader = UringReader([hanging.path])
    hanging.hang()
    with ThreadPoolExecutor(2) as threads:
        stuck = threads.submit(read_extents, reader, [(0, 0, 10)])
        try:
            hanging.files.wait_for_hung()
            closed = threads.submit(reader.close)
            with pytest.raises(TimeoutError):
                closed.result(timeout=0.1)
        finally:
            hanging.files.release()
        closed.result(timeout=20)
        assert stuck.result(timeout=20) == [hanging.content[:10]]
