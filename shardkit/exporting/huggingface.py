"""Hugging Face `datasets`: a `README.md` whose front matter gives each split its shards."""

from __future__ import annotations

import itertools
import json
from typing import TYPE_CHECKING

from shardkit.escaping import escape
from shardkit.exporting.foreign import cannot
from shardkit.exporting.table import ForeignFile, Table

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["huggingface_files"]

_LOOKED_AT = 5
"""Samples at the start of a split's first shard that must have the same members."""


def huggingface_files(table: Table) -> Iterator[ForeignFile]:
    """Yield the dataset card.

    Raises:
        ConfigError: `datasets` would not load the foreign shards.
    """
    if table.is_foreign:
        _require_same_fields(table)
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


def _require_same_fields(table: Table) -> None:
    for shards in table.splits().values():
        first = table.manifest.shards.index(shards[0])
        samples = list(itertools.islice(table.samples(first), _LOOKED_AT))
        for sample in samples:
            fields = [sorted(member.extension for member in one.members) for one in (samples[0], sample)]
            if fields[0] != fields[1]:
                why = f"the first {_LOOKED_AT} samples must have members of the same extensions, {', '.join(fields[0])}"
                raise cannot("huggingface", escape(why), shards[0], ", ".join(fields[1]), sample.key)
