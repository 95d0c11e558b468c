"""Opens a reader by name, or by what the paths and this machine can do."""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from shardkit.errors import CapabilityError, ConfigError, from_os_error
from shardkit.storage.buffered import DEFAULT_THREADS, BufferedReader
from shardkit.storage.direct import DirectReader, one_path_a_folder
from shardkit.storage.measure import measure
from shardkit.storage.probe import PathFacts, available_memory, probe
from shardkit.storage.residency import cached_share
from shardkit.storage.uring import UringReader, uring_refusal
from shardkit.storage.uring_causes import UNFIT

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from shardkit.storage.measure import Pattern
    from shardkit.storage.reader import Reader

__all__ = ["FAST_ENOUGH", "IO_NAMES", "Choice", "SystemFacts", "choose", "open_reader"]

IO_NAMES = ("auto", "buffered", "direct", "uring")
"""What `io` may be."""

_IN_MEMORY = {"tmpfs", "ramfs"}
_MIB = 1 << 20
_PREFERRED = ("uring", "direct", "buffered")
"""Of ways that are as fast as each other the first one: fewer threads, then less copying."""

CACHED_SHARE = 0.75
"""From this share on the data count as cached."""
FASTER = 1.2
"""Where the page cache can hold all data, it is passed by only for a way that is this much faster than filling it."""
FAST_ENOUGH = 0.8
"""And only for a way that gives this many GB/s in every epoch: 9,000 images of 90 kB, more than processors decode. Else
the cache is worth it."""
LITTLE_BYTES = 64 << 20
"""Data of less than this are not measured."""
AS_FAST = 0.9
"""A short measurement cannot tell two speeds apart that are closer than this."""


