"""The members of a tar that another tool wrote, header by header, without reading a payload.

`ForeignTarParser` never touches a file: it says which bytes it wants next, and is fed them. A size only ever moves the
next header, after it was held against the end of the file; the longest piece that it asks for is `MAX_EXTENDED_BYTES`.
What it cannot place with certainty ends the archive with an error. So does anything behind the zeros at its end, where
readers stop: it may be that a header became zeros, or that another archive was appended. What it can place but does not
take (links, devices, sparse files, unsafe names) comes out as a member with a `Refusal`, and the parser goes on behind
it.
"""

from __future__ import annotations

import contextlib
import enum
from functools import partial
from typing import TYPE_CHECKING

from shardkit.errors import TarFormatError, UnsafeError
from shardkit.extent import Extent, align_down, align_up
from shardkit.format.foreign_header import MAX_NAME_LENGTH, Refusal, name_refusal, parse_foreign_header, pax_records
from shardkit.format.foreign_member import Member, MemberKind, run_end
from shardkit.format.plain_headers import MANY, PlainRun, plain_blocks, plain_columns, plain_run
from shardkit.format.tar import BLOCK, MAX_MEMBER_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable

    from shardkit.format.foreign_header import ForeignHeader
    from shardkit.format.foreign_member import Run
    from shardkit.format.plain_headers import HeaderBlocks

__all__ = ["MAX_EXTENDED_BYTES", "MAX_EXTENDED_HEADERS", "ArchiveEnd", "ForeignTarParser"]

MAX_EXTENDED_BYTES = 1 << 20
"""Payload bytes of the largest extended header that is taken; libarchive takes no larger record either."""
MAX_EXTENDED_HEADERS = 16
"""Extended headers that may stand before one member."""
MAX_SPARSE_BLOCKS = 1024
"""Blocks over which the map of an old GNU sparse file may go on."""

_ZERO_BLOCK = bytes(BLOCK)
_ZEROS = bytes(128 << 10)
"""As many of the zeros at the end are asked for at a time; writers leave 10 kB, some a tape's record."""
_PAX, _GLOBAL, _LONG_NAME, _LONG_LINK = "x", "g", "L", "K"
_EXTENDED = {b"x": _PAX, b"X": _PAX, b"g": _GLOBAL, b"L": _LONG_NAME, b"K": _LONG_LINK}
_SPARSE_KEYWORDS = (b"GNU.sparse.", b"SCHILY.realsize", b"SUN.holesdata")
_MOVING_KEYWORDS = (b"path", b"size", b"linkpath", b"GNU.volume.", *_SPARSE_KEYWORDS)
"""Keywords of records that change what a member is, by their beginning."""

_KINDS = {
    b"\0": MemberKind.FILE, b"0": MemberKind.FILE, b"7": MemberKind.FILE, b"S": MemberKind.FILE,
    b"1": MemberKind.LINK, b"2": MemberKind.LINK, b"3": MemberKind.DEVICE, b"4": MemberKind.DEVICE,
    b"5": MemberKind.DIRECTORY, b"6": MemberKind.FIFO, b"V": MemberKind.LABEL,
}  # fmt: skip
_REFUSED_KINDS = {
    MemberKind.LINK: Refusal.LINK,
    MemberKind.DEVICE: Refusal.DEVICE,
    MemberKind.FIFO: Refusal.FIFO,
    MemberKind.OTHER: Refusal.UNKNOWN_KIND,
}


class ArchiveEnd(enum.Enum):
    """How an archive ends. Tar readers stop at the first zero block, and take a missing one for the end."""

    TWO_ZERO_BLOCKS = "two zero blocks"
    ONE_ZERO_BLOCK = "one zero block"
    NO_ZERO_BLOCK = "no zero block"


