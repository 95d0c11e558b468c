"""One bad image ends no run: what is found where, who stands in, and what is said about it."""

from __future__ import annotations

import json
import logging

import numpy as np
import pytest

from shardkit.dataset.shardset import open_dataset
from shardkit.errors import FormatError
from shardkit.testing.images import Picture, coloured, write_pictures
from shardkit.testing.photos import photo_file
from shardkit.torch import ShardLoader

COUNT = 24


def broken(kind: str, jpeg: bytes) -> bytes:
    """An image that is bad in one way."""
    middle = len(jpeg) // 2
    return {
        "cut": jpeg[: len(jpeg) // 3],
        "empty": b"",
        "text": b"no picture at all\n" * 200,
        "no frame": jpeg.replace(b"\xff\xc0", b"\xff\xc6", 1),
        "noise": jpeg[:700] + bytes(np.random.default_rng(0).integers(0, 255, len(jpeg) - 702, np.uint8)) + b"\xff\xd9",
        "header only": jpeg[:200],
        "a marker in the scan": jpeg[:middle] + b"\xff\xd8" + jpeg[middle + 2 :],
    }[kind]


KINDS = ("cut", "empty", "text", "no frame", "header only")
BAD = {3: "cut", 8: "text", 9: "empty", 17: "header only"}


@pytest.fixture(scope="module")
def jpegs(photographs):
    return [photo_file(photographs, number, classes=5).data for number in range(COUNT)]


@pytest.fixture
def dataset_with(tmp_path, jpegs):
    """A function that writes a dataset in which some samples are bad; facts as of the good images."""

    def write(bad):
        pictures = [Picture(f"n/{number:02}", jpeg, number) for number, jpeg in enumerate(jpegs)]
        for number, kind in bad.items():
            pictures[number] = Picture(f"n/{number:02}", broken(kind, jpegs[number]), number)
        return write_pictures(tmp_path / "ds", pictures)

    return write


def load(path, batch_size=6, **options):
    return ShardLoader(path, batch_size, **{"size": 32, "fields": ("index",), "seed": 5} | options)


def epoch_of(loader):
    return [extras["index"].tolist() for _, _, extras in loader]


@pytest.mark.parametrize("decoder", ["dali", "cpu"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_bad_image_is_replaced_and_named(dataset_with, caplog, decoder, kind):
    path = dataset_with({7: kind})
    with load(path, decoder=decoder, read_on=False) as loader, caplog.at_level(logging.WARNING):
        for _ in range(2):
            ids = epoch_of(loader)
            assert [len(step) for step in ids] == [6] * 4
            flat = [number for step in ids for number in step]
            assert 7 not in flat
            assert len(set(flat)) == COUNT - 1  # one comes twice, in the place of the bad one
        stats = loader.stats()
    assert list(stats.bad) == ["n/07"]
    assert stats.bad["n/07"]
    assert stats.substitutions == 2
    said = [record.getMessage() for record in caplog.records if "n/07" in record.getMessage()]
    assert len(said) == 1
    assert "pictures-000000.tar:" in said[0]


@pytest.mark.parametrize("decoder", ["dali", "cpu"])
@pytest.mark.parametrize("kind", KINDS)
def test_raise_names_shard_offset_and_key(dataset_with, decoder, kind):
    path = dataset_with({7: kind})
    with open_dataset(path) as dataset:
        offset = int(dataset.columns["offset"][7])
    with load(path, decoder=decoder, on_bad="raise", train=False) as loader:
        batches = iter(loader)
        next(batches)
        with pytest.raises(FormatError, match=rf"pictures-000000\.tar:{offset} \[sample n/07\].*verify --level decode"):
            next(batches)
        with pytest.raises(StopIteration):
            next(batches)
        assert loader.state_dict()["step"] == 1


def test_the_substitutes_are_the_same_for_decoders_batch_sizes_ranks_and_resumes(dataset_with):
    path = dataset_with(BAD)

    def flat(*loaders):
        steps = zip(*(epoch_of(loader) for loader in loaders), strict=True)
        return [number for parts in steps for together in zip(*parts, strict=True) for number in together]

    expected = flat(load(path))
    assert not set(expected) & set(BAD)
    assert len(expected) == COUNT
    assert flat(load(path, decoder="cpu")) == expected
    assert flat(load(path, 12)) == expected
    assert flat(load(path, prefetch=1, io="direct", check="crc")) == expected
    assert flat(*(load(path, 3, rank=rank, world_size=2) for rank in range(2))) == expected
    loader = load(path)
    iterator = iter(loader)
    for _ in range(2):
        next(iterator)
    state = json.loads(json.dumps(loader.state_dict()))
    iterator.close()
    again = load(path)
    again.load_state_dict(state)
    assert flat(again) == expected[12:]


def test_what_only_the_decoder_can_find_does_not_end_the_pipeline(dataset_with):
    path = dataset_with({2: "a marker in the scan", 4: "noise", 5: "noise", 11: "no frame"})
    with load(path, train=False) as loader:
        for _ in range(3):
            assert [len(step) for step in epoch_of(loader)] == [6] * 4
        found = set(loader.stats().bad)
    assert {"n/11"} <= found <= {"n/02", "n/04", "n/05", "n/11"}


def test_when_everything_is_bad_the_error_says_so(dataset_with):
    with load(dataset_with(dict.fromkeys(range(COUNT), "text"))) as loader:
        with pytest.raises(FormatError, match="no sample can stand in"):
            next(iter(loader))
        assert len(loader.stats().bad) == COUNT


@pytest.mark.parametrize("decoder", ["dali", "cpu"])
def test_a_flipped_byte_is_a_bad_sample_with_check_crc(dataset_with, decoder):
    path = dataset_with({})
    with open_dataset(path) as dataset:
        place = int(dataset.columns["offset"][9]) + int(dataset.columns["size"][9]) - 40
    with (path / "pictures-000000.tar").open("r+b") as shard:
        shard.seek(place)
        byte = shard.read(1)[0]
        shard.seek(place)
        shard.write(bytes([byte ^ 1]))
    with load(path, decoder=decoder) as loader:
        assert 9 in {number for step in epoch_of(loader) for number in step}  # it still decodes
    with load(path, decoder=decoder, check="crc") as loader:
        assert 9 not in {number for step in epoch_of(loader) for number in step}
        assert list(loader.stats().bad) == ["n/09"]
        assert "CRC-32C" in loader.stats().bad["n/09"]


def test_pictures_of_other_kinds_are_no_bad_images(tmp_path):
    with load(write_pictures(tmp_path / "ds", coloured(12)), decoder="cpu") as loader:
        assert sum(len(step) for step in epoch_of(loader)) == 12
        assert loader.stats().bad == {}
