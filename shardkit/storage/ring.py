"""The ring of host memory between a disk and a GPU: near the GPU, of large pages, touched before use, and pinned.

Each of these makes copies faster and none is needed: what the system refuses is said once, and the ring does without.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import mmap
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias

import numpy as np

from shardkit.errors import CapabilityError, ConfigError
from shardkit.extent import align_down, align_up
from shardkit.storage.buffers import aligned_memory
from shardkit.storage.probe import available_memory
from shardkit.storage.reader import address_of

if TYPE_CHECKING:
    from shardkit.storage.device import Device

__all__ = ["Pages", "Ring", "host_ring", "processors"]

Pages: TypeAlias = Literal["hugetlb", "transparent", "small"]
"""What a ring is made of: huge pages that were reserved, those that the kernel finds by itself, or ordinary ones."""

_log = logging.getLogger(__name__)
_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.argtypes = [ctypes.c_long] * 7
_libc.syscall.restype = ctypes.c_long
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]

_HUGE = 2 << 20
_MAP_HUGETLB = 0x4_0000 | 21 << 26  # pages of 2**21 bytes, whatever the machine's default is
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, Linux 5.14
_MBIND = {"x86_64": 237, "aarch64": 235}
_PREFERRED = 1  # MPOL_PREFERRED: from another node when this one is full, where MPOL_BIND has the process killed
_NODES = 1024
_MOST_THREADS = 4  # zeroing pages is as fast as memory then
_A_THREAD = 32 << 20
_RESERVED = Path("/sys/kernel/mm/hugepages/hugepages-2048kB")
_TRANSPARENT = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_NODE = Path("/sys/devices/system/node")


@dataclass(frozen=True, slots=True, eq=False)
class Ring:
    """Host memory for copies to a device, and what it got of what was asked for."""

    memory: memoryview
    """All of it: writable, aligned to 2 MiB, a map of its own that goes with its last view."""
    pinned: bool
    """Whether the device copies from it at full speed and without making the caller wait."""
    pages: Pages
    """What it is made of. Where it is "transparent", the kernel may still not have found enough huge pages."""
    node: int | None
    """The NUMA node that it lies on, as far as that has room; None: wherever the system put it."""


def host_ring(nbytes: int, device: Device | None, *, least: int | None = None) -> Ring:
    """Map, place, touch and pin host memory.

    Args:
        nbytes: bytes, rounded up to 2 MiB. The ring is smaller where that would be over half of the memory that is
            available, or more than the process may map.
        device: that copies from it; None pins nothing.
        least: bytes down to which the ring may shrink so that it can be pinned. None: one of `nbytes` that is not
            pinned is better than a smaller one.

    Raises:
        ConfigError: `nbytes` is below 1.
        CapabilityError: there is no memory at all.
    """
    if nbytes < 1:
        raise ConfigError("a ring has at least one byte", found=nbytes)
    size, node = align_up(nbytes, _HUGE), None if device is None else device.numa_node
    memory, pages, bound = _of_reserved_pages(size, node) or _of_ordinary_memory(size, node)
    held = None if device is None else _pin(memory, device, least)
    return Ring(memory if held is None else held, held is not None, pages, bound)


def processors(text: str) -> set[int]:
    """Return the numbers in a list as the kernel writes it.

    >>> sorted(processors("0-2,8"))
    [0, 1, 2, 8]
    """
    found = set[int]()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        found |= set(range(int(first), int(last or first) + 1))
    return found


def _of_reserved_pages(size: int, node: int | None) -> tuple[memoryview, Pages, int | None] | None:
    """Return a ring of huge pages that the administrator reserved, or None where they do not suffice."""
    free = (_number(_RESERVED / "free_hugepages") - _number(_RESERVED / "resv_hugepages")) * _HUGE
    if free < size:
        if free > 0:
            _log.info("%d bytes of reserved huge pages are too few for a ring of %d", free, size)
        return None
    try:
        held = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_HUGETLB)
        memory = memoryview((ctypes.c_ubyte * size).from_buffer(held)).cast("B")
        bound = _place(memory, node)
        # Without this call a limit that counts at the first touch only, such as a control group's, ends in SIGBUS.
        _populate(memory, node)
    except OSError as error:
        _log.info("a ring of %d bytes gets none of the reserved huge pages: %s", size, error)
        return None
    return memory, "hugetlb", bound


def _of_ordinary_memory(size: int, node: int | None) -> tuple[memoryview, Pages, int | None]:
    available = available_memory()
    most = size if available is None else max(align_down(available // 2, _HUGE), _HUGE)
    memory = _mapped(min(size, most))
    if memory.nbytes < size:
        _log.warning("a ring of %d bytes has to do with %d: there is not more memory", size, memory.nbytes)
    bound = _place(memory, node)
    try:
        _populate(memory, node)
    except OSError as error:
        if error.errno == errno.EINVAL:
            _touch(memory)  # an older kernel
        else:
            _log.warning("a ring of %d bytes is not there before it is used: %s", memory.nbytes, error)
    setting = _text(_TRANSPARENT)  # always [madvise] never
    if setting and "[never]" not in setting:
        return memory, "transparent", bound
    _log.warning(
        "a ring of %d bytes lies in small pages, which makes cold reads slower: %s", memory.nbytes,
        f"echo madvise > {_TRANSPARENT}" if setting else f"{_TRANSPARENT} is not there",
    )  # fmt: skip
    return memory, "small", bound


def _mapped(size: int) -> memoryview:
    while True:
        try:
            return aligned_memory(size, _HUGE, huge=True)
        except CapabilityError:
            if size == _HUGE:
                raise
        size = align_up(size // 2, _HUGE)


def _place(memory: memoryview, node: int | None) -> int | None:
    """Let memory that nobody has touched come from a node, and return the node, or None where the system refuses."""
    if node is None:
        return None
    number, failed = _MBIND.get(os.uname().machine), errno.ENOSYS
    if number is not None:
        words = (ctypes.c_ulong * (_NODES // 64))()
        words[node // 64] = 1 << node % 64
        start, mask, bits = address_of(memory), ctypes.addressof(words), _NODES + 1  # the kernel takes one off
        if not _libc.syscall(number, start, memory.nbytes, _PREFERRED, mask, bits, 0):
            return node
        failed = ctypes.get_errno()
    if processors(_text(_NODE / "has_memory")) == {node}:
        return node  # there is no other
    _log.warning("a ring cannot be bound to NUMA node %d: %s", node, os.strerror(failed))
    return None


def _populate(memory: memoryview, node: int | None) -> None:
    """Make all of it there; by threads on the node, so that it lies there where a container forbids to bind it.

    Raises:
        OSError: EINVAL for a kernel that cannot, else what there is not enough of.
    """
    near = processors(_text(_NODE / f"node{node}" / "cpulist")) if node is not None else set()
    allowed = os.sched_getaffinity(0)
    near = near & allowed or allowed

    def work(start: int) -> None:
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, near)  # of this thread
        populate(start)

    def populate(start: int) -> None:
        size = min(share, memory.nbytes - start)
        if _libc.madvise(first + start, size, _POPULATE_WRITE):
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))

    threads = max(min(_MOST_THREADS, len(near), memory.nbytes // _A_THREAD), 1)
    share, first = align_up(-(-memory.nbytes // threads), _HUGE), address_of(memory)
    starts = range(0, memory.nbytes, share)
    try:
        with ThreadPoolExecutor(threads, "shardkit-touch") as crew:
            for done in [crew.submit(work, start) for start in starts]:
                done.result()
    except RuntimeError:  # the system gives no thread
        for start in starts:
            populate(start)


def _touch(memory: memoryview) -> None:
    np.frombuffer(memory, np.uint8)[:: mmap.PAGESIZE] = 0


def _pin(memory: memoryview, device: Device, least: int | None) -> memoryview | None:
    """Return the leading part of the memory that could be pinned, or None."""
    size, refused = memory.nbytes, ""
    while True:
        try:
            device.pin(memory[:size])
            break
        except CapabilityError as error:
            refused = refused or str(error)
        half = align_down(size // 2, _HUGE)
        if least is None or half < max(least, _HUGE):
            _log.warning("a ring of %d bytes is not pinned, so copies from it are slow: %s", memory.nbytes, refused)
            return None
        size = half
    if refused:
        _log.warning("of a ring of %d bytes only %d could be pinned: %s", memory.nbytes, size, refused)
        rest = memory.nbytes - size
        _libc.madvise(address_of(memory) + size, rest, mmap.MADV_DONTNEED)
    return memory[:size]


def _number(path: Path) -> int:
    try:
        return int(_text(path))
    except ValueError:
        return 0


def _text(path: Path) -> str:
    try:
        return path.read_text("ascii")
    except OSError:
        return ""
