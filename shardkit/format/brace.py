"""Brace expressions, as WebDataset names shards by: `train-{000000..000146}.tar`, `{a,b}/{00..09}.tar`."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from shardkit.errors import UnsafeError
from shardkit.escaping import escape

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["MAX_NAMES", "expand_braces"]

MAX_NAMES = 1_000_000
"""Names that one expression may stand for."""
MAX_SPEC_LENGTH = 1 << 16
"""Characters of the longest expression that is taken."""
_MAX_CHARACTERS = 1 << 28  # of all names together, roughly: a long name, many times, is a bomb, too
_MAX_DEPTH = 8

_RANGE = re.compile(r"(-?[0-9]{1,18})\.\.(-?[0-9]{1,18})(?:\.\.(-?[0-9]{1,18}))?", re.ASCII)


def expand_braces(spec: str, limit: int = MAX_NAMES) -> list[str]:
    """Return the names that an expression stands for, in its order, as bash and webdataset expand it.

    Ranges count up or down, by a step if one is given, and keep leading zeros. Braces without a comma or a range stand
    for themselves, and so does one that is never closed.

    Args:
        spec: the expression.
        limit: names that it may stand for.

    Raises:
        UnsafeError: it stands for more, is too long, or its braces lie in one another too deeply.

    >>> expand_braces("a-{08..10}.tar"), expand_braces("{x,y{1..2}}.tar"), expand_braces("{x}.tar")
    (['a-08.tar', 'a-09.tar', 'a-10.tar'], ['x.tar', 'y1.tar', 'y2.tar'], ['{x}.tar'])
    """
    if len(spec) > MAX_SPEC_LENGTH:
        raise UnsafeError("too long for a brace expression", expected=f"at most {MAX_SPEC_LENGTH} characters",
                          found=f"{len(spec)} characters")  # fmt: skip
    return _expand(spec, limit, spec)


def _expand(text: str, limit: int, spec: str) -> list[str]:
    """Return the names of a part of `spec`: never more than `limit` texts are made on the way."""
    names = [""]
    for choices in _parts(text, limit, spec):
        count = len(names) * len(choices)
        if count > limit or count * len(text) > _MAX_CHARACTERS:
            raise _too_many(limit, spec)
        names = [name + choice for name in names for choice in choices]
    return names


def _parts(text: str, limit: int, spec: str) -> Iterator[list[str]]:
    """Yield the choices of each part of a text: one for what stands outside of braces."""
    plain = at = 0
    ends = _closings(text, spec)
    while (start := text.find("{", at)) >= 0:
        end = ends.get(start)
        choices = None if end is None else _choices(text[start + 1 : end], limit, spec)
        if end is None or choices is None:
            at = start + 1
            continue
        yield [text[plain:start]]
        yield choices
        plain = at = end + 1
    yield [text[plain:]]


def _closings(text: str, spec: str) -> dict[int, int]:
    """Return, by the place of each brace that opens, that of the one that closes it."""
    opened: list[tuple[int, int]] = []  # place, and levels of closed pairs inside
    ends: dict[int, int] = {}
    for at, character in enumerate(text):
        if character == "{":
            opened.append((at, 0))
        elif character == "}" and opened:
            start, levels = opened.pop()
            ends[start] = at
            if levels == _MAX_DEPTH:
                raise UnsafeError("braces lie in one another too deeply", expected=f"at most {_MAX_DEPTH} levels",
                                  found=escape(spec[:80]))  # fmt: skip
            if opened:
                opened[-1] = (opened[-1][0], max(opened[-1][1], levels + 1))
    return ends


def _choices(inner: str, limit: int, spec: str) -> list[str] | None:
    """Return what a pair of braces stands for; None when for itself."""
    match = _RANGE.fullmatch(inner)
    if match is not None:
        return _numbers(match, limit, spec)
    pieces = _split(inner)
    if len(pieces) == 1:
        return None
    choices: list[str] = []
    for piece in pieces:
        choices += _expand(piece, limit, spec)
        if len(choices) > limit:
            raise _too_many(limit, spec)
    return choices


def _split(inner: str) -> list[str]:
    """Cut at the commas that stand in no further braces."""
    pieces, depth, start = [], 0, 0
    for at, character in enumerate(inner):
        depth += (character == "{") - (character == "}")
        if character == "," and depth == 0:
            pieces.append(inner[start:at])
            start = at + 1
    return [*pieces, inner[start:]]


def _numbers(match: re.Match[str], limit: int, spec: str) -> list[str]:
    first, last, step = (int(text) if text else 1 for text in match.groups())
    step = abs(step) or 1
    if abs(last - first) // step >= limit:
        raise _too_many(limit, spec)
    stop, stride = (last + 1, step) if first <= last else (last - 1, -step)
    texts = match.groups()[:2]
    padded = any(len(text.lstrip("-")) > 1 and text.lstrip("-").startswith("0") for text in texts)
    width = max(map(len, texts)) if padded else 0
    return [f"{number:0{width}d}" for number in range(first, stop, stride)]


def _too_many(limit: int, spec: str) -> UnsafeError:
    return UnsafeError("a brace expression stands for too many names", expected=f"at most {limit}",
                       found=escape(spec[:80]), remedy="name fewer shards at a time")  # fmt: skip
