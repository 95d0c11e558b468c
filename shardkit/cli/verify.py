"""`shardkit verify`: prove that a dataset is what its manifest says."""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
import time
from collections import Counter
from typing import TYPE_CHECKING

import click

from shardkit.cli._choices import LEVELS, PATH
from shardkit.cli._progress import Line
from shardkit.cli._render import byte_text, count_text, print_json, print_lines, quote, time_text
from shardkit.sizes import count

if TYPE_CHECKING:
    from shardkit.verifying.report import Level, Report

__all__ = ["verify"]


@click.command(short_help="Prove that nothing in a dataset is damaged.")
@click.argument("dataset", type=PATH)
@click.option(
    "--level",
    type=click.Choice(LEVELS),
    default="checksum",
    show_default=True,
    help="How thoroughly: manifest and indexes; and every header and padding byte; and every checksum and digest; "
    "and Pillow decodes every image.",
)
@click.option("--jobs", "-j", type=click.IntRange(1), help="Shards that are read at the same time.  [default: CPUs]")
@click.option(
    "--direct/--no-direct",
    default=None,
    help="Read past the page cache, which hides damage on the disk; or through it.  [default: past it where possible]",
)
@click.option(
    "--max-findings",
    type=click.IntRange(0),
    default=20,
    show_default=True,
    help="How many findings are printed; all are counted.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the whole report as JSON.")
def verify(dataset: str, level: Level, jobs: int | None, direct: bool | None, max_findings: int, as_json: bool) -> int:
    """Verify the DATASET, the folder that `shardkit pack`, `index`, `convert` or `repair` wrote.

    It goes to the end, whatever is found on the way.

    Exit code 0: all is proven. 4: there is damage. 6: a file could not be read, and there is no damage elsewhere.
    """
    from shardkit.verifying.run import verify as run_verify

    start = time.monotonic()
    with Line("verify", shown=sys.stderr.isatty() and level != "index") as line:
        line.begin(_bytes_to_read(dataset))
        findings = itertools.count(1)
        report = run_verify(
            dataset, level, jobs=jobs, direct=direct, progress=line.advance,
            on_finding=lambda _: line.note(f"{next(findings):,} findings"),
        )  # fmt: skip
    seconds = time.monotonic() - start
    if as_json:
        print_json({**report.to_json(), "seconds": round(seconds, 3)})
    else:
        print_lines(_lines(report, seconds, max_findings))
        if report.exit_code == 4:
            print_lines([f"next: shardkit repair {quote(dataset)} --dry-run"])
    return report.exit_code


def _bytes_to_read(dataset: str) -> int | None:
    """Return the size of the shards and indexes, for the time left; None where the folder cannot be listed."""
    with contextlib.suppress(OSError), os.scandir(dataset) as entries:
        return sum(entry.stat().st_size for entry in entries if entry.name.endswith((".tar", ".arrow", ".idx")))
    return None


def _lines(report: Report, seconds: float, most: int) -> list[str]:
    lines = [str(finding) for finding in report.findings[:most]]
    if len(lines) < report.total_findings:
        lines.append(f"... and {count(report.total_findings - len(lines), 'further finding')}; --json lists them")
    what = f"{count(report.samples, 'sample')} in {count(report.shards, 'shard')} at level {report.level}"
    if report.exit_code == 0:
        lines.append(f"verified {what}: nothing is damaged")
        if not report.checksums:
            lines.append("  not proven  the bytes of images: the shards were indexed without checksums (--facts full)")
    else:
        counts = count_text(Counter(report.counts), most=len(report.counts))
        verdict = "DAMAGED" if report.exit_code == 4 else "NOT PROVEN, some files could not be read"
        if set(report.counts) == {"no-manifest"}:
            verdict = "NOT A COMPLETE DATASET"
        lines.append(f"{verdict}: {count(report.total_findings, 'finding')} in {what}: {counts}")
    path = {"direct": " past the page cache", "page cache": " through the page cache"}.get(report.read_path, "")
    lines.append(f"  read        {byte_text(report.bytes_read)}{path} {time_text(seconds, report.bytes_read)}")
    if report.generation is not None:
        lines.append(f"  generation  {report.generation}")
    return lines
