"""Where devices sit on the PCI bus, told from their places in sysfs. Pure."""

from __future__ import annotations

import re
from itertools import takewhile
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Route", "chain_of", "route"]

_ROOT = re.compile(r"pci[0-9a-f]{4,}:[0-9a-f]{2}")
_ADDRESS = re.compile(r"[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")


class Route(NamedTuple):
    """How two devices reach each other."""

    kind: Literal["bridge", "root", "apart", "unknown"]
    """Below a common bridge; only below the same host bridge; below two of them; not told."""
    through: str = ""
    """The lowest bridge, or the host bridge, that is common."""


def chain_of(place: str) -> tuple[str, ...]:
    """Return the host bridge and the PCI addresses on the way to a device.

    Args:
        place: its resolved path in sysfs.

    >>> chain_of("sys/devices/pci0000:15/0000:15:01.0/0000:16:00.0/nvme/nvme0")
    ('pci0000:15', '0000:15:01.0', '0000:16:00.0')
    >>> chain_of("sys/devices/virtual/block/loop0")
    ()
    """
    parts = place.split("/")
    start = next((at for at, part in enumerate(parts) if _ROOT.fullmatch(part)), None)
    if start is None:
        return ()
    return (parts[start], *(part for part in parts[start + 1 :] if _ADDRESS.fullmatch(part)))


def route(one: Sequence[str], other: Sequence[str]) -> Route:
    """Return how two devices reach each other.

    Args:
        one: a chain of `chain_of`, of at least the host bridge and the device.
        other: the other one's.

    >>> route(("pci0000:15", "0000:15:01.0", "0000:16:00.0"), ("pci0000:15", "0000:15:01.0", "0000:17:00.0"))
    Route(kind='bridge', through='0000:15:01.0')
    >>> route(("pci0000:15", "0000:15:01.0"), ("pci0000:15", "0000:15:03.0")).kind
    'root'
    >>> route(("pci0000:15", "0000:15:01.0"), ("pci0000:97", "0000:97:01.0")).kind
    'apart'
    """
    if len(one) < 2 or len(other) < 2:
        return Route("unknown")
    # A device is no bridge to itself, so its own address does not count.
    pairs = takewhile(lambda pair: pair[0] == pair[1], zip(one[:-1], other[:-1], strict=False))
    common = [bridge for bridge, _ in pairs]
    if not common:
        return Route("apart")
    return Route("bridge" if len(common) > 1 else "root", common[-1])
