"""The picture of a comparison; the only importer of matplotlib."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, TypeAlias

from shardkit.benching.case import KINDS
from shardkit.errors import CapabilityError, from_os_error

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardkit.benching.turns import Row

__all__ = ["draw", "require_format", "require_matplotlib"]

_Foreign: TypeAlias = Any  # matplotlib, which may not be installed
_COLOURS = {
    "plain": "#9aa5b1", "read": "#4c78a8", "decode": "#72b7b2", "pipeline": "#54a24b", "rival": "#e45756",
    "train": "#b279a2", "engines": "#439894", "first": "#eeca3b", "epochs": "#88d27a",
}  # fmt: skip
_INCHES_A_ROW = 0.28


def require_matplotlib() -> _Foreign:
    """Return what makes figures.

    Raises:
        CapabilityError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise CapabilityError(
            "a plot needs matplotlib", found=str(error), remedy="pip install 'shardkit[plots]', or leave --plot out"
        ) from error
    return Figure


def require_format(path: str | os.PathLike[str]) -> None:
    """Refuse a picture that cannot be drawn.

    Raises:
        CapabilityError: matplotlib is not installed, or does not know the format.
    """
    known = require_matplotlib()().canvas.get_supported_filetypes()
    ending = os.path.splitext(path)[1].removeprefix(".").lower()
    if ending and ending not in known:  # without one matplotlib adds .png
        raise CapabilityError(
            "matplotlib does not know such a picture", path=path, expected=", ".join(sorted(known)),
            remedy="name it FILE.png",
        )  # fmt: skip


def draw(rows: Sequence[Row], path: str | os.PathLike[str], title: str) -> None:
    """Write a picture: a bar a row, its lowest and highest run, and the CPU time an image beside it.

    Args:
        rows: those without a run are left out.
        path: the picture; its ending names the format, as in .png.
        title: above it.

    Raises:
        CapabilityError: matplotlib is not installed, or does not know the format.
        ShardkitError: the file cannot be written.
    """
    figure_of = require_matplotlib()
    kinds = [kind for kind in KINDS if any(row.case.kind == kind and row.runs for row in rows)]
    shown = [row for kind in kinds for row in _slowest_first(rows, kind)]
    # A Figure of its own and not pyplot: no window system is looked for, and nothing stays behind.
    figure = figure_of(figsize=(11, 1.4 + _INCHES_A_ROW * len(shown)), layout="constrained")
    rates, cpu = figure.subplots(1, 2, sharey=True, width_ratios=(3, 1))
    names = [f"{row.case.kind}: {row.case.name}" for row in shown]
    middles = [row.median("images_s") or 0.0 for row in shown]
    lows = [middle - min(row.values("images_s")) for middle, row in zip(middles, shown, strict=True)]
    highs = [max(row.values("images_s")) - middle for middle, row in zip(middles, shown, strict=True)]
    colours = [_COLOURS[row.case.kind] for row in shown]
    places = range(len(shown))
    rates.barh(places, middles, xerr=(lows, highs), color=colours, ecolor="#333333", capsize=2)
    rates.set_yticks(places, names, fontsize=8)
    rates.set_xlabel("images/s: median, lowest, highest")
    if middles and max(middles) > 20 * max(min(middles), 1e-9):
        rates.set_xscale("log")  # reading is a hundred times as fast as decoding on a CPU
    cpu.barh(places, [row.median("cpu_us") or 0.0 for row in shown], color=colours)
    cpu.set_xlabel("CPU µs an image")
    figure.suptitle(title, fontsize=10)
    try:
        figure.savefig(path, dpi=150)
    except ValueError as error:
        raise CapabilityError(
            "matplotlib does not know such a picture", path=path, found=str(error), remedy="name it FILE.png"
        ) from error
    except OSError as error:
        raise from_os_error(error, "cannot write a plot", path=path) from error


def _slowest_first(rows: Sequence[Row], kind: str) -> list[Row]:
    """Return a kind's rows; bars are drawn from below, so the fastest is on top."""
    return sorted((r for r in rows if r.case.kind == kind and r.runs), key=lambda r: r.median("images_s") or 0.0)
