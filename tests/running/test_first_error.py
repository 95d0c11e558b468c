"""Whatever is met first: the error that ends a run is that of the first piece in order."""

from __future__ import annotations

import io
import itertools
import os

import pytest
from PIL import Image

import shardkit
from shardkit.errors import IntegrityError, ShardkitError, SourceError
from shardkit.extracting.run import extract
from shardkit.running.first_error import FirstError
from shardkit.testing.damage import flip_byte
from shardkit.testing.datasets import tiny_jpeg


def plant(root, files):
    os.makedirs(root / "c")
    for name, data in files.items():
        (root / "c" / name).write_bytes(data)


@pytest.mark.parametrize("met", list(itertools.permutations((2, 5, 7))))
def test_the_first_in_order_is_raised_when_those_before_it_are_over(met):
    first, running = FirstError(), {0, 2, 5, 7, 9}
    for number in met:
        running.remove(number)
        first.note(number, ShardkitError(str(number)))
        first.raise_unless_open(running)  # 0 is under way
    assert (first.matters(1), first.matters(2), first.matters(8)) == (True, False, False)
    with pytest.raises(ShardkitError, match="2"):
        first.raise_unless_open(running - {0})


@pytest.mark.parametrize("jobs", [1, 2, 4])
def test_extract_ends_at_the_first_damaged_image(tmp_path, jobs):
    """The first piece has its fault at its end, the third at its beginning: that one is met earlier."""
    plant(tmp_path / "src", {f"{n:04}.jpg": tiny_jpeg(n, 4000) for n in range(700)})
    shardkit.pack(tmp_path / "src", tmp_path / "ds", jobs=1, shuffle=False)
    with shardkit.open(tmp_path / "ds") as dataset:
        offsets = dataset.columns.numbers("offset")
        for row in (250, 513):
            flip_byte(dataset.shard_paths[0], int(offsets[row]) + 3000)
    with pytest.raises(IntegrityError, match="c/0250"):
        extract(tmp_path / "ds", tmp_path / "out", jobs=jobs, reflink="never")


@pytest.mark.parametrize("jobs", [1, 3])
def test_pack_ends_at_the_first_refused_source(tmp_path, jobs):
    """The first shard has its fault at its end, behind images that take long; the others at once."""
    slow = io.BytesIO()
    Image.effect_noise((2000, 2000), 40).save(slow, "JPEG")
    files = {f"{n:04}.jpg": slow.getvalue() if n < 50 else tiny_jpeg(n) for n in range(150)}
    files |= dict.fromkeys(("0049.jpg", "0050.jpg", "0100.jpg"), b"no image")
    plant(tmp_path / "src", files)
    options = {"shuffle": False, "shard_samples": 50, "check": "decode", "on_error": "fail"}
    with pytest.raises(SourceError, match="c/0049"):
        shardkit.pack(tmp_path / "src", tmp_path / "ds", jobs=jobs, **options)
