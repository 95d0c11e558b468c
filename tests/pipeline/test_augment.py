"""What `augment` does: presets by name, functions on nodes, and that chance repeats."""

from __future__ import annotations

import ctypes
import io
import threading
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from shardkit.errors import ConfigError
from shardkit.pipeline.augment import PRESETS, RANDAUGMENT, random_operations, recipe_of
from shardkit.pipeline.cpu import PillowDecoder
from shardkit.pipeline.crops import random_crops
from shardkit.pipeline.dali import open_dali
from shardkit.pipeline.dali_augmenter import Augmenter
from shardkit.pipeline.decoder import DecodeSpec
from shardkit.storage.reader import address_of
from shardkit.testing.host_device import HostDevice
from shardkit.testing.images import Picture, jpeg_bytes, write_pictures


def test_augment_works_on_the_cropped_uint8_images(colour_folder, decoded, make):
    from nvidia.dali import fn

    def invert(images):
        return 255 - images

    (plain,) = decoded(colour_folder, make("dali", DecodeSpec(size=16, train=True, dtype="uint8")), [[0, 1]])
    for function in (invert, lambda images: fn.cast_like(255 - images, images)):
        spec = DecodeSpec(size=16, train=True, dtype="uint8", augment=function)
        (inverted,) = decoded(colour_folder, make("dali", spec), [[0, 1]])
        assert np.array_equal(inverted, 255 - plain)


def test_random_augmentation_repeats_by_seed_and_epoch(photo_folder, decoded, make):
    from nvidia.dali import fn

    def jitter(images):
        return fn.brightness(images, brightness=fn.random.uniform(range=(0.5, 1.5)))

    def run(epoch, threads):
        spec = DecodeSpec(size=16, train=False, augment=jitter, threads=threads)
        return decoded(photo_folder, make("dali", spec), [[0, 1], [2, 3]], epoch=epoch)

    assert all(np.array_equal(a, b) for a, b in zip(run(0, 1), run(0, 2), strict=True))
    assert not np.array_equal(run(0, 1)[0], run(1, 1)[0])


def test_augment_and_pillow_do_not_go_together():
    with pytest.raises(ConfigError, match="DALI"):
        PillowDecoder(DecodeSpec(size=16, train=True, augment=lambda images: images))


def test_there_is_a_recipe_for_each_name_and_none_for_others():
    assert list(PRESETS) == ["imagenet_train", "imagenet_eval", "randaugment", "none"]
    with pytest.raises(ConfigError, match="imagenet_train, imagenet_eval, randaugment, none"):
        DecodeSpec(size=8, train=True, augment="autoaugment")


@pytest.mark.parametrize("train", [False, True])
def test_a_preset_names_the_whole_recipe_and_a_function_follows_train(train):
    assert recipe_of(None, train=train) == PRESETS["imagenet_train" if train else "imagenet_eval"]
    assert recipe_of("none", train=train).cut == "whole"
    assert recipe_of("randaugment", train=train).cut == "random"
    assert recipe_of(abs, train=train).cut == ("random" if train else "centre")


def test_presets_are_what_train_and_its_absence_do(photo_folder, name, decoded, make):
    for preset, train in (("imagenet_train", True), ("imagenet_eval", False)):
        for ignored in (True, False):
            (named,) = decoded(photo_folder, make(name, DecodeSpec(size=32, train=ignored, augment=preset)), [[0, 1]])
            (plain,) = decoded(photo_folder, make(name, DecodeSpec(size=32, train=train)), [[0, 1]])
            assert np.array_equal(named, plain)


def test_none_gives_whole_images_of_their_own_sizes(tmp_path, photo_jpegs, name, decoded, make):
    turned = jpeg_bytes(np.zeros((20, 50, 3), np.uint8), orientation=6)
    pictures = [Picture(f"p/{n}", jpeg, 0) for n, jpeg in enumerate([*photo_jpegs[:3], turned])]
    folder = write_pictures(tmp_path / "ds", pictures)
    spec = DecodeSpec(size=8, train=True, dtype="float16", augment="none")
    first, second, third = decoded(folder, make(name, spec), [[0, 3], [], [2, 1]])
    assert second == []
    whole = [Image.open(io.BytesIO(jpeg)) for jpeg in photo_jpegs[:3]]
    for image, number in ((first[0], 0), (third[0], 2), (third[1], 1)):
        assert (image.dtype, image.shape) == (np.uint8, (whole[number].height, whole[number].width, 3))
        assert np.abs(image.astype(int) - np.asarray(whole[number])).mean() < 1
    assert first[1].shape == (50, 20, 3)


