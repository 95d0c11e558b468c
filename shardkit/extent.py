"""Half-open byte ranges and their alignment."""

from __future__ import annotations

from dataclasses import dataclass

from shardkit.errors import ConfigError

__all__ = ["DIRECT_ALIGN", "Extent", "align_down", "align_up", "enclosing"]

DIRECT_ALIGN = 4096
"""Bytes. What O_DIRECT accepts on every file system that does not state a smaller or larger need."""


@dataclass(frozen=True, slots=True, order=True)
class Extent:
    """The bytes [offset, offset + length) of a file."""

    offset: int
    """Bytes from the start of the file; >= 0."""
    length: int
    """Bytes; >= 0."""

    def __post_init__(self) -> None:
        """Refuse a negative bound."""
        if self.offset < 0 or self.length < 0:
            raise ConfigError("an extent has no negative bound", found=f"{self.offset} + {self.length}")

    @property
    def end(self) -> int:
        """The first byte after the extent."""
        return self.offset + self.length


def align_up(value: int, align: int) -> int:
    """Return the smallest multiple of `align` that is not below `value`.

    >>> align_up(4097, 4096)
    8192
    """
    return -(-value // align) * align


def align_down(value: int, align: int) -> int:
    """Return the largest multiple of `align` that is not above `value`.

    >>> align_down(4097, 4096)
    4096
    """
    return value // align * align


def enclosing(extent: Extent, align: int) -> Extent:
    """Return the smallest extent around `extent` whose two ends are multiples of `align`.

    >>> enclosing(Extent(5000, 100), 4096)
    Extent(offset=4096, length=4096)
    """
    start = align_down(extent.offset, align)
    return Extent(start, align_up(extent.end, align) - start)
