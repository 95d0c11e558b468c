from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from typing import TYPE_CHECKING

import pytest

from shardkit.storage import residency
from shardkit.storage.probe import mount_of
from shardkit.testing import mounts

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


def run_or_skip(*command: str | Path) -> str:
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    except FileNotFoundError:
        pytest.skip(f"{command[0]} is not installed")
    except subprocess.CalledProcessError as error:
        pytest.skip(f"{' '.join(map(str, command))}: {error.stderr.strip()}")


def private_mounts() -> None:
    """See mounts that nobody else sees: however this process ends, the kernel then takes them down with it."""
    try:
        mounts.private_mounts()
    except mounts.NoMountsError as error:
        pytest.skip(f"mounting needs root: {error}")


@contextlib.contextmanager
def mounted(*arguments: str | Path, point: Path) -> Iterator[Path]:
    """Mount something at `point` for the length of a `with` block."""
    private_mounts()
    point.mkdir()
    run_or_skip("mount", *arguments, point)
    try:
        yield point
    finally:
        subprocess.run(["umount", point], check=True)


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[tuple[Path, Path]]:
    """Give a fresh ext4 on a device with sectors of 4096 bytes, and the image behind it, for a `with` block."""
    private_mounts()
    image = folder / "device.img"
    with image.open("wb") as file:
        file.truncate(64 << 20)
    device = run_or_skip("losetup", "--find", "--show", "--sector-size", "4096", image)
    with contextlib.ExitStack() as stack:
        try:
            run_or_skip("mkfs.ext4", "-q", "-b", "4096", "-O", "^has_journal", device)
            point = stack.enter_context(mounted("-o", "noatime", device, point=folder / "4k"))
        finally:
            subprocess.run(["losetup", "--detach", device], check=True)  # one that is mounted goes with its mount
        yield point, image


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    """A folder on a file system that has alignment rules: memory and holes take anything."""
    kind = mount_of(tmp_path).file_system
    if kind not in {"ext4", "xfs"}:
        pytest.skip(f"{tmp_path} is on {kind}; alignment means something on ext4 and XFS only (pytest --basetemp)")
    return tmp_path


@pytest.fixture
def without_cachestat(monkeypatch):
    """An older kernel: the number of the system call is one that no kernel knows."""
    monkeypatch.setattr(residency, "_CACHESTAT", 100_000)


@pytest.fixture(scope="session")
def shared_small_disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """One small disk for many tests."""
    with small_disk(tmp_path_factory.mktemp("disk")) as (folder, _):
        yield folder


@pytest.fixture
def blocks_of_4096(shared_small_disk: Path) -> Iterator[Path]:
    """An empty folder on a device with sectors of 4096 bytes."""
    folder = shared_small_disk / "empty"
    folder.mkdir()
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def lost_blocks(tmp_path: Path) -> Iterator[Path]:
    """A file that opens, and whose device answers every read of it with EIO."""
    with small_disk(tmp_path) as (folder, image):
        path = folder / "lost.bin"
        path.write_bytes(os.urandom(1 << 20))
        os.sync()
        os.truncate(image, 4096)  # what lies behind it in the image is gone
        yield path


@pytest.fixture
def squashfs(tmp_path: Path) -> Iterator[Path]:
    """A file system that refuses O_DIRECT and is packed, with one file "a"."""
    source, image = tmp_path / "source", tmp_path / "packed.img"
    source.mkdir()
    (source / "a").write_bytes(os.urandom(100_000))
    run_or_skip("mksquashfs", source, image, "-quiet", "-no-progress")
    with mounted("-t", "squashfs", "-o", "loop,ro", image, point=tmp_path / "packed") as folder:
        yield folder


@pytest.fixture
def large_files(tmp_path: Path) -> list[Path]:
    """Files of 80 MiB in all, on a disk and not in the page cache."""
    kind = mount_of(tmp_path).file_system
    if kind not in {"ext4", "xfs"}:
        pytest.skip(f"{tmp_path} is on {kind}; what is not cached comes from a disk (pytest --basetemp)")
    paths = [tmp_path / f"{number}.bin" for number in range(2)]
    block = os.urandom(1 << 20)
    for path in paths:
        with path.open("wb") as file:
            for _ in range(40):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return paths


@pytest.fixture
def ramfs(tmp_path: Path) -> Iterator[Path]:
    """A file system that refuses O_DIRECT at open."""
    with mounted("-t", "ramfs", "none", point=tmp_path / "ram") as folder:
        yield folder
