"""The seam through which every byte is read: ranges of files into memory that the caller owns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeAlias, overload

import numpy as np

from shardkit.errors import ConfigError
from shardkit.extent import Extent

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy.typing as npt

    _Ints: TypeAlias = npt.NDArray[np.int64]

__all__ = [
    "DIRECT", "HOST", "PAGE_CACHE", "SPAN_BYTES", "MemorySpace", "OpColumns", "Pending", "ReadOp", "ReadOps", "Reader",
    "address_of", "columns",
]  # fmt: skip

MemorySpace: TypeAlias = str
"""Where bytes live: "host", or "cuda:N" for the memory of GPU N."""

HOST: MemorySpace = "host"

DIRECT = "direct"
"""Counter key: bytes that went from the device into the caller's memory, past the page cache."""
PAGE_CACHE = "page cache"
"""Counter key: bytes that the kernel copied out of its page cache."""

SPAN_BYTES = 1 << 20
"""`Reader.span_bytes` of readers into host memory: large enough for the device, small enough to share out."""


@dataclass(frozen=True, slots=True)
class ReadOp:
    """One range of one file, and the memory that it goes to."""

    file: int
    """Index into the paths that the reader was opened with."""
    span: Extent
    """The bytes to read. Its end may pass the end of the file, by less than the reader's `align`."""
    dst: memoryview
    """Writable bytes, one dimension, exactly `span.length` of them, owned by the caller, in the reader's space."""
    need: int
    """Leading bytes of `span` that must arrive; the caller looks at no byte after them."""

    def __post_init__(self) -> None:
        """Refuse a destination that does not fit the span."""
        dst = self.dst
        if dst.nbytes != self.span.length or dst.itemsize != 1 or dst.ndim != 1 or dst.readonly or not dst.contiguous:
            raise ConfigError(
                "a destination does not fit its span",
                expected=f"{self.span.length} writable bytes in one run",
                found=f"{dst.nbytes} bytes as {dst.ndim} x {dst.itemsize}-byte items, readonly={dst.readonly}",
            )
        if not 0 <= self.need <= self.span.length:
            raise ConfigError("a span cannot need more than it has", expected=f"0..{self.span.length}", found=self.need)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ReadOps(Sequence[ReadOp]):
    """N ops whose destinations lie in one buffer, as columns: no object an op until someone asks for it.

    int64 [N] each. The columns are what `ReadOp` would hold, so the same rules apply to them.
    """

    file: _Ints
    """[N] index into the reader's paths."""
    offset: _Ints
    """[N] first byte of each span."""
    length: _Ints
    """[N] bytes of each span."""
    need: _Ints
    """[N] leading bytes of each span that must arrive."""
    start: _Ints
    """[N] bytes from the start of `buffer` to each destination."""
    buffer: memoryview
    """Writable bytes, one dimension, owned by the caller, in the reader's space."""

    def __post_init__(self) -> None:
        """Refuse a destination that leaves the buffer."""
        end = int((self.start + self.length).max(initial=0))
        if end > self.buffer.nbytes or (end and self.buffer.readonly):
            found = f"{self.buffer.nbytes} bytes, readonly={self.buffer.readonly}"
            raise ConfigError("the buffer does not hold the spans", expected=f"{end} writable bytes", found=found)

    def __len__(self) -> int:
        """Return the number of ops."""
        return len(self.file)

    @overload
    def __getitem__(self, at: int) -> ReadOp: ...
    @overload
    def __getitem__(self, at: slice) -> ReadOps: ...
    def __getitem__(self, at: int | slice) -> ReadOp | ReadOps:
        """Return one op, or some of them as columns again."""
        if isinstance(at, slice):
            return ReadOps(
                file=self.file[at], offset=self.offset[at], length=self.length[at], need=self.need[at],
                start=self.start[at], buffer=self.buffer,
            )  # fmt: skip
        start, length = int(self.start[at]), int(self.length[at])
        span = Extent(int(self.offset[at]), length)
        return ReadOp(int(self.file[at]), span, self.buffer[start : start + length], int(self.need[at]))


