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
SHORT = 64 << 10
"""Bytes; spans below are balanced with the one before."""
around = st.builds(
    lambda blocks, tail: max(blocks * A + tail, 0), st.integers(0, 6), st.sampled_from([-1, 0, 1, 511, 512, 2048])
)
extents = st.lists(st.tuples(st.integers(0, 3), around, around), max_size=30)
neighbours = st.lists(
    st.tuples(st.integers(0, 1), st.integers(0, 16).map(A.__mul__), st.sampled_from([0, 1, A, A + 1, 3 * A])),
    min_size=10, max_size=30,
)  # fmt: skip
aligns = st.sampled_from([1, 512, A])
gaps = st.sampled_from([0, 1, 511, A, 3 * A])
maxima = st.sampled_from([1, 512, A, 2 * A, 5 * A, 1 << 30])


def plan_of(wanted, align=1, gap_bytes=0, max_bytes=1 << 30):
    columns = np.asarray(wanted, dtype=np.int64).reshape(-1, 3).T
    return coalesce(*columns, align=align, gap_bytes=gap_bytes, max_bytes=max_bytes)


def spans_of(plan):
    return list(zip(plan.span_file.tolist(), plan.span_offset.tolist(), plan.span_length.tolist(), strict=True))


def one_by_one(wanted, align, gap_bytes, max_bytes):
    """What the spans are to be, told without arrays: walk the aligned extents in file order, join or not, and balance.

    A span is a list of (start, end) in a file.
    """
    rows = sorted(
        (file, align_down(offset, align), -(align_up(offset + length, align) if length else align_down(offset, align)))
        for file, offset, length in wanted
    )
    spans, files, goes_on = [], [], []
    for file, start, minus_end in rows:
        end, near = -minus_end, False
        if spans and file == files[-1]:
            last, limit = spans[-1], max(max_bytes, spans[-1][0][1] - spans[-1][0][0])
            near = start - end_of(last) <= gap_bytes
            if near and max(end, end_of(last)) - last[0][0] <= limit:
                last.append((start, end))
                continue
        spans.append([(start, end)])
        files.append(file)
        goes_on.append(near)
    for at in reversed(range(1, len(spans))):
        if goes_on[at] and length_of(spans[at]) < SHORT:
            spans[at - 1], spans[at] = balanced(spans[at - 1], spans[at], align, max_bytes)
    return [(file, span[0][0], length_of(span)) for file, span in zip(files, spans, strict=True)]


def end_of(span):
    return max(end for _, end in span)


def length_of(span):
    return end_of(span) - span[0][0]


def balanced(left, right, align, max_bytes):
    """Try every way to cut two spans."""
    both, best = left + right, (left, right)
    for cut in range(1, len(left)):
        two = both[:cut], both[cut:]
        reached = end_of(two[0])
        if two[1][0][1] <= reached or two[1][0][0] < reached - align or length_of(two[1]) > max_bytes:
            continue
        if min(map(length_of, two)) > min(map(length_of, best)):
            best = two
    return best


@given(extents | neighbours, aligns, gaps, maxima)
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


KIB = 1 << 10
run_maxima = st.sampled_from([512 * KIB, 1024 * KIB, 4096 * KIB])


@given(st.data(), run_maxima, st.sampled_from([0, 32 * KIB]))
def test_in_a_run_of_extents_that_are_small_for_a_span_no_span_is_short(data, max_bytes, gap_bytes):
    """Images of one file, in any order, each in blocks of its own, and never further apart than the gap."""
    sizes = data.draw(st.lists(st.integers(1, max_bytes // 4), min_size=1, max_size=80))
    apart = data.draw(st.lists(st.integers(0, gap_bytes // A), min_size=len(sizes), max_size=len(sizes)))
    wanted, at = [], 0
    for size, blocks in zip(sizes, apart, strict=True):
        wanted.append((0, at + blocks * A, size))
        at = align_up(at + blocks * A + size, A)
    plan = plan_of(data.draw(st.permutations(wanted)), A, gap_bytes, max_bytes)
    assert plan.span_length.max() <= max_bytes
    if len(plan.span_length) > 1:
        assert plan.span_length.min() >= SHORT


def test_the_rest_of_a_long_run_is_no_request_of_its_own():
    plan = plan_of([(0, n * A, A) for n in range(2049)], A, 0, 1 << 20)
    assert plan.span_length.tolist() == [1 << 20] * 7 + [128 * A, 129 * A]
    assert plan.span_need.tolist() == plan.span_length.tolist()
    assert plan.extent_span[[0, 7 * 256 + 127, 7 * 256 + 128, 2048]].tolist() == [0, 7, 8, 8]


def test_a_short_span_between_long_ones_takes_from_the_one_before_it():
    sizes = [100 * KIB] * 10 + [40 * KIB, 2048 * KIB]
    plan = plan_of([(0, sum(sizes[:n]), size) for n, size in enumerate(sizes)], A, 0, 1024 * KIB)
    assert (plan.span_length // KIB).tolist() == [500, 540, 2048]


@pytest.mark.parametrize(
    ("wanted", "gap_blocks", "most_blocks", "lengths"),
    [
        pytest.param([(0, 8), (8, 1)], 0, 8, [8, 1], id="an extent would be cut"),
        pytest.param([(0, 2), (2, 8), (12, 1)], 2, 10, [10, 1], id="the second span would be too long"),
        pytest.param([(0, 4), (1, 7), (8, 1)], 0, 8, [8, 1], id="three blocks would be read twice"),
        pytest.param([(0, 4), (3, 5), (8, 1)], 0, 8, [4, 6], id="one block may be read twice"),
    ],
)
def test_a_short_rest_stays_where_giving_would_do_harm(wanted, gap_blocks, most_blocks, lengths):
    rows = [(0, start * A, blocks * A) for start, blocks in wanted]
    plan = plan_of(rows, A, gap_blocks * A, most_blocks * A)
    assert (plan.span_length // A).tolist() == lengths


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
