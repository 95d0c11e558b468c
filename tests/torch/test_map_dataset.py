"""ShardDataset: a plain map-style dataset that torch's own DataLoader takes, in this process and in workers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from shardkit.dataset.shardset import open_dataset
from shardkit.errors import FormatError, IntegrityError
from shardkit.testing.images import COLOURS, Picture, coloured, corners, jpeg_bytes, write_pictures
from shardkit.torch import ShardDataset

COUNT = 30


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_pictures(tmp_path_factory.mktemp("map") / "ds", coloured(COUNT))


def to_tensor(image):
    return torch.from_numpy(np.asarray(image.resize((8, 8))).copy())


def as_is(batch):
    return batch


def test_items_are_bytes_and_label(folder):
    dataset = ShardDataset(folder)
    assert len(dataset) == COUNT
    assert dataset.classes == tuple(f"class-{i}" for i in range(len(COLOURS)))
    with open_dataset(folder) as truth:
        assert [dataset[i] for i in range(COUNT)] == [(sample.jpeg, sample.label) for sample in truth]
    with pytest.raises(IndexError):
        dataset[COUNT]


def test_transforms_get_an_rgb_image_as_it_is_shown_and_the_label(tmp_path):
    jpeg = jpeg_bytes(corners(), orientation=8)
    folder = write_pictures(tmp_path / "ds", [Picture("a", jpeg, None, {})])
    dataset = ShardDataset(folder, transform=lambda image: (image.mode, image.getpixel((2, 2))), target_transform=str)
    (mode, pixel), label = dataset[0]
    assert mode == "RGB"
    assert pixel[1] > 200  # green, the stored top right, is turned to the top left
    assert label == "-1"


@pytest.mark.parametrize("context", [None, "fork", "spawn"])
def test_a_data_loader_takes_it_with_and_without_workers(folder, context):
    dataset = ShardDataset(folder, transform=to_tensor)
    dataset[0]  # opened here already: a worker must not share the descriptor's threads or locks
    options = {} if context is None else {"num_workers": 2, "multiprocessing_context": context}
    labels = []
    for images, batch_labels in DataLoader(dataset, batch_size=10, **options):
        assert images.shape == (10, 8, 8, 3)
        colours = np.array([COLOURS[label] for label in batch_labels])
        assert np.abs(images.float().mean(dim=(1, 2)).numpy() - colours).max() < 3
        labels += batch_labels.tolist()
    assert labels == [i % len(COLOURS) for i in range(COUNT)]


def test_damage_reaches_the_reader(folder, tmp_path):
    pictures = coloured(2)
    path = write_pictures(tmp_path / "ds", pictures)
    with open_dataset(path) as dataset:
        offset = dataset.columns["offset"][1]
    with open(path / "pictures-000000.tar", "r+b") as stream:
        stream.seek(offset + 50)
        stream.write(b"\xff\x00\xff")
    dataset = ShardDataset(path)
    assert dataset[0][0] == pictures[0].jpeg
    with pytest.raises(IntegrityError, match=pictures[1].key):
        dataset[1]


def test_an_image_that_cannot_be_decoded_is_named(tmp_path):
    pictures = coloured(3)
    pictures[1] = Picture("n/bad", pictures[1].jpeg[:-60], 1)
    path = write_pictures(tmp_path / "ds", pictures)
    assert ShardDataset(path)[1][0] == pictures[1].jpeg  # the bytes are what was packed
    with pytest.raises(FormatError, match=r"pictures-000000\.tar:\d+ \[sample n/bad\]"):
        ShardDataset(path, transform=to_tensor)[1]
