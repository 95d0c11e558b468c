"""Trees of photographs, cut from a few real ones: the same arguments give the same bytes with one Pillow.

A photograph's entropy is what makes a JPEG cost what it costs, so every file is a window into a real picture,
stretched to one of the shapes that image collections have, lit differently and given sensor noise. Each class has a
colour cast of its own, so that people see the classes on a contact sheet and a network can learn them.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from numpy.typing import NDArray
from PIL import Image

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["Photographs", "TreeFile", "class_names", "encode", "photo_file", "picture", "write"]

Photographs: TypeAlias = Sequence[NDArray[np.uint8]]
"""Pictures to cut from: arrays [height, width, 3], RGB, in host memory, only read."""

_SHAPES = ((500, 375), (500, 333), (375, 500), (333, 500), (500, 500), (400, 300), (640, 480), (800, 600), (1024, 683))
_SHARES = (0.34, 0.20, 0.12, 0.06, 0.06, 0.08, 0.08, 0.04, 0.02)
_CASTS = (
    ("amber", (1.25, 1.00, 0.60)),
    ("azure", (0.70, 0.95, 1.30)),
    ("coral", (1.35, 0.80, 0.72)),
    ("grape", (1.00, 0.68, 1.22)),
    ("lemon", (1.18, 1.18, 0.58)),
    ("moss", (0.75, 1.20, 0.70)),
    ("pearl", (1.00, 1.00, 1.00)),
    ("rose", (1.30, 0.78, 1.05)),
    ("slate", (0.74, 0.80, 0.88)),
    ("teal", (0.60, 1.15, 1.10)),
)
_NOISE = 5.0


@dataclass(frozen=True, slots=True)
class TreeFile:
    """One file of a tree."""

    path: str
    """Relative to the root, with `/` between folders."""
    data: bytes
    """The whole file."""


def class_names(classes: int) -> tuple[str, ...]:
    """Return `classes` different folder names, sorted.

    >>> class_names(3)
    ('amber', 'azure', 'coral')
    """
    names = [name if turn == 0 else f"{name}-{turn + 1}" for turn in range(-(-classes // 10)) for name, _ in _CASTS]
    return tuple(sorted(names[:classes]))


def picture(photographs: Photographs, number: int, *, cast: str = "pearl", seed: int = 0) -> Image.Image:
    """Return picture `number`: an RGB image that depends on the arguments alone.

    Args:
        photographs: at least one picture to cut from.
        number: which picture; any two differ.
        cast: a name of `class_names`; its colours tint the picture.
        seed: another seed gives other pictures under the same numbers.
    """
    rng = np.random.default_rng((seed, number))
    source = photographs[int(rng.integers(len(photographs)))]
    width, height = _shape(rng)
    image = Image.fromarray(_window(source, width / height, rng)).resize((width, height), Image.Resampling.BILINEAR)
    gain = np.asarray(dict(_CASTS)[cast.split("-")[0]], np.float32) * np.float32(rng.uniform(0.8, 1.15))
    pixels = np.asarray(image, np.float32) * gain
    pixels += _NOISE * rng.standard_normal((height, width, 1), np.float32)
    return Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8))


def photo_file(photographs: Photographs, number: int, *, classes: int, seed: int = 0) -> TreeFile:
    """Return file `number` of a tree with `classes` folders; the folders fill evenly."""
    label = class_names(classes)[number % classes]
    rng = np.random.default_rng((seed, number, 1))
    quality = int(rng.choice((86, 90, 92, 95), p=(0.2, 0.3, 0.3, 0.2)))
    subsampling = "4:4:4" if rng.random() < 0.2 else "4:2:0"
    image = picture(photographs, number, cast=label, seed=seed)
    return TreeFile(f"{label}/{label}_{number:06d}.jpg", encode(image, quality=quality, subsampling=subsampling))


def encode(image: Image.Image, kind: str = "JPEG", **options: object) -> bytes:
    """Return `image` as the bytes of a file, with Pillow's options for the format `kind`."""
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


def write(root: Path, file: TreeFile) -> int:
    """Write `file` below `root`, with the folders it needs, and return its size in bytes."""
    target = root / file.path
    target.parent.mkdir(parents=True, exist_ok=True)
    return target.write_bytes(file.data)


def _shape(rng: np.random.Generator) -> tuple[int, int]:
    """Draw width and height: mostly the usual ones, with a tail of small and large pictures."""
    width, height = _SHAPES[int(rng.choice(len(_SHAPES), p=_SHARES))]
    if rng.random() < 0.25:
        factor = float(np.clip(rng.lognormal(-0.1, 0.5), 0.25, 3.0))
        width, height = round(width * factor) + int(rng.integers(8)), round(height * factor) + int(rng.integers(8))
    return width, height


def _window(source: NDArray[np.uint8], aspect: float, rng: np.random.Generator) -> NDArray[np.uint8]:
    """Cut a random window of width / height = `aspect` out of `source`, mirrored half of the time."""
    full_height, full_width = source.shape[:2]
    width = min(full_width, full_height * aspect) * rng.uniform(0.5, 1.0)
    columns, rows = max(1, int(width)), max(1, int(width / aspect))
    left = int(rng.integers(full_width - columns + 1))
    top = int(rng.integers(full_height - rows + 1))
    window = source[top : top + rows, left : left + columns]
    return window[:, ::-1] if rng.random() < 0.5 else window
