"""The contract of `shardkit.storage.reader.Reader` as tests: every backend's test module subclasses `ReaderContract`.

Truth is what plain `open(path, "rb").read()` returns. Every read goes through `coalesce`, so that the same is checked
as a loader does: extents in, spans read, extents cut out of the spans.
"""

# ruff: noqa: D102 - the name of a test is its sentence

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import resource
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np
import pytest

from shardkit.errors import ConfigError, ShortReadError, StorageError
from shardkit.extent import Extent, align_up
from shardkit.storage.reader import ReadOp
from shardkit.testing.failing_reads import FailingReads
from shardkit.testing.reading import (
    SIZES,
    SPAN,
    Wanted,
    few_descriptors,
    in_child,
    open_descriptors,
    read_extents,
    whole_span,
)

if TYPE_CHECKING:
    from pathlib import Path

    from shardkit.storage.reader import Reader

__all__ = ["ReaderContract"]

_LENGTHS = (0, 1, 511, 512, 4095, 4096, 4097, SPAN - 1, SPAN, SPAN + 1)
_PLACES = ("start", "block", "block + 1", "block - 1", "last block", "last byte", "to the end")


def _offset_of(place: str, size: int, length: int) -> int:
    return {
        "start": 0,
        "block": 4096,
        "block + 1": 4097,
        "block - 1": 4095,
        "last block": (size - 1) // 4096 * 4096,
        "last byte": size - 1,
        "to the end": size - length,
    }[place]


