"""ShardDataset: a plain map-style dataset that torch's own DataLoader takes, in this process and in workers."""

from __future__ import annotations

import io
import logging
import os
import pickle
import re
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader, Subset

import shardkit
from shardkit.dataset.shardset import open_dataset
from shardkit.errors import ConfigError, FormatError, IntegrityError, StorageError
from shardkit.testing.foreign import foreign_files, write_tar
from shardkit.testing.images import COLOURS, Picture, coloured, corners, jpeg_bytes, write_pictures
from shardkit.torch import ShardDataset

COUNT, PER_SHARD = 30, 10
# Python 3.12 on warns of every fork in a process with threads; a dataset that has read in the parent has some.
forks = pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_pictures(tmp_path_factory.mktemp("map") / "ds", coloured(COUNT), per_shard=PER_SHARD)


@pytest.fixture(scope="module")
def truth(folder):
    """Every sample, read one by one."""
    with open_dataset(folder) as dataset:
        return list(dataset)


@pytest.fixture
def damaged(tmp_path):
    """A dataset of four: 1 is not what was packed, 2 was packed as it is and cannot be decoded."""
    pictures = coloured(4)
    pictures[2] = Picture("n/cut", pictures[2].jpeg[:-60], 2)
    path = write_pictures(tmp_path / "damaged", pictures)
    with open_dataset(path) as dataset:
        offset = dataset.columns["offset"][1]
    with open(path / "pictures-000000.tar", "r+b") as stream:
        stream.seek(offset + 50)
        stream.write(b"\xff\x00\xff")
    return path, pictures


def to_tensor(image):
    return torch.from_numpy(np.asarray(image.resize((8, 8))).copy())


def shrink(pixels):
    return torch.nn.functional.interpolate(pixels[None].float(), (8, 8))[0].byte().permute(1, 2, 0)


def as_is(batch):
    return batch


def without_bad(batch):
    return [item for item in batch if item is not None]


def pixels_of(jpeg):
    return np.asarray(Image.open(io.BytesIO(jpeg)).convert("RGB"))


def open_shards():
    targets = []
    for entry in Path("/proc/self/fd").iterdir():
        try:
            targets.append(entry.readlink())
        except FileNotFoundError:  # the descriptor of this very listing
            continue
    return [path.name for path in targets if path.suffix == ".tar"]


def count_reads(act):
    """Return how many system calls that read a function makes, in all threads."""
    first, second = read_calls(), read_calls()
    act()
    return read_calls() - second - (second - first)


def read_calls():
    return int(re.search(r"^syscr: (\d+)$", Path("/proc/self/io").read_text(), re.M)[1])


def test_items_are_bytes_and_label(folder, truth):
    dataset = ShardDataset(folder)
    assert len(dataset) == COUNT
    assert dataset.classes == tuple(f"class-{i}" for i in range(len(COLOURS)))
    assert [dataset[i] for i in range(COUNT)] == [(sample.jpeg, sample.label) for sample in truth]
    assert dataset[-1] == dataset[COUNT - 1]


@pytest.mark.parametrize("index", [COUNT, -COUNT - 1])
def test_there_is_no_sample_outside(folder, index):
    dataset = ShardDataset(folder)
    with pytest.raises(IndexError, match=f"sample {index} of a dataset with {COUNT} samples"):
        dataset[index]
    with pytest.raises(IndexError):
        dataset.__getitems__([0, index])


@pytest.mark.parametrize("index", [1.0, "1", slice(2)])
def test_an_index_is_a_whole_number(folder, index):
    with pytest.raises(TypeError):
        ShardDataset(folder)[index]


@pytest.mark.parametrize("kind", [list, tuple, np.array, torch.tensor])
def test_a_batch_is_its_items_in_the_order_asked_for(folder, kind):
    dataset = ShardDataset(folder)
    wanted = [29, 3, 3, -1, 11, 4, 0, 29]
    assert dataset.__getitems__(kind(wanted)) == [dataset[i] for i in wanted]
    assert dataset.__getitems__([]) == []


def test_a_batch_is_read_in_few_requests(folder):
    dataset = ShardDataset(folder)
    dataset.__getitems__(range(COUNT))  # opens the shards
    assert count_reads(lambda: dataset.__getitems__(range(COUNT))) == COUNT // PER_SHARD  # neighbours together
    assert count_reads(lambda: [dataset[i] for i in range(COUNT)]) == COUNT


