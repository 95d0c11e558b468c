"""Reads into a GPU's memory with KvikIO and cuFile: by GPUDirect Storage where there is such a way, else as they can.

Nothing here touches either before a GPU is open: without the driver's library and a context cuFile hangs.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import weakref
from time import monotonic, sleep
from typing import TYPE_CHECKING

from shardkit.errors import CapabilityError, ConfigError
from shardkit.extent import DIRECT_ALIGN
from shardkit.storage.buffered import ByteCounter, check_files
from shardkit.storage.crew import Crew
from shardkit.storage.descriptors import default_max_open
from shardkit.storage.direct import require_aligned
from shardkit.storage.gds_call import TASK_BYTES, GdsCall, Shared
from shardkit.storage.gds_facts import mode_of
from shardkit.storage.gds_files import DESCRIPTORS_A_FILE, GdsFiles
from shardkit.storage.gds_library import KvikLibrary, Span, opened_facts
from shardkit.storage.reader import DIRECT, PAGE_CACHE, Pending, ReadOp, address_of, columns

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from shardkit.storage.device import Device
    from shardkit.storage.gds_library import GdsLibrary
    from shardkit.storage.reader import MemorySpace

__all__ = ["BY_COMPAT", "BY_GDS", "GdsReader", "gds_mode"]

BY_GDS = "gds"
"""Counter key: bytes that the storage wrote into the GPU's memory."""
BY_COMPAT = "cufile compat"
"""Counter key: bytes that cuFile read into host memory of its own and copied."""

_log = logging.getLogger(__name__)
_POLL_S = 0.002


def gds_mode() -> str:
    """Return how this process reads into GPU memory at best: "GDS", "cuFile compat" or "POSIX", as the driver says.

    Raises:
        CapabilityError: nothing in this process has opened cuFile yet.
    """
    return mode_of(opened_facts())


