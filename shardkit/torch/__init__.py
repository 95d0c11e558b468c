"""The loaders for PyTorch, and the only importer of torch."""

from __future__ import annotations

from shardkit.errors import CapabilityError

try:
    import torch  # noqa: F401
except ImportError as error:
    raise CapabilityError(
        "the loaders need PyTorch, which is not installed", found=str(error), remedy="pip install 'shardkit[torch]'"
    ) from error

from shardkit.torch.epoch import LoaderStats
from shardkit.torch.loader import ShardLoader
from shardkit.torch.map_dataset import ShardDataset

__all__ = ["LoaderStats", "ShardDataset", "ShardLoader"]
