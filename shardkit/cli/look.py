"""`shardkit ls`, `show` and `cat`: look into a dataset without unpacking it."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import click

from shardkit.cli._choices import PATH, refuse_empty
from shardkit.cli._render import byte_text, print_bytes, print_json, print_lines
from shardkit.errors import ConfigError
from shardkit.escaping import escape
from shardkit.sizes import count

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardkit.looking.listing import Facts
    from shardkit.looking.members import Member

__all__ = ["cat", "ls", "show"]

_HEADINGS = ("key", "label", "size", "pixels", "image")
_WIDEST = 60
"""Characters that a column may take of every line; one long key goes over it alone."""
_RIGHT = (False, False, True, True, False)


@click.command(short_help="List the samples of a dataset.")
@click.argument("dataset", type=PATH)
@click.option(
    "--where", metavar="EXPR",
    help="Only samples that fulfil a condition on columns of the index, e.g. 'width >= 256 and label != 7', or on "
    "class, by name: comparisons, in, not in, is None, and, or, not, numbers and 'texts'.",
)  # fmt: skip
@click.option("--limit", type=click.IntRange(0), default=50, show_default=True,
              help="How many samples are listed, from the first stored one; 0 for all. All are counted.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print the list as JSON, with every column of the index.")
def ls(dataset: str, where: str | None, limit: int, as_json: bool) -> int:
    """List key, label, size in bytes, width x height in pixels and coding of the samples of the DATASET.

    Only the index is read. An image that the JPEG engines of a GPU take is marked with a +; a - stands for what is not
    known.
    """
    from shardkit.dataset.shardset import open_dataset
    from shardkit.looking.listing import find_rows, read_facts

    refuse_empty("DATASET is the name of a folder", dataset)
    with open_dataset(dataset) as opened:
        rows = find_rows(opened, where)
        shown = read_facts(opened, rows[:limit] if limit else rows)
        total = len(opened)
    if as_json:
        print_json({"samples": total, "matched": len(rows), "rows": [facts.to_json() for facts in shown]})
        return 0
    lines = _table([_cells(facts) for facts in shown]) if shown else []
    chosen = count(total, "sample") if where is None else f"{len(rows):,} of {count(total, 'sample')}"
    if len(shown) < len(rows):
        chosen += f", the first {len(shown):,} shown; --limit 0 lists all"
    print_lines([*lines, chosen])
    return 0


@click.command(short_help="Show all that is known about one sample.")
@click.argument("dataset", type=PATH)
@click.argument("key")
@click.option("--json", "as_json", is_flag=True, help="Print it as JSON.")
def show(dataset: str, key: str, as_json: bool) -> int:
    """Show the facts, the members and the metadata of the sample with the KEY in the DATASET.

    The image is read and checked against its CRC-32C. Offsets and sizes are bytes.
    """
    from shardkit.dataset.shardset import open_dataset
    from shardkit.looking.listing import find_key, read_facts
    from shardkit.looking.members import list_members

    refuse_empty("DATASET is the name of a folder", dataset)
    with open_dataset(dataset) as opened:
        number = find_key(opened, key)
        (facts,) = read_facts(opened, [number])
        members = list_members(opened, number)
        metadata = opened[number].metadata
    if as_json:
        listed = [
            {"name": one.name, "member": one.field, "offset": one.offset, "size": one.size, "image": one.is_image}
            for one in members
        ]
        print_json({**facts.to_json(), "members": listed, "metadata": metadata})
    else:
        print_lines(_sample_lines(facts, members, metadata))
    return 0


@click.command(short_help="Write a member of one sample to standard output.")
@click.argument("dataset", type=PATH)
@click.argument("key")
@click.option("--member", metavar="NAME", help="Which one: json, cls, or what else follows the first dot of a file's "
              "name in the shard.  [default: the image]")  # fmt: skip
def cat(dataset: str, key: str, member: str | None) -> int:
    """Write the image of the sample with the KEY in the DATASET to standard output, byte for byte.

    The image is checked against its CRC-32C first. A terminal is only given text.
    """
    from shardkit.dataset.shardset import open_dataset
    from shardkit.looking.listing import find_key
    from shardkit.looking.members import read_member

    refuse_empty("DATASET is the name of a folder", dataset)
    with open_dataset(dataset) as opened:
        data = read_member(opened, find_key(opened, key), member)
    if sys.stdout.isatty() and not _is_text(data):
        raise ConfigError(
            "a terminal would obey or misread these bytes", key=key, found=f"{len(data)} bytes that are no text",
            remedy="send them to a file or a program: > FILE",
        )  # fmt: skip
    print_bytes(data)
    return 0


def _is_text(data: bytes) -> bool:
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return all(line.isprintable() for line in text.replace("\t", " ").split("\n"))


def _label(facts: Facts) -> str:
    if facts.label is None:
        return "-"
    return f"{facts.label}" if facts.class_name is None else f"{facts.label} {escape(facts.class_name)}"


def _pixels(facts: Facts) -> str:
    return "-" if facts.image["width"] is None else f"{facts.image['width']}x{facts.image['height']}"


def _coding(facts: Facts) -> str:
    image = facts.image
    if image["components"] is None:
        return "-"
    scans = "scans not counted" if image["scans"] is None else count(image["scans"], "scan")
    takes = "the JPEG engines of a GPU take it" if facts.hardware_decodable else "not for the JPEG engines of a GPU"
    return (
        f"SOF{image['sof']}, {image['precision']} bits, {count(image['components'], 'component')}, {scans}, "
        f"restart interval {image['restart_interval']}, orientation {image['orientation']}, "
        f"Adobe transform {image['adobe_transform']}; {takes}"
    )


def _cells(facts: Facts) -> tuple[str, ...]:
    from shardkit.looking.listing import image_text

    mark = " +" if facts.hardware_decodable else ""
    return escape(facts.key), _label(facts), f"{facts.size:,}", _pixels(facts), image_text(facts) + mark


def _table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    table = [_HEADINGS, *rows]
    widths = [min(max(map(len, column)), _WIDEST) for column in zip(*table, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(row, widths, _RIGHT, strict=True)
        ).rstrip()
        for row in table
    ]


def _sample_lines(facts: Facts, members: Sequence[Member], metadata: dict[str, Any] | None) -> list[str]:
    from shardkit.looking.listing import image_text

    seen = [text for text in (_pixels(facts), image_text(facts)) if text != "-"]
    checksum = "unknown" if facts.crc32c is None else f"{facts.crc32c:08x}"
    lines = [
        f"sample {escape(facts.key)}",
        f"  number      {facts.number:,}",
        f"  label       {_label(facts)}",
        f"  source      {escape(facts.source) or '-'}",
        f"  image       {', '.join(seen) or '-'}; {byte_text(facts.size)}, CRC-32C {checksum}",
        f"  coding      {_coding(facts)}",
        f"  shard       {escape(facts.shard)}",
    ]
    for one in members:
        what = "the image" if one.is_image else escape(one.field)
        lines.append(f"  member      {escape(one.name)}: {count(one.size, 'byte')} at {one.offset:,} ({what})")
    if metadata is None:
        return [*lines, "  metadata    none"]
    # JSON's own escapes leave nothing that a terminal obeys but DEL.
    values = [(escape(name), json.dumps(value).replace("\x7f", "\\u007f")) for name, value in metadata.items()]
    return [*lines, "  metadata", *(f"    {name}: {value}" for name, value in values)]
