"""Both decoders against known pixels, Pillow and each other."""

from __future__ import annotations

import hashlib
import io
import os
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from PIL import Image, ImageOps

from shardkit.dataset.shardset import open_dataset
from shardkit.errors import CapabilityError, ConfigError, FormatError, StorageError
from shardkit.pipeline.cpu import PillowDecoder, open_image
from shardkit.pipeline.crops import random_crops
from shardkit.pipeline.decoder import IMAGENET_MEAN, IMAGENET_STD, DecodeSpec
from shardkit.testing.images import COLOURS, Picture, coloured, corners, jpeg_bytes, write_pictures

MODES = [False, True]
CORNERS = ((255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 255))


def pictures_of(jpegs):
    return [Picture(f"p/{number}", jpeg, 0) for number, jpeg in enumerate(jpegs)]


@pytest.mark.parametrize("train", MODES)
def test_pixels_are_those_of_the_label_and_normalised(colour_folder, name, train, decoded, make):
    steps = [[3, 0, 39], [21, 7], [17]]
    out = decoded(colour_folder, make(name, DecodeSpec(size=32, train=train)), steps)
    for ids, pixels in zip(steps, out, strict=True):
        assert (pixels.shape, pixels.dtype) == ((len(ids), 3, 32, 32), np.float32)
        for number, image in zip(ids, pixels, strict=True):
            shown = image.mean(axis=(1, 2)) * IMAGENET_STD + IMAGENET_MEAN
            assert np.abs(shown - COLOURS[number % len(COLOURS)]).max() < 3


@pytest.mark.parametrize("dtype", ["float32", "float16", "uint8"])
@pytest.mark.parametrize("channels_last", [False, True])
def test_types_and_memory_orders_hold_the_same_values(photo_folder, name, dtype, channels_last, decoded, make):
    (plain,) = decoded(photo_folder, make(name, DecodeSpec(size=48, train=False, dtype="uint8")), [[0, 1]])
    spec = DecodeSpec(size=48, train=False, dtype=dtype, channels_last=channels_last, mean=(10, 20, 30), std=(2, 3, 4))
    (pixels,) = decoded(photo_folder, make(name, spec), [[0, 1]])
    assert pixels.dtype == dtype
    assert pixels.flags.c_contiguous
    pixels = pixels.transpose(0, 3, 1, 2) if channels_last else pixels
    expected = plain.astype(np.float32)
    if dtype != "uint8":
        expected = (expected - np.array([10, 20, 30])[:, None, None]) / np.array([2, 3, 4])[:, None, None]
    assert np.abs(pixels - expected).max() < (0.1 if dtype == "float16" else 1e-4)


@pytest.mark.parametrize("train", MODES)
@pytest.mark.parametrize("orientation", range(9))
def test_exif_orientation_is_applied(tmp_path, name, train, orientation, decoded, make):
    jpeg = jpeg_bytes(corners(), orientation=orientation or None, subsampling=0)
    folder = write_pictures(tmp_path / "ds", pictures_of([jpeg]))
    shown = ImageOps.exif_transpose(Image.open(io.BytesIO(jpeg)))
    spec = DecodeSpec(size=64, train=train, dtype="uint8", channels_last=True)
    pixels = decoded(folder, make(name, spec), [[0]])[0][0]
    if train:  # a crop, perhaps mirrored: its colours are those of the picture at the place that was drawn
        reference = decoded(folder, PillowDecoder(spec), [[0]])[0][0]
        assert np.abs(pixels.astype(int) - reference).mean() < 6
    else:
        for y, x in ((4, 4), (4, 59), (59, 4), (59, 59)):
            assert np.abs(pixels[y, x].astype(int) - shown.getpixel((x, y))).max() < 40


VARIANTS = {
    "gray": jpeg_bytes(Image.fromarray(corners()).convert("L")),
    "progressive": jpeg_bytes(corners(), progressive=True),
    "4:4:4": jpeg_bytes(corners(), subsampling=0),
    "4:2:2": jpeg_bytes(corners(), subsampling=1),
    "restart markers": jpeg_bytes(corners(), restart_marker_rows=1),
    "one pixel": jpeg_bytes(corners(2)[:1, :1]),
    "a line": jpeg_bytes(np.tile(corners(8)[:1], (1, 60, 1))),
}