def test_tensors_are_the_pixels_as_torchvision_lays_them_out(folder, truth):
    dataset = ShardDataset(folder, output="tensor")
    for (pixels, label), sample in zip(dataset.__getitems__(range(COUNT)), truth, strict=True):
        assert pixels.dtype == torch.uint8
        assert np.array_equal(pixels.permute(1, 2, 0).numpy(), pixels_of(sample.jpeg))
        assert pixels[None].is_contiguous(memory_format=torch.channels_last)
        assert label == sample.label
        pixels += 1  # memory of its own, and writable


def test_samples_without_a_label_are_told_once(tmp_path, caplog):
    dataset = ShardDataset(write_pictures(tmp_path / "ds", [Picture("a", coloured(1)[0].jpeg, None, {})]))
    assert [label for _, label in (*dataset, *pickle.loads(pickle.dumps(dataset)))] == [-1, -1]
    assert ["has a label, all are -1" in message for message in caplog.messages] == [True]


def test_images_are_rgb_as_they_are_shown_and_unlabelled_is_minus_one(tmp_path):
    jpeg = jpeg_bytes(corners()[:, :48], orientation=8)
    folder = write_pictures(tmp_path / "ds", [Picture("a", jpeg, None, {})])
    image, label = ShardDataset(folder, output="pil")[0]
    assert (image.mode, image.size, label) == ("RGB", (64, 48), -1)
    assert image.getpixel((2, 2)) == pytest.approx((0, 255, 0), abs=60)  # the stored top right is turned to the left
    pixels, _ = ShardDataset(folder, output="tensor")[0]
    assert pixels.shape == (3, 48, 64)
    assert np.array_equal(pixels.permute(1, 2, 0).numpy(), np.asarray(image))


@pytest.mark.parametrize(
    ("output", "kind"), [(None, Image.Image), ("pil", Image.Image), ("tensor", torch.Tensor), ("jpeg", bytes)]
)
def test_transforms_get_the_output_and_the_label(folder, output, kind):
    dataset = ShardDataset(folder, lambda image: [image], str, output=output)
    (image,), label = dataset[3]
    assert isinstance(image, kind)
    assert label == "3"


@pytest.mark.parametrize(
    "options", [{"output": "numpy"}, {"on_bad": "substitute"}, {"on_bad": None}, {"threads": 0}, {"threads": 1.5}]
)
def test_arguments_that_cannot_be_served_are_refused(folder, options):
    with pytest.raises(ConfigError, match=next(iter(options))):
        ShardDataset(folder, **options)


@forks
@pytest.mark.parametrize(("transform", "output"), [(to_tensor, "pil"), (shrink, "tensor")])
@pytest.mark.parametrize("context", [None, "fork", "spawn"])
def test_a_data_loader_takes_it_with_and_without_workers(folder, context, transform, output):
    dataset = ShardDataset(folder, transform=transform, output=output)
    dataset.__getitems__(range(9))  # a worker must not share the descriptors' threads or locks
    options = {} if context is None else {"num_workers": 2, "multiprocessing_context": context}
    labels = []
    for images, batch_labels in DataLoader(dataset, batch_size=10, **options):
        assert images.shape == (10, 8, 8, 3)
        colours = np.array([COLOURS[label] for label in batch_labels])
        assert np.abs(images.float().mean(dim=(1, 2)).numpy() - colours).max() < 3
        labels += batch_labels.tolist()
    assert labels == [i % len(COLOURS) for i in range(COUNT)]


@forks
def test_workers_may_be_forked_while_the_parent_reads(folder, truth):
    dataset, stop = ShardDataset(folder), threading.Event()

    def read():
        while not stop.is_set():
            dataset.__getitems__(range(COUNT))

    readers = [threading.Thread(target=read) for _ in range(3)]
    for reader in readers:
        reader.start()
    try:
        for _ in range(4):
            loader = DataLoader(
                dataset, batch_size=7, num_workers=2, collate_fn=as_is, multiprocessing_context="fork", timeout=20
            )
            assert [jpeg for batch in loader for jpeg, _ in batch] == [sample.jpeg for sample in truth]
    finally:
        stop.set()
        for reader in readers:
            reader.join()


@forks
def test_workers_do_not_wait_for_a_lock_that_the_parent_held(folder):
    dataset = ShardDataset(folder)
    dataset[0]
    loader = DataLoader(
        dataset, batch_size=COUNT, num_workers=1, collate_fn=len, multiprocessing_context="fork", timeout=9
    )
    with dataset._lock:  # as one of the parent's threads may, at the moment of the fork
        assert list(loader) == [COUNT]


