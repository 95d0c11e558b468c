"""Counts the steps that Python takes, for laws about work that must not grow: a clock would measure the machine."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

    from _typeshed import TraceFunction

__all__ = ["lines_run"]


def lines_run(call: Callable[[], object]) -> int:
    """Return how many lines of Python a call runs in this thread, its loops counted as often as they go round."""
    lines = 0

    def trace(_: FrameType, event: str, __: object) -> TraceFunction:
        nonlocal lines
        lines += event in {"call", "line"}
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return lines
