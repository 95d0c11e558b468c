"""Which decoder works for a loader, and its making."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardkit.errors import CapabilityError, ConfigError
from shardkit.pipeline.cpu import PillowDecoder
from shardkit.pipeline.dali import DaliDecoder, open_dali
from shardkit.pipeline.dali_augmenter import Augmenter
from shardkit.pipeline.dali_mixed import DaliBackend
from shardkit.pipeline.gpu_decoder import GpuDecoder, one_share
from shardkit.pipeline.hardware import decode_threads, hardware_share, largest_sides
from shardkit.pipeline.kernels import CudaKernels
from shardkit.pipeline.nvjpeg import NvjpegBackend, slab_budget
from shardkit.pipeline.nvjpeg_library import NvjpegLibrary, open_nvjpeg
from shardkit.pipeline.workers import Workers
from shardkit.storage.cuda import open_device
from shardkit.torch.gpu import allocator
from shardkit.torch.resize import resize

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardkit.dataset.samples import Samples
    from shardkit.pipeline.decoder import Decoder, DecodeSpec
    from shardkit.pipeline.gpu_backend import Backend
    from shardkit.pipeline.workers import Outcome
    from shardkit.storage.cuda import CudaDevice

__all__ = ["MOSTLY", "Chosen", "choose_name", "cpu_decoder", "gpu_decoder", "open_gpu"]

MOSTLY = 0.98
"""Share of images that the engines take from which on "auto" is nvjpeg: Pillow decodes the rest there, and keeps up."""

_DEMANDED = "demanded by name"


@dataclass(frozen=True, slots=True)
class Chosen:
    """A decoder, and why it is this one."""

    decoder: Decoder
    reason: str
    """One clause with the facts that decided."""


def cpu_decoder(name: str, spec: DecodeSpec, *, batch_size: int) -> Chosen:
    """Return a decoder on the CPU.

    Raises:
        ConfigError: "nvjpeg" is none.
        CapabilityError: DALI is not installed.
    """
    if name == "nvjpeg":
        raise ConfigError("nvJPEG's engines are a GPU's", remedy="take device='cuda', or decoder='dali' or 'cpu'")
    why = _DEMANDED if name != "auto" else "on a CPU DALI is the fastest"
    if name == "cpu":
        return Chosen(PillowDecoder(spec, resize=resize), why)
    return Chosen(DaliDecoder(spec, batch_size=batch_size, resize=resize), why)


def choose_name(name: str, *, share: float, refusal: str | None, device_bytes: bool) -> tuple[str, str]:
    """Decide which decoder works on a GPU; pure.

    Args:
        name: what was asked for.
        share: of the images that the engines take, 0 to 1.
        refusal: why nvJPEG cannot be had; None when it can.
        device_bytes: whether encoded images are wanted in GPU memory (io="gds", cache_gpu).

    Returns:
        "nvjpeg", "dali" or "cpu", and the reason.
    """
    if name != "auto":
        return name, _DEMANDED
    if refusal is not None and not device_bytes:
        return "dali", refusal
    if device_bytes:
        return "nvjpeg", "io='gds' and cache_gpu bring encoded images into GPU memory, and no other decoder takes them"
    taken = f"the JPEG engines take {share:.1%} of the images"
    return ("nvjpeg" if share >= MOSTLY else "dali"), f"{taken}, and nvjpeg is for {MOSTLY:.0%} and more"


def open_gpu(number: int, *, decoder: str) -> CudaDevice:
    """Return a GPU. Where DALI is going to decode it is imported meanwhile, which takes longer than CUDA's start.

    Raises:
        CapabilityError: as `open_device`; not for DALI, which is told when it is needed.
    """
    if decoder != "dali":
        return open_device(number)
    importing = Workers(1, "shardkit-import")
    try:
        importing.submit(open_dali)
        return open_device(number)
    finally:
        importing.close()


def gpu_decoder(
    name: str, spec: DecodeSpec, device: CudaDevice, samples: Samples, *, batch_size: int, device_bytes: bool
) -> Chosen:
    """Return a decoder on a GPU, or on the CPU where that was demanded.

    Args:
        name: one of `shardkit.torch.arguments.DECODERS`.
        spec: what becomes of the images.
        device: the GPU.
        samples: what is decoded.
        batch_size: the most images of a batch.
        device_bytes: as for `choose_name`.

    Raises:
        CapabilityError: a library or the engines are not here.
    """
    if name == "cpu":
        return Chosen(cpu_decoder(name, spec, batch_size=batch_size).decoder, _DEMANDED)
    compiling = Workers(1, "shardkit-compile")  # NVRTC works while libraries are opened, which takes longer
    try:
        kernels = compiling.submit(CudaKernels, device)
        return _gpu_decoder(name, spec, device, samples, kernels, batch_size=batch_size, device_bytes=device_bytes)
    finally:
        compiling.close()


def _gpu_decoder(
    name: str, spec: DecodeSpec, device: CudaDevice, samples: Samples, kernels: Outcome[CudaKernels], *,
    batch_size: int, device_bytes: bool,
) -> Chosen:  # fmt: skip
    library: NvjpegLibrary | None = None
    refusal, share = None, hardware_share(samples)
    # Not opened in vain: it takes half a second, and memory of the GPU.
    if name == "nvjpeg" or (name == "auto" and (device_bytes or share >= MOSTLY)):
        try:
            library = open_nvjpeg(device)
        except CapabilityError as error:
            if name == "nvjpeg" or device_bytes:
                raise
            refusal = str(error)
    chosen, reason = choose_name(name, share=share, refusal=refusal, device_bytes=device_bytes)
    dali = open_dali() if chosen == "dali" or spec.recipe.graph else None
    backends: Sequence[Backend]
    shares = one_share
    if chosen == "nvjpeg" and library is not None:
        engines = _nvjpeg_backends(library, device, samples, batch_size)
        backends, shares = engines, engines[0].shares
    else:
        assert dali is not None
        largest = largest_sides(samples)
        backends = [
            DaliBackend(dali, device, batch_size=batch_size, threads=spec.thread_count, largest=largest, pinned=True)
        ]

    def augmenter(epoch: int) -> Augmenter:
        assert dali is not None, "only recipes with a graph are augmented"
        return Augmenter(dali, spec, batch_size=batch_size, epoch=epoch, device=device)

    stream = device.stream(urgent=True)
    decoder = GpuDecoder(
        spec, backends, device, kernels.wait(), allocator(device, stream), batch_size=batch_size, shares=shares,
        augmenter=augmenter, stream=stream,
    )  # fmt: skip
    return Chosen(decoder, reason)


def _nvjpeg_backends(
    first: NvjpegLibrary, device: CudaDevice, samples: Samples, batch_size: int
) -> list[NvjpegBackend]:
    """Return back ends with memory of their own each, as many as keep the engines busy."""
    threads = decode_threads(samples)
    libraries = [first, *(open_nvjpeg(device) for _ in range(threads - 1))]
    budget = slab_budget(samples, batch_size, slabs=3 if threads == 1 else 2)
    return [NvjpegBackend(library, device, budget_bytes=budget) for library in libraries]
