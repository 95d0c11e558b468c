"""The tools themselves load what we export, each in a process of its own: they warn, patch and start threads."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import os
import sqlite3
import subprocess
import sys
import tarfile

import pytest

import shardkit
from shardkit.exporting.formats import FORMATS
from shardkit.exporting.run import export
from shardkit.format.manifest import load_manifest
from shardkit.testing.exports import tar_members

pytestmark = pytest.mark.peers

PREPARE = """
import sys
from megatron.energon.flavors.webdataset.prepare import WebdatasetPreparator

if __name__ == "__main__":
    WebdatasetPreparator.prepare_dataset(
        sys.argv[1], sys.argv[2:], split_parts_ratio=[("train", 1), ("val", 0), ("test", 0)], shuffle_seed=None,
        workers=1,
    )
    from megatron.energon.eyaml import load_yaml
    import json
    text = open(sys.argv[1] + "/.nv-meta/split.yaml", "rb").read()
    json.dump(load_yaml(text), open(sys.argv[1] + "/split.json", "w"))
"""
ENERGON = """
import json, sys
from megatron.energon import Cooker, DefaultTaskEncoder, WorkerConfig, get_loader, get_train_dataset, stateless

@stateless
def cook(sample):
    return dict(sample)

class Encoder(DefaultTaskEncoder):
    cookers = [Cooker(cook)]

    @stateless
    def encode_sample(self, sample):
        return sample

    @stateless
    def batch(self, samples):
        return samples

if __name__ == "__main__":
    dataset = get_train_dataset(
        sys.argv[1], batch_size=1, shuffle_buffer_size=None, max_samples_per_sequence=None, repeat=False,
        worker_config=WorkerConfig(rank=0, world_size=1, num_workers=0), task_encoder=Encoder(),
    )
    samples = [sample for batch in get_loader(dataset) for sample in batch]
    print(json.dumps({s["__key__"]: [s["cls"], s["json"]["caption"], list(s["jpg"].shape)] for s in samples}))
"""
HUGGINGFACE = """
import json, sys
import datasets

datasets.disable_progress_bars()
loaded = datasets.load_dataset(sys.argv[1], cache_dir=sys.argv[2])
print(json.dumps({
    split: {row["__key__"]: [row["cls"], row["json"]["caption"], list(row["jpg"].size)] for row in rows}
    for split, rows in loaded.items()
}))
"""
AISTORE = """
import json, sys
from aistore.sdk.batch.types import MossIn

entries = [MossIn(**json.loads(line)) for line in open(sys.argv[1])]
print(json.dumps([[entry.obj_name, entry.archpath] for entry in entries]))
"""
TIMM = """
import json, sys
from timm.data import create_dataset

found = {}
for split in sys.argv[2:]:
    samples = create_dataset("wds/", sys.argv[1], split=split, is_training=False, batch_size=1)
    found[split] = [len(samples), [[int(label), list(image.size)] for image, label in samples]]
print(json.dumps(found))
"""
OPENCLIP = """
import json, sys
from open_clip_train.data import get_dataset_size

