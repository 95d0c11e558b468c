"""A small whole dataset to export, and the same with splits."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import pytest

from shardkit.format.manifest import dump_manifest, load_manifest
from shardkit.testing.datasets import draft_dataset

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from shardkit.format.manifest import Manifest


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    """Three shards, of three, two and one sample; labels and metadata."""
    return draft_dataset((3, 2, 1)).write(tmp_path / "ds")


@pytest.fixture
def change_manifest() -> Callable[..., Manifest]:
    """Return a function that seals a changed manifest into a dataset."""

    def change(path: Path, **fields: object) -> Manifest:
        file = path / "manifest.json"
        manifest = dataclasses.replace(load_manifest(file.read_bytes()), **fields)
        file.write_text(dump_manifest(manifest))
        return manifest

    return change


@pytest.fixture
def split_dataset(dataset: Path, change_manifest: Callable[..., Manifest]) -> Path:
    """The dataset with two shards for training and one for validation."""
    train = ("tiny-000000.tar", "tiny-000002.tar")
    change_manifest(dataset, splits={"train": train, "val": ("tiny-000001.tar",)})
    return dataset