def randaugmented(folder, decoded, make, steps, *, epoch=0, seed=0, dtype="uint8", **options):
    spec = DecodeSpec(size=64, train=True, dtype=dtype, seed=seed, augment="randaugment", **options)
    return decoded(folder, make("dali", spec), steps, epoch=epoch)


def test_randaugment_changes_most_images_and_repeats(photo_folder, decoded, make):
    (plain,) = decoded(photo_folder, make("dali", DecodeSpec(size=64, train=True, dtype="uint8")), [range(24)])
    (first,) = randaugmented(photo_folder, decoded, make, [range(24)])
    (again,) = randaugmented(photo_folder, decoded, make, [range(24)], threads=1)
    (other,) = randaugmented(photo_folder, decoded, make, [range(24)], seed=1)
    assert np.array_equal(first, again)
    assert 16 <= (first != plain).any(axis=(1, 2, 3)).sum() <= 24
    assert not np.array_equal(first, other)


def test_randaugment_of_a_sample_does_not_depend_on_its_batch(photo_folder, decoded, make):
    """So that an epoch that is resumed in its middle goes on as it would have."""
    whole = randaugmented(photo_folder, decoded, make, [range(8), range(8, 16)], epoch=3)
    (late,) = randaugmented(photo_folder, decoded, make, [[15, 9, 12]], epoch=3)
    assert np.array_equal(late, whole[1][[7, 1, 4]])


@pytest.mark.parametrize("channels_last", [False, True])
def test_randaugmented_images_are_normalised_like_others(photo_folder, decoded, make, channels_last):
    (plain,) = randaugmented(photo_folder, decoded, make, [[0, 1]], channels_last=channels_last)
    options = {"mean": (10, 20, 30), "std": (2, 3, 4), "channels_last": channels_last}
    (pixels,) = randaugmented(photo_folder, decoded, make, [[0, 1]], dtype="float32", **options)
    shape = (3,) if channels_last else (3, 1, 1)
    expected = (plain - np.array([10, 20, 30.0]).reshape(shape)) / np.array([2, 3, 4.0]).reshape(shape)
    assert np.abs(pixels - expected).max() < 1e-3


def test_operations_are_drawn_evenly_and_belong_to_the_sample():
    drawn = random_operations(np.arange(30000), 15, seed=4, epoch=1)
    assert drawn.operation.shape == drawn.negative.shape == (RANDAUGMENT.operations, 30000)
    for row in drawn.operation:
        counts = np.bincount(row, minlength=15)
        assert len(counts) == 15
        assert ((counts - 2000) ** 2 / 2000).sum() < 40  # chi-square with 14 degrees: 40 has p = 0.0003
    assert abs(drawn.negative.mean() - 0.5) < 0.01
    assert np.abs(np.corrcoef(np.concatenate([drawn.operation, drawn.negative])) - np.eye(4)).max() < 0.03
    some = random_operations(np.array([7, 29999]), 15, seed=4, epoch=1)
    assert np.array_equal(some.operation, drawn.operation[:, [7, 29999]])


def fails_while_it_runs(images):
    from nvidia.dali import fn

    return fn.crop(images, crop=[400, 400])


def another_size(images):
    from nvidia.dali import fn

    return fn.resize(images, size=[8, 8])


def sizes_of_their_own(images):
    from nvidia.dali import fn

    return fn.resize(images, size=fn.random.uniform(range=(4, 9)))


def gray(images):
    from nvidia.dali import fn, types

    return fn.color_space_conversion(images, image_type=types.RGB, output_type=types.GRAY)


def has_a_bug(images):
    raise LookupError("no such thing")


@pytest.mark.parametrize(
    ("function", "told"),
    [
        (lambda images: None, "NoneType"),
        (lambda images: (images, images), "tuple"),
        (lambda images: "x", "str"),
        (has_a_bug, "LookupError: no such thing"),
        (fails_while_it_runs, "DALI: Slice can't be placed out of bounds"),
        (another_size, "expected 2 of 16 x 16 x 3; found 2 of 8 x 8 x 3"),
        (sizes_of_their_own, "expected 2 of 16 x 16 x 3; found 2 of "),
        (gray, "number of channels"),
    ],
)
@pytest.mark.parametrize("channels_last", [False, True])
def test_a_function_that_does_not_do_what_it_must_is_named(colour_folder, function, told, channels_last, decoded, make):
    spec = DecodeSpec(size=16, train=False, augment=function, channels_last=channels_last)
    before = threading.active_count()
    with pytest.raises(ConfigError, match="augment=") as caught:
        decoded(colour_folder, make("dali", spec), [[0, 1], [2, 3]])
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)
    assert threading.active_count() <= before + 3  # of the storage


