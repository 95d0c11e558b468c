"""The file that says what an unfinished run was told: one line of JSON behind its digest."""

from __future__ import annotations

import os
from typing import Any

from shardkit.format.checksum import hex_digest
from shardkit.format.strict_json import dump_json, parse_json_object

__all__ = ["are_file_names", "are_texts", "seal", "unseal"]

_DIGEST = "xxh3-128"


def seal(record: object) -> bytes:
    """Return the file's bytes: a digest, then the record, a dataclass of JSON values."""
    text = dump_json(record).encode()
    return hex_digest(_DIGEST, text).encode() + b" " + text + b"\n"


def unseal(data: bytes) -> dict[str, Any] | None:
    """Return the fields that `seal` was given; None when the file is damaged, or holds no record."""
    check, _, text = data.removesuffix(b"\n").partition(b" ")
    if check != hex_digest(_DIGEST, text).encode():
        return None
    try:
        return parse_json_object(text.decode("ascii"))
    except ValueError:
        return None


def are_texts(value: object) -> bool:
    """Tell whether this is a list of texts."""
    return isinstance(value, list) and all(isinstance(text, str) for text in value)


def are_file_names(value: object) -> bool:
    """Tell whether this is a list of texts that can name files: JSON has some that no file system takes."""
    if not isinstance(value, list) or not are_texts(value):
        return False
    try:
        return all("\0" not in name and os.fsencode(name) for name in value)
    except UnicodeEncodeError:
        return False
