"""One header block of a tar that another tool wrote, and the records of a PAX extended header.

Old V7, POSIX ustar (with PAX) and GNU headers, read as GNU tar, libarchive and Python's tarfile read them. Where these
three disagree about a name or a size, the header is refused: what one tool lists, another one must find there too.
"""

from __future__ import annotations

import enum
import re
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardkit.errors import TarFormatError, UnsafeError

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["MAX_NAME_LENGTH", "ForeignHeader", "Refusal", "name_refusal", "parse_foreign_header", "pax_records"]

MAX_NAME_LENGTH = 4096
"""Bytes of the longest name that is taken: Linux opens no longer path."""


class Refusal(enum.Enum):
    """Why a member is passed over. The value is the sentence, `code` the word for reports."""

    LINK = "a link is never followed"
    DEVICE = "a device has no payload"
    FIFO = "a FIFO has no payload"
    SPARSE = "the payload of a sparse file has holes"
    CONTINUATION = "a piece of a file that begins in another volume"
    UNKNOWN_KIND = "a kind of member that holds no plain file"
    NO_NAME = "there is no base name"
    NUL_IN_NAME = "a NUL stands inside the name"
    ABSOLUTE_NAME = "the name is absolute"
    PARENT_IN_NAME = "the name leads up through '..'"
    LONG_NAME = "the name is longer than 4096 bytes"
    AMBIGUOUS_NAME = "tar readers disagree about the name: bytes stand where only POSIX headers have a prefix"

    @property
    def code(self) -> str:
        """Lower-case words joined by hyphens, stable.

        >>> Refusal.NUL_IN_NAME.code
        'nul-in-name'
        """
        return self.name.lower().replace("_", "-")


@dataclass(frozen=True, slots=True)
class ForeignHeader:
    """What one header block states by itself."""

    name: bytes
    """With the ustar prefix, up to the first NUL."""
    size: int
    """Bytes as stated; never trusted before it is held against the file's end."""
    typeflag: bytes
    """One byte."""
    refusal: Refusal | None
    """What is wrong with `name`, which an extended header may replace."""
    more_sparse_blocks: bool
    """An old GNU sparse header whose map goes on in the next block."""


_OCTAL = re.compile(rb" *([0-7]{1,12})[ \0]*")
_POSIX_MAGIC = b"ustar\0"
_AFTER_TIMES = 385
"""Where in a GNU header the access and the change time, the volume's offset and an unused field are through."""
_COMPRESSED = {
    b"\x1f\x8b": "gzip",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"BZh": "bzip2",
    b"\xfd7zXZ\0": "xz",
    b"\x04\x22\x4d\x18": "lz4",
    b"PK\x03\x04": "zip",
}


def parse_foreign_header(block: bytes, offset: int) -> ForeignHeader:
    """Return what a header block states.

    Args:
        block: 512 bytes that are not all NUL; not retained.
        offset: where it stands in the file, for errors.

    Raises:
        TarFormatError: the checksum is wrong, or the size is no number or negative.
        UnsafeError: tar readers disagree about the size.
    """
    _check_sum(block, offset)
    typeflag = block[156:157]
    name, hidden = _cut(block[:100])
    refusal = Refusal.NUL_IN_NAME if hidden else None
    # GNU headers have times, sparse maps and a second size where POSIX has the prefix. Python's tarfile takes them for
    # a prefix; libarchive looks for sparse maps and the second size also where nothing is sparse.
    if block[257:263] == _POSIX_MAGIC:
        prefix, hidden = _cut(block[345:500])
        name = prefix + b"/" + name if prefix else name
        refusal = Refusal.NUL_IN_NAME if hidden else refusal
    elif typeflag != b"S" and block.count(0, _AFTER_TIMES) < 512 - _AFTER_TIMES:
        raise UnsafeError("tar readers disagree about the size: bytes stand where only sparse files have some",
                          offset=offset + _AFTER_TIMES, expected="NUL bytes")  # fmt: skip
    elif typeflag != b"S" and block.count(0, 345, _AFTER_TIMES) < _AFTER_TIMES - 345:
        refusal = Refusal.AMBIGUOUS_NAME
    more = typeflag == b"S" and block[482] != 0
    # GNU tar leaves the size of a volume label empty.
    size = 0 if typeflag == b"V" and not any(block[124:136]) else _size(block[124:136], offset)
    return ForeignHeader(name, size, typeflag, refusal, more)


