"""`shardkit convert`: datasets and foreign WebDataset shards become a new dataset."""

from __future__ import annotations

import os
import sys
import time
from typing import TYPE_CHECKING, Any

import click

from shardkit.cli._choices import PATH
from shardkit.cli._foreign import convert_to_foreign
from shardkit.cli._progress import ItemBar
from shardkit.cli._render import count_text, print_json, print_lines, time_text
from shardkit.cli._shards import (
    EXIT_REFUSED,
    part_document,
    part_lines,
    plan_document,
    plan_lines,
    result_lines,
)
from shardkit.cli._sizes import BYTE_SIZE
from shardkit.errors import ConfigError
from shardkit.escaping import escape
from shardkit.sizes import count

if TYPE_CHECKING:
    from shardkit.converting.run import Conversion, ConversionPlan
    from shardkit.packing.run import Reflink

__all__ = ["convert"]


@click.command(short_help="Turn datasets and WebDataset tars into new shards.")
@click.argument("src", nargs=-1, required=True, type=PATH)
@click.argument("dst", type=PATH)
@click.option("--name", help="Name of the dataset and start of every shard's name.  [default: from DST]")
@click.option(
    "--shard-size", type=BYTE_SIZE,
    help="Largest size of a shard, e.g. 256MB; for mds:, litdata: 64MiB, for hf: 256MiB if not given.  [default: 1GiB]",
)  # fmt: skip
@click.option("--shard-samples", type=int, help="Largest number of samples in a shard, instead of a size.")
@click.option("--shards", type=int, help="Number of shards, instead of a size.")
@click.option("--shuffle/--no-shuffle", default=None,
              help="Store in an order drawn from --seed over all inputs.  [default: no-shuffle]")  # fmt: skip
@click.option("--seed", type=int, help="Seed of the order.  [default: 0]")
@click.option("--split", help="Parts and their shares, e.g. train=0.98,val=0.02; each becomes the dataset DST/PART.")
@click.option("--where", help="Condition on columns of the index, or class, e.g. 'width >= 256 and class != \"cat\"'.")
@click.option(
    "--labels", "labels_file", type=PATH, metavar="FILE",
    help="File with one class name a line, in label order; or a JSON object, old class to new one (null: left out).",
)  # fmt: skip
@click.option(
    "--key", type=click.Choice(["keep", "shard", "index"]),
    help="Keys as they are, with the shard's name before them, or running numbers.  [default: keep]",
)  # fmt: skip
@click.option(
    "--other-members", type=click.Choice(["refuse", "drop"]),
    help="What to do with members besides image, cls and json, and columns without a place.  [default: refuse]",
)  # fmt: skip
@click.option(
    "--layout", type=click.Choice(["source", "class"]),
    help="Names in tree:DIR: the paths that were packed, or a folder a class and keys.  [default: source, where that "
    "keeps the labels]",
)  # fmt: skip
@click.option("--image-column", help="Column of mds:, litdata:, hf: that holds images.  [default: the only one]")
@click.option(
    "--label-column", help="Column that holds labels; '' for none, of tree: too.  [default: the only one of integers]"
)
@click.option("--key-column", help="Column that holds keys.  [default: the row's number]")
@click.option("--json-column", help="Column of texts that holds whole json members.  [default: none]")
@click.option("--align", type=BYTE_SIZE, help="Multiple at which images start, 512 to 512KiB.  [default: 4KiB]")
@click.option(
    "--check", type=click.Choice(["header", "decode", "none"]),
    help="What an image must pass: whole JPEG markers, a full decode, nothing.  [default: header]",
)  # fmt: skip
@click.option("--max-pixels", type=int, help="Largest width x height of an image.  [default: 178956970]")
@click.option("--max-bytes", type=BYTE_SIZE, help="Largest image.  [default: 128MiB]")
@click.option("--on-error", type=click.Choice(["skip", "fail"]),
              help="Record a refused sample or tar and go on, or stop at the first.  [default: skip]")  # fmt: skip
@click.option("--convert", is_flag=True, default=None,
              help="Re-encode PNG, WebP and GIF images as JPEGs instead of refusing them.")  # fmt: skip
@click.option("--resize", type=int, help="Scale larger images down to N pixels of the shorter side.")
@click.option("--quality", type=int, help="JPEG quality of what is re-encoded, 1 to 100.  [default: 90]")
@click.option("--baseline", is_flag=True, default=None,
              help="Store progressive JPEGs as baseline ones, without loss, for a GPU's JPEG engines.")  # fmt: skip
