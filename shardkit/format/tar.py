"""Tar blocks: the canonical ustar subset that shardkit writes, byte for byte.

POSIX.1-2017 (IEEE Std 1003.1), `pax` interchange format. A member is one 512-byte ustar header, its payload, and NUL
bytes up to the next multiple of 512. Only two kinds of header exist: a regular file, and a PAX `x` header whose only
record is a `comment` that serves as padding. Everything that could vary (mode, owner, times) is constant, so a header
is a function of (name, size, kind), and checking one means encoding it again and comparing.
"""

from __future__ import annotations

from dataclasses import dataclass

from shardkit.errors import TarFormatError

__all__ = [
    "BLOCK",
    "END_BLOCKS",
    "MAX_MEMBER_BYTES",
    "MAX_NAME_BYTES",
    "PAX_NAME",
    "Header",
    "encode_header",
    "encode_padding",
    "parse_header",
    "tail_bytes",
]

BLOCK = 512
"""Bytes of a tar block."""
END_BLOCKS = 2
"""Zero blocks that end an archive."""
MAX_NAME_BYTES = 100
"""Bytes of the ustar `name` field; `prefix` stays empty."""
MAX_MEMBER_BYTES = 8**11 - 1
"""Bytes that eleven octal digits can state: 8 GiB - 1."""
PAX_NAME = "././@PaxHeader"
"""The member name of a padding header, the one that POSIX tools write."""

_OWNER = "root"
_REGULAR = b"0"
_PADDING = b"x"
_FILLER = b"."


def _field(text: str, width: int) -> bytes:
    return text.encode("ascii").ljust(width, b"\0")


# The header between name and size, and after the checksum. Offsets: name 0, mode 100, uid 108, gid 116, size 124,
# mtime 136, checksum 148, kind 156, linkname 157, magic 257, version 263, uname 265, gname 297, devmajor 329,
# devminor 337, prefix 345.
_MODE_UID_GID = b"0000644\0" + b"0000000\0" * 2
_MTIME = b"00000000000\0"
_AFTER_KIND = bytes(100) + b"ustar\00000" + _field(_OWNER, 32) * 2 + b"0000000\0" * 2 + bytes(167)
_CONSTANT_SUM = sum(_MODE_UID_GID) + sum(_MTIME) + sum(_AFTER_KIND) + sum(b" " * 8)


@dataclass(frozen=True, slots=True)
class Header:
    """What a canonical header states."""

    name: str
    """Member name; ASCII, at most 100 bytes."""
    size: int
    """Payload bytes that follow the header, without padding."""
    padding: bool
    """True for a PAX header that only pads; False for a regular file."""


def encode_header(name: str, size: int, *, padding: bool = False) -> bytes:
    """Return the 512 bytes of a canonical header.

    Args:
        name: member name; ASCII, 1 to 100 bytes.
        size: payload bytes, 0 to `MAX_MEMBER_BYTES`.
        padding: make it a PAX `x` header instead of a regular file's.

    Raises:
        TarFormatError: the name or the size does not fit the ustar fields.
    """
    if not 0 <= size <= MAX_MEMBER_BYTES:
        raise TarFormatError("a ustar member is below 8 GiB", expected=f"0 to {MAX_MEMBER_BYTES} bytes", found=size)
    if not name.isascii() or not 0 < len(name) <= MAX_NAME_BYTES or "\0" in name:
        raise TarFormatError("a ustar name is 1 to 100 ASCII bytes", found=f"{len(name)} characters", key=name)
    kind = _PADDING if padding else _REGULAR
    name_bytes = name.encode("ascii")
    size_digits = b"%011o" % size
    checksum = _CONSTANT_SUM + sum(name_bytes) + sum(size_digits) + kind[0]
    return b"%b%b%b\0%b%06o\0 %b%b" % (
        name_bytes.ljust(MAX_NAME_BYTES, b"\0"), _MODE_UID_GID, size_digits, _MTIME, checksum, kind, _AFTER_KIND
    )  # fmt: skip


def parse_header(block: bytes | bytearray | memoryview) -> Header:
    """Return what a canonical header states.

    Args:
        block: exactly 512 bytes, in host memory; not retained.

    Raises:
        TarFormatError: any byte differs from what `encode_header` writes for the stated name, size and kind; the
            error's `offset` is the first such byte within the block.
    """
    block = bytes(block)
    if len(block) != BLOCK:
        raise TarFormatError("a tar header is one block", expected=f"{BLOCK} bytes", found=f"{len(block)} bytes")
    name_field, size_field, kind = block[:100], block[124:135], block[156:157]
    name = name_field.rstrip(b"\0").decode("latin-1")
    if not name or not name.isascii() or "\0" in name:
        raise TarFormatError("not a canonical ustar name", offset=0, found=repr(name_field.rstrip(b"\0")[:40]))
    if not size_field.isdigit() or b"8" in size_field or b"9" in size_field:
        raise TarFormatError("not a canonical ustar size", offset=124, expected="11 octal digits", found=size_field)
    if kind not in (_REGULAR, _PADDING):
        raise TarFormatError("not a canonical member type", offset=156, expected="'0' or 'x'", found=kind)
    header = Header(name, int(size_field, 8), kind == _PADDING)
    canonical = encode_header(header.name, header.size, padding=header.padding)
    if block != canonical:
        at = next(i for i, (a, b) in enumerate(zip(block, canonical, strict=True)) if a != b)
        raise TarFormatError("not a canonical ustar header", offset=at, expected=canonical[at], found=block[at])
    return header


def encode_padding(padding_bytes: int) -> bytes:
    r"""Return a PAX header with one `comment` record that together fill `padding_bytes`.

    The standard `comment` keyword is passed over in silence by every reader; a keyword of our own would make GNU tar
    warn for each member.

    Args:
        padding_bytes: a multiple of 512; 0 (returns nothing) or at least 1024, since a PAX header takes two blocks.

    Raises:
        TarFormatError: a size that no PAX header has.

    >>> len(encode_padding(1024)), encode_padding(1024)[512:530]
    (1024, b'512 comment=......')
    """
    if padding_bytes == 0:
        return b""
    record_bytes = padding_bytes - BLOCK
    if record_bytes < BLOCK or padding_bytes % BLOCK:
        raise TarFormatError("padding is 0 or whole blocks from 1024 bytes on", found=padding_bytes)
    start = b"%d comment=" % record_bytes
    record = start + _FILLER * (record_bytes - len(start) - 1) + b"\n"
    return encode_header(PAX_NAME, record_bytes, padding=True) + record


def tail_bytes(size: int) -> int:
    """Return how many NUL bytes follow a payload of `size` bytes.

    >>> tail_bytes(512), tail_bytes(1)
    (0, 511)
    """
    return -size % BLOCK
