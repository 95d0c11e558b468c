"""Why io_uring, or a part of it, cannot be had: the system gives a number, people need the switch to turn."""

from __future__ import annotations

import errno
import platform
import resource
from pathlib import Path
from typing import TYPE_CHECKING

from shardkit.errors import CapabilityError
from shardkit.escaping import escape
from shardkit.extent import align_up

if TYPE_CHECKING:
    from shardkit.storage.probe import Mount

__all__ = ["OTHERWISE", "UNFIT", "cause_and_remedy", "no_uring", "not_registered", "require_fit"]

OTHERWISE = "or take io='direct'"

UNFIT = ("fuse", "virtiofs")
"""What the names of file systems begin with that the kernel reads wrongly through io_uring.

Their files can be polled, so io_uring takes them for files that never wait and reads each inside the system call that
hands it over, one after the other. Worse, where the server answers reads itself (FOPEN_DIRECT_IO), a short answer is
continued without moving on in the file: the same bytes arrive twice, and the result is a whole read. Seen on Linux
6.18.
"""

_SWITCH = Path("/proc/sys/kernel/io_uring_disabled")
_LIMITS = {errno.ENOMEM, errno.EPERM}


def no_uring(error: OSError) -> CapabilityError:
    """Return the error for a system call of io_uring that failed."""
    cause, remedy = cause_and_remedy(error)
    return CapabilityError("io_uring cannot be had here", found=cause, remedy=remedy, errno=error.errno)


def cause_and_remedy(error: OSError) -> tuple[str, str]:
    """Return what the number means on this machine, and what to do about it, one clause each."""
    name = errno.errorcode.get(error.errno or 0, "an error")
    if error.errno == errno.EPERM:
        return _forbidden(name, _read(_SWITCH))
    if error.errno == errno.ENOSYS:
        cause = f"{name}: Linux {platform.release()} is older than 5.11, or built without it, or seccomp hides it"
        return cause, f"allow its three system calls in the container's seccomp profile, {OTHERWISE}"
    if error.errno == errno.ENOMEM:
        return f"{name}: {_locked_limit()}", f"raise ulimit -l, {OTHERWISE}"
    return f"{name} ({error.strerror})", f"free descriptors and memory, {OTHERWISE}"


def require_fit(mount: Mount, path: str) -> None:
    """Refuse a file whose file system is in `UNFIT`.

    Raises:
        CapabilityError: it is.
    """
    if mount.file_system.startswith(UNFIT):
        raise CapabilityError(
            "io_uring does not read this file system right",
            path=path,
            expected="one whose files cannot be polled",
            found=escape(mount.file_system),
            remedy="take io='direct' or 'buffered'",
        )


def not_registered(error: OSError, size: int, rings: int) -> str:
    """Return the line to log when memory could not be registered.

    Args:
        error: what the system said.
        size: bytes of the memory.
        rings: how many rings register it, each of which counts against the limit.
    """
    name = errno.errorcode.get(error.errno or 0, "an error")
    need = align_up(size * rings, 1024) // 1024
    remedy = f"; raise it: ulimit -l {need}, or grant CAP_IPC_LOCK" if error.errno in _LIMITS else ""
    return (
        f"io_uring does not register {size} bytes for up to {rings} rings ({name}), so every read pins its pages "
        f"anew; {_locked_limit()}{remedy}"
    )


def _forbidden(name: str, switch: str) -> tuple[str, str]:
    if switch == "2":
        cause = f"{name}: kernel.io_uring_disabled is 2, which forbids it to everybody"
        return cause, f"sysctl kernel.io_uring_disabled=0, {OTHERWISE}"
    if switch == "1":
        group = _read(_SWITCH.with_name("io_uring_group"))
        cause = f"{name}: kernel.io_uring_disabled is 1, and this user is neither root nor in kernel.io_uring_group"
        return f"{cause} ({group})", f"sysctl kernel.io_uring_disabled=0, or join that group, {OTHERWISE}"
    cause = f"{name}: a policy (seccomp of a container, SELinux) forbids its system calls"
    return cause, f"allow io_uring_setup, io_uring_enter and io_uring_register there, {OTHERWISE}"


def _locked_limit() -> str:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    limit = "unlimited" if soft == resource.RLIM_INFINITY else f"{soft // 1024} KiB"
    return f"the limit of locked memory (RLIMIT_MEMLOCK) is {limit}"


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return ""