@pytest.mark.parametrize("train", MODES)
@pytest.mark.parametrize("kind", VARIANTS)
def test_every_kind_of_jpeg_becomes_rgb_as_pillow_shows_it(tmp_path, name, train, kind, decoded, make):
    folder = write_pictures(tmp_path / "ds", pictures_of([VARIANTS[kind]]))
    spec = DecodeSpec(size=40, train=train, dtype="uint8")
    pixels = decoded(folder, make(name, spec), [[0]])[0]
    assert pixels.shape == (1, 3, 40, 40)
    reference = decoded(folder, PillowDecoder(spec), [[0]])[0]
    assert np.abs(pixels.astype(int) - reference).mean() < 6


def test_cmyk_becomes_rgb(tmp_path, name, decoded, make):
    """Four inks: cyan alone is red's absence. Conversions differ in tone, not in kind."""
    inks = np.zeros((40, 40, 4), np.uint8)
    inks[..., 0] = 255
    folder = write_pictures(tmp_path / "ds", pictures_of([jpeg_bytes(Image.fromarray(inks, "CMYK"))]))
    spec = DecodeSpec(size=32, train=False, dtype="uint8", channels_last=True)
    red, green, blue = decoded(folder, make(name, spec), [[0]])[0][0].mean(axis=(0, 1))
    assert red < 40
    assert min(green, blue) > 150


def pillow_eval(jpeg, size):
    """The evaluation transform as its sentence says it: resize the shorter side, then cut the centre."""
    image = ImageOps.exif_transpose(Image.open(io.BytesIO(jpeg))).convert("RGB")
    scale = round(size * 256 / 224) / min(image.size)
    width, height = (max(round(side * scale), size) for side in image.size)
    image = image.resize((width, height), Image.Resampling.BILINEAR)
    left, top = (width - size + 1) // 2, (height - size + 1) // 2
    return np.asarray(image.crop((left, top, left + size, top + size)))


def test_evaluation_agrees_with_pillow(photo_folder, name, decoded, make):
    spec = DecodeSpec(size=224, train=False, dtype="uint8", channels_last=True)
    (pixels,) = decoded(photo_folder, make(name, spec), [range(24)])
    with open_dataset(photo_folder) as dataset:
        for number in range(24):
            difference = np.abs(pixels[number].astype(int) - pillow_eval(dataset[number].jpeg, 224))
            assert difference.mean() < 2
    # A shift by one pixel is seen: the bound is not so wide that anything would pass.
    assert np.abs(pixels[:, 1:].astype(int) - pixels[:, :-1]).mean() > 4


def pillow_train(jpeg, crops, at, size):
    """The training transform as its sentence says it: cut, resize, mirror."""
    image = Image.open(io.BytesIO(jpeg)).convert("RGB")
    top, left, height, width = np.rint(
        np.concatenate([crops.anchor[at], crops.shape[at]]) * (image.height, image.width, image.height, image.width)
    ).astype(int)
    image = image.crop((left, top, left + width, top + height)).resize((size, size), Image.Resampling.BILINEAR)
    return np.asarray(image.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if crops.mirror[at] else image)


@pytest.mark.parametrize("dtype", ["float32", "float16", "uint8"])
@pytest.mark.parametrize("channels_last", [False, True])
def test_training_agrees_with_pillow(photo_folder, photo_jpegs, name, decoded, make, dtype, channels_last):
    mean, std = ((0, 0, 0), (1, 1, 1)) if dtype == "uint8" else ((10, 20, 30), (2, 3, 4))
    spec = DecodeSpec(size=64, train=True, dtype=dtype, channels_last=channels_last, mean=mean, std=std, seed=2)
    (pixels,) = decoded(photo_folder, make(name, spec), [range(24)], epoch=1)
    pixels = pixels if channels_last else pixels.transpose(0, 2, 3, 1)
    sides = [np.array([getattr(Image.open(io.BytesIO(j)), side) for j in photo_jpegs]) for side in ("width", "height")]
    crops = random_crops(np.arange(24), *sides, seed=2, epoch=1)
    assert 4 < crops.mirror.sum() < 20
    for at, jpeg in enumerate(photo_jpegs):
        shown = pixels[at].astype(np.float32) * std + mean
        assert np.abs(shown - pillow_train(jpeg, crops, at, 64)).mean() < 1.5