print(json.dumps(get_dataset_size(sys.argv[1])))
"""
LABELS = [0, 5, 10, 3, 8, 1]
SIZES = [[8, 8], [16, 24]]


@pytest.fixture
def run(tmp_path):
    """Return a function that runs a script against a tool and returns the JSON of its last line."""

    def call(package, script, *arguments):
        with contextlib.suppress(ModuleNotFoundError):
            if importlib.util.find_spec(package) is not None:
                file = tmp_path / "script.py"
                file.write_text(script)
                environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hf")}
                done = subprocess.run(
                    [sys.executable, "-W", "ignore", file, *map(str, arguments)],
                    capture_output=True, text=True, env=environment, check=False, cwd=tmp_path,
                )  # fmt: skip
                assert done.returncode == 0, done.stderr
                return json.loads(done.stdout.splitlines()[-1]) if script is not PREPARE else None
        return pytest.skip(f"{package} is not installed")

    return call


@pytest.mark.parametrize("made", ["aligned", "foreign"])
def test_energon_prepare_makes_the_same_bytes_and_rows(made, request, tmp_path, run):
    dataset = request.getfixturevalue("dataset" if made == "aligned" else "every_writer")
    if made == "foreign":
        shardkit.index(dataset, facts="none")
    export(dataset, "energon")
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    names = sorted(path.name for path in dataset.glob("*.tar"))
    for name in names:
        (theirs / name).write_bytes((dataset / name).read_bytes())
    run("megatron.energon", PREPARE, theirs, *names)
    for name in names:
        assert (dataset / f"{name}.idx").read_bytes() == (theirs / f"{name}.idx").read_bytes()
    ours, made = dataset / ".nv-meta", theirs / ".nv-meta"
    assert contents(ours / "index.sqlite") == contents(made / "index.sqlite")
    assert json.loads((ours / ".info.json").read_text()) == json.loads((made / ".info.json").read_text())
    if made == "aligned":
        assert json.loads((theirs / "split.json").read_text()) == {
            "split_parts": {"train": ["tiny-{000000..000002}.tar"], "val": [], "test": []}, "exclude": [],
        }  # fmt: skip


def contents(path):
    """Return the rows, columns and indexes of a database."""
    with contextlib.closing(sqlite3.connect(path)) as connection:
        names = connection.execute("SELECT type, name, tbl_name FROM sqlite_master ORDER BY name").fetchall()
        return {
            name: (
                kind, table, connection.execute(f"PRAGMA table_info({name})").fetchall(),
                connection.execute(f"PRAGMA index_info({name})").fetchall(),
                connection.execute(f"SELECT * FROM {name} ORDER BY 1, 3, 4").fetchall() if kind == "table" else None,
            )
            for kind, name, table in names
        }  # fmt: skip


@pytest.fixture
def linked(dataset, tmp_path):
    """The same samples in the tars of another tool, by links in the folder of their indexes; names with dots."""
    (tmp_path / "theirs").mkdir()
    for path in sorted(dataset.glob("*.tar")):
        with tarfile.open(tmp_path / "theirs" / f"v1.{path.name}", "w") as tar:
            folder = tarfile.TarInfo("c")
            folder.type = tarfile.DIRTYPE
            tar.addfile(folder)
            for name, _, payload in tar_members(path):
                member = tarfile.TarInfo(name)
                member.size = len(payload)
                tar.addfile(member, io.BytesIO(payload))
    shardkit.index(tmp_path / "theirs", out=tmp_path / "linked" / "ds")
    return tmp_path / "linked" / "ds"


@pytest.mark.parametrize("made", ["dataset", "linked"])
def test_energon_loads_every_sample(made, request, run):
    dataset = request.getfixturevalue(made)
    export(dataset, "energon")
    assert run("megatron.energon", ENERGON, dataset) == {
        f"c/{i:04}": [LABELS[i], f"picture {i}", [3, *SIZES[i % 2][::-1]]] for i in range(6)
    }


def test_energon_loads_the_shards_of_a_split_alone(split_dataset, run):
    export(split_dataset, "energon")
    assert sorted(run("megatron.energon", ENERGON, split_dataset)) == ["c/0000", "c/0001", "c/0002", "c/0005"]


def test_huggingface_loads_every_sample_in_its_split(split_dataset, tmp_path, run):
    export(split_dataset, ["huggingface", "wids", "energon", "timm"])  # what lies beside it is no data
    found = run("datasets", HUGGINGFACE, split_dataset, tmp_path / "cache")
    numbers = {"train": (0, 1, 2, 5), "val": (3, 4)}
    assert found == {
        split: {f"c/{i:04}": [LABELS[i], f"picture {i}", SIZES[i % 2]] for i in members}
        for split, members in numbers.items()
    }


def test_huggingface_loads_every_sample_through_links(linked, tmp_path, run):
    export(linked, FORMATS)
    assert run("datasets", HUGGINGFACE, linked, tmp_path / "cache") == {
        "train": {f"c/{i:04}": [LABELS[i], f"picture {i}", SIZES[i % 2]] for i in range(6)}
    }


def test_timm_loads_every_sample_in_its_split(split_dataset, run):
    export(split_dataset, "timm")
    numbers = {"train": (0, 1, 2, 5), "val": (3, 4)}
    assert run("timm", TIMM, split_dataset, *numbers) == {
        split: [len(members), [[LABELS[i], SIZES[i % 2]] for i in members]] for split, members in numbers.items()
    }


def test_timm_loads_every_sample_through_links(linked, run):
    export(linked, "timm")
    assert run("timm", TIMM, linked, "train") == {"train": [6, [[LABELS[i], SIZES[i % 2]] for i in range(6)]]}


@pytest.mark.parametrize("made", ["dataset", "linked"])
def test_open_clip_finds_how_many_samples_there_are(made, request, run):
    dataset = request.getfixturevalue(made)
    shards = dataset / load_manifest((dataset / "manifest.json").read_bytes()).brace
    assert run("open_clip_train", OPENCLIP, shards) == [None, 3]
    export(dataset, "openclip")
    assert run("open_clip_train", OPENCLIP, shards) == [6, 3]


def test_aistore_takes_every_line_as_an_entry_of_a_batch(dataset, run):
    export(dataset, "aistore")
    found = run("aistore", AISTORE, dataset / "aistore.jsonl")
    assert len(found) == 18
    assert found[-1] == ["tiny-000002.tar", "c/0005.jpg"]