def on_device(device, array):
    """Return device memory that holds an array, of a device whose memory is the host's."""
    memory = device.memory(array.nbytes)
    np.frombuffer(memory, np.uint8)[:] = array.reshape(-1)
    return memory


def result_of(augmented, shape, dtype):
    assert augmented.nbytes == np.prod(shape) * np.dtype(dtype).itemsize
    return np.frombuffer(ctypes.string_at(augmented.address, augmented.nbytes), dtype).reshape(shape)


def augmenter_on(device, spec, batch_size=8, epoch=0):
    return Augmenter(open_dali(), spec, batch_size=batch_size, epoch=epoch, device=device, operators="cpu")


@pytest.mark.parametrize("dtype", ["uint8", "float16", "float32"])
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("train", [False, True])
def test_squares_on_a_device_are_augmented_there(dtype, channels_last, train):
    device = HostDevice(lazy=True)
    options = {"mean": (10, 20, 30), "std": (2, 3, 4)} if dtype != "uint8" else {}
    spec = DecodeSpec(
        size=9, train=train, dtype=dtype, channels_last=channels_last, augment=lambda images: 255 - images, **options
    )
    augmenter, random = augmenter_on(device, spec), np.random.default_rng(5)
    kept = []
    for count in (8, 1, 5):
        squares = random.integers(0, 256, (count, 9, 9, 3), np.uint8)
        mirror = random.integers(0, 2, count).astype(np.int32) if train else None
        memory = on_device(device, squares)
        made = augmenter.augmented_on_device(address_of(memory), np.arange(count), 0, mirror)
        del memory
        turned = (255 - squares.astype(np.float64)).copy()
        if train:
            turned[mirror == 1] = turned[mirror == 1][:, :, ::-1]
        if dtype != "uint8":
            turned = (turned - (10, 20, 30)) / (2, 3, 4)
        kept.append((made, turned if channels_last else turned.transpose(0, 3, 1, 2)))
    for made, expected in kept:  # each still has its own memory
        assert device.may_touch(made.address, made.nbytes, on_device=True)
        assert np.abs(result_of(made, expected.shape, dtype) - expected).max() < (0.1 if dtype == "float16" else 1e-4)
    del made
    kept.clear()
    assert device.allocations == {}


def test_randaugment_on_a_device_is_that_of_the_sample(photo_folder, decoded, make):
    """Same squares, same numbers, same pixels as in host memory, also in other batches."""
    spec = DecodeSpec(size=64, train=True, dtype="uint8", seed=4, channels_last=True)
    (plain,) = decoded(photo_folder, make("dali", spec), [range(12)], epoch=3)
    (expected,) = randaugmented(photo_folder, decoded, make, [range(12)], epoch=3, seed=4, channels_last=True)
    mirror = random_crops(np.arange(12), np.full(12, 99), np.full(12, 99), seed=4, epoch=3).mirror
    squares = plain.copy()
    squares[mirror == 1] = squares[mirror == 1][:, :, ::-1]
    device = HostDevice()
    augmenter = augmenter_on(device, replace(spec, augment="randaugment"), epoch=3)
    for ids in (np.array([11, 2, 5]), np.arange(8)):
        memory = on_device(device, squares[ids])
        made = augmenter.augmented_on_device(address_of(memory), ids, 3, mirror[ids])
        assert np.array_equal(result_of(made, (len(ids), 64, 64, 3), np.uint8), expected[ids])


def test_a_function_that_fails_on_a_device_is_named():
    device = HostDevice()
    memory = on_device(device, np.zeros((2, 16, 16, 3), np.uint8))
    for function, told in ((another_size, "expected 2 of 16 x 16 x 3"), (fails_while_it_runs, "out of bounds")):
        augmenter = augmenter_on(device, DecodeSpec(size=16, train=False, augment=function))
        with pytest.raises(ConfigError, match=told):
            augmenter.augmented_on_device(address_of(memory), np.arange(2), 0, None)


def test_an_augmenter_without_a_device_takes_no_squares_of_one():
    spec = DecodeSpec(size=16, train=False, augment=lambda images: images)
    augmenter = Augmenter(open_dali(), spec, batch_size=2, epoch=0)
    with pytest.raises(TypeError, match="without a device"):
        augmenter.augmented_on_device(0, np.arange(2), 0, None)
