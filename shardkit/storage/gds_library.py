"""KvikIO and cuFile as a reader sees them, and the one place where they are opened: once a process, behind a GPU."""

from __future__ import annotations

import ctypes
import importlib.util
import logging
import os
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from shardkit.errors import CapabilityError
from shardkit.storage.cuda import CudaDevice
from shardkit.storage.cufile_errors import cufile_code_in, errno_in, explain_cufile_error
from shardkit.storage.gds_batch import CuFileBatches
from shardkit.storage.gds_facts import PROPERTIES_BYTES, DriverFacts, HostFacts, driver_facts, mode_of
from shardkit.storage.probe import mount_of
from shardkit.storage.switches import config_path, config_switch, flag

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AbstractContextManager
    from types import ModuleType

    from shardkit.storage.device import Device
    from shardkit.storage.gds_batch import Batches

__all__ = ["Cause", "GdsFile", "GdsFuture", "GdsLibrary", "KvikLibrary", "Span", "host_facts", "opened_facts"]

_log = logging.getLogger(__name__)
_Foreign: TypeAlias = Any  # KvikIO and cuda.bindings have no types

DEFAULT_THREADS = 16
"""Of KvikIO: 8 give 25 GB/s from warm files, 16 give 28.7, 32 no more (H200, 4 MiB tasks)."""

_INSTALL = "pip install 'shardkit[gpu]', or take io='auto'"
_NVIDIA_FS = "/proc/driver/nvidia-fs/version"


class GdsFuture(Protocol):
    """A read that was started; `kvikio.cufile.IOFuture`."""

    def get(self) -> int:
        """Wait and return the bytes that arrived; once."""


class GdsFile(Protocol):
    """An open file; `kvikio.CuFile`."""

    def pread(self, buf: Span, size: int, file_offset: int, task_size: int) -> GdsFuture:
        """Start to read."""

    def is_direct_io_supported(self) -> bool:
        """Return whether it was opened with O_DIRECT, too."""

    def close(self) -> None:
        """Close it; no read may be under way."""


class GdsLibrary(Protocol):
    """What a `GdsReader` asks of KvikIO and cuFile."""

    facts: DriverFacts | None
    """What the driver says; None where KvikIO goes without cuFile."""
    threshold: int
    """Bytes below which KvikIO reads by itself, at once."""
    goes_direct: bool
    """Whether KvikIO's own reads go past the page cache where they can."""
    batches: Batches | None
    """Reads of many small ranges; None where there are none."""

    def current(self) -> AbstractContextManager[None]:
        """Have the GPU current in this thread for a block; see `shardkit.storage.device.Device`."""

    def open(self, path: str) -> GdsFile:
        """Open a file."""

    def register(self, memory: Span) -> None:
        """Register the allocation that holds this memory."""

    def deregister(self, memory: Span) -> None:
        """Undo `register`."""

    def cause(self, error: Exception) -> Cause:
        """Return what an error of these libraries was about."""


