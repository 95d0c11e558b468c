"""From ids to bytes in memory: the right ones, in few reads, not copied, checked where that was asked for."""

from __future__ import annotations

import io
import itertools
import os
import shutil
import tarfile
import tempfile

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageOps

from shardkit.dataset.reading import GAP_BYTES, SampleReader
from shardkit.dataset.samples import Part, Samples
from shardkit.dataset.shardset import open_dataset
from shardkit.dataset.source import Step, encoded_batch
from shardkit.errors import IntegrityError, ShortReadError, StorageError
from shardkit.format.checksum import crc32c
from shardkit.storage.buffered import BufferedReader
from shardkit.storage.buffers import aligned_memory
from shardkit.testing.damage import flip_byte
from shardkit.testing.datasets import draft_dataset
from shardkit.testing.images import Picture, corners, jpeg_bytes, write_pictures

COUNTS = (7, 1, 12, 4)
TOTAL = sum(COUNTS)
SIZES = (401, 512, 4096, 9001, 30000)
BACKENDS = pytest.mark.parametrize("backend", ["buffered", "direct"])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return draft_dataset(COUNTS, sizes=SIZES).write(tmp_path_factory.mktemp("reading") / "ds")


def read(on, ids):
    """Read samples into memory of the pool; return what was planned and what came."""
    reads = on.reader.plan(np.asarray(ids, np.int64))
    return reads, on.reader.read(reads, on.pool.acquire(reads.nbytes))


def first_image_of(folder, shard=0):
    """Return name, offset and bytes of the first image of a shard, as Python's tarfile sees it."""
    path = sorted(folder.glob("*.tar"))[shard]
    with tarfile.open(path) as tar:
        member = next(one for one in tar if one.name.endswith(".jpg"))
        return path, member.offset_data, tar.extractfile(member).read()


# --- the right bytes -------------------------------------------------------------------------------------------------


@BACKENDS
@pytest.mark.parametrize("metadata", [False, True])
def test_bytes_are_those_of_the_samples(stack, folder, backend, metadata):
    on = stack(folder, io=backend, metadata=metadata)
    rng = np.random.default_rng(0)
    lists = [rng.integers(0, TOTAL, size) for size in (0, 1, 5, 70)] + [np.arange(TOTAL), np.arange(TOTAL)[::-1]]
    with open_dataset(folder) as dataset:
        for ids in lists:
            reads, payloads = read(on, ids)
            truth = [dataset[i] for i in ids]
            assert [view.tobytes() for view in payloads.views] == [sample.jpeg for sample in truth]
            assert payloads.metadata == ([sample.metadata for sample in truth] if metadata else None)
            assert payloads.bad == {}
            assert reads.ids.tolist() == ids.tolist()
            assert reads.located.label.tolist() == [sample.label for sample in truth]


@given(ids=st.lists(st.integers(0, TOTAL - 1), max_size=40))
def test_any_samples_are_read_right(folder, ids):
    with open_dataset(folder) as dataset:
        storage = BufferedReader(dataset.shard_paths, threads=1)
        _, payloads = SampleReader(Samples([Part(dataset)]), storage).read_alone(np.asarray(ids, np.int64))
        assert [view.tobytes() for view in payloads.views] == [dataset[i].jpeg for i in ids]
        storage.close()


@BACKENDS
def test_several_data_sets_are_read_at_once(stack, folder, tmp_path, backend):
    other = draft_dataset((3,), name="other", sizes=(777,)).write(tmp_path / "other")
    on = stack(folder, other, io=backend)
    _, payloads = read(on, [TOTAL + 1, 0, TOTAL])
    with open_dataset(folder) as one, open_dataset(other) as two:
        truth = [two[1].jpeg, one[0].jpeg, two[0].jpeg]
    assert [view.tobytes() for view in payloads.views] == truth


def test_a_sample_without_json_has_an_empty_object(stack, tmp_path):
    pictures = [Picture(f"k{i}", jpeg_bytes(corners(16)), 0, {"n": i} if i % 2 else None) for i in range(4)]
    on = stack(write_pictures(tmp_path / "ds", pictures), metadata=True)
    assert read(on, range(4))[1].metadata == [{}, {"n": 1}, {}, {"n": 3}]


