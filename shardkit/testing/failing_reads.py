"""The part of the readers' contract that needs a kernel that gives bad answers: it is asked through a FUSE mount."""

# ruff: noqa: D102 - the name of a test is its sentence

from __future__ import annotations

import errno
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np
import pytest

from shardkit.errors import ShortReadError, StorageError
from shardkit.testing.faulty_files import HANG, RIGHT, FaultyFiles, Reply, faulty_files
from shardkit.testing.mounts import NoMountsError
from shardkit.testing.reading import ReaderCase, open_descriptors, read_extents

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from shardkit.storage.reader import Pending, Reader

__all__ = ["FailingReads"]

_BYTES = 200_001
_SOON_S = 20.0


class FailingReads(ReaderCase):
    """Laws of a reader whose file system misbehaves; part of `ReaderContract`."""

    @pytest.fixture(scope="class")
    @classmethod
    def faulty_mount(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultyFiles]:
        """Mount a folder whose reads follow scripts."""
        mounted = faulty_files(tmp_path_factory.mktemp("faulty") / "files")
        try:
            files = mounted.__enter__()
        except NoMountsError as error:
            pytest.skip(f"a file system that fails on demand needs root and FUSE: {error}")
        try:
            yield files
        finally:
            mounted.__exit__(None, None, None)

    @pytest.fixture
    def faulty(self, faulty_mount: FaultyFiles, content: bytes) -> Iterator[FaultyFiles]:
        """Give that folder with two files in it, "a" and "b", that hold the same."""
        for name in ("a", "b"):
            (faulty_mount.backing / name).write_bytes(content)
            faulty_mount.script(name)
        yield faulty_mount
        faulty_mount.release()

    @pytest.fixture
    def content(self) -> bytes:
        """Return what "a" and "b" hold."""
        return np.random.default_rng(11).bytes(_BYTES)

    @pytest.fixture
    def faulty_reader(self, faulty: FaultyFiles) -> Iterator[Reader]:
        """Open both files with the backend under test."""
        reader = self.make_reader([faulty.path / "a", faulty.path / "b"])
        yield reader
        faulty.release()
        reader.close()

    # Answers that are fewer bytes than asked for

    @pytest.mark.parametrize("most", [100, 511, 4095, 4096, 4097, 10_000, 65_536])
    def test_short_reads_are_continued(
        self, faulty: FaultyFiles, faulty_reader: Reader, content: bytes, most: int
    ) -> None:
        faulty.script("a", Reply(most=most), RIGHT, Reply(most=most))
        assert read_extents(faulty_reader, [(0, 5, 150_000)]) == [content[5:150_005]]

    def test_reads_that_are_always_short_are_continued_to_the_last_byte(
        self, faulty: FaultyFiles, faulty_reader: Reader, content: bytes
    ) -> None:
        faulty.script("a", Reply(most=8192 + 100), forever=True)
        assert read_extents(faulty_reader, [(0, 0, _BYTES)]) == [content]
        with pytest.raises(ShortReadError, match=f"found {_BYTES} bytes"):
            read_extents(faulty_reader, [(0, 0, _BYTES + 1)])

    # Answers that are errors

    def test_a_read_that_was_interrupted_is_repeated(
        self, faulty: FaultyFiles, faulty_reader: Reader, content: bytes
    ) -> None:
        faulty.script(
            "a", Reply(error=errno.EINTR), Reply(error=errno.EINTR), Reply(most=8192), Reply(error=errno.EINTR)
        )
        assert read_extents(faulty_reader, [(0, 4096, 50_000)]) == [content[4096:54_096]]

    def test_an_error_of_the_device_is_raised_once_and_not_repeated(
        self, faulty: FaultyFiles, faulty_reader: Reader, content: bytes
    ) -> None:
        faulty.script("a", Reply(error=errno.EIO))
        with pytest.raises(StorageError, match="EIO") as caught:
            read_extents(faulty_reader, [(1, 0, 10), (0, 8192, 50_000), (1, 8192, 10)])
        found = (caught.value.errno, caught.value.path, caught.value.offset)
        assert found == (errno.EIO, str(faulty.path / "a"), 8192)
        assert read_extents(faulty_reader, [(0, 8192, 50_000)]) == [content[8192:58_192]]

    def test_a_stale_file_is_opened_once_more_by_name(
        self, faulty: FaultyFiles, faulty_reader: Reader, content: bytes
    ) -> None:
        wanted, expected = [(0, 4096, 60_000), (1, 0, 9)], [content[4096:64_096], content[:9]]
        assert read_extents(faulty_reader, wanted) == expected
        faulty.script("a", Reply(error=errno.ESTALE))
        assert read_extents(faulty_reader, wanted) == expected

    def test_a_file_that_stays_stale_is_an_error(self, faulty: FaultyFiles, faulty_reader: Reader) -> None:
        faulty.script("a", Reply(error=errno.ESTALE), forever=True)
        with pytest.raises(StorageError, match="ESTALE") as caught:
            read_extents(faulty_reader, [(0, 4096, 100)])
        assert caught.value.path == str(faulty.path / "a")

    # Files that are no longer what they were

    def test_a_file_of_another_size_under_the_same_name_is_an_error(
        self, faulty: FaultyFiles, faulty_reader: Reader, content: bytes
    ) -> None:
        assert read_extents(faulty_reader, [(0, 0, 9)]) == [content[:9]]
        (faulty.backing / "a").write_bytes(content + b"more")
        faulty.script("a", Reply(error=errno.ESTALE))
        with pytest.raises(StorageError, match=rf"replaced or cut.*expected {_BYTES} bytes.*found {_BYTES + 4} bytes"):
            read_extents(faulty_reader, [(0, 0, 9)])

    def test_another_file_of_the_same_size_is_an_error(
        self, faulty: FaultyFiles, faulty_reader: Reader, content: bytes
    ) -> None:
        assert read_extents(faulty_reader, [(0, 0, 9)]) == [content[:9]]
        new = faulty.backing / "new"
        new.write_bytes(content[::-1])
        os.utime(new, ns=(0, 10**9))
        new.replace(faulty.backing / "a")
        faulty.script("a", Reply(error=errno.ESTALE))
        with pytest.raises(StorageError, match=r"replaced or cut.* inode \d+.* inode \d+"):
            read_extents(faulty_reader, [(0, 0, 9)])

    def test_a_new_inode_with_the_old_time_of_change_is_the_same_file(
        self, faulty: FaultyFiles, faulty_reader: Reader, content: bytes
    ) -> None:
        before = (faulty.backing / "a").stat()
        assert read_extents(faulty_reader, [(0, 0, 9)]) == [content[:9]]
        new = faulty.backing / "new"
        new.write_bytes(content)
        os.utime(new, ns=(before.st_atime_ns, before.st_mtime_ns))
        new.replace(faulty.backing / "a")
        faulty.script("a", Reply(error=errno.ESTALE))
        assert read_extents(faulty_reader, [(0, 0, 9)]) == [content[:9]]

    # Answers that do not come

    def test_the_oldest_read_is_told_while_it_hangs(
        self, faulty: FaultyFiles, faulty_reader: Reader, content: bytes
    ) -> None:
        assert faulty_reader.oldest() is None
        faulty.script("b", HANG)
        with ThreadPoolExecutor(1) as threads:
            stuck = threads.submit(read_extents, faulty_reader, [(0, 0, 10), (1, 8192, 10), (0, 8192, 10)])
            try:
                faulty.wait_for_hung()
                pending = self._oldest_is(faulty_reader, str(faulty.path / "b"))
                time.sleep(0.05)
                later = faulty_reader.oldest()
                assert later is not None
                assert (later.path, later.offset) == (pending.path, pending.offset) == (str(faulty.path / "b"), 8192)
                assert pending.seconds + 0.05 <= later.seconds < _SOON_S
            finally:
                faulty.release()
            expected = [content[:10], content[8192:8202], content[8192:8202]]
            assert stuck.result(timeout=_SOON_S) == expected
        assert faulty_reader.oldest() is None

    def test_a_read_that_hangs_holds_up_no_other_call(
        self, faulty: FaultyFiles, faulty_reader: Reader, content: bytes
    ) -> None:
        faulty.script("b", HANG)
        with ThreadPoolExecutor(2) as threads:
            stuck = threads.submit(read_extents, faulty_reader, [(1, 0, 10)])
            try:
                faulty.wait_for_hung()
                free = threads.submit(read_extents, faulty_reader, [(1, 50_000, 10), (1, 90_000, 10)])
                assert free.result(timeout=_SOON_S) == [content[50_000:50_010], content[90_000:90_010]]
            finally:
                faulty.release()
            assert stuck.result(timeout=_SOON_S) == [content[:10]]

    def test_nothing_is_left_open_or_running_after_failures(self, faulty: FaultyFiles, files: list[Path]) -> None:
        before, threads = open_descriptors(), threading.active_count()
        reader = self.make_reader([faulty.path / "a", faulty.path / "b", *files])
        for error in (errno.EIO, errno.ESTALE, errno.ENOMEM):
            faulty.script("a", Reply(error=error), forever=True)
            with pytest.raises(StorageError):
                read_extents(reader, [(2, 0, 10), (1, 0, 10), (0, 0, 10), (0, 9000, 10)], max_bytes=1)
        reader.close()
        assert open_descriptors() == before
        assert threading.active_count() == threads

    @staticmethod
    def _oldest_is(reader: Reader, path: str) -> Pending:
        """Return the oldest read as soon as it is one of this file: others may end a moment later."""
        until = time.monotonic() + _SOON_S
        while True:
            pending = reader.oldest()
            if pending is not None and pending.path == path:
                return pending
            assert time.monotonic() < until, f"{pending} is told instead"
            time.sleep(0.005)
