"""How an inspection's figures are told, on a terminal and on the page alike."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardkit.sizes import byte_text, count

if TYPE_CHECKING:
    from shardkit.inspecting.report import ImageFacts, Inspection

__all__ = ["MEASURES", "class_text", "figure_text", "share", "summary_rows", "unknown_scans"]

MEASURES = {"bytes": "file size", "width": "width", "height": "height", "aspect": "width / height"}
"""The measures of an inspection, in words."""
_MAX_SPLITS = 20


def share(part: int, whole: int) -> str:
    """Return a part as per cent of a whole; never a round 0 or 100 that is not one.

    >>> share(1, 8), share(999_999, 1_000_000), share(0, 0)
    ('12.5 %', '99.9 %', '0.0 %')
    """
    if not 0 < part < whole:
        return f"{100 * part / whole if whole else 0:.1f} %"
    return f"{min(max(100 * part / whole, 0.1), 99.9):.1f} %"


def figure_text(measure: str, value: float) -> str:
    """Return a value of a measure.

    >>> figure_text("bytes", 12345), figure_text("width", 12345), figure_text("aspect", 4 / 3)
    ('12.3 kB', '12,345', '1.33')
    """
    if measure == "bytes":
        return byte_text(value)
    return f"{value:.3g}" if measure == "aspect" else f"{value:,.0f}"


def unknown_scans(images: ImageFacts) -> str:
    """Return what follows the number of JPEGs with more than one scan: for how many nobody knows it."""
    return f", {images.unknown_scans:,} unknown" if images.unknown_scans else ""


def class_text(label: int | None, name: str | None) -> str:
    """Return what a class is called; not escaped."""
    if label is None:
        return "no label"
    return f"label {label}" if name is None else name


def summary_rows(found: Inspection) -> list[tuple[str, str]]:
    """Return names and values of the summary; the values are not escaped."""
    rows = [
        ("samples", f"{found.samples:,}"),
        ("shards", f"{found.shards:,}"),
        ("all shards", byte_text(found.bytes)),
        ("images", f"{byte_text(found.payload)} ({share(found.payload, found.bytes)})"),
        ("headers", f"{byte_text(found.headers)} ({share(found.headers, found.bytes)})"),
        ("padding", f"{byte_text(found.padding)} ({share(found.padding, found.bytes)})"),
        ("align", count(found.align, "byte") + ("" if found.layout == "aligned" else f", layout {found.layout}")),
        ("classes", _class_words(found)),
        ("refused", count(found.rejected.total, "source")),
        ("generation", found.generation),
    ]
    for split in found.splits[:_MAX_SPLITS]:
        held = f"{count(split.samples, 'sample')} in {count(split.shards, 'shard')}, {byte_text(split.bytes)}"
        rows.append((f"split {split.name}", held))
    if len(found.splits) > _MAX_SPLITS:
        rows.append(("splits", f"... and {len(found.splits) - _MAX_SPLITS:,} more"))
    return rows


def _class_words(found: Inspection) -> str:
    if not found.labels:
        return "no labels"
    told = [f"{found.labels:,} without names" if found.class_names is None else f"{found.class_names:,}"]
    if found.empty_classes:
        told.append(f"{found.empty_classes:,} of them without a sample")
    if found.unlabelled:
        told.append(f"{count(found.unlabelled, 'sample')} without a label")
    return ", ".join(told)
