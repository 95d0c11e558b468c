from __future__ import annotations

import json
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardkit.format import strict_json
from shardkit.format.strict_json import are_json_objects, dump_json, is_nested_deeply, parse_json_object

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


GOOD = [b'{"a": 1}', b" {} ", b'{"a": [1, {"b": "]}"}], "c": "\xc3\xa9"}', b"{}\n"]


@pytest.mark.parametrize(
    "odd",
    [
        [b"[]"], [b"1"], [b'{"b": 2}] ['], [b"1, 2"], [b"1, 2, 3"], [b""], [b" "], [b"{}{}"], [b'{"c": 3', b'"d": 4}'],
        [b"[1", b"2]"], [b"[1", b"2]", b"{}, 2, {}"], [b'{"a": "', b'"}'], [b"\xc3", b"\xa9"], [b'{"a": "\xff"}'],
        [b'{"a": 1, "a": 1}'], [b'{"a": NaN}'], [b'{"a": 1e999}'], [b'{"a": %s}' % (b"9" * 5000)], [b"\xef\xbb\xbf{}"],
        [b'{"a":%s}' % (b"[" * 20_000)], [b"[" * 100_000], [b"// {}"], [b'{"a": "\0"}'],
    ],
    ids=lambda odd: odd[0][:12],
)  # fmt: skip
@pytest.mark.parametrize("before", range(len(GOOD) + 1))
def test_objects_that_are_looked_at_together_are_told_like_each_alone(odd, before):
    texts = GOOD[:before] + odd + GOOD[before:]
    told = []
    for text in texts:
        try:
            parse_json_object(text.decode())
            told.append(True)
        except ValueError:
            told.append(False)
    assert told.count(True) >= len(GOOD)
    assert are_json_objects(texts) == told
    assert are_json_objects(list(map(memoryview, texts))) == told


def test_many_good_objects_are_looked_at_together_and_one_refused_costs_no_other_answer(monkeypatch):
    scanned, scan = [], strict_json._scanned
    monkeypatch.setattr(strict_json, "_scanned", lambda text: scanned.append(text) or scan(text))
    assert are_json_objects(GOOD * 50) == [True] * 200
    assert len(scanned) == 1
    assert are_json_objects([*GOOD * 50, b"7"]) == [True] * 200 + [False]
    assert len(scanned) == 2 + 201


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
def test_numbers_that_json_does_not_have_are_not_dumped(number):
    with pytest.raises(ValueError, match="JSON"):
        dump_json({"a": [number]})


@pytest.mark.parametrize("frames", [0, 600])
def test_how_deep_an_object_may_be_does_not_depend_on_who_asks(frames):
    def ask(more):
        return ask(more - 1) if more else [are_json_objects(texts)[:2] for texts in (pair, pair[:1] + pair, pair * 300)]

    def nested(depth):
        return b'{"a":' * (depth - 1) + b"{}" + b"}" * (depth - 1)

    pair = [nested(200), nested(201)]
    assert ask(frames) == [[True, False], [True, True], [True, False]]
    scalars = [b"1"] * 150 + [nested(201)]
    assert are_json_objects(scalars) == [False] * 151


@pytest.mark.parametrize(
    ("text", "deep"),
    [("[" * 200, False), ("[" * 201, True), ('{"[":' * 100 + "[" * 100, False), ('{"a\\"[":' * 101 + "[" * 100, True),
     ('"' + "[" * 500 + '"', False), ("[]" * 500, False), ('["\\\\"]' * 500, False)],
)  # fmt: skip
def test_brackets_within_texts_do_not_nest(text, deep):
    assert is_nested_deeply(text) == deep


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
