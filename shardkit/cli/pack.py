"""`shardkit pack`: a folder, or a list, of JPEGs becomes a dataset."""

from __future__ import annotations

import os
import sys
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

import click

from shardkit.cli._render import (
    byte_text,
    count_text,
    print_json,
    print_lines,
    quote,
    share_text,
)
from shardkit.cli._sizes import BYTE_SIZE
from shardkit.errors import ConfigError

if TYPE_CHECKING:
    from shardkit.packing.run import PackPlan, PackResult

__all__ = ["pack"]

EXIT_REFUSED = 3


@click.command(short_help="Turn a folder or a list of JPEGs into shards.")
@click.argument("src", type=click.Path())
@click.argument("dst", type=click.Path())
@click.option("--name", help="Name of the dataset and start of every shard's name.  [default: from DST]")
@click.option("--shard-size", type=BYTE_SIZE, help="Largest size of a shard, e.g. 256MB or 1GiB.  [default: 1GiB]")
@click.option("--shard-samples", type=int, help="Largest number of samples in a shard, instead of a size.")
@click.option("--shards", type=int, help="Number of shards, instead of a size.")
@click.option(
    "--labels", type=click.Choice(["dir", "none", "column"]),
    help="Where labels come from: the first folder level, nowhere, a list's column 'label'.  [default: what is there]",
)  # fmt: skip
@click.option("--classes", "classes_file", type=click.Path(exists=True, dir_okay=False),
              help="File with one class name a line, in label order; an unknown class is an error.")  # fmt: skip
@click.option("--key", type=click.Choice(["relpath", "stem", "index"]),
              help="What a sample's key is made of.  [default: relpath]")  # fmt: skip
@click.option("--align", type=BYTE_SIZE, help="Multiple at which images start, 512 to 512KiB.  [default: 4KiB]")
@click.option("--shuffle/--no-shuffle", default=None, help="Pack in an order drawn from --seed.  [default: shuffle]")
@click.option("--seed", type=int, help="Seed of the order.  [default: 0]")
@click.option(
    "--check", type=click.Choice(["header", "decode", "none"]),
    help="What an image must pass: whole JPEG markers, a full decode, nothing.  [default: header]",
)  # fmt: skip
@click.option("--max-pixels", type=int, help="Largest width x height of an image.  [default: 178956970]")
@click.option("--max-bytes", type=BYTE_SIZE, help="Largest source file.  [default: 128MiB]")
@click.option("--on-error", type=click.Choice(["skip", "fail"]),
              help="Record a refused source and go on, or stop at the first.  [default: skip]")  # fmt: skip
@click.option("--convert", is_flag=True, default=None,
              help="Re-encode PNG, WebP and GIF images under a JPEG's name instead of refusing them.")  # fmt: skip
@click.option("--resize", type=int, help="Scale larger images down to N pixels of the shorter side.")
@click.option("--quality", type=int, help="JPEG quality of what is re-encoded, 1 to 100.  [default: 90]")
@click.option("--follow-symlinks", is_flag=True, default=None, help="Follow links to outside SRC, too.")
@click.option("--digest", type=click.Choice(["xxh3-128", "sha256"]), help="Digest of the shards.  [default: xxh3-128]")
@click.option("--jobs", "-j", type=int, help="Worker processes; any number packs the same bytes.  [default: CPUs]")
@click.option("--resume", is_flag=True, help="Go on with the unfinished pack in DST.")
@click.option("--overwrite", is_flag=True, help="Replace the pack in DST.")
@click.option("--dry-run", is_flag=True, help="Show what would be packed and write nothing.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def pack(
    src: str, dst: str, classes_file: str | None, jobs: int | None, resume: bool, overwrite: bool, dry_run: bool,
    as_json: bool, **options: Any,  # noqa: ANN401 - the options of PackOptions, checked there
) -> int:  # fmt: skip
    """Pack SRC into DST.

    SRC is a folder (its first folder level names the classes) or a .csv, .jsonl or .parquet list with a column 'path',
    an optional column 'label' and any further columns, which go into each sample's json member. DST becomes a folder
    of WebDataset shards with their indexes and a manifest.

    An image that fails the check is left out, and DST/rejected.jsonl says why; the exit code is then 3.
    """
    from shardkit.packing.classes import read_class_list
    from shardkit.packing.run import make_options, plan_pack, run_pack

    if not src or not dst:
        # An unset variable of a script; as a path it would mean the current folder.
        raise ConfigError("SRC and DST are names of folders", found="an empty one")
    given = {name: value for name, value in options.items() if value is not None}
    if classes_file is not None:
        given["classes"] = read_class_list(classes_file)
    chosen = make_options(dst, given)
    if dry_run:
        plan = plan_pack(src, dst, chosen)
        print_json(_plan_document(plan)) if as_json else print_lines(_plan_lines(plan))
        return EXIT_REFUSED if plan.refused else 0
    start = time.monotonic()
    with _Bar(sys.stderr.isatty()) as bar:
        result = run_pack(src, dst, chosen, jobs=jobs, resume=resume, overwrite=overwrite, progress=bar)
    seconds = time.monotonic() - start
    print_json(_result_document(result, seconds)) if as_json else print_lines(_result_lines(result, dst, seconds))
    return EXIT_REFUSED if result.manifest.totals.refused else 0


