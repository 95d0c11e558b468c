"""Sample keys and source texts: names from disk, made safe without losing which is which.

Both maps are injective, so two files never share a key or a source by accident. (Keys leave the extension away: that
`a.jpg` and `a.jpeg` then meet is found before anything is written.)
"""

from __future__ import annotations

import re

from shardkit.errors import IndexFormatError
from shardkit.format.checksum import hex_digest

__all__ = [
    "MAX_KEY_BYTES",
    "is_safe_key",
    "key_from_path",
    "path_from_source",
    "source_from_path",
    "source_from_text",
    "without_here",
]

MAX_KEY_BYTES = 95
"""Bytes. A ustar name has 100, and the longest extension, `.json`, takes five of them."""

_KEPT_BYTES = 62
_SAFE_KEY = re.compile(r"(?!__)[A-Za-z0-9_-]+(?:/(?!__)[A-Za-z0-9_-]+)*")
_HASHED_KEY = re.compile(r"[A-Za-z0-9_/-]{62}-[0-9a-f]{32}")
# What cannot stand in a key; then what could be taken for an escape, a name that webdataset passes over, or no name.
_TO_ESCAPE = re.compile(rb"[^A-Za-z0-9_/-]|-(?=x[0-9A-F]{2})|(?:(?<=^)|(?<=/))_(?=_)|^/|/(?=/|\Z)")
_PLAIN = re.compile(rb"(?!__)[A-Za-z0-9_-]+(?:/(?!__)[A-Za-z0-9_-]+)*")
"""A path where `_TO_ESCAPE` finds nothing, unless it contains `-x`; four times as fast to try as to substitute."""
_HERE = re.compile(r"(?:\./)+(?=.)", re.DOTALL)
_ESCAPE_IN_SOURCE = re.compile(r"%|[\udc80-\udcff]")


def is_safe_key(key: str) -> bool:
    """Tell whether every reader takes `key` as it stands.

    It is 1 to 95 of `A-Z a-z 0-9 _ - /`; no part between slashes is empty or starts with `__`.

    >>> is_safe_key("cats/tom-1"), is_safe_key("cats/tom.1"), is_safe_key("/tom"), is_safe_key("__tom__")
    (True, False, False, False)
    """
    return len(key) <= MAX_KEY_BYTES and _SAFE_KEY.fullmatch(key) is not None


def key_from_path(path: bytes) -> str:
    """Return the key of a source: its path without the extension, each unsafe byte written as `-xHH`.

    Letters, digits, `_`, `-` and `/` stay. Any other byte becomes `-x` and two upper-case hex digits; so do a `-`
    that would read as such an escape, a `/` beside which no name stands, and the first `_` of a folder or file whose
    name starts with `__` (webdataset passes over those). A key that would be longer than 95 bytes keeps its first 62
    and ends in `-` and the 32 hex digits of the XXH3-128 of `path`; so does one that looks like that by itself.

    Args:
        path: relative path with `/` between folders, as the file system gives it; with its extension; not empty.

    >>> key_from_path(b"n01440764/n01440764_10026.JPEG")
    'n01440764/n01440764_10026'
    >>> key_from_path("été/my cat.v2.jpg".encode())
    '-xC3-xA9t-xC3-xA9/my-x20cat-x2Ev2'
    """
    folder, slash, name = path.rpartition(b"/")
    stem = name.rpartition(b".")[0] or name
    raw = folder + slash + stem
    plain = _PLAIN.fullmatch(raw) and b"-x" not in raw
    key = (raw if plain else _TO_ESCAPE.sub(lambda m: b"-x%02X" % m[0][0], raw)).decode("ascii")
    if len(key) <= MAX_KEY_BYTES and not _HASHED_KEY.fullmatch(key):
        return key
    return f"{key[:_KEPT_BYTES]}-{hex_digest('xxh3-128', path)}"


def source_from_path(path: bytes) -> str:
    r"""Return a path as text: UTF-8 as it is, any other byte and the percent sign itself as `%HH`.

    >>> source_from_path(b"a/caf\xc3\xa9.jpg"), source_from_path(b"100%\xff.jpg")
    ('a/café.jpg', '100%25%FF.jpg')
    """
    text = path.decode("utf-8", "surrogateescape")
    return _ESCAPE_IN_SOURCE.sub(lambda m: f"%{_byte(m[0]):02X}", text)


def path_from_source(source: str) -> bytes:
    r"""Return the path that `source_from_path` was given.

    The path is as untrusted as its index: it may be absolute or lead upwards.

    Raises:
        IndexFormatError: a text that `source_from_path` does not write.

    >>> path_from_source("100%25%FF.jpg")
    b'100%\xff.jpg'
    """
    try:
        parts = source.encode("utf-8").split(b"%")
        path = parts[0] + b"".join(bytes([int(part[:2], 16)]) + part[2:] for part in parts[1:])
    except ValueError:
        path = None
    if path is None or source_from_path(path) != source:
        raise IndexFormatError("not a source path", expected="%HH for a percent sign and what is not UTF-8",
                               found=repr(source[:80]))  # fmt: skip
    return path


def source_from_text(text: str) -> str:
    """Return the source that a text of another tool stands for: itself when it is one, else as the path that it reads.

    Raises:
        UnicodeEncodeError: it has a lone surrogate, and no index holds it.

    >>> source_from_text("a%25b.jpg"), source_from_text("100% wool.jpg")
    ('a%25b.jpg', '100%25 wool.jpg')
    """
    try:
        path_from_source(text)
    except IndexFormatError:
        return source_from_path(text.encode("utf-8"))
    return text


def without_here(text: str) -> str:
    """Return a key or source without any `./` that it begins with, as in tars of `tar -C DIR -cf X.tar .`.

    What is left is as untrusted as before; only nothing is never left.

    >>> without_here("./000000.jpg"), without_here("././a/./b"), without_here("../a"), without_here(".//a")
    ('000000.jpg', 'a/./b', '../a', '/a')
    """
    here = _HERE.match(text)
    return text if here is None else text[here.end() :]


def _byte(character: str) -> int:
    code = ord(character)
    return code if code < 0x80 else code - 0xDC00