@click.option("--digest", type=click.Choice(["xxh3-128", "sha256"]), help="Digest of the shards.  [default: xxh3-128]")
@click.option("--jobs", "-j", type=int, help="Worker processes; any number makes the same bytes.  [default: CPUs]")
@click.option(
    "--reflink", type=click.Choice(["auto", "always", "never"]), default="never", show_default=True,
    help="Share whole 4 KiB blocks with the inputs: where the file system does that, or else fail, or copy all.",
)  # fmt: skip
@click.option("--resume", is_flag=True, help="Go on with the unfinished conversion in DST.")
@click.option("--overwrite", is_flag=True, help="Replace the dataset in DST.")
@click.option("--dry-run", is_flag=True, help="Show what would be made and write nothing.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def convert(
    src: tuple[str, ...], dst: str, labels_file: str | None, split: str | None, jobs: int | None, resume: bool,
    overwrite: bool, reflink: Reflink, dry_run: bool, as_json: bool,
    **options: Any,  # noqa: ANN401 - the options of ConvertOptions, checked there
) -> int:  # fmt: skip
    """Make the dataset DST of the samples in SRC...

    Each SRC is a dataset's folder, a WebDataset tar, a glob or a brace expression of them ('x-{000000..000099}.tar'),
    several joined by '::', or a .txt or .list file with one of these a line. Only local files are read; 'pipe:' and
    URLs are refused. Images and json members that no option changes are copied byte for byte.

    mds:DIR, litdata:DIR and hf:DIR are datasets of MosaicML, LitData and Hugging Face, read through those libraries:
    pip install 'shardkit[mds]', 'shardkit[litdata]', 'shardkit[hf]'. As SRC, Parquet files need none. As DST each is
    written by them, in one process, and gets its name when all of it is there. --name, --shards,
    --shard-samples, --align, --digest, --jobs, --reflink and --resume mean nothing then.

    tree:DIR is a folder of images. As SRC it is taken as `shardkit pack` takes it, its first folder level as classes.
    As DST each image becomes a file, named as `shardkit extract` names it; a tree that is there is never replaced.

    A sample that fails the check is left out, and DST/rejected.jsonl says why; the exit code is then 3.
    """
    from shardkit.converting.labels import read_labels
    from shardkit.converting.options import parse_split
    from shardkit.converting.outputs import find_output
    from shardkit.converting.run import make_options, plan_conversion, run_conversion

    if not all(src) or not dst:
        raise ConfigError("SRC and DST are names of files and folders", found="an empty one")
    given = {name: value for name, value in options.items() if value is not None}
    if labels_file is not None:
        given["labels"] = read_labels(labels_file)
    if split is not None:
        given["split"] = parse_split(split)
    output = find_output(dst)
    if output is None and "layout" in given:
        raise ConfigError("--layout says how the files of tree:DIR are called", found=escape(dst))
    if output is not None:
        of_run = {"jobs": jobs, "resume": resume or None, "reflink": None if reflink == "never" else reflink}
        given |= {name: value for name, value in of_run.items() if value is not None}
        return convert_to_foreign(src, output, given, overwrite=overwrite, dry_run=dry_run, as_json=as_json)
    chosen = make_options(dst, given)
    if dry_run:
        plan = plan_conversion(src, dst, chosen)
        print_json(_plan_document(plan)) if as_json else print_lines(_plan_lines(plan))
        return EXIT_REFUSED if any(part.refused for part in plan.parts.values()) else 0
    start = time.monotonic()
    with ItemBar(sys.stderr.isatty(), "convert") as bar:
        result = run_conversion(
            src, dst, chosen, jobs=jobs, resume=resume, overwrite=overwrite, reflink=reflink, progress=bar
        )
    seconds = time.monotonic() - start
    print_json(_document(result, seconds)) if as_json else print_lines(_lines(result, dst, seconds, reflink))
    return EXIT_REFUSED if result.refused else 0


def _plan_lines(plan: ConversionPlan) -> list[str]:
    lines = _passed_over(plan)
    for name, part in plan.parts.items():
        lines += [*([] if name is None else [f"{name}:"]), *plan_lines(part)[:-1]]
    return [*lines, "nothing was written; images are checked when they are converted"]


def _plan_document(plan: ConversionPlan) -> dict[str, Any]:
    parts = [{"part": name, **plan_document(part)} for name, part in plan.parts.items()]
    return {"parts": parts, "passed_over": dict(plan.passed_over)}


def _lines(result: Conversion, dst: str, seconds: float, reflink: Reflink) -> list[str]:
    lines = _passed_over(result)
    if None in result.parts:
        return [*lines, *result_lines(result.parts[None], dst, seconds, "converted", reflink)]
    for name, part in result.parts.items():
        lines += [f"{name}:", *part_lines(part, os.path.join(dst, str(name)), "converted", reflink)]
    samples = sum(part.manifest.totals.samples for part in result.parts.values())
    payload = sum(part.made_payload for part in result.parts.values())
    return [*lines, f"in all: {count(samples, 'sample')} {time_text(seconds, payload)}"]


def _passed_over(made: ConversionPlan | Conversion) -> list[str]:
    """Return the line before all parts: it counts for all of them."""
    return [f"passed over {count_text(made.passed_over)}"] if made.passed_over else []


def _document(result: Conversion, seconds: float) -> dict[str, Any]:
    parts = [{"part": name, **part_document(part)} for name, part in result.parts.items()]
    return {
        "parts": parts, "samples": sum(part["samples"] for part in parts), "refused": result.refused,
        "passed_over": dict(result.passed_over), "seconds": round(seconds, 3),
    }  # fmt: skip
