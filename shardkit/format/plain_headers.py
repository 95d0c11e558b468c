"""The short way through the headers of plain files, of which nearly all of a shard's are.

`foreign_header` has the word about what a header states. Here is only found out, in a fraction of the time, that it is
of the one common kind about which there is nothing to ask: an ordinary file of a safe ASCII name without a prefix, its
size in eleven octal digits, its checksum in six. Everything else, right or wrong, is left to the careful way.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from shardkit.format.tar import BLOCK

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

__all__ = [
    "MANY",
    "NAME_BYTES",
    "HeaderBlocks",
    "PlainRun",
    "header_chain",
    "joined_runs",
    "plain_blocks",
    "plain_columns",
    "plain_header",
    "plain_headers",
    "plain_run",
]

MANY = 48
"""Plain headers in a row after which those that follow are looked at all at once."""
NAME_BYTES = 100
"""Of the longest name that is plain."""
_WINDOW_BLOCKS = 4096
"""Of a piece that is looked at all at once."""
_MOST = 1023
"""Headers of these: what is done once for a look is then little beside what is done for each."""
_RUNS = 3
"""Of these that are handed out together, for the same reason."""

_PARTS = struct.Struct("148s9s188s167s")
"""Of a header: what stands before the checksum, the checksum and the type, all up to the prefix, and the rest."""
_SIZE = struct.Struct("124x11s")
_NO_PREFIX = bytes(167)
_MIDDLE_SUM = 8 * ord(" ") + ord("0") - 1
"""What the second part counts, less the one that an Adler-32 begins with."""
_SLASH, _DOT, _ZERO = b"/.0"
_MAGIC = int.from_bytes(b"usta", "little")
_SIZE_WEIGHTS = 8 ** np.arange(10, -1, -1)
_SUM_WEIGHTS = 8 ** np.arange(5, -1, -1) + 1
"""Of a checksum's digits: what they state, and what they themselves count among the bytes of a header."""
_SUM_EXCESS = 6 * ord("0") - 7 * ord(" ")
"""What else a checksum counts as a field, against the blanks that are summed in its place."""


def _pattern() -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64]]:
    """Return which bits of a plain header are known, and what they are: two masks of 64 words."""
    known, value = np.full(BLOCK, 0x80, np.uint8), np.zeros(BLOCK, np.uint8)  # no byte above 127
    known[345:] = 0xFF  # no prefix
    for digits in (slice(124, 135), slice(148, 154)):
        known[digits], value[digits] = 0xF8, _ZERO
    known[135] = ~np.uint8(ord(" "))  # NUL or blank
    known[154:157], value[154:157] = 0xFF, np.frombuffer(b"\0 0", np.uint8)
    return known.view("<u8"), value.view("<u8")


_KNOWN, _VALUE = _pattern()


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
    name, digits = front[:NAME_BYTES].rstrip(b"\0"), front[124:135]
    if front[135] not in b"\0 " or not digits.isdigit():
        return None
    # A name that ends in a slash is a directory's; of the others `name_refusal` may still take some.
    if not name or b"\0" in name or b".." in name or name[0] == _SLASH or name[-1] == _SLASH:
        return None
    try:
        return name.decode(), int(digits, 8)
    except ValueError:  # an 8 or a 9
        return None


@dataclass(frozen=True, slots=True)
class PlainRun:
    """Plain files that follow one another in an archive, as columns."""

    names: npt.NDArray[np.bytes_]
    """Shape [members], bytes of up to `NAME_BYTES` each."""
    starts: npt.NDArray[np.int64]
    """Shape [members], offset of each header; bytes."""
    sizes: npt.NDArray[np.int64]
    """Shape [members], payload bytes."""

    def __len__(self) -> int:
        """Return how many members there are."""
        return len(self.starts)

    @property
    def offsets(self) -> npt.NDArray[np.int64]:
        """Of the payloads; shape [members], bytes."""
        return self.starts + BLOCK

    @property
    def end(self) -> int:
        """The first byte after the last member's last block."""
        return int(self.starts[-1] + BLOCK + self.sizes[-1] + BLOCK - 1) & -BLOCK


@dataclass(frozen=True, slots=True)
class HeaderBlocks:
    """Blocks of an archive in which headers seem to stand; what they hold is not looked at yet."""

    blocks: npt.NDArray[np.uint8]
    """Shape [blocks, 512]."""
    starts: npt.NDArray[np.int64]
    """Shape [blocks], offset of each in the file; bytes, rising."""


def header_chain(data: bytes | memoryview, at: int) -> tuple[list[int], int | None]:
    """Follow headers through a piece of a file by the sizes that they state, right or wrong; nothing else is read.

    Args:
        data: the piece.
        at: where in `data` the first header is.

    Returns:
        Where in `data` blocks stand that state a size in plain octal digits, each behind the payload of the one before;
        and where the next one would, behind the piece. None when there is a block without a size.
    """
    found: list[int] = []
    last = len(data) - BLOCK
    while at <= last:
        (digits,) = _SIZE.unpack_from(data, at)
        # Else there may be a sign, and the chain would lead back.
        if not digits.isdigit():
            return found, None
        try:
            size = int(digits, 8)
        except ValueError:  # an 8 or a 9
            return found, None
        found.append(at)
        at += BLOCK + size + (-size & (BLOCK - 1))
    return found, at


