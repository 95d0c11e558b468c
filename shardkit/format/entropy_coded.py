"""Where the entropy-coded data of a JPEG ends: a search over most of its bytes."""

from __future__ import annotations

import re
from typing import Final

import numpy as np

__all__ = ["EntropyCodedData"]

_END_OF_DATA: Final = re.compile(rb"\xff[^\x00\xd0-\xd7\xff]")
_SHORT_BYTES: Final = 12 << 10
"""Searched by the expression, which needs no preparation, but takes twice as long for each further byte."""
_NO_HITS: Final = np.empty(0, np.bool_)
_WINDOW_BYTES: Final = 1 << 18
"""Searched in one numpy step: much against the fixed cost of a step, little against a core's L2 cache."""


class EntropyCodedData:
    """Finds the marker that ends entropy-coded data: an FF before anything but 00 (stuffing), RSTn and FF (fill).

    A byte is searched once however many scans there are, but for the few of a short search. Only an array of its own
    survives a call: the caller could not release `view` while a numpy array exports it.
    """

    __slots__ = ("_base", "_hits", "_view")

    def __init__(self, view: memoryview) -> None:
        """Look at nothing yet.

        Args:
            view: [bytes] the whole image; host memory, held only as long as this object.
        """
        self._view = view
        self._base = 0
        self._hits = _NO_HITS
        """Shape [window]; True at i where byte base + i is FF and the next one is not 00."""

    def marker_from(self, pos: int) -> int:
        """Return the offset of the first such marker at or after `pos`, or -1."""
        if len(self._view) - pos <= _SHORT_BYTES:
            found = _END_OF_DATA.search(self._view, pos)
            return found.start() if found else -1
        while pos + 1 < len(self._view):
            if not self._base <= pos < self._base + self._hits.size:
                self._load(pos)
            rest = self._hits[pos - self._base :]
            first = int(rest.argmax())
            if not rest[first]:
                pos += rest.size
                continue
            pos += first
            code = self._view[pos + 1]
            if code != 0xFF and not 0xD0 <= code <= 0xD7:
                return pos
            self._drop_restarts()
        return -1

    def _load(self, pos: int) -> None:
        octets = np.frombuffer(self._view, np.uint8, min(_WINDOW_BYTES + 1, len(self._view) - pos), pos)
        # A comparison is 0 or 1: its minimum with the next byte says in one pass "this is FF and that one is not 0".
        hits = (octets[:-1] == 0xFF).view(np.uint8)
        np.minimum(hits, octets[1:], out=hits)
        self._base, self._hits = pos, hits.view(np.bool_)

    def _drop_restarts(self) -> None:
        """Clear RSTn and fill bytes from the window, all at once: there may be thousands."""
        codes = np.frombuffer(self._view, np.uint8, self._hits.size, self._base + 1)
        self._hits &= (codes & 0xF8 != 0xD0) & (codes != 0xFF)
