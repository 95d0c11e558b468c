"""The text index (v1.2) that DALI's webdataset reader takes, as DALI's own `wds2idx` writes it.

The first line is `v1.2 COUNT`; then a line a sample, of `EXTENSION OFFSET SIZE NAME` for each member in stored order.
Fields are separated by spaces, so a name with a space would inject fields: shardkit's member names have none.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

from shardkit.errors import IndexFormatError

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["VERSION", "IndexedMember", "encode_dali_index", "parse_dali_index"]

VERSION = "v1.2"

_NUMBER = "(?:0|[1-9][0-9]{0,18})"
_MEMBER = rf"[!-~]+ {_NUMBER} {_NUMBER} [!-~]+"
_LINE = re.compile(rf"{_MEMBER}(?: {_MEMBER})*")
_HEAD = re.compile(rf"{re.escape(VERSION)} ({_NUMBER})")


class IndexedMember(NamedTuple):
    """One member of a sample, as the text index names it."""

    extension: str
    """What follows the first dot of the basename."""
    offset: int
    """Byte offset of the payload in the shard; a multiple of 512."""
    size: int
    """Payload bytes."""
    name: str
    """Member name; no white space."""


def encode_dali_index(samples: Iterable[Iterable[IndexedMember]]) -> bytes:
    r"""Return the whole index file.

    >>> encode_dali_index([[IndexedMember("cls", 512, 1, "a.cls"), IndexedMember("jpg", 4096, 9, "a.jpg")]])
    b'v1.2 1\ncls 512 1 a.cls jpg 4096 9 a.jpg\n'
    """
    lines = [" ".join([f"{end} {offset} {size} {name}" for end, offset, size, name in members]) for members in samples]
    return "\n".join([f"{VERSION} {len(lines)}", *lines, ""]).encode("ascii")


def parse_dali_index(data: bytes) -> list[list[IndexedMember]]:
    """Return the members of every sample; the inverse of `encode_dali_index`.

    Stricter than DALI, which takes tabs, older versions and surplus lines too.

    Raises:
        IndexFormatError: another version, a wrong count, or a line that is not whole; names the line.
    """
    lines = data.decode("ascii", "replace").split("\n")
    head = _HEAD.fullmatch(lines[0])
    if head is None:
        raise IndexFormatError("not a DALI index", expected=f"'{VERSION} COUNT'", found=repr(lines[0][:40]))
    rows = lines[1:-1]
    if lines[-1] != "" or len(rows) != int(head[1]):
        raise IndexFormatError("DALI index of another length", expected=f"{head[1]} lines", found=f"{len(rows)} lines")
    return [_parse_line(number, row) for number, row in enumerate(rows, 2)]


def _parse_line(number: int, row: str) -> list[IndexedMember]:
    if not _LINE.fullmatch(row):
        raise IndexFormatError(f"DALI index line {number} is not whole", found=repr(row[:80]))
    members = zip(*(iter(row.split(" ")),) * 4, strict=True)
    return [IndexedMember(extension, int(offset), int(size), name) for extension, offset, size, name in members]
