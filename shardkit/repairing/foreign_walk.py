"""The members of a damaged tar that another tool made, and the places where it is damaged; no payload is read."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from shardkit.errors import ShardkitError, StorageError, TarFormatError, UnsafeError
from shardkit.extent import align_down
from shardkit.format.foreign_header import parse_foreign_header
from shardkit.format.foreign_tar import ForeignTarParser
from shardkit.format.tar import BLOCK

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardkit.format.foreign_member import Member
    from shardkit.repairing.damaged_file import DamagedFile

__all__ = ["Damage", "walk_foreign"]

_NO_END = 1 << 62
"""Told to the parser as the file's size: so it names a member that the file cuts off, too."""
_PAGE = 4096
_NAME_FIELD = 100
"""Bytes of a header's name. A longer one stands in an extended header, and here is as much of it as there is room."""


@dataclass(frozen=True, slots=True)
class Damage:
    """A place between two members that were found where a tar is not what it should be."""

    start: int
    """The byte after the last member before it."""
    end: int
    """Where a member was found again; the file's size when none was."""
    reason: str
    """A key of `shardkit.repairing.lost.REASONS`; none for the zeros that end an archive."""
    detail: str
    member: Member | None = None
    """The one that the file cuts off, where its header is whole."""


def walk_foreign(file: DamagedFile) -> tuple[list[Member], list[Damage]]:
    """Return the members whose names and sizes can be believed, and the damages between them, in stored order."""
    members: list[Member] = []
    damages: list[Damage] = []
    at: int | None = 0
    while at is not None:
        run, stop = _run(file, at)
        members += run
        at = _next_header(file, stop.end)
        if at is None and not stop.reason and file.is_zero(stop.start, file.size):
            break
        end = file.size if at is None else at
        if run or stop.member or not damages:
            damages.append(replace(stop, end=end, reason=stop.reason or "headers"))
        else:  # what looked like a header was part of the damage
            damages[-1] = replace(damages[-1], end=end)
    return _believed(file, members, damages), damages


def _run(file: DamagedFile, start: int) -> tuple[list[Member], Damage]:
    """Return the members from a header on, and why there are no more; the damage ends where to look for the next."""
    parser, end = ForeignTarParser(_NO_END, start), start
    members: list[Member] = []
    while (wanted := parser.wanted) is not None and parser.end is None:  # behind the end another walk begins
        try:
            data = file.read(wanted.offset, wanted.length)
            if len(data) < wanted.length:
                ended = wanted.offset == end and len(data) > 0 and not data.strip(b"\0")
                reason = "" if ended else "truncated"
                return members, Damage(end, file.size, reason, "the file ends without an end mark")
            member = parser.feed(data)
        except StorageError as error:
            behind = align_down(wanted.offset, _PAGE) + _PAGE
            return members, Damage(end, behind, "read-error", f"{error.what}: {error.found}")
        except (TarFormatError, UnsafeError) as error:
            return members, Damage(end, wanted.offset + BLOCK, "headers", error.what)
        if member is None:
            continue
        if member.offset + member.size > file.size:
            # Nothing follows it, unless its header is only a payload's: nothing vouches for the first one of a run.
            behind = file.size if members or not start else member.offset
            detail = f"{member.size} bytes from {member.offset} on, in a file of {file.size}"
            return members, Damage(end, behind, "truncated", detail, member)
        members.append(member)
        end = member.end
    return members, Damage(end, end + BLOCK, "", "zeros stand where a header should")


def _next_header(file: DamagedFile, start: int) -> int | None:
    """Return the offset of the first block from `start` on that is a header with magic and checksum, or None."""
    at = file.next_header(start, b"ustar")
    while at is not None:
        try:
            parse_foreign_header(file.read(at, BLOCK), at)
        except ShardkitError:
            at = file.next_header(at + BLOCK, b"ustar")
            continue
        return at
    return None


def _believed(file: DamagedFile, members: list[Member], damages: Sequence[Damage]) -> list[Member]:
    """Leave out members that may have lost an extended header, with their right name, to the damage before them."""
    extended = any(member.offset - member.start > BLOCK for member in members)
    resumed = {damage.end for damage in damages}
    return [
        member for member in members
        if member.start not in resumed or member.offset - member.start > BLOCK
        or not (extended or file.read(member.start, _NAME_FIELD)[-1])
    ]  # fmt: skip
