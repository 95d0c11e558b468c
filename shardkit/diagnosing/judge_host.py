"""Verdicts about the machine, its kernel and the limits of this process. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardkit.diagnosing.line import Line, kernel_version, size_text

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardkit.diagnosing.facts import Host

__all__ = ["judge_host", "uring_remedy"]

LOCKED_BYTES = 1 << 30
"""What the loader's ring stays under; io_uring registers it once for each of its rings."""
MEMORY_BYTES = 2 << 30
SHARED_BYTES = 1 << 30
OPEN_FILES = 1024
_CALLS = "io_uring_setup, io_uring_enter, io_uring_register"


def judge_host(host: Host) -> Iterator[Line]:
    """Yield a line for each thing that is known."""
    yield _kernel(host)
    yield from _machine(host)
    yield _processors(host)
    yield _governor(host)
    yield Line("NUMA nodes", "info", ", ".join(map(str, host.nodes)) or "not told")
    yield _uring(host)
    yield _polling(host)
    yield _locked(host)
    yield _files(host)
    yield _memory(host)
    yield from _pages(host)
    yield from _shared(host)


def _kernel(host: Host) -> Line:
    found = f"Linux {host.kernel} {host.machine}".strip()
    version = kernel_version(host.kernel)
    if version == (0, 0):
        return Line("kernel", "info", "not told")
    if version < (5, 11):
        return Line("kernel", "warn", f"{found}: too old for io_uring", "boot Linux 6.1 or newer")
    note = "" if version >= (6, 1) else ": too old to state the alignment of direct reads, 4096 is taken"
    return Line("kernel", "ok", found + note)


def _machine(host: Host) -> Iterator[Line]:
    if host.guest is not None:
        yield Line("machine", "info", "virtual machine" if host.guest else "no virtual machine")
    yield Line("container", "info", host.container.kind or "none")


def _processors(host: Host) -> Line:
    found = f"{host.allowed_cpus or '?'} of {host.cpus or '?'} may be used"
    if host.quota_cpus is not None:
        found += f", for the time of {host.quota_cpus:g}"
        if host.allowed_cpus and host.quota_cpus < host.allowed_cpus:
            return Line(
                "processors", "warn", f"{found}: threads that run out of it all stop for the rest of a period",
                "docker run --cpuset-cpus instead of --cpus, or a larger CPU limit of the pod",
            )  # fmt: skip
    return Line("processors", "info", found)


def _governor(host: Host) -> Line:
    if not host.governors:
        return Line("CPU governor", "info", "not told (usual in a virtual machine)")
    found = ", ".join(f"{name} on {count}" for name, count in sorted(host.governors.items()))
    if set(host.governors) == {"performance"}:
        return Line("CPU governor", "ok", found)
    return Line("CPU governor", "warn", found, "cpupower frequency-set -g performance")


def _uring(host: Host) -> Line:
    if host.uring_refusal is None:
        return Line("io_uring", "ok", "can be had")
    return Line("io_uring", "warn", host.uring_refusal, uring_remedy(host))


def _polling(host: Host) -> Line:
    name = "io_uring SQPOLL"
    if host.uring_refusal is not None:
        return Line(name, "info", "no: io_uring cannot be had")
    if host.polling_refusal is not None:
        return Line(name, "info", f"no: {host.polling_refusal}; nothing of shardkit asks for it by itself")
    return Line(name, "info", "can be had, and is left off: a thread of the kernel takes a processor while reads run")


def uring_remedy(host: Host) -> str:
    """Return what to do about an io_uring that is refused."""
    refusal = host.uring_refusal or ""
    if host.uring_switch:
        return "sysctl -w kernel.io_uring_disabled=0"
    if refusal.startswith("ENOMEM"):
        return "ulimit -l unlimited (docker run --ulimit memlock=-1)"
    if host.seccomp == 2:
        return f"docker run --security-opt seccomp=FILE with a profile that allows {_CALLS}"
    if refusal.startswith("ENOSYS"):
        return "boot Linux 5.11 or newer with CONFIG_IO_URING=y"
    return f"allow {_CALLS} in the security policy (SELinux, AppArmor); io='direct' needs none of them"


def _locked(host: Host) -> Line:
    soft = host.locked.soft
    if host.lock_capability:
        return Line("locked memory", "ok", "CAP_IPC_LOCK: no limit counts")
    if soft is None or soft >= LOCKED_BYTES:
        return Line("locked memory", "ok", size_text(soft))
    return Line(
        "locked memory", "warn",
        f"{size_text(soft)}: io_uring's buffers are not registered, so every read pins its pages anew",
        "ulimit -l unlimited, in /etc/security/limits.conf: * - memlock unlimited (docker run --ulimit memlock=-1)",
    )  # fmt: skip


def _files(host: Host) -> Line:
    soft = host.files.soft
    if soft is None or soft >= OPEN_FILES:
        return Line("open files", "ok", "unlimited" if soft is None else str(soft))
    return Line(
        "open files", "warn", f"{soft}: half of it are kept for shards, which are opened again and again",
        "ulimit -n 8192 (docker run --ulimit nofile=8192)",
    )  # fmt: skip


def _memory(host: Host) -> Line:
    memory = host.memory
    known = [size for size in (memory.available, memory.group_headroom) if size is not None]
    if not known:
        return Line("memory", "info", "not told")
    total = "" if memory.total is None else f" of {size_text(memory.total)}"
    group = "" if memory.group_headroom is None else f", {size_text(memory.group_headroom)} left by the control group"
    free = "" if memory.available is None else f"{size_text(memory.available)}{total} available"
    found = f"{free}{group}".removeprefix(", ")
    if min(known) >= MEMORY_BYTES:
        return Line("memory", "ok", found)
    return Line("memory", "warn", found, "a larger limit (docker run --memory), or a smaller batch_size and prefetch")


def _pages(host: Host) -> Iterator[Line]:
    reserved = [pages for pages in host.memory.huge if pages.total]
    text = ", ".join(f"{pages.total} of {size_text(pages.bytes_each)}, {pages.free} free" for pages in reserved)
    yield Line("huge pages", "info", text or "none reserved, so transparent ones are asked for")
    word = host.memory.transparent
    if word == "never" and not reserved:
        yield Line(
            "transparent huge pages", "warn", "never: cold reads of single images took 1.8 times as long",
            "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled",
        )  # fmt: skip
    else:
        yield Line("transparent huge pages", "ok" if word in {"always", "madvise"} else "info", word or "not told")


def _shared(host: Host) -> Iterator[Line]:
    size = host.memory.shared
    if size is None:
        return
    if size >= SHARED_BYTES:
        yield Line("/dev/shm", "ok", size_text(size))
    else:
        yield Line(
            "/dev/shm", "warn", f"{size_text(size)}: little for workers of PyTorch's DataLoader (ShardLoader has none)",
            "docker run --shm-size=8g, or --ipc=host",
        )  # fmt: skip
