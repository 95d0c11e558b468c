"""Shards as other tools write them: tars of Python, GNU tar and bsdtar, with samples in every allowed disorder."""

from __future__ import annotations

import io
import shutil
import subprocess
import tarfile
from typing import TYPE_CHECKING

from shardkit.testing.datasets import tiny_jpeg

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

__all__ = ["COMMANDS", "foreign_files", "write_by_command", "write_tar"]

COMMANDS: Mapping[str, Sequence[str]] = {
    **{f"gnu tar {name}": ("tar", f"--format={name}") for name in ("gnu", "pax", "ustar", "v7")},
    **{f"bsdtar {name}": ("bsdtar", f"--format={name}") for name in ("pax", "ustar", "gnutar")},
}
"""Name of a writer to its command, to which `-cf` is added."""


def foreign_files(first: int = 0, count: int = 7) -> dict[str, bytes]:
    """Return the members of some samples by name: each an image, a label, metadata and a caption.

    The image's extension and the order of the members change from sample to sample; no image starts at a whole page.

    Args:
        first: number of the first sample; the image of sample n is `tiny_jpeg(n, 300 + 977 * (n % 5))`.
        count: of samples.
    """
    files: dict[str, bytes] = {}
    for number in range(first, first + count):
        key = f"train/n{number % 3}/{number:05d}"
        members = {
            "cls": b"%d\n" % (number % 3), "json": b'{"number": %d}' % number, "txt": b"a caption",
            ("JPG", "jpeg", "jpg")[number % 3]: tiny_jpeg(number, 300 + 977 * (number % 5)),
        }  # fmt: skip
        files |= {f"{key}.{extension}": members[extension] for extension in sorted(members, reverse=number % 2 == 0)}
    return files


def write_tar(
    path: Path, files: Mapping[str, bytes] | Iterable[tuple[str, bytes]], tar_format: int = tarfile.PAX_FORMAT,
    **fields: object,
) -> Path:  # fmt: skip
    """Write a tar with Python's tarfile; return its path.

    Args:
        path: of the tar.
        files: name and bytes of each member, in order; names may repeat in a sequence.
        tar_format: of `tarfile`.
        fields: of every `tarfile.TarInfo`, such as `mtime`.
    """
    with tarfile.open(path, "w", format=tar_format) as tar:
        for name, data in dict(files).items() if not isinstance(files, list) else files:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            for field, value in fields.items():
                setattr(info, field, value)
            tar.addfile(info, io.BytesIO(data))
    return path


def write_by_command(path: Path, files: Mapping[str, bytes], command: Sequence[str]) -> bool:
    """Write a tar with another program; return False when it is not installed.

    Args:
        path: of the tar; its folder takes temporary files meanwhile.
        files: name and bytes of each member, in order.
        command: as in `COMMANDS`.
    """
    if shutil.which(command[0]) is None:
        return False
    root, listed = path.with_suffix(".files"), path.with_suffix(".list")
    for name, data in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(data)
    listed.write_text("".join(f"{name}\n" for name in files))
    subprocess.run([*command, "-cf", path, "-C", root, "-T", listed], check=True, stderr=subprocess.DEVNULL)
    shutil.rmtree(root)
    listed.unlink()
    return True
