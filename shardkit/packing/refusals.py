"""Why a source is not packed or converted: stable codes, one line each in `rejected.jsonl`."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardkit.errors import SourceError
from shardkit.escaping import escape
from shardkit.format import foreign_header
from shardkit.format.keys import source_from_path

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = ["REASONS", "Refusal", "RefusedError", "encode_refusals", "every_refused", "first_refused", "stop_error"]

REASONS = {
    "missing": "the list names a file that is not there, or it vanished before it was read",
    "unreadable": "the system failed to open or to read it (permission, I/O error), or the library that reads its row",
    "not-a-file": "a folder, FIFO, socket or device under an image's name; never opened",
    "broken-link": "a symbolic link to nothing, or one that leads in a circle",
    "outside-link": "a symbolic link to outside the source folder (--follow-symlinks takes it)",
    "no-class": "a file beside the class folders (--labels none packs it)",
    "bad-path": "a path that no file can have (empty, or with a NUL byte)",
    "changed": "it changed while it was read, twice",
    "too-large": "more bytes than --max-bytes",
    "empty": "no bytes",
    "not-jpeg": "not a JPEG (--convert re-encodes PNG, WebP and GIF)",
    "truncated": "a JPEG that ends before its end marker",
    "bad-marker": "a JPEG with bytes where a marker must stand",
    "no-frame": "a JPEG without a frame header",
    "no-scan": "a JPEG without image data",
    "two-frames": "a hierarchical JPEG, or two frame headers in one image",
    "bad-dimensions": "a JPEG that states no width or no height",
    "too-many-pixels": "more pixels than --max-pixels",
    "undecodable": "the decoder failed or warned (--check decode, --convert, --resize, --baseline)",
    "damaged": "a member behind the end of its shard, or without the checksum that its dataset's index states",
    "bad-json": "a sample whose json member is not one JSON object, or larger than 64 MiB",
    "bad-label": "a sample whose cls member is no class number",
    "not-adjacent": "a sample of a tar with other samples between its members",
    "duplicate-key": "a sample of a tar in which one of the same key stands before",
    "duplicate-member": "a sample with two members of one extension",
    "refused-member": "a sample of which a member is a link, a sparse file, or has an unsafe name",
    "no-image": "a sample without a jpg, jpeg, png or webp member, or a row without bytes of an image",
    "damaged-shard": "a tar that is not whole, or no tar; a dataset's shard of another size, taken as far as checksums "
    "prove it",
    "unsafe-shard": "a tar that tar readers disagree about, or one over a limit",
    "unsafe-name": "a sample without a file name that is safe, or that can be (convert to tree:DIR)",
    "same-name": "a sample whose file name an earlier one has (convert to tree:DIR)",
    "no-samples": "a tar of which no sample can be used",
    **{refusal.code: f"a member of a tar: {refusal.value}" for refusal in foreign_header.Refusal},
}
"""Reason code to what it means; codes never change their meaning."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """A source that is not in the dataset."""

    number: int
    """Row of the list; 0 in a tree, where the order is by path."""
    path: bytes
    """Path relative to the packed folder (or as the list states it)."""
    reason: str
    """A key of `REASONS`."""
    detail: str
    """What was found, for a person."""


class RefusedError(Exception):
    """Carries a reason from where a source fails to where its refusal is recorded."""

    def __init__(self, reason: str, detail: str) -> None:
        """Keep the code and the detail."""
        super().__init__(reason, detail)
        self.reason = reason
        self.detail = detail


_NOTHING_LEFT = "no-samples"


def encode_refusals(refusals: Iterable[Refusal]) -> bytes:
    """Return the text of `rejected.jsonl`: one object a line, in source order, UTF-8."""
    ordered = sorted(refusals, key=_place)
    lines = ({"path": source_from_path(r.path), "reason": r.reason, "detail": r.detail} for r in ordered)
    text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    # A detail may quote bytes that are no text: as an escape they are still JSON.
    return text.encode("utf-8", "backslashreplace")


def first_refused(refusals: Iterable[Refusal]) -> Refusal:
    """Return the first of some refusals, at least one, in source order.

    A shard of which nothing is left comes behind its samples, which say why.
    """
    return min(refusals, key=lambda one: (one.number, one.reason == _NOTHING_LEFT, one.path))


def every_refused(refusals: Sequence[Refusal], path: bytes, remedy: str | None = None) -> SourceError:
    """Return the error of a run that has nothing left to make a dataset of, since something was refused."""
    counts = ", ".join(f"{count} {reason}" for reason, count in Counter(one.reason for one in refusals).most_common())
    first = first_refused(refusals)
    return SourceError(
        "every source was refused: there is no dataset", path=path,
        found=f"{counts}, such as {escape(first.path)} ({escape(first.detail)})", remedy=remedy or "mend the sources",
    )  # fmt: skip


def _place(refusal: Refusal) -> tuple[int, bytes]:
    return refusal.number, refusal.path


def stop_error(refusal: Refusal) -> SourceError:
    """Return the error of a run that stops at its first refusal."""
    return SourceError(
        f"refused a source ({refusal.reason}): {refusal.detail}", path=refusal.path,
        kept="finished shards are kept", remedy="mend or remove it, or run with --on-error skip",
    )  # fmt: skip
