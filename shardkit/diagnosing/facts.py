"""What was found on a machine: values only, of which None and "" mean that nothing tells."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from shardkit.diagnosing.packages import PACKAGES

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shardkit.storage.probe import PathFacts

__all__ = [
    "Block", "Container", "Controller", "CuFile", "CudaAnswer", "Facts", "Gpu", "GpuSide", "Host", "HugePages", "Iommu",
    "KvikAnswer", "Limit", "Memory", "Software", "Storage",
]  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """A resource limit of this process."""

    soft: int | None = None
    """Bytes or descriptors; None: no limit."""
    hard: int | None = None
    """To which the process itself may raise it; None: no limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HugePages:
    """Reserved huge pages of one size."""

    bytes_each: int
    total: int
    free: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Host memory."""

    total: int | None = None
    """Bytes of the machine."""
    available: int | None = None
    """Bytes that can be used without swapping, page cache included."""
    group_headroom: int | None = None
    """Bytes left by the control groups' tightest limit; None: no limit."""
    shared: int | None = None
    """Bytes of /dev/shm."""
    huge: tuple[HugePages, ...] = ()
    transparent: str = ""
    """Transparent huge pages: "always", "madvise" or "never"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Iommu:
    """What stands between devices and memory."""

    units: tuple[str, ...] | None = None
    """Entries of /sys/class/iommu; None where there is no such folder."""
    options: tuple[str, ...] = ()
    """Words of the kernel's command line that are about it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Container:
    """Whether this process runs in a container, and what was let in."""

    kind: str = ""
    """"docker", "podman", "kubernetes" or another word; "" outside."""
    udev: bool = True
    """/run/udev can be read."""
    capabilities: str | None = None
    """NVIDIA_DRIVER_CAPABILITIES; None: not set."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """The machine, its kernel and the limits of this process."""

    kernel: str = ""
    """Release, as uname -r."""
    machine: str = ""
    """Architecture, as uname -m."""
    config: Mapping[str, str] = field(default_factory=dict)
    """The kernel's build options that matter here: "y", "m" or "n"."""
    guest: bool | None = None
    """A virtual machine."""
    cpus: int | None = None
    """Processors of the machine."""
    allowed_cpus: int | None = None
    """That this process may run on."""
    quota_cpus: float | None = None
    """Processor time that the control groups allow, in processors; None: no limit."""
    governors: Mapping[str, int] = field(default_factory=dict)
    """Processors by frequency policy."""
    nodes: tuple[int, ...] = ()
    """NUMA nodes."""
    run_nodes: tuple[int, ...] = ()
    """Those with a processor that this process may run on."""
    memory_policy: str = ""
    """From which nodes the process gets memory, in the kernel's words: "default", "bind:0", "interleave:0-1"."""
    uring_switch: int | None = None
    """kernel.io_uring_disabled."""
    uring_refusal: str | None = None
    """Why this process cannot have io_uring; None: it can."""
    polling_refusal: str | None = None
    """Why the kernel may not poll for its requests (SQPOLL); None: it may, or io_uring is refused altogether."""
    seccomp: int | None = None
    """0: no filter, 2: a filter, as a container sets it."""
    lock_capability: bool = False
    """CAP_IPC_LOCK: the limit of locked memory does not count."""
    locked: Limit = field(default_factory=Limit)
    """Bytes of locked memory."""
    files: Limit = field(default_factory=Limit)
    """Open files."""
    memory: Memory = field(default_factory=Memory)
    iommu: Iommu = field(default_factory=Iommu)
    container: Container = field(default_factory=Container)


