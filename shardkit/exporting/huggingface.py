"""Hugging Face `datasets`: a `README.md` whose front matter gives each split its shards.

`datasets` takes the columns of all splits from a few samples at one place. A member that a later sample lacks is None
there, as it should be; one that only later samples have is left out, without a word.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from shardkit.exporting.foreign import cannot, require_no_files
from shardkit.exporting.kinds import kinds_by_split
from shardkit.exporting.table import ForeignFile, Table

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["huggingface_files"]

_LOOKED_AT = 5
"""Samples at the start of the last split's first shard: they must have the same members, which are the columns."""
_PASSED_OVER = (".", "__")
"""How the names of files begin that `datasets` does not take."""


def huggingface_files(table: Table) -> Iterator[ForeignFile]:
    """Yield the dataset card.

    Raises:
        ConfigError: `datasets` would not load the shards, or would give other samples.
    """
    _require_columns(table)
    if table.is_foreign:
        _require_same_samples(table)
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


def _require_columns(table: Table) -> None:
    splits = kinds_by_split(table)
    *_, last = [(), *filter(None, splits.values())]
    if not last:
        return
    first = last[0]
    columns = ", ".join(sorted(first.extensions))
    for kind in last:
        if kind.shard is first.shard and kind.row < _LOOKED_AT and kind.extensions != first.extensions:
            why = f"the first {_LOOKED_AT} samples of a dataset must have members of the same extensions"
            found = ", ".join(sorted(kind.extensions))
            raise cannot("huggingface", why, kind.shard, found, kind.key, expected=columns)
    for kind in (kind for kinds in splits.values() for kind in kinds):
        if surplus := kind.extensions - first.extensions:
            why = f"members that the first {_LOOKED_AT} samples of {first.shard.name} lack would be left out"
            raise cannot("huggingface", why, kind.shard, ", ".join(sorted(surplus)), kind.key, expected=columns)
        if kind.image != first.image:
            why = "the image would be in another column"
            raise cannot("huggingface", why, kind.shard, kind.image, kind.key, expected=first.image)


def _require_same_samples(table: Table) -> None:
    for number in range(len(table.manifest.shards)):
        shard = table.manifest.shards[number]
        samples = list(table.samples(number))
        for key in (sample.key for sample in samples):
            if not _is_taken(f"{key}."):
                why = f"a file whose name begins with {' or '.join(_PASSED_OVER)} would be passed over"
                raise cannot("huggingface", why, shard, key, key)
        require_no_files("huggingface", shard, table.between(number, samples), _is_taken)


def _is_taken(name: str) -> bool:
    """Tell whether `datasets` takes a file for a member of a sample."""
    base = name.rpartition("/")[2]
    return "." in base and not base.startswith(_PASSED_OVER)
