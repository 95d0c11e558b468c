"""Sizes and counts as people write and read them: 256MB, 1GiB, 1 shard, 2 shards."""

from __future__ import annotations

import re
from fractions import Fraction

__all__ = ["byte_text", "count", "parse_size"]

_SIZE = re.compile(r"([0-9]{1,30}(?:\.[0-9]{1,30})?) *([kKMGTP]?)(i?)[bB]?")
_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")
_POWER = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4, "p": 5}


def parse_size(text: str) -> int | None:
    """Return a number of bytes, or None for something else.

    >>> parse_size("256MB"), parse_size("1GiB"), parse_size("4096"), parse_size("1.5k"), parse_size("many")
    (256000000, 1073741824, 4096, 1500, None)
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None or (not match[2] and (match[3] or "." in match[1])):
        return None
    # A fraction, not a float: a float has 53 bits.
    return int(Fraction(match[1]) * (1024 if match[3] else 1000) ** _POWER[match[2].lower()])


def byte_text(count: float) -> str:
    """Return a number of bytes for a person, in powers of 1000.

    >>> byte_text(999), byte_text(543_200_308)
    ('999 B', '543.2 MB')
    """
    unit = 0
    while abs(count) >= 999.95 and unit < len(_UNITS) - 1:
        count, unit = count / 1000, unit + 1
    return f"{count:.0f} {_UNITS[unit]}" if unit == 0 else f"{count:.1f} {_UNITS[unit]}"


def count(number: int, one: str, many: str = "") -> str:
    """Return how many there are.

    >>> count(1, "sample"), count(2000, "class", "classes")
    ('1 sample', '2,000 classes')
    """
    return f"{number:,} {one if number == 1 else many or one + 's'}"
