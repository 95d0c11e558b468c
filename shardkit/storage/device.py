"""The seam to a GPU's memory: what is asked of a device, whoever answers.

Device memory goes by `memoryview`, as host memory does, so that pools, plans and reads work on either: slices, sizes,
addresses and life times are real. Its bytes are not: the processor that looks at one crashes the process. Only a
`Stream` touches them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from shardkit.errors import DeviceError

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from shardkit.storage.reader import MemorySpace

__all__ = ["Device", "Event", "Stream", "lost_error"]


class Event(Protocol):
    """A point in a stream's work."""

    @property
    def handle(self) -> int:
        """Of CUDA's driver API."""

    def done(self) -> bool:
        """Return whether all work before it is done; never waits.

        Raises:
            DeviceError: work on the device has failed.
        """

    def wait(self) -> None:
        """Wait until it is, asleep, without the interpreter's lock.

        Raises:
            DeviceError: as `done`.
        """

    def since(self, earlier: Event, /) -> float:
        """Return the seconds on the device between two events that are done, both recorded with `timed`."""


class Stream(Protocol):
    """Work on the device in order. Threads may share it. Addresses are of this process; nothing here waits.

    Memory that is named must stay until the work is done; pageable host memory may make a call wait.
    """

    @property
    def handle(self) -> int:
        """Of CUDA's driver API."""

    def upload(self, target: int, source: int, nbytes: int) -> None:
        """Copy from host memory to the device's."""

    def download(self, target: int, source: int, nbytes: int) -> None:
        """Copy from the device's memory to host memory."""

    def copy(self, target: int, source: int, nbytes: int) -> None:
        """Copy within the device's memory."""

    def prefetch(self, address: int, nbytes: int) -> None:
        """Move what the host wrote to `Device.managed` memory to the device, at once and not page by page."""

    def record(self, *, timed: bool = False) -> Event:
        """Return an event behind all work so far."""

    def wait_for(self, event: Event, /) -> None:
        """Let later work begin only when an event of another stream is done; the host does not wait."""

    def synchronize(self) -> None:
        """Wait until all work so far is done; the thread spins, for the least delay."""


class Device(Protocol):
    """A GPU, and the ways to its memory. Threads may share it; a forked child may not use it."""

    @property
    def number(self) -> int:
        """Which GPU of this process, from 0."""

    @property
    def space(self) -> MemorySpace:
        """Of the form "cuda:N"."""

    @property
    def name(self) -> str:
        """As the driver calls it."""

    @property
    def numa_node(self) -> int | None:
        """The node of host memory that is nearest; None where the system does not say."""

    @property
    def lost(self) -> bool:
        """Whether an error of some kernel has ended all work on it: every call fails, until a new process begins.

        So it is in a forked child. Asking never raises: finalisers ask. Libraries that meet such a device wait for
        ever, or end the process when they cannot free their memory.
        """

    def current(self) -> AbstractContextManager[None]:
        """Have the device current in this thread for a block, for other libraries; then again what was before.

        Nothing else leaves it current: threads of the caller's may work with another GPU.
        """

    def memory(self, nbytes: int) -> memoryview:
        """Return device memory of its own, of undefined content, aligned to 4096; it goes with its last view.

        Who drops it makes sure that no work on it is left.

        Raises:
            CapabilityError: the device has no memory left.
        """

    def managed(self, nbytes: int) -> memoryview:
        """Return memory that host and device may both touch (`cudaMallocManaged`), aligned to 4096.

        The driver is advised that it belongs on the device, and that what is there may be read from copies.

        Raises:
            CapabilityError: the device has none, or may not touch it at the same time as the host.
        """

    def pin(self, memory: memoryview) -> None:
        """Pin host memory, so that copies from it run at full speed and do not wait; it ends with the memory.

        Args:
            memory: page-aligned, the caller's; of a map of its own.

        Raises:
            CapabilityError: the system refuses it.
        """

    def stream(self, *, urgent: bool = False) -> Stream:
        """Return a new stream that waits for no other; `urgent` ones come before the others."""


def lost_error(found: object = "it is lost: an error has ended all work on it") -> DeviceError:
    """Return what to raise when a device is lost, whoever has met it and says what he found."""
    return DeviceError(
        "a GPU failed an operation", found=found,
        remedy="start another process; the loader's state_dict() says where this one was",
    )  # fmt: skip
