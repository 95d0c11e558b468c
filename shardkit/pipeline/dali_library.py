"""What is used of DALI, for the modules that work with it and do not import it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

__all__ = ["Dali", "telling_line"]

_Foreign: TypeAlias = Any  # DALI has no types


@dataclass(frozen=True, slots=True)
class Dali:
    """Parts of the library."""

    pipeline_def: _Foreign
    fn: _Foreign
    types: _Foreign
    auto_aug: _Foreign
    """Its package `auto_aug.core`."""
    suite: _Foreign
    """Returns RandAugment's operations."""


def telling_line(error: BaseException) -> str:
    """Return the line that says what happened, of the many that DALI writes around it."""
    text = str(error)
    lines = [line.strip() for line in (text.partition("encountered:")[2] or text).splitlines()]
    line = next((line for line in lines if line and not line.endswith(":")), "")
    kind = "DALI" if isinstance(error, RuntimeError) else type(error).__name__
    return f"{kind}: {line}" if line else kind
