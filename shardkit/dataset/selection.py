"""Choosing samples of a dataset: by label, by a condition on the columns of its index, by key."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from shardkit.errors import ConfigError
from shardkit.escaping import escape, is_unicode
from shardkit.format.checksum import DIGESTS, hex_digest
from shardkit.format.class_names import class_numbers
from shardkit.format.expression import Expression, is_in, iter_masks, require_condition, require_known
from shardkit.format.where import parse_where

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import numpy.typing as npt

    from shardkit.dataset.shardset import Dataset

    _Ints: TypeAlias = npt.NDArray[np.int64]

__all__ = ["Expression", "digest", "select"]

_NAMED = 5  # names that a message lists; a list of keys may have a million wrong ones
_MAX_LABEL = 2**31 - 1


def select(
    dataset: Dataset,
    *,
    labels: Iterable[int | str] | None = None,
    where: Expression | str | None = None,
    keys: Iterable[str] | None = None,
) -> _Ints | None:
    """Return the samples that fulfil every condition given.

    Args:
        dataset: whose samples.
        labels: class numbers, or names out of `dataset.classes`; a sample of any of them is wanted.
        where: a condition on the columns of the index: a text such as `"width >= 256"`, as `parse_where` takes it, or a
            `pyarrow.compute.Expression`. A sample for which it is null is not wanted.
        keys: of the samples wanted, in any order.

    Returns:
        int64 [k], rising; None when that is every sample.

    Raises:
        ConfigError: a condition is malformed, names a class, column or key that is not there, asks for facts that the
            index does not know, or leaves no sample.
        IndexFormatError: a text of the index is damaged, and a condition asks for texts.
    """
    conditions: dict[str, Expression] = {}
    if labels is not None:
        conditions["labels"] = is_in("label", _class_numbers(dataset, _listed("labels", labels)))
    if where is not None:
        if isinstance(where, str):
            chosen = parse_where(where, "where", number_of=class_numbers(dataset.classes, dataset.path))
        else:
            chosen = require_condition("where", where)
        conditions["where"] = chosen
        require_known(chosen, dataset.manifest.known_columns)
    wanted = [] if keys is None else _distinct(_listed("keys", keys))
    if keys is not None:
        conditions["keys"] = _has_key(dataset, wanted)
    if not conditions:
        return None
    rows, counts = _scan(dataset, conditions)
    if counts.get("keys", 0) < len(wanted):
        found = _scan(dataset, {"keys": conditions["keys"]})[0]
        raise _unknown_keys(dataset, set(wanted).difference(dataset.columns.texts("key")[found]), len(wanted))
    if not rows.size:
        raise _empty(dataset, counts)
    return None if len(rows) == len(dataset) else rows


def digest(rows: _Ints | None) -> str:
    """Return what tells a selection from others, as `ALGORITHM:HEX`; "all" for every sample.

    Args:
        rows: int64 [k], as `select` gives them.

    >>> digest(np.array([0, 2]))
    'xxh3-128:2792092d48917c1edbe47910dc869bdd'
    """
    if rows is None:
        return "all"
    stored = np.ascontiguousarray(rows, "<i8").view(np.uint8)
    return f"{DIGESTS[0]}:{hex_digest(DIGESTS[0], stored.data)}"


def _scan(dataset: Dataset, conditions: dict[str, Expression]) -> tuple[_Ints, dict[str, int]]:
    """Return the rows that fulfil all conditions, and how many fulfil each."""
    rows, counts, first = [np.empty(0, np.int64)], dict.fromkeys(conditions, 0), 0
    for masks in iter_masks(dataset.columns.batches, list(conditions.values())):
        for name, mask in zip(conditions, masks, strict=True):
            counts[name] += int(np.count_nonzero(mask))
        rows.append(np.flatnonzero(np.logical_and.reduce(masks)) + first)
        first += len(masks[0])
    return np.concatenate(rows), counts


def _listed(name: str, values: Iterable[int | str]) -> list[int | str]:
    """Return the values as a list: a lone text is a row of characters to Python, and never what is meant."""
    if isinstance(values, str | bytes | int | np.integer):
        raise ConfigError(f"{name} is a list", found=repr(values), remedy=f"write {name}=[{values!r}]")
    return list(values)


def _class_numbers(dataset: Dataset, labels: Sequence[int | str]) -> list[int]:
    classes = dataset.classes
    top = _MAX_LABEL if classes is None else len(classes) - 1
    number_of, found = class_numbers(classes, dataset.path), []
    for label in labels:
        if isinstance(label, str):
            found.append(number_of(label))
        elif isinstance(label, bool | np.bool_) or not isinstance(label, int | np.integer):
            raise ConfigError("a label is neither a number nor a name", found=f"{label!r} ({type(label).__name__})")
        elif not 0 <= label <= top:
            raise ConfigError("there is no such class", path=dataset.path, expected=f"0..{top}", found=label)
        else:
            found.append(int(label))
    return found


def _distinct(keys: list[int | str]) -> list[str]:
    texts = [key for key in keys if isinstance(key, str)]
    if len(texts) < len(keys):
        wrong = next(key for key in keys if not isinstance(key, str))
        raise ConfigError("a key is a text", found=f"{wrong!r} ({type(wrong).__name__})")
    twice = [key for key, count in Counter(texts).items() if count > 1] if len(set(texts)) < len(texts) else []
    if twice:
        raise ConfigError("keys come more than once", expected="each of them once", found=_some(twice, len(twice)))
    return texts


def _has_key(dataset: Dataset, keys: list[str]) -> Expression:
    try:
        return is_in("key", keys)
    except UnicodeEncodeError as error:
        odd = [key for key in keys if not is_unicode(key)]
        raise _unknown_keys(dataset, set(odd), len(keys)) from error


def _unknown_keys(dataset: Dataset, unknown: set[str], wanted: int) -> ConfigError:
    return ConfigError(
        f"{len(unknown)} of {wanted} keys are not in the dataset", path=dataset.path,
        found=_some(sorted(unknown), len(unknown)), remedy="shardkit ls lists the keys; in Python: ds.columns['key']",
    )  # fmt: skip


def _some(names: Sequence[str], total: int) -> str:
    shown = ", ".join(escape(name) for name in names[:_NAMED])
    return shown if total <= _NAMED else f"{shown} and {total - _NAMED} more"


def _empty(dataset: Dataset, counts: dict[str, int]) -> ConfigError:
    alone = [name for name, count in counts.items() if not count]
    what = f"{' and '.join(alone)} leaves no sample" if alone else "no sample fulfils all conditions at once"
    found = ", ".join(f"{count} for {name}" for name, count in counts.items())
    return ConfigError(what, path=dataset.path, expected=f"some of {len(dataset)} samples", found=found)
