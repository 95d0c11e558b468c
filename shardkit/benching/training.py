"""How much a loader slows training down: the GPU's idle time between steps, and the host's wait for batches."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections import deque
from typing import TYPE_CHECKING, Any, TypeAlias

from shardkit.benching.clock import Clock
from shardkit.benching.loading import gpu_number, open_loader
from shardkit.benching.resnet import resnet50, training_step

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

    from shardkit.benching.case import Case, Settings

__all__ = ["idle_share", "measure_training"]

_Batches: TypeAlias = "Iterator[tuple[torch.Tensor, torch.Tensor]]"
_AHEAD = 2  # steps that the host is ahead of the GPU, as in a loop that looks at an older loss
_CLASSES = 1000


def measure_training(case: Case, settings: Settings) -> dict[str, Any]:  # Any: JSON values
    """Train ResNet-50 for a while on what a loader gives; `case.decoder` also "synthetic" and "rival"."""
    import torch

    import shardkit.torch  # noqa: F401 - before CUDA starts, as programs do: it tells the driver how many queues to make

    device = torch.device("cuda", gpu_number(settings))
    torch.cuda.set_device(device)
    step = training_step(resnet50(_CLASSES), settings.device)
    batches, told = _batches(case, settings)
    pending: deque[torch.cuda.Event] = deque()
    begun: list[torch.cuda.Event] = []
    ended: list[torch.cuda.Event] = []

    def one() -> float:
        """Make a step; return the seconds that the host waited for the batch."""
        asked = time.perf_counter()
        images, labels = next(batches)
        waited = time.perf_counter() - asked
        begun.append(_mark())
        step(images, _numbers(labels, device))
        ended.append(_mark())
        pending.append(ended[-1])
        if len(pending) > _AHEAD:
            pending.popleft().synchronize()
        return waited

    for _ in range(max(settings.warm_up, 1)):
        one()
    # No pause here, in which batches would be made that are not timed: each step waits for an older one as it is.
    begun.clear()
    ended.clear()
    clock, waited, steps = Clock(), 0.0, 0
    while steps < settings.batches or (not settings.batches and clock.seconds < settings.seconds):
        waited, steps = waited + one(), steps + 1
    result = clock.stop(steps * settings.batch_size)
    torch.cuda.synchronize(device)
    result |= {"host_wait": waited / result["seconds"], "gpu_idle": idle_share(*_times(begun, ended))}
    told_now = dict(told())
    batches.close()  # type: ignore[attr-defined]
    return result | told_now


def _mark() -> torch.cuda.Event:
    import torch

    event: torch.cuda.Event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def _numbers(labels: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return class numbers; of DALI's texts of digits the first byte, which costs the same."""
    numbers = labels if labels.ndim == 1 else labels[:, 0]
    return numbers.to(device, non_blocking=True).long().clamp(0, _CLASSES - 1)


def _times(begun: list[torch.cuda.Event], ended: list[torch.cuda.Event]) -> tuple[list[float], list[float]]:
    """Return the seconds at which steps began and ended, on the GPU's clock."""
    zero = begun[0]
    return (
        [zero.elapsed_time(event) / 1e3 for event in begun],
        [zero.elapsed_time(event) / 1e3 for event in ended],
    )


def idle_share(begun: list[float], ended: list[float]) -> float:
    """Return the share of the time in which no step was running.

    Args:
        begun: seconds at which each step began: its batch was there, and the one before was done.
        ended: seconds at which each ended.

    >>> idle_share([0.0, 2.0], [1.0, 4.0])
    0.25
    """
    total = ended[-1] - begun[0]
    gaps = sum(max(start - end, 0.0) for start, end in zip(begun[1:], ended[:-1], strict=True))
    return gaps / total if total > 0 else 0.0


def _batches(case: Case, settings: Settings) -> tuple[_Batches, Any]:  # Any: returns what a loader says of itself
    import torch

    if case.decoder == "synthetic":
        shape = (settings.batch_size, 3, settings.size, settings.size)
        images = torch.randn(shape, device=settings.device, dtype=torch.float16).to(memory_format=torch.channels_last)
        labels = torch.randint(_CLASSES, (settings.batch_size,), device=settings.device)
        return (pair for pair in itertools.repeat((images, labels))), dict
    if case.decoder == "rival":
        from shardkit.benching.rival import rival_batches
        from shardkit.dataset.shardset import open_dataset

        with open_dataset(settings.dataset) as dataset:
            labelled = dataset.classes is not None
        found = rival_batches(settings, threads=case.threads or 8, labelled=labelled, channels_last=True)
        return found, dict
    channels_last = (("channels_last", True),)
    loader = open_loader(dataclasses.replace(case, options=channels_last + case.options), settings)

    def epochs() -> _Batches:
        with loader:
            while True:
                yield from loader

    def told() -> dict[str, Any]:
        stats = loader.stats()
        return {"io": stats.io, "io_reason": stats.io_reason, "decoder": stats.decoder}

    return epochs(), told
