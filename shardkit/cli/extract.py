"""`shardkit extract`: a dataset becomes a folder of image files again."""

from __future__ import annotations

import sys
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

import click

from shardkit.cli._choices import PATH, refuse_empty
from shardkit.cli._progress import ItemBar
from shardkit.cli._render import byte_text, count_text, print_json, print_lines, quote, time_text
from shardkit.sizes import count

if TYPE_CHECKING:
    from shardkit.extracting.names import Layout
    from shardkit.extracting.run import ExtractResult, OnError, Reflink

__all__ = ["extract"]

_SHOWN = 20


@click.command(short_help="Write a dataset's images into a folder again.")
@click.argument("dataset", type=PATH)
@click.argument("dst", type=PATH)
@click.option("--key", "keys", multiple=True, help="Key of a wanted sample; may be given again.  [default: all]")
@click.option(
    "--layout", type=click.Choice(["source", "class"]), default="source", show_default=True,
    help="Names of the files: the paths that were packed, where they are known and safe; or CLASS/KEY.",
)  # fmt: skip
@click.option("--jobs", "-j", type=click.IntRange(1), help="Threads; any number gives the same tree.  [default: CPUs]")
@click.option(
    "--on-error", type=click.Choice(["fail", "skip"]), default="fail", show_default=True,
    help="Stop at the first image that is damaged or has no name of its own, or leave it out and go on.",
)  # fmt: skip
@click.option("--overwrite", is_flag=True, help="Replace files of other content that have a name which is needed.")
@click.option(
    "--reflink", type=click.Choice(["auto", "always", "never"]), default="auto", show_default=True,
    help="Share whole 4 KiB blocks with the shards: where the file system does that, or else fail, or copy all.",
)  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def extract(
    dataset: str, dst: str, keys: tuple[str, ...], layout: Layout, jobs: int | None, on_error: OnError,
    overwrite: bool, reflink: Reflink, as_json: bool,
) -> int:  # fmt: skip
    """Write the images of the DATASET into the folder DST, one file a sample, each checked against its CRC-32C.

    Only regular files below DST are written, and no link in it is followed. Files that are there already with the right
    bytes are kept: run it again to go on.

    Exit code 0: every sample is a file. 3: with --on-error skip, some were left out. 4: an image is damaged. 5: DST is
    full. 9: a name is not safe.
    """
    from shardkit.extracting.run import extract as run_extract

    refuse_empty("DATASET and DST are names of folders", dataset, dst)
    start = time.monotonic()
    with ItemBar(sys.stderr.isatty(), "extract") as bar:
        result = run_extract(
            dataset, dst, keys=keys or None, layout=layout, jobs=jobs, on_error=on_error, overwrite=overwrite,
            reflink=reflink, progress=bar,
        )  # fmt: skip
    seconds = time.monotonic() - start
    print_json(_document(result, seconds)) if as_json else print_lines(_lines(result, dst, seconds))
    return result.exit_code


def _lines(result: ExtractResult, dst: str, seconds: float) -> list[str]:
    lines = [f"{failure.reason}: {failure.message}" for failure in result.failures[:_SHOWN]]
    if len(lines) < result.failed:
        lines.append(f"... and {count(result.failed - len(lines), 'further sample')} left out; --json lists them")
    lines.append(
        f"extracted {result.made + result.kept:,} of {count(result.samples, 'sample')} into {quote(dst)}: "
        f"{byte_text(result.made_bytes)} {time_text(seconds, result.made_bytes)}"
    )
    if not result.checksums:
        lines.append("  not proven  the bytes of images: the shards were indexed without checksums (--facts full)")
    if result.shared_bytes:
        copied = byte_text(result.made_bytes - result.shared_bytes)
        lines.append(f"  reflinks    {byte_text(result.shared_bytes)} are blocks of the shards, {copied} copied")
    if result.kept:
        lines.append(f"  kept        {count(result.kept, 'file')} that were there with the right bytes")
    if result.renamed:
        lines.append(
            f"  renamed     {result.renamed:,} whose source is not known, not safe or no .jpg: CLASS/KEY, %HH or .jpg"
        )
    if result.unstated:
        lines.append(f"  labels      those of {result.unstated:,} are not in their names; --layout class has CLASS/KEY")
    if result.counts:
        lines.append(f"  left out    {result.failed:,}: {count_text(Counter(result.counts))}")
    return lines


def _document(result: ExtractResult, seconds: float) -> dict[str, Any]:
    return {
        "exit_code": result.exit_code, "samples": result.samples, "checksums": result.checksums, "written": result.made,
        "bytes": result.made_bytes, "bytes_shared": result.shared_bytes,
        "bytes_copied": result.made_bytes - result.shared_bytes,
        "kept": result.kept, "folders": result.folders, "renamed": result.renamed,
        "labels_unstated": result.unstated,
        "left_out": result.failed, "counts": dict(result.counts),
        "failures": [{"key": one.key, "reason": one.reason, "message": one.message} for one in result.failures],
        "seconds": round(seconds, 3),
    }  # fmt: skip
