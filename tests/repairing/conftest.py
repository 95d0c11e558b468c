from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

import shardkit
from shardkit.testing.datasets import draft_dataset
from shardkit.testing.packs import snapshot

if TYPE_CHECKING:
    from pathlib import Path

    from shardkit.repairing.result import RepairResult


@dataclass(frozen=True, slots=True)
class Whole:
    """A dataset before its damage: the oracle."""

    folder: Path
    samples: dict[str, tuple[int | None, bytes | None, bytes]]
    """Key -> label, json member, image."""
    places: dict[str, tuple[str, int, int]]
    """Key -> shard, first byte, byte after the last."""
    files: dict[str, bytes]

    def copy(self, to: Path, *, indexes: bool = True) -> Path:
        """Make a copy to be damaged; without indexes the shards are all that is left."""
        if to.exists():
            shutil.rmtree(to)
        shutil.copytree(self.folder, to)
        for path in [] if indexes else to.iterdir():
            if path.suffix != ".tar":
                path.unlink()
        return to

    def untouched(self, name: str, start: int, end: int) -> set[str]:
        """Return the keys of the samples with no byte in [start, end) of a file."""
        return {key for key, (shard, a, b) in self.places.items() if shard != name or b <= start or a >= end}


def read_all(folder: Path) -> dict[str, tuple[int | None, bytes | None, bytes]]:
    """Return every sample of a folder, as GNU tar takes its shards apart."""
    members: dict[str, bytes] = {}
    for shard in sorted(folder.glob("*.tar")):
        listed = subprocess.run(["tar", "-tf", shard], capture_output=True, text=True, check=True)
        assert listed.stderr == ""
        data = subprocess.run(["tar", "-xOf", shard], capture_output=True, check=True).stdout
        sizes = subprocess.run(["tar", "-tvf", shard], capture_output=True, text=True, check=True).stdout.splitlines()
        at = 0
        for line in sizes:
            _, _, size, _, _, name = line.split()
            assert name not in members
            members[name] = data[at : at + int(size)]
            at += int(size)
        assert at == len(data)
    keys = [name.removesuffix(".jpg") for name in members if name.endswith(".jpg")]
    found = {}
    for key in keys:
        label = members.pop(f"{key}.cls", None)
        found[key] = (
            None if label is None else int(label),
            members.pop(f"{key}.json", None),
            members.pop(f"{key}.jpg"),
        )
    assert members == {}
    return found


@pytest.fixture(scope="session")
def make_whole(tmp_path_factory):
    """Return a function that makes a dataset with its oracle; arguments as `draft_dataset` takes them."""

    def make(*arguments, **options) -> Whole:
        draft = draft_dataset(*arguments, **options)
        folder = draft.write(tmp_path_factory.mktemp("whole") / "ds")
        places = {
            row.key: (shard.name, row.sample_offset, row.sample_offset + row.sample_size)
            for shard in draft.shards
            for row in shard.rows
        }
        files = {path.name: path.read_bytes() for path in folder.iterdir()}
        return Whole(folder, read_all(folder), places, files)

    return make


@pytest.fixture(scope="session")
def whole(make_whole) -> Whole:
    """Two shards of four and three samples, with labels and metadata."""
    return make_whole((4, 3))


@pytest.fixture
def repaired(tmp_path):
    """Return a function that repairs a folder, and holds the result against everything that is always true."""
    out = tmp_path / "repaired"

    def call(folder: Path, **options) -> tuple[RepairResult, dict]:
        if out.exists():
            shutil.rmtree(out)
        before = snapshot(folder)
        result = shardkit.repair(folder, out=out, **options)
        assert snapshot(folder) == before, "the dataset was changed"
        if result.manifest is None:
            assert not out.exists()
            return result, {}
        report = shardkit.verify(out)
        assert report.exit_code == 0, [f"{f.code}: {f.message}" for f in report.findings]
        samples = read_all(out)
        assert sum(shard.samples for shard in result.shards) == len(samples) == len(shardkit.open(out))
        assert not os.path.lexists(out / ".shardkit")
        listed = (out / "lost.jsonl").read_bytes().count(b"\n") if result.counts else 0
        assert listed == result.lost
        assert (out / "lost.jsonl").exists() == bool(result.counts)
        return result, samples

    return call
