"""Names of classes, as people write them, and the numbers that samples have for them."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING

from shardkit.errors import ConfigError
from shardkit.escaping import escape

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["class_numbers"]

_NAMED = 5


def class_numbers(classes: Sequence[str] | None, path: str | bytes | None = None) -> Callable[[str], int]:
    """Return what gives a class's number by its name; it raises a ConfigError for a name that is not there.

    Args:
        classes: names in label order; None where there are none.
        path: of the dataset, for messages.

    >>> class_numbers(["cat", "dog"])("dog")
    1
    """
    numbers = {name: number for number, name in enumerate(classes or ())}

    def number_of(name: str) -> int:
        if name not in numbers:
            raise _unknown(name, classes, path)
        return numbers[name]

    return number_of


def _unknown(name: str, classes: Sequence[str] | None, path: str | bytes | None) -> ConfigError:
    if classes is None:
        return ConfigError("the dataset has no class names", path=path, found=f"class {escape(name)}",
                           remedy="name classes by their numbers")  # fmt: skip
    lowered: dict[str, str] = {known.lower(): known for known in classes}
    close = [lowered[match] for match in difflib.get_close_matches(name.lower(), lowered, _NAMED)]
    names = " or ".join(escape(match) for match in close)
    remedy = f"did you mean {names}?" if close else "the names are in ds.classes, and shardkit inspect lists them"
    return ConfigError(f"there is no class {escape(name)}", path=path, expected=f"one of {len(classes)} names",
                       remedy=remedy)  # fmt: skip
