"""Trees of small JPEGs."""

from __future__ import annotations

import os

import numpy as np
import pytest
from PIL import Image

from shardkit.packing.options import PackOptions
from shardkit.testing.photos import encode


@pytest.fixture(scope="session")
def jpeg():
    """Return a function: a small JPEG of noise; another `number` gives other bytes."""

    def make(number=0, *, width=24, height=16, mode="RGB", **options):
        noise = np.random.default_rng(number).bytes(width * height * len(mode))
        return encode(Image.frombytes(mode, (width, height), noise), **options)

    return make


@pytest.fixture
def plant(tmp_path, jpeg):
    """Return a function: makes the tree `tmp_path/src` of the files named, each another JPEG."""

    def make(*names, root="src"):
        top = tmp_path / root
        top.mkdir(exist_ok=True)
        for number, name in enumerate(names):
            path = os.path.join(os.fsencode(top), os.fsencode(name))
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with open(path, "xb") as file:
                file.write(jpeg(number))
        return top

    return make


@pytest.fixture
def make_options():
    """Return a function: the options of a pack."""

    def make(**given):
        return PackOptions(**{"name": "t", **given})

    return make