class ReaderContract(FailingReads):
    """Laws of a reader of host memory. A subclass, named Test..., defines `make_reader`."""

    # What arrives

    @pytest.mark.parametrize("place", _PLACES)
    @pytest.mark.parametrize("length", _LENGTHS)
    def test_bytes_are_those_of_plain_reading(
        self, reader: Reader, truth: list[bytes], place: str, length: int
    ) -> None:
        wanted = []
        for file, size in enumerate(SIZES):
            offset = _offset_of(place, size, length)
            wanted.append((file, offset, min(length, size - offset)))
        assert read_extents(reader, wanted) == [truth[f][o : o + n] for f, o, n in wanted]

    @pytest.mark.parametrize(("gap_bytes", "max_bytes"), [(0, 1), (0, 1 << 20), (8192, 40_000), (1 << 20, 1 << 20)])
    def test_many_extents_in_any_order_repeated_and_overlapping(
        self, reader: Reader, truth: list[bytes], gap_bytes: int, max_bytes: int
    ) -> None:
        random = np.random.default_rng(3)
        wanted: list[Wanted] = []
        for file in random.integers(0, len(truth), 300).tolist():
            offset = int(random.integers(0, SIZES[file]))
            wanted.append((file, offset, min(int(random.integers(0, 9000)), SIZES[file] - offset)))
        wanted += wanted[:20]
        found = read_extents(reader, wanted, gap_bytes=gap_bytes, max_bytes=max_bytes)
        assert found == [truth[f][o : o + n] for f, o, n in wanted]

    def test_only_the_destination_is_written(self, reader: Reader, truth: list[bytes]) -> None:
        page, size = 4096, SIZES[3]
        view = memoryview(mmap.mmap(-1, 7 * page))
        view[:] = b"\xa5" * len(view)
        reader.read_into(
            [
                ReadOp(3, Extent(page, page), view[page : 2 * page], page),
                ReadOp(3, Extent(align_up(size, page) - page, page), view[3 * page : 4 * page], size % page),
                ReadOp(0, Extent(0, page), view[5 * page : 6 * page], 10),
            ]
        )
        for untouched in (0, 2, 4, 6):
            assert bytes(view[untouched * page : (untouched + 1) * page]) == b"\xa5" * page
        assert bytes(view[page : 2 * page]) == truth[3][page : 2 * page]
        assert bytes(view[3 * page : 3 * page + size % page]) == truth[3][-(size % page) :]
        assert bytes(view[5 * page : 5 * page + 10]) == truth[0][:10]

    def test_nothing_is_read_for_nothing(self, folder: Path) -> None:
        reader = self.make_reader([folder])  # not even a file
        reader.read_into([])
        reader.read_into([ReadOp(0, Extent(0, 0), memoryview(bytearray()), 0)])
        assert sum(reader.counters.values()) == 0
        reader.close()

    def test_counters_tell_every_byte_that_arrived(self, reader: Reader) -> None:
        assert sum(reader.counters.values()) == 0
        read_extents(reader, [(0, 0, 8192), (1, 4096, 4096)])
        assert sum(reader.counters.values()) == 12_288
        read_extents(reader, [(0, 0, 8192)])
        assert sum(reader.counters.values()) == 20_480

    # What fails

    @pytest.mark.parametrize("file", range(len(SIZES)))
    def test_a_file_that_ends_early_is_named_with_what_was_there(
        self, reader: Reader, files: list[Path], file: int
    ) -> None:
        offset = 2 * SPAN
        there = SIZES[file] - offset
        assert len(read_extents(reader, [(file, offset, there)])[0]) == there
        with pytest.raises(ShortReadError) as caught:
            read_extents(reader, [(file, offset, there + 1)])
        assert (caught.value.path, caught.value.offset) == (str(files[file]), offset)
        assert f"expected {there + 1} bytes; found {there} bytes" in str(caught.value)

    def test_a_span_past_the_end_is_a_short_read(self, reader: Reader) -> None:
        with pytest.raises(ShortReadError, match="found 0 bytes"):
            read_extents(reader, [(0, 1 << 30, 1)])

    def test_a_file_cut_after_it_was_opened_shows_both_sizes(
        self, reader: Reader, files: list[Path], truth: list[bytes]
    ) -> None:
        wanted = [(1, SPAN, SPAN)]
        assert read_extents(reader, wanted) == [truth[1][SPAN : 2 * SPAN]]
        os.truncate(files[1], SPAN + 5)
        with pytest.raises(ShortReadError, match=f"found 5 bytes; the file has {SPAN + 5}, it had {SIZES[1]}"):
            read_extents(reader, wanted)

    def test_a_file_that_is_not_there_is_named(self, folder: Path) -> None:
        reader = self.make_reader([*self._one_file(folder), folder / "gone.bin"])
        with pytest.raises(StorageError, match=r"gone\.bin") as caught:
            read_extents(reader, [(1, 0, 10)])
        assert caught.value.errno == errno.ENOENT
        assert read_extents(reader, [(0, 0, 3)]) == [b"abc"]
        reader.close()

    @pytest.mark.parametrize("kind", ["folder", "pipe"])
    def test_what_is_no_file_is_refused_without_waiting_for_it(self, folder: Path, kind: str) -> None:
        path = folder / "strange"
        if kind == "folder":
            path.mkdir()
        else:
            os.mkfifo(path)
        reader = self.make_reader([*self._one_file(folder), path])
        with pytest.raises(StorageError, match=r"not a regular file: .*strange"):
            read_extents(reader, [(1, 0, 10)])
        reader.close()

    def test_a_failed_read_has_its_errno_path_and_offset(self, failing: tuple[Path, int]) -> None:
        path, offset = failing
        reader = self.make_reader([path])
        with pytest.raises(StorageError, match="EIO") as caught:
            read_extents(reader, [(0, offset, 4096)])
        assert (caught.value.errno, caught.value.path, caught.value.offset) == (errno.EIO, str(path), offset)
        reader.close()

    def test_of_several_failures_the_first_op_is_raised(self, folder: Path) -> None:
        paths = [folder / f"{number}.gone" for number in range(40)]
        reader = self.make_reader([*self._one_file(folder), *paths])
        for first in (1, 2, 7, 33):
            files = [0] * first + list(range(first, 41))
            view = memoryview(mmap.mmap(-1, 4096 * len(files)))
            ops = [
                ReadOp(file, Extent(0, reader.align), view[n * 4096 : n * 4096 + reader.align], 1)
                for n, file in enumerate(files)
            ]
            with pytest.raises(StorageError, match=f"/{first - 1}.gone"):
                reader.read_into(ops)
        reader.close()

    def test_neighbours_are_joined_to_long_spans(self, reader: Reader) -> None:
        assert reader.span_bytes >= 64 << 10
        assert reader.span_bytes % reader.align == 0

    def test_a_reader_goes_on_after_an_error(self, reader: Reader, truth: list[bytes]) -> None:
        for _ in range(3):
            with pytest.raises(ShortReadError):
                read_extents(reader, [(0, 0, 100), (0, SIZES[0], 1), (1, 0, 100)], max_bytes=1)
            assert read_extents(reader, [(0, 0, 100)]) == [truth[0][:100]]

    @pytest.mark.parametrize("file", [-1, len(SIZES)])
    def test_a_file_that_was_not_given_is_refused(self, reader: Reader, file: int) -> None:
        op = whole_span(reader, mmap.mmap(-1, 4096), file, 0, 1)
        with pytest.raises(ConfigError, match=f"found {file}"):
            reader.read_into([op])

    def test_a_misaligned_op_is_refused_before_anything_is_read(self, reader: Reader, truth: list[bytes]) -> None:
        align = reader.align
        if align == 1:  # no op is misaligned then
            odd = memoryview(bytearray(1001))[1:]
            reader.read_into([ReadOp(0, Extent(3, 1000), odd, 1000)])
            assert odd == truth[0][3:1003]
            return
        view = memoryview(mmap.mmap(-1, 4 * align))
        view[:] = b"\xa5" * len(view)
        good = ReadOp(0, Extent(0, align), view[:align], align)
        for bad in (
            ReadOp(0, Extent(1, align), view[align : 2 * align], align),
            ReadOp(0, Extent(0, align - 1), view[align : 2 * align - 1], 1),
            ReadOp(0, Extent(0, align), view[align + 1 : 2 * align + 1], align),
        ):
            with pytest.raises(ConfigError, match=f"multiples of {align}"):
                reader.read_into([good, bad])
        assert bytes(view) == b"\xa5" * len(view)

    # Descriptors, threads, ownership

    def test_more_files_than_descriptors(self, folder: Path) -> None:
        paths = [folder / f"{number}.bin" for number in range(60)]
        for number, path in enumerate(paths):
            path.write_bytes(bytes([number]) * 5000)
        reader = self.make_reader(paths)
        with few_descriptors(12):
            for _ in range(3):
                wanted = [(file, 100, 50) for file in range(60)]
                assert read_extents(reader, wanted) == [bytes([file]) * 50 for file in range(60)]
        reader.close()

    def test_no_descriptor_at_all_names_the_limit(self, files: list[Path], truth: list[bytes]) -> None:
        reader = self.make_reader(files)
        with few_descriptors(0):
            soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
            with pytest.raises(StorageError, match=rf"ulimit -n.* this process may have {soft}") as caught:
                read_extents(reader, [(0, 0, 10)])
        assert caught.value.errno == errno.EMFILE
        assert read_extents(reader, [(0, 0, 10)]) == [truth[0][:10]]
        reader.close()

    def test_threads_read_at_the_same_time(self, reader: Reader, truth: list[bytes]) -> None:
        def work(seed: int) -> None:
            random = np.random.default_rng(seed)
            for _ in range(15):
                files, offsets = random.integers(0, len(truth), 20), random.integers(0, 2 * SPAN, 20)
                wanted = [(f, o, 3000) for f, o in zip(files.tolist(), offsets.tolist(), strict=True)]
                assert read_extents(reader, wanted) == [truth[f][o : o + n] for f, o, n in wanted]

        with ThreadPoolExecutor(8) as threads:
            for done in [threads.submit(work, seed) for seed in range(8)]:
                done.result(timeout=60)

    def test_close_waits_for_reads_and_refuses_later_ones(self, files: list[Path], truth: list[bytes]) -> None:
        reader = self.make_reader(files)
        started, refused = threading.Barrier(5), list[str]()

        def work() -> None:
            started.wait()
            try:
                while True:
                    assert read_extents(reader, [(0, 0, 1000), (1, 0, 1000)]) == [truth[0][:1000], truth[1][:1000]]
            except ConfigError as error:
                refused.append(str(error))

        with ThreadPoolExecutor(4) as threads:
            running = [threads.submit(work) for _ in range(4)]
            started.wait()
            reader.close()
            for done in running:
                done.result(timeout=60)
        assert len(refused) == 4
        assert all("the reader is closed" in message for message in refused)

    def test_close_gives_everything_back_and_may_be_repeated(self, files: list[Path]) -> None:
        descriptors, threads = open_descriptors(), threading.active_count()
        reader = self.make_reader(files)
        read_extents(reader, [(file, 0, 10) for file in range(len(files))])
        assert len(open_descriptors()) > len(descriptors)
        reader.close()
        reader.close()
        assert open_descriptors() == descriptors
        assert threading.active_count() == threads
        with pytest.raises(ConfigError, match="the reader is closed"):
            read_extents(reader, [(0, 0, 10)])

    @pytest.mark.parametrize("ops", [1, 20])
    @pytest.mark.parametrize("need", [100, SIZES[0] + 1])
    def test_no_memory_is_held_after_a_read_or_an_error(self, reader: Reader, ops: int, need: int) -> None:
        memories = [mmap.mmap(-1, align_up(need, reader.align)) for _ in range(ops)]
        with pytest.raises(ShortReadError) if need > SIZES[0] else contextlib.nullcontext():
            reader.read_into([whole_span(reader, memory, 0, 0, need) for memory in memories])
        for memory in memories:
            memory.close()  # raises BufferError while anything looks at it

    def test_a_child_process_reads_with_its_parents_reader(self, reader: Reader, truth: list[bytes]) -> None:
        wanted = [(file, 4096, 5000) for file in range(len(truth))]
        expected = [part[4096:9096] for part in truth]
        assert read_extents(reader, wanted) == expected
        assert in_child(lambda: read_extents(reader, wanted) == expected)
        assert read_extents(reader, wanted) == expected

    @staticmethod
    def _one_file(folder: Path) -> list[Path]:
        path = folder / "one.bin"
        path.write_bytes(b"abc" * 2000)
        return [path]
