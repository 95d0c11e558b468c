"""Which decoder works for a loader, and its making."""

from __future__ import annotations

import contextlib
import dataclasses
import textwrap
from dataclasses import dataclass
from importlib import metadata
from typing import TYPE_CHECKING

from shardkit.errors import CapabilityError, ConfigError, ShardkitError
from shardkit.pipeline.cpu import PillowDecoder
from shardkit.pipeline.dali import DaliDecoder, open_dali
from shardkit.pipeline.dali_augmenter import Augmenter
from shardkit.pipeline.dali_mixed import DaliBackend
from shardkit.pipeline.gpu_decoder import GpuDecoder, one_share
from shardkit.pipeline.hardware import decode_threads, hardware_share, largest_sides, mean_pixels
from shardkit.pipeline.kernels import CudaKernels
from shardkit.pipeline.nvjpeg import NvjpegBackend, slab_budget
from shardkit.pipeline.nvjpeg_library import NvjpegLibrary, open_nvjpeg
from shardkit.pipeline.workers import Workers
from shardkit.storage.cuda import open_device
from shardkit.torch.gpu import allocator
from shardkit.torch.measured import Memory, better, kind_of, memory_file, rates_of
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
_SHORT = 120  # characters of a reason that is told in passing
_MEASURED_PACKAGES = (
    *("shardkit", "nvidia-nvjpeg-cu12", "nvidia-nvjpeg", "nvidia-dali-cuda120", "nvidia-dali-cuda130"),
    "torch",
)


@dataclass(frozen=True, slots=True)
class Chosen:
    """A decoder, and why it is this one."""

    decoder: Decoder
    reason: str
    """One clause with the facts that decided."""

    def __str__(self) -> str:
        """Return the decoder's name, and where nobody has named it, the beginning of why; one line."""
        name = repr(self.decoder.name)
        return name if self.reason == _DEMANDED else f"{name} (auto: {textwrap.shorten(self.reason, _SHORT)})"


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
    name: str, spec: DecodeSpec, device: CudaDevice, samples: Samples, *, batch_size: int, device_bytes: bool,
    memory: Memory | None = None,
) -> Chosen:  # fmt: skip
    """Return a decoder on a GPU, or on the CPU where that was demanded.

    Args:
        name: one of `shardkit.torch.arguments.DECODERS`.
        spec: what becomes of the images.
        device: the GPU.
        samples: what is decoded.
        batch_size: the most images of a batch.
        device_bytes: as for `choose_name`.
        memory: of measurements; None for the user's.

    Raises:
        CapabilityError: a library or the engines are not here.
    """
    if name == "cpu":
        return Chosen(cpu_decoder(name, spec, batch_size=batch_size).decoder, _DEMANDED)
    compiling = Workers(1, "shardkit-compile")  # NVRTC works while libraries are opened, which takes longer
    try:
        made = _Making(spec, device, samples, compiling.submit(CudaKernels, device), batch_size)
        chosen, reason = made.choose(name, device_bytes=device_bytes)
        if name == "auto" and chosen == "nvjpeg" and not device_bytes:
            return made.measured(memory or Memory(memory_file()), reason)
        return Chosen(made.decoder(chosen), reason)
    finally:
        compiling.close()


class _Making:
    """The decoders of a GPU that one dataset can have."""

    def __init__(
        self, spec: DecodeSpec, device: CudaDevice, samples: Samples, kernels: Outcome[CudaKernels], batch_size: int
    ) -> None:
        self._spec, self._device, self._samples = spec, device, samples
        self._kernels, self._batch_size = kernels, batch_size
        self._library: NvjpegLibrary | None = None

    def choose(self, name: str, *, device_bytes: bool) -> tuple[str, str]:
        """Decide by facts; opens nvJPEG only where it may be the answer."""
        refusal, share = None, hardware_share(self._samples)
        # Not opened in vain: it takes half a second, and memory of the GPU.
        if name == "nvjpeg" or (name == "auto" and (device_bytes or share >= MOSTLY)):
            try:
                self._library = open_nvjpeg(self._device)
            except CapabilityError as error:
                if name == "nvjpeg" or device_bytes:
                    raise
                refusal = str(error)
        return choose_name(name, share=share, refusal=refusal, device_bytes=device_bytes)

    def measured(self, memory: Memory, otherwise: str) -> Chosen:
        """Return nvjpeg or dali, whichever is faster, by a measurement that is made once; nvjpeg where none can be."""
        key = self._key()
        rates = memory.rates(key)
        if rates is None:
            with memory.alone():  # the ranks of a host share its processors
                rates = memory.rates(key)
                if rates is None:
                    try:
                        rates = self._measure()
                    except ShardkitError as error:  # one of them alone may have room
                        return Chosen(self.decoder("nvjpeg"), f"{otherwise}; it is not compared with dali: {error}")
                    memory.keep(key, rates)
        name, reason = better(rates)
        return Chosen(self.decoder(name), reason)

    def _measure(self) -> dict[str, float]:
        plain = dataclasses.replace(self._spec, augment=None)  # a user's function is called once a graph
        with contextlib.ExitStack() as stack:
            made = dict[str, GpuDecoder]()
            for name in ("dali", "nvjpeg"):  # dali may not be installed
                made[name] = self.decoder(name, plain)
                stack.callback(made[name].close)
            return rates_of(made, self._samples, self._device, batch_size=self._batch_size)

    def decoder(self, name: str, spec: DecodeSpec | None = None) -> GpuDecoder:
        """Make a decoder."""
        spec, device = spec or self._spec, self._device
        dali = open_dali() if name == "dali" or spec.recipe.graph else None
        backends: Sequence[Backend]
        shares = one_share
        if name == "nvjpeg":
            engines = self._engines()
            backends, shares = engines, engines[0].shares
        else:
            assert dali is not None
            backends = [
                DaliBackend(
                    dali, device, batch_size=self._batch_size, threads=spec.thread_count,
                    largest=largest_sides(self._samples), pinned=True,
                )
            ]  # fmt: skip

        def augmenter(epoch: int) -> Augmenter:
            assert dali is not None, "only recipes with a graph are augmented"
            return Augmenter(dali, spec, batch_size=self._batch_size, epoch=epoch, device=device)

        stream = device.stream(urgent=True)
        return GpuDecoder(
            spec, backends, device, self._kernels.wait(), allocator(device, stream), batch_size=self._batch_size,
            shares=shares, augmenter=augmenter, stream=stream,
        )  # fmt: skip

    def _engines(self) -> list[NvjpegBackend]:
        """Return back ends with memory of their own each, as many as keep the engines busy."""
        assert self._library is not None, "it was chosen"
        threads = decode_threads(self._samples)
        libraries = [self._library, *(open_nvjpeg(self._device) for _ in range(threads - 1))]
        budget = slab_budget(self._samples, self._batch_size, slabs=3 if threads == 1 else 2)
        return [NvjpegBackend(library, self._device, budget_bytes=budget) for library in libraries]

    def _key(self) -> str:
        """Return what a measurement holds for: GPU, processors, versions, kind of images."""
        versions = [f"{name} {version}" for name in _MEASURED_PACKAGES if (version := _version(name))]
        machine = f"{self._device.name}, {self._spec.thread_count} processors, CUDA {self._device.cuda_version}"
        kind = kind_of(mean_pixels(self._samples), self._samples.total_payload / max(len(self._samples), 1))
        return "; ".join([machine, *versions, f"{kind} in batches of {self._batch_size}"])


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""
