"""Facts about the machine, its kernel and the limits of this process."""

from __future__ import annotations

import gzip
import os
import platform
import resource
from collections import Counter
from typing import TYPE_CHECKING

from shardkit.diagnosing.facts import Container, Host, HugePages, Iommu, Limit, Memory
from shardkit.diagnosing.texts import (
    build_options,
    chosen,
    container_kind,
    field,
    iommu_words,
    meminfo,
    numbers,
    quota,
)
from shardkit.storage.probe import cgroup_headroom
from shardkit.storage.uring import polling_refusal, uring_refusal

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from shardkit.diagnosing.tree import Tree

__all__ = ["gather_host"]

_OPTIONS = ("CONFIG_IO_URING", "CONFIG_PCI_P2PDMA", "CONFIG_TRANSPARENT_HUGEPAGE")
_IPC_LOCK = 1 << 14
_NODES = "sys/devices/system/node"
_HUGE = "sys/kernel/mm/hugepages"
_TRANSPARENT = "sys/kernel/mm/transparent_hugepage/enabled"


def gather_host(tree: Tree, environment: Mapping[str, str]) -> Host:
    """Return the facts; limits, processors and io_uring are those of this process, whatever the tree."""
    status = tree.read("proc/self/status")
    kernel = tree.read("proc/sys/kernel/osrelease") or platform.release()
    effective = field(status, "CapEff")
    refusal, allowed, nodes = uring_refusal(), os.sched_getaffinity(0), _nodes(tree)
    return Host(
        kernel=kernel,
        machine=platform.machine(),
        config=build_options(_kernel_config(tree, kernel), _OPTIONS),
        guest=_is_guest(tree),
        cpus=len(numbers(tree.read("sys/devices/system/cpu/online"))) or None,
        allowed_cpus=len(allowed),
        quota_cpus=_quota(tree),
        governors=dict(Counter(filter(None, map(tree.read, _governors(tree))))),
        nodes=nodes,
        run_nodes=tuple(node for node in nodes if numbers(tree.read(f"{_NODES}/node{node}/cpulist")) & allowed),
        memory_policy=_memory_policy(tree),
        uring_switch=tree.number("proc/sys/kernel/io_uring_disabled"),
        uring_refusal=refusal,
        polling_refusal=polling_refusal() if refusal is None else None,
        seccomp=int(mode) if (mode := field(status, "Seccomp")).isdigit() else None,
        lock_capability=bool(int(effective, 16) & _IPC_LOCK) if _is_hex(effective) else False,
        locked=_limit(resource.RLIMIT_MEMLOCK),
        files=_limit(resource.RLIMIT_NOFILE),
        memory=_memory(tree),
        iommu=_iommu(tree),
        container=_container(tree, environment),
    )


def _kernel_config(tree: Tree, kernel: str) -> str:
    for place in (f"boot/config-{kernel}", f"lib/modules/{kernel}/build/.config", f"lib/modules/{kernel}/config"):
        text = tree.read(place)
        if text:
            return text
    try:
        return gzip.decompress(tree.raw("proc/config.gz")).decode("utf-8", "replace")
    except (OSError, EOFError):
        return ""


def _is_guest(tree: Tree) -> bool | None:
    if tree.exists("sys/hypervisor/type"):
        return True
    text = tree.read("proc/cpuinfo")
    flags = field(text, "flags").split()
    return "hypervisor" in flags if flags else None


def _governors(tree: Tree) -> Iterator[str]:
    for name in tree.names("sys/devices/system/cpu"):
        if name.startswith("cpu") and name[3:].isdigit():
            yield f"sys/devices/system/cpu/{name}/cpufreq/scaling_governor"


def _nodes(tree: Tree) -> tuple[int, ...]:
    names = tree.names(_NODES)
    return tuple(sorted(int(name[4:]) for name in names if name.startswith("node") and name[4:].isdigit()))


def _memory_policy(tree: Tree) -> str:
    """Return what numactl has set, which the kernel tells for each piece of memory without a policy of its own."""
    line = tree.read("proc/self/numa_maps").partition("\n")[0]
    words = line.replace("prefer (many)", "prefer").split()  # the one binding whose name has two words
    return words[1] if len(words) > 1 else ""


def _quota(tree: Tree) -> float | None:
    """Return the tightest limit of the control groups, from this process's up to the root."""
    found = []
    for line in tree.read("proc/self/cgroup").splitlines():
        _, controllers, group = (*line.split(":", 2), "", "")[:3]
        if controllers and "cpu" not in controllers.split(","):
            continue
        base = "sys/fs/cgroup/cpu" if controllers else "sys/fs/cgroup"
        parts = group.strip("/").split("/")
        for depth in range(len(parts), -1, -1):
            folder = "/".join([base, *filter(None, parts[:depth])])
            old = f"{tree.read(f'{folder}/cpu.cfs_quota_us')} {tree.read(f'{folder}/cpu.cfs_period_us')}"
            found.append(quota(old if controllers else tree.read(f"{folder}/cpu.max")))
    return min((value for value in found if value is not None), default=None)


def _limit(which: int) -> Limit:
    soft, hard = (None if value == resource.RLIM_INFINITY else value for value in resource.getrlimit(which))
    return Limit(soft=soft, hard=hard)


def _memory(tree: Tree) -> Memory:
    text = tree.read("proc/meminfo")
    return Memory(
        total=meminfo(text, "MemTotal"),
        available=meminfo(text, "MemAvailable"),
        group_headroom=cgroup_headroom(tree.root / "sys/fs/cgroup", tree.read("proc/self/cgroup")),
        shared=_shared(tree),
        huge=tuple(filter(None, (_huge(tree, name) for name in tree.names(_HUGE)))),
        transparent=chosen(tree.read(_TRANSPARENT)),
    )


def _shared(tree: Tree) -> int | None:
    try:
        status = os.statvfs(tree.root / "dev/shm")
    except OSError:
        return None
    return status.f_blocks * status.f_frsize


def _huge(tree: Tree, name: str) -> HugePages | None:
    size = name.removeprefix("hugepages-").removesuffix("kB")
    total, free = (tree.number(f"{_HUGE}/{name}/{file}") for file in ("nr_hugepages", "free_hugepages"))
    if not size.isdigit() or total is None:
        return None
    return HugePages(bytes_each=int(size) * 1024, total=total, free=free or 0)


def _iommu(tree: Tree) -> Iommu:
    units = tree.names("sys/class/iommu") if tree.exists("sys/class/iommu") else None
    return Iommu(units=units, options=iommu_words(tree.read("proc/cmdline")))


def _container(tree: Tree, environment: Mapping[str, str]) -> Container:
    marks = {"docker": ".dockerenv", "podman": "run/.containerenv"}
    kind = next((kind for kind, mark in marks.items() if tree.exists(mark)), "")
    if "KUBERNETES_SERVICE_HOST" in environment:
        kind = "kubernetes"
    return Container(
        kind=kind or container_kind(tree.read("proc/self/cgroup"), tree.read("run/systemd/container")),
        udev=tree.readable("run/udev"),
        capabilities=environment.get("NVIDIA_DRIVER_CAPABILITIES"),
    )


def _is_hex(text: str) -> bool:
    return bool(text) and all(digit in "0123456789abcdefABCDEF" for digit in text)
