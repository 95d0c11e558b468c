"""Plain PyTorch: train a small network on a packed dataset, on a GPU where there is one, and test it after each epoch.

Run `python examples/train.py ds/ --epochs 3`.
"""

from __future__ import annotations

import argparse

import torch
from torch import nn

import shardkit
from shardkit.torch import ShardLoader


def network(classes: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 16, 5, stride=2), nn.ReLU(), nn.Conv2d(16, 32, 3, stride=2), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, classes),
    )  # fmt: skip


def train(model: nn.Module, loader: ShardLoader, optimizer: torch.optim.Optimizer, device: str) -> float:
    model.train()
    total, count = 0.0, 0
    for images, labels in loader:
        # Every batch is memory of its own, so the copy may still run while the next batch is being decoded.
        images, labels = images.to(device, non_blocking=True), labels.to(device, non_blocking=True)
        loss = nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total, count = total + loss.item() * len(labels), count + len(labels)
    return total / count


@torch.no_grad()
def accuracy(model: nn.Module, loader: ShardLoader, device: str) -> float:
    model.eval()
    right = count = 0
    for images, labels in loader:  # the last batch is a smaller one: every sample counts once
        right += int((model(images.to(device)).argmax(1).cpu() == labels).sum())
        count += len(labels)
    return right / count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dataset", help="folder that `shardkit pack` made")
    parser.add_argument("--test", help="another one, to measure on; default: the same")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--size", type=int, default=64, help="pixels of a side")
    args = parser.parse_args()

    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with shardkit.open(args.dataset) as dataset:
        if dataset.classes is None:
            parser.error("this dataset has no classes to learn")
        model = network(len(dataset.classes)).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    with (
        ShardLoader(args.dataset, args.batch_size, size=args.size, train=True) as loader,
        ShardLoader(args.test or args.dataset, args.batch_size, size=args.size, train=False) as test,
    ):
        for epoch in range(args.epochs):
            loader.set_epoch(epoch)  # decides order and crops: the same epoch is the same in every run
            loss = train(model, loader, optimizer, device)
            print(f"epoch {epoch}: loss {loss:.3f}, accuracy {accuracy(model, test, device):.3f}", flush=True)


if __name__ == "__main__":
    main()
