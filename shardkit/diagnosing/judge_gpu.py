"""Verdicts about GPUs and their driver. Pure."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from shardkit.diagnosing.line import Line, size_text

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardkit.diagnosing.facts import CudaAnswer, Facts

__all__ = ["VIDEO", "extra_of", "judge_gpu"]

VIDEO = "docker run -e NVIDIA_DRIVER_CAPABILITIES=compute,utility,video"
_ALL_GPUS = "docker run --gpus all (NVIDIA Container Toolkit)"
_CUDA_13_DRIVER = 580


def judge_gpu(facts: Facts) -> Iterator[Line]:
    """Yield a line for each thing that is known; one line where there is no GPU."""
    gpu = facts.gpu
    if not gpu.present:
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
            VIDEO if facts.host.container.kind else "apt install libnvidia-decode of the driver's version",
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
