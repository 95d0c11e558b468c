"""ResNet-50 on 1 to n GPUs: bfloat16, channels_last, DistributedDataParallel, and going on after a kill.

Run `torchrun --nproc-per-node 8 examples/train_resnet.py ds/ --checkpoint last.pt`, or `python examples/train_resnet.py
ds/` with one GPU or none. With `--checkpoint` it saves there, and goes on from there when it is started again.
"""

from __future__ import annotations

import argparse
import os
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import shardkit
from shardkit.torch import ShardLoader


def network(name: str, classes: int) -> nn.Module:
    if name != "tiny":
        import torchvision

        return torchvision.models.get_model(name, num_classes=classes)
    return nn.Sequential(
        nn.Conv2d(3, 16, 5, stride=2), nn.ReLU(), nn.Conv2d(16, 32, 3, stride=2), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, classes),
    )  # fmt: skip


def save(path: str, state: dict[str, Any]) -> None:
    """Write a checkpoint that is there whole or not at all."""
    with open(f"{path}.tmp", "wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(f"{path}.tmp", path)


def run(args: argparse.Namespace, device: torch.device, rank: int, ranks: int) -> None:
    torch.manual_seed(0)
    with shardkit.open(args.dataset) as dataset:
        model = network(args.model, len(dataset.classes or ()))
    model = model.to(device, memory_format=torch.channels_last)
    parallel: nn.Module = model
    if ranks > 1:
        parallel = DistributedDataParallel(model, device_ids=[device.index] if device.type == "cuda" else None)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr * ranks, momentum=0.9, weight_decay=1e-4)
    # On a GPU its batches are there already, in the order that convolutions like.
    with ShardLoader(
        args.dataset, args.batch_size, size=args.size, device=device, channels_last=True, rank=rank, world_size=ranks
    ) as loader:
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs * len(loader))
        kept = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
        if args.checkpoint and os.path.exists(args.checkpoint):
            state = torch.load(args.checkpoint, map_location=device, weights_only=True)
            for name, part in kept.items():
                part.load_state_dict(state[name])
            loader.load_state_dict(state["loader"])  # the same for every rank, and before the first batch
        step = scheduler.last_epoch
        for epoch in range(loader.epoch, args.epochs):  # the first one here is the rest of the one that was cut off
            began, seen = time.perf_counter(), 0
            total = torch.zeros((), device=device)
            for images, labels in loader:
                with torch.autocast(device.type, dtype=torch.bfloat16):
                    loss = nn.functional.cross_entropy(parallel(images), labels)
                optimizer.zero_grad(set_to_none=True)
                loss.backward()
                optimizer.step()
                scheduler.step()
                total += loss.detach()  # stays on the device: asking for the number would make the host wait
                step, seen = step + 1, seen + 1
                if args.checkpoint and rank == 0 and step % args.every == 0:
                    state = {name: part.state_dict() for name, part in kept.items()}
                    save(args.checkpoint, {**state, "loader": loader.state_dict()})
            if rank == 0 and seen:
                mean, seconds = total.item() / seen, time.perf_counter() - began
                rate = seen * args.batch_size * ranks / seconds
                print(f"epoch {epoch}: {seen} steps of {ranks} ranks, loss {mean:.3f}, {rate:.0f} images/s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dataset", help="folder that `shardkit pack` made")
    parser.add_argument("--model", default="resnet50", help="of torchvision; or tiny, which a CPU trains in no time")
    parser.add_argument("--checkpoint", help="file; where it exists, training goes on from it")
    parser.add_argument("--every", type=int, default=500, help="steps from one checkpoint to the next")
    parser.add_argument("--epochs", type=int, default=90)
    parser.add_argument("--batch-size", type=int, default=256, help="of each process")
    parser.add_argument("--size", type=int, default=224, help="pixels of a side")
    parser.add_argument("--lr", type=float, default=0.1, help="for one process; each one more adds as much")
    args = parser.parse_args()

    rank, ranks = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))  # as torchrun sets them
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
        torch.backends.cudnn.benchmark = True
    if ranks > 1:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        run(args, device, rank, ranks)
    finally:
        if ranks > 1:
            dist.destroy_process_group()


if __name__ == "__main__":
    main()
