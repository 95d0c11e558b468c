"""What is used of DALI, for the modules that work with it and do not import it."""

from __future__ import annotations

import atexit
import ctypes
import functools
import os
import re
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from shardkit.errors import DeviceError
from shardkit.storage.device import lost_error

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from shardkit.storage.device import Device

__all__ = ["Dali", "DaliMemory", "device_failure", "guarded", "host_tensors", "leave_standing", "telling_line"]

_Foreign: TypeAlias = Any  # DALI has no types
_GPU_FAILED = re.compile(
    r"CUDA (runtime|driver) API error|CUDA allocation failed|Can't allocate \d+ bytes", re.IGNORECASE
)


@dataclass(frozen=True, slots=True)
class Dali:
    """Parts of the library."""

    pipeline_def: _Foreign
    fn: _Foreign
    types: _Foreign
    auto_aug: _Foreign
    """Its package `auto_aug.core`."""
    suite: _Foreign
    """Returns RandAugment's operations."""
    tensors: _Foreign
    """Its module `tensors`."""


def host_tensors(dali: Dali, views: list[npt.NDArray[np.uint8]], *, pinned: bool = False) -> _Foreign:
    """Return host memory as a list of tensors for `feed_input`, not copied.

    Hold it until the run's outputs are there. What DALI's threads are the last to hold they drop one by one, each under
    the interpreter's lock: beside one busy Python thread that made a run of 256 take 100 ms, and 6 ms when it was held.

    Args:
        dali: the library.
        views: one dimension each; the result keeps them.
        pinned: they are pinned and the thread's current device is the graph's. Otherwise DALI copies them to pinned
            memory of its own when the graph works on a GPU.
    """
    of = dali.tensors
    if not pinned:
        try:
            return of.TensorListCPU.from_dlpack_list(views, None, False)  # 1.4 µs an image; one by one 2.5
        except BufferError:  # DLPack has no word for read-only memory
            pass
    return of.TensorListCPU([of.TensorCPU(view, None, pinned) for view in views], None, False)


_built: weakref.WeakKeyDictionary[_Foreign, Device | None] = weakref.WeakKeyDictionary()
_held: list[object] = []


def guarded(pipe: _Foreign, device: Device | None) -> _Foreign:
    """Return a built pipeline, which DALI then shuts down neither in a forked child nor on a device that is lost.

    DALI shuts every pipeline down when a process ends. A child has none of its threads, and those of a lost device wait
    for it: DALI would wait for them for ever, or crash.

    Args:
        pipe: built.
        device: that it works on; None for the CPU.
    """
    _look_at_the_end()
    _built[pipe] = device
    return pipe


def leave_standing(pipe: _Foreign, *held: object) -> None:
    """Let go of a pipeline that cannot be shut down, as those of a lost device; it stands until the process ends.

    Args:
        pipe: not used any more.
        held: what its threads may still look at.
    """
    inner = getattr(pipe, "_pipe", None)
    if inner is not None:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(inner))  # it never goes, as its threads never end
        pipe._pipe = None
        _held.extend(held)


class DaliMemory:
    """Device memory of DALI's. On a device that is lost it is never freed: DALI would end the process over it."""

    def __init__(self, images: _Foreign, device: Device) -> None:
        """Hold a list of tensors; nobody else does."""
        self._images, self._device = images, device

    def __del__(self) -> None:
        """Let go of it, or not."""
        if self._device.lost:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._images))


@functools.cache
def _look_at_the_end() -> None:
    atexit.register(_leave_lost_ones)  # after DALI's import: what is registered last is called first


def _leave_to_the_parent() -> None:
    for pipe in list(_built):
        leave_standing(pipe)


def _leave_lost_ones() -> None:
    for pipe, device in list(_built.items()):
        if device is not None and device.lost:
            leave_standing(pipe)


os.register_at_fork(after_in_child=_leave_to_the_parent)


def device_failure(error: BaseException, device: Device) -> DeviceError | None:
    """Return what to raise for an error of DALI's that comes from the GPU and not from what it was given; else None."""
    if device.lost:
        return lost_error(telling_line(error))
    if isinstance(error, MemoryError) or _GPU_FAILED.search(str(error)):
        return DeviceError("DALI failed on the GPU", found=telling_line(error))
    return None


def telling_line(error: BaseException) -> str:
    """Return the line that says what happened, of the many that DALI writes around it."""
    text = str(error)
    lines = [line.strip() for line in (text.partition("encountered:")[2] or text).splitlines()]
    line = next((line for line in lines if line and not line.endswith(":")), "")
    kind = "DALI" if isinstance(error, RuntimeError) else type(error).__name__
    return f"{kind}: {line}" if line else kind
