from __future__ import annotations

import io
import math
import tarfile

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardkit.errors import ConfigError
from shardkit.format.layout import (
    MAX_ALIGN,
    RECORD,
    check_align,
    padding_bytes,
    place_sample,
    sample_bytes,
    shard_bytes,
)
from shardkit.format.tar import BLOCK, parse_header

ALIGNS = [512 << i for i in range(11)]
SIZES = st.integers(0, 3000) | st.integers(0, 1 << 31) | st.integers(0, 1 << 11).map(lambda n: n * BLOCK)
SMALL = st.none() | st.integers(0, 2000)
SIDECARS = st.tuples(SMALL, SMALL).filter(lambda pair: pair != (None, None))
SAMPLES = st.lists(st.tuples(SIDECARS, SIZES), max_size=12)


def place_all(samples, align):
    start, places = 0, []
    for (cls_size, json_size), size in samples:
        places.append(place_sample(start, cls_size, json_size, size, align))
        start = places[-1].end
    return places


@given(SAMPLES, st.sampled_from(ALIGNS))
def test_every_payload_is_aligned_and_padding_is_never_one_block(samples, align):
    for place in place_all(samples, align):
        assert place.payload_offset % align == 0
        assert place.padding % BLOCK == 0
        assert place.padding == 0 or 2 * BLOCK <= place.padding < align + 2 * BLOCK


@given(SAMPLES, st.sampled_from(ALIGNS))
def test_the_parts_of_samples_follow_one_another_without_a_gap(samples, align):
    position = 0
    for place, ((cls_size, json_size), size) in zip(place_all(samples, align), samples, strict=True):
        assert place.start == position
        for offset, member_size in ((place.cls_offset, cls_size), (place.json_offset, json_size)):
            assert offset == (0 if member_size is None else position + BLOCK)
            position += 0 if member_size is None else BLOCK + math.ceil(member_size / BLOCK) * BLOCK
        assert place.padding_offset == position
        assert place.payload_offset == position + place.padding + BLOCK
        position = place.payload_offset + math.ceil(size / BLOCK) * BLOCK
        assert place.end == position


@given(SAMPLES, st.sampled_from(ALIGNS))
def test_a_shard_is_whole_records_and_ends_in_two_zero_blocks_at_least(samples, align):
    end = place_all(samples, align)[-1].end if samples else 0
    size = shard_bytes(end, align)
    assert size % RECORD == size % align == 0
    assert 2 * BLOCK <= size - end < 2 * BLOCK + math.lcm(RECORD, align)


@given(SAMPLES, st.sampled_from(ALIGNS))
def test_all_samples_at_once_take_what_one_after_another_takes(samples, align):
    places = place_all(samples, align)
    small = np.array([p.padding_offset - p.start for p in places], np.int64)
    size = np.array([size for _, size in samples], np.int64)
    kept = small.copy(), size.copy()
    total = sample_bytes(small, size, align)
    assert total.dtype == np.int64
    assert total.tolist() == [p.end - p.start for p in places]
    assert (small.tolist(), size.tolist()) == (kept[0].tolist(), kept[1].tolist())  # the arguments are left alone


@pytest.mark.parametrize(
    ("end", "align", "size"),
    [
        (10240 - 1024, 512, 10240),
        (10240 - 512, 512, 20480),
        (0, 4096, 20480),
        (20480 - 1024, 4096, 20480),
        (20480 - 512, 4096, 40960),
        (0, 65536, 327_680),
        (0, 524_288, 2_621_440),
    ],
)
def test_the_end_of_a_shard_by_example(end, align, size):
    assert shard_bytes(end, align) == size


def test_padding_is_the_least_that_fits():
    for align in ALIGNS:
        for position in range(0, 2 * align + 1, BLOCK):
            fitting = [
                p for p in (0, *range(2 * BLOCK, align + 2 * BLOCK, BLOCK)) if (position + p + BLOCK) % align == 0
            ]
            assert padding_bytes(position, align) == fitting[0]


@pytest.mark.parametrize("align", ALIGNS)
def test_powers_of_two_in_range_are_alignments(align):
    assert check_align(align) == align


@pytest.mark.parametrize("align", [-512, 0, 1, 256, 511, 513, 768, 4095, 12288, MAX_ALIGN - 512, MAX_ALIGN * 2])
def test_anything_else_is_no_alignment(align):
    with pytest.raises(ConfigError, match="power of two"):
        check_align(align)


def test_a_sample_without_a_small_member_is_refused():
    with pytest.raises(ConfigError, match="cls or a json"):
        place_sample(0, None, None, 1, 4096)


CONTENTS = st.lists(
    st.tuples(st.none() | st.binary(max_size=9), st.none() | st.binary(max_size=1100), st.integers(0, 3000)).filter(
        lambda sample: sample[:2] != (None, None)
    ),
    min_size=1, max_size=5,
)  # fmt: skip


@given(CONTENTS, st.sampled_from([a for a in ALIGNS if a <= 65536]))
def test_python_tarfile_finds_every_member_where_the_layout_says(write_shard, noise, contents, align):
    samples = [(f"k/{i}", cls, json, noise(size, i)) for i, (cls, json, size) in enumerate(contents)]
    shard = write_shard(samples, align)
    with tarfile.open(fileobj=io.BytesIO(shard.data)) as archive:
        found = [(m.name, m.offset_data, m.size) for m in archive.getmembers()]
    assert found == [(m.name, m.offset, m.size) for members in shard.members for m in members]
    for name, offset, size in found:
        assert shard.data[offset : offset + size] == shard.contents[name]
        assert parse_header(shard.data[offset - BLOCK : offset]).name == name
        assert not any(shard.data[offset + size : offset + size + -size % BLOCK])
    assert not parse_header(shard.data[:BLOCK]).padding
    assert not any(shard.data[shard.places[-1].end :])
