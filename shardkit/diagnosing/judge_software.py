"""Verdicts about installed versions. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardkit.diagnosing.judge_gpu import extra_of
from shardkit.diagnosing.line import Line
from shardkit.diagnosing.packages import PACKAGES

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardkit.diagnosing.facts import Facts

__all__ = ["judge_software"]

_FOR_GPU = {"DALI", "nvJPEG", "NVRTC", "cuda-bindings"}
_FOR_LOADER = {"torch": "torch", "DALI": "dali"}
_CUDA_13 = 13000


def judge_software(facts: Facts) -> Iterator[Line]:
    """Yield a line for each package, installed or missed."""
    versions = facts.software.versions
    yield Line("Python", "info", facts.software.python or "not told")
    yield Line("shardkit", "info", versions.get("shardkit", "not told"))
    for name, packages in PACKAGES.items():
        found = {package: versions[package] for package in packages if package in versions}
        yield _line(facts, name, found)


def _line(facts: Facts, name: str, found: dict[str, str]) -> Line:
    has_gpu = facts.gpu.present
    text = ", ".join(version if package.lower() == name.lower() else f"{version} ({package})"
                     for package, version in found.items())  # fmt: skip
    if not found:
        if has_gpu and name in _FOR_GPU:
            return Line(name, "warn", "not installed", f"pip install 'shardkit[{extra_of(facts)}]'")
        if name in _FOR_LOADER:
            return Line(name, "info", f"not installed; pip install 'shardkit[{_FOR_LOADER[name]}]' brings it")
        return Line(name, "info", "not installed")
    if has_gpu and name == "torch" and "+cpu" in text:
        return Line(name, "warn", f"{text}: a build without CUDA", "pip install torch, the build for this CUDA")
    cuda = facts.gpu.cuda.version if facts.gpu.cuda is not None else None
    newest = [package for package in found if package.endswith(("cuda130", "cu13"))]
    if newest and len(newest) == len(found) and cuda is not None and cuda < _CUDA_13:
        return Line(name, "warn", f"{text}: needs a driver for CUDA 13, this one is for {cuda // 1000}",
                    "a driver of 580 or newer, or pip install 'shardkit[gpu]'")  # fmt: skip
    return Line(name, "info", text)
