from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image, ImageOps

from shardkit.testing.awkward import awkward_files, stored_for_orientation
from shardkit.testing.photos import class_names, encode, photo_file, picture, write


def mean_difference(left: Image.Image, right: Image.Image) -> float:
    assert left.size == right.size
    return float(np.abs(np.asarray(left, np.int16) - np.asarray(right, np.int16)).mean())


def test_the_same_arguments_make_the_same_bytes(photographs):
    assert photo_file(photographs, 7, classes=3, seed=1) == photo_file(photographs, 7, classes=3, seed=1)


@pytest.mark.parametrize("other", [{"number": 8, "seed": 1}, {"number": 7, "seed": 2}])
def test_another_number_or_seed_makes_another_picture(photographs, other):
    one = photo_file(photographs, 7, classes=3, seed=1)
    assert photo_file(photographs, other["number"], classes=3, seed=other["seed"]).data != one.data


@pytest.mark.parametrize("classes", [1, 9, 10, 11, 25])
def test_class_names_are_different_and_sorted(classes):
    names = class_names(classes)
    assert len(set(names)) == classes
    assert list(names) == sorted(names)


def test_classes_fill_evenly(photographs):
    folders = [photo_file(photographs, number, classes=4).path.split("/")[0] for number in range(12)]
    assert sorted(folders) == sorted(class_names(4) * 3)


def test_sizes_are_those_of_photographs(photographs):
    sizes = [len(photo_file(photographs, number, classes=10).data) for number in range(60)]
    assert 50_000 < np.mean(sizes) < 150_000
    assert max(sizes) > 3 * min(sizes)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_an_obeyed_orientation_shows_the_picture_upright(photographs, orientation):
    upright = picture(photographs, 0)
    with Image.open(io.BytesIO(stored_for_orientation(upright, orientation))) as stored:
        assert stored.getexif()[0x0112] == orientation
        shown = ImageOps.exif_transpose(stored)
        assert mean_difference(shown, upright) < 8  # what JPEG loses; another orientation differs by 30 and more


def test_awkward_files_are_what_they_claim(photographs, tmp_path):
    files = {file.path.removeprefix("odd/"): file for file in awkward_files(photographs)}
    assert {file.fate for file in files.values()} == {"packed", "refused", "ignored"}
    opened = {name: Image.open(io.BytesIO(file.data)) for name, file in files.items() if file.fate == "packed"}
    assert all(image.format == "JPEG" for image in opened.values())
    assert (opened["grayscale.jpg"].mode, opened["cmyk.jpg"].mode) == ("L", "CMYK")
    assert opened["progressive.jpg"].info["progressive"]
    assert Image.open(io.BytesIO(files["screenshot.jpg"].data)).format == "PNG"
    with pytest.raises(OSError, match="truncated"):
        Image.open(io.BytesIO(files["truncated.jpg"].data)).load()
    assert files["empty.jpg"].data == b""


def test_every_awkward_name_can_be_written(photographs, tmp_path):
    files = awkward_files(photographs)
    assert [write(tmp_path, file) for file in files] == [len(file.data) for file in files]
    assert sum(path.is_file() for path in tmp_path.rglob("*")) == len(files)


def test_cmyk_pictures_keep_their_colours(photographs):
    image = picture(photographs, 3)
    with Image.open(io.BytesIO(encode(image.convert("CMYK"), quality=95))) as stored:
        assert mean_difference(stored.convert("RGB"), image) < 8
