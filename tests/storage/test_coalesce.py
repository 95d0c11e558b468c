from __future__ import annotations

import mmap
import os

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shardkit.errors import CapabilityError, ConfigError
from shardkit.extent import align_down, align_up
from shardkit.storage.coalesce import coalesce
from shardkit.storage.direct import DirectReader
from shardkit.storage.reader import PAGE_CACHE

A = 4096
around = st.builds(
    lambda blocks, tail: max(blocks * A + tail, 0), st.integers(0, 6), st.sampled_from([-1, 0, 1, 511, 512, 2048])
)
extents = st.lists(st.tuples(st.integers(0, 3), around, around), max_size=30)
aligns = st.sampled_from([1, 512, A])
gaps = st.sampled_from([0, 1, 511, A, 3 * A])
maxima = st.sampled_from([1, 512, A, 2 * A, 5 * A, 1 << 30])


def plan_of(wanted, align=1, gap_bytes=0, max_bytes=1 << 30):
    columns = np.asarray(wanted, dtype=np.int64).reshape(-1, 3).T
    return coalesce(*columns, align=align, gap_bytes=gap_bytes, max_bytes=max_bytes)


def spans_of(plan):
    return list(zip(plan.span_file.tolist(), plan.span_offset.tolist(), plan.span_length.tolist(), strict=True))


def one_by_one(wanted, align, gap_bytes, max_bytes):
    """What the spans are to be, told without arrays: walk the aligned extents in file order and join or not."""
    rows = sorted(
        (file, align_down(offset, align), -(align_up(offset + length, align) if length else align_down(offset, align)))
        for file, offset, length in wanted
    )
    spans = []
    for file, start, minus_end in rows:
        end = -minus_end
        if spans:
            last_file, last_start, last_end, limit = spans[-1]
            joined = max(end, last_end)
            if file == last_file and start - last_end <= gap_bytes and joined - last_start <= limit:
                spans[-1] = (file, last_start, joined, limit)
                continue
        spans.append((file, start, end, max(max_bytes, end - start)))
    return [(file, start, end - start) for file, start, end, _ in spans]


@given(extents, aligns, gaps, maxima)
def test_spans_are_those_of_joining_one_by_one(wanted, align, gap_bytes, max_bytes):
    assert spans_of(plan_of(wanted, align, gap_bytes, max_bytes)) == one_by_one(wanted, align, gap_bytes, max_bytes)


@given(extents, aligns, gaps, maxima, st.integers(0, 3))
def test_every_extent_is_cut_out_of_its_span(wanted, align, gap_bytes, max_bytes, past):
    """Files are as long as the last extent needs, plus a little: what a plan promises must come out of them."""
    ends = {file: max([o + n for f, o, n in wanted if f == file], default=0) for file in range(4)}
    files = [np.random.default_rng(file).bytes(ends[file] + past) for file in range(4)]
    plan = plan_of(wanted, align, gap_bytes, max_bytes)
    buffer = bytearray(plan.buffer_bytes)
    for op in plan.ops(memoryview(buffer)):
        assert op.span.offset % align == op.span.length % align == 0
        arrived = files[op.file][op.span.offset : op.span.end]
        assert op.need <= len(arrived)
        assert op.span.length - len(arrived) < align  # past the end by less than a block
        op.dst[: op.need] = arrived[: op.need]
    starts = plan.buffer_start.tolist()
    for start, (file, offset, length) in zip(starts, wanted, strict=True):
        assert bytes(buffer[start : start + length]) == files[file][offset : offset + length]


near_borders = st.one_of(st.sampled_from([0, 1, 511, 512, 513, A - 1]), st.integers(0, A - 1))
payloads = st.lists(
    st.builds(
        lambda block, offset, blocks, size: (block * A + offset, blocks * A + size),
        st.integers(0, 5), near_borders, st.integers(0, 2), near_borders,
    ),
    min_size=1, max_size=6,
)  # fmt: skip
beyond = st.one_of(st.sampled_from([0, 1, 511, 512, A - 1, A]), st.integers(0, A))


