"""`shardkit index`: existing WebDataset shards become a dataset where they lie."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any

import click

from shardkit.cli._choices import PATH
from shardkit.cli._progress import ItemBar
from shardkit.cli._render import byte_text, count_text, print_json, print_lines, quote, time_text
from shardkit.errors import SourceError
from shardkit.escaping import escape
from shardkit.sizes import count

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardkit.indexing.options import Facts, Labels
    from shardkit.indexing.result import IndexResult
    from shardkit.indexing.unfinished import OnError

__all__ = ["index"]

_SHOWN = 10


@click.command(short_help="Adopt existing WebDataset shards where they lie.")
@click.argument("tars", nargs=-1, required=True, metavar="TAR...")
@click.option(
    "--out", type=PATH,
    help="Folder for the indexes and a link to each shard.  [default: the folder in which all the shards lie]",
)  # fmt: skip
@click.option("--name", help="Name of the dataset: a-z, 0-9, - and _.  [default: that of the folder]")
@click.option(
    "--facts", type=click.Choice(["full", "header", "none"]), default="full", show_default=True,
    help="Read every byte once (CRC-32C, digests, JPEG facts), the beginning of each image (JPEG facts), or no image.",
)  # fmt: skip
@click.option(
    "--labels", type=click.Choice(["cls", "none"]), default="cls", show_default=True,
    help="Take labels from the number in each cls member, or none.",
)  # fmt: skip
@click.option(
    "--image-ext", default="jpg,jpeg,png,webp", show_default=True, metavar="EXT,...",
    help="What may be a sample's image, the preferred first; such as jpg or left.jpg.",
)  # fmt: skip
@click.option(
    "--digest", type=click.Choice(["xxh3-128", "sha256"]), default="xxh3-128", show_default=True,
    help="Digest of shards and indexes.",
)  # fmt: skip
@click.option(
    "--jobs", "-j", type=click.IntRange(1),
    help="Shards read at a time; any number gives the same result.  [default: CPUs; 4 x CPUs without --facts full]",
)  # fmt: skip
@click.option(
    "--on-error", type=click.Choice(["skip", "fail"]), default="skip", show_default=True,
    help="Leave out what cannot be used and list it in rejected.jsonl, or stop at the first.",
)  # fmt: skip
@click.option("--resume", is_flag=True, help="Go on with the unfinished run of the same shards and options.")
@click.option("--overwrite", is_flag=True, help="Replace index files that are there already; never a shard.")
@click.option(
    "--accept-changes", is_flag=True,
    help="With --overwrite: index shards as they are now that changed since the index that is there.",
)  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def index(
    tars: tuple[str, ...], out: str | None, name: str | None, facts: Facts, labels: Labels, image_ext: str, digest: str,
    jobs: int | None, on_error: OnError, resume: bool, overwrite: bool, accept_changes: bool,
    as_json: bool,
) -> int:  # fmt: skip
    """Make a dataset of WebDataset shards that another tool made; no shard is copied or changed.

    TAR is a tar, a folder that holds some, or a glob or brace expression (quoted) such as 'train-{000..099}.tar'.
    Beside the shards, or in --out, come index.arrow, manifest.json, and for each shard NAME.arrow and NAME.idx.

    Exit code 0: done. 3: complete, but something was refused; see rejected.jsonl. 4: no shard is a whole tar, or one
    changed since the index that --overwrite is to replace. 5: the folder is full. 8: another run holds the folder.
    9: refused as unsafe (pipe:, expressions without end).
    """
    from shardkit.indexing.run import run_index

    start = time.monotonic()
    with ItemBar(sys.stderr.isatty(), "index", "shards") as bar:
        result = run_index(
            tars, out=out, name=name, facts=facts, labels=labels,
            image_ext=[text.strip().lstrip(".") for text in image_ext.split(",")], digest=digest, jobs=jobs,
            on_error=on_error, resume=resume, overwrite=overwrite, accept_changes=accept_changes, progress=bar,
        )  # fmt: skip
    seconds = time.monotonic() - start
    print_json(_document(result, seconds)) if as_json else print_lines(_lines(result, seconds))
    return _exit_code(result)


def _exit_code(result: IndexResult) -> int:
    return SourceError.exit_code if result.manifest.totals.refused else 0


def _lines(result: IndexResult, seconds: float) -> list[str]:
    from shardkit.indexing.refusals import NOT_ADJACENT_REMEDY

    manifest, totals = result.manifest, result.manifest.totals
    lines = [
        f"{escape(shard)}: refused {count_text(counts)}" for shard, counts in list(result.by_shard.items())[:_SHOWN]
    ]
    if len(result.by_shard) > _SHOWN:
        lines.append(f"... and {count(len(result.by_shard) - _SHOWN, 'further shard')} with refusals")
    lines.append(
        f"indexed {count(totals.samples, 'sample')} in {count(totals.shards, 'shard')} in {quote(result.folder)}: "
        # What was kept was not read in this time.
        f"{byte_text(totals.bytes)} {time_text(seconds, 0 if result.kept else totals.bytes)}"
    )
    if result.kept:
        lines.append(f"  kept        {count(result.kept, 'shard')} that an earlier run had indexed")
    if totals.refused:
        left_out = f", {count(result.left_out, 'whole shard')} among them" if result.left_out else ""
        lines.append(f"  refused     {totals.refused:,}{left_out}; see rejected.jsonl")
    if "not-adjacent" in result.refused:
        lines.append(f"  apart       {NOT_ADJACENT_REMEDY}")
    if result.changed:
        lines.append(f"  changed     {_named(result.changed)}: indexed as they are now")
    if result.uncompared:
        lines.append(f"  uncompared  nothing shows whether a shard changed: {result.uncompared}")
    if result.unlabelled:
        lines.append(f"  unlabelled  {count(result.unlabelled, 'sample')}")
    if result.odd_images:
        lines.append(f"  odd images  {result.odd_images:,} are no whole JPEG although they begin like one")
    if result.odd_metadata:
        lines.append(f"  odd json    {result.odd_metadata:,} json members are not one object, and no metadata")
    if not manifest.has_checksums:
        lines.append("  unproven    the bytes of images: --facts full gives them checksums")
    lines.append(f"  generation  {manifest.generation}")
    return [*lines, f"next: shardkit {'verify' if manifest.has_checksums else 'inspect'} {quote(result.folder)}"]


def _named(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN:,} others" if len(names) > _SHOWN else ""
    return ", ".join(map(escape, names[:_SHOWN])) + more


def _document(result: IndexResult, seconds: float) -> dict[str, Any]:
    manifest, totals = result.manifest, result.manifest.totals
    return {
        "exit_code": _exit_code(result), "folder": result.folder, "name": manifest.name,
        "generation": manifest.generation, "facts": manifest.options["facts"], "shards": totals.shards,
        "samples": totals.samples, "payload": totals.payload, "bytes": totals.bytes, "kept": result.kept,
        "refused": totals.refused, "left_out_shards": result.left_out, "counts": dict(result.refused),
        "by_shard": {shard: dict(counts) for shard, counts in result.by_shard.items()},
        "unlabelled": result.unlabelled, "odd_images": result.odd_images, "odd_metadata": result.odd_metadata,
        "changed": list(result.changed), "uncompared": result.uncompared,
        "seconds": round(seconds, 3),
    }  # fmt: skip
