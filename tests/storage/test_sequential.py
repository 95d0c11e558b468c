"""A file read once, front to back: every byte, in order, whatever the block size and the path it takes."""

from __future__ import annotations

import errno
import os

import pytest

from shardkit.errors import CapabilityError, ShortReadError, StorageError
from shardkit.extent import Extent
from shardkit.storage.sequential import SequentialReader

PAGE = 4096


@pytest.fixture
def file(tmp_path):
    def make(size):
        path = tmp_path / "file"
        path.write_bytes(bytes(i * 31 % 251 for i in range(size)))
        return path

    return make


def read(path, extents=None, **options):
    with SequentialReader(path, **options) as reader:
        blocks = reader.blocks([Extent(0, reader.size)] if extents is None else extents)
        return [(offset, bytes(block)) for offset, block in blocks]


@pytest.mark.parametrize("size", [0, 1, 511, 512, PAGE - 1, PAGE, PAGE + 1, 5 * PAGE - 1, 5 * PAGE, 5 * PAGE + 1])
@pytest.mark.parametrize("block", [PAGE, 2 * PAGE, 16 * PAGE])
@pytest.mark.parametrize("direct", [None, False])
def test_every_byte_arrives_once_and_in_order(file, size, block, direct):
    path = file(size)
    blocks = read(path, direct=direct, block_bytes=block)
    assert b"".join(data for _, data in blocks) == path.read_bytes()
    assert [offset for offset, _ in blocks] == list(range(0, size, block))


def test_only_the_pages_of_the_extents_are_read(file):
    path = file(20 * PAGE)
    blocks = read(
        path, [Extent(10, 20), Extent(3 * PAGE + 1, 2 * PAGE), Extent(20 * PAGE - 1, 1)], block_bytes=2 * PAGE
    )
    assert [(offset // PAGE, len(data)) for offset, data in blocks] == [
        (0, PAGE), (3, 2 * PAGE), (5, PAGE), (19, PAGE)
    ]  # fmt: skip
    whole = path.read_bytes()
    assert all(whole[offset : offset + len(data)] == data for offset, data in blocks)


def test_a_block_is_valid_until_the_next_one_is_asked_for(file):
    path = file(9 * PAGE)
    whole = path.read_bytes()
    with SequentialReader(path, block_bytes=PAGE) as reader:
        for offset, block in reader.blocks([Extent(0, reader.size)]):
            assert bytes(block) == whole[offset : offset + PAGE]


def test_a_file_that_ends_early_is_told_with_the_place(file):
    path = file(4 * PAGE)
    with SequentialReader(path, block_bytes=PAGE, direct=False) as reader:
        blocks = reader.blocks([Extent(0, reader.size)])
        next(blocks)
        os.truncate(path, 2 * PAGE + 5)
        with pytest.raises(ShortReadError) as caught:
            list(blocks)
        assert caught.value.offset in {2 * PAGE, 2 * PAGE + 5, 3 * PAGE}  # the third page may have been read ahead
        assert reader.changed()


@pytest.mark.parametrize("change", ["write", "replace", "remove", "touch"])
def test_a_change_is_noticed(file, change):
    path = file(PAGE)
    with SequentialReader(path) as reader:
        assert not reader.changed()
        if change == "write":
            path.write_bytes(b"x" * PAGE)
        elif change == "replace":
            (path.parent / "other").write_bytes(path.read_bytes())
            (path.parent / "other").rename(path)
        elif change == "remove":
            path.unlink()
        else:
            os.utime(path, ns=(1, 1))
        assert reader.changed()


def test_what_is_no_file_is_refused_without_waiting(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    for name in ("fifo", "."):
        with pytest.raises(StorageError):
            SequentialReader(tmp_path / name)
    with pytest.raises(StorageError) as caught:
        SequentialReader(tmp_path / "absent")
    assert caught.value.errno == errno.ENOENT


def test_a_file_system_without_direct_reads_is_read_through_the_cache_unless_direct_is_demanded():
    path = "/proc/version"  # no file system of the kernel's own text takes O_DIRECT
    with SequentialReader(path) as reader:
        assert reader.read_path == "page cache"
    with pytest.raises(CapabilityError, match="O_DIRECT"):
        SequentialReader(path, direct=True)


def test_a_hole_is_found_where_it_starts(tmp_path):
    path = tmp_path / "sparse"
    with open(path, "wb") as file:
        file.write(b"x" * 4 * PAGE)
        file.truncate(64 * PAGE)
        file.seek(64 * PAGE)
        file.write(b"x" * PAGE)
        file.flush()
        os.fsync(file.fileno())
    with SequentialReader(path, direct=False) as reader:
        assert reader.first_hole(Extent(0, 4 * PAGE)) is None
        assert reader.first_hole(Extent(64 * PAGE, PAGE)) is None
        assert reader.first_hole(Extent(PAGE, 8 * PAGE)) == 4 * PAGE
        assert reader.first_hole(Extent(10 * PAGE, PAGE)) == 10 * PAGE


def test_closing_twice_is_fine(file):
    reader = SequentialReader(file(1))
    reader.close()
    reader.close()
