"""`shardkit repair`: exit codes, texts and JSON, as a shell sees them."""

from __future__ import annotations

import json

import pytest

import shardkit
from shardkit.cli.main import main
from shardkit.testing.damage import cut, flip_byte
from shardkit.testing.datasets import draft_dataset
from shardkit.testing.packs import contents, snapshot, tiny_tree

FIRST = "tiny-000000.tar"


@pytest.fixture
def dataset(tmp_path):
    return draft_dataset().write(tmp_path / "ds")


@pytest.fixture
def run(capsys):
    """Return a function that runs the command and returns its exit code, standard output and standard error."""

    def call(*arguments):
        with pytest.raises(SystemExit) as caught:
            main(["repair", *map(str, arguments)])
        return (caught.value.code, *capsys.readouterr())

    return call


def test_names_of_classes_that_nothing_states_any_more_are_told(run, tmp_path):
    shardkit.pack(tiny_tree(tmp_path / "tree"), tmp_path / "named", name="t", jobs=1)
    assert shardkit.open(tmp_path / "named").classes
    (tmp_path / "named" / "manifest.json").unlink()
    code, out, err = run(tmp_path / "named")
    assert (code, err) == (0, "")
    assert "note: the names of the classes are lost: no json member states them; the labels are kept\n" in out
    assert out.splitlines()[-1] == f"next: shardkit verify {tmp_path}/named"
    assert shardkit.open(tmp_path / "named").classes is None
    assert "names of the classes" not in run(tmp_path / "named")[1]


def test_a_whole_dataset_needs_nothing(run, dataset):
    before = snapshot(dataset)
    code, out, err = run(dataset)
    assert (code, err) == (0, "")
    assert out.splitlines()[0] == f"{FIRST}: whole, 3 samples: every byte proved by the shard's digest"
    assert out.splitlines()[-1] == f"nothing is missing in {dataset}"
    assert snapshot(dataset) == before


def test_losses_end_with_3_and_are_listed(run, dataset, tmp_path):
    flip_byte(dataset / FIRST, 4100)
    code, out, err = run(dataset, "--out", tmp_path / "out")
    assert (code, err) == (3, "")
    assert f"lost: {FIRST}:0 [sample c/0000] payload: crc32c " in out
    assert "  lost        1: 1 payload" in out
    assert out.splitlines()[-2:] == [
        f"wrote 10 files into {tmp_path}/out", f"next: shardkit verify {tmp_path}/out",
    ]  # fmt: skip
    assert shardkit.verify(tmp_path / "out").exit_code == 0


def test_a_shard_of_which_nothing_is_left_ends_with_4(run, dataset, tmp_path):
    cut(dataset / FIRST, 0)
    code, out, _ = run(dataset, "--out", tmp_path / "out")
    assert code == 4
    assert f"{FIRST}: nothing, 0 samples, 3 lost: nothing is left to prove" in out
    assert shardkit.verify(tmp_path / "out").exit_code == 0


def test_nothing_at_all_ends_with_4_and_writes_nothing(run, dataset, tmp_path):
    for path in dataset.glob("*.tar"):
        cut(path, 0)
    code, out, _ = run(dataset, "--out", tmp_path / "out")
    assert code == 4
    assert out.splitlines()[-1] == "nothing was written: not one sample is whole"
    assert not (tmp_path / "out").exists()


def test_damage_without_out_is_a_usage_error_with_a_remedy(run, dataset):
    flip_byte(dataset / FIRST, 4100)
    before = snapshot(dataset)
    code, out, err = run(dataset)
    assert (code, out) == (2, "")
    assert err == (
        f"shardkit: error: there is more than missing index files: {dataset}; found {FIRST} is damaged; nothing was "
        "changed; give --out DIR: a repaired dataset is written there; --dry-run says what can be saved\n"
    )
    assert snapshot(dataset) == before


def test_a_dry_run_says_so(run, dataset, tmp_path):
    cut(dataset / FIRST, 5000)
    code, out, _ = run(dataset, "--dry-run", "--out", tmp_path / "out")
    assert code == 3
    assert out.splitlines()[-1] == "nothing was written: a dry run"
    assert not (tmp_path / "out").exists()


def test_json_has_every_number(run, dataset, tmp_path):
    cut(dataset / FIRST, 5000)
    code, out, err = run(dataset, "--out", tmp_path / "out", "--json")
    told = json.loads(out)
    assert (code, err, told["exit_code"]) == (3, "", 3)
    assert told["counts"] == {"truncated": 2}
    assert told["losses"] == [json.loads(line) for line in (tmp_path / "out" / "lost.jsonl").read_text().splitlines()]
    assert told["shards"][0] == {
        "name": FIRST, "file": FIRST, "state": "salvaged", "proof": "payloads", "samples": 1, "lost": 2,
        "bytes": (tmp_path / "out" / FIRST).stat().st_size, "without_source": 0,
    }  # fmt: skip
    assert set(told["written"]) == set(contents(tmp_path / "out"))
    assert told["generation"] == shardkit.open(tmp_path / "out").manifest.generation


def test_names_are_escaped(run, dataset, tmp_path):
    (dataset / FIRST).rename(dataset / "red\x1b[31m\n.tar")
    code, out, _ = run(dataset, "--out", tmp_path / "out")
    assert code == 0
    assert "\x1b" not in out
    assert r"note: red\x1b[31m\n.tar holds tiny-000000.tar" in out


@pytest.mark.parametrize("arguments", [[""], ["ds", "--out", ""], ["ds", "--max-bytes", "many"], []])
def test_bad_arguments_end_with_2(run, arguments):
    assert run(*arguments)[0] == 2
