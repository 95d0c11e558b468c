"""Why a sample, a member or a whole shard is not in the dataset: stable codes, one line each in `rejected.jsonl`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from shardkit.errors import ShardkitError, SourceError
from shardkit.escaping import escape
from shardkit.format.foreign_header import Refusal
from shardkit.format.grouping import SampleVerdict
from shardkit.format.keys import source_from_path

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from shardkit.format.foreign_member import Member

__all__ = [
    "NOT_ADJACENT_REMEDY",
    "OF_SHARDS",
    "REASONS",
    "IndexRefusal",
    "encode_refusals",
    "member_refusal",
    "sample_refusal",
    "shard_refusal",
    "stop_error",
    "verdict_refusal",
    "with_tar_remedy",
]

_Error = TypeVar("_Error", bound=ShardkitError)
_ORDER = (
    SampleVerdict.NOT_ADJACENT,
    SampleVerdict.DUPLICATE_KEY,
    SampleVerdict.DUPLICATE_MEMBER,
    SampleVerdict.REFUSED_MEMBER,
    SampleVerdict.NO_IMAGE,
)
"""Of a sample with several verdicts the first names it."""
REASONS = {
    **{verdict.code: verdict.value for verdict in _ORDER},
    **{refusal.code: refusal.value for refusal in Refusal},
    "bad-key": "the key is not UTF-8",
    "bad-label": "the cls member is no class number (--labels none takes the sample without one)",
    "empty": "the image has no bytes",
    "too-large": "the image is larger than 128 MiB",
    "damaged-shard": "the file is no whole tar",
    "unsafe-shard": "tar readers disagree about the file, or it is over a limit",
    "no-samples": "no sample of the shard can be used",
}
"""Reason code to what it means; codes never change their meaning."""
OF_SHARDS = frozenset({"damaged-shard", "unsafe-shard", "no-samples"})
"""Reasons of whole shards."""
NOT_ADJACENT_REMEDY = "a sample's members follow one another: unpack the shard, and pack it again with tar --sort=name"


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexRefusal:
    """Something that is not in the dataset."""

    path: str
    """Source text: the shard's file name, then `/` and the sample's key or the member's name."""
    reason: str
    """A key of `REASONS`."""
    detail: str
    """What was found, for a person."""
    offset: int
    """Of the first header in the shard; bytes. 0 for a shard as a whole."""


def verdict_refusal(shard: str, key: str, start: int, verdicts: Collection[SampleVerdict]) -> IndexRefusal:
    """Return the refusal of a sample for its verdicts; `start` is the offset of its first header."""
    found = [verdict for verdict in _ORDER if verdict in verdicts]
    return sample_refusal(shard, key, start, found[0].code, "; ".join(verdict.value for verdict in found))


def sample_refusal(shard: str, key: str, start: int, reason: str, detail: str) -> IndexRefusal:
    """Return the refusal of a sample for a reason given; `start` is the offset of its first header."""
    return IndexRefusal(path=_text(shard, key), reason=reason, detail=f"{detail}; at byte {start}", offset=start)


def member_refusal(shard: str, member: Member) -> IndexRefusal:
    """Return the refusal of a member that has one."""
    assert member.refusal is not None
    return IndexRefusal(path=_text(shard, member.name), reason=member.refusal.code,
                        detail=f"{member.refusal.value}; at byte {member.start}", offset=member.start)  # fmt: skip


def shard_refusal(shard: str, reason: str, detail: str) -> IndexRefusal:
    """Return the refusal of a whole shard."""
    return IndexRefusal(path=shard, reason=reason, detail=detail, offset=0)


def encode_refusals(refusals: Iterable[IndexRefusal]) -> bytes:
    """Return the text of `rejected.jsonl`: one object a line, in the order given, UTF-8."""
    lines = ({"path": one.path, "reason": one.reason, "detail": one.detail} for one in refusals)
    text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    return text.encode("utf-8", "backslashreplace")


def stop_error(refusal: IndexRefusal) -> SourceError:
    """Return the error of a run that stops at its first refusal."""
    return SourceError(
        f"refused ({refusal.reason}): {escape(refusal.path)}", found=escape(refusal.detail),
        remedy=NOT_ADJACENT_REMEDY if refusal.reason == SampleVerdict.NOT_ADJACENT.code
        else "mend the shard, or run with --on-error skip",
    )  # fmt: skip


def with_tar_remedy(error: _Error, *, skip: bool) -> _Error:
    """Return the error of a tar that is refused as a whole, with what to do about that tar; `skip`: it ends a run."""
    ways = ["put a whole tar in its place", "save what is whole of it by shardkit repair DIR --out NEW"]
    if skip:
        ways.append("leave it out by --on-error skip")
    error.remedy = "; ".join(filter(None, [error.remedy, f"{', '.join(ways[:-1])}, or {ways[-1]}"]))
    return error


def _text(shard: str, name: str) -> str:
    return source_from_path(f"{shard}/{name}".encode("utf-8", "surrogateescape"))
