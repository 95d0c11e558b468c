"""What is used of DALI, for the modules that work with it and do not import it."""

from __future__ import annotations

import ctypes
import os
import re
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from shardkit.errors import DeviceError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

__all__ = ["Dali", "device_failure", "host_tensors", "left_alone_by_children", "telling_line"]

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


_built: weakref.WeakSet[_Foreign] = weakref.WeakSet()


def left_alone_by_children(pipe: _Foreign) -> _Foreign:
    """Return a built pipeline, which a forked child then does not shut down.

    DALI shuts every pipeline down when a process ends. A child has none of its threads: it would wait for them for
    ever, or crash.
    """
    _built.add(pipe)
    return pipe


def _leave_alone() -> None:
    for pipe in list(_built):
        inner = getattr(pipe, "_pipe", None)
        if inner is not None:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(inner))  # it never goes, as its threads never end
            pipe._pipe = None


os.register_at_fork(after_in_child=_leave_alone)


def device_failure(error: BaseException) -> DeviceError | None:
    """Return what to raise for an error of DALI's that comes from the GPU and not from what it was given; else None."""
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
