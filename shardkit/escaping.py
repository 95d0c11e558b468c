"""Names from disk, made safe to print; texts that are Unicode, and those that only look like it."""

from __future__ import annotations

import os
import re

__all__ = ["escape", "is_unicode"]

_SURROGATE = re.compile("[\ud800-\udfff]")


def escape(name: str | bytes | os.PathLike[str] | os.PathLike[bytes]) -> str:
    r"""Return `name` with everything that a terminal, a log or a page could obey written as an escape.

    Control characters, line breaks, bidirectional overrides, lone surrogates (bytes that are not UTF-8) and the
    backslash itself become backslash escapes, so that two different names never print alike.

    >>> escape(b"a\x1b[31m\n.jpg")
    'a\\x1b[31m\\n.jpg'
    >>> escape("caf\u00e9/\u202egpj.exe")
    'café/\\u202egpj.exe'
    """
    text = os.fsdecode(os.fspath(name))
    if text.isascii() and text.isprintable() and "\\" not in text:
        return text
    return "".join(_escape_character(character) for character in text)


def is_unicode(text: str) -> bool:
    """Tell whether UTF-8 can hold a text: JSON and names from disk may have halves of characters."""
    return _SURROGATE.search(text) is None


def _escape_character(character: str) -> str:
    code = ord(character)
    if 0xDC80 <= code <= 0xDCFF:
        return f"\\x{code - 0xDC00:02x}"
    if character == "\\":
        return "\\\\"
    # str.isprintable is false for every control, format (bidi) and surrogate character, and for odd spaces.
    if character.isprintable():
        return character
    return character.encode("unicode_escape").decode("ascii")
