"""`shardkit repair`: a damaged dataset made whole again from what its shards still hold."""

from __future__ import annotations

import sys
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

import click

from shardkit.cli._choices import PATH, refuse_empty
from shardkit.cli._progress import Line
from shardkit.cli._render import byte_text, count_text, print_json, print_lines, quote
from shardkit.cli._sizes import BYTE_SIZE
from shardkit.escaping import escape
from shardkit.sizes import count

if TYPE_CHECKING:
    from shardkit.repairing.result import RepairResult, ShardOutcome

__all__ = ["repair"]

_SHOWN = 20


@click.command(short_help="Make a damaged dataset whole again, in a new folder.")
@click.argument("dataset", type=PATH)
@click.option(
    "--out", type=PATH, metavar="DIR",
    help="Folder of the repaired dataset.  [default: only missing index files are written, beside whole shards]",
)  # fmt: skip
@click.option("--dry-run", "-n", is_flag=True, help="Say what could be saved; write nothing.")
@click.option(
    "--link", is_flag=True, help="Hard-link shards that are whole, where that can be, instead of copying them."
)
@click.option(
    "--max-bytes", type=BYTE_SIZE,
    help="Largest image, in bytes, for which no index vouches.  [default: what pack was told, else 128MiB]",
)  # fmt: skip
@click.option(
    "--jobs", "-j", type=click.IntRange(1),
    help="Shards that are read and written at a time; any number gives the same bytes.  [default: CPUs]",
)  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def repair(
    dataset: str, out: str | None, dry_run: bool, link: bool, max_bytes: int | None, jobs: int | None, as_json: bool
) -> int:  # fmt: skip
    """Rebuild the indexes and the manifest of the DATASET from its shards, and save every whole sample of damaged ones.

    No file of the DATASET is changed or removed. With --out a repaired dataset is written to a new folder: whole shards
    as they are, of damaged ones new shards of the samples that are whole. Without it only index files and a manifest
    that are missing are written, beside shards that are whole. What is lost is listed in lost.jsonl, with its reason.
    Tars of other tools, without a manifest, become tars of their whole samples in the new folder, for `shardkit index`.

    Exit code 0: everything is there. 3: some samples are lost. 4: nothing could be saved from a shard.
    """
    from shardkit.repairing.run import repair as run_repair

    refuse_empty("DATASET and --out are names of folders", dataset, out)
    start = time.monotonic()
    with Line("repair", shown=sys.stderr.isatty()) as bar:
        result = run_repair(dataset, out=out, dry_run=dry_run, link=link, max_bytes=max_bytes, jobs=jobs, progress=bar)
    seconds = time.monotonic() - start
    if as_json:
        print_json(_document(result, seconds))
    else:
        print_lines(_lines(result, dataset, out, seconds, dry_run=dry_run))
    return result.exit_code


def _lines(result: RepairResult, dataset: str, out: str | None, seconds: float, *, dry_run: bool) -> list[str]:
    lines = [f"note: {note}" for note in result.notes]
    lines += [_shard_line(shard) for shard in result.shards]
    lines += [
        f"lost: {lost.shard}:{lost.offset}{f' [sample {escape(lost.key)}]' if lost.key is not None else ''}"
        f" {lost.reason}: {escape(lost.detail)}"
        for lost in result.first[:_SHOWN]
    ]
    if result.lost > _SHOWN:
        lines.append(
            f"... and {result.lost - _SHOWN:,} further losses; {'--json' if dry_run else 'lost.jsonl'} lists them"
        )
    samples = sum(shard.samples for shard in result.shards)
    size = byte_text(sum(shard.bytes for shard in result.shards))
    whole = sum(shard.state == "whole" for shard in result.shards)
    shards = f"{whole:,} of {count(len(result.shards), 'shard')} whole"
    lines.append(f"{count(samples, 'sample')} in {size}, {shards}, {seconds:.1f} s")
    if result.counts:
        lines.append(f"  lost        {result.lost:,}: {count_text(Counter(result.counts))}")
    if result.rejected_lost:
        lines.append("  lost        the list of the sources that the pack had refused (rejected.jsonl)")
    lines.append(_end_line(result, dataset, out, dry_run=dry_run))
    if result.written and not dry_run:
        tool = "index" if result.manifest is None else "verify"  # without a manifest they are tars of another tool
        lines.append(f"next: shardkit {tool} {quote(dataset if out is None else out)}")
    return lines


def _shard_line(shard: ShardOutcome) -> str:
    from shardkit.repairing.result import PROOFS

    kept = count(shard.samples, "sample") + (f", {shard.lost:,} lost" if shard.lost else "")
    source = f"; {shard.without_source:,} without their original path" if shard.without_source else ""
    return f"{shard.name}: {shard.state}, {kept}: {PROOFS[shard.proof]}{source}"


def _end_line(result: RepairResult, dataset: str, out: str | None, *, dry_run: bool) -> str:
    if dry_run:
        return "nothing was written: a dry run"
    if result.manifest is None and not result.written:
        return "nothing was written: not one sample is whole"
    if not result.written:
        return f"nothing is missing in {quote(dataset)}"
    return f"wrote {count(len(result.written), 'file')} into {quote(dataset if out is None else out)}"


def _document(result: RepairResult, seconds: float) -> dict[str, Any]:
    return {
        "exit_code": result.exit_code,
        "generation": None if result.manifest is None else result.manifest.generation,
        "samples": sum(shard.samples for shard in result.shards),
        "shards": [
            {
                "name": shard.name, "file": None if shard.file is None else escape(shard.file), "state": shard.state,
                "proof": shard.proof, "samples": shard.samples, "lost": shard.lost, "bytes": shard.bytes,
                "without_source": shard.without_source,
            }
            for shard in result.shards
        ],
        "lost": result.lost, "counts": dict(result.counts),
        "losses": [
            {"key": x.key, "shard": x.shard, "offset": x.offset, "reason": x.reason, "detail": x.detail}
            for x in result.first
        ],
        "rejected_lost": result.rejected_lost, "notes": list(result.notes), "written": list(result.written),
        "seconds": round(seconds, 3),
    }  # fmt: skip
