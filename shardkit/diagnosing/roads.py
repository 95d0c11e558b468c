"""The two roads of GPUDirect Storage, past the CPU, and what stands in the way on each. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from shardkit.diagnosing.judge_blocks import bottom
from shardkit.diagnosing.judge_gpu import extra_of
from shardkit.diagnosing.judge_storage import options_of
from shardkit.diagnosing.line import kernel_version
from shardkit.diagnosing.texts import registry_words
from shardkit.storage.switches import flag

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardkit.diagnosing.facts import Facts

__all__ = ["Obstacle", "Road", "barriers", "has_fast_storage", "roads"]

_LOCAL = {"xfs", "ext4"}
_RDMA = ("lustre", "wekafs", "gpfs", "beegfs")
_REGISTRY = {"rmforcestaticbar1": "1", "rmforcedisableiomapwc": "1"}
_REGISTRY_LINE = 'options nvidia NVreg_RegistryDwords="RMForceStaticBar1=1;RmForceDisableIomapWC=1;"'
P2PDMA_KERNEL = (6, 2)
P2PDMA_DRIVER = 565


class Obstacle(NamedTuple):
    """Something in the way."""

    why: str
    remedy: str


class Road(NamedTuple):
    """A way from storage to GPU memory, and what blocks it; open when nothing does."""

    name: str
    obstacles: tuple[Obstacle, ...]


def roads(facts: Facts) -> tuple[Road, Road]:
    """Return both roads, each with what is in its own way; `barriers` are in the way of both."""
    return (
        Road("nvidia-fs", (*_module(facts), *_file_system(facts, p2pdma=False))),
        Road("P2PDMA", (*_p2pdma(facts), *_file_system(facts, p2pdma=True))),
    )


def barriers(facts: Facts) -> tuple[Obstacle, ...]:
    """Return what is in the way of GPUDirect Storage on either road."""
    return tuple(_barriers(facts))


def has_fast_storage(facts: Facts) -> bool:
    """Return whether the path lies on storage for which GPUDirect Storage was made."""
    probed = facts.storage.probed
    if probed is None:
        return False
    return any(block.kind == "nvme" for block in facts.storage.blocks) or _by_rdma(facts)


def _by_rdma(facts: Facts) -> bool:
    probed = facts.storage.probed
    if probed is None:
        return False
    kind = probed.mount.file_system
    return kind.startswith(_RDMA) or (kind.startswith("nfs") and options_of(probed.mount).get("proto") == "rdma")


def _barriers(facts: Facts) -> Iterator[Obstacle]:
    gpu, software = facts.gpu, facts.software
    if not gpu.present:
        yield Obstacle("there is no NVIDIA GPU", "take a machine that has one")
    elif gpu.cuda is None or gpu.cuda.error:
        yield Obstacle("CUDA cannot be used", "the GPU lines above")
    if not software.has("KvikIO"):
        yield Obstacle("KvikIO is not installed", f"pip install 'shardkit[{extra_of(facts)}]'")
    if not (gpu.cufile.library or software.has("cuFile")):
        yield Obstacle("libcufile is not here", f"pip install 'shardkit[{extra_of(facts)}]'")
    if gpu.cufile.force_compat:
        yield Obstacle("CUFILE_FORCE_COMPAT_MODE is set", "unset CUFILE_FORCE_COMPAT_MODE")
    if flag(gpu.cufile.environment.get("KVIKIO_COMPAT_MODE")):
        yield Obstacle("KVIKIO_COMPAT_MODE=ON", "unset KVIKIO_COMPAT_MODE")
    if not facts.host.container.udev:
        yield Obstacle("/run/udev cannot be read", "docker run -v /run/udev:/run/udev:ro")
    if any(card.iommu.startswith("DMA") for card in gpu.gpus):
        yield Obstacle("the IOMMU translates between devices", "iommu=off or iommu=pt on the kernel's command line")
    probed = facts.storage.probed
    if probed is None or probed.direct_refusal is not None or probed.direct_align == 0:
        yield Obstacle("no direct reads", "the storage lines above")


def _module(facts: Facts) -> Iterator[Obstacle]:
    gpu = facts.gpu
    if not gpu.nvidia_fs:
        yield Obstacle("the module nvidia-fs is not loaded", "apt install nvidia-gds, then modprobe nvidia-fs")
    if gpu.open_driver is False:
        yield Obstacle("the driver is not the open one", "apt install nvidia-open")


def _p2pdma(facts: Facts) -> Iterator[Obstacle]:
    gpu, host = facts.gpu, facts.host
    version = kernel_version(host.kernel)
    if version < P2PDMA_KERNEL:
        yield Obstacle(f"Linux {host.kernel or '?'} is older than 6.2", "boot Linux 6.2 or newer")
    if gpu.p2pdma is False:
        yield Obstacle("the kernel lacks CONFIG_PCI_P2PDMA", "boot a kernel built with CONFIG_PCI_P2PDMA=y")
    if host.machine.startswith(("aarch64", "arm")):
        yield Obstacle("not on Arm", "take nvidia-fs")
    number = gpu.driver.partition(".")[0]
    if gpu.open_driver is False or not number.isdigit() or int(number) < P2PDMA_DRIVER:
        yield Obstacle(
            f"needs the open driver, {P2PDMA_DRIVER} or newer",
            f"apt install nvidia-open (here: {gpu.driver or 'none'})",
        )
    if not _REGISTRY.items() <= registry_words(gpu.registry).items():
        yield Obstacle("static BAR1 is off", f"/etc/modprobe.d/nvidia.conf: {_REGISTRY_LINE}, and boot")
    if gpu.nvme_multipath:
        yield Obstacle("NVMe multipath is on", "/etc/modprobe.d/nvme.conf: options nvme_core multipath=N, and boot")
    if not gpu.cufile.p2pdma:
        yield Obstacle("use_pci_p2pdma is off", "CUFILE_USE_PCIP2PDMA=true, or use_pci_p2pdma in cufile.json")


def _file_system(facts: Facts, *, p2pdma: bool) -> Iterator[Obstacle]:
    probed = facts.storage.probed
    if probed is None:
        return
    mount = probed.mount
    if not p2pdma and _by_rdma(facts):
        return
    if mount.file_system not in _LOCAL:
        kinds = "XFS and ext4 on local NVMe" if p2pdma else "XFS and ext4 on NVMe, NFS over RDMA, Lustre and its kin"
        yield Obstacle(f"not on {mount.file_system}", f"keep shards on {kinds}")
        return
    if mount.file_system == "ext4" and options_of(mount).get("data", "ordered") != "ordered":
        yield Obstacle("ext4 is not mounted with data=ordered", "mount with data=ordered")
    blocks = facts.storage.blocks
    if not blocks or any(block.kind != "nvme" for block in bottom(blocks)):
        yield Obstacle("the path is not on NVMe", "keep shards on an NVMe disk")
    for block in blocks:
        if block.kind == "mapper" and (p2pdma or block.detail.startswith("CRYPT")):
            yield Obstacle(f"{block.name} is a device mapper", "a file system on the bare disk")
        if block.kind == "raid" and (p2pdma or block.detail not in {"raid0", "raid1"}):
            yield Obstacle(f"{block.name} is a RAID", "a file system on the bare disk")
    if p2pdma and any(part.transport not in {"", "pcie"} for block in blocks for part in block.controllers):
        yield Obstacle("the NVMe is on the network", "take nvidia-fs")