def plain_run(data: bytes | memoryview, at: int, room: int) -> list[tuple[str, int, int]]:
    """Return name, place and size of up to `MANY` plain headers that follow one another in a piece of a file.

    Args:
        data: the piece.
        at: where in `data` the first header is.
        room: where, counted from the first byte of `data`, the file ends.

    Returns:
        As many as are plain, stand wholly in `data` and have their payload in the file.
    """
    found: list[tuple[str, int, int]] = []
    last = len(data) - BLOCK
    while at <= last and len(found) < MANY:
        plain = plain_header(data, at)
        if plain is None:
            break
        name, size = plain
        after = at + BLOCK + size + (-size & (BLOCK - 1))
        if after > room:
            break
        found.append((name, at, size))
        at = after
    return found


def joined_runs(runs: Sequence[PlainRun]) -> PlainRun:
    """Return one or more runs as one."""
    if len(runs) == 1:
        return runs[0]
    names, starts, sizes = zip(*((one.names, one.starts, one.sizes) for one in runs), strict=True)
    return PlainRun(np.concatenate(names), np.concatenate(starts), np.concatenate(sizes))


def plain_columns(data: bytes | memoryview, at: int, room: int) -> PlainRun:
    """Return what `plain_run` does, but of some hundred headers, looked at many at a time.

    Args:
        data: as `plain_run` takes it; at least a header's bytes from `at` on.
        at: likewise.
        room: likewise.
    """
    runs = [plain_headers(data, at, room)]
    while len(runs[-1]) >= MANY and len(runs) < _RUNS and (at := runs[-1].end) <= len(data) - BLOCK:
        runs.append(plain_headers(data, at, room))
    return joined_runs(runs)


def plain_headers(data: bytes | memoryview, at: int, room: int) -> PlainRun:
    """Return what `plain_run` does, but of up to 1023 headers, looked at all at once; from about 30 on it pays.

    Of old tars, which state no magic, none is found, and none behind a payload that looks like a header itself.

    Args:
        data: as `plain_run` takes it.
        at: likewise.
        room: likewise.
    """
    window = min((len(data) - at) // BLOCK, _WINDOW_BLOCKS) * BLOCK
    blocks = np.frombuffer(data, np.uint8, window, at).reshape(-1, BLOCK)
    spots = np.flatnonzero(blocks[:, 257:261].view("<u4")[:, 0] == _MAGIC)[:_MOST]
    return plain_blocks(HeaderBlocks(blocks[spots], at + spots * BLOCK), at, room)


def plain_blocks(headers: HeaderBlocks, at: int, room: int) -> PlainRun:
    """Return the members of those blocks, from the first on, that are plain headers and follow one another.

    Args:
        headers: the blocks, at least 30 for it to pay.
        at: where the first header is, in the same terms as their `starts`.
        room: where the file ends, likewise.
    """
    blocks, starts = headers.blocks, headers.starts
    words = blocks.view("<u8")
    # Of most words all that is to be known is that some bits are nowhere set, and most are 0 everywhere.
    met = np.bitwise_or.reduce(words, axis=0)
    sizes = (blocks[:, 124:135] & np.uint8(7)) @ _SIZE_WEIGHTS
    ends = starts + BLOCK + ((sizes + (BLOCK - 1)) & -BLOCK)
    plain = ends <= room
    for number in np.flatnonzero((met & _KNOWN != 0) | (_VALUE != 0)).tolist():
        plain &= words[:, number] & _KNOWN[number] == _VALUE[number]
    # Without bytes above 127 a signed sum is the same as an unsigned one.
    total = np.take(words, np.flatnonzero(met), axis=1).view(np.uint8).sum(axis=1, dtype=np.uint32)
    plain &= (blocks[:, 148:154] & np.uint8(7)) @ _SUM_WEIGHTS + _SUM_EXCESS == total
    width = max(len(np.trim_zeros(met.view(np.uint8)[:NAME_BYTES], "b")), 1)
    plain &= _have_plain_names(blocks[:, :width])
    plain[1:] &= ends[:-1] == starts[1:]
    plain[:1] &= starts[:1] == at
    count = len(plain) if plain.all() else int(plain.argmin())
    names = np.ascontiguousarray(blocks[:count, :width]).view(f"S{width}")[:, 0]
    return PlainRun(names, starts[:count], sizes[:count])


def _have_plain_names(names: npt.NDArray[np.uint8]) -> npt.NDArray[np.bool_]:
    """Tell of each name (shape [n, bytes], none of them longer) whether it needs no second look."""
    names = np.ascontiguousarray(names.T)  # what is done to long rows takes a tenth of the time
    these, following = names[:-1], names[1:]
    no_more = following == 0
    odd = ((these == 0) & ~no_more) | ((these == _DOT) & (following == _DOT)) | ((these == _SLASH) & no_more)
    return np.asarray((names[0] != 0) & (names[0] != _SLASH) & (names[-1] != _SLASH) & ~odd.any(axis=0))
