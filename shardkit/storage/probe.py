"""Facts about a path and this machine that decide how to read. Nothing here chooses."""

from __future__ import annotations

import ctypes
import errno
import os
import stat
import struct
from dataclasses import dataclass
from pathlib import Path

from shardkit.errors import StorageError, from_os_error

__all__ = [
    "Mount",
    "PathFacts",
    "available_memory",
    "cgroup_headroom",
    "find_mount",
    "mount_of",
    "probe",
    "stated_align",
]

_STATX_DIOALIGN = 0x2000
_AT_EMPTY_PATH = 0x1000
_STATX_BYTES = 256
_DIO_ALIGN_AT = 152  # struct statx of linux/stat.h: stx_dio_mem_align and stx_dio_offset_align, both u32
_UNLIMITED = 1 << 60  # cgroup v1 writes "no limit" as a number near 2**63


@dataclass(frozen=True, slots=True, kw_only=True)
class Mount:
    """One mounted file system."""

    file_system: str
    """As the kernel names it: "ext4", "xfs", "nfs4", "tmpfs"; "unknown" where /proc does not tell."""
    point: str
    """Where it is mounted."""
    source: str
    """What is mounted: a device, a server and its export, a name."""
    options: tuple[str, ...] = ()
    """Of this mount, then of the file system: "ro", "noatime", "rsize=1048576"."""
    number: str = ""
    """Of the device, major:minor, as /sys/dev/block has it; the major number is 0 where there is no block device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PathFacts:
    """What one file, or a new file in one folder, can do."""

    path: str
    """The path that was asked about."""
    mount: Mount
    """The file system that holds it, links followed."""
    direct_align: int | None
    """Bytes that statx demands for direct reads; 0 when it says there are none; None when it does not say."""
    direct_refusal: str | None
    """Why opening with O_DIRECT failed; None when it succeeded."""


def probe(path: str | os.PathLike[str]) -> PathFacts:
    """Return the facts about a file, or about a folder by means of a nameless file that is gone at once.

    Raises:
        StorageError: there is no such path, or it may not be looked at.
    """
    name = os.fspath(path)
    try:
        mode = os.stat(name).st_mode
    except OSError as error:
        raise from_os_error(error, "cannot look at a path", path=name) from error
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise StorageError("neither a file nor a folder", path=name, found=f"mode {mode:o}")
    flags = os.O_RDWR | os.O_TMPFILE if stat.S_ISDIR(mode) else os.O_RDONLY
    align, refusal = None, None
    try:
        descriptor = os.open(name, flags | os.O_DIRECT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        refusal = f"{errno.errorcode.get(error.errno or 0, 'error')} ({error.strerror})"
    else:
        align = stated_align(descriptor)
        os.close(descriptor)
    return PathFacts(path=name, mount=mount_of(name), direct_align=align, direct_refusal=refusal)


def stated_align(descriptor: int) -> int | None:
    """Return the bytes that STATX_DIOALIGN demands of offset, length and address for direct reads of an open file.

    0 means that direct reads are not supported. None means that the kernel (before 6.1), the C library or the file
    system does not say; 4096 is right on all of these that are known.
    """
    try:
        statx = ctypes.CDLL(None, use_errno=True).statx
    except (OSError, AttributeError):
        return None
    result = ctypes.create_string_buffer(_STATX_BYTES)
    if statx(descriptor, b"", _AT_EMPTY_PATH, _STATX_DIOALIGN, result) != 0:
        return None
    (mask,) = struct.unpack_from("=I", result, 0)
    memory, offset = struct.unpack_from("=II", result, _DIO_ALIGN_AT)
    if not mask & _STATX_DIOALIGN:
        return None
    return max(memory, offset) if memory and offset else 0


def mount_of(path: str | os.PathLike[str]) -> Mount:
    """Return the mount that holds a path, links followed."""
    try:
        # Not every byte of a mount point is UTF-8.
        text = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:
        text = ""
    found = find_mount(text, os.path.realpath(path))
    return found or Mount(file_system="unknown", point="/", source="unknown")


def find_mount(mountinfo: str, path: str) -> Mount | None:
    r"""Return the mount whose point is the longest leading part of `path`; of equal ones the last, which is on top.

    Args:
        mountinfo: the text of /proc/self/mountinfo.
        path: absolute, without links.

    >>> text = "1 0 8:1 / / rw - ext4 /dev/sda rw\n2 1 0:9 / /a\\040b rw shared:7 - nfs4 host:/x rw\n"
    >>> find_mount(text, "/a b/c").file_system, find_mount(text, "/a bc").file_system
    ('nfs4', 'ext4')
    """
    best: Mount | None = None
    for line in mountinfo.split("\n"):  # the kernel knows one line end, Python's splitlines ten
        left, dash, right = line.partition(" - ")
        fields, tail = left.split(" "), right.split(" ")
        if not dash or len(fields) < 5 or len(tail) < 2:
            continue
        point = _unescape(fields[4])
        inside = path == point or path.startswith(point.rstrip("/") + "/")
        if inside and (best is None or len(point) >= len(best.point)):
            options = tuple(",".join([*fields[5:6], *tail[2:3]]).split(","))
            best = Mount(
                file_system=_unescape(tail[0]),
                point=point,
                source=_unescape(tail[1]),
                options=options,
                number=fields[2],
            )
    return best


def available_memory() -> int | None:
    """Return the bytes that this process can use without swapping, cache included; None when /proc does not say."""
    lines = _read("/proc/meminfo").splitlines()
    kib = next((line.split()[1] for line in lines if line.startswith("MemAvailable:")), None)
    headroom = cgroup_headroom(Path("/sys/fs/cgroup"), _read("/proc/self/cgroup"))
    found = [value for value in (None if kib is None else int(kib) * 1024, headroom) if value is not None]
    return min(found, default=None)


def cgroup_headroom(root: Path, membership: str) -> int | None:
    """Return the bytes left by the control groups' tightest memory limit, page cache counted as free; None: no limit.

    Args:
        root: where the hierarchies are mounted, /sys/fs/cgroup.
        membership: the text of /proc/self/cgroup.
    """
    found = []
    for line in membership.splitlines():
        _, controllers, group = (*line.split(":", 2), "", "")[:3]
        if controllers == "":
            base, names, cache = root, ("memory.max", "memory.current"), "file"
        elif "memory" in controllers.split(","):
            base, names, cache = root / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes"), "total_cache"
        else:
            continue
        folder = base / group.strip("/")
        # Inside a container the group's path can be the host's, which is not there; its root then is the container's.
        for place in (folder, *folder.parents):
            limit, used = (_read(place / name).strip() for name in names)
            if limit.isdigit() and used.isdigit() and int(limit) < _UNLIMITED:
                found.append(max(int(limit) - int(used) + _statistic(place / "memory.stat", cache), 0))
            if place == base:
                break
    return min(found, default=None)


def _statistic(path: Path, key: str) -> int:
    return next((int(line.split()[1]) for line in _read(path).splitlines() if line.split()[:1] == [key]), 0)


def _read(path: str | Path) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return ""


def _unescape(field: str) -> str:
    """Undo the octal escapes of mountinfo: space, tab, newline, backslash."""
    for escaped, character in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        field = field.replace(escaped, character)
    return field
