"""What `pack` and `convert` show: progress, what would be made, what was."""

from __future__ import annotations

import os
from collections import Counter
from textwrap import shorten
from typing import TYPE_CHECKING, Any

from shardkit.cli._render import byte_text, count_text, quote, share_text, time_text
from shardkit.escaping import escape
from shardkit.sizes import count

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardkit.packing.result import PackPlan, PackResult
    from shardkit.packing.run import Reflink

__all__ = [
    "EXIT_REFUSED",
    "labels_text",
    "part_document",
    "part_lines",
    "plan_document",
    "plan_lines",
    "result_document",
    "result_lines",
]

EXIT_REFUSED = 3
"""Exit code of a run that is complete, but for refused sources."""
_LINE = 80
_MOST_CLASSES = 100  # more names than a line has room for


def plan_lines(plan: PackPlan) -> list[str]:
    """Return what would be made, for a person."""
    size = sum(plan.bytes)
    labels = labels_text(plan.labelled, plan.samples, plan.classes)
    lines = [
        f"{count(plan.samples, 'sample')} ({byte_text(plan.payload)}, {labels}) would become "
        f"{count(len(plan.bytes), 'shard')} of {byte_text(min(plan.bytes))} to {byte_text(max(plan.bytes))}",
        f"  in all      {byte_text(size)}, of which headers and padding {byte_text(size - plan.payload)} "
        f"({share_text(size - plan.payload, size)})",
        f"  samples     {min(plan.counts):,} to {max(plan.counts):,} a shard",
        *(f"  key         {key}  <-  {source}" for key, source in plan.keys),
        *_empty_lines(plan.empty_classes, plan.classes),
    ]
    if plan.refused:
        reasons = count_text(Counter(refusal.reason for refusal in plan.refused))
        lines.append(f"  refused     {len(plan.refused):,} before any image was read: {reasons}")
    if plan.skipped:
        lines.append(_ignored_line(plan.skipped))
    return [*lines, "nothing was written; images are checked when they are packed"]


def _ignored_line(skipped: Counter[str]) -> str:
    """Return what is no image by name; images of other types among it are no JPEGs, which may be a surprise."""
    from shardkit.packing.scan import convertible

    more = "; --convert takes .png, .webp and .gif, too" if convertible(skipped) else ""
    return f"  ignored     {count_text(skipped)}{more}"


def plan_document(plan: PackPlan) -> dict[str, Any]:
    """Return what would be made, as JSON."""
    return {
        "name": plan.name, "samples": plan.samples, "payload": plan.payload, "bytes": sum(plan.bytes),
        "shards": [{"bytes": size, "samples": samples} for size, samples in zip(plan.bytes, plan.counts, strict=True)],
        "labelled": plan.labelled, "classes": None if plan.classes is None else list(plan.classes),
        "classes_without_samples": list(plan.empty_classes),
        "keys": dict(plan.keys), "refused": len(plan.refused), "ignored": dict(plan.skipped),
    }  # fmt: skip


def result_lines(
    result: PackResult, dst: str, seconds: float, verb: str = "packed", reflink: Reflink = "never"
) -> list[str]:  # fmt: skip
    """Return what a run made that made one dataset, for a person; what is shared, where that was wished."""
    return _made_lines(result, dst, verb, f" {time_text(seconds, result.made_payload)}", reflink)


def part_lines(result: PackResult, dst: str, verb: str, reflink: Reflink) -> list[str]:
    """Return what a run made of one of its parts, as `result_lines`; the time is all parts' together."""
    return _made_lines(result, dst, verb, "", reflink)


def labels_text(labelled: int, samples: int, classes: Sequence[str] | None) -> str:
    """Return how many samples have a label, where that is not all of them, and what is known of the classes."""
    if not labelled:
        return "no labels"
    known = "labels without names" if classes is None else count(len(classes), "class", "classes")
    return known if labelled == samples else f"{known}, {labelled:,} of {samples:,} labelled"


def _class_lines(classes: Sequence[str] | None) -> list[str]:
    """Return a line with the first names of classes, by which a tree that was meant otherwise is seen at once."""
    if not classes:
        return []
    return [f"  classes     {shorten(', '.join(map(escape, classes[:_MOST_CLASSES])), _LINE, placeholder=' ...')}"]


def _empty_lines(empty: Sequence[str], classes: Sequence[str] | None) -> list[str]:
    """Return a line about classes that no sample has: they keep their numbers, and a model its outputs for them."""
    if not empty:
        return []
    text = f"{len(empty):,} of {count(len(classes or ()), 'class', 'classes')} without a sample: "
    text += ", ".join(map(escape, empty[:_MOST_CLASSES]))
    return [f"  empty       {shorten(text, _LINE, placeholder=' ...')}"]


def _made_lines(result: PackResult, dst: str, verb: str, time: str, reflink: Reflink) -> list[str]:
    totals = result.manifest.totals
    kept = f", {result.kept:,} of them kept from an earlier run" if result.kept else ""
    lines = [
        f"{verb} {count(totals.samples, 'sample')} into {count(totals.shards, 'shard')}{time}{kept}",
        f"  labels      {labels_text(result.labelled, totals.samples, result.manifest.classes)}",
        *_class_lines(result.manifest.classes),
        *_empty_lines(result.empty_classes, result.manifest.classes),
        f"  payload     {byte_text(totals.payload)}",
        f"  headers     {byte_text(totals.headers)} ({share_text(totals.headers, totals.bytes)})",
        f"  padding     {byte_text(totals.padding)} ({share_text(totals.padding, totals.bytes)})",
    ]
    if reflink != "never":
        copied = byte_text(result.made_payload - result.shared_bytes)
        lines.append(f"  reflinks    {byte_text(result.shared_bytes)} are blocks of the sources, {copied} copied")
    if totals.refused:
        where = quote(os.path.join(dst, "rejected.jsonl"))
        reasons = f": {count_text(result.refused)}" if result.refused else ""
        lines.append(f"  refused     {totals.refused:,}{reasons}; see {where}")
    if result.skipped:
        lines.append(_ignored_line(result.skipped))
    return [*lines, f"next: shardkit verify {quote(dst)}"]


def result_document(result: PackResult, seconds: float) -> dict[str, Any]:
    """Return what a run made that made one dataset, as JSON."""
    return {**part_document(result), "seconds": round(seconds, 3)}


def part_document(result: PackResult) -> dict[str, Any]:
    """Return what a run made of one of its parts, as JSON."""
    manifest = result.manifest
    totals = manifest.totals
    return {
        "name": manifest.name, "generation": manifest.generation, "shards": totals.shards, "samples": totals.samples,
        "payload": totals.payload, "headers": totals.headers, "padding": totals.padding, "bytes": totals.bytes,
        "refused": totals.refused, "refused_by_reason": dict(result.refused), "ignored": dict(result.skipped),
        "bytes_shared": result.shared_bytes, "bytes_copied": result.made_payload - result.shared_bytes,
        "kept_shards": result.kept, "brace": manifest.brace, "labelled": result.labelled,
        "classes": None if manifest.classes is None else list(manifest.classes),
        "classes_without_samples": list(result.empty_classes),
    }  # fmt: skip