class _Bar:
    """Progress on a terminal; nothing elsewhere."""

    def __init__(self, shown: bool) -> None:
        self._shown = shown
        self._bar: Any = None  # Any: tqdm has no types
        self._samples = self._total = self._refused = 0

    def begin(self, samples: int, source_bytes: int) -> None:
        self._total = samples
        if self._shown:
            from tqdm import tqdm

            self._bar = tqdm(total=source_bytes, unit="B", unit_scale=True, desc="pack", smoothing=0.05)

    def advance(self, samples: int, source_bytes: int, refused: int) -> None:
        self._samples += samples
        self._refused += refused
        if self._bar is not None:
            self._bar.set_postfix_str(f"{self._samples:,}/{self._total:,} samples, {self._refused:,} refused", False)
            self._bar.update(source_bytes)

    def __enter__(self) -> _Bar:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()


def _plan_lines(plan: PackPlan) -> list[str]:
    size = sum(plan.bytes)
    classes = "no labels" if plan.classes is None else f"{len(plan.classes):,} classes"
    lines = [
        f"{plan.samples:,} samples ({byte_text(plan.payload)}, {classes}) would become {len(plan.bytes):,} shards "
        f"of {byte_text(min(plan.bytes))} to {byte_text(max(plan.bytes))}",
        f"  in all      {byte_text(size)}, of which headers and padding {byte_text(size - plan.payload)} "
        f"({share_text(size - plan.payload, size)})",
        f"  samples     {min(plan.counts):,} to {max(plan.counts):,} a shard",
        *(f"  key         {key}  <-  {source}" for key, source in plan.keys),
    ]
    if plan.refused:
        reasons = count_text(Counter(refusal.reason for refusal in plan.refused))
        lines.append(f"  refused     {len(plan.refused):,} before any image was read: {reasons}")
    if plan.skipped:
        lines.append(f"  ignored     {count_text(plan.skipped)}")
    return [*lines, "nothing was written; images are checked when they are packed"]


def _plan_document(plan: PackPlan) -> dict[str, Any]:
    return {
        "name": plan.name, "samples": plan.samples, "payload": plan.payload, "bytes": sum(plan.bytes),
        "shards": [{"bytes": size, "samples": count} for size, count in zip(plan.bytes, plan.counts, strict=True)],
        "classes": None if plan.classes is None else list(plan.classes),
        "keys": dict(plan.keys), "refused": len(plan.refused), "ignored": dict(plan.skipped),
    }  # fmt: skip


def _result_lines(result: PackResult, dst: str, seconds: float) -> list[str]:
    totals = result.manifest.totals
    kept = f", {result.kept:,} of them kept from an earlier run" if result.kept else ""
    lines = [
        f"packed {totals.samples:,} samples into {totals.shards:,} shards in {seconds:.1f} s "
        f"({byte_text(result.made_payload / seconds)}/s){kept}",
        f"  payload     {byte_text(totals.payload)}",
        f"  headers     {byte_text(totals.headers)} ({share_text(totals.headers, totals.bytes)})",
        f"  padding     {byte_text(totals.padding)} ({share_text(totals.padding, totals.bytes)})",
    ]
    if totals.refused:
        where = quote(os.path.join(dst, "rejected.jsonl"))
        reasons = f": {count_text(result.refused)}" if result.refused else ""
        lines.append(f"  refused     {totals.refused:,}{reasons}; see {where}")
    if result.skipped:
        lines.append(f"  ignored     {count_text(result.skipped)}")
    return [*lines, f"next: shardkit verify {quote(dst)}"]


def _result_document(result: PackResult, seconds: float) -> dict[str, Any]:
    manifest = result.manifest
    totals = manifest.totals
    return {
        "name": manifest.name, "generation": manifest.generation, "shards": totals.shards, "samples": totals.samples,
        "payload": totals.payload, "headers": totals.headers, "padding": totals.padding, "bytes": totals.bytes,
        "refused": totals.refused, "refused_by_reason": dict(result.refused), "ignored": dict(result.skipped),
        "kept_shards": result.kept, "brace": manifest.brace, "seconds": round(seconds, 3),
    }  # fmt: skip
