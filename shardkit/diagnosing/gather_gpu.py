"""Facts about GPUs, their driver, and GPUDirect Storage; no library of NVIDIA's is loaded here."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardkit.diagnosing.facts import CudaAnswer, CuFile, Gpu, GpuSide, Host, KvikAnswer
from shardkit.diagnosing.pci import chain_of
from shardkit.diagnosing.texts import driver_of, field
from shardkit.storage.switches import config_path, config_switch, flag

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shardkit.diagnosing.tree import Tree

__all__ = ["gather_gpu", "has_driver"]

_NVIDIA = "0x10de"
_DISPLAY = ("0x0300", "0x0302")
_DEVICES = "sys/bus/pci/devices"
_PROC = "proc/driver/nvidia"
_LIBRARIES = ("usr/local/cuda*/lib64/libcufile.so.0", "usr/lib/*-linux-gnu/libcufile.so.0", "usr/lib64/libcufile.so.0")
_P2P_SYMBOL = b"pci_p2pdma_add_resource"


def has_driver(tree: Tree) -> bool:
    """Return whether there is anything that CUDA could be asked about: GPUs, or the driver's device file."""
    return tree.exists("dev/nvidiactl") or any(_is_gpu(tree, name) for name in tree.names(_DEVICES))


def gather_gpu(
    tree: Tree, environment: Mapping[str, str], host: Host, *, cuda: CudaAnswer | None, kvikio: KvikAnswer | None
) -> GpuSide:
    """Return the facts.

    Args:
        tree: the machine.
        environment: of this process.
        host: what is known about the kernel.
        cuda: what the libraries of the driver said; None where they were not asked.
        kvikio: what KvikIO said; None where it was not asked.
    """
    version, is_open = driver_of(tree.read(f"{_PROC}/version"))
    gpus = tuple(_gpu(tree, name) for name in tree.names(_DEVICES) if _is_gpu(tree, name))
    return GpuSide(
        gpus=gpus,
        driver=version,
        open_driver=is_open,
        registry=field(tree.read(f"{_PROC}/params"), "RegistryDwords").strip('"'),
        nodes=tree.exists("dev/nvidiactl"),
        visible=environment.get("CUDA_VISIBLE_DEVICES"),
        nvidia_fs=_nvidia_fs(tree),
        p2pdma=_p2pdma(tree, host) if gpus else None,
        nvme_multipath=flag(tree.read("sys/module/nvme_core/parameters/multipath")),
        cuda=cuda,
        kvikio=kvikio,
        cufile=_cufile(tree, environment),
    )


def _is_gpu(tree: Tree, address: str) -> bool:
    folder = f"{_DEVICES}/{address}"
    return tree.read(f"{folder}/vendor") == _NVIDIA and tree.read(f"{folder}/class").startswith(_DISPLAY)


def _gpu(tree: Tree, address: str) -> Gpu:
    folder = f"{_DEVICES}/{address}"
    node = tree.number(f"{folder}/numa_node")
    driver = tree.resolve(f"{folder}/driver")
    return Gpu(
        address=address,
        chain=chain_of(tree.resolve(folder)),
        node=node if node is not None and node >= 0 else None,
        driver=driver.rpartition("/")[2],
        name=field(tree.read(f"{_PROC}/gpus/{address}/information"), "Model"),
        width=tree.number(f"{folder}/current_link_width"),
        max_width=tree.number(f"{folder}/max_link_width"),
        iommu=tree.read(f"{folder}/iommu_group/type"),
    )


def _nvidia_fs(tree: Tree) -> str:
    version = tree.read("proc/driver/nvidia-fs/version")
    if version:
        return field(version, "version") or version.splitlines()[0]
    loaded = any(line.split(" ")[0] == "nvidia_fs" for line in tree.read("proc/modules").splitlines())
    return (tree.read("sys/module/nvidia_fs/version") or "loaded") if loaded else ""


def _p2pdma(tree: Tree, host: Host) -> bool | None:
    """Return whether the kernel can do it: its configuration says so, or else a symbol of it is there."""
    if host.config:
        return host.config.get("CONFIG_PCI_P2PDMA") == "y"
    symbols = tree.raw("proc/kallsyms")
    return _P2P_SYMBOL in symbols if symbols else None


def _cufile(tree: Tree, environment: Mapping[str, str]) -> CuFile:
    given = environment.get("CUFILE_ENV_PATH_JSON")
    config = config_path(environment)
    text = tree.read(config.lstrip("/"))
    error = "there is no such file" if given and not text else ""
    switches: dict[str, bool | None] = {}
    for name in ("allow_compat_mode", "use_pci_p2pdma"):
        try:
            switches[name] = config_switch(text, name) if text else None
        except ValueError as problem:
            error, switches[name] = f"not JSON: {problem}", None
    allowed = flag(environment.get("CUFILE_ALLOW_COMPAT_MODE"))
    used = flag(environment.get("CUFILE_USE_PCIP2PDMA"))
    libraries = [place for pattern in _LIBRARIES for place in tree.glob(pattern)]
    return CuFile(
        library=f"/{tree.resolve(libraries[0]) or libraries[0]}" if libraries else "",
        config=config if text or given else "",
        config_error=error,
        allow_compat=switches["allow_compat_mode"] if allowed is None else allowed,
        force_compat=flag(environment.get("CUFILE_FORCE_COMPAT_MODE")),
        p2pdma=switches["use_pci_p2pdma"] if used is None else used,
        environment={
            name: value for name, value in sorted(environment.items()) if name.startswith(("CUFILE_", "KVIKIO_"))
        },
    )
