"""A stand-in for KvikIO and cuFile in tests: it reads into addresses of host memory, and speaks as they do.

It takes the place of a library, and of nothing in shardkit. What KvikIO does is done here, too: two descriptors a file,
an error that is only a text, nothing past the end of a file, small reads at once in the calling thread.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import threading
from collections import Counter
from typing import TYPE_CHECKING

import numpy as np

from shardkit.storage.cufile_errors import cufile_code_in, errno_in, explain_cufile_error
from shardkit.storage.gds_batch import BatchRefusedError
from shardkit.storage.gds_facts import DriverFacts
from shardkit.storage.gds_library import Cause

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    import numpy.typing as npt

    from shardkit.storage.gds_batch import BatchReads
    from shardkit.storage.gds_library import Span

__all__ = ["HostBatches", "HostGds", "HostGdsFile", "driver"]


def driver(
    *, nvidia_fs: tuple[int, int] = (0, 0), status: int = 0, p2pdma: bool = False, batch: int = 128
) -> DriverFacts:
    """Return what a driver might say."""
    return DriverFacts(nvidia_fs=nvidia_fs, status=status, p2p=p2pdma, p2pdma=p2pdma, batch=batch)


class HostGds:
    """A `shardkit.storage.gds_library.GdsLibrary` without a GPU."""

    def __init__(
        self, *, facts: DriverFacts | None = None, batches: bool = False, threshold: int = 16 << 10,
        goes_direct: bool = False, has_direct: bool = True,
    ) -> None:  # fmt: skip
        """Open nothing yet.

        Args:
            facts: what the driver says; None where KvikIO goes without it.
            batches: whether there are batches.
            threshold: bytes below which a read is carried out at once.
            goes_direct: what KvikIO's setting says; reads go through the page cache all the same.
            has_direct: what every file says.
        """
        self.facts, self.threshold, self.goes_direct, self.has_direct = facts, threshold, goes_direct, has_direct
        self.batches: HostBatches | None = HostBatches(facts.batch if facts else 1) if batches else None
        self.to_fail: dict[str, str] = {}
        """What is said of reads of a file, by the end of its path; of all calls of a name, by "open", "register"."""
        self.short: dict[str, int] = {}
        """Bytes that a read of a file is short of what it should be, by the end of its path."""
        self.calls: Counter[str] = Counter()
        self.sizes: list[int] = []
        """Bytes of each read."""
        self.requests: list[int] = []
        """Bytes of what each thread would ask for: a read is cut at its task size, as KvikIO does."""
        self.registered: list[tuple[int, int]] = []
        self.open_files = 0

    def current(self) -> AbstractContextManager[None]:
        """Do nothing."""
        return contextlib.nullcontext()

    def open(self, path: str) -> HostGdsFile:
        """Open a file twice."""
        self.calls["open"] += 1
        self.fail("open")
        return HostGdsFile(self, path)

    def register(self, memory: Span) -> None:
        """Remember it."""
        self.fail("register")
        self.registered.append((memory.address, memory.length))

    def deregister(self, memory: Span) -> None:
        """Forget it."""
        self.registered.remove((memory.address, memory.length))

    def cause(self, error: Exception) -> Cause:
        """Look into the text."""
        code = cufile_code_in(str(error))
        if code is None:
            return Cause(str(error), errno_in(str(error)))
        return Cause("{}: {}".format(*explain_cufile_error(code)), None)

    def fail(self, what: str) -> None:
        """Raise what is to be said."""
        said = next((text for end, text in self.to_fail.items() if what.endswith(end)), None)
        if said is not None:
            raise RuntimeError(f"KvikIO failure at: /src/x.cpp:7: {said}")


class HostGdsFile:
    """An open file, as `kvikio.CuFile` is."""

    def __init__(self, library: HostGds, path: str) -> None:
        """Open it twice."""
        self._library = library
        try:
            self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            self.name = os.readlink(f"/proc/self/fd/{self._descriptor}")
            self._second = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            said = "Unable to open file. Linux system/library function call error at: /src/x.cpp:7"
            raise RuntimeError(f"{said}: {error.strerror}") from None
        self._process = os.getpid()
        self.closed = False
        library.open_files += 1

    def pread(self, buf: Span, size: int, file_offset: int, task_size: int) -> HostFuture:
        """Start to read in a thread, or read a little at once."""
        assert not self.closed
        assert task_size > 0
        assert size <= buf.length
        assert os.getpid() == self._process
        assert threading.current_thread() is not threading.main_thread()
        self._library.calls["pread"] += 1
        self._library.sizes.append(size)
        self._library.requests += [min(task_size, size - done) for done in range(0, size, task_size)]
        future = HostFuture(self, buf.address, size, file_offset)
        if size < self._library.threshold:
            future.work()
            if future.error is not None:
                raise future.error
        else:
            future.start()
        return future

    def is_direct_io_supported(self) -> bool:
        """Return what is to be said."""
        return self._library.has_direct

    def close(self) -> None:
        """Close both."""
        assert not self.closed
        assert os.getpid() == self._process
        self.closed = True
        self._library.open_files -= 1
        os.close(self._descriptor)
        os.close(self._second)

    def read(self, address: int, size: int, offset: int) -> int:
        """Read all of it, or raise as KvikIO does."""
        self._library.fail(self.name)
        memory, done = memoryview((ctypes.c_ubyte * size).from_address(address)).cast("B"), 0
        while done < size:
            assert not self.closed
            try:
                count = os.preadv(self._descriptor, [memory[done:]], offset + done)
            except OSError as error:
                raise RuntimeError(f"KvikIO failure at: /src/x.hpp:7: POSIX error on pread: {error.strerror}") from None
            if not count:
                raise RuntimeError("KvikIO failure at: /src/x.hpp:7: POSIX error on pread: EOF")
            done += count
        return size - next((short for end, short in self._library.short.items() if self.name.endswith(end)), 0)


class HostFuture:
    """A read under way, as `kvikio.cufile.IOFuture` is."""

    def __init__(self, file: HostGdsFile, address: int, size: int, offset: int) -> None:
        """Begin nothing yet."""
        self._file, self._row = file, (address, size, offset)
        self._thread = threading.Thread(target=self.work, daemon=True)
        self._arrived = 0
        self.error: RuntimeError | None = None

    def start(self) -> None:
        """Read in a thread."""
        self._thread.start()

    def work(self) -> None:
        """Read."""
        try:
            self._arrived = self._file.read(*self._row)
        except RuntimeError as error:
            self.error = error

    def get(self) -> int:
        """Wait for it; once."""
        if self._thread.ident is not None:
            self._thread.join()
        if self.error is not None:
            raise self.error
        return self._arrived


class HostBatches:
    """The batches of cuFile."""

    def __init__(self, most: int) -> None:
        """Know no file yet."""
        self.most = most
        self.files: dict[int, int] = {}
        self.refusal: str | None = None
        """Why batches do not work."""
        self.failing: set[int] = set()
        """Offsets at which a read of a batch fails."""
        self.sizes: list[int] = []
        """Reads of each batch."""
        self.bases: set[int] = set()
        self.closed = False
        self._next = 100

    def register(self, descriptor: int) -> int:
        """Give it a number."""
        flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
        assert flags & os.O_DIRECT
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags & ~os.O_DIRECT)  # host memory would have to be aligned
        self._next += 1
        self.files[self._next] = descriptor
        return self._next

    def forget(self, handle: int) -> None:
        """Forget it."""
        del self.files[handle]

    def read(self, reads: BatchReads) -> npt.NDArray[np.int64]:
        """Read each of them."""
        if self.refusal is not None:
            raise BatchRefusedError(self.refusal)
        assert 0 < len(reads) <= self.most
        self.sizes.append(len(reads))
        self.bases.update(reads.base.tolist())
        arrived = []
        rows = zip(reads.handle, reads.offset, reads.length, reads.base + reads.start, strict=True)
        for handle, offset, length, address in rows:
            memory = (ctypes.c_ubyte * int(length)).from_address(int(address))
            try:
                count = -1 if int(offset) in self.failing else os.preadv(self.files[int(handle)], [memory], int(offset))
            except OSError as error:
                count = -(error.errno or 1)
            arrived.append(count)
        return np.asarray(arrived, np.int64)

    def close(self) -> None:
        """Be closed."""
        assert not self.closed
        self.closed = True
