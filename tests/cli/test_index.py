"""`shardkit index`: exit codes, texts, JSON, as a shell sees them; and the other commands on what it made."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest

import shardkit
from shardkit.cli.main import main
from shardkit.errors import ConfigError
from shardkit.storage.lock import FolderLock
from shardkit.testing.datasets import tiny_jpeg
from shardkit.testing.foreign import foreign_files, write_tar
from shardkit.torch import ShardLoader

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}


@pytest.fixture
def shards(tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    write_tar(folder / "t-000.tar", foreign_files())
    write_tar(folder / "t-001.tar", foreign_files(7))
    return folder


@pytest.fixture
def run(capsys):
    """Return a function that runs a command and returns its exit code, standard output and standard error."""

    def call(*arguments):
        with pytest.raises(SystemExit) as caught:
            main([*map(str, arguments)])
        return (caught.value.code, *capsys.readouterr())

    return call


def spoil(folder):
    members = [("a.jpg", tiny_jpeg(0)), ("b.jpg", tiny_jpeg(1)), ("a.cls", b"1"), ("evil\x1b[2J.txt", b"")]
    write_tar(folder / "t-001.tar", members)


def test_whole_shards_end_with_0(run, shards):
    code, out, err = run("index", shards)
    assert (code, err) == (0, "")
    assert out.startswith(f"indexed 14 samples in 2 shards in {shards}: 92.2 kB in ")
    assert len(out.splitlines()) == 3
    assert out.endswith(f"\nnext: shardkit verify {shards}\n")


def test_refusals_end_with_3_and_are_told_by_shard_with_names_escaped(run, shards):
    spoil(shards)
    code, out, err = run("index", shards)
    assert (code, err) == (3, "")
    assert "t-001.tar: refused 2 not-adjacent, 1 no-image\n" in out
    assert "  refused     3; see rejected.jsonl\n" in out
    assert "\x1b" not in out
    code, out, err = run("index", shards, "--on-error", "fail", "--overwrite")
    assert (code, out) == (3, "")
    assert "refused (not-adjacent): t-001.tar/a; " in err


def test_json_is_the_whole_result_on_standard_output(run, shards):
    spoil(shards)
    code, out, err = run("index", f"{shards}/t-{{000..001}}.tar", "--json", "--facts", "header", "--name", "x")
    document = json.loads(out)
    assert (code, err, document["exit_code"]) == (3, "", 3)
    assert document["by_shard"] == {"t-001.tar": {"not-adjacent": 2, "no-image": 1}}
    assert (document["samples"], document["shards"], document["facts"], document["name"]) == (8, 2, "header", "x")
    assert document["folder"] == str(shards)


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ([], 2, "Missing argument 'TAR...'"),
        (["missing.tar"], 2, "there is no such shard: missing.tar"),
        (["https://example.com/a.tar"], 2, "only local files are indexed"),
        (["pipe:rm -rf x"], 9, "a command instead of a shard: nothing is run"),
        (["{0..99999999}.tar"], 9, "stands for too many names"),
        (["t-000.tar", "--facts", "some"], 2, "'some' is not one of"),
        (["t-000.tar", "--image-ext", ""], 2, "not the extension of an image"),
        (["t-000.tar", "--name", "A B"], 2, "a dataset's name is"),
        (["t-000.tar", "--resume", "--overwrite"], 2, "give one of them"),
        (["/dev/null"], 9, "not a regular file"),
        (["t-000.tar", "--out", "t-001.tar"], 2, "the target is not a folder"),
    ],
)
def test_what_cannot_be_served_ends_with_its_code_and_a_sentence(run, shards, monkeypatch, arguments, code, message):
    monkeypatch.chdir(shards)
    found, out, err = run("index", *arguments)
    assert (found, out) == (code, "")
    assert message in err
    assert sorted(path.name for path in shards.iterdir()) == ["t-000.tar", "t-001.tar"]


@pytest.mark.parametrize("given", [".", "gone.tar"])
def test_a_link_that_leads_nowhere_is_told_as_one(run, shards, monkeypatch, given):
    monkeypatch.chdir(shards)
    (shards / "gone.tar").symlink_to("elsewhere/x.tar")
    code, _, err = run("index", given)
    assert code == 2
    assert re.search(r"a link to a shard leads nowhere: \S*gone\.tar; found elsewhere/x\.tar; mend the link", err)


def test_a_tar_that_is_none_ends_with_4(run, shards):
    (shards / "t-000.tar").write_bytes(b"no tar at all " * 100)
    code, _, err = run("index", shards / "t-000.tar")
    assert code == 4
    assert f"not a tar: {shards}/t-000.tar:0; expected checksum" in err


def test_a_held_folder_ends_with_8(run, shards):
    (shards / ".shardkit").mkdir()
    with FolderLock(os.fsencode(shards / ".shardkit/lock")):
        code, _, err = run("index", shards)
    assert code == 8
    assert "another run holds the target" in err


def test_what_lacks_checksums_says_so_everywhere(run, shards, tmp_path):
    code, out, _ = run("index", shards, "--facts", "none")
    assert "  unproven    the bytes of images: --facts full gives them checksums\n" in out
    code, out, _ = run("verify", shards)
    assert code == 0
    assert "  not proven  the bytes of images: the shards were indexed without checksums (--facts full)\n" in out
    assert json.loads(run("verify", shards, "--json")[1])["checksums"] is False
    code, out, _ = run("show", shards, "train/n0/00003")
    assert (code, "CRC-32C unknown" in out) == (0, True)
    code, out, _ = run("extract", shards, tmp_path / "tree")
    assert code == 0
    assert "  not proven  the bytes of images: the shards were indexed without checksums (--facts full)\n" in out
    assert json.loads(run("extract", shards, tmp_path / "tree", "--json")[1])["checksums"] is False


def test_ls_show_cat_and_extract_take_what_it_made(run, shards, tmp_path):
    run("index", shards)
    code, out, _ = run("ls", shards, "--where", "label == 2", "--json")
    assert code == 0
    assert [one["key"] for one in json.loads(out)["rows"]] == [f"train/n2/{n:05d}" for n in (2, 5, 8, 11)]
    code, out, _ = run("show", shards, "train/n0/00003")
    assert code == 0
    assert "train/n0/00003.txt: 9 bytes" in out
    done = subprocess.run(
        [sys.executable, "-m", "shardkit", "cat", shards, "train/n0/00003", "--member", "txt"],
        env=ENVIRONMENT, capture_output=True, check=True,
    )  # fmt: skip
    assert done.stdout == b"a caption"
    code, out, err = run("extract", shards, tmp_path / "tree")
    assert (code, err) == (0, "")
    images = {
        name: data for name, data in {**foreign_files(), **foreign_files(7)}.items() if name[-2:] in ("PG", "pg", "eg")
    }
    found = {str(path.relative_to(tmp_path / "tree")): path.read_bytes() for path in (tmp_path / "tree").rglob("*.*")}
    assert found == images


def test_export_takes_it(run, shards):
    run("index", shards)
    assert run("export", shards, "--to", "wids,dali,energon")[0] == 0
    code, _, err = run("export", shards, "--to", "huggingface")
    assert code == 2
    assert "no export for huggingface: the first 5 samples of a dataset must have members of the same extensions" in err


def test_progress_is_shown_on_a_terminal_only(shards):
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 120, 0, 0))
    done = subprocess.run(
        [sys.executable, "-m", "shardkit", "index", shards, "--json"], env=ENVIRONMENT, stderr=theirs,
        stdout=subprocess.PIPE, check=True,
    )  # fmt: skip
    os.close(theirs)
    shown = os.read(ours, 1 << 16)
    os.close(ours)
    assert b"2/2 shards" in shown
    assert json.loads(done.stdout)["exit_code"] == 0


@pytest.mark.parametrize(
    ("facts", "where", "found"),
    [
        ("header", "crc32c == 0", "crc32c"), ("header", "scans < 2 and width > 0", "scans"),
        ("none", "width == 0", "width"), ("none", "size > 0 and crc32c != 7", "crc32c"),
    ],
)  # fmt: skip
def test_a_condition_on_what_nobody_looked_at_is_refused(run, shards, facts, where, found):
    """The column is 0 in every row, which would choose all samples, or none."""
    assert run("index", shards, "--facts", facts)[0] == 0
    code, out, err = run("ls", shards, "--where", where)
    assert (code, out) == (2, "")
    assert f"found {found}" in err
    assert run("ls", shards, "--where", "size > 0")[0] == 0


def flip(path):
    data = bytearray(path.read_bytes())
    at = data.index(b"\xff\xd8") + 200
    data[at] ^= 1
    path.write_bytes(data)


def test_overwrite_does_not_make_a_changed_shard_whole(run, shards):
    run("index", shards)
    before = {path.name: path.read_bytes() for path in shards.iterdir() if path.suffix != ".tar"}
    flip(shards / "t-001.tar")
    code, out, err = run("index", shards, "--overwrite")
    assert (code, out) == (4, "")
    assert "other bytes in t-001.tar; nothing was changed; shardkit convert takes what is whole; " in err
    assert "--accept-changes" in err
    assert {path.name: path.read_bytes() for path in shards.iterdir() if path.suffix != ".tar"} == before
    assert run("verify", shards)[0] == 4


def test_a_longer_shard_is_a_changed_one(run, shards):
    run("index", shards)
    write_tar(shards / "t-000.tar", foreign_files(0, 9))
    assert run("index", shards, "--overwrite")[0] == 4


def test_accepted_changes_are_told(run, shards):
    run("index", shards)
    flip(shards / "t-001.tar")
    code, out, _ = run("index", shards, "--overwrite", "--accept-changes")
    assert (code, "  changed     t-001.tar: indexed as they are now\n" in out) == (0, True)
    flip(shards / "t-000.tar")
    code, out, _ = run("index", shards, "--overwrite", "--accept-changes", "--json")
    assert (code, json.loads(out)["changed"], json.loads(out)["uncompared"]) == (0, ["t-000.tar"], None)
    assert json.loads(run("index", shards, "--overwrite", "--json")[1])["changed"] == []


def test_accepting_changes_without_replacing_anything_is_refused(run, shards):
    code, _, err = run("index", shards, "--accept-changes")
    assert (code, "goes with --overwrite" in err) == (2, True)


@pytest.mark.parametrize(("facts", "damage", "why"), [
    ("full", True, "the manifest of the index before is damaged"),
    ("header", False, "the index before has no checksums"),
])  # fmt: skip
def test_an_index_that_says_nothing_of_the_bytes_is_told(run, shards, facts, damage, why):
    run("index", shards, "--facts", facts)
    if damage:
        (shards / "manifest.json").write_bytes(b"{")
    flip(shards / "t-001.tar")
    code, out, _ = run("index", shards, "--overwrite")
    assert (code, f"  uncompared  nothing shows whether a shard changed: {why}\n" in out) == (0, True)


def test_a_shard_that_came_later_is_named(run, shards):
    run("index", shards)
    write_tar(shards / "t-002.tar", foreign_files(14))
    code, _, err = run("index", shards)
    assert code == 2
    assert "found shards that the dataset does not have: t-002.tar; nothing was changed; give --overwrite" in err
    assert run("index", shards, "--overwrite")[0] == 0
    assert run("index", shards)[2].count("does not have") == 0


def test_a_shard_that_was_refused_is_told_as_refused(run, shards):
    os.truncate(shards / "t-001.tar", 700)
    assert run("index", shards)[0] == 3
    write_tar(shards / "t-002.tar", foreign_files(14))
    code, _, err = run("index", shards)
    assert code == 2
    refused, _, new = err.partition("; shards that the dataset does not have: ")
    assert "found shards that it refused: t-001.tar (damaged-shard: a member goes beyond the end of the file" in refused
    assert new.startswith("t-002.tar; nothing was changed")


def test_a_damaged_tar_that_ends_the_run_is_told_with_what_to_do_about_it(run, shards):
    os.truncate(shards / "t-001.tar", 700)
    code, _, err = run("index", shards, "--on-error", "fail")
    assert code == 4
    assert "put a whole tar in its place, save what is whole of it by shardkit repair DIR --out NEW" in err
    assert err.endswith("or leave it out by --on-error skip, then run again with --resume\n")
    assert run("index", shards, "--on-error", "skip", "--resume")[0] == 3


def test_of_shards_that_are_refused_for_several_reasons_together_no_one_is_to_blame(run, shards):
    os.truncate(shards / "t-000.tar", 700)
    write_tar(shards / "t-001.tar", [("a.txt", b"x")])
    code, _, err = run("index", shards)
    assert (code, "no sample of these shards can be used" in err) == (3, True)


@pytest.mark.parametrize("jobs", [1, 2, 4])
def test_the_first_refused_shard_ends_the_run_whatever_jobs_is(run, tmp_path, jobs):
    """The first is damaged far behind, the others at once: they are known earlier."""
    folder = tmp_path / "data"
    folder.mkdir()
    write_tar(folder / "a.tar", [(f"a{n}.jpg", tiny_jpeg(n)) for n in range(6000)])
    os.truncate(folder / "a.tar", os.path.getsize(folder / "a.tar") - 11_000)
    for name in "bcd":
        write_tar(folder / f"{name}.tar", [("x.jpg", tiny_jpeg(1)), ("y.txt", b"x")])  # y: no image
    code, _, err = run("index", folder, "--on-error", "fail", "--jobs", jobs)
    assert (code, f"{folder}/a.tar:" in err) == (4, True), err


def test_an_index_without_checksums_compares_nothing(run, shards):
    run("index", shards)
    flip(shards / "t-001.tar")
    code, out, _ = run("index", shards, "--overwrite", "--facts", "header", "--json")
    assert (code, json.loads(out)["changed"], json.loads(out)["uncompared"]) == (0, [], None)


def test_a_shard_of_the_same_name_from_elsewhere_is_no_changed_one(run, shards, tmp_path):
    run("index", shards, "--out", tmp_path / "idx")
    (tmp_path / "other").mkdir()
    write_tar(tmp_path / "other" / "t-000.tar", foreign_files(20))
    code, out, _ = run("index", tmp_path / "other", "--out", tmp_path / "idx", "--overwrite", "--json")
    assert (code, json.loads(out)["changed"]) == (0, [])


@pytest.mark.parametrize("opener", [shardkit.open, ShardLoader])
def test_from_python_a_folder_of_tars_leads_to_index_too(shards, opener):
    with pytest.raises(ConfigError, match="where they lie: shardkit index"):
        opener(shards, **({"batch_size": 2} if opener is ShardLoader else {}))


def test_a_glob_is_its_matches_by_name(run, shards, monkeypatch):
    monkeypatch.chdir(shards.parent)
    code, out, _ = run("index", "data/t-*.tar", "--json")
    assert (code, json.loads(out)["shards"]) == (0, 2)
    assert [one["name"] for one in json.loads((shards / "manifest.json").read_text())["shards"]] == [
        "t-000.tar", "t-001.tar",
    ]  # fmt: skip
    code, _, err = run("index", "data/x-*.tar")
    assert (code, "nothing matches; found data/x-*.tar" in err) == (2, True)


def test_samples_that_lie_apart_are_counted_once_and_the_way_out_is_named(run, tmp_path):
    files = [(f"{n}.{end}", tiny_jpeg(n) if end == "jpg" else b"1") for end in ("cls", "jpg") for n in range(5)]
    tar = write_tar(tmp_path / "apart.tar", files)
    code, _, err = run("index", tar)
    assert code == 3
    assert "found 5 not-adjacent; " in err
    assert "tar --sort=name" in err
    write_tar(tar, [*files, ("x.jpg", tiny_jpeg(9))])
    code, out, _ = run("index", tar)
    assert (code, "  apart       " in out, "tar --sort=name" in out) == (3, True, True)


def test_tar_sorted_by_name_is_the_way_out(run, tmp_path):
    names = [f"{key}.{end}" for end in ("cls", "jpg") for key in ("a", "a-1", "b", "b0")]
    write_tar(tmp_path / "apart.tar", [(name, tiny_jpeg(1) if name[-1] == "g" else b"1") for name in names])
    (tmp_path / "files").mkdir()
    subprocess.run(["tar", "-xf", tmp_path / "apart.tar", "-C", tmp_path / "files"], check=True)
    subprocess.run(["tar", "--sort=name", "-cf", tmp_path / "near.tar", "-C", tmp_path / "files", "."], check=True)
    code, out, _ = run("index", tmp_path / "near.tar", "--json")
    assert (code, json.loads(out)["samples"]) == (0, 4)


@pytest.mark.parametrize("command", [
    ["ls"], ["inspect"], ["verify"], ["repair", "--dry-run"], ["pack", "OUT"], ["extract", "OUT"],
])  # fmt: skip
def test_a_folder_of_tars_leads_to_index(run, shards, tmp_path, command):
    name, *rest = command
    arguments = [str(tmp_path / "out") if one == "OUT" else one for one in rest]
    code, out, err = run(name, shards, *arguments)
    assert code
    assert "make a dataset of the shards in it, where they lie: shardkit index" in out + err


@pytest.mark.parametrize("command", ["ls", "verify", "repair"])
def test_a_folder_of_datasets_leads_to_one_of_them(run, shards, command):
    run("index", shards)
    code, out, err = run(command, shards.parent)
    assert code
    assert f"name a dataset in it: {shards}" in out + err


def test_repair_names_what_takes_the_whole_samples_of_foreign_shards(run, shards):
    run("index", shards)
    code, _, err = run("repair", shards, "--dry-run")
    told = "shardkit convert takes what is whole; to save tars, repair a folder with links to them alone"
    assert (code, told in err) == (2, True)
