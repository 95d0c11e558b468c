"""The seam through which every byte is read: ranges of files into memory that the caller owns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeAlias

from shardkit.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from shardkit.extent import Extent

__all__ = ["DIRECT", "HOST", "PAGE_CACHE", "MemorySpace", "ReadOp", "Reader"]

MemorySpace: TypeAlias = str
"""Where bytes live: "host", or "cuda:N" for the memory of GPU N."""

HOST: MemorySpace = "host"

DIRECT = "direct"
"""Counter key: bytes that went from the device into the caller's memory, past the page cache."""
PAGE_CACHE = "page cache"
"""Counter key: bytes that the kernel copied out of its page cache."""


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
      and found. Everything else that the system reports is a `StorageError` with path and offset, or a
      `CapabilityError` where it forbids the access. Of several failed ops the first in the sequence is raised, when
      no thread works on any `dst` any more.
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
    def counters(self) -> Mapping[str, int]:
        """A snapshot of the bytes delivered so far, by the path that they took (`DIRECT`, `PAGE_CACHE`)."""

    def read_into(self, ops: Sequence[ReadOp], /) -> None:
        """Carry out every op, or raise the error of the first that failed.

        Raises:
            ConfigError: an op is misaligned or names no file, or the reader is closed.
            ShortReadError: a file ended before `need` bytes.
            StorageError: the system failed an open or a read.
            CapabilityError: the system forbids the access.
        """

    def close(self) -> None:
        """Give back every descriptor and thread; idempotent."""
