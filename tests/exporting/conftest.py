"""A small whole dataset to export, and the same with splits."""

from __future__ import annotations

import dataclasses
import itertools
import tarfile
from typing import TYPE_CHECKING

import pytest

from shardkit.format.manifest import dump_manifest, load_manifest
from shardkit.testing.datasets import draft_dataset
from shardkit.testing.foreign import COMMANDS, foreign_files, write_by_command, write_tar

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from shardkit.format.manifest import Manifest


PYTHONS = {"gnu": tarfile.GNU_FORMAT, "ustar": tarfile.USTAR_FORMAT, "pax": tarfile.PAX_FORMAT}


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


def write_shard(path: Path, writer: str, files: dict[str, bytes]) -> bool:
    """Write a shard by another tool; return whether it is installed."""
    if writer in PYTHONS:
        write_tar(path, files, PYTHONS[writer])
    elif writer == "webdataset":
        wds = pytest.importorskip("webdataset")
        with open(path, "wb") as file, wds.TarWriter(file, encoder=False) as out:
            for key, group in itertools.groupby(files, lambda name: name.split(".")[0]):
                out.write({"__key__": key} | {one.split(".", 1)[1]: files[one] for one in group})
    else:
        return write_by_command(path, files, COMMANDS[writer])
    return True


@pytest.fixture
def every_writer(tmp_path: Path) -> Path:
    """A folder with a shard of seven samples of each tool that is installed."""
    (tmp_path / "data").mkdir()
    for number, writer in enumerate([*PYTHONS, *COMMANDS, "webdataset"]):
        write_shard(tmp_path / "data" / f"{writer.replace(' ', '-')}.x.tar", writer, foreign_files(7 * number))
    assert len(list((tmp_path / "data").iterdir())) >= len(PYTHONS) + 1
    return tmp_path / "data"


@pytest.fixture
def wids_samples(tmp_path: Path) -> Callable[[Path], dict[str, dict[str, bytes]]]:
    """Return a function that returns key to {extension: payload} of every sample that wids reads by an index."""
    wids = pytest.importorskip("wids")

    def read(index: Path) -> dict[str, dict[str, bytes]]:
        dataset = wids.ShardListDataset(str(index), cache_dir=str(tmp_path / "wids-cache"), transformations=[])
        samples = (dataset[number] for number in range(len(dataset)))
        return {
            sample["__key__"]: {name[1:]: value.read() for name, value in sample.items() if name[0] == "."}
            for sample in samples
        }

    return read
