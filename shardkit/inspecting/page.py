"""The page: one HTML file that asks nobody for anything, with every text of the dataset escaped."""

from __future__ import annotations

from base64 import b64encode
from functools import partial
from typing import TYPE_CHECKING

from shardkit.inspecting.charts import draw_classes, draw_measure
from shardkit.inspecting.html import Raw, attribute, clip, definition_list, limit_note, table, text
from shardkit.inspecting.report import PERCENTILES
from shardkit.inspecting.style import STYLE
from shardkit.inspecting.words import MEASURES, class_text, figure_text, share, summary_rows, unknown_scans
from shardkit.sizes import byte_text, count

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from shardkit.inspecting.gallery import Gallery, Shelf
    from shardkit.inspecting.report import Inspection
    from shardkit.inspecting.thumbnails import Thumbnail

__all__ = ["MAX_ROWS", "render_page"]

MAX_ROWS = 200
"""Rows of any list in the page; the page says how many more there are."""
_ENGINES, _RESTARTS, _TURNED = "a GPU's JPEG engines take", "restart markers", "turned by EXIF"
_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
"""No script runs and nothing is fetched, whatever a text of the dataset should bring into the page."""


def render_page(found: Inspection, gallery: Gallery) -> bytes:
    """Return the page, UTF-8. Equal inspections and galleries give equal bytes with one version of matplotlib."""
    sections = [
        _section("Summary", definition_list(summary_rows(found))),
        _section("Verification", _verification(found)),
        _section("Sizes and dimensions", _percentiles(found) + _charts(found)),
        _section("Coding", _coding(found)),
        _section("Classes", _classes(found)),
        _section("Contact sheet", _sheet(found, gallery)),
        _section("Refused sources", _rejected(found)),
    ]
    title = f"{found.name}: {count(found.samples, 'sample')}"
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{attribute(_POLICY)}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n<meta name="referrer" content="no-referrer">\n'
        f'<link rel="icon" href="data:,">\n<title>{text(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n'
        f"<header><h1>{text(found.name)}</h1><p>{_headline(found)}</p></header>\n<main>\n"
        + "\n".join(sections)
        + "\n</main>\n<footer>Made by <code>shardkit inspect</code>; nothing in this page is fetched, and no script "
        "runs.</footer>\n</body>\n</html>\n"
    ).encode()


def _headline(found: Inspection) -> str:
    parts = [count(found.samples, "sample"), count(found.shards, "shard"), byte_text(found.bytes)]
    if found.images is not None and found.images.jpegs:
        share_text = share(found.images.hardware_decodable, found.samples)
        parts.append(f"{share_text} for a GPU's JPEG engines")
    return text(" · ".join(parts))


def _section(title: str, body: str) -> str:
    return f"<section><h2>{text(title)}</h2>\n{body}\n</section>"


def _verification(found: Inspection) -> str:
    report = found.verification
    if report is None:
        return '<p class="note">Not verified: <code>--verify LEVEL</code> runs <code>shardkit verify</code>.</p>'
    level = f"level {report.level}, {count(report.samples, 'sample')}, {count(report.shards, 'shard')}"
    if not report.total_findings:
        return f'<p class="good">Nothing is damaged ({text(level)}).</p>'
    damaged = "Damaged" if report.exit_code == 4 else "Not proven, some files could not be read"
    head = f'<p class="bad">{damaged}: {text(count(report.total_findings, "finding"))} ({text(level)}).</p>'
    counts = table(("finding", "number"), list(_rows(report.counts)), right=(False, True))
    shown = [(str(finding),) for finding in report.findings[:MAX_ROWS]]
    return head + counts + table(("findings",), shown) + limit_note(len(shown), report.total_findings, "finding")


def _percentiles(found: Inspection) -> str:
    heads = ("", "min", *(f"{percent} %" for percent in PERCENTILES[1:-1]), "max", "unknown")
    rows = []
    for name, measure in found.measures.items():
        values = [figure_text(name, value) for value in measure.percentiles] or ["-"] * len(PERCENTILES)
        rows.append((MEASURES[name], *values, f"{measure.unknown:,}"))
    return f'<div class="line">{table(heads, rows, right=(False, *[True] * (len(heads) - 1)))}</div>'


def _charts(found: Inspection) -> str:
    figures = []
    for name, measure in found.measures.items():
        if not measure.known:
            continue
        middle = figure_text(name, measure.percentiles[PERCENTILES.index(50)])
        ends = " to ".join(figure_text(name, measure.percentiles[i]) for i in (0, -1))
        told = f"Histogram of {MEASURES[name]}: {ends}, half of the samples at most {middle}"
        figures.append(_figure(draw_measure(name, measure, partial(_tick, name)), told))
    if found.labels:
        sizes = [one.samples for one in found.classes if one.label is not None]
        more = f" (the largest {len(sizes):,} classes)" if found.labels > len(sizes) else ""
        told = f"Samples of each class, the largest first: {min(sizes):,} to {max(sizes):,}{more}"
        if found.empty_classes:
            told += f", and {found.empty_classes:,} without a sample"
        figures.append(_figure(draw_classes("classes", sizes, found.empty_classes), told))
    return f'<div class="charts">{"".join(figures)}</div>'


