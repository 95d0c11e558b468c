"""A batch of a loader as one HTML file that needs nothing else: thumbnails with their labels."""

from __future__ import annotations

import base64
import io
from html import escape as escape_html
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image

from shardkit.escaping import escape

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

_PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>{title}</title>
<style>
body {{ margin: 2rem; font: 14px/1.4 system-ui, sans-serif; color: #222; background: #fafafa }}
main {{ display: grid; grid-template-columns: repeat(auto-fill, minmax(9rem, 1fr)); gap: 1rem }}
figure {{ margin: 0 }}
img {{ width: 100%; border-radius: 4px; display: block }}
figcaption {{ overflow-wrap: anywhere; padding-top: .25rem }}
</style>
<h1>{title}</h1>
<p>{note}</p>
<main>
{figures}
</main>
</html>
"""


def contact_sheet(pictures: NDArray[np.uint8], captions: Sequence[str], *, title: str, note: str) -> str:
    """Return the page. `pictures` is [B, H, W, 3] RGB; the texts may hold anything, they are escaped here."""
    figures = [
        f'<figure><img src="{data_uri(picture)}" alt=""><figcaption>{safe(caption)}</figcaption></figure>'
        for picture, caption in zip(pictures, captions, strict=True)
    ]
    return _PAGE.format(title=safe(title), note=safe(note), figures="\n".join(figures))


def pictures_of(images: NDArray[np.float32], mean: Sequence[float], std: Sequence[float]) -> NDArray[np.uint8]:
    """Undo a loader's normalisation: [B, 3, H, W] floats to [B, H, W, 3] bytes; `mean` and `std` count to 255."""
    pixels = images.transpose(0, 2, 3, 1) * np.asarray(std, np.float32) + np.asarray(mean, np.float32)
    return np.clip(np.rint(pixels), 0, 255).astype(np.uint8)


def data_uri(picture: NDArray[np.uint8]) -> str:
    out = io.BytesIO()
    Image.fromarray(picture).save(out, "JPEG", quality=85)
    return "data:image/jpeg;base64," + base64.b64encode(out.getvalue()).decode("ascii")


def safe(text: str) -> str:
    return escape_html(escape(text))
