"""The text index (v1.2) that DALI's webdataset reader takes, as DALI's own `wds2idx` writes it.

The first line is `v1.2 COUNT`; then a line a sample, of `EXTENSION OFFSET SIZE NAME` for each member in stored order.
Fields are separated by spaces, so a name with a space would inject fields: shardkit's member names have none, and those
of other tools are written with `listed_word`.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from shardkit.errors import IndexFormatError
from shardkit.format.text_columns import joined

if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import TypeAlias

    import numpy.typing as npt

    Ints: TypeAlias = npt.NDArray[np.int64]
    Texts: TypeAlias = npt.NDArray[np.bytes_] | npt.NDArray[np.object_]

__all__ = ["VERSION", "IndexedMember", "encode_dali_columns", "encode_dali_index", "listed_word", "parse_dali_index"]

VERSION = "v1.2"

_NUMBER = "(?:0|[1-9][0-9]{0,18})"
_MEMBER = rf"[!-~]+ {_NUMBER} {_NUMBER} [!-~]+"
_LINE = re.compile(rf"{_MEMBER}(?: {_MEMBER})*")
_HEAD = re.compile(rf"{re.escape(VERSION)} ({_NUMBER})")
_NOT_IN_LINES = re.compile(rb"[^!-~]")


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


def listed_word(text: str) -> str:
    r"""Return a text as a field of the index: bytes outside of `!` to `~` as `%HH`, a percent sign as itself.

    >>> listed_word("a b/\n100%.jpg")
    'a%20b/%0A100%.jpg'
    """
    raw = text.encode("utf-8", "surrogateescape")
    return _NOT_IN_LINES.sub(lambda found: b"%%%02X" % found[0][0], raw).decode("ascii")


def encode_dali_index(samples: Iterable[Iterable[IndexedMember]]) -> bytes:
    r"""Return the whole index file.

    >>> encode_dali_index([[IndexedMember("cls", 512, 1, "a.cls"), IndexedMember("jpg", 4096, 9, "a.jpg")]])
    b'v1.2 1\ncls 512 1 a.cls jpg 4096 9 a.jpg\n'
    """
    lines = [" ".join([f"{end} {offset} {size} {name}" for end, offset, size, name in members]) for members in samples]
    return "\n".join([f"{VERSION} {len(lines)}", *lines, ""]).encode("ascii")


def encode_dali_columns(count: int, owners: Ints, offsets: Ints, sizes: Ints, extensions: Texts, names: Texts) -> bytes:
    r"""Return the whole index file of samples whose members are given as columns, sample by sample.

    Args:
        count: samples.
        owners: shape [members], rising; members of one number are a sample.
        offsets: shape [members], of the payloads; bytes.
        sizes: shape [members], payload bytes.
        extensions: shape [members], as `IndexedMember` has them; so the names.
        names: shape [members].

    >>> columns = [np.array(pair) for pair in ([0, 0], [512, 4096], [1, 9], [b"cls", b"jpg"], [b"a.cls", b"a.jpg"])]
    >>> encode_dali_columns(1, *columns)
    b'v1.2 1\ncls 512 1 a.cls jpg 4096 9 a.jpg\n'
    """
    last = np.append(owners[1:] != owners[:-1], True)
    lines = joined([extensions, offsets, sizes, names], b" ", np.where(last, b"\n", b" "))
    return b"".join([f"{VERSION} {count}\n".encode("ascii"), *lines])


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
