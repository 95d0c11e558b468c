"""The loaders for PyTorch, and the only importer of torch."""

from __future__ import annotations

import os

from shardkit.errors import CapabilityError

# The driver reads it once, when it starts, which is long before a loader is made. With its default of 8 queues the
# decoder's some twenty streams share queues with the training step's, and small pieces of decoding wait behind it.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "16")

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
