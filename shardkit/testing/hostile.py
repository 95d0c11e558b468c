"""Texts that a page or a terminal would obey if it could: for keys, sources, classes and all that is printed."""

from __future__ import annotations

__all__ = ["HOSTILE_TEXTS"]

HOSTILE_TEXTS = (
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(2)>',
    "' onmouseover='alert(3)",
    "&lt;b&gt; &amp;",
    "</style></title></section><!--",
    "\u202egpj.exe\u2066",
    "bell\x07 \x1b[31mred\x1b[0m\r\n\x00\x7f\x85",
    "$x^2$ \\frac {0} %s",
    "http://127.0.0.1:9/x.png",
    "\u05e9\u05dc\u05d5\u05dd",
)
"""Markup, the ends of what it may stand in, overrides of direction, control characters, an address, Hebrew."""
