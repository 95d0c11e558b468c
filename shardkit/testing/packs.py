"""A tree that is packed in no time and still has everything: classes, odd names, what is refused."""

from __future__ import annotations

import os
from pathlib import Path

from PIL import Image

from shardkit.testing.datasets import tiny_jpeg
from shardkit.testing.photos import encode

__all__ = ["StopAfter", "contents", "slow_tree", "snapshot", "tiny_tree"]

_MTIME_NS = 1_700_000_000_000_000_000
_BROKEN = {
    b"a/broken \xff\n.jpg": b"\xff\xd8\xff\xe0 broken",  # not UTF-8, and a line break
    b"b/100%25.jpg": b"no image",
    b"c/empty.jpg": b"",
}


def tiny_tree(root: Path, *, images: int = 9, size: int | None = None) -> Path:
    """Make a folder with three classes, `images` whole images and three broken ones; return it.

    Args:
        root: made.
        images: whole images, spread over the classes.
        size: bytes of a whole image; default the least, different for any two.
    """
    files = {f"{'abc'[number % 3]}/{number:05d}.jpg".encode(): tiny_jpeg(number, size) for number in range(images)}
    for name, data in (files | _BROKEN).items():
        path = os.path.join(os.fsencode(root), name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "wb") as file:
            file.write(data)
        os.utime(path, ns=(_MTIME_NS, _MTIME_NS))
    return root


def slow_tree(root: Path, *, images: int = 24) -> Path:
    """Make a folder of large images, each of which costs `--check decode` about 50 ms; return it.

    All are one file under many names, so that the folder costs neither time nor space.
    """
    root.mkdir()
    first = root / "0000.jpg"
    first.write_bytes(encode(Image.new("RGB", (4000, 4000), (90, 120, 30))))
    for number in range(1, images):
        os.link(first, root / f"{number:04d}.jpg")
    return root


def contents(folder: Path) -> dict[str, bytes]:
    """Return every file below a folder with its bytes; an empty folder as its name and a slash."""
    found: dict[str, bytes] = {}
    for path, folders, names in os.walk(folder):
        relative = Path(path).relative_to(folder)
        found |= {str(relative / name): Path(path, name).read_bytes() for name in names}
        if not folders and not names and path != str(folder):
            found[f"{relative}/"] = b""
    return found


def snapshot(folder: Path) -> dict[str, tuple[bytes, int, int]]:
    """Return everything below a folder: names, the bytes of files, modes, and times of modification."""
    found = {}
    for path in sorted(folder.rglob("*")):
        status = path.lstat()
        data = path.read_bytes() if path.is_file() else b""
        found[str(path.relative_to(folder))] = (data, status.st_mode, status.st_mtime_ns)
    return found


class StopAfter:
    """Progress of a pack that somebody stops, at an exact moment."""

    class Stop(BaseException):
        """What stops it: no error of the pack, as Ctrl-C is none."""

    def __init__(self, reports: int) -> None:
        """Let that many reports pass. With one job, and few samples in a shard, a shard reports once, when packed."""
        self._left = reports

    def begin(self, samples: int, source_bytes: int) -> None:
        """Do nothing."""

    def advance(self, samples: int, source_bytes: int, refused: int) -> None:
        """Count a report.

        Raises:
            Stop: it is one too many.
        """
        self._left -= 1
        if self._left < 0:
            raise self.Stop
