"""Opens a reader by name, or by what the paths and this machine can do."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardkit.errors import ConfigError, from_os_error
from shardkit.storage.buffered import DEFAULT_THREADS, BufferedReader
from shardkit.storage.direct import DirectReader, one_path_a_folder
from shardkit.storage.probe import PathFacts, available_memory, probe

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardkit.storage.reader import Reader

__all__ = ["IO_NAMES", "Choice", "choose", "open_reader"]

IO_NAMES = ("auto", "buffered", "direct")
"""What `io` may be."""

_IN_MEMORY = {"tmpfs", "ramfs"}
_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Choice:
    """Which backend reads, and why: to be reported, never guessed at."""

    backend: str
    """"buffered" or "direct"."""
    reason: str
    """One clause with the facts that decided."""


def open_reader(
    io: str,
    paths: Sequence[str | os.PathLike[str]],
    *,
    threads: int | None = None,
    max_open: int | None = None,
) -> tuple[Reader, Choice]:
    """Open a reader over `paths` and say which one it is.

    Args:
        io: one of `IO_NAMES`. A name other than "auto" gives that backend or an error, never another one.
        paths: the files, addressed by their index.
        threads: the most that read at the same time for one call; None for the backend's default.
        max_open: descriptors kept open; None for half of the process's limit.

    Raises:
        ConfigError: `io` is no such name.
        CapabilityError: the backend that was demanded cannot be had for these paths.
        StorageError: a path is not there.
    """
    if io not in IO_NAMES:
        raise ConfigError("there is no such way to read", expected=" or ".join(IO_NAMES), found=repr(io))
    count = DEFAULT_THREADS if threads is None else threads
    choice = Choice(io, "demanded by name") if io != "auto" else _choose_for(paths)
    if choice.backend == "direct":
        return DirectReader(paths, threads=count, max_open=max_open), choice
    return BufferedReader(paths, threads=count, max_open=max_open), choice


def choose(facts: Sequence[PathFacts], *, total_bytes: int, available_bytes: int | None) -> Choice:
    """Decide from facts: the page cache where it can hold the whole data set, else the device itself.

    Args:
        facts: of at least one file on each file system.
        total_bytes: of all files.
        available_bytes: memory that the cache can take; None when it is not known.
    """
    for fact in facts:
        name = fact.mount.file_system
        if name in _IN_MEMORY:
            return Choice("buffered", f"{name} lies in memory already")
        if fact.direct_refusal is not None:
            return Choice("buffered", f"{name} refuses direct reads: {fact.direct_refusal} at open")
        if fact.direct_align == 0:
            return Choice("buffered", f"{name} has no direct reads for these files, says statx")
    total = f"{total_bytes // _MIB} MiB of data"
    if available_bytes is None:
        return Choice("buffered", f"{total}; how much memory is available is not known")
    memory = f"{available_bytes // _MIB} MiB of available memory"
    if total_bytes < available_bytes // 2:
        return Choice("buffered", f"{total} are less than half of {memory}, so the page cache keeps them")
    return Choice("direct", f"{total} are not less than half of {memory}, so the page cache would be churned")


def _choose_for(paths: Sequence[str | os.PathLike[str]]) -> Choice:
    total = 0
    for path in paths:
        try:
            total += os.stat(path).st_size
        except OSError as error:
            raise from_os_error(error, "cannot look at a file", path=path) from error
    facts = [probe(path) for path in one_path_a_folder(paths)]
    return choose(facts, total_bytes=total, available_bytes=available_memory())