def test_training_crops_alike_in_both_decoders(photo_folder, decoded, make):
    spec = DecodeSpec(size=128, train=True, dtype="uint8", seed=9)
    dali, pillow = (decoded(photo_folder, make(name, spec), [range(24)], epoch=4)[0] for name in ("dali", "cpu"))
    assert np.abs(dali.astype(int) - pillow).mean(axis=(1, 2, 3)).max() < 2


def test_epochs_and_seeds_differ_and_repeat(photo_folder, name, decoded, make):
    def run(seed, epoch):
        spec = DecodeSpec(size=32, train=True, seed=seed)
        return decoded(photo_folder, make(name, spec), [[0, 1, 2]], epoch=epoch)[0]

    first = run(0, 0)
    assert np.array_equal(first, run(0, 0))
    assert not np.array_equal(first, run(0, 1))
    assert not np.array_equal(first, run(1, 0))


def test_pixels_depend_on_the_sample_alone(photo_folder, name, decoded, make):
    """Not on batch, neighbours, prefetching or number of threads."""
    one = decoded(photo_folder, make(name, DecodeSpec(size=32, train=True, threads=1)), [[i] for i in range(12)])
    spec = DecodeSpec(size=32, train=True, threads=3)
    many = decoded(photo_folder, make(name, spec), [[11, 0, 1, 2, 3], [4, 5, 6, 7, 8, 9, 10]], depth=5)
    together = np.concatenate(many)[[1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 0]]
    assert np.array_equal(np.concatenate(one), together)


REPEAT = """
import sys, hashlib
sys.path[:0] = sys.argv[2:]
from conftest import decode_all, make_decoder
from shardkit.pipeline.decoder import DecodeSpec
pixels, = decode_all(sys.argv[1], make_decoder("dali", DecodeSpec(size=32, train=True, seed=3)), [[5, 1, 9]], epoch=2)
print(hashlib.sha256(pixels.tobytes()).hexdigest())
"""


def test_another_process_makes_the_same_pixels(photo_folder, decoded, make):
    (here,) = decoded(photo_folder, make("dali", DecodeSpec(size=32, train=True, seed=3)), [[5, 1, 9]], epoch=2)
    command = [sys.executable, "-c", REPEAT, str(photo_folder), os.path.dirname(__file__), *sys.path]
    there = subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    assert there == hashlib.sha256(here.tobytes()).hexdigest()


def test_an_empty_batch_keeps_its_place(colour_folder, name, decoded, make):
    out = decoded(colour_folder, make(name, DecodeSpec(size=16, train=True)), [[0], [], [1, 2], []])
    assert [pixels.shape for pixels in out] == [(1, 3, 16, 16), (0, 3, 16, 16), (2, 3, 16, 16), (0, 3, 16, 16)]


def test_an_epoch_without_steps_is_over_at_once(colour_folder, name, decoded, make):
    assert decoded(colour_folder, make(name, DecodeSpec(size=16, train=True)), []) == []


def test_a_read_that_fails_comes_after_the_batches_before_it(name, tmp_path, make, feed):
    folder = write_pictures(tmp_path / "ds", coloured(6), per_shard=2)
    decoder = make(name, DecodeSpec(size=16, train=False))

    def cut_short():  # when all is open and nothing is read
        os.truncate(folder / "pictures-000002.tar", 100)
        yield from ([number] for number in range(6))

    with feed(folder, cut_short(), depth=6) as given:
        run, steps = decoder.decode(given.fetcher, 0), []
        with pytest.raises(StorageError, match="c4/00004"):
            steps.extend(batch.batch.step for batch in run)
        assert steps == [0, 1, 2, 3]


