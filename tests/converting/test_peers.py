"""Datasets that the frameworks' own writers wrote."""

from __future__ import annotations

import importlib.util
import json
import runpy
import subprocess
import sys

import pytest

import shardkit
from shardkit.cli.main import main
from shardkit.testing.packs import contents

from .conftest import members_of, rows_of, whole

# The libraries warn, of each other and of their own.
pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("ignore")]

READ = """
import json, sys
from pathlib import Path

ROWS = [(Path(path).read_bytes(), label, Path(path).stem) for path, label in json.loads(Path(sys.argv[1]).read_text())]
"""
WRITERS = {
    "mds": READ + """
from streaming import MDSWriter

columns = {"image": sys.argv[3], "label": "int", "name": "str", "more": "json"}
with MDSWriter(out=sys.argv[2], columns=columns, size_limit=6000) as out:
    for image, label, name in ROWS:
        if sys.argv[3] == "jpeg":  # the writer takes a JPEG's own bytes only from a file that Pillow opened
            from PIL import Image
            image = Image.open(next(path for path, _ in json.loads(Path(sys.argv[1]).read_text()) if name in path))
        out.write({"image": image, "label": label, "name": name, "more": {"x": [label]}})
""",
    "litdata": READ + """
from litdata import optimize

def sample(number):
    image, label, name = ROWS[number]
    if sys.argv[3] == "jpeg":
        from PIL import Image
        image = Image.open(json.loads(Path(sys.argv[1]).read_text())[number][0])
    return {"image": image, "label": label, "name": name}

if __name__ == "__main__":
    optimize(sample, list(range(len(ROWS))), output_dir=sys.argv[2], chunk_bytes="6KB", num_workers=1)
""",
    "hf": READ + """
import datasets

kind = datasets.Image() if sys.argv[3] == "jpeg" else datasets.Value("binary")
columns = {"image": kind, "label": datasets.ClassLabel(names=["a", "b", "c"]), "name": datasets.Value("string")}
images = [{"bytes": image, "path": None} if sys.argv[3] == "jpeg" else image for image, _, _ in ROWS]
rows = {"image": images, "label": [label for _, label, _ in ROWS], "name": [name for _, _, name in ROWS]}
datasets.Dataset.from_dict(rows, features=datasets.Features(columns)).save_to_disk(sys.argv[2], num_shards=2)
""",
}  # fmt: skip
KINDS = [pytest.param("mds", marks=pytest.mark.mds), "litdata", "hf"]
LIBRARY = {"mds": "streaming", "litdata": "litdata", "hf": "datasets"}
PICKLED = {
    "mds": """
import sys
from streaming import MDSWriter
with MDSWriter(out=sys.argv[1], columns={"image": "pkl"}) as out:
    out.write({"image": {1, 2}})
""",
    "litdata": """
import sys
from litdata import optimize
def sample(number):
    return {"image": {1, 2}}
if __name__ == "__main__":
    optimize(sample, [0], output_dir=sys.argv[1], chunk_bytes="6KB", num_workers=1)
""",
}


def needs(kind):
    if importlib.util.find_spec(LIBRARY[kind]) is None:
        pytest.skip(f"{LIBRARY[kind]} is not installed")


@pytest.fixture(autouse=True)
def _alone(tmp_path, monkeypatch):
    """Let no library ask a hub, or leave a cache behind."""
    for name, value in (("HOME", tmp_path), ("HF_HUB_OFFLINE", 1), ("HF_HOME", tmp_path / "hf")):
        monkeypatch.setenv(name, str(value))


@pytest.fixture
def script(tmp_path, monkeypatch):
    """Return a function that runs a script: LitData's, which starts processes, in one of its own."""

    def call(kind, text, *arguments):
        path = tmp_path / "script.py"
        path.write_text(text)
        given = [str(path), *map(str, arguments)]
        if kind == "litdata":
            subprocess.run([sys.executable, "-W", "ignore", *given], check=True, cwd=tmp_path)
            return
        monkeypatch.setattr(sys, "argv", given)
        runpy.run_path(str(path), run_name="__main__")

    return call


@pytest.fixture
def convert(capsys):
    """Return a function that runs the command in this process and returns its exit code and what it wrote."""

    def call(*arguments):
        with pytest.raises(SystemExit) as caught:
            main(["convert", *map(str, arguments)])
        return caught.value.code, "".join(capsys.readouterr())

    return call


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("column", ["bytes", "jpeg"])
def test_a_dataset_comes_over_byte_for_byte(tree, tmp_path, convert, script, kind, column):
    needs(kind)
    files = sorted(tree.rglob("*.jpg"))[:20]
    labels = {file.stem: "abc".index(file.parent.name) for file in files}
    (tmp_path / "list.json").write_text(json.dumps([[str(file), labels[file.stem]] for file in files]))
    script(kind, WRITERS[kind], tmp_path / "list.json", tmp_path / "src", column)
    before = contents(tmp_path / "src")
    made = {}
    for jobs in (1, 2) if column == "bytes" else (1,):
        out = tmp_path / f"out{jobs}"
        given = ["--name", "t", "--shards", 3, "--shuffle", "--key-column", "name", "--jobs", jobs]
        code, output = convert(f"{kind}:{tmp_path / 'src'}", out, *given)
        assert code == 0, output
        made[jobs] = {name: data for name, data in contents(out).items() if name != "manifest.json"}
    assert made[1] == made.get(2, made[1])
    assert contents(tmp_path / "src") == before
    members, rows = members_of(out), rows_of(out)
    assert {name: data for name, data in members.items() if name.endswith(".jpg")} == {
        f"{file.stem}.jpg": file.read_bytes() for file in files
    }
    assert {key: row["label"] for key, row in rows.items()} == labels
    assert kind != "mds" or json.loads(members[f"{files[4].stem}.json"]) == {"more": {"x": [labels[files[4].stem]]}}
    assert shardkit.open(out).classes == (("a", "b", "c") if kind == "hf" else None)
    assert whole(out)


@pytest.mark.parametrize("kind", KINDS[:2])
def test_pickles_are_never_read(tmp_path, convert, script, kind):
    needs(kind)
    script(kind, PICKLED[kind], tmp_path / "src")
    code, output = convert(f"{kind}:{tmp_path / 'src'}", tmp_path / "out")
    assert code == 9, output
    assert "pickles" in output
