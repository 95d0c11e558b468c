"""The short way through the headers of plain files, of which nearly all of a shard's are.

`foreign_header` has the word about what a header states. Here is only found out, in a fraction of the time, that it is
of the one common kind about which there is nothing to ask: an ordinary file of a safe ASCII name without a prefix, its
size in eleven octal digits, its checksum in six. Everything else, right or wrong, is left to the careful way.
"""

from __future__ import annotations

import struct
import zlib
from typing import TYPE_CHECKING

import numpy as np

from shardkit.format.tar import BLOCK

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

__all__ = ["MANY", "plain_header", "plain_headers", "plain_run"]

MANY = 64
"""Plain headers of one piece from which on those of the next are looked at all at once."""
_FEW = 32
"""Plain headers in a row after which those that follow are."""
_MOST = 1024

_PARTS = struct.Struct("148s9s188s167s")
"""Of a header: what stands before the checksum, the checksum and the type, all up to the prefix, and the rest."""
_SIZE = struct.Struct("124x11s")
_NO_PREFIX = bytes(167)
_MIDDLE_SUM = 8 * ord(" ") + ord("0") - 1
"""What the second part counts, less the one that an Adler-32 begins with."""
_SLASH, _DOT, _ZERO = b"/.0"
_HIGH_BITS = np.uint64(0x8080808080808080)
_EVEN_BYTES = np.uint64(0x00FF00FF00FF00FF)
_OCTAL_PLACES = np.arange(15, -3, -3, dtype=np.uint64)


def plain_header(data: bytes | memoryview, at: int) -> tuple[str, int] | None:
    """Return name and size if a header is of the most common kind: a plain file with a safe ASCII name, nothing else.

    Soon told is all that it does better: `parse_foreign_header` says the same of what is taken here, and has the word
    about everything that is not, right or wrong.

    Args:
        data: holds the 512 bytes of the header.
        at: where in `data` they are.
    """
    front, middle, back, end = _PARTS.unpack_from(data, at)
    # Without bytes above 127 the sum is the same signed and unsigned, and an Adler-32 does not wrap.
    if end != _NO_PREFIX or not front.isascii() or not back.isascii():
        return None
    if middle != b"%06o\0 0" % ((zlib.adler32(back, zlib.adler32(front)) & 0xFFFF) + _MIDDLE_SUM):
        return None
    name, digits = front[:100].rstrip(b"\0"), front[124:135]
    if front[135] not in b"\0 " or not digits.isdigit():
        return None
    # A name that ends in a slash is a directory's; of the others `name_refusal` may still take some.
    if not name or b"\0" in name or b".." in name or name[0] == _SLASH or name[-1] == _SLASH:
        return None
    try:
        return name.decode(), int(digits, 8)
    except ValueError:  # an 8 or a 9
        return None


def plain_run(data: bytes | memoryview, at: int, room: int, *, many: bool = False) -> Sequence[tuple[str, int, int]]:
    """Return name, place and size of the plain headers that follow one another in a piece of a file.

    Args:
        data: the piece.
        at: where in `data` the first header is.
        room: where, counted from the first byte of `data`, the file ends.
        many: whether there are likely many.

    Returns:
        As many as are plain, stand wholly in `data` and have their payload in the file.
    """
    found: list[tuple[str, int, int]] = []
    few, last = 0 if many else _FEW, len(data) - BLOCK
    while at <= last and len(found) < few:
        plain = plain_header(data, at)
        if plain is None:
            return found
        name, size = plain
        after = at + BLOCK + size + (-size & (BLOCK - 1))
        if after > room:
            return found
        found.append((name, at, size))
        at = after
    most = 4 * _FEW
    while at <= last:
        some = plain_headers(data, at, room, most)
        found += some
        if len(some) < most:
            break
        # More each time: what is not plain may have been looked at in vain.
        _, at, size = found[-1]
        at, most = at + BLOCK + size + (-size & (BLOCK - 1)), min(4 * most, _MOST)
    return found


def plain_headers(data: bytes | memoryview, at: int, room: int, most: int) -> Sequence[tuple[str, int, int]]:
    """Return what `plain_run` does of up to `most` headers, looked at all at once; from about a hundred on it pays."""
    places, sizes = _follow(data, at, room, most)
    if not places:
        return []
    octets = np.frombuffer(data, np.uint8, places[-1] + BLOCK - at, at).reshape(-1, BLOCK)
    blocks = octets[(np.array(places) - at) // BLOCK]
    plain = _have_plain_numbers(blocks) & _have_plain_names(blocks)
    count = len(places) if plain.all() else int(plain.argmin())
    names = np.ascontiguousarray(blocks[:count, :100]).view("S100").ravel().tolist()
    return list(zip(b"\0".join(names).decode().split("\0"), places[:count], sizes, strict=False)) if count else []


def _follow(data: bytes | memoryview, at: int, room: int, most: int) -> tuple[list[int], list[int]]:
    """Return places and sizes of what may be headers, going from each to the one behind its payload."""
    places: list[int] = []
    sizes: list[int] = []
    last = len(data) - BLOCK
    while at <= last and len(places) < most:
        (digits,) = _SIZE.unpack_from(data, at)
        try:
            size = int(digits, 8)
        except ValueError:
            break
        after = at + BLOCK + size + (-size & (BLOCK - 1))
        if size < 0 or after > room:
            break
        places.append(at)
        sizes.append(size)
        at = after
    return places, sizes


def _have_plain_numbers(blocks: npt.NDArray[np.uint8]) -> npt.NDArray[np.bool_]:
    """Tell of each block (shape [n, 512]) whether its size, checksum and type are those of a plain file."""
    words = blocks.view("<u8")
    front = words[:, :43]
    # Byte 344 is the last before the prefix; without bytes above 127 four 16-bit sums fit side by side.
    empty = (words[:, 43] < 128) & ~words[:, 44:].any(axis=1) & ~(front & _HIGH_BITS).any(axis=1)
    sums = ((front & _EVEN_BYTES) + (front >> np.uint64(8) & _EVEN_BYTES)).sum(axis=1)
    total = sums.view("<u2").reshape(-1, 4).sum(axis=1, dtype=np.uint64) + words[:, 43]
    total += 8 * ord(" ") - blocks[:, 148:156].sum(axis=1, dtype=np.uint64)
    stated = (total[:, None] >> _OCTAL_PLACES & np.uint64(7)) == blocks[:, 148:154] - np.uint8(_ZERO)
    end = (blocks[:, 154] == 0) & (blocks[:, 155] == ord(" ")) & (blocks[:, 156] == _ZERO)
    digits = (blocks[:, 124:135] - np.uint8(_ZERO) < 8).all(axis=1)
    after = (blocks[:, 135] == 0) | (blocks[:, 135] == ord(" "))
    return np.asarray(empty & stated.all(axis=1) & end & digits & after)


def _have_plain_names(blocks: npt.NDArray[np.uint8]) -> npt.NDArray[np.bool_]:
    """Tell of each block whether its name needs no second look."""
    first, names, following = blocks[:, 0], blocks[:, :99], blocks[:, 1:100]
    no_more = following == 0
    inner_nul = (names == 0) & ~no_more
    dots = (names == _DOT) & (following == _DOT)
    last_slash = ((names == _SLASH) & no_more).any(axis=1) | (blocks[:, 99] == _SLASH)
    return np.asarray((first != 0) & (first != _SLASH) & ~(inner_nul | dots).any(axis=1) & ~last_slash)