@given(payloads, beyond, st.sampled_from([512, A]), gaps, maxima)
def test_payloads_at_any_place_in_a_block_arrive_up_to_the_end_of_the_file(wanted, past, align, gap_bytes, max_bytes):
    """Any offset mod A, size mod A and distance to the end of the file; at distance 0 the last payload ends with it."""
    size = max(offset + length for offset, length in wanted) + past
    plan = plan_of([(0, *extent) for extent in wanted], align, gap_bytes, max_bytes)
    content = np.random.default_rng(size).bytes(size)
    buffer = bytearray(plan.buffer_bytes)
    for op in plan.ops(memoryview(buffer)):
        assert op.span.offset % align == op.span.length % align == 0
        assert op.span.offset + op.need <= size
        assert op.span.end - size < align
        arrived = content[op.span.offset : op.span.end]
        op.dst[: len(arrived)] = arrived
    for start, (offset, length) in zip(plan.buffer_start.tolist(), wanted, strict=True):
        assert bytes(buffer[start : start + length]) == content[offset : offset + length]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(payloads, beyond, gaps, maxima)
def test_what_a_plan_reads_past_the_page_cache_is_what_plain_reading_gives(
    tmp_path, wanted, past, gap_bytes, max_bytes
):
    path = tmp_path / "payloads"
    size = max(offset + length for offset, length in wanted) + past
    with path.open("wb") as file:
        file.write(np.random.default_rng(size).bytes(size))
        file.flush()
        os.fsync(file.fileno())
    try:
        reader = DirectReader([path], threads=1)
    except CapabilityError as error:
        pytest.skip(str(error))
    try:
        plan = plan_of([(0, *extent) for extent in wanted], reader.align, gap_bytes, max_bytes)
        view = memoryview(mmap.mmap(-1, plan.buffer_bytes + 1))
        reader.read_into(plan.ops(view))
        assert reader.counters[PAGE_CACHE] == 0
    finally:
        reader.close()
    with path.open("rb") as file:
        for start, (offset, length) in zip(plan.buffer_start.tolist(), wanted, strict=True):
            file.seek(offset)
            assert bytes(view[start : start + length]) == file.read(length)


@given(extents, aligns, gaps, maxima)
def test_no_span_is_longer_than_allowed_but_for_one_long_extent(wanted, align, gap_bytes, max_bytes):
    longest = {
        (file, align_down(offset, align), align_up(offset + length, align) - align_down(offset, align))
        for file, offset, length in wanted
        if length
    }
    for span in spans_of(plan_of(wanted, align, gap_bytes, max_bytes)):
        assert span[2] <= max_bytes or span in longest


@given(extents, aligns, gaps, maxima)
def test_need_ends_with_the_last_wanted_byte(wanted, align, gap_bytes, max_bytes):
    plan = plan_of(wanted, align, gap_bytes, max_bytes)
    needs = [0] * len(plan.span_need)
    rows = zip(plan.extent_span.tolist(), plan.extent_start.tolist(), wanted, strict=True)
    for span, start, (_, _, length) in rows:
        needs[span] = max(needs[span], start + length)
        assert start >= 0
        assert start + length <= plan.span_length[span]
    assert plan.span_need.tolist() == needs


@pytest.mark.parametrize(
    ("wanted", "gap_bytes", "spans"),
    [
        ([(0, 0, 10), (0, 10, 10)], 0, [(0, 0, 20)]),
        ([(0, 0, 10), (0, 11, 10)], 0, [(0, 0, 10), (0, 11, 10)]),
        ([(0, 0, 10), (0, 11, 10)], 1, [(0, 0, 21)]),
        ([(0, 0, 10), (1, 0, 10)], 1 << 20, [(0, 0, 10), (1, 0, 10)]),
        ([(1, 5, 1), (0, 9, 1), (0, 2, 1)], 0, [(0, 2, 1), (0, 9, 1), (1, 5, 1)]),
        ([(0, 0, 100), (0, 10, 5), (0, 90, 20)], 0, [(0, 0, 110)]),
        ([(0, 7, 3)] * 3, 0, [(0, 7, 3)]),
    ],
)
def test_neighbours_join_over_a_gap_of_at_most_gap_bytes(wanted, gap_bytes, spans):
    assert spans_of(plan_of(wanted, gap_bytes=gap_bytes)) == spans


