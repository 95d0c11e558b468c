from __future__ import annotations

import contextlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardkit.errors import IndexFormatError
from shardkit.format import text_columns
from shardkit.format.dali_index import IndexedMember, encode_dali_columns, encode_dali_index, parse_dali_index

WORD = st.text(st.characters(min_codepoint=0x21, max_codepoint=0x7E), min_size=1, max_size=20)
NUMBER = st.integers(0, 1 << 62)
MEMBER = st.builds(IndexedMember, WORD, NUMBER, NUMBER, WORD)
SAMPLES = st.lists(st.lists(MEMBER, min_size=1, max_size=3), max_size=4)

TWO = encode_dali_index(
    [
        [IndexedMember("cls", 512, 1, "a/b.cls"), IndexedMember("jpg", 4096, 900, "a/b.jpg")],
        [IndexedMember("jpg", 8192, 4000, "a/c.jpg")],
    ]
)


@given(SAMPLES)
def test_a_parsed_index_is_what_was_written(samples):
    assert parse_dali_index(encode_dali_index(samples)) == samples


def test_the_text_by_example():
    assert TWO == b"v1.2 2\ncls 512 1 a/b.cls jpg 4096 900 a/b.jpg\njpg 8192 4000 a/c.jpg\n"


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\n",
        b"v1.2\n",
        b"v1.1 1\njpg 512 1\n",
        b"v1.3 0\n",
        b"v1.2 x\n",
        b"v1.2 -0\n",
        b"v1.2 00\n",
        b"v1.2 " + b"9" * 5000 + b"\n",
        b"v1.2 1\njpg 512 1\n",
        b"v1.2 1\njpg 512 1 \n",
        b"v1.2 1\n 512 1 a.jpg\n",
        b"v1.2 1\njpg 0512 1 a.jpg\n",
        b"v1.2 1\njpg 512 -1 a.jpg\n",
        b"v1.2 1\njpg 512  1 a.jpg\n",
        b"v1.2 1\njpg 512 " + b"1" * 5000 + b" a.jpg\n",
        b"v1.2 1\njpg 512 1 a\tb.jpg\n",
        b"v1.2 1\njpg 512 1 a.jpg\r\n",
        b"v1.2 1\njpg 512 1 a.jpg",
        b"v1.2 1\njpg 512 1 a.jpg\n\n",
        b"v1.2 1\njpg 512 1 a.jpg\nx",
        b"v1.2 2\njpg 512 1 a.jpg\n",
        b"v1.2 0\njpg 512 1 a.jpg\n",
        b"v1.2 1\njpg 512 \xc2\xb2 a.jpg\n",
    ],
)
def test_what_we_never_write_is_refused(data):
    with pytest.raises(IndexFormatError):
        parse_dali_index(data)


def test_a_broken_line_is_named():
    with pytest.raises(IndexFormatError, match="line 3"):
        parse_dali_index(b"v1.2 2\njpg 512 1 a.jpg\njpg x 1 b.jpg\n")


def test_every_changed_byte_is_refused_or_says_something_else():
    original = parse_dali_index(TWO)
    for at in range(len(TWO)):
        for value in range(256):
            if value == TWO[at]:
                continue
            with contextlib.suppress(IndexFormatError):
                assert parse_dali_index(TWO[:at] + bytes([value]) + TWO[at + 1 :]) != original


def test_every_cut_is_refused():
    for length in range(len(TWO)):
        with pytest.raises(IndexFormatError):
            parse_dali_index(TWO[:length])


@given(st.binary(max_size=60) | st.binary(max_size=60).map(b"v1.2 1\n".__add__))
def test_any_bytes_are_parsed_or_refused(data):
    try:
        samples = parse_dali_index(data)
    except IndexFormatError:
        return
    assert encode_dali_index(samples) == data


@given(SAMPLES, st.sampled_from([np.object_, np.bytes_]), st.integers(1, 4))
def test_columns_are_the_same_lines(samples, kind, rows):
    members = [member for sample in samples for member in sample]
    owners = [number for number, sample in enumerate(samples) for _ in sample]
    extensions, offsets, sizes, names = zip(*members, strict=True) if members else ([], [], [], [])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text_columns, "_ROWS", rows)
        found = encode_dali_columns(
            len(samples), np.array(owners, np.int64), np.array(offsets, np.int64), np.array(sizes, np.int64),
            *(np.array([text.encode() for text in texts], kind) for texts in (extensions, names)),
        )  # fmt: skip
    assert found == encode_dali_index(samples)
