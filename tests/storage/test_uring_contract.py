from __future__ import annotations

import os

import pytest

from shardkit.storage import uring_causes
from shardkit.storage.uring import UringReader
from shardkit.testing.readers import ReaderContract
from shardkit.testing.rings import needs_uring

pytestmark = needs_uring


class Contract(ReaderContract):
    @pytest.fixture(autouse=True)
    def fuse_is_let_in(self, monkeypatch):
        """The contract's errors come from FUSE; what the kernel does wrong with it (see UNFIT) is left out below."""
        monkeypatch.setattr(uring_causes, "UNFIT", ())

    # Short answers of FUSE are the very thing that the kernel continues wrongly, and it waits for them in the system
    # call that hands them over. So short reads are made in another way, in test_uring.py, and in test_uring_hangs.py
    # a disk hangs.
    test_short_reads_are_continued = None
    test_reads_that_are_always_short_are_continued_to_the_last_byte = None
    test_the_oldest_read_is_told_while_it_hangs = None
    test_a_read_that_hangs_holds_up_no_other_call = None


class TestUringReader(Contract):
    def make_reader(self, paths):
        return UringReader(paths)

    @pytest.fixture
    def folder(self, disk):
        return disk

    @pytest.fixture
    def failing(self, lost_blocks):
        return lost_blocks, 0


class TestUringReaderThroughThePageCache(Contract):
    def make_reader(self, paths):
        return UringReader(paths, direct=False)

    folder = TestUringReader.folder

    @pytest.fixture
    def failing(self, lost_blocks):
        with lost_blocks.open("rb") as file:  # what is still cached would be read
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return lost_blocks, 0


class TestUringReaderWithPageAlignment(Contract):
    def make_reader(self, paths):
        return UringReader(paths, align=4096, depth=3, rings=1, max_open=2)

    folder = TestUringReader.folder
    failing = TestUringReader.failing


class TestUringReaderOnSectorsOf4096(Contract):
    def make_reader(self, paths):
        return UringReader(paths)

    @pytest.fixture
    def folder(self, blocks_of_4096):
        return blocks_of_4096

    failing = TestUringReader.failing


class TestUringReaderWithOneDescriptor(Contract):
    def make_reader(self, paths):
        return UringReader(paths, rings=3, depth=4, max_open=1)

    folder = TestUringReader.folder
    failing = TestUringReader.failing
