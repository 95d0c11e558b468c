"""Which part of the global batch this process takes."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch.distributed
import torch.utils.data

from shardkit.errors import ConfigError
from shardkit.torch.arguments import whole

__all__ = ["Rank", "require_own_process", "require_rank", "resolve_rank"]


@dataclass(frozen=True, slots=True)
class Rank:
    """One process among those that train together."""

    rank: int
    """0..world_size - 1."""
    world_size: int
    """How many there are; >= 1."""


def resolve_rank(rank: int | None, world_size: int | None) -> Rank:
    """Return the rank that was named, else that of torch.distributed's default group, else the only one.

    Args:
        rank: this process; named together with `world_size` or not at all.
        world_size: number of processes.

    Raises:
        ConfigError: only one of the two is named, they do not fit, or a launcher like torchrun started several
            processes that have not joined yet.
    """
    if (rank is None) != (world_size is None):
        raise ConfigError("rank and world_size are named together", found=f"rank={rank}, world_size={world_size}")
    if rank is not None and world_size is not None:
        world_size, rank = whole("world_size", world_size, 1), whole("rank", rank, 0)
        if rank >= world_size:
            raise ConfigError("there is no such rank", expected=f"0..{world_size - 1}", found=rank)
        return Rank(rank, world_size)
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return Rank(torch.distributed.get_rank(), torch.distributed.get_world_size())
    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise ConfigError(
            "this process was started as one of several, but torch.distributed does not know it",
            expected="init_process_group before the loader is made, or rank= and world_size=",
            found=f"WORLD_SIZE={os.environ['WORLD_SIZE']} in the environment, no process group",
            remedy="otherwise every process would read all samples",
        )
    return Rank(0, 1)


def require_own_process(process: int) -> None:
    """Refuse a process other than the one that made a loader: every worker would read all of the rank's samples.

    Args:
        process: id of the one that made it.

    Raises:
        ConfigError: this one is another, or a worker of torch's DataLoader.
    """
    if process == os.getpid() and torch.utils.data.get_worker_info() is None:
        return
    raise ConfigError(
        "a ShardLoader is used in the process that made it", expected=f"process {process}", found=os.getpid(),
        remedy="iterate over it without a DataLoader, it reads and decodes in threads; or take ShardDataset",
    )  # fmt: skip


def require_rank(found: Rank) -> None:
    """Refuse a rank that was found before this process had joined others: all of them would read the same samples.

    Raises:
        ConfigError: torch.distributed names another one now.
    """
    now = resolve_rank(None, None)
    if now.world_size > 1 and now != found:
        raise ConfigError(
            "the loader was made before this process knew its rank",
            expected=f"rank {now.rank} of {now.world_size}, as torch.distributed says",
            found=f"rank {found.rank} of {found.world_size}",
            remedy="make it after init_process_group, in Lightning in train_dataloader(); or name rank and world_size",
        )
