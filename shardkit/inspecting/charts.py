"""Histograms as SVG to stand inside a page; the only importer of matplotlib here.

Nothing from a dataset but numbers goes into a chart: names stand in the page's tables. Colours are the page's own
(`var(--ink)` and others), so that a chart is light or dark with it.
"""

from __future__ import annotations

import io
import itertools
import math
import re
from typing import TYPE_CHECKING, Any, TypeAlias

from shardkit.errors import CapabilityError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from shardkit.inspecting.report import Measure

__all__ = ["draw_classes", "draw_measure", "require_matplotlib"]

_Foreign: TypeAlias = Any  # matplotlib, which may not be installed

_COLOURS = {"#010101": "var(--ink)", "#020202": "var(--line)", "#030303": "var(--bar)"}
"""What is drawn with, and what stands for it in the page."""
_INK, _LINE, _BAR = _COLOURS
_INCHES = (4.8, 2.5)
_SEPARATE_BARS = 60
_POINTS = 400
_COLOUR = re.compile("|".join(_COLOURS))
_ID = re.compile(r'(\bid="|url\(#|href="#)')
_DROPPED = re.compile(r"<metadata>.*?</metadata>|<style[^>]*>.*?</style>", re.S)
_FONT = re.compile(r" font-family: [^;\"]*;")  # the page's own
_SIZE = re.compile(r'(<svg[^>]*?) width="[^"]*"| height="[^"]*pt"')


def require_matplotlib() -> _Foreign:
    """Return what makes figures.

    Raises:
        CapabilityError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise CapabilityError(
            "a page needs matplotlib for its histograms", found=str(error),
            remedy="pip install 'shardkit[plots]', or leave --html out",
        ) from error  # fmt: skip
    return Figure


def draw_measure(name: str, measure: Measure, told: Callable[[float], str]) -> str:
    """Return the histogram of a measure that some samples have, on a logarithmic axis.

    Args:
        name: of the chart, unique in the page, of letters.
        measure: what is drawn.
        told: how a value is written below the axis.
    """
    figure, axes = _axes()
    edges = [max(edge, 0.5) if name != "aspect" else max(edge, 1e-6) for edge in measure.edges]
    if edges[0] == edges[-1]:
        edges = [edges[0] / 1.05, edges[0] * 1.05]
    widths = [high - low for low, high in itertools.pairwise(edges)]
    axes.bar(edges[:-1], measure.counts, widths, align="edge", color=_BAR)
    axes.set_xscale("log")
    ticks = _ticks(edges[0], edges[-1])
    axes.set_xticks(ticks, [told(tick) for tick in ticks])
    axes.set_xticks([], minor=True)
    return _svg(figure, name)


def draw_classes(name: str, samples: Sequence[int], empty: int) -> str:
    """Return the number of samples of each class, the largest class first.

    Args:
        name: of the chart, unique in the page, of letters.
        samples: falling.
        empty: classes without a sample, which follow.
    """
    figure, axes = _axes()
    total = len(samples) + empty
    step = max(1, -(-total // _POINTS))
    places = range(0, total, step)
    heights = [samples[place] if place < len(samples) else 0 for place in places]
    wide = 0.8 if total <= _SEPARATE_BARS else step
    axes.bar([place + 1 for place in places], heights, wide, color=_BAR)
    axes.xaxis.get_major_locator().set_params(integer=True)
    return _svg(figure, name)


def _axes() -> tuple[_Foreign, _Foreign]:
    # A Figure of its own and not pyplot: no window system is looked for, and nothing stays behind.
    figure = require_matplotlib()(figsize=_INCHES, layout="constrained")
    figure.patch.set_alpha(0)
    axes = figure.subplots()
    axes.patch.set_alpha(0)
    axes.tick_params(length=0, colors=_INK, labelsize=10)
    axes.grid(axis="y", color=_LINE, linewidth=0.6)
    axes.set_axisbelow(True)
    for side, spine in axes.spines.items():
        spine.set_visible(side == "bottom")
        spine.set_color(_INK)
    axes.yaxis.get_major_locator().set_params(integer=True, nbins=5)
    axes.yaxis.set_major_formatter(_short)
    return figure, axes


def _short(value: float, _: int) -> str:
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:g}{unit}"
    return f"{value:g}"


def _ticks(low: float, high: float) -> list[float]:
    """Return at most seven round values within a range of a logarithmic axis."""
    if high < 8 * low:
        steps = [digit * 10.0**exponent for exponent in range(-7, 10) for digit in (1, 2, 5)]
        step = next(step for step in steps if (high - low) / step <= 6)
        values = [step * number for number in range(math.ceil(low / step), math.floor(high / step) + 1)]
    else:
        digits = (1, 2, 5) if high < 100 * low else (1,)
        exponents = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        values = [digit * 10.0**exponent for exponent in exponents for digit in digits]
        values = [value for value in values if low <= value <= high]
        values = values[:: -(-len(values) // 7)]
    return values or [math.sqrt(low * high)]


def _svg(figure: _Foreign, name: str) -> str:
    """Return the element, without a size of its own; its ids begin with `name`, its bytes follow from the numbers."""
    import matplotlib as mpl

    out = io.StringIO()
    settings: dict[Any, Any] = {
        "svg.fonttype": "none",
        "svg.hashsalt": name,
        "font.family": "sans-serif",
        "text.parse_math": False,
    }
    with mpl.rc_context(settings):
        figure.savefig(out, format="svg", metadata={"Date": None})
    text = out.getvalue()
    text = _DROPPED.sub("", text[text.index("<svg") :])
    text = _SIZE.sub(lambda match: match[1] or "", text, count=2)
    text = _FONT.sub("", text)
    text = _COLOUR.sub(lambda match: _COLOURS[match[0]], text)
    return _ID.sub(lambda match: match[1] + name + "-", text).strip()
