"""Survive a kill: model, optimizer and place in the epoch are saved together, and a restart goes on from there.

Run `python examples/resume.py ds/ --checkpoint last.pt`, kill it at any moment, and run it again.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import torch
from torch import nn

import shardkit
from shardkit.torch import ShardLoader


def network(classes: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 16, 5, stride=2), nn.ReLU(), nn.Conv2d(16, 32, 3, stride=2), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, classes),
    )  # fmt: skip


def save(path: str, state: dict[str, Any]) -> None:
    """Write a checkpoint that is there whole or not at all, also after a power cut."""
    with open(f"{path}.tmp", "wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(f"{path}.tmp", path)  # until here the last checkpoint is the one before


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dataset", help="folder that `shardkit pack` made")
    parser.add_argument("--checkpoint", required=True, help="file; where it exists, training goes on from it")
    parser.add_argument("--every", type=int, default=100, help="steps from one checkpoint to the next")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--size", type=int, default=64, help="pixels of a side")
    args = parser.parse_args()

    torch.manual_seed(0)
    with shardkit.open(args.dataset) as dataset:
        model = network(len(dataset.classes or ()))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    with ShardLoader(args.dataset, args.batch_size, size=args.size, fields=("key",)) as loader:
        step = 0
        if os.path.exists(args.checkpoint):
            state = torch.load(args.checkpoint, weights_only=True)
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
            loader.load_state_dict(state["loader"])  # before the first batch
            step = state["step"]
        # The loader counts its epochs: the first one here is the rest of the epoch that was cut off.
        for epoch in range(loader.epoch, args.epochs):
            for images, labels, extras in loader:
                loss = nn.functional.cross_entropy(model(images), labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                step += 1
                print(f"epoch {epoch} step {step} loss {loss.item():.6f} {' '.join(extras['key'])}", flush=True)
                if step % args.every == 0:
                    # The loader's state is the batch that was handed out last, however many it has read ahead.
                    weights = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                    save(args.checkpoint, {**weights, "loader": loader.state_dict(), "step": step})


if __name__ == "__main__":
    main()