class GdsReader:
    """A `Reader` into a GPU's memory.

    Long ops are tasks of KvikIO's threads, many short ones a batch of cuFile's. A file on which these libraries fail,
    though the system can read it, is read through host memory from then on: `counters` shows the bytes, `refused` the
    number of such files, and the first one of each mount is logged.

    It does not survive a fork: the child is refused, and should be started by the spawn method.
    """

    align = DIRECT_ALIGN
    span_bytes = TASK_BYTES

    def __init__(
        self,
        paths: Sequence[str | os.PathLike[str]],
        device: Device,
        *,
        threads: int | None = None,
        max_open: int | None = None,
        library: GdsLibrary | None = None,
    ) -> None:
        """Open KvikIO and cuFile, but no file.

        Args:
            paths: the files, addressed by their index.
            device: the GPU in whose memory every destination lies.
            threads: of KvikIO, which all readers of the process share; None takes KVIKIO_NTHREADS, else 16.
            max_open: files kept open, with four descriptors each; None takes half of the process's limit.
            library: what reads; None is KvikIO.

        Raises:
            CapabilityError: the device is no GPU, or KvikIO or cuFile cannot be had; says why and what to do.
            ConfigError: `threads` or `max_open` is below 1.
        """
        if threads is not None and threads < 1:
            raise ConfigError("a reader needs at least one thread", found=threads)
        limit = max(default_max_open() // DESCRIPTORS_A_FILE, 1) if max_open is None else max_open
        self.space: MemorySpace = device.space
        self._process = os.getpid()
        self._library: GdsLibrary = KvikLibrary(device, threads=threads) if library is None else library
        self._files = GdsFiles(paths, self._library, max_open=limit)
        self._bytes = ByteCounter(BY_GDS, BY_COMPAT, DIRECT, PAGE_CACHE)
        self._registered: list[tuple[int, int]] = []
        self._shared = Shared(
            files=self._files, library=self._library, device=device, count=self._bytes.add,
            registered=self._registered, batches=self._library.batches,
        )  # fmt: skip
        self._calls: set[GdsCall] = set()
        self._lock, self._closed = threading.Lock(), False
        self._crew = Crew(1, name="shardkit-gds")
        _LIVE.add(self)

    @property
    def mode(self) -> str:
        """How files are read at best: "GDS", "cuFile compat" or "POSIX", as the driver says."""
        return mode_of(self._library.facts)

    @property
    def counters(self) -> Mapping[str, int]:
        """Bytes delivered so far: "gds", "cufile compat", and by KvikIO or host memory "direct" and "page cache"."""
        return self._bytes.snapshot()

    @property
    def refused(self) -> int:
        """Files that are read through host memory because KvikIO or cuFile failed on them."""
        return self._files.refused

    @property
    def registered(self) -> int:
        """Bytes of device memory that are registered with cuFile."""
        return sum(end - start for start, end in self._registered)

    def read_into(self, ops: Sequence[ReadOp], /) -> None:
        """Carry out every op; see `Reader`.

        Raises:
            CapabilityError: this process is a fork of the one that opened the reader.
        """
        self._require_process()
        rows = columns(ops)
        check_files(rows, len(self._files.cache.paths))
        require_aligned(rows, self.align, self._files.cache.paths)
        call = GdsCall(rows, self._shared)
        try:
            self._enter(call)
            if threading.current_thread() is threading.main_thread():
                self._crew.delegate(call.run, call.stop)
            else:
                call.run()
            if call.failed:
                raise min(call.failed, key=lambda failure: failure[0])[1]
        finally:
            call.over = True
            self._calls.discard(call)
            call.failed.clear()

    def register(self, memory: memoryview, /) -> None:
        """Register device memory with cuFile, once; being refused is logged, and reads go on without."""
        self._require_process()
        start = address_of(memory)
        if not memory.nbytes or any(first <= start < last for first, last in self._registered):
            return
        try:
            with self._library.current():
                self._library.register(Span(start, memory.nbytes))
        except Exception as error:
            cause = self._library.cause(error)
            _log.warning("%d bytes of GPU memory are not registered with cuFile: %s", memory.nbytes, cause.text)
        else:
            self._registered.append((start, start + memory.nbytes))

    def oldest(self) -> Pending | None:
        """Return the read that has run the longest; see `Reader`."""
        found = [(call, *waits) for call in list(self._calls) if not call.over and (waits := call.waits) is not None]
        if not found or self._process != os.getpid():
            return None
        call, op, since = min(found, key=lambda entry: entry[2])
        path = self._files.cache.paths[int(call.rows.file[op])]
        return Pending(path=path, offset=int(call.rows.offset[op]), seconds=monotonic() - since)

    def close(self) -> None:
        """Wait for the calls in progress; give back every file, thread and registration; idempotent."""
        if sys.is_finalizing():  # the interpreter lets no daemon thread run any more: one that reads would never end
            return
        with self._lock:
            first, self._closed = not self._closed, True
        while any(not call.over for call in list(self._calls)):
            sleep(_POLL_S)
        ours = self._process == os.getpid()
        with self._library.current() if ours else contextlib.nullcontext():
            if ours and first:
                self._crew.close()
                self._deregister()
            self._files.close()

    def _deregister(self) -> None:
        for start, end in self._registered:
            with contextlib.suppress(Exception):  # the memory may have gone, and its registration with it
                self._library.deregister(Span(start, end - start))
        self._registered.clear()
        if self._library.batches is not None:
            self._library.batches.close()

    def _enter(self, call: GdsCall) -> None:
        with self._lock:
            if self._closed:
                raise ConfigError("the reader is closed", remedy="open another one")
            self._calls.add(call)

    def _require_process(self) -> None:
        if self._process != os.getpid():
            raise CapabilityError(
                "a reader into a GPU's memory does not survive a fork",
                found=f"opened by process {self._process}, used in {os.getpid()}",
                remedy="open it in the child, and start children by the spawn method",
            )

    def _leave_to_parent(self) -> None:
        """Drop, in a child process, what is its parent's."""
        self._lock, self._calls = threading.Lock(), set()
        self._files.leave_to_parent()


_LIVE: weakref.WeakSet[GdsReader] = weakref.WeakSet()


def _leave_readers_to_parent() -> None:
    for reader in list(_LIVE):
        reader._leave_to_parent()


os.register_at_fork(after_in_child=_leave_readers_to_parent)
