"""What a measurement was made on: processors, memory, file system, versions."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from pathlib import Path
from typing import Any

from shardkit.benching.clock import shards_of
from shardkit.storage.probe import available_memory, probe
from shardkit.version import __version__

__all__ = ["describe_machine", "versions"]

_PACKAGES = (
    "numpy", "pyarrow", "Pillow", "torch", "torchvision", "nvidia-dali-cuda120", "nvidia-dali-cuda130",
    "cuda-bindings", "kvikio-cu12", "kvikio-cu13", "nvidia-nvjpeg", "nvidia-nvjpeg-cu12", "nvidia-cufile",
    "nvidia-cufile-cu12",
)  # fmt: skip


def describe_machine(dataset: str) -> dict[str, Any]:  # Any: JSON values
    """Return facts about the machine, and the file system that holds the first shard of a dataset, links followed.

    Raises:
        StorageError: there is no such folder, or no such shard.
    """
    asked = next(iter(shards_of(dataset)), dataset)
    lies_at = os.path.realpath(asked) if os.path.islink(asked) else asked
    mount = probe(lies_at).mount
    return {
        "processor": _processor(), "processors": len(os.sched_getaffinity(0)), "linux": platform.release(),
        "memory_available": available_memory(), "load": round(os.getloadavg()[0], 2),
        "file_system": mount.file_system, "mount": mount.point, "asked": asked, "lies_at": lies_at,
    }  # fmt: skip


def versions() -> dict[str, str]:
    """Return the versions of shardkit, Python and those packages that are installed."""
    found = {"shardkit": __version__, "python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8", "replace").splitlines()
    except OSError:
        lines = []
    name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return name or platform.machine()
