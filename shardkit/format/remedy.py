"""What to do about a folder that is no dataset, told from what lies in it: the same words in every command."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardkit.escaping import escape

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["remedy_without_manifest"]

_SHOWN = 3


def remedy_without_manifest(names: Iterable[str], datasets: Iterable[str] = ()) -> str | None:
    """Return what makes, or finds, a dataset where a folder has no manifest; None when its entries say nothing.

    Args:
        names: of the folder's entries. Tars without one index beside them are another tool's, as far as anyone sees.
        datasets: paths of the folders in it that are datasets.
    """
    inner = sorted(datasets)
    if inner:
        more = f" and {len(inner) - _SHOWN} others" if len(inner) > _SHOWN else ""
        return f"name a dataset in it: {', '.join(map(escape, inner[:_SHOWN]))}{more}"
    there = list(names)
    if any(name.endswith(".tar") for name in there) and not any(name.endswith(".arrow") for name in there):
        return "make a dataset of the shards in it, where they lie: shardkit index"
    return None
