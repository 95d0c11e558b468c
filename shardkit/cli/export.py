"""`shardkit export`: other tools' index files."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

import click

from shardkit.cli._choices import PATH, refuse_empty
from shardkit.cli._progress import Line
from shardkit.cli._render import byte_text, print_json, print_lines, quote
from shardkit.escaping import escape
from shardkit.sizes import count

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardkit.exporting.report import ExportedFile, ExportReport

__all__ = ["export"]

FORMATS = ("wids", "energon", "timm", "openclip", "huggingface", "aistore", "dali")


@click.command(short_help="Write other tools' index files.")
@click.argument("dataset", type=PATH)
@click.option(
    "--to",
    required=True,
    metavar="FORMAT,...",
    help=f"For which tools, with commas or given several times: {', '.join(FORMATS)}.",
    multiple=True,
)
@click.option(
    "--out",
    type=PATH,
    metavar="DIR",
    help="Write the files there instead; their bytes are the same, and they belong beside the shards.  "
    "[default: DATASET]",
)
@click.option("--overwrite", is_flag=True, help="Replace files that no export has written, too.")
@click.option("--json", "as_json", is_flag=True, help="Print what was written as JSON.")
def export(dataset: str, to: tuple[str, ...], out: str | None, overwrite: bool, as_json: bool) -> int:
    """Write the index files that other tools want beside the shards of DATASET, from its index alone.

    No payload is read: it takes seconds. Files of an earlier export are replaced; others only with --overwrite.

    Exit code 0: done. 2: no such format or dataset, a file is in the way, or a tool would read these shards otherwise.
    4: the index or the size of a shard is not what the manifest says.
    """
    from shardkit.exporting.run import export as run_export

    refuse_empty("DATASET and --out are names of folders", dataset, out)
    names = [name.strip() for given in to for name in given.split(",") if name.strip()]
    start = time.monotonic()
    with Line("export", shown=sys.stderr.isatty()) as line:
        line.begin(unit=" files", scaled=False)

        def begun(name: str) -> None:
            line.note(escape(name))
            line.advance(1)

        report = run_export(dataset, names, out=out, overwrite=overwrite, progress=begun)
    seconds = time.monotonic() - start
    if as_json:
        print_json({**report.to_json(), "seconds": round(seconds, 3)})
    else:
        print_lines(_lines(report, seconds))
    return 0


def _lines(report: ExportReport, seconds: float) -> list[str]:
    formats = list(dict.fromkeys(file.format for file in report.files))
    lines = [
        f"exported {count(report.samples, 'sample')} for {', '.join(formats)} in {seconds:.1f} s "
        f"into {quote(report.folder)}"
    ]
    for name in formats:
        lines.append(f"  {name:11} {_summary([file for file in report.files if file.format == name])}")
    return lines


def _summary(files: Sequence[ExportedFile]) -> str:
    states = {state: sum(file.state == state for file in files) for state in ("written", "replaced", "unchanged")}
    told = ", ".join(f"{number:,} {state}" for state, number in states.items() if number)
    names = ", ".join(escape(file.name) for file in files[:2]) + (", ..." if len(files) > 2 else "")
    return f"{count(len(files), 'file')} ({told}), {byte_text(sum(file.bytes for file in files))}: {names}"