@pytest.mark.parametrize("augment", [None, "randaugment", "none"])
def test_leaving_early_stops_the_threads_and_gives_the_memory_back(photo_folder, name, make, feed, augment):
    name = "dali" if augment == "randaugment" else name
    before = set(threading.enumerate())
    with feed(photo_folder, [range(24)] * 1000, depth=3) as given:
        run = make(name, DecodeSpec(size=64, train=True, augment=augment)).decode(given.fetcher, 0)
        first = next(run)
        run.close()
        given.fetcher.close()
        assert given.pool.lent_bytes == 0
        assert len(first.pixels) == 24
        # The storage's own threads live as long as it does.
        left = {thread for thread in threading.enumerate() if not thread.name.startswith("shardkit-read")}
        assert left <= before


def test_the_decoder_works_ahead_while_the_caller_has_a_batch(photo_folder, make, feed):
    with feed(photo_folder, [range(24)] * 3, depth=3) as given:
        run = make("dali", DecodeSpec(size=64, train=True)).decode(given.fetcher, 0)
        first = next(run)
        deadline = time.monotonic() + 20
        while given.pool.lent_bytes:  # all of them are decoded although nobody asked for more than one
            assert time.monotonic() < deadline
            time.sleep(0.005)
        assert [batch.batch.step for batch in (first, *run)] == [0, 1, 2]


def test_memory_of_a_batch_is_used_again_only_when_nobody_looks_at_it(photo_folder, make, feed):
    with feed(photo_folder, [[number] for number in range(12)]) as given:
        kept, places = [], set()
        for number, batch in enumerate(make("dali", DecodeSpec(size=32, train=True)).decode(given.fetcher, 0)):
            pixels = np.from_dlpack(batch.pixels)
            places.add(pixels.ctypes.data)
            if number % 3 == 0:
                kept.append((pixels[0, 0], pixels.tobytes()[: 32 * 32 * 4]))
            del pixels, batch
        assert all(view.tobytes() == told for view, told in kept)
        assert len(places) < 12


def test_pixels_stay_when_later_batches_are_decoded(photo_folder, name, decoded, make):
    steps = [[i, i + 1] for i in range(20)]
    out = decoded(photo_folder, make(name, DecodeSpec(size=32, train=True)), steps)
    again = decoded(photo_folder, make(name, DecodeSpec(size=32, train=True)), steps[::-1])
    assert all(np.array_equal(a, b) for a, b in zip(out, again[::-1], strict=True))


@pytest.mark.parametrize(
    "wrong", [{"size": 0}, {"dtype": "int4"}, {"std": (1, 0, 1)}, {"mean": (1, 2)}, {"threads": -1}], ids=str
)
def test_a_spec_that_no_decoder_can_do_is_refused(wrong):
    with pytest.raises(ConfigError):
        DecodeSpec(**{"size": 8, "train": True} | wrong)


@pytest.mark.parametrize(("size", "shorter"), [(224, 256), (1, 1), (112, 128), (160, 183), (336, 384)])
def test_the_shorter_side_is_256_to_224(size, shorter):
    assert DecodeSpec(size=size, train=False).shorter == shorter


def test_without_dali_the_error_says_what_to_install():
    code = (
        "import sys; sys.modules['nvidia.dali'] = None\n"
        "from shardkit.pipeline.dali import DaliDecoder\n"
        "from shardkit.pipeline.decoder import DecodeSpec\n"
        "try: DaliDecoder(DecodeSpec(size=8, train=True), batch_size=1)\n"
        "except Exception as error: print(type(error).__name__, error.exit_code, error)"
    )
    said = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert said.startswith("CapabilityError 7 ")
    assert "pip install 'shardkit[dali]'" in said
    assert CapabilityError.exit_code == 7


def test_open_image_refuses_a_truncated_file_and_turns_the_rest():
    jpeg = jpeg_bytes(corners(), orientation=6)
    assert open_image(jpeg).mode == "RGB"
    assert max(abs(a - b) for a, b in zip(open_image(jpeg).getpixel((4, 4)), CORNERS[2], strict=True)) < 12
    with pytest.raises(FormatError, match="truncated"):
        open_image(jpeg[:-100])
