"""Names from disk cannot obey or deceive: one printable line, and different names look different."""

from __future__ import annotations

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardkit.escaping import escape


@given(st.binary(max_size=20).filter(lambda name: b"\0" not in name))
def test_any_name_prints_on_one_line(name):
    assert escape(name).isprintable()


@given(st.binary(max_size=8), st.binary(max_size=8))
def test_two_names_never_print_alike(one, other):
    assert (escape(one) == escape(other)) == (one == other)


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("plain/name-1.jpg", "plain/name-1.jpg"),
        ("été.jpg", "été.jpg"),
        ("a\x1b]52;c;\x07", "a\\x1b]52;c;\\x07"),
        ("a\u202eb", "a\\u202eb"),
        (b"\xff.jpg", "\\xff.jpg"),
        ("back\\slash", "back\\\\slash"),
        ("a\u2028b", "a\\u2028b"),
    ],
)
def test_names_as_they_print(name, shown):
    assert escape(name) == shown
    assert escape(os.fsencode(name)) == shown