@dataclass(frozen=True, slots=True, kw_only=True)
class Controller:
    """What a disk hangs on."""

    name: str
    """nvme0, or the disk's own name."""
    chain: tuple[str, ...] = ()
    """PCI addresses from the host bridge down to it; empty where it has none."""
    node: int | None = None
    """NUMA node."""
    transport: str = ""
    """Of NVMe: "pcie", "tcp", "rdma"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """One block device behind the mount, whole: partitions are seen as the disk that they are on."""

    name: str
    """As /sys/block has it: nvme0n1, md0, dm-1."""
    kind: str
    """"nvme", "raid", "mapper", "loop", "virtio", "disk" or "virtual"."""
    detail: str = ""
    """Model, RAID level, or the mapper's name; for a loop the file behind it."""
    scheduler: str = ""
    requests: int | None = None
    """nr_requests."""
    rotational: bool | None = None
    read_ahead_kb: int | None = None
    max_sectors_kb: int | None = None
    max_hw_sectors_kb: int | None = None
    members: tuple[str, ...] = ()
    """Names of the devices below it."""
    controllers: tuple[Controller, ...] = ()
    """Of a disk at the bottom; several with NVMe multipath."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Storage:
    """What lies behind the path."""

    path: str = ""
    """As it was given."""
    asked: str = ""
    """The path, or the file in it that stands for it; maybe a link to what was probed."""
    probed: PathFacts | None = None
    """Of the path, or of a file in it, links followed; None where it may not be looked at."""
    refusal: str = ""
    """Why it may not."""
    blocks: tuple[Block, ...] = ()
    """From the mounted device down to the disks."""
    read_ahead_kb: int | None = None
    """Of the mount itself, which is what counts for network file systems."""
    loose: int = 0
    """JPEG files among the first entries of a folder, or of the first folder in it."""
    stripes: int | None = None
    """Over how many targets Lustre spreads the file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """An NVIDIA GPU, as the PCI bus shows it."""

    address: str
    """PCI address, 0000:17:00.0."""
    chain: tuple[str, ...] = ()
    """PCI addresses from the host bridge down to it."""
    node: int | None = None
    """NUMA node."""
    driver: str = ""
    """Name of the kernel module that has it: "nvidia", "nouveau", "vfio-pci"; "" when none has."""
    name: str = ""
    """Model."""
    width: int | None = None
    """PCIe lanes in use."""
    max_width: int | None = None
    """PCIe lanes that it has."""
    iommu: str = ""
    """Kind of its IOMMU domain: "identity" (passed through), "DMA", "DMA-FQ" (translated)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CudaAnswer:
    """What the libraries of the driver said, in a process of their own."""

    error: str = ""
    """Why CUDA cannot be used; "" when it can."""
    version: int | None = None
    """CUDA version of the driver, 13000 for 13.0."""
    devices: tuple[str, ...] = ()
    """Names of the GPUs that CUDA sees."""
    memory: tuple[int, ...] = ()
    """Bytes of memory of each."""
    video_error: str = ""
    """Why the driver's video library does not load; "" when it does."""
    engines: tuple[int, int] | None = None
    """JPEG engines of the first GPU, and cores of each."""
    engines_error: str = ""
    """Why nvJPEG cannot use them."""
    gds_mode: str = ""
    """What KvikIO would use: "GDS", "cuFile compat" or "POSIX"."""
    gds_error: str = ""
    """Why it could not be asked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KvikAnswer:
    """What KvikIO said, in a process of its own."""

    settings: Mapping[str, str | int | bool] = field(default_factory=dict)
    """As it takes them, by its own names: its defaults, and the environment over them; sizes in bytes."""
    error: str = ""
    """Why it does not tell them; "" when it does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CuFile:
    """GPUDirect Storage's library and what it is told."""

    library: str = ""
    """Path of a libcufile that the system has, links followed: it ends in its version."""
    config: str = ""
    """Path of the configuration that is read; "" when there is none."""
    config_error: str = ""
    """Why it cannot be."""
    allow_compat: bool | None = None
    """Compatibility mode is allowed; None: not said, which means yes."""
    force_compat: bool | None = None
    p2pdma: bool | None = None
    """P2PDMA shall be used; None: not said, which means no."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables CUFILE_* and KVIKIO_*."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuSide:
    """GPUs, their driver, and the ways from storage to them."""

    gpus: tuple[Gpu, ...] = ()
    driver: str = ""
    """Version of the kernel module; "" when it is not loaded."""
    open_driver: bool | None = None
    """It is the open one."""
    registry: str = ""
    """NVreg_RegistryDwords of the module."""
    nodes: bool = False
    """/dev/nvidiactl is there."""
    visible: str | None = None
    """CUDA_VISIBLE_DEVICES; None: not set."""
    nvidia_fs: str = ""
    """Version of the module nvidia-fs; "" when it is not loaded."""
    p2pdma: bool | None = None
    """The kernel has PCI P2PDMA."""
    nvme_multipath: bool | None = None
    """The module nvme_core hides its paths behind one device."""
    cuda: CudaAnswer | None = None
    """None where it was not asked: no GPU."""
    kvikio: KvikAnswer | None = None
    """None where it was not asked: not installed."""
    cufile: CuFile = field(default_factory=CuFile)

    @property
    def present(self) -> bool:
        """There is a GPU, or at least the device files of one."""
        return bool(self.gpus) or self.nodes


@dataclass(frozen=True, slots=True, kw_only=True)
class Software:
    """Versions of what is installed, by the packages' names."""

    python: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)

    def has(self, name: str) -> bool:
        """Return whether a package of `PACKAGES` that brings this is installed."""
        return any(package in self.versions for package in PACKAGES[name])


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Everything that was found."""

    host: Host = field(default_factory=Host)
    storage: Storage = field(default_factory=Storage)
    gpu: GpuSide = field(default_factory=GpuSide)
    software: Software = field(default_factory=Software)
