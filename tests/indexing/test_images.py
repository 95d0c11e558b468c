from __future__ import annotations

import pytest

from shardkit.indexing.images import parse_label, parse_labels

PLAIN = [b"0", b" 7\n", b"000000012", b"\t999999999\r\n"]


@pytest.mark.parametrize(
    "odd", [b"1,2", b"3,", b",", b"cat", b"-1", b"+1", b"1.0", b"1 2", b"1_0", b"\x0b1", b"2147483647", b"2147483648",
            b"0000000000", b"99999999999999999999", b"\xd9\xa4", b" " * 60, b"1\0"],
)  # fmt: skip
@pytest.mark.parametrize("before", range(len(PLAIN) + 1))
def test_labels_that_are_looked_at_together_are_told_like_each_alone(odd, before):
    payloads = [*PLAIN[:before], odd, *PLAIN[before:]]
    told = parse_labels(payloads)
    assert told == list(map(parse_label, payloads))
    assert told[:before] + told[before + 1 :] == [0, 7, 12, 999_999_999]


def test_no_label_is_lost_where_none_or_one_stands():
    assert parse_labels([memoryview(b"12")]) == [12]
    assert parse_labels(PLAIN) == [0, 7, 12, 999_999_999]
    assert parse_labels([b"1,2"]) == [None]
