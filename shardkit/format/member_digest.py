"""The digest of a foreign shard of which no payload was read: what stands where in it."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from shardkit.format.checksum import new_digest
from shardkit.format.foreign_member import MemberKind, as_members
from shardkit.format.plain_headers import PlainRun, joined_runs
from shardkit.format.text_columns import joined

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from shardkit.format.foreign_member import Run

__all__ = ["members_digest"]

_WORDS = {kind: kind.value for kind in MemberKind}
_TOGETHER = 64
_FILE = _WORDS[MemberKind.FILE].encode()


def members_digest(algorithm: str, file_bytes: int, runs: Iterable[Run]) -> str:
    """Return the hex digest of what stands where in an archive; it says nothing about a payload's bytes.

    Args:
        algorithm: one of `shardkit.format.checksum.DIGESTS`.
        file_bytes: bytes of the file.
        runs: all members, in stored order, however they are cut into runs.
    """
    digest = new_digest(algorithm)
    digest.update(b"%d\n" % file_bytes)
    for in_columns, same in itertools.groupby(runs, lambda run: isinstance(run, PlainRun)):
        while some := list(itertools.islice(same, _TOGETHER)):
            for piece in _columns(some) if in_columns else _texts(some):
                digest.update(piece)
    return digest.hexdigest()


def _columns(runs: Sequence[Run]) -> Sequence[memoryview]:
    run = joined_runs([run for run in runs if isinstance(run, PlainRun)])
    return joined([_FILE, run.starts, run.offsets, run.sizes, run.names], b" ", b"\0")


def _texts(runs: Sequence[Run]) -> Sequence[bytes]:
    members = itertools.chain.from_iterable(map(as_members, runs))
    texts = [f"{_WORDS[kind]} {start} {offset} {size} {name}\0" for name, kind, start, offset, size, _ in members]
    return ["".join(texts).encode("utf-8", "surrogateescape")]
