"""Machines that are not here: their facts, and pictures of their /proc and /sys."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from shardkit.diagnosing.facts import (
    Block,
    Container,
    Controller,
    CudaAnswer,
    CuFile,
    Facts,
    Gpu,
    GpuSide,
    Host,
    Iommu,
    KvikAnswer,
    Limit,
    Memory,
    Software,
    Storage,
)
from shardkit.storage.probe import Mount, PathFacts

GIB = 1 << 30
XFS = Mount(file_system="xfs", point="/data", source="/dev/nvme0n1p1", options=("rw", "noatime", "rw"), number="259:1")

SETTINGS = {"compat_mode": "AUTO", "num_threads": 1, "task_size": 4 << 20, "auto_direct_io_read": False}


class Picture:
    """A folder that looks like the root of a machine."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def write(self, path, text):
        (self.root / path).parent.mkdir(parents=True, exist_ok=True)
        (self.root / path).write_text(text)

    def link(self, path, to):
        place = self.root / path
        place.parent.mkdir(parents=True, exist_ok=True)
        (self.root / to).mkdir(parents=True, exist_ok=True)
        place.symlink_to(Path(*[".."] * (len(Path(path).parts) - 1)) / to)

    def files(self, folder, **values):
        for name, value in values.items():
            self.write(f"{folder}/{name}", f"{value}\n")

    def disk(self, place, number, *, queue):
        """Put a disk there, named as its folder is."""
        name = place.rpartition("/")[2]
        self.files(f"{place}/queue", **queue)
        self.link(f"sys/dev/block/{number}", place)
        self.link(f"sys/class/block/{name}", place)

    def partition(self, place, number):
        self.write(f"{place}/partition", "1\n")
        self.link(f"sys/dev/block/{number}", place)
        self.link(f"sys/class/block/{place.rpartition('/')[2]}", place)


@pytest.fixture
def picture(tmp_path):
    root = tmp_path / "root"
    root.mkdir()
    return Picture(root)


def path_facts(mount, *, align=512, refusal=None):
    return PathFacts(path="/data/a.tar", mount=mount, direct_align=align, direct_refusal=refusal)


def nvme(name="nvme0n1", *, node=0, bus="15", **values):
    chain = (f"pci0000:{bus}", f"0000:{bus}:01.0", f"0000:{int(bus, 16) + 1:02x}:00.0")
    controller = Controller(name=name[:5], chain=chain, node=node, transport="pcie")
    defaults = {
        "scheduler": "none", "requests": 1023, "rotational": False, "read_ahead_kb": 128, "max_sectors_kb": 1280,
        "max_hw_sectors_kb": 2048, "controllers": (controller,),
    }  # fmt: skip
    return Block(name=name, kind="nvme", detail="a model", **{**defaults, **values})


def gpu(bus="15", *, node=0, device=2, **values):
    chain = (f"pci0000:{bus}", f"0000:{bus}:01.0", f"0000:{int(bus, 16) + device:02x}:00.0")
    defaults = {
        "address": chain[-1], "chain": chain, "node": node, "driver": "nvidia", "name": "NVIDIA H200", "width": 16,
        "max_width": 16,
    }  # fmt: skip
    return Gpu(**{**defaults, **values})


def all_packages(cuda="13"):
    return {
        "shardkit": "0.1.0", "numpy": "2.4", "pyarrow": "26.0", "Pillow": "13.0", "crc32c": "2.9", "xxhash": "4.1",
        "torch": "2.13.0+cu130", f"nvidia-dali-cuda{cuda}0": "2.4.0", f"nvidia-nvimgcodec-cu{cuda}": "0.9",
        "nvidia-nvjpeg": "13.3", "nvidia-cuda-nvrtc": "13.5", f"kvikio-cu{cuda}": "26.10", "nvidia-cufile": "1.20",
        "cuda-bindings": "13.5",
    }  # fmt: skip


@pytest.fixture
def nvme_box():
    """Eight GPUs, four on each of two nodes, with P2PDMA set up; the data on an NVMe disk beside the first GPU."""
    host = Host(
        kernel="6.8.0-45-generic", machine="x86_64", config={"CONFIG_PCI_P2PDMA": "y"}, guest=False, cpus=192,
        allowed_cpus=192, governors={"performance": 192}, nodes=(0, 1), run_nodes=(0, 1), uring_switch=0, seccomp=0,
        locked=Limit(), files=Limit(soft=1 << 20, hard=1 << 20), iommu=Iommu(units=()),
        memory=Memory(total=2048 * GIB, available=1900 * GIB, shared=1024 * GIB, transparent="madvise"),
    )  # fmt: skip
    gpus = (gpu("15"), *(gpu(bus) for bus in ("37", "48", "59")))
    gpus += tuple(gpu(bus, node=1) for bus in ("97", "a7", "b7", "c7"))
    side = GpuSide(
        gpus=gpus, driver="580.159", open_driver=True, registry="RMForceStaticBar1=1;RmForceDisableIomapWC=1;",
        nodes=True, p2pdma=True, nvme_multipath=False, kvikio=KvikAnswer(settings=SETTINGS),
        cufile=CuFile(config="/etc/cufile.json", p2pdma=True),
        cuda=CudaAnswer(
            version=13000, devices=("NVIDIA H200",) * 8, memory=(140 * GIB,) * 8, engines=(7, 1), gds_mode="GDS"
        ),
    )  # fmt: skip
    storage = Storage(path="/data", probed=path_facts(XFS), blocks=(nvme(),), read_ahead_kb=128)
    return Facts(host=host, storage=storage, gpu=side, software=Software(python="3.12.3", versions=all_packages()))


@pytest.fixture
def nfs_client(nvme_box):
    """The same machine; the data on a mount of a server, with the options that a mount gets when nobody cares."""
    options = ("rw", "relatime", "rw", "vers=4.2", "rsize=262144", "wsize=262144", "proto=tcp", "timeo=600")
    mount = Mount(file_system="nfs4", point="/net", source="server:/x", options=options, number="0:52")
    return replace(nvme_box, storage=Storage(path="/net", probed=path_facts(mount, align=None), read_ahead_kb=128))


@pytest.fixture
def container(nvme_box):
    """The same machine seen from a container that was started without a thought."""
    host = replace(
        nvme_box.host, uring_refusal="EPERM: a policy forbids its system calls", seccomp=2,
        locked=Limit(soft=8 << 20, hard=8 << 20), quota_cpus=16.0,
        memory=replace(nvme_box.host.memory, shared=64 << 20, group_headroom=GIB),
        container=Container(kind="docker", udev=False, capabilities="compute,utility"),
    )  # fmt: skip
    missing = "libnvcuvid.so.1: cannot open shared object file: No such file or directory"
    cuda = replace(
        nvme_box.gpu.cuda, video_error=missing, engines=None, engines_error="nvJPEG cannot use JPEG engines here",
        gds_mode="POSIX",
    )  # fmt: skip
    mount = Mount(file_system="overlay", point="/", source="overlay", options=("rw", "relatime"), number="0:61")
    storage = Storage(path="/data", probed=path_facts(mount), blocks=())
    return replace(nvme_box, host=host, gpu=replace(nvme_box.gpu, cuda=cuda), storage=storage)


@pytest.fixture
def no_gpu(nvme_box):
    return replace(nvme_box, gpu=GpuSide(), software=Software(python="3.12.3", versions={"shardkit": "0.1.0"}))