@pytest.mark.parametrize("orientation", range(9))
def test_sides_are_those_of_the_image_as_shown(stack, tmp_path, orientation):
    jpeg = jpeg_bytes(corners(32)[:20], orientation=orientation or None)
    on = stack(write_pictures(tmp_path / "ds", [Picture("a", jpeg, 0)]))
    reads, payloads = read(on, [0])
    batch = encoded_batch(on.source, Step(0, 0, np.arange(1)), reads.ids, reads.located, payloads)
    shown = ImageOps.exif_transpose(Image.open(io.BytesIO(jpeg))).size
    assert (batch.width[0], batch.height[0]) == shown
    assert shown == ((20, 32) if orientation >= 5 else (32, 20))


# --- few reads, no copies --------------------------------------------------------------------------------------------


@BACKENDS
def test_views_lie_in_the_ring_so_nothing_was_copied(stack, folder, backend):
    on = stack(folder, io=backend, metadata=True, crc=True)
    ring = np.frombuffer(on.pool.memory, np.uint8)
    _, payloads = read(on, np.arange(TOTAL))
    assert all(np.shares_memory(view, ring) for view in payloads.views)
    spread = sorted((view.ctypes.data, view.size) for view in payloads.views)
    assert all(start + size <= after for (start, size), (after, _) in itertools.pairwise(spread))


def test_a_sample_that_comes_twice_is_read_once(stack, folder):
    on = stack(folder)
    _, payloads = read(on, [4] * 50)
    assert {view.ctypes.data for view in payloads.views} == {payloads.views[0].ctypes.data}
    assert sum(on.storage.counters.values()) == 30000


@BACKENDS
def test_neighbours_are_read_in_one_piece(stack, folder, backend):
    on = stack(folder, io=backend)
    reads, _ = read(on, np.arange(COUNTS[0]))
    assert len(reads.plan.span_file) == 1
    wanted = int(reads.located.size.sum())
    assert wanted <= sum(on.storage.counters.values()) <= reads.nbytes < wanted + COUNTS[0] * 8192


def test_what_lies_far_apart_is_not_read_along(stack, tmp_path):
    on = stack(draft_dataset((9,), sizes=(GAP_BYTES, 500)).write(tmp_path / "ds"))
    near, _ = read(on, [0, 2])  # a small image between them
    far, _ = read(on, [1, 3])  # a large one
    assert (len(near.plan.span_file), len(far.plan.span_file)) == (1, 2)
    assert sum(on.storage.counters.values()) < 2 * GAP_BYTES + 3 * 500 + 3 * 4096


def test_one_read_is_not_longer_than_its_limit(stack, tmp_path):
    on = stack(draft_dataset((40,), sizes=(90_000,)).write(tmp_path / "ds"))
    reads, _ = read(on, np.arange(40))
    assert len(reads.plan.span_file) >= 4
    assert reads.plan.span_length.max() <= on.storage.span_bytes


@pytest.mark.parametrize("align", [1, 512, 4096, 65536])
@pytest.mark.parametrize("length", [0, 1, 4096, 70000])
def test_memory_of_its_own_is_aligned(align, length):
    memory = aligned_memory(length, align)
    assert (memory.nbytes, memory.readonly) == (length, False)
    if length:
        assert np.frombuffer(memory, np.uint8).ctypes.data % align == 0


# --- shards that cannot be read --------------------------------------------------------------------------------------


@BACKENDS
@pytest.mark.parametrize("kept", [0, 1, 100])
def test_a_short_shard_names_the_first_sample_that_it_hit(stack, tmp_path, backend, kept):
    folder = draft_dataset((3, 3), sizes=(5000,)).write(tmp_path / "ds")
    on = stack(folder, io=backend)
    offset = int(on.samples.gather("offset", np.array([4]))[0])
    os.truncate(folder / "tiny-000001.tar", offset + kept)
    with pytest.raises(ShortReadError) as caught:
        read(on, [5, 0, 4, 3])
    found = (caught.value.key, caught.value.path, caught.value.offset)
    assert found == ("c/0004", str(folder / "tiny-000001.tar"), offset)
    assert read(on, [3, 2])[1].bad == {}