class ForeignTarParser:
    """Walks an archive: while `wanted` is an extent, read it and `feed` it.

    >>> parser = ForeignTarParser(1024)
    >>> parser.wanted
    Extent(offset=0, length=512)
    >>> parser.feed(bytes(512))
    >>> parser.feed(bytes(512))
    >>> parser.wanted, parser.end
    (None, <ArchiveEnd.TWO_ZERO_BLOCKS: 'two zero blocks'>)
    """

    def __init__(self, file_bytes: int, start: int = 0) -> None:
        """Begin at the file's first byte, or at a later header.

        Args:
            file_bytes: bytes of the file; nothing beyond them is ever wanted.
            start: offset of the first header.

        Raises:
            TarFormatError: no header fits into the file.
        """
        if file_bytes < start + BLOCK:
            raise TarFormatError("too short for a tar", expected=f"at least {BLOCK} bytes", found=f"{file_bytes} bytes")
        self.wanted: Extent | None = Extent(start, BLOCK)
        """The bytes to feed next; None at the end and after an error."""
        self.end: ArchiveEnd | None = None
        """How the archive ends, once it did. Until `wanted` is None there may be more than zeros behind it."""
        self.end_offset: int | None = None
        """Offset of the first byte after the last member, once the archive ended."""
        self._file_bytes = file_bytes
        self._many = False
        """Whether the last piece held so many plain headers that it pays to look at those of the next all at once."""
        self._take: Callable[[bytes, int], Member | None] = self._take_header
        self._forget()

    def _forget(self) -> None:
        """Drop what the extended headers said: their member is through."""
        self._start: int | None = None
        self._pending: set[str] = set()
        self._headers = 0
        self._records: dict[bytes, bytes] = {}
        self._long_name: bytes | None = None

    def feed(self, data: bytes) -> Member | None:
        """Take the wanted bytes and return the member that they complete, if they do.

        Args:
            data: exactly `wanted.length` bytes.

        Raises:
            TarFormatError: the bytes are no tar, or a member does not lie within the file.
            UnsafeError: over a limit, or tar readers would disagree about where the next header is.
        """
        wanted, self.wanted = self.wanted, None
        if wanted is None or len(data) != wanted.length:
            expected = "nothing" if wanted is None else f"{wanted.length} bytes"
            raise TarFormatError("not the bytes that the parser wanted", expected=expected, found=f"{len(data)} bytes")
        return self._take(bytes(data), wanted.offset)

    def pass_zeros(self, offset: int) -> None:
        """Take it for known that zeros stand from what is wanted up to `offset`, as in a file's hole.

        Only once the archive ended, and while something is wanted.
        """
        assert self.end_offset is not None
        self._want_zeros(self.end_offset, offset)

    def feed_plain(self, data: bytes | memoryview, start: int) -> Run:
        """Return the next members whose headers stand in a longer piece of the file, as far as they are plain files.

        The same as to `feed` one header after the other, in a fraction of the time. What comes next, plain or not, is
        `wanted` afterwards. Nothing is returned when that is no header, or none that stands in the piece.

        Args:
            data: a piece of the file; the payloads in it are passed over.
            start: its offset in the file.
        """
        if self.wanted is None or not self._may_be_plain:
            return []
        at, room = self.wanted.offset - start, self._file_bytes - start
        if not 0 <= at <= len(data) - BLOCK:
            return []
        run: Run
        if self._many:
            columns = plain_columns(data, at, room)
            run = PlainRun(columns.names, columns.starts + start, columns.sizes)
            self._many = len(run) >= MANY
        else:
            kind, found = MemberKind.FILE, plain_run(data, at, room)
            run = [Member(name, kind, start + at, start + at + BLOCK, size, None) for name, at, size in found]
            self._many = len(run) >= MANY
        return self._passed(run)

    def feed_blocks(self, headers: HeaderBlocks) -> Run:
        """Return the next members as `feed_plain` does, of blocks that stand apart, the wanted one first."""
        if self.wanted is None or not self._may_be_plain:
            return []
        return self._passed(plain_blocks(headers, self.wanted.offset, self._file_bytes))

    @property
    def _may_be_plain(self) -> bool:
        """Whether a header is wanted to which no other one belongs."""
        return self._start is None and self._take == self._take_header

    def _passed(self, run: Run) -> Run:
        """Go on behind a run."""
        if len(run):
            self.wanted = None  # there may be nothing behind the last one
            self._want_header(run_end(run))
        return run

    def _want(self, offset: int, length: int, take: Callable[[bytes, int], Member | None]) -> None:
        if offset + length > self._file_bytes:
            raise TarFormatError("the file ends within a header", offset=offset,
                                 expected=f"{length} bytes", found=f"{self._file_bytes - offset} bytes")  # fmt: skip
        self.wanted, self._take = Extent(offset, length), take

    def _want_header(self, offset: int) -> None:
        left = self._file_bytes - offset
        if left >= BLOCK:
            self._want(offset, BLOCK, self._take_header)
        elif left:
            self._want(offset, left, self._take_rest)
        else:
            self._finish(ArchiveEnd.NO_ZERO_BLOCK, offset)

    def _take_rest(self, data: bytes, at: int) -> None:
        if data.strip(b"\0"):
            raise TarFormatError("the file ends within a header", offset=at, expected=f"{BLOCK} bytes",
                                 found=f"{len(data)} bytes", remedy="the file is truncated")  # fmt: skip
        self._finish(ArchiveEnd.NO_ZERO_BLOCK, at)

    def _finish(self, end: ArchiveEnd, offset: int) -> None:
        if self._pending:
            raise TarFormatError("the archive ends between an extended header and its member", offset=offset)
        self.end, self.end_offset = end, offset

    def _take_header(self, block: bytes, at: int) -> Member | None:
        if block == _ZERO_BLOCK:
            self._finish(ArchiveEnd.ONE_ZERO_BLOCK, at)
            self._want_zeros(at, at + BLOCK)
            return None
        header = parse_foreign_header(block, at)
        kind = _EXTENDED.get(header.typeflag)
        if kind is not None:
            self._begin_extended(kind, header.size, at)
            return None
        self._start = at if self._start is None else self._start
        if header.more_sparse_blocks:
            self._want_sparse_block(header, at + BLOCK, MAX_SPARSE_BLOCKS)
            return None
        return self._member(header, at + BLOCK)

    def _want_zeros(self, end: int, offset: int) -> None:
        """Want what stands at `offset`, up to which there are zeros from the archive's end on."""
        if offset >= end + 2 * BLOCK:
            self.end = ArchiveEnd.TWO_ZERO_BLOCKS
        left = self._file_bytes - offset
        self.wanted = Extent(offset, min(left, len(_ZEROS))) if left > 0 else None
        self._take = partial(self._take_zeros, end)

    def _take_zeros(self, end: int, data: bytes, at: int) -> None:
        if data != _ZEROS[: len(data)]:
            raise self._behind_the_end(end, data, at)
        self._want_zeros(end, at + len(data))

    def _behind_the_end(self, end: int, data: bytes, at: int) -> TarFormatError:
        first = align_down(len(data) - len(data.lstrip(b"\0")), BLOCK)
        found = "bytes that are no header: one before them became zeros, or they were appended"
        with contextlib.suppress(TarFormatError, UnsafeError):
            parse_foreign_header(data[first : first + BLOCK].ljust(BLOCK, b"\0"), at + first)
            found = "a header: one before it became zeros, or another tar was appended"
        return TarFormatError("something follows the zeros that end a tar, where readers stop", offset=at + first,
                              expected=f"zeros from byte {end} to the end", found=found)  # fmt: skip

    def _begin_extended(self, kind: str, size: int, at: int) -> None:
        self._start = at if self._start is None else self._start
        self._headers += 1
        # Two of a kind: some readers take the first, others the last. A global one in between ends the others for some.
        if kind in self._pending or (kind == _GLOBAL and self._pending):
            raise UnsafeError("tar readers disagree about extended headers of extended headers", offset=at, found=kind)
        if self._headers > MAX_EXTENDED_HEADERS:
            raise UnsafeError("too many extended headers for one member", offset=at, expected=MAX_EXTENDED_HEADERS)
        if size > MAX_EXTENDED_BYTES:
            raise UnsafeError("an extended header over the limit", offset=at,
                              expected=f"at most {MAX_EXTENDED_BYTES} bytes", found=f"{size} bytes")  # fmt: skip
        if kind != _GLOBAL:
            self._pending.add(kind)
        payload = at + BLOCK
        next_header = self._end_of(payload, size)
        if kind == _LONG_LINK:  # where a link leads is nobody's concern
            self._want_header(next_header)
            return

        def take(data: bytes, offset: int) -> None:
            {_PAX: self._take_records, _GLOBAL: self._take_global, _LONG_NAME: self._take_name}[kind](data, offset)
            self._want_header(next_header)

        if size:
            self._want(payload, size, take)
        else:
            take(b"", payload)

    def _take_records(self, data: bytes, at: int) -> None:
        for keyword, value in pax_records(data, at):
            if keyword.startswith(_MOVING_KEYWORDS):
                self._records[keyword] = value
        size = self._records.get(b"size")
        if b"path" in self._records and self._long_name is not None:
            raise UnsafeError("a member with a PAX and a GNU long name", offset=at)
        if size is not None and not (size.isdigit() and len(size) <= 20):
            raise TarFormatError("the size of a member is no number", offset=at, found=repr(size[:40]))

    def _take_global(self, data: bytes, at: int) -> None:
        for keyword, _ in pax_records(data, at):
            if keyword.startswith(_MOVING_KEYWORDS):
                raise UnsafeError("a global header that renames or resizes every member", offset=at, found=keyword)

    def _take_name(self, data: bytes, at: int) -> None:
        if b"path" in self._records:
            raise UnsafeError("a member with a PAX and a GNU long name", offset=at)
        if not data.endswith(b"\0"):  # GNU tar reads on into the padding
            raise UnsafeError("tar readers disagree about a long name that no NUL ends", offset=at)
        self._long_name = data.rstrip(b"\0")

    def _want_sparse_block(self, header: ForeignHeader, at: int, left: int) -> None:
        if not left:
            raise UnsafeError("the map of a sparse file has no end", offset=at, expected=f"{MAX_SPARSE_BLOCKS} blocks")

        def take(block: bytes, offset: int) -> Member | None:
            if not block[504]:
                return self._member(header, offset + BLOCK)
            self._want_sparse_block(header, offset + BLOCK, left - 1)
            return None

        self._want(at, BLOCK, take)

    def _member(self, header: ForeignHeader, payload: int) -> Member:
        name, refusal = self._name(header)
        size = self._size(header, payload - BLOCK)
        kind = _KINDS.get(header.typeflag, MemberKind.OTHER)
        if kind is MemberKind.FILE and name.endswith(b"/"):  # how tars before POSIX state a directory
            if not size or header.typeflag == b"\0":
                kind = MemberKind.DIRECTORY
            else:
                refusal = refusal or Refusal.NO_NAME
        elif kind is MemberKind.FILE and header.typeflag == b"\0" and header.name.endswith(b"/"):
            raise UnsafeError("tar readers disagree whether a member is a file or a folder", offset=payload - BLOCK,
                              expected="a header that says the same as the long name before it")  # fmt: skip
        if size and kind not in (MemberKind.FILE, MemberKind.OTHER):
            raise UnsafeError(f"a {kind.value} with a payload: tar readers disagree about where the next header is",
                              offset=payload - BLOCK, expected="size 0", found=f"size {size}")  # fmt: skip
        member = Member(
            name=name[:MAX_NAME_LENGTH].decode("utf-8", "surrogateescape"), kind=kind,
            start=payload - BLOCK if self._start is None else self._start, offset=payload, size=size,
            refusal=self._kind_refusal(header, kind) or refusal,
        )  # fmt: skip
        next_header = self._end_of(payload, size)
        self._forget()
        self._want_header(next_header)
        return member

    def _name(self, header: ForeignHeader) -> tuple[bytes, Refusal | None]:
        given = self._records.get(b"path", self._long_name)
        if given is None:
            return header.name, header.refusal or name_refusal(header.name)
        return given, name_refusal(given)

    def _size(self, header: ForeignHeader, at: int) -> int:
        text = self._records.get(b"size")
        if text is None:
            return header.size
        size = int(text)
        # Writers leave 0 or the largest number in the field when the record states the size. Readers that know no PAX
        # would take any other for the size, and find headers in the payload that nobody else sees.
        if header.size not in (0, size, MAX_MEMBER_BYTES):
            raise UnsafeError("two sizes for one member", offset=at, expected=header.size, found=f"{size} (PAX)")
        return size

    def _kind_refusal(self, header: ForeignHeader, kind: MemberKind) -> Refusal | None:
        if header.typeflag == b"S" or any(keyword.startswith(_SPARSE_KEYWORDS) for keyword in self._records):
            return Refusal.SPARSE
        if header.typeflag == b"M" or any(keyword.startswith(b"GNU.volume.") for keyword in self._records):
            return Refusal.CONTINUATION
        return _REFUSED_KINDS.get(kind)

    def _end_of(self, payload: int, size: int) -> int:
        end = align_up(payload + size, BLOCK)
        if end > self._file_bytes:
            raise TarFormatError("a member goes beyond the end of the file", offset=payload - BLOCK,
                                 expected=f"at least {end} bytes", found=f"{self._file_bytes} bytes",
                                 remedy="the file is truncated, or the size in the header is wrong")  # fmt: skip
        return end
