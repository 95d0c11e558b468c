"""What is made of an image, by name: how it is cut, and what is done to the square before it is normalised."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np

from shardkit.errors import ConfigError
from shardkit.pipeline.crops import uniform_draws

if TYPE_CHECKING:
    import numpy.typing as npt

__all__ = ["PRESETS", "RANDAUGMENT", "Augment", "Cut", "RandomOperations", "Recipe", "random_operations", "recipe_of"]

Augment: TypeAlias = str | Callable[[Any], Any] | None
"""One of `PRESETS`, a function on nodes of DALI's graph (Any: DALI has no types), or None: by training or not."""
Cut: TypeAlias = Literal["random", "centre", "whole"]
"""A random crop, perhaps mirrored; the centre; or the image as it is."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """What is made of an image."""

    cut: Cut
    """Which part of it."""
    function: Callable[[Any], Any] | None = None
    """Applied to the squares, as nodes of DALI's graph."""
    randaugment: bool = False
    """RandAugment is applied to the squares."""

    @property
    def graph(self) -> bool:
        """Whether a graph of DALI's works on the squares."""
        return self.randaugment or self.function is not None


@dataclass(frozen=True, slots=True)
class RandAugment:
    """Strength of RandAugment (Cubuk and others 2020): `operations` of the suite one after the other."""

    operations: int = 2
    magnitude: int = 9
    """0 to `bins` - 1."""
    bins: int = 31


RANDAUGMENT = RandAugment()
"""What the preset "randaugment" does."""
PRESETS = {
    "imagenet_train": Recipe("random"),
    "imagenet_eval": Recipe("centre"),
    "randaugment": Recipe("random", randaugment=True),
    "none": Recipe("whole"),
}
"""By name."""
_SALT = 0x72616E64617567  # keeps these numbers apart from others that are drawn from the same seed


def recipe_of(augment: Augment, *, train: bool) -> Recipe:
    """Return what an argument `augment` means.

    Args:
        augment: a preset names the whole recipe; a function works on the squares that `train` decides.
        train: random crops instead of the centre.

    Raises:
        ConfigError: there is no preset of this name.
    """
    if augment is None:
        return PRESETS["imagenet_train" if train else "imagenet_eval"]
    if callable(augment):
        return Recipe("random" if train else "centre", augment)
    if augment not in PRESETS:
        expected = ", ".join(PRESETS) + ", or a function on DALI nodes"
        raise ConfigError("there is no such augmentation", expected=expected, found=repr(augment))
    return PRESETS[augment]


@dataclass(frozen=True, slots=True)
class RandomOperations:
    """RandAugment's choices for n samples. Owned by the caller."""

    operation: npt.NDArray[np.int32]
    """[operations, n]: a number in the suite."""
    negative: npt.NDArray[np.int32]
    """[operations, n]: 1 where the magnitude's sign is turned, else 0."""


def random_operations(ids: npt.NDArray[np.int64], suite: int, *, seed: int, epoch: int) -> RandomOperations:
    """Draw them as a function of (seed, epoch, sample), as crops are: a resumed epoch augments alike.

    Args:
        ids: [n] numbers of the samples.
        suite: operations to choose from.
        seed: any integer >= 0.
        epoch: any integer >= 0.
    """
    draws = uniform_draws(ids, 2 * RANDAUGMENT.operations, seed=seed, epoch=epoch, salt=_SALT).T
    chosen, signs = draws[: RANDAUGMENT.operations], draws[RANDAUGMENT.operations :]
    return RandomOperations(
        np.ascontiguousarray(chosen * suite, np.int32), np.ascontiguousarray(signs < 0.5, np.int32)
    )  # fmt: skip
