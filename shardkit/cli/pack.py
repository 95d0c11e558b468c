"""`shardkit pack`: a folder, or a list, of JPEGs becomes a dataset."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any

import click

from shardkit.cli._choices import PATH
from shardkit.cli._progress import ItemBar
from shardkit.cli._render import print_json, print_lines
from shardkit.cli._shards import EXIT_REFUSED, plan_document, plan_lines, result_document, result_lines
from shardkit.cli._sizes import BYTE_SIZE
from shardkit.errors import ConfigError

if TYPE_CHECKING:
    from shardkit.packing.run import Reflink

__all__ = ["pack"]


@click.command(short_help="Turn a folder or a list of JPEGs into shards.")
@click.argument("src", type=PATH)
@click.argument("dst", type=PATH)
@click.option("--name", help="Name of the dataset and start of every shard's name.  [default: from DST]")
@click.option("--shard-size", type=BYTE_SIZE, help="Largest size of a shard, e.g. 256MB or 1GiB.  [default: 1GiB]")
@click.option("--shard-samples", type=int, help="Largest number of samples in a shard, instead of a size.")
@click.option("--shards", type=int, help="Number of shards, instead of a size.")
@click.option(
    "--labels", type=click.Choice(["dir", "none", "column"]),
    help="Where labels come from: the first folder level, nowhere, a list's column 'label'.  [default: what is there]",
)  # fmt: skip
@click.option("--classes", "classes_file", type=PATH, metavar="FILE",
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
@click.option(
    "--convert", is_flag=True, default=None,
    help="Re-encode PNG, WebP and GIF images as JPEGs, in files called .png, .webp and .gif, too.",
)  # fmt: skip
@click.option("--resize", type=int, help="Scale larger images down to N pixels of the shorter side.")
@click.option("--quality", type=int, help="JPEG quality of what is re-encoded, 1 to 100.  [default: 90]")
@click.option("--baseline", is_flag=True, default=None,
              help="Store progressive JPEGs as baseline ones, without loss, for a GPU's JPEG engines.")  # fmt: skip
@click.option("--follow-symlinks", is_flag=True, default=None, help="Follow links to outside SRC, too.")
@click.option("--digest", type=click.Choice(["xxh3-128", "sha256"]), help="Digest of the shards.  [default: xxh3-128]")
@click.option("--jobs", "-j", type=int, help="Worker processes; any number packs the same bytes.  [default: CPUs]")
@click.option(
    "--reflink", type=click.Choice(["auto", "always", "never"]), default="never", show_default=True,
    help="Share whole 4 KiB blocks with the sources: where the file system does that, or else fail, or copy all.",
)  # fmt: skip
@click.option("--resume", is_flag=True, help="Go on with the unfinished pack in DST.")
@click.option("--overwrite", is_flag=True, help="Replace the pack in DST.")
@click.option("--dry-run", is_flag=True, help="Show what would be packed and write nothing.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def pack(
    src: str, dst: str, classes_file: str | None, jobs: int | None, resume: bool, overwrite: bool, reflink: Reflink,
    dry_run: bool, as_json: bool, **options: Any,  # noqa: ANN401 - the options of PackOptions, checked there
) -> int:  # fmt: skip
    """Pack SRC into DST.

    SRC is a folder (its first folder level names the classes) or a .csv, .jsonl or .parquet list with a column 'path',
    relative to the list's folder, an optional column 'label' and any further columns, which go into each sample's json
    member. DST becomes a folder of WebDataset shards with their indexes and a manifest.

    A class folder without an image is a class all the same, and keeps its number; the summary names such classes.

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
        print_json(plan_document(plan)) if as_json else print_lines(plan_lines(plan))
        return EXIT_REFUSED if plan.refused else 0
    start = time.monotonic()
    with ItemBar(sys.stderr.isatty(), "pack") as bar:
        result = run_pack(
            src, dst, chosen, jobs=jobs, resume=resume, overwrite=overwrite, reflink=reflink, progress=bar
        )
    seconds = time.monotonic() - start
    print_json(result_document(result, seconds)) if as_json else print_lines(
        result_lines(result, dst, seconds, reflink=reflink)
    )
    return EXIT_REFUSED if result.manifest.totals.refused else 0