def _check_sum(block: bytes, offset: int) -> None:
    stated = _OCTAL.fullmatch(block[148:156])
    # The checksum's own eight bytes count as blanks. Some old tars summed signed characters.
    unsigned = _sum(block) - sum(block[148:156]) + 8 * 32
    value = int(stated[1], 8) if stated else -1
    if value == unsigned:
        return
    if value == unsigned - 256 * sum(byte > 127 for byte in block[:148] + block[156:]):
        return
    kind = next((name for magic, name in _COMPRESSED.items() if block.startswith(magic)), None) if offset == 0 else None
    if kind is not None:
        raise TarFormatError("compressed, so that no member can be read alone", offset=offset, found=kind,
                             remedy="decompress it first")  # fmt: skip
    what = "not a tar" if offset == 0 else "not a tar header: the checksum is wrong"
    found = f"checksum {value}" if stated else "no checksum"
    raise TarFormatError(what, offset=offset, expected=f"checksum {unsigned}", found=found)


def _sum(block: bytes) -> int:
    """Return the sum of 512 bytes, ten times as fast as `sum`.

    The low half of an Adler-32 is one plus the sum of the bytes modulo 65521, which 256 bytes do not reach.
    """
    return (zlib.adler32(block[:256]) & 0xFFFF) + (zlib.adler32(block[256:]) & 0xFFFF) - 2


def _cut(field: bytes) -> tuple[bytes, bool]:
    """Return a text up to its first NUL, and whether anything but NULs follows."""
    text = field.rstrip(b"\0")
    if b"\0" in text:
        return text[: text.index(b"\0")], True
    return text, False


def _size(field: bytes, offset: int) -> int:
    if field[0] == 0x80:  # base 256, for sizes from 8 GiB on
        return int.from_bytes(field[1:], "big")
    digits = _OCTAL.fullmatch(field)
    if digits is None:
        what = "the size of a member is negative" if field[0] == 0xFF else "the size of a member is no number"
        raise TarFormatError(what, offset=offset + 124, expected="octal digits, or base 256", found=field.hex())
    return int(digits[1], 8)


def name_refusal(name: bytes) -> Refusal | None:
    """Return why a member of this name is not taken, None when its name is safe.

    >>> name_refusal(b"a/../b.jpg"), name_refusal(b"./a..b/c.jpg")
    (<Refusal.PARENT_IN_NAME: "the name leads up through '..'">, None)
    """
    if not name:
        return Refusal.NO_NAME
    if b"\0" in name:
        return Refusal.NUL_IN_NAME
    if len(name) > MAX_NAME_LENGTH:
        return Refusal.LONG_NAME
    if name.startswith(b"/"):
        return Refusal.ABSOLUTE_NAME
    return Refusal.PARENT_IN_NAME if b".." in name.split(b"/") else None


def pax_records(data: bytes, offset: int) -> Iterator[tuple[bytes, bytes]]:
    r"""Yield keyword and value of each record of an extended header.

    Args:
        data: its whole payload.
        offset: where the payload stands in the file, for errors.

    Raises:
        TarFormatError: the records are malformed, or do not fill the payload.

    >>> list(pax_records(b"12 size=123\n6 a=b\n", 0))
    [(b'size', b'123'), (b'a', b'b')]
    """
    at = 0
    while at < len(data):
        space = data.find(b" ", at, at + 10)
        digits = data[at:space] if space > 0 else b""
        end = at + int(digits) if digits.isdigit() else 0
        equals = data.find(b"=", space + 1, max(end - 1, 0))
        if end > len(data) or equals <= space + 1 or data[end - 1] != ord("\n"):
            found = repr(data[at : at + 40])
            raise TarFormatError("not a PAX record", offset=offset + at, expected="LENGTH KEYWORD=VALUE", found=found)
        yield data[space + 1 : equals], data[equals + 1 : end - 1]
        at = end
