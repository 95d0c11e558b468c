"""Paths of this machine, which a URL is none of."""

from __future__ import annotations

import os
import re
from typing import TypeAlias

from shardkit.errors import ConfigError
from shardkit.escaping import escape

__all__ = ["is_url", "local_path"]

_Path: TypeAlias = str | bytes | os.PathLike[str] | os.PathLike[bytes]
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")


def is_url(text: str) -> bool:
    """Tell whether a text looks like a URL; a path of this form is written with `./` before it.

    >>> is_url("s3://bucket/ds"), is_url("./s3://bucket/ds")
    (True, False)
    """
    return _SCHEME.match(text) is not None


def local_path(path: _Path) -> bytes:
    """Return where something is to be written, absolute.

    Raises:
        ConfigError: it is a URL: nothing would be sent anywhere, and the local disk would fill up.
    """
    text = os.fsdecode(path)
    if is_url(text) and not os.path.lexists(text):
        raise ConfigError(
            "only local folders are written", expected="a path", found=escape(text[:80]),
            remedy=f"write to a local folder and copy that; a folder of this very name is ./{escape(text[:80])}",
        )  # fmt: skip
    return os.path.abspath(os.fsencode(path))