@dataclass(frozen=True, slots=True, kw_only=True)
class OpColumns:
    """N ops as columns, for a backend; valid while the memory of the ops is."""

    file: _Ints
    """[N] index into the reader's paths."""
    offset: _Ints
    """[N] first byte of each span."""
    length: _Ints
    """[N] bytes of each span."""
    need: _Ints
    """[N] leading bytes that must arrive."""
    address: _Ints
    """[N] address of each destination in this process; 0 for one of no bytes."""


def columns(ops: Sequence[ReadOp]) -> OpColumns:
    """Return any ops as columns: without work an op for `ReadOps`, op by op for others."""
    if isinstance(ops, ReadOps):
        address = ops.start + address_of(ops.buffer)
        return OpColumns(file=ops.file, offset=ops.offset, length=ops.length, need=ops.need, address=address)
    rows = [(op.file, op.span.offset, op.span.length, op.need, address_of(op.dst)) for op in ops]
    file, offset, length, need, address = np.asarray(rows, np.int64).reshape(len(rows), 5).T.copy()
    return OpColumns(file=file, offset=offset, length=length, need=need, address=address)


def address_of(memory: memoryview) -> int:
    """Return where memory begins, in its space; 0 for no bytes."""
    return int(np.frombuffer(memory, np.uint8).ctypes.data) if memory.nbytes else 0


@dataclass(frozen=True, slots=True)
class Pending:
    """A read that has not ended yet."""

    path: str
    """The file."""
    offset: int
    """First byte of the span."""
    seconds: float
    """For how long it has run."""


class Reader(Protocol):
    """Reads ranges of a fixed list of files into the caller's memory.

    The contract, which `shardkit.testing.readers.ReaderContract` checks for every backend:

    - **Paths.** Given when the reader is opened, and addressed by their index. A file is opened when it is first read.
    - **Alignment.** `span.offset`, `span.length` and the address of `dst` are multiples of `align`. An op that is not
      raises `ConfigError` before anything is read; no backend repairs it in silence.
    - **Completion.** `read_into` returns when the first `need` bytes of every op have arrived. What `dst` holds after
      the bytes that arrived is undefined, and so is all of every `dst` after an error.
    - **Order.** Ops are carried out in any order and at the same time, so no two of them may share memory. An op of
      length 0 touches no file.
    - **Errors.** A file that ends before `need` bytes raises `ShortReadError` with path, offset, the bytes expected
      and found. Everything else that the system reports is a `StorageError` with path and offset. Of several failed
      ops the first in the sequence is raised, when no thread works on any `dst` any more.
    - **Ownership.** Nothing of an op is kept after `read_into` has returned or raised.
    - **Threads.** `read_into`, `counters` and `close` may be called from several threads at once. `close` waits for
      the reads in progress; it may be called again, and a read after it raises `ConfigError`.
    - **Forks.** A reader opened before a fork serves the child too, if no read was in progress at the fork.
    """

    @property
    def space(self) -> MemorySpace:
        """The memory in which every `dst` must lie."""

    @property
    def align(self) -> int:
        """Bytes; a power of two. 1 means that any offset, length and address will do."""

    @property
    def span_bytes(self) -> int:
        """Bytes up to which neighbours are best joined to one op; at least 64 KiB. Longer ops are carried out, too."""

    @property
    def counters(self) -> Mapping[str, int]:
        """A snapshot of the bytes delivered so far, by the path that they took (`DIRECT`, `PAGE_CACHE`)."""

    def read_into(self, ops: Sequence[ReadOp], /) -> None:
        """Carry out every op, or raise the error of the first that failed.

        Raises:
            ConfigError: an op is misaligned or names no file, or the reader is closed.
            ShortReadError: a file ended before `need` bytes.
            StorageError: the system failed an open or a read, or does not allow it.
        """

    def register(self, memory: memoryview, /) -> None:
        """Hint that many reads will go into this memory until the reader is closed: page-aligned, the caller's.

        A backend that gains from it (fixed buffers of io_uring, cuFile) registers it with the system, the others do
        nothing. Being refused is no error: it is logged once, and reads go on without. The memory stays mapped until
        the reader is closed.
        """

    def oldest(self) -> Pending | None:
        """Return the read that has run the longest, or None when none runs; for reports of stuck reads.

        Never waits, and may be called while reads run, from any thread.
        """

    def close(self) -> None:
        """Give back every descriptor and thread; idempotent."""
