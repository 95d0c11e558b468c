"""What another framework's dataset is to a conversion: rows by number, of columns of a few kinds."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

from shardkit.errors import CapabilityError, ConfigError, FormatError, from_os_error
from shardkit.escaping import escape, is_unicode
from shardkit.format.strict_json import parse_json_object
from shardkit.storage.regular import open_regular

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = [
    "Column",
    "ForeignTable",
    "Kind",
    "check_count",
    "class_names",
    "dataset_index",
    "is_text",
    "missing",
    "read_object",
    "refuse_splits",
    "stay_inside",
]

Kind = Literal["image", "bytes", "int", "class", "text", "json", "other"]
"""`image` and `bytes` are bytes as they are stored, `json` is a value of JSON's, `other` has no place in a shard."""
_MAX_INDEX_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a foreign dataset."""

    name: str
    kind: Kind
    classes: tuple[str, ...] | None = None
    """Of kind `class`: names in label order."""


class ForeignTable(Protocol):
    """A foreign dataset, open."""

    @property
    def columns(self) -> Sequence[Column]:
        """Its columns, in their order."""

    @property
    def files(self) -> Sequence[str]:
        """What its rows are read from."""

    @property
    def in_order(self) -> bool:
        """Whether rows are read in order only: another row may have to unpack a whole file."""

    def __len__(self) -> int:
        """Return the number of rows."""

    def row(self, number: int) -> dict[str, Any]:
        """Return the values of a row, by column; whatever the library raises means that it cannot be read.

        Raises:
            ShardkitError: more than this row cannot be read.
        """


def is_text(value: object) -> bool:
    """Tell whether a value is a text that UTF-8 can hold: JSON may state half a character."""
    return isinstance(value, str) and is_unicode(value)


def class_names(names: object, path: str) -> tuple[str, ...]:
    """Return the class names that a dataset states.

    Raises:
        FormatError: they are no texts.
    """
    if not isinstance(names, list) or not all(map(is_text, names)):
        raise FormatError("class names that are no text", path=path, found=ascii(names)[:80],
                          remedy="have the library write the dataset anew, with other names")  # fmt: skip
    return tuple(names)


def missing(library: str, extra: str, error: Exception) -> CapabilityError:
    """Return the error for a library that is not here, or that cannot even be imported."""
    gone = isinstance(error, ImportError)
    why = "is not installed" if gone else "fails when it is imported"
    return CapabilityError(
        f"this needs {library}, which {why}", found=escape(str(error)[:200]),
        remedy=f"pip install 'shardkit[{extra}]'" if gone else "mend its installation: what it imports does not fit",
    )  # fmt: skip


def read_object(path: str) -> dict[str, Any]:
    """Return the JSON object in a file.

    Raises:
        FormatError: it is none, or not there.
        UnsafeError: it is no regular file, or over a limit.
        ShardkitError: the system failed to read it.
    """
    try:
        with open_regular(path, _MAX_INDEX_BYTES) as file:
            return parse_json_object(file.read().decode("utf-8"))
    except FileNotFoundError as error:
        raise FormatError("the dataset has no such file", path=path) from error
    except OSError as error:
        raise from_os_error(error, "cannot read a dataset", path=path) from error
    except (ValueError, json.JSONDecodeError) as error:
        raise FormatError("a dataset's file is no JSON object", path=path, found=str(error)[:200]) from error


def dataset_index(kind: str, path: str) -> str:
    """Return the file `index.json` of a dataset's folder.

    Args:
        kind: of dataset.
        path: the folder.

    Raises:
        ConfigError: there is none.
    """
    index = os.path.join(path, "index.json")
    if not os.path.lexists(index):
        refuse_splits(kind, path, lambda folder: os.path.isfile(os.path.join(folder, "index.json")))
        raise ConfigError(f"not a dataset of {kind}'s", path=path, expected="a folder with index.json",
                          remedy="name the folder that it was written to")  # fmt: skip
    return index


def refuse_splits(kind: str, path: str, is_dataset: Callable[[str], bool]) -> None:
    """Refuse a folder whose own folders are datasets, as `--split` makes them.

    Raises:
        ConfigError: it is one.
    """
    folders = sorted(entry.path for entry in os.scandir(path) if entry.is_dir()) if os.path.isdir(path) else []
    names = [escape(os.path.basename(folder)) for folder in folders if is_dataset(folder)]
    if names:
        raise ConfigError("a folder of several splits", path=path, found=", ".join(names[:8]),
                          remedy=f"convert one, e.g. {kind}:DIR/{names[0]}")  # fmt: skip


def check_count(file: str, count: int, at: int = 0) -> None:
    """Refuse a file that is not there, or too short for so many samples with an offset of four bytes each.

    So it is when the file itself, in the four bytes at `at`, states more than there can be.

    Raises:
        FormatError: says which.
        ShardkitError: the system failed to read it.
    """
    if not os.path.isfile(file):
        raise FormatError("a file of the dataset is not there", path=file)
    if not 0 <= 4 * count < os.path.getsize(file):
        raise FormatError("a file is too short for the samples that the index states", path=file, found=count)
    try:
        with open_regular(file) as stream:
            stated = int.from_bytes(stream.read(at + 4)[at:], "little")
    except OSError as error:
        raise from_os_error(error, "cannot read a dataset", path=file) from error
    if 4 * stated >= os.path.getsize(file):  # the libraries read so many offsets at once
        raise FormatError("a file is too short for the samples that it states", path=file, offset=at, found=stated)


def stay_inside(name: object) -> bool:
    """Tell whether a file name that a dataset states stays in its folder."""
    return isinstance(name, str) and bool(name) and "\0" not in name and name[0] != "/" and ".." not in name.split("/")
