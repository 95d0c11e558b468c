"""Opens a reader into a GPU's memory, by name or by what the paths and this machine can do."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from shardkit.errors import CapabilityError, ConfigError
from shardkit.storage.backends import IO_NAMES, Choice, open_reader
from shardkit.storage.direct import one_path_a_folder
from shardkit.storage.gds import GdsReader
from shardkit.storage.gds_facts import GDS, HostFacts, gds_refusal
from shardkit.storage.gds_library import host_facts
from shardkit.storage.staged import StagedReader

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Sequence
    from typing import Literal

    from shardkit.storage.device import Device
    from shardkit.storage.measure import Pattern
    from shardkit.storage.reader import Reader

__all__ = ["DEVICE_IO_NAMES", "ENGINES_GBPS", "RING_BYTES", "open_device_reader"]

ENGINES_GBPS = 2.4
"""What a GPU's JPEG engines take: 27,000 images of 90 kB a second."""
DEVICE_IO_NAMES = (*IO_NAMES, "gds")
"""What `io` may be for a reader into a GPU's memory."""
RING_BYTES = 128 << 20
"""Of the ring of a `StagedReader`: a batch of 256 images of 90 kB, read in halves, is in it twice and more."""


def open_device_reader(
    io: str,
    paths: Sequence[str | os.PathLike[str]],
    device: Device,
    *,
    pattern: Pattern = "random",
    staging: Literal["pinned", "managed"] = "pinned",
    ring_bytes: int = RING_BYTES,
    threads: int | None = None,
    max_open: int | None = None,
    facts: Callable[[Sequence[str]], HostFacts] = host_facts,
) -> tuple[Reader, Choice]:
    """Open a reader over `paths` whose destinations are device memory, and say which one it is.

    Args:
        io: one of `DEVICE_IO_NAMES`. "gds" gives a `GdsReader` or an error. "auto" gives one only where data come by
            GPUDirect Storage indeed, else it chooses as `open_reader` does. Whatever that chooses, or a name demands,
            reads into host memory, from where the bytes are copied.
        paths: the files, addressed by their index.
        device: the GPU.
        pattern: as for `open_reader`.
        staging: as for `StagedReader`; "managed" only with buffered reads, which is then what "auto" takes.
        ring_bytes: as for `StagedReader`.
        threads: the most that read at the same time for one call; None for the backend's default.
        max_open: files kept open; None for what the process's limit allows.
        facts: tells about GPUDirect Storage without touching it, from one path a folder.

    Raises:
        ConfigError: `io`, `pattern` or `staging` is no such name.
        CapabilityError: what was demanded cannot be had.
        StorageError: a path is not there.
    """
    if io not in DEVICE_IO_NAMES:
        raise ConfigError("there is no such way to read", expected=" or ".join(DEVICE_IO_NAMES), found=repr(io))
    if io == "gds":
        reader = GdsReader(paths, device, threads=threads, max_open=max_open)
        return reader, Choice("gds", f"demanded by name; files are read by way of {reader.mode}")
    if staging == "managed":
        # The pages may lie on the GPU: what a device writes past the processor was seen not to arrive there.
        if io not in {"auto", "buffered"}:
            raise ConfigError(
                "direct reads do not reach managed memory", expected="io='buffered' or 'auto'", found=repr(io),
                remedy="take staging='pinned', which is faster, too",
            )  # fmt: skip
        io = "buffered"
    refusal = None
    if io == "auto":
        found = _gds_reader(paths, device, threads, max_open, facts(one_path_a_folder(paths)))
        if isinstance(found, GdsReader):
            return found, Choice("gds", "the driver has GPUDirect Storage, and so have the file systems")
        refusal = found
    batched = staging == "pinned"  # by io_uring the kernel writes to pages that it has pinned: not to managed ones
    host, choice = open_reader(
        io, paths, pattern=pattern, threads=threads, max_open=max_open, batched=batched, enough=ENGINES_GBPS
    )
    try:
        staged = StagedReader(host, device, ring_bytes=ring_bytes, staging=staging, paths=paths)
    except BaseException:
        host.close()
        raise
    return staged, choice if refusal is None else replace(choice, reason=f"{choice.reason}; no gds: {refusal}")


def _gds_reader(
    paths: Sequence[str | os.PathLike[str]],
    device: Device,
    threads: int | None,
    max_open: int | None,
    facts: HostFacts,
) -> GdsReader | str:
    """Return a reader by GPUDirect Storage, or why there is none; cuFile is opened only when nothing speaks against."""
    refusal = gds_refusal(facts)
    if refusal is not None:
        return refusal
    try:
        reader = GdsReader(paths, device, threads=threads, max_open=max_open)
    except CapabilityError as error:
        return f"{error.what} ({error.found})"
    if reader.mode == GDS:
        return reader
    reader.close()
    return f"the driver reads by way of {reader.mode}"
