"""Hugging Face `datasets`: a `README.md` whose front matter gives each split its shards."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from shardkit.exporting.table import ForeignFile, Table

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["huggingface_files"]


def huggingface_files(table: Table) -> Iterator[ForeignFile]:
    """Yield the dataset card."""
    totals = table.manifest.totals
    lines = ["---", "configs:", "- config_name: default", "  data_files:"]
    for split, shards in table.splits().items():
        lines += [f"  - split: {json.dumps(split)}", "    path:"]
        lines += [f"    - {json.dumps(shard.name)}" for shard in shards]  # a JSON string is a YAML string
    lines += [
        "---", "", f"# {table.manifest.name}", "",
        f"{totals.samples} images in {totals.shards} WebDataset shards, {totals.bytes} bytes.",
    ]  # fmt: skip
    if table.manifest.classes is not None:
        lines += ["", f"`cls` is the number of one of {len(table.manifest.classes)} classes."]
    yield ForeignFile("README.md", ["\n".join([*lines, ""]).encode()])
