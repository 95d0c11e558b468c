"""What Linux defines of io_uring: its three system calls, its structures and the numbers that are used here.

No library is needed for them, and none would work everywhere. Names are those of linux/io_uring.h without IORING_.
"""

from __future__ import annotations

import ctypes
import os

import numpy as np

__all__ = [
    "ASYNC_CANCEL_ALL", "ASYNC_CANCEL_ANY", "CQE", "ENTER_EXT_ARG", "ENTER_GETEVENTS", "ENTER_SQ_WAKEUP",
    "FEAT_EXT_ARG", "FEAT_NODROP", "FEAT_SINGLE_MMAP", "FILES_UPDATE", "IOSQE_FIXED_FILE", "IOVEC", "OFF_SQES",
    "OFF_SQ_RING", "OP_ASYNC_CANCEL", "OP_READ", "OP_READ_FIXED", "PARAMS", "REGISTER_BUFFERS", "REGISTER_FILES",
    "REGISTER_FILES_UPDATE", "SETUP_COOP_TASKRUN", "SETUP_SQPOLL", "SQE", "UNREGISTER_BUFFERS",
    "UNREGISTER_FILES", "WAIT", "enter", "register", "setup",
]  # fmt: skip

_SETUP, _ENTER, _REGISTER = 425, 426, 427  # on every architecture that numbers its calls from 0, so not MIPS and Alpha

OFF_SQ_RING = 0
OFF_SQES = 0x1000_0000
SETUP_SQPOLL = 1 << 1
SETUP_COOP_TASKRUN = 1 << 8
FEAT_SINGLE_MMAP = 1 << 0
FEAT_NODROP = 1 << 1
FEAT_EXT_ARG = 1 << 8
ENTER_GETEVENTS = 1 << 0
ENTER_SQ_WAKEUP = 1 << 1
ENTER_EXT_ARG = 1 << 3
REGISTER_BUFFERS = 0
UNREGISTER_BUFFERS = 1
REGISTER_FILES = 2
UNREGISTER_FILES = 3
REGISTER_FILES_UPDATE = 6
OP_READ_FIXED = 4
OP_ASYNC_CANCEL = 14
OP_READ = 22
IOSQE_FIXED_FILE = 1 << 0
ASYNC_CANCEL_ALL = 1 << 0
ASYNC_CANCEL_ANY = 1 << 2

PARAMS = np.dtype([
    ("sq_entries", "u4"), ("cq_entries", "u4"), ("flags", "u4"), ("sq_thread_cpu", "u4"), ("sq_thread_idle", "u4"),
    ("features", "u4"), ("wq_fd", "u4"), ("resv", "u4", 3),
    ("sq_head", "u4"), ("sq_tail", "u4"), ("sq_ring_mask", "u4"), ("sq_ring_entries", "u4"), ("sq_flags", "u4"),
    ("sq_dropped", "u4"), ("sq_array", "u4"), ("sq_resv", "u4", 3),
    ("cq_head", "u4"), ("cq_tail", "u4"), ("cq_ring_mask", "u4"), ("cq_ring_entries", "u4"), ("cq_overflow", "u4"),
    ("cq_cqes", "u4"), ("cq_flags", "u4"), ("cq_resv", "u4", 3),
])  # fmt: skip
"""struct io_uring_params, with the two structures of offsets in line: 120 bytes."""
SQE = np.dtype([
    ("opcode", "u1"), ("flags", "u1"), ("ioprio", "u2"), ("fd", "i4"), ("off", "u8"), ("addr", "u8"), ("len", "u4"),
    ("op_flags", "u4"), ("user_data", "u8"), ("buf_index", "u2"), ("personality", "u2"), ("file_index", "u4"),
    ("addr3", "u8"), ("pad", "u8"),
])  # fmt: skip
"""struct io_uring_sqe, a request: 64 bytes."""
CQE = np.dtype([("user_data", "u8"), ("res", "i4"), ("flags", "u4")])
"""struct io_uring_cqe, the result of one: 16 bytes. `res` is a count of bytes or a negative error number."""
IOVEC = np.dtype([("base", "u8"), ("len", "u8")])
FILES_UPDATE = np.dtype([("offset", "u4"), ("resv", "u4"), ("fds", "u8")])
WAIT = np.dtype([("sigmask", "u8"), ("sigmask_bytes", "u4"), ("pad", "u4"), ("timespec", "u8")])
"""struct io_uring_getevents_arg: how `ENTER_EXT_ARG` hands over a time limit."""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.argtypes = [ctypes.c_long] * 7
_libc.syscall.restype = ctypes.c_long


def setup(entries: int, params_at: int) -> int:
    """Make a ring and return its descriptor, which is closed on exec.

    Args:
        entries: requests that it takes at once.
        params_at: address of a `PARAMS`, which the kernel fills.

    Raises:
        OSError: the system refused.
    """
    return _call(_SETUP, entries, params_at, 0, 0, 0, 0)


def enter(ring: int, submit: int, complete: int, flags: int, wait_at: int, wait_bytes: int) -> int:
    """Hand over requests and wait for results. Other threads of Python run meanwhile.

    Args:
        ring: its descriptor.
        submit: requests to take from the submission queue.
        complete: results to wait for.
        flags: `ENTER_*`.
        wait_at: address of a `WAIT`, or 0.
        wait_bytes: its size.

    Returns:
        How many requests the kernel took.

    Raises:
        OSError: the system refused, the time is up (ETIME), or a signal came (EINTR).
    """
    return _call(_ENTER, ring, submit, complete, flags, wait_at, wait_bytes)


def register(ring: int, what: int, at: int, count: int) -> None:
    """Let a ring know memory or files.

    Args:
        ring: its descriptor.
        what: `REGISTER_*` or `UNREGISTER_*`.
        at: address of the argument, or 0.
        count: elements there.

    Raises:
        OSError: the system refused.
    """
    _call(_REGISTER, ring, what, at, count, 0, 0)


def _call(number: int, *arguments: int) -> int:
    result = int(_libc.syscall(number, *arguments))
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result
