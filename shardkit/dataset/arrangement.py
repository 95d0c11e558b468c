"""What a loader iterates over, put together: datasets, what is selected of them, and the order of an epoch."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Literal, TypeAlias, TypeVar, get_args

from shardkit.dataset.arguments import require_choice
from shardkit.dataset.mixing import MixedOrder
from shardkit.dataset.order import GlobalOrder, Order, StoredOrder
from shardkit.dataset.samples import Part, Samples
from shardkit.dataset.selection import select
from shardkit.dataset.shardset import open_dataset
from shardkit.dataset.window import WindowOrder
from shardkit.errors import ConfigError
from shardkit.escaping import escape
from shardkit.splitmix import mix

if TYPE_CHECKING:
    from collections.abc import Iterable

    from shardkit.dataset.selection import Expression
    from shardkit.dataset.shardset import Dataset

__all__ = ["MixedPaths", "Path", "Shuffle", "arrange", "open_samples", "split_weights", "tell_of_labels"]

Path: TypeAlias = str | os.PathLike[str]
MixedPaths: TypeAlias = Sequence[tuple[Path, float]]
"""Folders of datasets, each with its weight."""
Shuffle: TypeAlias = Literal["global", "window", "none"]
"""One permutation of all samples for each epoch, one of extents with their samples pooled, or the stored order."""
_Value = TypeVar("_Value")
_log = logging.getLogger(__name__)


def split_weights(path: Path | MixedPaths) -> tuple[list[Path], list[float] | None]:
    """Return the folders to open, and their weights; None for the folder of a single dataset.

    Raises:
        ConfigError: neither a path nor pairs of path and weight.

    >>> split_weights([("a/", 0.7), ("b/", 0.3)])
    (['a/', 'b/'], [0.7, 0.3])
    """
    if isinstance(path, str | os.PathLike):
        return [path], None
    try:
        pairs = [(folder, float(weight)) for folder, weight in path]
    except (TypeError, ValueError) as error:
        raise ConfigError(
            "neither a dataset's folder nor a mix of them", expected="a path, or [(path, weight), ...]",
            found=repr(path)[:200],
        ) from error  # fmt: skip
    if not pairs:
        raise ConfigError("a mix of no datasets", expected="[(path, weight), ...]", found="[]")
    return [folder for folder, _ in pairs], [weight for _, weight in pairs]


def open_samples(
    paths: Sequence[Path], *,
    labels: Iterable[int | str] | None = None, where: Expression | str | None = None, keys: Iterable[str] | None = None,
) -> Samples:  # fmt: skip
    """Open datasets and select from each of them; see `shardkit.dataset.selection.select`.

    Args:
        paths: their folders.
        labels: class numbers or names.
        where: a condition on the index, a text or a `pyarrow.compute.Expression`.
        keys: of samples.

    Raises:
        ShardkitError: as `shardkit.open`; `ConfigError` when a condition is malformed or leaves nothing.
    """
    some_labels, some_keys = _repeatable(labels), _repeatable(keys)
    opened = []
    try:
        for path in paths:
            opened.append(open_dataset(path))
        _tell_of_classes(opened)
        return Samples(
            [Part(dataset, select(dataset, labels=some_labels, where=where, keys=some_keys)) for dataset in opened]
        )
    except BaseException:
        for dataset in opened:
            dataset.close()
        raise


def _tell_of_classes(datasets: Sequence[Dataset]) -> None:
    """Warn of datasets that number different classes alike: what is trained then is neither."""
    named = [dataset for dataset in datasets if dataset.classes is not None]
    for other in named[1:]:
        pairs = zip(named[0].classes or (), other.classes or (), strict=False)
        for label, (one, two) in enumerate(pairs):
            if one != two:
                _log.warning("label %d is %s in %s and %s in %s: the classes of a mix are not joined; shardkit convert "
                             "--labels makes them agree", label, escape(one), escape(named[0].path), escape(two),
                             escape(other.path))  # fmt: skip
                return


def tell_of_labels(parts: Iterable[Part]) -> None:
    """Warn, once a dataset, of samples without a label, for who hands out labels: theirs is -1, which is no class."""
    for part in parts:
        missing, path = part.unlabelled(), escape(part.dataset.path)
        if 0 < missing < len(part):
            _log.warning("%d of %d samples of %s have no label, theirs is -1: where='label is not None' leaves them "
                         "out, of a loader and of shardkit convert", missing, len(part), path)  # fmt: skip
        elif missing:
            _log.warning("no sample of %s has a label, all are -1: to train on classes pack it from a folder a class, "
                         "or from a list with a column label (shardkit pack --labels dir or column)", path)  # fmt: skip


def arrange(
    samples: Samples, shuffle: Shuffle, *, seed: int, weights: Sequence[float] | None, lanes: int, extent_bytes: int,
    window_extents: int,
) -> Order:  # fmt: skip
    """Return the order of an epoch over samples.

    Args:
        samples: what is permuted.
        shuffle: how.
        seed: 0..2**64 - 1.
        weights: of the datasets; None for a single one.
        lanes: of the run; "window" keeps their samples apart.
        extent_bytes: of "window": bytes of consecutive images that are read together, about.
        window_extents: of "window": extents whose samples are shuffled together.

    Raises:
        ConfigError: an argument is out of its range, or a mix is to be shuffled by windows.
    """
    require_choice("shuffle", shuffle, get_args(Shuffle))
    if weights is not None:
        if shuffle == "window":
            raise ConfigError(
                "a mix of datasets is not shuffled by windows", expected="shuffle='global' or 'none'",
                found=f"{len(weights)} datasets and shuffle='window'",
            )  # fmt: skip
        parts = [_simple(len(part), shuffle, mix(seed + at)) for at, part in enumerate(samples.parts)]
        return MixedOrder(list(zip(parts, samples.starts.tolist(), strict=False)), weights, seed)
    if shuffle != "window":
        return _simple(len(samples), shuffle, seed)
    mean = max(samples.total_payload // len(samples), 1)
    return WindowOrder(
        n=len(samples), seed=seed, lanes=lanes, extent_samples=max(extent_bytes // mean, 1),
        window_extents=window_extents,
    )  # fmt: skip


def _repeatable(values: Iterable[_Value] | None) -> Iterable[_Value] | None:
    """Return values that each of several datasets can iterate over; whether they are any is checked elsewhere."""
    return list(values) if isinstance(values, Iterator) else values


def _simple(n: int, shuffle: Shuffle, seed: int) -> Order:
    return StoredOrder(n) if shuffle == "none" else GlobalOrder(n, seed)
