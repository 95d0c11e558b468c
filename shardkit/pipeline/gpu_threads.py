"""The threads of a GPU's line, and how their errors leave them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardkit.errors import forget_frames
from shardkit.pipeline.workers import Workers

if TYPE_CHECKING:
    import contextlib

    from shardkit.storage.device import Device

__all__ = ["LineThreads", "without_frames"]


class LineThreads:
    """The threads of a line; closed by `stack` at the latest."""

    def __init__(self, stack: contextlib.ExitStack, device: Device, *, decoding: int, pillow: int) -> None:
        """Start them, `decoding` of them for back ends and `pillow` for Pillow."""
        self.device = device
        """With which they work."""
        self.preparing = _started(stack, device, 1, "shardkit-prepare")
        self.decoding = _started(stack, device, decoding, "shardkit-decode")
        self.finishing = _started(stack, device, 1, "shardkit-finish")
        self.pillow = _started(stack, device, pillow, "shardkit-pillow")

    @property
    def ended(self) -> bool:
        """Whether all but the preparing one are through."""
        return self.decoding.ended and self.finishing.ended and self.pillow.ended


def _started(stack: contextlib.ExitStack, device: Device, count: int, name: str) -> Workers:
    workers = Workers(count, name, hopeless=lambda: device.lost)  # DALI waits for such a device without end
    stack.callback(workers.close)
    return workers


def without_frames(error: BaseException) -> BaseException:
    """Return an error that keeps no memory alive, however long somebody keeps it.

    The local variables behind it are dropped, and its first frame, the catching one, which still runs.
    """
    if error.__traceback__ is not None:
        error.__traceback__ = error.__traceback__.tb_next
    forget_frames(error)
    return error
