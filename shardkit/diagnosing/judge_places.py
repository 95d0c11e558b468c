"""Verdicts about what lies between disks and GPUs: the container, the IOMMU, the PCI bus. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardkit.diagnosing.judge_blocks import on_the_bus
from shardkit.diagnosing.judge_gpu import VIDEO
from shardkit.diagnosing.line import Line
from shardkit.diagnosing.pci import Route, route
from shardkit.diagnosing.texts import numbers

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from shardkit.diagnosing.facts import Controller, Facts, Gpu

__all__ = ["judge_places"]


def judge_places(facts: Facts) -> Iterator[Line]:
    """Yield a line for each thing that is known; without a GPU as facts, for nobody misses anything then."""
    yield from _container(facts)
    yield _iommu(facts)
    yield from _places(facts)
    yield from _binding(facts)


def _container(facts: Facts) -> Iterator[Line]:
    inside, present = facts.host.container, facts.gpu.present
    words = None if inside.capabilities is None else {word.strip() for word in inside.capabilities.split(",")}
    if words is not None:
        whole = bool({"all"} & words) or {"compute", "utility", "video"} <= words
        found = inside.capabilities or "empty"
        if whole or present:
            yield Line("NVIDIA_DRIVER_CAPABILITIES", "ok" if whole else "warn", found, "" if whole else VIDEO)
        else:
            yield Line("NVIDIA_DRIVER_CAPABILITIES", "info", f"{found}: beside a GPU the JPEG engines want video, too")
    if inside.udev:
        yield Line("/run/udev", "ok", "can be read")
    elif present:
        yield Line(
            "/run/udev", "warn", "cannot be read: KvikIO then reads by POSIX and cuFile cannot tell disks apart",
            "docker run -v /run/udev:/run/udev:ro" if inside.kind else "mount -t tmpfs, or start udevd",
        )  # fmt: skip
    else:
        yield Line("/run/udev", "info", "cannot be read: beside a GPU, KvikIO and cuFile would want it")


def _iommu(facts: Facts) -> Line:
    host, kinds = facts.host.iommu, sorted({card.iommu for card in facts.gpu.gpus if card.iommu})
    words = f" ({' '.join(host.options)})" if host.options else ""
    if not host.units and not kinds:
        if host.units is None:
            return Line("IOMMU", "info", f"none, or hidden: there is no /sys/class/iommu{words}")
        seen = ", as the virtual machine shows it" if facts.host.guest else ""
        return Line("IOMMU", "ok", f"off{words}{seen}")
    if kinds and not any(kind.startswith("DMA") for kind in kinds):
        return Line("IOMMU", "ok", f"on, the GPUs pass it unchanged ({', '.join(kinds)}){words}")
    if not kinds:
        present = facts.gpu.present
        unknown = "how it treats the GPUs is not told" if present else "whether it translates, a GPU would tell"
        return Line("IOMMU", "info", f"on{words}; {unknown}")
    return Line(
        "IOMMU", "warn", f"on, translates for the GPUs ({', '.join(kinds)}){words}: a detour from disk to GPU",
        "iommu=pt (or off) on the kernel's command line, and boot",
    )  # fmt: skip


def _places(facts: Facts) -> Iterator[Line]:
    disks = on_the_bus(facts.storage.blocks)
    guest = facts.host.guest is True
    for number, card in enumerate(facts.gpu.gpus):
        yield _place(number, card, disks, guest=guest)
        if card.width and card.max_width and card.width < card.max_width:
            yield Line(
                f"GPU {number} link", "warn", f"{card.width} of {card.max_width} PCIe lanes",
                "look at the riser and the slot (lspci -vv), and at the BIOS's bifurcation",
            )  # fmt: skip


def _place(number: int, card: Gpu, disks: Sequence[Controller], *, guest: bool) -> Line:
    name, found = f"GPU {number}", card.address
    if card.node is not None:
        found += f", NUMA node {card.node}"
    nodes = {disk.node for disk in disks if disk.node is not None}
    if not disks:
        return Line(name, "info", found)
    found += f"; {', '.join(sorted({_way(route(disk.chain, card.chain), disk) for disk in disks}))}"
    if guest:
        return Line(name, "info", f"{found} (as the virtual machine shows it)")
    if card.node is not None and nodes and card.node not in nodes:
        return Line(
            name, "warn", f"{found}; the disk is on node {', '.join(map(str, sorted(nodes)))}",
            f"data on a disk of node {card.node}; for this GPU's process: numactl --cpunodebind={card.node} "
            f"--membind={card.node}",
        )  # fmt: skip
    return Line(name, "ok", found)


def _binding(facts: Facts) -> Iterator[Line]:
    """Judge what numactl, or whoever started this process, bound it to: nothing to choose with a single node."""
    host = facts.host
    if len(host.nodes) < 2 or not host.run_nodes:
        return
    gpus = {card.node for card in facts.gpu.gpus if card.node is not None}
    near = gpus or {disk.node for disk in on_the_bus(facts.storage.blocks) if disk.node is not None}
    kind, _, listed = host.memory_policy.partition(":")
    memory = numbers(listed) if kind.startswith(("bind", "prefer")) else frozenset()
    found = f"runs on {_nodes(host.run_nodes)}" + (f", memory of {_nodes(memory)}" if memory else "")
    lost = [place for place in (set(host.run_nodes), memory) if place and near and not place & near]
    if lost and host.guest is not True:
        node = min(near)
        yield Line(
            "NUMA binding", "warn", f"{found}; the {'GPUs are' if gpus else 'disk is'} on {_nodes(near)}",
            f"numactl --cpunodebind={node} --membind={node}",
        )  # fmt: skip
    elif memory or len(host.run_nodes) < len(host.nodes):
        yield Line("NUMA binding", "info" if lost else "ok", found)
    else:
        yield Line("NUMA binding", "info", f"none: {found}")


def _nodes(which: Iterable[int]) -> str:
    listed = sorted(which)
    return f"node{'s' if len(listed) > 1 else ''} {', '.join(map(str, listed))}"


def _way(way: Route, disk: Controller) -> str:
    texts = {
        "bridge": f"shares bridge {way.through} with {disk.name}",
        "root": f"shares only the root complex {way.through} with {disk.name}",
        "apart": f"another root complex than {disk.name}",
        "unknown": f"no PCI path to {disk.name}",
    }
    return texts[way.kind]