def _tick(name: str, value: float) -> str:
    return figure_text(name, value).replace(".0 ", " ")


def _figure(chart: str, told: str) -> str:
    named = chart.replace("<svg", f'<svg role="img" aria-label="{attribute(told)}"', 1)
    return f"<figure>{named}<figcaption>{text(told)}</figcaption></figure>"


def _coding(found: Inspection) -> str:
    images = found.images
    if images is None:
        facts = [(name, "-") for name in (_ENGINES, _RESTARTS, "more than one scan", _TURNED)]
        return f'<p class="note">Nobody has looked at the images.</p>{definition_list(facts)}'
    jpegs = images.jpegs
    scans = f"more than one scan{unknown_scans(images)}"
    numbers = {_ENGINES: images.hardware_decodable, _RESTARTS: images.restarts, scans: images.several_scans,
               _TURNED: images.turned}  # fmt: skip
    facts = [(name, f"{number:,} ({share(number, jpegs)})") for name, number in numbers.items()]
    kinds: list[tuple[str, Mapping[str, int], int]] = [
        ("file type", images.media_types, found.samples), ("frame", images.frames, jpegs),
        ("subsampling", images.subsamplings, jpegs), ("components", images.components, jpegs),
        ("bits a component", images.precisions, jpegs), ("EXIF orientation", images.orientations, jpegs),
    ]  # fmt: skip
    tables = [
        table((title, "images", ""), list(_rows(counts, whole)), right=(False, True, True))
        for title, counts, whole in kinds
        if counts
    ]
    return f'<p>Of {count(jpegs, "JPEG")}:</p>{definition_list(facts)}<div class="tables">{"".join(tables)}</div>'


def _rows(counts: Mapping[str, int], whole: int | None = None) -> Sequence[tuple[str, ...]]:
    rows = []
    for name, number in list(counts.items())[:MAX_ROWS]:
        rows.append((name, f"{number:,}", *([] if whole is None else [share(number, whole)])))
    return rows


def _classes(found: Inspection) -> str:
    if not found.labels:
        return '<p class="note">No sample has a label.</p>'
    most = max(one.samples for one in found.classes)
    rows = []
    for one in found.classes[:MAX_ROWS]:
        bar = Raw(f'<span class="bar" style="width:{100 * one.samples / most:.1f}%"></span>')
        label = "" if one.label is None else str(one.label)
        rows.append(
            (label, class_text(one.label, one.name), f"{one.samples:,}", share(one.samples, found.samples), bar)
        )
    total = found.labels + (found.unlabelled > 0)
    listed = table(("label", "class", "samples", "", ""), rows, right=(True, False, True, True, False))
    return listed + limit_note(len(rows), total, "class", "classes")


def _sheet(found: Inspection, gallery: Gallery) -> str:
    if not gallery.shelves:
        return '<p class="note">No thumbnails.</p>'
    told = f"{gallery.shown:,} of {count(found.samples, 'sample')}, chosen by seed {gallery.seed}, " + (
        f"of {len(gallery.shelves):,} of {gallery.groups:,} classes" if gallery.groups > 1 else "all of one class"
    )
    if gallery.failed:
        told += f"; {gallery.failed:,} could not be shown"
    return f'<p class="note">{text(told)}.</p>' + "".join(map(_shelf, gallery.shelves))


def _shelf(shelf: Shelf) -> str:
    title = class_text(shelf.label, shelf.name)
    pictures = "".join(_picture(one, title) for one in shelf.thumbnails)
    return f'<h3>{text(title)} <small>{count(shelf.samples, "sample")}</small></h3><div class="sheet">{pictures}</div>'


def _picture(one: Thumbnail, title: str) -> str:
    facts = one.facts
    key = f"sample {one.number}" if facts is None else facts.key
    if one.jpeg is None:
        shown = f'<div class="none" role="img" aria-label="no picture">{text(one.reason or "")}</div>'
    else:
        data = b64encode(one.jpeg).decode("ascii")
        width, height = one.size
        alt = attribute(f"{clip(key)}, {clip(title)}")
        shown = f'<img src="data:image/jpeg;base64,{data}" width="{width}" height="{height}" alt="{alt}">'
    told = "" if facts is None else byte_text(facts.size)
    if facts is not None and facts.image["width"]:
        told = f"{facts.image['width']}x{facts.image['height']}, {told}"
    return f"<figure>{shown}<figcaption>{text(key)}<small>{text(told)}</small></figcaption></figure>"


def _rejected(found: Inspection) -> str:
    rejected = found.rejected
    if not rejected.total:
        return '<p class="note">No source was refused when the dataset was packed.</p>'
    rows = [(one.path, one.reason, one.detail) for one in rejected.first[:MAX_ROWS]]
    counts = table(("reason", "sources"), list(_rows(rejected.reasons)), right=(False, True))
    shown = table(("source", "reason", "detail"), rows) + limit_note(len(rows), rejected.total, "source")
    return f"<p>{count(rejected.total, 'source')}:</p>{counts}{shown}"
