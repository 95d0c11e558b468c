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
from PIL import Image

import shardkit
from shardkit.errors import ConfigError
from shardkit.exporting.formats import FORMATS
from shardkit.exporting.run import export
from shardkit.format.manifest import load_manifest
from shardkit.testing.datasets import draft_dataset, tiny_jpeg
from shardkit.testing.exports import tar_members
from shardkit.testing.foreign import write_tar

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
from megatron.energon import WorkerConfig, get_loader, get_train_dataset

if __name__ == "__main__":
    dataset = get_train_dataset(
        sys.argv[1], batch_size=1, shuffle_buffer_size=None, max_samples_per_sequence=None, repeat=False,
        worker_config=WorkerConfig(rank=0, world_size=1, num_workers=0),
    )
    print(json.dumps({b.__key__[0]: [b.label[0], list(b.image[0].shape)] for b in get_loader(dataset)}))
"""
ENERGON_CRUDE = """
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
    print(json.dumps({s["__key__"]: [s["json"]["caption"], list(s["jpg"].shape)] for s in samples}))
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
HUGGINGFACE_ROWS = """
import json, os, sys
import datasets

datasets.disable_progress_bars()

def members(row):
    return {name: len(str(value)) for name, value in row.items() if value is not None and name[:2] != "__"}

def rows(folder):
    path, more = folder, {}
    if not os.path.exists(folder + "/README.md"):
        files = json.load(open(folder + "/_info.json"))["splits"]
        path, more = "webdataset", {"data_files": {
            split: [f"{folder}/{name}" for name in one["filenames"]] for split, one in files.items()
        }}
    try:
        loaded = datasets.load_dataset(path, cache_dir=folder + "/cache", **more)
    except Exception as error:
        return str(error)
    for split, found in loaded.items():
        for name, feature in found.features.items():
            if isinstance(feature, datasets.Image):
                loaded[split] = loaded[split].cast_column(name, datasets.Image(decode=False))
    return {split: {row["__key__"]: sorted(members(row)) for row in found} for split, found in loaded.items()}

print(json.dumps({folder: rows(folder) for folder in sys.argv[1:]}))
"""
TIMM_ROWS = """
import json, sys
from timm.data import create_dataset

def rows(folder, split):
    samples = create_dataset("wds/", folder, split=split, is_training=False, batch_size=1)
    return [[int(label), list(image.size)] for image, label in samples]

splits = {folder: json.load(open(folder + "/_info.json"))["splits"] for folder in sys.argv[1:]}
print(json.dumps({folder: {split: rows(folder, split) for split in found} for folder, found in splits.items()}))
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
        f"c/{i:04}": [LABELS[i], [3, *SIZES[i % 2][::-1]]] for i in range(6)
    }


def test_energon_loads_samples_without_labels_by_a_cooker(tmp_path, run):
    dataset = draft_dataset((3, 2, 1), labels=False).write(tmp_path / "ds")
    export(dataset, "energon")
    assert run("megatron.energon", ENERGON_CRUDE, dataset) == {
        f"c/{i:04}": [f"picture {i}", [3, *SIZES[i % 2][::-1]]] for i in range(6)
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


ALIKE = ["cls jpg txt"] * 6
UNEVEN = {
    # name: the extensions of each sample of two shards, and whether `datasets` and timm read them as shardkit does
    "alike": (ALIKE, ALIKE, True, True),
    "the image is called otherwise once": (ALIKE, [*ALIKE, "cls jpeg txt"], False, False),
    "all images are called otherwise": (["cls jpeg"] * 6, ["cls jpeg"], True, True),
    "upper case once": (ALIKE, [*ALIKE, "cls JPG txt"], False, True),
    "a label is missing": (ALIKE, ["jpg txt"], True, False),
    "a further member is missing": (ALIKE, ["cls jpg"], True, True),
    "a further member is missing at the start": ([*ALIKE[:4], "cls jpg"], ALIKE, False, True),
    "only later samples have a further member": (["cls jpg"] * 6, ALIKE, False, True),
    "a second image": (["cls jpg png"] * 6, ["cls jpg png"], True, True),
    "a second image that timm prefers": (["cls jpeg png"] * 6, ["cls jpeg png"], True, False),
    "the second image is alone once": (["cls jpg png"] * 6, ["cls png"], False, True),
    "a sample that index has refused": (ALIKE, [*ALIKE, "cls txt"], False, True),
    "a name that begins with two lines": (ALIKE, [*ALIKE, "__:cls jpg txt"], False, True),
    "split: the first has more": (ALIKE, ["cls jpg"] * 6, False, True),
    "split: the last has more": (["cls jpg"] * 6, ALIKE, True, True),
}


@pytest.fixture
def uneven(tmp_path, change_manifest):
    """Every case of UNEVEN: its name to its folder, indexed."""
    folders = {}
    for number, (name, (*shards, _, _)) in enumerate(UNEVEN.items()):
        folder = folders[name] = tmp_path / f"case{number}"
        folder.mkdir()
        for shard, samples in enumerate(shards):
            files = {}
            for row, (prefix, _, ends) in enumerate(sample.rpartition(":") for sample in samples):
                for end in ends.split():
                    data = {"cls": b"%d" % row, "txt": b"text", "png": tiny_jpeg(row + 1)}.get(end, tiny_jpeg(row))
                    files[f"{prefix}s{shard}{row}.{end}"] = data
            write_tar(folder / f"{shard}.tar", files)
        shardkit.index(folder)
        if name.startswith("split"):
            change_manifest(folder, splits={"train": ("0.tar",), "val": ("1.tar",)})
    return folders


def listed(folder):
    """Return split to the names of its shards."""
    manifest = load_manifest((folder / "manifest.json").read_bytes())
    return manifest.splits or {"train": [shard.name for shard in manifest.shards]}


def exports(folder, name):
    """Tell whether an export is made; else write the list of shards that the tool is tried with."""
    try:
        export(folder, name)
    except ConfigError:
        splits = {
            split: {"name": split, "num_samples": 1, "filenames": names, "shard_lengths": [1] * len(names)}
            for split, names in listed(folder).items()
        }
        (folder / "_info.json").write_text(json.dumps({"splits": splits}))
        return False
    return True


def ours(folder):
    """Return split to its samples as shardkit reads them; the first digit of a key is the shard's number."""
    with shardkit.open(folder) as dataset:
        samples = [dataset[number] for number in range(len(dataset))]
    return {
        split: [sample for sample in samples if f"{sample.key.lstrip('_')[1]}.tar" in names]
        for split, names in listed(folder).items()
    }


