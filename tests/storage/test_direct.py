from __future__ import annotations

import errno
import logging
import mmap
import os
from typing import TYPE_CHECKING

import pytest

from shardkit.errors import CapabilityError, ConfigError, StorageError
from shardkit.extent import Extent
from shardkit.storage.direct import DirectReader
from shardkit.storage.reader import DIRECT, PAGE_CACHE, ReadOp
from shardkit.testing.failing_reads import FailingReads
from shardkit.testing.faulty_files import Reply
from shardkit.testing.readers import ReaderContract
from shardkit.testing.reading import read_extents

if TYPE_CHECKING:
    from pathlib import Path


class TestDirectReader(ReaderContract):
    def make_reader(self, paths):
        return DirectReader(paths)

    @pytest.fixture
    def folder(self, disk):
        return disk

    @pytest.fixture
    def failing(self, lost_blocks):
        return lost_blocks, 0


class TestDirectReaderWithPageAlignment(ReaderContract):
    def make_reader(self, paths):
        return DirectReader(paths, align=4096, threads=2, max_open=2)

    @pytest.fixture
    def folder(self, disk):
        return disk

    failing = TestDirectReader.failing


class TestDirectReaderOnSectorsOf4096(ReaderContract):
    def make_reader(self, paths):
        return DirectReader(paths)

    @pytest.fixture
    def folder(self, blocks_of_4096):
        return blocks_of_4096

    failing = TestDirectReader.failing


def write(path: Path, data: bytes) -> Path:
    with path.open("wb") as file:
        file.write(data)
        os.fsync(file.fileno())
    return path


def test_the_bytes_do_not_come_from_the_page_cache(disk):
    data = os.urandom(50_000)
    reader = DirectReader([write(disk / "a", data)])
    assert read_extents(reader, [(0, 100, 40_000)]) == [data[100:40_100]]
    assert reader.counters[DIRECT] >= 40_100
    assert reader.counters[PAGE_CACHE] == 0
    assert reader.refused == 0
    reader.close()


def test_the_device_states_its_alignment(blocks_of_4096, disk):
    coarse, fine = write(blocks_of_4096 / "a", b"a" * 5000), write(disk / "b", b"b" * 5000)
    reader = DirectReader([coarse])
    assert reader.align == 4096
    reader.close()
    reader = DirectReader([fine, coarse])  # the larger demand binds both
    assert reader.align == 4096
    assert read_extents(reader, [(0, 4999, 1), (1, 4999, 1)]) == [b"b", b"a"]
    assert reader.counters[PAGE_CACHE] == 0
    reader.close()


def test_a_file_that_refuses_the_read_is_served_by_the_page_cache_and_counted(blocks_of_4096, disk, caplog):
    data = os.urandom(30_000)
    paths = [write(blocks_of_4096 / "a", data), write(disk / "b", data), write(blocks_of_4096 / "c", data)]
    reader = DirectReader(paths, align=512, threads=1)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            wanted = [(0, 512, 700), (1, 512, 512), (2, 512, 700)]
            assert read_extents(reader, wanted) == [data[512:1212], data[512:1024], data[512:1212]]
    assert reader.refused == 2
    assert reader.counters[PAGE_CACHE] in range(6 * 700, 6 * 1024 + 1)
    assert reader.counters[DIRECT] in range(3 * 512, 3 * 1024 + 1)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "refuses direct reads of 1024 bytes at 512 (EINVAL); its file system is ext4" in caplog.text
    reader.close()


def test_refusals_are_said_once_for_each_mount(blocks_of_4096, lost_blocks, disk, caplog):
    other = write(lost_blocks.parent / "b", b"b" * 9000)  # another mount with sectors of 4096 bytes
    paths = [write(blocks_of_4096 / "a", b"a" * 9000), write(blocks_of_4096 / "c", b"c" * 9000), other]
    reader = DirectReader(paths, align=512, threads=1)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert read_extents(reader, [(0, 512, 1), (1, 512, 1), (2, 512, 1)]) == [b"a", b"c", b"b"]
    said = [record.getMessage().split(" ")[0] for record in caplog.records]
    assert said == [str(paths[0]), str(other)]
    assert reader.refused == 3
    reader.close()


