"""Texts as HTML: what a dataset says is data here, whatever it says."""

from __future__ import annotations

from html import escape as escape_html
from typing import TYPE_CHECKING

from shardkit.escaping import escape

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["MAX_TEXT", "Raw", "attribute", "clip", "definition_list", "limit_note", "table", "text"]

MAX_TEXT = 300
"""Characters of a text in the page."""


class Raw(str):
    """HTML that was made here."""

    __slots__ = ()


def clip(value: str) -> str:
    """Return a text without what a page could obey (`shardkit.escaping`), and not too long."""
    told = value if value.isprintable() else escape(value)
    return told if len(told) <= MAX_TEXT else told[: MAX_TEXT - 1] + "…"


def text(value: str) -> str:
    r"""Return a text as HTML that stands for itself, its direction kept from its neighbours.

    >>> text("<b>\u202e&"), text("plain")
    ('&lt;b&gt;\\u202e&amp;', 'plain')
    """
    shown = escape_html(clip(value))
    return shown if shown.isascii() else f"<bdi>{shown}</bdi>"


def attribute(value: str) -> str:
    """Return a text as the value of an attribute, between double quotes.

    >>> attribute('a" onerror="b')
    'a&quot; onerror=&quot;b'
    """
    return escape_html(value if value.isprintable() else escape(value), quote=True)


def table(heads: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[bool] = ()) -> str:
    """Return a table; cells that are not `Raw` are texts. `right` tells which columns hold numbers."""
    marks = [' class="number"' if mark else "" for mark in (*right, *[False] * (len(heads) - len(right)))]
    head = "".join(f"<th{mark}>{text(cell)}</th>" for cell, mark in zip(heads, marks, strict=True))
    body = "".join(
        "<tr>" + "".join(f"<td{mark}>{_cell(cell)}</td>" for cell, mark in zip(row, marks, strict=True)) + "</tr>\n"
        for row in rows
    )
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead>\n<tbody>\n{body}</tbody></table></div>'


def definition_list(rows: Sequence[tuple[str, str]]) -> str:
    """Return names and what they mean."""
    inner = "".join(f"<div><dt>{text(name)}</dt><dd>{text(value)}</dd></div>" for name, value in rows)
    return f"<dl>{inner}</dl>"


def limit_note(shown: int, total: int, one: str, many: str = "") -> str:
    """Return how many more there are; nothing when all are shown."""
    if shown >= total:
        return ""
    more = total - shown
    return f'<p class="note">... and {more:,} more {one if more == 1 else many or one + "s"}.</p>'


def _cell(cell: str) -> str:
    return cell if isinstance(cell, Raw) else text(cell)