@dataclass(frozen=True, slots=True)
class Span:
    """Device memory as KvikIO takes it; owns nothing."""

    address: int
    length: int
    """Bytes."""

    @property
    def __cuda_array_interface__(self) -> dict[str, object]:
        """The protocol of CUDA libraries for Python, version 3."""
        return {
            "data": (self.address, False), "shape": (self.length,), "strides": None, "typestr": "|u1", "version": 3,
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class Cause:
    """What an error of KvikIO's or cuFile's was about."""

    text: str
    """One clause, with the name of a status where there is one."""
    errno: int | None
    """The system's error number, where it was the system."""
    remedy: str | None = None


class KvikLibrary:
    """The real `GdsLibrary`."""

    def __init__(self, device: Device, *, threads: int | None) -> None:
        """Open KvikIO, and cuFile unless KvikIO goes without it, if this process has not yet.

        Args:
            device: a `CudaDevice`: CUDA is loaded and has a context then, without which cuFile hangs.
            threads: of KvikIO's pool, which all readers of the process share and which never shrinks; None takes
                KVIKIO_NTHREADS, else 16.

        Raises:
            CapabilityError: the device is no GPU, a package is missing, or cuFile is another process's.
        """
        if not isinstance(device, CudaDevice):
            found = f"a device that is {device.name!r}"
            raise CapabilityError("GPUDirect Storage needs an NVIDIA GPU", found=found, remedy="take io='auto'")
        self._device = device
        with device.current(), _OPENING:
            opened = _open_once()
            _grow_pool(opened.kvikio, threads)
        self._kvikio, self._words, self.facts = opened.kvikio, opened.words, opened.facts
        self.threshold = int(self._kvikio.defaults.get("gds_threshold"))
        self.goes_direct = bool(self._kvikio.defaults.get("auto_direct_io_read"))
        self.batches: Batches | None = None
        if opened.cufile is not None and opened.facts is not None:
            self.batches = CuFileBatches(opened.cufile, most=opened.facts.batch)

    def current(self) -> AbstractContextManager[None]:
        """Have the GPU current."""
        return self._device.current()

    def open(self, path: str) -> GdsFile:
        """Open a file."""
        file: GdsFile = self._kvikio.CuFile(path, "r")
        return file

    def register(self, memory: Span) -> None:
        """Register memory."""
        self._kvikio.memory_register(memory)

    def deregister(self, memory: Span) -> None:
        """Undo it."""
        self._kvikio.memory_deregister(memory)

    def cause(self, error: Exception) -> Cause:
        """Look into the text: KvikIO has no other way to say it."""
        text = str(error) or type(error).__name__
        code = cufile_code_in(text, self._words)
        if code is None:
            return Cause(text, errno_in(text))
        name, meaning, remedy = explain_cufile_error(code)
        return Cause(f"{name}: {meaning}", None, remedy)


@dataclass(frozen=True, slots=True)
class _Opened:
    """What one process has opened."""

    process: int
    kvikio: ModuleType
    cufile: ModuleType | None
    facts: DriverFacts | None
    words: dict[str, int]


_OPENING = threading.Lock()
_opened: _Opened | None = None


def opened_facts() -> DriverFacts | None:
    """Return what cuFile's driver said when this process opened it; None where KvikIO goes without cuFile.

    Raises:
        CapabilityError: this process has not.
    """
    if _opened is None or _opened.process != os.getpid():
        raise CapabilityError("nothing in this process has opened cuFile yet", remedy="open a GdsReader first")
    return _opened.facts


def host_facts(paths: Sequence[str]) -> HostFacts:
    """Return what can be known without touching cuFile.

    Args:
        paths: one of each folder will do.
    """
    missing = None if importlib.util.find_spec("kvikio") else "the package kvikio is not installed"
    try:
        version = Path(_NVIDIA_FS).read_text("ascii", "replace").strip().rpartition(" ")[2]
    except OSError:
        version = None
    mounts = {mount.point: mount for mount in map(mount_of, paths)}
    return HostFacts(nvidia_fs=version, p2pdma=_told_p2pdma(), missing=missing, mounts=tuple(mounts.values()))


def _told_p2pdma() -> bool:
    said = flag(os.environ.get("CUFILE_USE_PCIP2PDMA"))
    if said is not None:
        return said
    try:
        return bool(config_switch(Path(config_path(os.environ)).read_text("utf-8"), "use_pci_p2pdma"))
    except (OSError, ValueError):  # `doctor` tells of it
        return False


def _open_once() -> _Opened:
    """Import and open what there is; the caller holds the lock, and CUDA has a context."""
    global _opened
    if _opened is not None and _opened.process != os.getpid():
        raise CapabilityError(
            "cuFile does not survive a fork", found=f"opened by process {_opened.process}, used in {os.getpid()}",
            remedy="start children by the spawn method",
        )  # fmt: skip
    if _opened is not None:
        return _opened
    # Otherwise a log appears in the working directory.
    os.environ.setdefault("CUFILE_LOGFILE_PATH", f"{tempfile.gettempdir()}/cufile-{os.getuid()}.log")
    try:
        import kvikio
        import kvikio.cufile_driver
        import kvikio.defaults
    except (ImportError, OSError, RuntimeError) as error:
        raise CapabilityError("KvikIO cannot be loaded", found=str(error), remedy=_INSTALL) from error
    cufile, facts = (None, None) if kvikio.defaults.is_compat_mode_preferred() else _open_cufile(kvikio)
    words = {} if cufile is None else {str(cufile.op_status_error(int(code))): int(code) for code in cufile.OpError}
    _opened = _Opened(os.getpid(), kvikio, cufile, facts, words)
    return _opened


def _open_cufile(kvikio: _Foreign) -> tuple[_Foreign, DriverFacts | None]:
    """Open the driver, which stays open: closing it while the process ends has crashed processes."""
    try:
        from cuda.bindings import cufile

        kvikio.cufile_driver.driver_open()
        properties = ctypes.create_string_buffer(PROPERTIES_BYTES)
        cufile.driver_get_properties(ctypes.addressof(properties))
        told = bool(cufile.get_parameter_bool(int(cufile.BoolConfigParameter.USE_PCIP2PDMA)))
    except Exception as error:  # of either library: both go on without it
        _log.warning("cuFile cannot be opened (%s); KvikIO reads files by itself", error)
        kvikio.defaults.set("compat_mode", kvikio.CompatMode.ON)
        return None, None
    facts = driver_facts(properties.raw, p2pdma=told)
    _log.info("cuFile reads by way of %s", mode_of(facts))
    return cufile, facts


def _grow_pool(kvikio: _Foreign, threads: int | None) -> None:
    if threads is None and "KVIKIO_NTHREADS" in os.environ:
        return
    wanted = DEFAULT_THREADS if threads is None else threads
    if int(kvikio.defaults.get("num_threads")) < wanted:
        kvikio.defaults.set("num_threads", wanted)
