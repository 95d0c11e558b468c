"""The arguments of the loader, each checked in one place."""

from __future__ import annotations

import math
import operator
from typing import TYPE_CHECKING, SupportsIndex

import torch

from shardkit.dataset.arguments import require_choice
from shardkit.errors import ConfigError
from shardkit.pipeline.decoder import DTYPES
from shardkit.sizes import parse_size

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "DECODERS",
    "device_of",
    "dtype_name",
    "on_255",
    "require_fields",
    "seconds",
    "size_in_bytes",
    "whole",
]

DECODERS = ("auto", "nvjpeg", "dali", "cpu")
"""What `decoder` may be."""
FIELDS = ("key", "index", "json")
"""What `fields` may name."""


def device_of(device: str | torch.device) -> torch.device:
    """Return "cpu" or a GPU, with its number.

    Raises:
        ConfigError: torch does not know it, it is neither, or a CPU with a number.
    """
    try:
        place = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ConfigError(
            "torch knows no such device", expected="'cpu', 'cuda', 'cuda:1'", found=repr(device)
        ) from error
    if place.type not in {"cpu", "cuda"}:
        raise ConfigError("batches go to the CPU or an NVIDIA GPU", expected="'cpu' or 'cuda'", found=repr(str(device)))
    number: int | None = place.index  # torch's types do not know of None
    if place.type == "cpu" and number:
        raise ConfigError("there is one CPU for torch", expected="'cpu'", found=repr(str(device)))
    if place.type == "cuda" and number is None:
        # Not asked of torch without need: it would start CUDA in a process that may not have a GPU.
        return torch.device("cuda", torch.cuda.current_device() if torch.cuda.is_available() else 0)
    return place


def size_in_bytes(name: str, value: SupportsIndex | str) -> int:
    """Return a number of bytes: a number, or a text like "16GiB".

    Raises:
        ConfigError: it is neither.
    """
    if not isinstance(value, str):
        return whole(name, value, 0)
    size = parse_size(value)
    if size is None:
        raise ConfigError(f"{name} is a size in bytes", expected="a number, or a text like '16GiB'", found=repr(value))
    return size


def whole(name: str, value: SupportsIndex, low: int, high: int | None = None) -> int:
    """Return a whole number of any kind as a Python integer; True and False are none.

    Raises:
        ConfigError: it is none, below `low` or above `high`.
    """
    try:
        if isinstance(value, bool):
            raise TypeError
        number = operator.index(value)
    except TypeError as error:
        raise ConfigError(f"{name} is a whole number", expected=f"{name} >= {low}", found=repr(value)) from error
    if number < low:
        raise ConfigError(f"{name} is too small", expected=f"{name} >= {low}", found=number)
    if high is not None and number > high:
        raise ConfigError(f"{name} is too large", expected=f"{name} <= {high}", found=number)
    return number


def seconds(name: str, value: float) -> float:
    """Return a time.

    Raises:
        ConfigError: it is no number above 0.
    """
    try:
        number = float(value)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{name} is a time in seconds", expected=f"{name} > 0", found=repr(value)) from error
    if not number > 0:
        raise ConfigError(f"{name} is a time in seconds", expected=f"{name} > 0", found=number)
    return number


def require_fields(fields: Sequence[str]) -> tuple[str, ...]:
    """Return the names of the extras, each one of `FIELDS`.

    Raises:
        ConfigError: a name is none of them.
    """
    try:
        names = (fields,) if isinstance(fields, str) else tuple(fields)
    except TypeError as error:
        raise ConfigError("fields are names", expected="some of " + ", ".join(FIELDS), found=repr(fields)) from error
    return tuple(require_choice("fields", name, FIELDS) for name in names)


def dtype_name(dtype: str | torch.dtype) -> str:
    """Return one of `DTYPES`, also for torch's own name of it."""
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise ConfigError("there is no such pixel type", expected=" or ".join(DTYPES), found=repr(dtype))
    return name


def on_255(name: str, values: Sequence[float]) -> tuple[float, float, float]:
    """Return a number for each colour, on the scale 0..255.

    Raises:
        ConfigError: they are no three numbers, or look like numbers on the scale 0..1.
    """
    try:
        red, green, blue = (float(value) for value in values)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{name} is a number for red, green and blue", found=repr(values)) from error
    if not all(map(math.isfinite, (red, green, blue))):
        raise ConfigError(f"{name} is a number for red, green and blue", found=repr((red, green, blue)))
    if 0 < max(red, green, blue) < 1:
        raise ConfigError(
            f"{name} is on the scale of the pixels, 0..255", expected=f"for these {name}=" + _times_255(values),
            found=repr(tuple(values)),
        )  # fmt: skip
    return red, green, blue


def _times_255(values: Sequence[float]) -> str:
    return "(" + ", ".join(f"{255 * float(value):.3f}" for value in values) + ")"
