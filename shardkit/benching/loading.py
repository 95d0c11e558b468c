"""The loader of a row."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from shardkit.benching.case import Case, Settings
    from shardkit.torch.loader import ShardLoader

__all__ = ["gpu_number", "open_loader", "settle"]


def open_loader(case: Case, settings: Settings) -> ShardLoader:
    """Return the loader of a row; io, decoder and order that are empty are the loader's defaults.

    Raises:
        ShardkitError: as the loader.
    """
    from shardkit.torch.loader import ShardLoader

    options: dict[str, Any] = {  # Any: arguments of every type
        "size": settings.size, "device": settings.device, "dtype": settings.dtype, "io": case.io or "auto",
        "decoder": case.decoder or "auto", "shuffle": case.shuffle or None, "threads": case.threads or None,
        **dict(case.options),
    }  # fmt: skip
    return ShardLoader(settings.dataset, settings.batch_size, **options)


def settle(settings: Settings) -> Callable[[], None]:
    """Return what waits for all work of the settings' device."""
    if not settings.on_gpu:
        return lambda: None
    import torch

    return lambda: torch.cuda.synchronize(settings.device)


def gpu_number(settings: Settings) -> int:
    """Return which GPU the settings name."""
    return int(settings.device.partition(":")[2] or 0)
