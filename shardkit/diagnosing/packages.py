"""Which packages are asked for their versions."""

from __future__ import annotations

__all__ = ["PACKAGES"]

PACKAGES = {
    "numpy": ("numpy",),
    "pyarrow": ("pyarrow",),
    "Pillow": ("Pillow",),
    "crc32c": ("crc32c",),
    "xxhash": ("xxhash",),
    "click": ("click",),
    "tqdm": ("tqdm",),
    "matplotlib": ("matplotlib",),
    "torch": ("torch",),
    "DALI": ("nvidia-dali-cuda130", "nvidia-dali-cuda120"),
    "nvImageCodec": ("nvidia-nvimgcodec-cu13", "nvidia-nvimgcodec-cu12"),
    "nvJPEG": ("nvidia-nvjpeg", "nvidia-nvjpeg-cu12"),
    "NVRTC": ("nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu12"),
    "KvikIO": ("kvikio-cu13", "kvikio-cu12", "kvikio"),
    "cuFile": ("nvidia-cufile", "nvidia-cufile-cu12"),
    "cuda-bindings": ("cuda-bindings",),
    "cuda-pathfinder": ("cuda-pathfinder",),
    "NVTX": ("nvtx",),
}
"""Names people know, and the packages that bring them, one for each version of CUDA; conda's KvikIO names none."""
