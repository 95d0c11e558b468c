"""What a conversion may write besides shards: datasets of other frameworks, and which options they know."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias, cast, get_args

from shardkit.errors import ConfigError
from shardkit.escaping import escape

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["KINDS", "Output", "OutputKind", "check_given", "find_output", "size_limit"]

OutputKind: TypeAlias = Literal["mds", "litdata", "hf"]
KINDS: tuple[OutputKind, ...] = get_args(OutputKind)
_OUTPUT = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):(.*)", re.DOTALL)
_MOST = (1 << 32) - 1
_DEFAULTS: dict[OutputKind, int] = {"mds": 1 << 26, "litdata": 1 << 26, "hf": 1 << 28}
_FOREIGN = {
    "name": "files have the names that the framework gives them",
    "align": "only shards of shardkit's are aligned",
    "digest": "there is no manifest to state one",
    "shard_samples": "files are cut by bytes: --shard-size",
    "shards": "files are cut by bytes: --shard-size",
    "jobs": "one process writes file after file; convert to shards first where images are re-encoded",
    "resume": "a conversion to another framework's dataset is begun again",
    "reflink": "images do not start where blocks do",
}
"""Option to why it means nothing there."""


@dataclass(frozen=True, slots=True)
class Output:
    """A dataset of another framework that is to be written."""

    kind: OutputKind
    path: str
    """Absolute folder."""


def find_output(dst: str | os.PathLike[str]) -> Output | None:
    """Return the foreign dataset that a target means; None for a folder of shards.

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
    wrong = next((option for option in given if option in _FOREIGN), None)
    if wrong is not None:
        raise ConfigError(f"--{wrong.replace('_', '-')} means nothing for {kind}:DIR: {_FOREIGN[wrong]}",
                          remedy="leave it away")  # fmt: skip


def size_limit(kind: OutputKind, shard_size: int | None) -> int:
    """Return the bytes at which a file is cut.

    Raises:
        ConfigError: more than the offsets in such a file can state.
    """
    limit = _DEFAULTS[kind] if shard_size is None else shard_size
    if kind != "hf" and limit > _MOST:
        raise ConfigError(f"--shard-size of {escape(kind)}:DIR must be below 4 GiB: offsets have 32 bits", found=limit)
    return limit