class TestRefusedByTheKernel(FailingReads):
    def make_reader(self, paths):
        return DirectReader(paths)

    def test_a_read_that_is_refused_after_a_good_open_is_made_once_more_through_the_page_cache(
        self, faulty, faulty_reader, content
    ):
        faulty.script("a", Reply(error=errno.EINVAL))
        assert read_extents(faulty_reader, [(0, 0, 50_000), (1, 0, 9)]) == [content[:50_000], content[:9]]
        assert faulty_reader.refused == 1
        assert faulty_reader.counters[PAGE_CACHE] >= 50_000
        assert faulty_reader.counters[DIRECT] in range(9, 4097)

    def test_a_read_that_the_page_cache_refuses_too_is_an_error(self, faulty, faulty_reader):
        faulty.script("a", Reply(error=errno.EINVAL), forever=True)
        with pytest.raises(StorageError, match="EINVAL") as caught:
            read_extents(faulty_reader, [(0, 8192, 50_000)])
        assert (caught.value.path, caught.value.offset) == (str(faulty.path / "a"), 8192)
        assert len(faulty.reads("a")) == 2


@pytest.mark.parametrize("most", [512, 700, 4096, 5000])
def test_short_reads_are_continued_at_a_block(disk, monkeypatch, most):
    data = os.urandom(60_000)
    real, offsets = os.preadv, list[int]()

    def short(descriptor, buffers, offset):
        offsets.append(offset)
        return min(real(descriptor, buffers, offset), most)

    reader = DirectReader([write(disk / "a", data)], align=512)
    monkeypatch.setattr(os, "preadv", short)
    assert read_extents(reader, [(0, 1000, 59_000)]) == [data[1000:]]
    assert all(offset % 512 == 0 for offset in offsets)
    assert reader.counters[PAGE_CACHE] == 0
    reader.close()


def test_reads_shorter_than_a_block_go_to_the_page_cache(disk, monkeypatch):
    data = os.urandom(60_000)
    real, calls = os.preadv, list[int]()

    def crippled(descriptor, buffers, offset):
        calls.append(offset)
        count = real(descriptor, buffers, offset)
        return min(count, 100) if len(calls) == 1 else count

    reader = DirectReader([write(disk / "a", data)], align=4096)
    monkeypatch.setattr(os, "preadv", crippled)
    assert read_extents(reader, [(0, 0, 50_000)]) == [data[:50_000]]
    assert (reader.refused, reader.counters) == (1, {DIRECT: 0, PAGE_CACHE: 53_248})
    reader.close()


def test_a_stale_handle_is_opened_once_more_by_name(disk, monkeypatch):
    data = os.urandom(9000)
    real, failed = os.preadv, list[int]()

    def once_stale(*arguments):
        if not failed:
            failed.append(1)
            raise OSError(errno.ESTALE, "Stale file handle")
        return real(*arguments)

    reader = DirectReader([write(disk / "a", data)])
    monkeypatch.setattr(os, "preadv", once_stale)
    assert read_extents(reader, [(0, 0, 9000)]) == [data]
    reader.close()


def test_a_file_system_without_direct_reads_is_named(ramfs):
    write(ramfs / "a", b"abc")
    with pytest.raises(CapabilityError, match=r"ram/a; .* found ramfs: EINVAL .* at open") as caught:
        DirectReader([ramfs / "a"])
    assert caught.value.exit_code == 7


def test_one_file_of_many_without_direct_reads_is_named_when_it_is_read(ramfs, disk):
    write(ramfs / "far", b"abc")
    near = write(disk / "near", b"abc")
    (disk / "link").symlink_to(ramfs / "far")  # looks like a neighbour
    reader = DirectReader([near, disk / "link"])
    with pytest.raises(CapabilityError, match=r"link; .* found ramfs: EINVAL at open"):
        read_extents(reader, [(1, 0, 3)])
    assert read_extents(reader, [(0, 0, 3)]) == [b"abc"]
    reader.close()


def test_a_missing_file_is_no_matter_of_capability(disk):
    with pytest.raises(StorageError, match="ENOENT"):
        DirectReader([disk / "gone"])


def test_no_paths_at_all_is_a_reader_with_nothing_to_read():
    reader = DirectReader([])
    assert reader.align == 4096
    with pytest.raises(ConfigError, match="was not given"):
        reader.read_into([ReadOp(0, Extent(0, 4096), memoryview(mmap.mmap(-1, 4096)), 1)])
    reader.close()
