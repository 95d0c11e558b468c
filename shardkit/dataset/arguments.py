"""Checks of arguments, each in one place; what is refused is told in the same words everywhere."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from shardkit.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["require_choice", "require_flag", "require_range"]

_Word = TypeVar("_Word", bound=str)


def require_choice(name: str, value: _Word, allowed: Sequence[str]) -> _Word:
    """Return a word, one of those allowed.

    Raises:
        ConfigError: it is none of them.
    """
    if value not in allowed:
        raise ConfigError(f"{name} has no such value", expected=" or ".join(allowed), found=repr(value))
    return value


def require_flag(name: str, value: bool) -> bool:
    """Return the value of an argument that is true or false.

    Raises:
        ConfigError: it is anything else: "no" and "0" are true to Python.
    """
    if not isinstance(value, bool):
        raise ConfigError(f"{name} is true or false", expected="True or False", found=repr(value))
    return value


def require_range(name: str, value: int, low: int, high: int) -> None:
    """Refuse a number outside of low..high, both inclusive.

    Raises:
        ConfigError: it is one.
    """
    if not low <= value <= high:
        raise ConfigError(f"{name} is out of range", expected=f"{low}..{high}", found=value)