@BACKENDS
def test_a_shard_that_vanished_names_the_first_sample_wanted_of_it(stack, tmp_path, backend):
    folder = draft_dataset((3, 3)).write(tmp_path / "ds")
    on = stack(folder, io=backend)
    (folder / "tiny-000001.tar").unlink()
    with pytest.raises(StorageError, match=r"tiny-000001\.tar:\d+ \[sample c/0004\].*ENOENT"):
        read(on, [5, 0, 4])


def test_damaged_json_is_named(stack, tmp_path):
    draft = draft_dataset((3,))
    draft.shards[0].tar[draft.shards[0].rows[1].json_offset] = ord("]")
    on = stack(draft.write(tmp_path / "ds"), metadata=True)
    with pytest.raises(IntegrityError, match=r"tiny-000000\.tar:\d+ \[sample c/0001\]"):
        read(on, range(3))
    assert len(read(on, [0, 2])[1].metadata) == 2


# --- checksums -------------------------------------------------------------------------------------------------------


class WrongAtFirst(BufferedReader):
    """A reader that turns one bit of what it reads around, as a page that went bad in memory does."""

    def read_into(self, ops, /):
        super().read_into(ops)
        ops[0].dst[500] ^= 1


@BACKENDS
def test_a_byte_that_is_wrong_in_the_file_is_a_bad_sample(stack, tmp_path, backend):
    folder = draft_dataset((5,), sizes=(9000,)).write(tmp_path / "ds")
    path, offset, jpeg = first_image_of(folder)
    flip_byte(path, offset + 5000)
    wrong = bytearray(jpeg)
    wrong[5000] ^= 1
    on = stack(folder, io=backend, crc=True)
    _, payloads = read(on, [2, 0, 1])
    assert list(payloads.bad) == [1]
    assert f"{crc32c(jpeg):08x}" in payloads.bad[1]
    assert f"{crc32c(wrong):08x}" in payloads.bad[1]
    assert on.reader.crc_retries == 0
    assert stack(folder, io=backend).reader.read_alone(np.array([0]))[1].bad == {}  # nobody asked


def test_a_byte_that_is_wrong_in_memory_is_found_right_past_the_page_cache(stack, tmp_path):
    folder = draft_dataset((5,), sizes=(9000,)).write(tmp_path / "ds")
    _, _, jpeg = first_image_of(folder)
    without = stack(folder, storage=WrongAtFirst)
    assert read(without, [0, 3])[1].views[0].tobytes() != jpeg
    on = stack(folder, storage=WrongAtFirst, crc=True)
    _, payloads = read(on, [0, 3])
    assert payloads.bad == {}
    assert payloads.views[0].tobytes() == jpeg
    assert on.reader.crc_retries == 1


def test_the_page_cache_is_dropped_where_there_are_no_direct_reads(stack, folder):
    # tmpfs takes no O_DIRECT before Linux 6.6; where it does, this is the same law once more.
    if not os.path.isdir("/dev/shm"):
        pytest.skip("there is no tmpfs at /dev/shm")
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="shardkit-") as memory:
        copy = shutil.copytree(folder, os.path.join(memory, "ds"))
        on = stack(copy, storage=WrongAtFirst, crc=True)
        _, payloads = read(on, [4])
        with open_dataset(folder) as dataset:
            assert payloads.views[0].tobytes() == dataset[4].jpeg
        assert (payloads.bad, on.reader.crc_retries) == ({}, 1)
        on.samples.close()


def test_a_shard_that_vanishes_between_the_two_looks_names_the_sample(stack, tmp_path):
    folder = draft_dataset((5,), sizes=(9000,)).write(tmp_path / "ds")

    class Vanishing(WrongAtFirst):
        def read_into(self, ops, /):
            super().read_into(ops)
            (folder / "tiny-000000.tar").unlink()

    on = stack(folder, storage=Vanishing, crc=True)
    with pytest.raises(StorageError, match=r"tiny-000000\.tar.*\[sample c/0003\].*ENOENT"):
        read(on, [3, 4])


def test_a_sample_that_is_bad_anyway_is_not_looked_at_again(stack, tmp_path):
    folder = draft_dataset((5,), sizes=(9000,)).write(tmp_path / "ds")
    path, offset, _ = first_image_of(folder)
    flip_byte(path, offset)
    _, payloads = read(stack(folder, crc=True), [1, 0])
    assert list(payloads.bad) == [1]
    assert "CRC" not in payloads.bad[1]
