"""Lightning: the Trainer takes a ShardLoader as it is, does not shard it again, and its checkpoints hold the position.

Run `python examples/train_lightning.py ds/ --folder runs/`; with `--resume runs/last.ckpt` it goes on from there.
"""

from __future__ import annotations

import argparse
from typing import Any

import pytorch_lightning as pl  # pip install pytorch-lightning; in the package lightning it is `lightning.pytorch`
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from torch import nn

import shardkit
from shardkit.torch import ShardLoader


class Classifier(pl.LightningModule):
    def __init__(self, classes: int) -> None:
        super().__init__()
        self.seen = 0
        self.network = nn.Sequential(
            nn.Conv2d(3, 16, 5, stride=2), nn.ReLU(), nn.Conv2d(16, 32, 3, stride=2), nn.ReLU(),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, classes),
        )  # fmt: skip

    def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
        images, labels = batch
        self.seen += len(labels)
        return nn.functional.cross_entropy(self.network(images), labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=3e-3)

    def on_train_epoch_end(self) -> None:
        print(f"epoch {self.current_epoch}: {self.seen} samples on rank {self.global_rank}", flush=True)
        self.seen = 0  # a run that goes on inside an epoch counts what is left of it


class Shards(pl.LightningDataModule):
    """Its state goes into every checkpoint. Lightning's own state of a loader comes back inside an epoch only."""

    def __init__(self, path: str, batch_size: int, size: int) -> None:
        super().__init__()
        self.path, self.batch_size, self.size = path, batch_size, size
        self.restored: dict[str, Any] | None = None

    def train_dataloader(self) -> ShardLoader:
        # Made here, not earlier: now the processes know their ranks.
        self.loader = ShardLoader(self.path, self.batch_size, size=self.size)
        if self.restored is not None:
            self.loader.load_state_dict(self.restored)
        return self.loader

    def state_dict(self) -> dict[str, Any]:
        return self.loader.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.restored = state


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dataset", help="folder that `shardkit pack` made")
    parser.add_argument("--folder", required=True, help="where checkpoints go")
    parser.add_argument("--resume", help="a checkpoint to go on from")
    parser.add_argument("--every", type=int, default=100, help="steps from one checkpoint to the next")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--size", type=int, default=64, help="pixels of a side")
    args = parser.parse_args()

    pl.seed_everything(0)
    with shardkit.open(args.dataset) as dataset:
        model = Classifier(len(dataset.classes or ()))
    checkpoints = ModelCheckpoint(args.folder, save_last=True, every_n_train_steps=args.every)
    trainer = pl.Trainer(max_epochs=args.epochs, callbacks=[checkpoints], logger=False, enable_progress_bar=False)
    trainer.fit(model, datamodule=Shards(args.dataset, args.batch_size, args.size), ckpt_path=args.resume)


if __name__ == "__main__":
    main()
