"""Datasets of a few tiny images, and tars as other tools write them."""

from __future__ import annotations

import io
import json
import tarfile

import pyarrow as pa
import pytest

import shardkit
from shardkit.testing.datasets import tiny_jpeg
from shardkit.testing.packs import contents

PLACE = ("offset", "sample_offset", "sample_size", "json_offset")


@pytest.fixture(scope="session")
def tree(tmp_path_factory):
    """A folder of 30 images in the classes a, b, c."""
    root = tmp_path_factory.mktemp("tree") / "src"
    for number in range(30):
        path = root / "abc"[number % 3] / f"{number:05d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(tiny_jpeg(number, 400 + 37 * number))
    return root


@pytest.fixture(scope="session")
def packed(tree, tmp_path_factory):
    """That folder as a dataset of four shards."""
    folder = tmp_path_factory.mktemp("packed") / "t"
    shardkit.pack(tree, folder, name="t", shards=4, jobs=1)
    return folder


@pytest.fixture(scope="session")
def listed(tree, tmp_path_factory):
    """A dataset with metadata in json members, packed from a list."""
    folder = tmp_path_factory.mktemp("listed")
    rows = [
        json.dumps(
            {"path": str(path.relative_to(tree)), "label": path.parent.name, "caption": f"é {path.stem}", "x": 1e22}
        )
        for path in sorted(tree.rglob("*.jpg"))
    ]
    (tree / "list.jsonl").write_text("\n".join(rows) + "\n")
    shardkit.pack(tree / "list.jsonl", folder / "l", name="l", shards=3, jobs=1)
    (tree / "list.jsonl").unlink()
    return folder / "l"


@pytest.fixture
def write_tar(tmp_path):
    """Return a function: writes a tar of names and bytes with Python's tarfile."""

    def write(name, members, tar_format=tarfile.PAX_FORMAT):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with tarfile.open(path, "w", format=tar_format) as tar:
            for member, data in members:
                info = tarfile.TarInfo(member)
                info.size, info.mtime = len(data), 1_700_000_000.25
                tar.addfile(info, io.BytesIO(data))
        return path

    return write


@pytest.fixture
def sample():
    """Return a function: the members of one labelled sample."""

    def make(number, *, extension="jpg", label=None, metadata=None):
        members = [(f"{number:06d}.{extension}", tiny_jpeg(number))]
        members += [] if label is None else [(f"{number:06d}.cls", str(label).encode())]
        members += [] if metadata is None else [(f"{number:06d}.json", metadata)]
        return members

    return make


def rows_of(folder):
    """Return every row of a dataset's index, by key."""
    with pa.ipc.open_file(folder / "index.arrow") as reader:
        return {row["key"]: row for row in reader.read_all().to_pylist()}


def content_of(rows):
    """Return index rows without where things lie."""
    return {key: {name: value for name, value in row.items() if name not in PLACE} for key, row in rows.items()}


def shards_of(folder):
    """Return the bytes of every file of a dataset but the manifest, by name."""
    return {name: data for name, data in contents(folder).items() if name != "manifest.json"}


def members_of(folder):
    """Return the bytes of every member of a dataset, by name, as Python's tarfile finds them."""
    found = {}
    for shard in sorted(folder.glob("*.tar")):
        with tarfile.open(shard) as tar:
            for info in tar:
                assert info.name not in found
                found[info.name] = tar.extractfile(info).read()
    return found


def order_of(folder):
    """Return the keys in stored order."""
    with pa.ipc.open_file(folder / "index.arrow") as reader:
        return reader.read_all()["key"].to_pylist()


def refusals_of(folder):
    """Return the lines of rejected.jsonl."""
    path = folder / "rejected.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def whole(folder):
    """Tell whether verify finds nothing."""
    return shardkit.verify(folder, level="decode").exit_code == 0


def damaged_copy(packed, folder):
    """Copy a packed dataset into a new folder, and flip a byte of the image of sample b/00004; returns the folder."""
    folder.mkdir()
    for path in packed.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    row = rows_of(folder)["b/00004"]
    shard = next(path for path in folder.glob("*.tar") if path.read_bytes().find(b"b/00004.jpg") >= 0)
    with shard.open("r+b") as file:
        file.seek(row["offset"] + 40)
        file.write(b"\x55")
    return folder
