"""What becomes of labels: kept, renumbered by a list of class names, or mapped class by class."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from shardkit.converting.columns import is_text
from shardkit.errors import ConfigError
from shardkit.escaping import escape
from shardkit.format.strict_json import parse_json_object
from shardkit.packing.classes import read_class_list
from shardkit.storage.regular import read_named

if TYPE_CHECKING:
    from shardkit.converting.options import ConvertOptions

__all__ = ["LEFT_OUT", "NO_LABEL", "Relabelling", "read_labels"]

NO_LABEL = -1
LEFT_OUT = -2
_MAX_LABEL = (1 << 31) - 1
_MAX_FILE_BYTES = 1 << 28
_Ints = npt.NDArray[np.int64]
_Classes = tuple[str, ...] | None


def read_labels(path: str) -> list[str] | dict[str, Any]:
    """Return what `--labels FILE` says: class names, one a line; or a JSON object, class to what becomes of it.

    Raises:
        ConfigError: it is neither, or there is no such file.
        ShardkitError: the file cannot be read.
    """
    data = read_named(path, "the file of --labels", _MAX_FILE_BYTES)
    if not data.lstrip().startswith(b"{"):
        return read_class_list(path)
    try:
        labels = parse_json_object(data.decode("utf-8"))
    except ValueError as error:
        raise ConfigError("the labels are no JSON object", path=path, found=escape(str(error)[:200])) from error
    wrong = [value for value in labels.values() if isinstance(value, str) and not is_text(value)]
    if wrong:
        raise ConfigError("a class name that is no text", path=path, found=ascii(wrong[0])[:80],
                          remedy="give the class another name")  # fmt: skip
    return labels


class Relabelling:
    """Old labels to new ones, for inputs that may number their classes differently."""

    def __init__(self, options: ConvertOptions, inputs: Sequence[_Classes]) -> None:
        """Take what was asked for, and the class names of every input that has samples.

        Raises:
            ConfigError: the inputs disagree about classes and nothing says what to do; or what was asked for is none.
        """
        given: Any = options.labels  # Any: checked here
        self._map: dict[str, int] | None = None
        self._numbers: dict[str, int] | None = None
        if given is None:
            self.classes = _common(inputs)
        elif isinstance(given, Mapping):
            self.classes, self._map = _targets(given)
        else:
            self.classes = _listed(given)
            self._numbers = {name: number for number, name in enumerate(self.classes)}

    classes: _Classes
    """Class names in the new labels' order; None without names."""

    def apply(self, labels: _Ints, classes: _Classes) -> _Ints:
        """Return new labels, `LEFT_OUT` for samples to leave out.

        Args:
            labels: int64 [n], `NO_LABEL` for none.
            classes: the class names of the input that they are from.

        Raises:
            ConfigError: a class that nothing was said about.
        """
        if self._map is None and self._numbers is None:
            return labels
        old, places = np.unique(labels, return_inverse=True)
        new = np.array([self._one(label, classes) for label in old.tolist()], np.int64)
        return new[places] if len(old) else labels

    def _one(self, label: int, classes: _Classes) -> int:
        if label == NO_LABEL:
            return NO_LABEL
        name = classes[label] if classes is not None and label < len(classes) else None
        if self._map is not None:
            # Where classes are called by numbers, a number in the file is a name: label 2 may be the class "10".
            numbered = str(label) not in (classes or ())
            for text in (name, str(label) if numbered else None):
                if text is not None and text in self._map:
                    return self._map[text]
        elif self._numbers is not None and name is not None and name in self._numbers:
            return self._numbers[name]
        elif self._numbers is not None and classes is None and label < len(self._numbers):
            return label
        raise ConfigError(
            "a class that --labels says nothing about", found=str(label) if name is None else escape(name),
            remedy="add it to the file; in a JSON object, null leaves its samples out",
        )  # fmt: skip


def _common(inputs: Sequence[_Classes]) -> _Classes:
    kinds = list(dict.fromkeys(inputs))
    if len(kinds) > 1:
        shown = " and ".join("no class names" if kind is None else f"{len(kind)} classes" for kind in kinds[:2])
        raise ConfigError("the inputs do not have the same classes", found=shown,
                          remedy="say what they are by --labels FILE: one name a line, by label of inputs without "
                          "names; or a JSON object, old class to new one")  # fmt: skip
    return kinds[0] if kinds else None


def _targets(given: Mapping[Any, Any]) -> tuple[_Classes, dict[str, int]]:
    values = [value for value in given.values() if value is not None]
    wrong = [key for key in given if not isinstance(key, str)]
    named = all(is_text(value) and value for value in values)
    numbered = all(
        isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _MAX_LABEL for value in values
    )
    if wrong or not values or not (named or numbered):
        raise ConfigError("labels map each class to a name, or each to a number from 0 on; null leaves it out",
                          found=ascii(dict(given))[:80], remedy='e.g. {"cat": "animal", "dog": "animal"}')  # fmt: skip
    if not named:
        return None, {key: LEFT_OUT if value is None else value for key, value in given.items()}
    classes = tuple(sorted(set(values)))
    numbers = {name: number for number, name in enumerate(classes)}
    return classes, {key: LEFT_OUT if value is None else numbers[value] for key, value in given.items()}


def _listed(given: object) -> tuple[str, ...]:
    listed = isinstance(given, Sequence) and not isinstance(given, str | bytes)
    names = tuple(given) if isinstance(given, Sequence) and listed else ()
    if not names or not all(is_text(name) and name for name in names) or len(set(names)) < len(names):
        raise ConfigError("labels are a list of class names, each once, or a mapping", found=ascii(given)[:80])
    return names
