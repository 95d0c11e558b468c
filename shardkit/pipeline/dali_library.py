"""What is used of DALI, for the modules that work with it and do not import it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

__all__ = ["Dali"]

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