@dataclass(frozen=True, slots=True)
class Choice:
    """Which backend reads, and why: to be reported, never guessed at."""

    backend: str
    """"buffered", "direct" or "uring"; "gds" where the memory is a GPU's."""
    reason: str
    """One clause with the facts that decided, for each file system."""
    measured: Mapping[str, float] = field(default_factory=dict)
    """GB/s of each way that was measured, over all file systems; empty when facts alone decided."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SystemFacts:
    """What is known about the files on one file system."""

    files: tuple[PathFacts, ...]
    """Of one file a folder; at least one."""
    total_bytes: int
    """Of all files."""
    cached_share: float | None = None
    """Of the bytes, 0 to 1; None when the kernel does not tell."""
    measured: Mapping[str, float] = field(default_factory=dict)
    """GB/s of each way to read, on bytes that were not cached; empty when it was not measured."""


def open_reader(
    io: str,
    paths: Sequence[str | os.PathLike[str]],
    *,
    pattern: Pattern = "random",
    threads: int | None = None,
    max_open: int | None = None,
    batched: bool = False,
    enough: float = FAST_ENOUGH,
) -> tuple[Reader, Choice]:
    """Open a reader over `paths` and say which one it is.

    Args:
        io: one of `IO_NAMES`. A name other than "auto" gives that backend or an error, never another one.
        paths: the files, addressed by their index.
        pattern: how the reads will lie: "random" (single samples) or "sequential" (long spans, one after the other).
        threads: the most that read at the same time for one call; None for the backend's default.
        max_open: descriptors kept open; None for half of the process's limit.
        batched: "buffered" random reads go to the kernel by io_uring, many in a system call, where that can be had:
            less of the interpreter's lock, for processes whose other threads need it.
        enough: GB/s that who takes the bytes keeps up with; "auto" does not give up the page cache for less.

    Raises:
        ConfigError: `io` or `pattern` is no such name.
        CapabilityError: the backend that was demanded cannot be had for these paths.
        StorageError: a path is not there.
    """
    if io not in IO_NAMES:
        raise ConfigError("there is no such way to read", expected=" or ".join(IO_NAMES), found=repr(io))
    if pattern not in {"random", "sequential"}:
        raise ConfigError("there is no such pattern", expected="random or sequential", found=repr(pattern))
    choice = Choice(io, "demanded by name") if io != "auto" else _choose_for(paths, pattern, threads, enough)
    if batched and choice.backend == "buffered" and pattern == "random":
        with contextlib.suppress(CapabilityError):  # not in this container, or not on this file system
            return UringReader(paths, max_open=max_open, direct=False), replace(
                choice, reason=f"{choice.reason}; in batches, by io_uring"
            )
    return _open(choice.backend, paths, pattern, threads, max_open), choice


def _open(
    backend: str,
    paths: Sequence[str | os.PathLike[str]],
    pattern: Pattern,
    threads: int | None,
    max_open: int | None,
) -> Reader:
    if backend == "uring":
        return UringReader(paths, max_open=max_open)
    count = DEFAULT_THREADS if threads is None else threads
    if backend == "direct":
        return DirectReader(paths, threads=count, max_open=max_open)
    return BufferedReader(paths, threads=count, max_open=max_open, random=pattern == "random")


def choose(
    systems: Sequence[SystemFacts],
    *,
    available_bytes: int | None,
    uring: str | None = None,
    enough: float = FAST_ENOUGH,
) -> Choice | None:
    """Decide from facts and measurements: one backend for all file systems.

    Args:
        systems: each file system that holds files.
        available_bytes: memory that the page cache can take; None when it is not known.
        uring: why io_uring cannot be had here; None when it can.
        enough: see `open_reader`.

    Returns:
        The choice, or None when it takes a measurement that `systems` do not have yet.
    """
    return _choose_by_facts(systems, available_bytes) or _choose_by_speed(systems, available_bytes, uring, enough)


def _choose_by_facts(systems: Sequence[SystemFacts], available_bytes: int | None) -> Choice | None:
    for fact in (fact for system in systems for fact in system.files):
        name = fact.mount.file_system
        if name in _IN_MEMORY:
            return Choice("buffered", f"{name} lies in memory already")
        if fact.direct_refusal is not None:
            return Choice("buffered", f"{name} refuses direct reads: {fact.direct_refusal} at open")
        if fact.direct_align == 0:
            return Choice("buffered", f"{name} has no direct reads for these files, says statx")
    total = sum(system.total_bytes for system in systems)
    if total < LITTLE_BYTES and (available_bytes is None or _fits(total, available_bytes)):
        return Choice("buffered", f"{total // _MIB} MiB of data are too little to measure, and stay in the page cache")
    shares = [(system.cached_share, system.total_bytes) for system in systems]
    cached = sum((share or 0.0) * size for share, size in shares) / max(total, 1)
    if cached >= CACHED_SHARE:
        return Choice("buffered", f"{cached:.0%} of {total // _MIB} MiB of data are in the page cache already")
    return None


def _choose_by_speed(
    systems: Sequence[SystemFacts], available_bytes: int | None, uring: str | None, enough: float
) -> Choice | None:
    total, speed = sum(system.total_bytes for system in systems), _over_all(systems)
    if "buffered" not in speed:
        return None
    facts = "; ".join([*(_told(system) for system in systems), *([f"no uring: {uring}"] if uring else [])])
    best = max(speed.values())
    fastest = next(name for name in _PREFERRED if speed.get(name, 0.0) >= AS_FAST * best)
    data = f"{total // _MIB} MiB of data"
    if available_bytes is None or not _fits(total, available_bytes):
        memory = "an unknown amount" if available_bytes is None else f"{available_bytes // _MIB} MiB"
        reason = f"{data} are not less than half of {memory} of available memory, and {fastest} is the fastest way"
        return Choice(fastest, f"{reason} (within {1 - AS_FAST:.0%}); {facts}", speed)
    data += f" are less than half of {available_bytes // _MIB} MiB of available memory"
    if best >= enough and speed[fastest] >= FASTER * speed["buffered"]:
        reason = f"{data}, but {fastest} is {speed[fastest] / speed['buffered']:.1f} times as fast as filling the cache"
        return Choice(fastest, f"{reason}; {facts}", speed)
    reason = f"{data}, so later epochs come from memory"
    reason += f", and no way is both {FASTER:g} times as fast in the first and above {enough:g} GB/s"
    return Choice("buffered", f"{reason}; {facts}", speed)


def _fits(total: int, available: int) -> bool:
    return total < available // 2


def _over_all(systems: Sequence[SystemFacts]) -> dict[str, float]:
    """Return the GB/s of each way that was measured everywhere, for reading all bytes of all file systems once."""
    names = [name for name in _PREFERRED if all(system.measured.get(name) for system in systems)]
    total = sum(system.total_bytes for system in systems)
    return {name: total / sum(system.total_bytes / system.measured[name] for system in systems) for name in names}


def _told(system: SystemFacts) -> str:
    mount = system.files[0].mount
    speeds = ", ".join(f"{name} {rate:.2f}" for name, rate in system.measured.items())
    cached = "" if system.cached_share is None else f"{system.cached_share:.0%} cached, "
    return f"{mount.file_system} at {mount.point}: {cached}{speeds} GB/s"


def _choose_for(
    paths: Sequence[str | os.PathLike[str]], pattern: Pattern, threads: int | None, enough: float
) -> Choice:
    if not paths:
        return Choice("buffered", "there is nothing to read")
    seed, available, groups = time.monotonic_ns(), available_memory(), _by_mount(paths)
    refusal = uring_refusal() or _unfit_for_uring([fact for facts, _ in groups for fact in facts])
    systems = [
        SystemFacts(
            files=facts, total_bytes=sum(size for _, size in files), cached_share=cached_share(files, seed=seed)
        )
        for facts, files in groups
    ]
    choice = choose(systems, available_bytes=available, uring=refusal, enough=enough)
    if choice is None:
        names = [name for name in _PREFERRED if name != "uring" or refusal is None]
        ways = {name: lambda some, name=name: _open(name, some, pattern, threads, None) for name in names}
        systems = [
            replace(system, measured=measure(files, ways, pattern=pattern, seed=seed))
            for system, (_, files) in zip(systems, groups, strict=True)
        ]
        choice = choose(systems, available_bytes=available, uring=refusal, enough=enough)
    return choice or Choice("buffered", "no way could be measured, and this one serves every file system")


def _unfit_for_uring(facts: Sequence[PathFacts]) -> str | None:
    names = [fact.mount.file_system for fact in facts if fact.mount.file_system.startswith(UNFIT)]
    return f"not on {names[0]}" if names else None


def _by_mount(paths: Sequence[str | os.PathLike[str]]) -> list[tuple[tuple[PathFacts, ...], list[tuple[str, int]]]]:
    """Return, for each file system, the facts of one file a folder, and the path and size of every file."""
    facts = {os.path.dirname(path): probe(path) for path in one_path_a_folder(paths)}
    groups: dict[str, tuple[list[PathFacts], list[tuple[str, int]]]] = {}
    for fact in facts.values():
        groups.setdefault(fact.mount.point, ([], []))[0].append(fact)
    for path in (os.fspath(path) for path in paths):
        try:
            size = os.stat(path).st_size
        except OSError as error:
            raise from_os_error(error, "cannot look at a file", path=path) from error
        groups[facts[os.path.dirname(path)].mount.point][1].append((path, size))
    return [(tuple(found), files) for found, files in groups.values()]
