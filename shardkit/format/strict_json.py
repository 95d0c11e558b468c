"""JSON with one reading and one writing: no field twice, no NaN or infinity, no nesting without end."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import secrets
from json.scanner import make_scanner
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = [
    "MAX_JSON_BYTES",
    "MAX_JSON_DEPTH",
    "are_json_objects",
    "dump_json",
    "is_nested_deeply",
    "parse_json_object",
    "refuse_deep",
]

MAX_JSON_BYTES = 64 << 20
"""Bytes of the largest json member that is metadata: `verify` takes no larger one."""
MAX_JSON_DEPTH = 200
"""Objects and lists within one another: a number of our own, for how many Python takes depends on the caller."""
_TOKENS = re.compile(r'"(?:[^"\\]|\\.)*+"|[\[\]{}]', re.DOTALL)
_WORD = secrets.token_hex(16)
_BETWEEN = b',"%b",' % _WORD.encode()


def dump_json(value: object) -> str:
    r"""Return the one line that stands for `value`: ASCII, fields sorted, `, ` and `: ` between.

    Args:
        value: JSON values and dataclasses, which become objects.

    Raises:
        ValueError: a number that JSON does not have, or nesting without end.

    >>> dump_json({"b": [1, 2.5], "a": "é"})
    '{"a": "\\u00e9", "b": [1, 2.5]}'
    """
    try:
        return json.dumps(value, sort_keys=True, allow_nan=False, default=_fields)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def is_nested_deeply(text: str) -> bool:
    """Tell whether there are more than `MAX_JSON_DEPTH` objects and lists within one another.

    >>> is_nested_deeply("[" * 200 + "]" * 200), is_nested_deeply("[" * 201 + "]" * 201), is_nested_deeply('"[[["' * 99)
    (False, True, False)
    """
    if text.count("{") + text.count("[") <= MAX_JSON_DEPTH:
        return False
    depth = 0
    for token in _TOKENS.finditer(text):
        bracket = token[0]
        depth += (bracket in "[{") - (bracket in "]}")
        if depth > MAX_JSON_DEPTH:
            return True
    return False


def refuse_deep(text: str) -> None:
    """Refuse JSON that `is_nested_deeply`.

    Raises:
        ValueError: it is.
    """
    if is_nested_deeply(text):
        raise ValueError(f"nested too deeply: at most {MAX_JSON_DEPTH} objects and lists within one another")


def parse_json_object(text: str) -> dict[str, Any]:
    """Return the object that `text` states.

    Raises:
        ValueError: not one JSON object, a field that stands twice, a number without a finite value, or nesting deeper
            than `MAX_JSON_DEPTH`.
    """
    refuse_deep(text)
    try:
        document, end = _scanned(text)
        if end != len(text):
            document = _DECODER.decode(text)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    if not isinstance(document, dict):
        raise ValueError(f"a {type(document).__name__} instead of an object")
    return document


def are_json_objects(texts: Sequence[bytes | memoryview]) -> list[bool]:
    """Tell of each of some texts in UTF-8 whether `parse_json_object` takes it.

    They are parsed as one list, and one by one only where one is refused.

    >>> are_json_objects([b'{"a": 1}', b"[]", b'{"b": 2}'])
    [True, False, True]
    """
    if len(texts) > 1 and _are_all_objects(texts):
        return [True] * len(texts)
    return [_is_json_object(text) for text in texts]


def _are_all_objects(texts: Sequence[bytes | memoryview]) -> bool:
    """Tell whether all are objects; also False where that cannot be told at once.

    A word that nobody knows stands between them: where each word is found in its place, exactly one value stands before
    it and one behind it.
    """
    try:
        joined = f"[{str(_BETWEEN.join(texts), 'utf-8')}]"
        # Each object has a bracket, so with no more than these beside them none is nested too deeply.
        if joined.count("{") + joined.count("[") - len(texts) > MAX_JSON_DEPTH and any(
            is_nested_deeply(str(text, "utf-8")) for text in texts
        ):
            return False
        values, end = _scanned(joined)
    except (ValueError, RecursionError):
        return False
    # A list that the last text closes itself has something behind it.
    if not isinstance(values, list) or end != len(joined) or values[1::2] != [_WORD] * (len(texts) - 1):
        return False
    return set(map(type, values[::2])) == {dict}


def _is_json_object(text: bytes | memoryview) -> bool:
    try:
        parse_json_object(str(text, "utf-8"))
    except ValueError:
        return False
    return True


def _scanned(text: str) -> tuple[object, int]:
    """Return the value that stands at the beginning, and where it ends; -1 when there is none.

    For text that nothing surrounds this is all that `decode` does, in half the time; `decode` has the word about other.
    """
    try:
        return _SCAN(text, 0)
    except StopIteration:
        return None, -1


def _fields(value: object) -> dict[str, Any]:
    if not dataclasses.is_dataclass(value):
        raise TypeError(f"{type(value).__name__} is not a JSON value")
    return {name: getattr(value, name) for name in value.__dataclass_fields__}


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    document = dict(pairs)
    if len(document) != len(pairs):
        raise ValueError("a field stands twice")
    return document


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON value")


def _finite(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise ValueError("a number that is too large")
    return number


# Made once: making it takes longer than reading a sample's metadata with it.
_DECODER = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_no_constant, parse_float=_finite)
_SCAN: Callable[[str, int], tuple[object, int]] = make_scanner(_DECODER)  # type: ignore[arg-type]  # it takes a decoder
