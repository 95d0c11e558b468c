"""Which files make a foreign dataset: what else lies in its folder is somebody's, and never removed."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Any

from shardkit.converting.columns import read_object
from shardkit.converting.writers import CLASSES
from shardkit.errors import ConfigError, FormatError
from shardkit.escaping import escape
from shardkit.format.dataset_record import REJECTED
from shardkit.storage.atomic import os_errors
from shardkit.storage.regular import open_regular

if TYPE_CHECKING:
    from shardkit.converting.outputs import OutputKind

__all__ = ["CARD", "CARD_MARK", "dataset_files"]

CARD = "README.md"
"""Says to the hub and to `load_dataset` which files are which split."""
CARD_MARK = "Written by `shardkit convert`"
_PARQUET = re.compile(r"[\w.]+-[0-9]{5}-of-[0-9]{5}\.parquet")


def dataset_files(kind: OutputKind, folder: str) -> list[str]:
    """Return the files of a dataset, or of one a part, relative to the folder.

    Raises:
        ConfigError: it holds anything else, or no such dataset.
        ShardkitError: the system failed a read.
    """
    names = _listed(folder)
    parts = [name for name in names if _is_folder(os.path.join(folder, name))]
    if parts:
        whole = [os.path.join(part, name) for part in parts for name in dataset_files(kind, os.path.join(folder, part))]
        others = set(names) - set(parts) - {*_card(folder)}
    else:
        whole = sorted({*_stated(kind, folder, names), CLASSES, REJECTED} & set(names)) if names else []
        others = set(names) - set(whole) - {*_card(folder)}
        if not set(whole) - {CLASSES, REJECTED}:
            raise ConfigError(f"the target is no {kind} dataset, and not empty", path=folder,
                              remedy="choose another folder")  # fmt: skip
    if others:
        raise ConfigError("the target holds what is not the dataset's, which is not removed", path=folder,
                          found=", ".join(map(escape, sorted(others)[:5])), remedy="choose another folder")  # fmt: skip
    return [*whole, *(_card(folder) if CARD in names else ())]


def _listed(folder: str) -> list[str]:
    with os_errors("cannot list the target", os.fsencode(folder)):
        return os.listdir(folder)


def _is_folder(path: str) -> bool:
    return os.path.isdir(path) and not os.path.islink(path)


def _card(folder: str) -> tuple[str, ...]:
    """Return the name of the card, where there is one of ours."""
    path = os.path.join(folder, CARD)
    if not os.path.lexists(path):
        return ()
    with os_errors("cannot read the card", os.fsencode(path)), open_regular(path) as file:
        return (CARD,) if CARD_MARK.encode() in file.read(1 << 20) else ()


def _stated(kind: OutputKind, folder: str, names: list[str]) -> set[str]:
    """Return the names that the format gives its files: none in a tree, whose files may be anybody's."""
    if kind == "tree":
        return set()
    if kind == "hf":
        return {name for name in names if _PARQUET.fullmatch(name)}
    index = os.path.join(folder, "index.json")
    if not os.path.lexists(index):
        return set()
    try:
        document = read_object(index)
    except FormatError:
        return set()
    if kind == "mds":
        shards = [shard for shard in _objects(document.get("shards")) if shard.get("format") == "mds"]
        records = [
            shard[data] for shard in shards for data in ("raw_data", "zip_data") if isinstance(shard.get(data), dict)
        ]
        stated = [record.get("basename") for record in records]
    else:
        stated = [chunk.get("filename") for chunk in _objects(document.get("chunks"))]
    found = {name for name in stated if isinstance(name, str)}  # of these only what lies in the folder is taken
    return {*found, "index.json"} if found else set()


def _objects(value: object) -> list[dict[str, Any]]:
    return [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []
