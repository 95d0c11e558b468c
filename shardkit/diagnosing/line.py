"""One line of a report."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, TypeAlias

__all__ = ["Line", "Status", "kernel_version", "size_text"]

Status: TypeAlias = Literal["ok", "warn", "fail", "info"]
"""As it should be; works, but slower or later than it could; cannot work; a fact without a verdict."""


@dataclass(frozen=True, slots=True)
class Line:
    """What was found, and what follows."""

    name: str
    """Of the thing, the same on every machine: "scheduler nvme0n1"."""
    status: Status
    found: str
    """One clause; names in it are as the system has them, to be escaped where they are printed."""
    remedy: str = ""
    """A command or a setting; of every `warn` and `fail`."""


def kernel_version(release: str) -> tuple[int, int]:
    """Return the first two numbers of a release; (0, 0) when there are none.

    >>> kernel_version("6.8.0-45-generic"), kernel_version("")
    ((6, 8), (0, 0))
    """
    found = re.match(r"(\d+)\.(\d+)", release)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def size_text(size: int | None) -> str:
    """Return bytes in powers of 1024, as limits are set.

    >>> size_text(8 << 20), size_text(3 << 29), size_text(None)
    ('8 MiB', '1.5 GiB', 'unlimited')
    """
    if size is None:
        return "unlimited"
    number, unit = float(size), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if number < 1024:
            break
        number, unit = number / 1024, larger
    return f"{number:.1f}".removesuffix(".0") + f" {unit}"
