"""What a condition asks of images that no index knows: the facts of their headers, read while an input is scanned."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardkit.format.index import FACTS, WHOLE_IMAGE_COLUMNS
from shardkit.format.where import columns_of, parse_where
from shardkit.indexing.images import HEAD_BYTES, NO_FACTS, head_facts

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["HEAD_FACTS", "NOT_LOOKED_AT", "facts_of", "wants_facts"]

HEAD_FACTS = frozenset(FACTS) - WHOLE_IMAGE_COLUMNS
"""Columns of the index that an image's first bytes fill."""
NOT_LOOKED_AT: dict[str, int] = dict(zip(FACTS, NO_FACTS.facts, strict=True))
"""`FACTS` of an image that nobody has looked at."""


def wants_facts(where: str | None) -> bool:
    """Tell whether a condition asks for what stands in images' headers.

    Raises:
        ConfigError: it is none, as `parse_where` says.
    """
    if where is None:
        return False
    parse_where(where, number_of=lambda _: 0)  # the inputs' names of classes are not known yet
    return bool(columns_of(where) & HEAD_FACTS)


def facts_of(head: Callable[[int], bytes], size: int) -> dict[str, int]:
    """Return what the first bytes of an image say, as `shardkit index --facts header` would.

    Args:
        head: returns so many of the first bytes; fewer where they are not there any more.
        size: of the whole image.
    """
    for count in HEAD_BYTES:
        found = head_facts(head(min(count, size)), size)
        if found is not None:
            return dict(zip(FACTS, found.facts, strict=True))
    return NOT_LOOKED_AT
