"""Verdicts about GPUs, their driver and their place beside the disk. Pure."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from shardkit.diagnosing.judge_blocks import bottom
from shardkit.diagnosing.line import Line, size_text
from shardkit.diagnosing.pci import Route, route

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardkit.diagnosing.facts import Controller, CudaAnswer, Facts, Gpu

__all__ = ["extra_of", "judge_gpu"]

_ALL_GPUS = "docker run --gpus all (NVIDIA Container Toolkit)"
_VIDEO = "docker run -e NVIDIA_DRIVER_CAPABILITIES=compute,utility,video"
_CUDA_13_DRIVER = 580


def judge_gpu(facts: Facts) -> Iterator[Line]:
    """Yield a line for each thing that is known; one line where there is no GPU."""
    gpu = facts.gpu
    if not gpu.gpus and not gpu.nodes:
        yield Line("GPUs", "info", "no NVIDIA GPU here: batches are decoded on the CPU")
        return
    names = Counter(card.name or "NVIDIA GPU" for card in gpu.gpus)
    yield Line("GPUs", "ok", ", ".join(f"{count} x {name}" for name, count in names.items()) or "by device files only")
    yield from _driver(facts)
    if gpu.visible is not None:
        yield Line("CUDA_VISIBLE_DEVICES", "info" if gpu.visible else "warn", gpu.visible or "empty: hides every GPU",
                   "" if gpu.visible else "unset CUDA_VISIBLE_DEVICES")  # fmt: skip
    if gpu.cuda is not None:
        yield from _cuda(facts, gpu.cuda)
    yield from _container(facts)
    yield _iommu(facts)
    yield from _places(facts)


def extra_of(facts: Facts) -> str:
    """Return the extra of shardkit that fits the driver: "gpu-cu13" or "gpu"."""
    version = facts.gpu.cuda.version if facts.gpu.cuda is not None else None
    if version is not None:
        return "gpu-cu13" if version >= 13000 else "gpu"
    number = facts.gpu.driver.partition(".")[0]
    return "gpu-cu13" if number.isdigit() and int(number) >= _CUDA_13_DRIVER else "gpu"


def _driver(facts: Facts) -> Iterator[Line]:
    gpu = facts.gpu
    if gpu.driver:
        kind = {True: "open", False: "proprietary", None: ""}[gpu.open_driver]
        yield Line("driver", "ok", f"{gpu.driver} {kind}".strip())
    else:
        holders = ", ".join(sorted({card.driver for card in gpu.gpus if card.driver})) or "none"
        yield Line(
            "driver", "fail", f"NVIDIA's is not loaded; the GPU is held by: {holders}",
            "give the GPU back to the host" if holders == "vfio-pci" else "apt install nvidia-open, and boot",
        )  # fmt: skip
    if not gpu.nodes:
        yield Line("device files", "fail", "/dev/nvidiactl is not here", f"{_ALL_GPUS}; on the host: nvidia-modprobe")


def _cuda(facts: Facts, cuda: CudaAnswer) -> Iterator[Line]:
    if cuda.error:
        yield Line("CUDA", "fail", cuda.error, _cuda_remedy(facts, cuda))
    else:
        version = "" if cuda.version is None else f"{cuda.version // 1000}.{cuda.version % 1000 // 10}, "
        memory = "" if not cuda.memory else f", {size_text(min(cuda.memory))} each"
        count = len(cuda.devices)
        yield Line("CUDA", "ok", f"{version}{count} GPU{'' if count == 1 else 's'}{memory}")
    if cuda.video_error:
        yield Line(
            "libnvcuvid", "warn", f"{cuda.video_error}: the JPEG engines cannot be used without it",
            _VIDEO if facts.host.container.kind else "apt install libnvidia-decode of the driver's version",
        )  # fmt: skip
    else:
        yield Line("libnvcuvid", "ok", "loads")
    if cuda.engines is not None:
        engines, cores = cuda.engines
        if engines:
            yield Line("JPEG engines", "ok", f"{engines} of {cores} core{'' if cores == 1 else 's'}")
        else:
            yield Line("JPEG engines", "info", "none: this GPU decodes by its other units (decoder='dali')")
    elif cuda.engines_error and not cuda.error:
        yield Line("JPEG engines", "warn", cuda.engines_error, _engines_remedy(facts, cuda))


def _cuda_remedy(facts: Facts, cuda: CudaAnswer) -> str:
    if "libcuda" in cuda.error:
        inside = f"{_ALL_GPUS} -e NVIDIA_DRIVER_CAPABILITIES=compute,utility,video"
        return inside if facts.host.container.kind else "apt install libnvidia-compute of the driver's version"
    if "cuda-bindings" in cuda.error:
        return f"pip install 'shardkit[{extra_of(facts)}]'"
    if "did not answer" in cuda.error:
        return "nvidia-smi; if that hangs, too: dmesg | grep -i xid, and boot; else nvidia-persistenced keeps it awake"
    return "nvidia-smi -q, and dmesg | grep -i nvrm"


def _engines_remedy(facts: Facts, cuda: CudaAnswer) -> str:
    if cuda.video_error:
        return "the line above"
    if any(name.startswith("nvidia-nvjpeg") for name in facts.software.versions):
        return "decoder='dali' needs no engines; A100, A30, Hopper, Ada and Blackwell have them"
    return f"pip install 'shardkit[{extra_of(facts)}]'"


def _container(facts: Facts) -> Iterator[Line]:
    inside = facts.host.container
    words = None if inside.capabilities is None else {word.strip() for word in inside.capabilities.split(",")}
    if words is not None:
        whole = bool({"all"} & words) or {"compute", "utility", "video"} <= words
        yield Line(
            "NVIDIA_DRIVER_CAPABILITIES", "ok" if whole else "warn",
            inside.capabilities or "empty", "" if whole else _VIDEO,
        )  # fmt: skip
    if not inside.udev:
        yield Line(
            "/run/udev", "warn", "cannot be read: KvikIO then reads by POSIX and cuFile cannot tell disks apart",
            "docker run -v /run/udev:/run/udev:ro" if inside.kind else "mount -t tmpfs, or start udevd",
        )  # fmt: skip


def _iommu(facts: Facts) -> Line:
    host, kinds = facts.host.iommu, sorted({card.iommu for card in facts.gpu.gpus if card.iommu})
    words = f" ({' '.join(host.options)})" if host.options else ""
    if not host.units and not kinds:
        return Line("IOMMU", "ok", f"off{words}")
    if kinds and not any(kind.startswith("DMA") for kind in kinds):
        return Line("IOMMU", "ok", f"on, the GPUs pass it unchanged ({', '.join(kinds)}){words}")
    if not kinds:
        return Line("IOMMU", "info", f"on{words}; how it treats the GPUs is not told")
    return Line(
        "IOMMU", "warn", f"on, translates for the GPUs ({', '.join(kinds)}){words}: a detour from disk to GPU",
        "iommu=pt (or off) on the kernel's command line, and boot",
    )  # fmt: skip


def _places(facts: Facts) -> Iterator[Line]:
    disks = [part for block in bottom(facts.storage.blocks) for part in block.controllers if part.chain]
    guest = facts.host.guest is True
    for number, card in enumerate(facts.gpu.gpus):
        yield _place(number, card, disks, guest=guest)
        if card.width and card.max_width and card.width < card.max_width:
            yield Line(
                f"GPU {number} link", "warn", f"{card.width} of {card.max_width} PCIe lanes",
                "look at the riser and the slot (lspci -vv), and at the BIOS's bifurcation",
            )  # fmt: skip


def _place(number: int, card: Gpu, disks: list[Controller], *, guest: bool) -> Line:
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


def _way(way: Route, disk: Controller) -> str:
    texts = {
        "bridge": f"shares bridge {way.through} with {disk.name}",
        "root": f"shares only the root complex {way.through} with {disk.name}",
        "apart": f"another root complex than {disk.name}",
        "unknown": f"no PCI path to {disk.name}",
    }
    return texts[way.kind]
