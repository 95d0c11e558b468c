"""`shardkit inspect`: what a dataset holds, in figures and on a page."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

import click

from shardkit.cli._choices import LEVELS, PATH, refuse_empty
from shardkit.cli._progress import Line
from shardkit.cli._render import byte_text, print_json, print_lines, quote
from shardkit.escaping import escape
from shardkit.sizes import count

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from shardkit.inspecting.report import ImageFacts, Inspection
    from shardkit.verifying.report import Level

__all__ = ["inspect"]

_BAR = 30
_KINDS = 6
_FINDINGS = 10
_CODING = (
    "type", "JPEG engines", "frame", "components", "subsampling", "precision", "scans", "restarts", "orientation",
)  # fmt: skip


@click.command(short_help="Show what a dataset holds: figures, and a page with pictures.")
@click.argument("dataset", type=PATH)
@click.option("--classes", type=click.IntRange(0), default=20, show_default=True, metavar="N",
              help="How many classes are listed, the largest; 0 for all. All are counted.")  # fmt: skip
@click.option("--html", type=PATH, metavar="FILE",
              help="Write a page that needs nothing else: pictures, histograms, lists. Needs matplotlib.")  # fmt: skip
@click.option("--thumbnails", type=click.IntRange(0, 1000), default=60, show_default=True, metavar="N",
              help="How many samples the page shows, of every class; at most 1000. About 7 kB each.")  # fmt: skip
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Another one chooses other samples.")
@click.option("--overwrite", is_flag=True, help="Replace the page when it is there already.")
@click.option("--verify", "level", type=click.Choice(LEVELS),
              help="Verify the dataset at this level, too, and show what was found.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON.")
def inspect(
    dataset: str, classes: int, html: str | None, thumbnails: int, seed: int, overwrite: bool, level: Level | None,
    as_json: bool,
) -> int:  # fmt: skip
    """Show what the DATASET holds: bytes, classes, sizes in bytes and pixels, and how its JPEGs are coded.

    Figures come from the index alone; only thumbnails and --verify read the shards.

    Exit code 0: done. 2: no such dataset, or the page is there already. 4: the index is not what the manifest says, or
    --verify found damage. 7: --html without matplotlib.
    """
    from shardkit.inspecting.run import inspect as run_inspect

    refuse_empty("DATASET and --html are names", dataset, html)
    start = time.monotonic()
    with _Lines(shown=sys.stderr.isatty()) as bar:
        found = run_inspect(
            dataset, html=html, thumbnails=thumbnails, seed=seed, overwrite=overwrite, verify=level,
            progress=bar.looked, verified=bar.verified,
        )  # fmt: skip
    seconds = time.monotonic() - start
    if as_json:
        print_json({**found.to_json(), "seconds": round(seconds, 3)})
    else:
        print_lines(_lines(found, classes, seconds))
    return found.exit_code


class _Lines:
    """A line of rows, and then one of bytes when the dataset is verified, too."""

    def __init__(self, *, shown: bool) -> None:
        self._rows, self._bytes = Line("inspect", shown=shown), Line("verify", shown=shown)
        self._begun: set[str] = set()

    def looked(self, rows: int) -> None:
        self._advance(self._rows, " rows", rows)

    def verified(self, read: int) -> None:
        self._advance(self._bytes, "B", read)

    def _advance(self, line: Line, unit: str, count: int) -> None:
        if unit not in self._begun:
            self._begun.add(unit)
            line.begin(unit=unit)
        line.advance(count)

    def __enter__(self) -> _Lines:
        return self

    def __exit__(self, *_: object) -> None:
        for line in (self._rows, self._bytes):
            line.__exit__()


def _lines(found: Inspection, most: int, seconds: float) -> list[str]:
    from shardkit.inspecting.words import summary_rows

    lines = [escape(found.name)]
    lines += [f"  {escape(name):11} {escape(value)}" for name, value in summary_rows(found)]
    if found.labels or found.unlabelled:
        lines += ["", *_class_lines(found, most)]
    lines += ["", *_spread_lines(found), "", *_coding_lines(found)]
    if found.rejected.total:
        lines += ["", f"refused: {count(found.rejected.total, 'source')}"]
        lines += [f"  {number:>7,}  {escape(reason)}" for reason, number in _first(found.rejected.reasons)]
    lines += ["", _verified_line(found), *_finding_lines(found)]
    if found.page is not None:
        failed = f" ({found.page.failed:,} without a picture)" if found.page.failed else ""
        lines.append(f"page: {quote(found.page.path)}, {byte_text(found.page.bytes)}, "
                     f"{count(found.page.thumbnails, 'thumbnail')}{failed}")  # fmt: skip
    return [*lines, f"inspected in {seconds:.1f} s"]


def _class_lines(found: Inspection, most: int) -> list[str]:
    from shardkit.inspecting.words import class_text, share

    shown = found.classes[: most or None]
    names = [("" if one.label is None else str(one.label), _cut(class_text(one.label, one.name))) for one in shown]
    wide = [max((len(name[i]) for name in names), default=0) for i in range(2)]
    largest = max((one.samples for one in found.classes), default=1)
    lines = ["samples by class, the largest first"]
    for one, (label, name) in zip(shown, names, strict=True):
        bar = "#" * max(1, round(_BAR * one.samples / largest))
        told = f"{one.samples:>11,}  {share(one.samples, found.samples):>7}"
        lines.append(f"  {label:>{wide[0]}}  {name:<{wide[1]}}  {told}  {bar}")
    total = found.labels + (found.unlabelled > 0)
    if len(shown) < total:
        rest = found.samples - sum(one.samples for one in shown)
        lines.append(f"  ... and {total - len(shown):,} more with {count(rest, 'sample')}; --classes 0 lists them")
    return lines


def _spread_lines(found: Inspection) -> list[str]:
    from shardkit.inspecting.report import PERCENTILES
    from shardkit.inspecting.words import MEASURES, figure_text

    rows = [("percentiles", "min", *(f"{percent} %" for percent in PERCENTILES[1:-1]), "max")]
    for name, measure in found.measures.items():
        values = [figure_text(name, value) for value in measure.percentiles] or ["-"] * len(PERCENTILES)
        unknown = f" ({measure.unknown:,} unknown)" if measure.unknown else ""
        rows.append((f"  {MEASURES[name]}{unknown}", *values))
    wide = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join([row[0].ljust(wide[0]), *(cell.rjust(width) for cell, width in zip(row[1:], wide[1:], strict=True))])
        for row in rows
    ]


def _coding_lines(found: Inspection) -> list[str]:
    told = ["-"] * len(_CODING) if found.images is None else _codings(found.images, found.samples)
    return ["images", *(f"  {name:14} {text}" for name, text in zip(_CODING, told, strict=True))]


def _codings(images: ImageFacts, samples: int) -> list[str]:
    from shardkit.inspecting.words import share, unknown_scans

    jpegs = images.jpegs

    def part(number: int, whole: int = jpegs) -> str:
        return f"{number:,} ({share(number, whole)})"

    def parts(counts: Mapping[str, int], whole: int = jpegs) -> str:
        told = [f"{name} {part(number, whole)}" for name, number in list(counts.items())[:_KINDS]]
        return ", ".join([*told, "..."] if len(counts) > _KINDS else told) or "-"

    return [
        parts(images.media_types, samples),
        f"{part(images.hardware_decodable)} of the JPEGs are taken by those of a GPU",
        parts(images.frames),
        parts({f"{number}:": count for number, count in images.components.items()}),
        parts(images.subsamplings),
        parts({f"{bits} bits": count for bits, count in images.precisions.items()}),
        f"{part(images.several_scans)} with more than one{unknown_scans(images)}",
        f"{part(images.restarts)} with restart markers",
        f"{part(images.turned)} turned by EXIF",
    ]


def _verified_line(found: Inspection) -> str:
    report = found.verification
    if report is None:
        return "not verified; --verify LEVEL does it"
    if not report.total_findings:
        return f"verified at level {report.level}: nothing is damaged"
    verdict = "DAMAGED" if report.exit_code == 4 else "NOT PROVEN, some files could not be read"
    more = f", the first {_FINDINGS}" if report.total_findings > _FINDINGS else ""
    return f"{verdict}: {count(report.total_findings, 'finding')} at level {report.level}{more}:"


def _finding_lines(found: Inspection) -> Sequence[str]:
    return [] if found.verification is None else [f"  {one}" for one in found.verification.findings[:_FINDINGS]]


def _first(counts: Mapping[str, int]) -> list[tuple[str, int]]:
    return list(counts.items())[:20]


def _cut(name: str) -> str:
    shown = escape(name)
    return shown if len(shown) <= 40 else shown[:37] + "..."