def test_a_part_of_it_is_torch_s_own_subset(folder, truth):
    dataset, numbers = ShardDataset(folder), [17, 2, 3, 4, 28]
    (batch,) = DataLoader(Subset(dataset, numbers), batch_size=5, collate_fn=as_is)
    assert batch == [(truth[i].jpeg, truth[i].label) for i in numbers]
    assert count_reads(lambda: Subset(dataset, numbers).__getitems__(range(5))) == 3  # together, through a subset, too


def test_no_shard_is_open_before_a_sample_is_asked_for_and_after_close(folder):
    before = open_shards()
    dataset = ShardDataset(folder)
    assert open_shards() == before
    dataset.__getitems__([0, 10])
    assert sorted(open_shards()) == sorted([*before, "pictures-000000.tar", "pictures-000001.tar"])
    dataset.close()
    dataset.close()
    assert open_shards() == before
    with pytest.raises(ConfigError, match="closed"):
        dataset[0]


def test_descriptors_and_threads_go_with_it(folder):
    files, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
    for _ in range(5):
        ShardDataset(folder).__getitems__(range(COUNT))
    assert len(os.listdir("/proc/self/fd")) == files
    assert threading.active_count() == threads


def test_a_pickle_holds_a_path_and_no_open_file(folder):
    dataset = ShardDataset(folder, output="tensor", on_bad="none", threads=3)
    dataset.__getitems__([0, 10])
    state = pickle.dumps(dataset)
    assert len(state) < 1000
    again = pickle.loads(state)
    assert torch.equal(again[4][0], dataset[4][0])


def test_what_is_not_what_was_packed_is_named(damaged):
    path, pictures = damaged
    dataset = ShardDataset(path)
    assert dataset[0][0] == pictures[0].jpeg
    for asked in ([1], [0, 1, 3]):
        with pytest.raises(IntegrityError, match=rf"pictures-000000\.tar:\d+ \[sample {pictures[1].key}\].*CRC-32C"):
            dataset.__getitems__(asked)


@pytest.mark.parametrize("output", ["pil", "tensor"])
def test_an_image_that_cannot_be_decoded_is_named(damaged, output):
    path, pictures = damaged
    assert ShardDataset(path)[2][0] == pictures[2].jpeg  # the bytes are what was packed
    with pytest.raises(FormatError, match=r"pictures-000000\.tar:\d+ \[sample n/cut\]"):
        ShardDataset(path, output=output)[2]


def test_none_may_take_the_place_of_a_bad_sample(damaged, caplog):
    path, pictures = damaged
    dataset = ShardDataset(path, output="tensor", on_bad="none")
    with caplog.at_level(logging.WARNING, "shardkit"):
        for _ in range(2):
            batch = dataset.__getitems__(range(4))
            assert [item is None for item in batch] == [False, True, True, False]
            assert [label for _, label in without_bad(batch)] == [0, 3]
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 2  # once a sample
    assert [key in text for key, text in zip((pictures[1].key, "n/cut"), caplog.messages, strict=True)] == [True] * 2
    (left,) = DataLoader(dataset, batch_size=4, collate_fn=without_bad)
    assert len(left) == 2


def test_an_error_of_a_transform_is_no_bad_sample(folder):
    def refuse(image):
        raise FormatError("my own")

    with pytest.raises(FormatError, match=r"^my own$"):
        ShardDataset(folder, refuse, on_bad="none")[0]


def test_a_shard_that_is_gone_is_never_a_bad_sample(tmp_path):
    path = write_pictures(tmp_path / "ds", coloured(3))
    dataset = ShardDataset(path, on_bad="none")
    (path / "pictures-000000.tar").unlink()
    with pytest.raises(StorageError, match=r"pictures-000000\.tar"):
        dataset[0]


@pytest.mark.parametrize("facts", ["header", "none"])
def test_without_checksums_images_are_read_unchecked(tmp_path, facts):
    files = foreign_files(0, 3)
    write_tar(tmp_path / "a.tar", files)
    shardkit.index(tmp_path, facts=facts)
    images = [data for name, data in files.items() if name.lower().endswith(("jpg", "jpeg"))]
    dataset = ShardDataset(tmp_path)
    assert [image for image, _ in dataset] == images == [shardkit.open(tmp_path)[i].jpeg for i in range(3)]
    dataset.close()
