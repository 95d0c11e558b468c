"""Make the golden dataset of the current format version: `sources` draws the source tree, `pack` packs it.

tests/golden/vN-source/ and tests/golden/vN/ are kept in the repository and never change: a change is a new format
version, and then this script makes the next pair. It refuses to touch a pair that is there.
"""

from __future__ import annotations

import argparse
import hashlib
import io
from pathlib import Path

import numpy as np
import PIL
import pyarrow
from PIL import Image, features

import shardkit
from shardkit.format.index import FORMAT_VERSION

GOLDEN = Path(__file__).parents[1] / "tests" / "golden"
SOURCE = GOLDEN / f"v{FORMAT_VERSION}-source"
DATASET = GOLDEN / f"v{FORMAT_VERSION}"
LIST = "photos.csv"


def pack_golden(target: Path) -> None:
    shardkit.pack(SOURCE / LIST, target, jobs=1, name="golden", shards=2, seed=1)


def draw(width: int, height: int, phase: int) -> Image.Image:
    """Return a picture by formula: nobody's photograph."""
    y, x = np.mgrid[:height, :width]
    planes = [(np.sin((x * (k + 2) + y * (k + 1) + phase * 7) / 9) + 1) * 127 for k in range(3)]
    return Image.fromarray(np.stack(planes, axis=-1).astype(np.uint8))


def encoded(image: Image.Image, kind: str = "JPEG", **parameters: object) -> bytes:
    out = io.BytesIO()
    image.save(out, kind, **parameters)
    return out.getvalue()


def turned(image: Image.Image, orientation: int) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return encoded(image, quality=80, exif=exif)


def sources() -> dict[str, bytes]:
    """Return file name to content: each kind of JPEG, a PNG in disguise, and the list that is packed."""
    return {
        "cat/baseline.jpg": encoded(draw(40, 24, 0), quality=85),
        "cat/gray.jpg": encoded(draw(33, 17, 1).convert("L"), quality=85),
        "cat/progressive.jpeg": encoded(draw(48, 32, 2), quality=75, progressive=True),
        "dog/full chroma.v2.JPG": encoded(draw(31, 23, 3), quality=90, subsampling=0),
        "dog/on its side.jpg": turned(draw(24, 40, 4), 6),
        "dog/restarts.jpg": encoded(draw(64, 48, 5), quality=70, restart_marker_blocks=2),
        "dog/really a screenshot.jpg": encoded(draw(20, 20, 6), "PNG"),
        LIST: (
            "path,label,caption\n"
            "cat/baseline.jpg,cat,\n"
            'cat/gray.jpg,cat,"grey, and small"\n'
            "cat/progressive.jpeg,cat,\n"
            "dog/full chroma.v2.JPG,dog,caf\u00e9\n"
            "dog/really a screenshot.jpg,dog,\n"
            "dog/on its side.jpg,dog,\n"
            "dog/restarts.jpg,dog,restarts\n"
        ).encode(),
    }


def write_sources() -> None:
    for name, data in sources().items():
        path = SOURCE / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


PROVENANCE = """\
# Golden dataset, format version {version}

`v{version}-source/` was drawn by formula (`scripts/make_golden.py sources`): no photograph, nobody's work but this
project's. `v{version}/` was packed from its list (`scripts/make_golden.py pack`) with `name="golden"`, `shards=2`,
`seed=1` and the defaults otherwise.

Made with {tools}.

These files never change without a new format version; `tests/format/test_golden.py` holds them to this table.
Another version of Pillow may draw other source bytes, and another version of pyarrow may write the same tables in
other bytes: the sources are kept, and the Arrow files are compared as tables.

| file | bytes | SHA-256 |
|---|--:|---|
{rows}
"""


def provenance() -> str:
    files = [path for folder in (SOURCE, DATASET) for path in sorted(folder.rglob("*")) if path.is_file()]
    rows = [
        f"| `{path.relative_to(GOLDEN)}` | {path.stat().st_size} | `{hashlib.sha256(path.read_bytes()).hexdigest()}` |"
        for path in files
    ]
    tools = (
        f"shardkit {shardkit.__version__}, pyarrow {pyarrow.__version__}, Pillow {PIL.__version__},"
        f" libjpeg-turbo {features.version_feature('libjpeg_turbo')}"
    )
    return PROVENANCE.format(version=FORMAT_VERSION, tools=tools, rows="\n".join(rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["sources", "pack"])
    what = parser.parse_args().what
    folder = SOURCE if what == "sources" else DATASET
    if folder.exists():
        parser.error(f"{folder.relative_to(GOLDEN.parents[1])} is there, and golden files never change")
    if what == "sources":
        write_sources()
    else:
        pack_golden(DATASET)
        (DATASET / "PROVENANCE.md").write_text(provenance(), encoding="utf-8")


if __name__ == "__main__":
    main()
