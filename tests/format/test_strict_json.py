from __future__ import annotations

import json
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardkit.format.strict_json import dump_json, parse_json_object

LEAF = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
VALUE = st.recursive(LEAF, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=8)


@given(st.dictionaries(st.text(), VALUE))
def test_a_parsed_object_is_what_was_dumped(document):
    text = dump_json(document)
    assert text.isascii()
    assert "\n" not in text
    assert parse_json_object(text) == json.loads(text) == document


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{"a": 1, "a": 1}', "twice"),
        ('{"b": {"a": 1, "a": 2}}', "twice"),
        ('{"a": "x", "\\u0061": "x"}', "twice"),
        ('{"a": NaN}', "NaN"),
        ('{"a": Infinity}', "Infinity"),
        ('{"a": [-Infinity]}', "-Infinity"),
        ('{"a": 1e999}', "too large"),
        ('{"a": -1e999}', "too large"),
        ("[]", "list instead of an object"),
        ("1", "int instead of an object"),
        ("[" * 100_000, "nested"),
        ('{"a": ' + "[" * 100_000 + "]" * 100_000 + "}", "nested"),
        ("", "Expecting value"),
        ("{}{}", "Extra data"),
        ('{"a": ' + "9" * 5000 + "}", "integer string conversion"),
    ],
    ids=lambda text: text[:20],
)
def test_what_two_readers_could_take_differently_is_refused(text, reason):
    with pytest.raises(ValueError, match=reason):
        parse_json_object(text)


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
def test_numbers_that_json_does_not_have_are_not_dumped(number):
    with pytest.raises(ValueError, match="JSON"):
        dump_json({"a": [number]})


def test_nesting_without_end_is_not_dumped():
    nested: list[object] = []
    for _ in range(100_000):
        nested = [nested]
    with pytest.raises(ValueError, match="nested"):
        dump_json(nested)


@dataclass(frozen=True, slots=True)
class Point:
    y: int
    x: int


def test_dataclasses_become_objects_and_other_objects_are_refused():
    assert dump_json([Point(1, 2)]) == '[{"x": 2, "y": 1}]'
    with pytest.raises(TypeError, match="complex is not a JSON value"):
        dump_json(1j)
