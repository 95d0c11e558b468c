"""What a tar of another tool holds: members, one by one or in runs of plain files."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from shardkit.format.plain_headers import PlainRun
from shardkit.format.tar import BLOCK

if TYPE_CHECKING:
    from shardkit.format.foreign_header import Refusal

__all__ = ["Member", "MemberKind", "Run", "as_members", "run_end"]


class MemberKind(enum.Enum):
    """What a member is."""

    FILE = "file"
    DIRECTORY = "directory"
    LABEL = "volume label"
    LINK = "link"
    DEVICE = "device"
    FIFO = "FIFO"
    OTHER = "other"


class Member(NamedTuple):
    """A member, with everything that stands before it for its sake."""

    name: str
    """As stored; bytes that are not UTF-8 as lone surrogates, as `os.fsdecode` gives them. Cut when it is refused for
    its length."""
    kind: MemberKind
    start: int
    """Offset in the file of the first header that belongs to it, extended ones included; bytes."""
    offset: int
    """Of the payload in the file; a multiple of 512."""
    size: int
    """Payload bytes; within the file."""
    refusal: Refusal | None
    """Why it is not taken; None for files, directories and labels that are safe."""

    @property
    def end(self) -> int:
        """The first byte after its last block."""
        return (self.offset + self.size + BLOCK - 1) & -BLOCK

    @property
    def usable(self) -> bool:
        """Whether it is a plain file that may be read."""
        return self.kind is MemberKind.FILE and self.refusal is None


Run: TypeAlias = list[Member] | PlainRun
"""Members that follow one another in an archive."""


def as_members(run: Run) -> list[Member]:
    """Return the members of a run one by one."""
    if not isinstance(run, PlainRun):
        return run
    kind, columns = MemberKind.FILE, (run.names.tolist(), run.starts.tolist(), run.sizes.tolist())
    return [Member(name.decode(), kind, at, at + BLOCK, size, None) for name, at, size in zip(*columns, strict=True)]


def run_end(run: Run) -> int:
    """Return the first byte after the last block of a run, which is not empty."""
    return run.end if isinstance(run, PlainRun) else run[-1].end
