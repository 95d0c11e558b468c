"""What is known of GPUDirect Storage before cuFile is touched, and what its driver says afterwards; all of it pure."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shardkit.storage.probe import Mount

__all__ = [
    "COMPAT", "GDS", "POSIX", "PROPERTIES_BYTES", "DriverFacts", "HostFacts", "delivered_by", "driver_facts",
    "gds_refusal", "mode_of", "mount_refusal",
]  # fmt: skip

GDS = "GDS"
"""The storage's DMA writes into the GPU's memory."""
COMPAT = "cuFile compat"
"""cuFile reads into host memory of its own and copies."""
POSIX = "POSIX"
"""KvikIO reads into host memory of its own and copies, without cuFile."""

PROPERTIES_BYTES = 256
"""Room for CUfileDrvProps_t, which has 56 in libcufile 1.20."""

_PROPERTIES = struct.Struct("=IIQQIIIIIIII")
_P2P = 4  # CU_FILE_P2P_SUPPORTED, a bit of fflags
_LOCAL = {"ext4", "xfs"}
_REMOTE = {
    # file system: bit of dstatusflags, which says whether nvidia-fs found its client
    "lustre": 0, "wekafs": 1, "nfs": 2, "nfs4": 2, "gpfs": 3, "beegfs": 9, "scatefs": 12, "virtiofs": 13, "panfs": 14,
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFacts:
    """What the kernel and the installation say, without cuFile."""

    nvidia_fs: str | None
    """Version of the kernel module; None when it is not loaded."""
    p2pdma: bool
    """Whether cuFile is told to go without the module, by the kernel's own PCI peer-to-peer transfers."""
    missing: str | None
    """Why KvikIO cannot be had; None when it is installed."""
    mounts: tuple[Mount, ...]
    """The mounts of the data."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverFacts:
    """What cuFile's driver says, once it is open."""

    nvidia_fs: tuple[int, int]
    """Version that it talks to; (0, 0) when to none."""
    status: int
    """Bits of the storage that nvidia-fs serves, CU_FILE_*_SUPPORTED."""
    p2p: bool
    """Whether it can do PCI peer-to-peer transfers."""
    batch: int
    """Reads of one batch."""
    p2pdma: bool = False
    """Whether it was told to do so without nvidia-fs."""


def driver_facts(properties: bytes, *, p2pdma: bool = False) -> DriverFacts:
    """Return what CUfileDrvProps_t says.

    Args:
        properties: `PROPERTIES_BYTES` that cuFileDriverGetProperties filled.
        p2pdma: the parameter use_pci_p2pdma.
    """
    major, minor, _, _, status, _, features, _, _, _, batch, _ = _PROPERTIES.unpack_from(properties)
    return DriverFacts(
        nvidia_fs=(major, minor), status=status, p2p=bool(features >> _P2P & 1), batch=max(batch, 1),
        p2pdma=p2pdma,
    )  # fmt: skip


def mode_of(facts: DriverFacts | None) -> str:
    """Return how files are read at best: `GDS`, `COMPAT`, or `POSIX` where cuFile is not used."""
    if facts is None:
        return POSIX
    return GDS if facts.nvidia_fs != (0, 0) or (facts.p2pdma and facts.p2p) else COMPAT


def gds_refusal(facts: HostFacts) -> str | None:
    """Return why the data cannot come by GPUDirect Storage, in one clause, or None when nothing here forbids it."""
    if facts.missing is not None:
        return facts.missing
    if facts.nvidia_fs is None and not facts.p2pdma:
        return "the kernel module nvidia-fs is not loaded, and cuFile is not told to use PCI P2PDMA"
    refusals = (mount_refusal(mount, p2pdma_only=facts.nvidia_fs is None) for mount in facts.mounts)
    return next((refusal for refusal in refusals if refusal is not None), None)


def mount_refusal(mount: Mount, *, p2pdma_only: bool, status: int | None = None) -> str | None:
    """Return why GPUDirect Storage does not serve a mount, in one clause, or None when it may.

    Args:
        mount: where files lie.
        p2pdma_only: there is no nvidia-fs; the kernel alone serves local NVMe drives only, and no RAID.
        status: what `DriverFacts.status` says; None when the driver was not asked.
    """
    name = mount.file_system
    if name in _REMOTE:
        if p2pdma_only:
            return f"PCI P2PDMA does not serve {name}"
        served = status is None or status >> _REMOTE[name] & 1
        return None if served else f"cuFile was not set up for {name}"
    if name not in _LOCAL:
        return f"GPUDirect Storage does not serve {name}"
    device = mount.source.rpartition("/")[2]
    if not device.startswith("nvme") and (p2pdma_only or not device.startswith(("md", "sd"))):
        return f"{name} lies on {device}, which is no local NVMe drive"
    modes = [option for option in mount.options if option.startswith("data=")]
    if name == "ext4" and modes and modes[-1] != "data=ordered":
        return f"ext4 is mounted with {modes[-1]}, and GPUDirect Storage wants data=ordered"
    return None


def delivered_by(mode: str, length: int, *, threshold: int, has_direct: bool, goes_direct: bool) -> tuple[str, str]:
    """Return the way of the whole pages of a read by KvikIO, and of the rest: "gds", "cufile compat", "direct", ...

    Args:
        mode: of the file.
        length: bytes of the read.
        threshold: bytes below which KvikIO reads by itself.
        has_direct: the file could be opened with O_DIRECT.
        goes_direct: KvikIO's own reads use that where they can.
    """
    if mode != POSIX and has_direct and length >= threshold:
        return ("gds", "gds") if mode == GDS else ("cufile compat", "cufile compat")
    return ("direct" if has_direct and goes_direct else "page cache", "page cache")
