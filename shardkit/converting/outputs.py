"""What a conversion may write besides shards: datasets of other frameworks, trees, and which options they know."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, TypeAlias, cast, get_args

from shardkit.errors import ConfigError
from shardkit.escaping import escape
from shardkit.extracting.names import LAYOUTS

if TYPE_CHECKING:
    from collections.abc import Iterable

    from shardkit.extracting.names import Layout

__all__ = ["KINDS", "Output", "OutputKind", "check_given", "find_output", "size_limit", "with_layout"]

OutputKind: TypeAlias = Literal["mds", "litdata", "hf", "tree"]
KINDS: tuple[OutputKind, ...] = get_args(OutputKind)
_OUTPUT = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):(.*)", re.DOTALL)
_MOST = (1 << 32) - 1
_DEFAULTS: dict[OutputKind, int] = {"mds": 1 << 26, "litdata": 1 << 26, "hf": 1 << 28, "tree": 1 << 28}
_FOREIGN = {
    "name": "files have the names that the framework gives them",
    "align": "only shards of shardkit's are aligned",
    "digest": "there is no manifest to state one",
    "shard_samples": "files are cut by bytes: --shard-size",
    "shards": "files are cut by bytes: --shard-size",
    "jobs": "one process writes file after file; convert to shards first where images are re-encoded",
    "resume": "what is not shards is begun again",
    "reflink": "images do not start where blocks do",
    "layout": "it says how the files of tree:DIR are called",
}
"""Option to why it means nothing there."""
_FOREIGN_TREE = {
    **{option: why for option, why in _FOREIGN.items() if option != "layout"},
    **dict.fromkeys(("shard_size", "shard_samples", "shards"), "each image is a file"),
    "name": "files have the names that --layout says",
    "reflink": "images are checked in memory and written; convert to shards, and extract those with --reflink",
    "overwrite": "nothing in a folder of images says whose it is",
}


@dataclass(frozen=True, slots=True)
class Output:
    """A dataset of another framework, or a tree, that is to be written."""

    kind: OutputKind
    path: str
    """Absolute folder."""
    layout: Layout | None = None
    """How the files of a tree are called; None: by their sources where those have the classes in them."""


def find_output(dst: str | os.PathLike[str]) -> Output | None:
    """Return the foreign dataset, or the tree, that a target means; None for a folder of shards.

    As with inputs, a name that is there as it stands is taken as it stands.

    Raises:
        ConfigError: it looks like one, and is none: another kind, a URL, or no folder.

    >>> find_output("photos-ds") is None
    True
    """
    text = os.fspath(dst)
    match = _OUTPUT.fullmatch(text)
    if match is None or os.path.lexists(text):
        return None
    if match[1] not in KINDS or not match[2]:
        raise ConfigError(
            "no place to write a dataset to", expected=f"a folder, or {', '.join(f'{kind}:DIR' for kind in KINDS)}",
            found=escape(text[:80]), remedy=f"a folder of this name is ./{escape(text[:80])}",
        )  # fmt: skip
    return Output(cast("OutputKind", match[1]), os.path.abspath(match[2]))


def check_given(kind: OutputKind, given: Iterable[str]) -> None:
    """Refuse options that shape shards of shardkit's and nothing else.

    Raises:
        ConfigError: names one, and why.
    """
    reasons = _FOREIGN_TREE if kind == "tree" else _FOREIGN
    wrong = next((option for option in given if option in reasons), None)
    if wrong is not None:
        raise ConfigError(f"--{wrong.replace('_', '-')} means nothing for {kind}:DIR: {reasons[wrong]}",
                          remedy="leave it away")  # fmt: skip


def with_layout(output: Output, layout: Layout | None) -> Output:
    """Return the tree with the names that are wanted.

    Raises:
        ConfigError: there is no such layout.
    """
    if layout is None:
        return output
    if layout not in LAYOUTS:
        raise ConfigError("unknown layout", expected=" or ".join(LAYOUTS), found=ascii(layout)[:80])
    return replace(output, layout=layout)


def size_limit(kind: OutputKind, shard_size: int | None) -> int:
    """Return the bytes at which a file is cut; for a tree, of what is planned at a time.

    Raises:
        ConfigError: more than the offsets in such a file can state.
    """
    limit = _DEFAULTS[kind] if shard_size is None else shard_size
    if kind in ("mds", "litdata") and limit > _MOST:
        raise ConfigError(f"--shard-size of {escape(kind)}:DIR must be below 4 GiB: offsets have 32 bits", found=limit)
    return limit
