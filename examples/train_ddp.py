"""DistributedDataParallel: each process takes its part of every global batch, and the loader finds its rank by itself.

Run `torchrun --nproc-per-node 2 examples/train_ddp.py ds/`.
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import shardkit
from shardkit.torch import ShardLoader


def network(classes: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 16, 5, stride=2), nn.ReLU(), nn.Conv2d(16, 32, 3, stride=2), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, classes),
    )  # fmt: skip


def run(args: argparse.Namespace) -> None:
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    torch.manual_seed(0)  # DDP sends the weights of rank 0 to the others; this makes runs alike
    with shardkit.open(args.dataset) as dataset:
        model = network(len(dataset.classes or ())).to(device)
    model = DistributedDataParallel(model, device_ids=[device.index] if cuda else None)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    # Rank and world size come from torch.distributed, so the process group is there first. Every rank makes the same
    # number of steps: no rank waits for a gradient that never comes.
    with ShardLoader(args.dataset, args.batch_size, size=args.size) as loader:
        for epoch in range(args.epochs):
            loader.set_epoch(epoch)
            sums = torch.zeros(2, device=device)  # loss and samples
            for images, labels in loader:
                images, labels = images.to(device, non_blocking=True), labels.to(device, non_blocking=True)
                loss = nn.functional.cross_entropy(model(images), labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                sums += torch.tensor([loss.item() * len(labels), len(labels)], device=device)
            dist.all_reduce(sums)
            total, samples = sums.tolist()
            if dist.get_rank() == 0:
                print(
                    f"epoch {epoch}: {samples:.0f} samples in {len(loader)} steps of {dist.get_world_size()} ranks, "
                    f"loss {total / samples:.3f}", flush=True,
                )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dataset", help="folder that `shardkit pack` made")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=32, help="of each process")
    parser.add_argument("--size", type=int, default=64, help="pixels of a side")
    args = parser.parse_args()
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    try:
        run(args)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