def test_the_gap_is_that_between_the_aligned_ranges():
    wanted = [(0, 0, 1), (0, 2 * A - 1, 1)]
    assert spans_of(plan_of(wanted, align=A)) == [(0, 0, 2 * A)]
    assert spans_of(plan_of(wanted, align=512)) == [(0, 0, 512), (0, 2 * A - 512, 512)]


@pytest.mark.parametrize(("max_bytes", "spans"), [(40, 1), (39, 2), (20, 2), (19, 4), (10, 4), (1, 4)])
def test_long_runs_are_cut_at_max_bytes(max_bytes, spans):
    plan = plan_of([(0, 10 * n, 10) for n in range(4)], max_bytes=max_bytes)
    assert len(plan.span_file) == spans


def test_an_extent_longer_than_max_bytes_takes_in_what_lies_inside_it_only():
    plan = plan_of([(0, 0, 100), (0, 20, 30), (0, 99, 2)], max_bytes=10)
    assert spans_of(plan) == [(0, 0, 100), (0, 99, 2)]
    assert plan.extent_span.tolist() == [0, 0, 1]


def test_nothing_to_read_is_no_span():
    plan = plan_of([])
    assert (plan.buffer_bytes, list(plan.ops(memoryview(bytearray()))), plan.extent_span.tolist()) == (0, [], [])


@pytest.mark.parametrize("offset", [0, 1, A, A + 1, 10 * A - 1])
def test_an_empty_extent_needs_no_byte(offset):
    plan = plan_of([(0, offset, 0)], align=A)
    assert (plan.buffer_bytes, plan.span_need.tolist(), plan.extent_start.tolist()) == (0, [0], [0])


def test_every_column_is_int64():
    plan = coalesce(np.array([0], np.uint8), [1], np.array([2], np.uint32), align=1, gap_bytes=0, max_bytes=1)
    assert {getattr(plan, name).dtype for name in plan.__slots__} == {np.dtype(np.int64)}


def test_offsets_reach_beyond_all_files():
    plan = plan_of([(0, 2**62 - 2, 1), (0, 0, 1)], align=A, gap_bytes=2**62, max_bytes=2**62)
    assert plan.extent_start.tolist() == [2**62 - 2, 0]


def test_a_buffer_that_is_too_small_is_refused():
    plan = plan_of([(0, 0, 10), (0, 50, 10)])
    with pytest.raises(ConfigError, match=r"does not hold the spans; expected 20 .*; found 19 "):
        plan.ops(memoryview(bytearray(19)))


@pytest.mark.parametrize(
    ("columns", "rule", "message"),
    [
        (([-1], [0], [1]), {}, "file is out of range"),
        (([0], [-1], [1]), {}, "offset is out of range"),
        (([0], [0], [-5]), {}, r"length is out of range; .* found -5"),
        (([0], [2**62], [1]), {}, "offset is out of range"),
        (([0, 0], [0], [1]), {}, "columns of one length"),
        (([[0]], [[0]], [[1]]), {}, "columns of one length"),
        (([0], [0], [1]), {"align": 0}, "power of two"),
        (([0], [0], [1]), {"align": 3}, "power of two"),
        (([0], [0], [1]), {"gap_bytes": -1}, "gap"),
        (([0], [0], [1]), {"max_bytes": 0}, "gap"),
    ],
)
def test_bounds_are_checked(columns, rule, message):
    with pytest.raises(ConfigError, match=message):
        coalesce(*columns, **{"align": 1, "gap_bytes": 0, "max_bytes": 1} | rule)
