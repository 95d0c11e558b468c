"""Class names and their numbers."""

from __future__ import annotations

from shardkit.errors import ConfigError
from shardkit.escaping import escape
from shardkit.format.keys import source_from_path
from shardkit.storage.regular import read_named

__all__ = ["number_classes", "read_class_list"]

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


def number_classes(names: list[str], pinned: tuple[str, ...] | None) -> dict[str, int]:
    """Return class name to label: sorted, or as pinned.

    Raises:
        ConfigError: a name that is not in the pinned list.
    """
    order = sorted(names) if pinned is None else list(pinned)
    numbers = {name: i for i, name in enumerate(order)}
    unknown = sorted(name for name in names if name not in numbers)
    if unknown:
        more = f" and {len(unknown) - 5} more" if len(unknown) > 5 else ""
        raise ConfigError(
            "a class that the class list does not have", found=", ".join(map(escape, unknown[:5])) + more,
            remedy="add it to the class list, or remove it from the source",
        )  # fmt: skip
    return numbers


def read_class_list(path: str) -> list[str]:
    """Return the class names of a file with one a line, written as those of folders are.

    Raises:
        ConfigError: there is no such file, or it has an empty line.
        ShardkitError: the file cannot be read.
    """
    text = read_named(path, "the class list").removeprefix(_BYTE_ORDER_MARK)  # as editors of Windows write it
    names = [source_from_path(line.removesuffix(b"\r")) for line in text.removesuffix(b"\n").split(b"\n")]
    if "" in names:
        raise ConfigError("the class list has an empty line", path=path, remedy="write one class name a line")
    return names
