"""The arguments of the loader, each checked in one place."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, SupportsIndex

import torch

from shardkit.errors import CapabilityError, ConfigError
from shardkit.pipeline.decoder import DTYPES

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "DECODERS",
    "FIELDS",
    "dtype_name",
    "require_choice",
    "require_cpu",
    "require_fields",
    "three",
    "whole",
]

DECODERS = ("auto", "dali", "cpu")
"""What `decoder` may be."""
FIELDS = ("key", "index", "json")
"""What `fields` may name."""


def require_cpu(device: str | torch.device) -> None:
    """Refuse every device but the CPU.

    Raises:
        CapabilityError: another device.
        ConfigError: torch does not know it.
    """
    try:
        kind = torch.device(device).type
    except (RuntimeError, TypeError) as error:
        raise ConfigError("torch knows no such device", expected="'cpu'", found=repr(device)) from error
    if kind != "cpu":
        raise CapabilityError(
            "this version of shardkit decodes on the CPU only", expected="device='cpu'", found=repr(str(device)),
            remedy="take device='cpu' and move the batches: images.to('cuda', non_blocking=True)",
        )  # fmt: skip


def whole(name: str, value: SupportsIndex, low: int) -> int:
    """Return a whole number of any kind as a Python integer.

    Raises:
        ConfigError: it is none, or below `low`.
    """
    try:
        number = operator.index(value)
    except TypeError as error:
        raise ConfigError(f"{name} is a whole number", expected=f"{name} >= {low}", found=repr(value)) from error
    if number < low:
        raise ConfigError(f"{name} is too small", expected=f"{name} >= {low}", found=number)
    return number


def require_choice(name: str, value: str | None, allowed: Sequence[str]) -> None:
    """Refuse a value that is not among the allowed ones; None is always allowed."""
    if value is not None and value not in allowed:
        hint = "; 'window' is planned, not in this version" if name == "shuffle" and value == "window" else ""
        raise ConfigError(f"{name} has no such value", expected=" or ".join(allowed) + hint, found=repr(value))


def require_fields(fields: Sequence[str]) -> tuple[str, ...]:
    """Return the names of the extras, each one of `FIELDS`."""
    names = (fields,) if isinstance(fields, str) else tuple(fields)
    for name in names:
        require_choice("fields", name, FIELDS)
    return names


def dtype_name(dtype: str | torch.dtype) -> str:
    """Return one of `DTYPES`, also for torch's own name of it."""
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise ConfigError("there is no such pixel type", expected=" or ".join(DTYPES), found=repr(dtype))
    return name


def three(name: str, values: Sequence[float]) -> tuple[float, float, float]:
    """Return a number for each colour."""
    try:
        red, green, blue = (float(value) for value in values)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{name} is a number for red, green and blue", found=repr(values)) from error
    return red, green, blue
