"""Bytes and JSON that resemble what a parser takes, and the time that `make fuzz` gives each test of them."""

from __future__ import annotations

import functools
import os
import random
import time
from typing import TYPE_CHECKING, Any, TypeVar

from hypothesis import HealthCheck, seed, settings
from hypothesis import strategies as st

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["SECONDS", "changed", "fuzzed", "mutated", "share_s"]

SECONDS = float(os.environ.get("SHARDKIT_FUZZ_S", "0"))
"""For all tests that `fuzzed` decorates together; 0 for a fixed number of examples."""
_ODD_BYTES = (b"\0", b"\xff", b"\xff" * 4, b"\x7f" + b"\xff" * 7)
_ODD_VALUES: tuple[object, ...] = (
    None, True, False, 0, -1, 1, 2**31, 2**63 - 1, 2**64, 10**40, 0.5, "", "..", "../x", "/etc/x.tar", "a\0b",
    "\ud800", "x" * 5000, "9" * 5000, [], {}, [[]], [None], {"": None},
)  # fmt: skip

_Test = TypeVar("_Test", bound="Callable[..., Any]")
_weights: list[int] = []


def share_s(weight: int = 1) -> float:
    """Return the seconds of one test; counted when all are collected, so not before one runs."""
    return SECONDS * weight / max(sum(_weights), 1)


def fuzzed(examples: int, *, weight: int = 1) -> Callable[[_Test], _Test]:
    """Run a test of hypothesis with so many examples; again and again while there is time, when there is a time.

    Args:
        examples: 0 for a test that makes its own and asks `share_s` itself.
        weight: how many times as long as others it gets.
    """

    def decorate(test: _Test) -> _Test:
        _weights.append(weight)
        if not examples:
            return test
        if not SECONDS:
            return settings(max_examples=examples, deadline=None)(test)
        many = settings(
            max_examples=examples, deadline=None, derandomize=False, suppress_health_check=list(HealthCheck)
        )(test)

        @functools.wraps(test)
        def again(*args: object, **kwargs: object) -> None:
            until = time.monotonic() + share_s(weight)
            while time.monotonic() < until:
                seed(random.getrandbits(64))(many)(*args, **kwargs)

        return again  # type: ignore[return-value]  # of the same arguments

    return decorate


def mutated(data: bytes, pieces: Sequence[bytes] = _ODD_BYTES) -> st.SearchStrategy[bytes]:
    """Return a strategy: bytes that differ from `data` in some places, are cut, or have a piece twice.

    Args:
        data: what a parser takes.
        pieces: what its language is made of, to be put anywhere.
    """
    place = st.integers(0, max(len(data) - 1, 0))
    piece = st.binary(min_size=1, max_size=8) | st.sampled_from(pieces)

    @st.composite
    def draw_one(draw: st.DrawFn) -> bytes:
        found = bytearray(data)
        for _ in range(draw(st.integers(1, 4))):
            at, new, how = draw(place), draw(piece), draw(st.integers(0, 5))
            if how < 4:
                found[at : at + len(new)] = new
            elif how == 4:
                found[at:at] = found[at : at + draw(st.integers(1, 600))]
            else:
                del found[at : at + draw(st.integers(1, 600))]
        return bytes(found)

    return draw_one()


def changed(document: object, values: Sequence[object] = ()) -> st.SearchStrategy[Any]:
    """Return a strategy: the JSON document with one to three values that are others, gone, or there twice.

    Args:
        document: what a reader takes; stays as it is.
        values: that this document might have, beside those that none should.
    """
    odd = st.sampled_from([*_ODD_VALUES, *values])

    @st.composite
    def draw_one(draw: st.DrawFn) -> Any:  # noqa: ANN401 - a JSON value
        found = [_copy(document)]
        for _ in range(draw(st.integers(1, 3))):
            holder, name = draw(st.sampled_from(_places(found)))
            how = draw(st.integers(0, 5)) if holder is not found else 0
            if how < 4:
                holder[name] = _copy(draw(odd))
            elif how == 4:
                del holder[name]
            elif isinstance(holder, list):
                holder.append(_copy(holder[name]))
            else:
                holder[draw(st.sampled_from(["", "more", name.upper()]))] = _copy(holder[name])
        return found[0]

    return draw_one()


def _places(value: Any) -> list[tuple[Any, Any]]:  # noqa: ANN401 - JSON values
    """Return every place in a document as what holds it and its name or number there; outer ones first."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [place for name, inner in items for place in ((value, name), *_places(inner))]


def _copy(value: Any) -> Any:  # noqa: ANN401 - a JSON value
    if isinstance(value, dict):
        return {name: _copy(inner) for name, inner in value.items()}
    return [_copy(inner) for inner in value] if isinstance(value, list) else value