def test_what_huggingface_would_read_otherwise_is_refused_and_nothing_else(uneven, run):
    made = {name: exports(folder, "huggingface") for name, folder in uneven.items()}
    found = run("datasets", HUGGINGFACE_ROWS, *uneven.values())
    for name, folder in uneven.items():
        members = [one for shard in ("0.tar", "1.tar") for one, _, _ in tar_members(folder / shard)]
        expected = {
            split: {s.key: sorted(m.partition(".")[2] for m in members if m.startswith(f"{s.key}.")) for s in samples}
            for split, samples in ours(folder).items()
        }
        read = found[str(folder)]
        rows = [row for split in read.values() for row in split.values()] if isinstance(read, dict) else []
        alike = read == expected and any(all(image in row for row in rows) for image in ("jpg", "jpeg"))
        assert (made[name], alike) == (UNEVEN[name][2],) * 2, (name, read)


def test_what_timm_would_read_otherwise_is_refused_and_nothing_else(uneven, run):
    made = {name: exports(folder, "timm") for name, folder in uneven.items()}
    found = run("timm", TIMM_ROWS, *uneven.values())
    for name, folder in uneven.items():
        expected = {
            split: [[sample.label, list(Image.open(io.BytesIO(sample.jpeg)).size)] for sample in samples]
            for split, samples in ours(folder).items()
        }
        read = found[str(folder)]
        alike = read == expected or not any(read.values())  # nothing at all: it asks for --input-key
        assert (made[name], alike) == (UNEVEN[name][3],) * 2, (name, read)
