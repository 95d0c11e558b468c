"""Every hostile tar has its verdict: nothing is run, nothing hangs, nothing is written outside of the target."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import tarfile

import pytest

import shardkit
from shardkit.errors import SourceError
from shardkit.format.index import decode_dataset_index
from shardkit.testing.datasets import tiny_jpeg
from shardkit.testing.hostile_tars import CANARY, HostileTar, hostile_tars, tar_member

TARS = {tar.what: tar for tar in hostile_tars()}
CODES = {None: 0, "damaged-shard": 4, "unsafe-shard": 9}
WHOLE = ("damaged-shard", "unsafe-shard", "no-samples")
TAKEN = [tar for tar in TARS.values() if tar.verdict not in WHOLE]
CONVERTED = {
    "name that is not UTF-8": None, "name of an encoded surrogate": None,
    **{what: "bad-json" for what in TARS if what.startswith("json ")},
    "json with half a surrogate": None, "json of nothing": None,
    "an image that is a pickle": "not-jpeg", "an image that is a tar": "not-jpeg",
    "an image that is a bomb": "too-many-pixels", "an image of 0 x 0 pixels": "bad-dimensions",
}  # fmt: skip
"""Where `convert` says something else than `index`: it makes keys safe, and looks at images and json members."""


def reasons_in(folder):
    path = folder / "rejected.jsonl"
    return {json.loads(line)["reason"] for line in path.read_text().splitlines()} if path.exists() else set()


@pytest.mark.parametrize("what", TARS)
def test_index_says_what_the_table_says(hostile, free, what):
    tar, out = TARS[what], free / "out"
    path = tar.write(free / "x.tar")
    done = hostile.run("index", path, "--out", out, "--jobs", "1", codes={CODES.get(tar.verdict, 3)}, writes=out)
    if tar.verdict in CODES and done.code:
        assert re.search(rf"{re.escape(str(path))}(:\d+|; expected at least 512 bytes)", done.stderr)
    if tar.verdict in WHOLE:
        assert not (out / "manifest.json").exists()
        return
    assert reasons_in(out) >= ({tar.verdict} if tar.verdict else set())
    keys = decode_dataset_index((out / "index.arrow").read_bytes())[0].column("key").to_pylist()
    assert "good/a" in keys


@pytest.mark.parametrize("what", [tar.what for tar in TAKEN])
def test_convert_says_what_index_says(hostile, free, what):
    tar, new = TARS[what], free / "new"
    verdict = CONVERTED.get(what, tar.verdict)
    path = tar.write(free / "x.tar")
    hostile.run("convert", path, new, "--jobs", "1", "--other-members", "drop", codes={3 if verdict else 0}, writes=new)
    said = reasons_in(new)
    assert said >= {verdict} if verdict else not said
    assert "good/a" in decode_dataset_index((new / "index.arrow").read_bytes())[0].column("key").to_pylist()
    assert shardkit.verify(new).exit_code == 0
    if verdict:
        with pytest.raises(SourceError, match=rf"refused a source \(({'|'.join(said)})\)"):
            shardkit.convert(path, free / "fail", on_error="fail", other_members="drop", jobs=1)
    if what not in CONVERTED:
        shardkit.index([path], out=free / "out", jobs=1)
        assert said == reasons_in(free / "out")


def test_a_refused_member_that_is_no_image_is_told_by_both(hostile, free):
    link, none = tar_member("README", kind=tarfile.SYMTYPE, link="/etc/passwd"), tar_member("/z.jpg", tiny_jpeg())
    path = HostileTar("", (tar_member("a.jpg", tiny_jpeg()), link, none), None).write(free / "x.tar")
    for command, options in (("index", ["--out"]), ("convert", [])):
        hostile.run(command, path, *options, free / command, "--jobs", "1", codes={3}, writes=free / command)
        lines = [json.loads(line) for line in (free / command / "rejected.jsonl").read_text().splitlines()]
        assert sorted((line["path"], line["reason"]) for line in lines) == [
            ("x.tar//z.jpg", "absolute-name"), ("x.tar/README", "link"),
        ]  # fmt: skip


def test_a_tar_of_which_nothing_is_left_never_vanishes(hostile, free):
    bad = HostileTar("", (tar_member("/data/1.jpg", tiny_jpeg()),), None).write(free / "bad.tar")
    good = HostileTar("", (tar_member("a.jpg", tiny_jpeg()),), None).write(free / "good.tar")
    new = free / "new"
    done = hostile.run("convert", bad, new, "--jobs", "1", codes={3}, writes=new)
    assert "refused, such as bad.tar//data/1.jpg (absolute-name: the name is absolute" in done.stderr
    hostile.run("convert", bad, good, new, "--jobs", "1", codes={3}, writes=new)
    assert reasons_in(new) == {"absolute-name", "no-samples"}
    done = hostile.run("convert", good, bad, free / "no", "--on-error", "fail", "--jobs", "1", codes={3}, writes=free)
    assert "refused a source (absolute-name)" in done.stderr
    assert not (free / "no").exists()


@pytest.mark.parametrize("what", [tar.what for tar in TAKEN if "name" in tar.what or "link" in tar.what])
def test_what_is_taken_is_read_and_extracted_inside_the_target(hostile, free, what):
    path, out = TARS[what].write(free / "x.tar"), free / "out"
    hostile.run("index", path, "--out", out, "--jobs", "1", codes={0, 3}, writes=out)
    tree = free / "tree"
    hostile.run("extract", out, tree, "--on-error", "skip", codes={0, 3}, writes=tree)
    assert all(path.is_file() and not path.is_symlink() for path in tree.rglob("*") if not path.is_dir())


@pytest.mark.parametrize("what", [tar.what for tar in TARS.values() if tar.verdict in WHOLE])
def test_convert_ends_with_the_code_of_a_tar_that_is_refused_as_a_whole(hostile, free, what):
    tar, new = TARS[what], free / "new"
    path = tar.write(free / "x.tar")
    for given, code in (("fail", CODES.get(tar.verdict, 3)), ("skip", 3)):
        done = hostile.run("convert", path, new, "--jobs", "1", "--on-error", given, codes={code}, writes=new)
        assert not (new / "manifest.json").exists()
        assert (str(path) if code != 3 else f"x.tar ({tar.verdict}: ") in done.stderr


def test_a_folder_of_all_of_them_is_a_dataset_of_what_is_good(hostile, free):
    tars, out, target = free / "tars", free / "out", free / "target"
    tars.mkdir()
    target.mkdir()
    for number, tar in enumerate(TARS.values()):
        tar.write(tars / f"{number:03}.tar")
    hostile.run("index", tars, "--out", out, "--jobs", "1", codes={3}, writes=out)
    found = json.loads(hostile.run("verify", out, "--level", "decode", "--json", codes={4}).stdout)
    bad = {list(TARS)[int(finding["shard"][:3])] for finding in found["findings"]}
    assert set(found["counts"]) == {"bomb", "decode"}
    assert bad == {"an image that is a pickle", "an image that is a bomb", "an image of 0 x 0 pixels",
                   "an image that is a tar"}  # fmt: skip
    reading = [
        ["ls", out, "--limit", "0"],
        ["ls", out, "--json"],
        ["inspect", out],
        ["show", out, "good/a"],
        ["cat", out, "good/a"],
        ["show", out, "m"],
    ]
    for command in reading:
        hostile.run(*command, codes={0})
    done = hostile.run("cat", out, "m", "--member", "pyd", codes={2})
    assert len(done.stderr) < 1000
    hostile.run("inspect", out, "--html", target / "page.html", codes={0}, writes=target)
    hostile.run("extract", out, target / "tree", "--on-error", "skip", codes={3}, writes=target)
    hostile.run("export", out, "--to", "dali", "--out", target, codes={0}, writes=target)
    hostile.run("repair", out, "--out", target / "mended", codes={2}, writes=target)
    for inputs in (out, tars / "*.tar"):
        new = target / f"new {inputs.name.strip('*.')}"
        hostile.run(
            "convert", inputs, new, "--key", "shard", "--other-members", "drop", "--jobs", "1", codes={3}, writes=target
        )
        hostile.run("verify", new, codes={0})


@pytest.mark.parametrize("facts", ["none", "header"])
def test_a_hole_of_a_terabyte_costs_nothing_where_no_payload_is_read(hostile, free, facts):
    path, out = free / "x.tar", free / "out"
    HostileTar("a hole", (tar_member("a.jpg", tiny_jpeg()), 1 << 40), None).write(path)
    hostile.run("index", path, "--out", out, "--facts", facts, "--jobs", "1", codes={0}, writes=out)
    hostile.run("ls", out, codes={0})


def test_sparse_files_as_gnu_tar_writes_them_are_refused(hostile, free, require_tool):
    with open(free / "m.jpg", "wb") as file:
        file.truncate(1 << 20)
        file.seek(0, os.SEEK_END)
        file.write(b"x" * 4096)
    for options in (["--format=gnu"], *(["--format=pax", f"--sparse-version={v}"] for v in ("0.0", "0.1", "1.0"))):
        path, out = free / "x.tar", free / "out"
        subprocess.run([require_tool("tar"), *options, "--sparse", "-cf", path, "-C", free, "m.jpg"], check=True)
        hostile.run("index", path, "--out", out, "--jobs", "1", codes={3}, writes=out)
        shutil.rmtree(out, ignore_errors=True)
        done = hostile.run("index", path, "--out", out, "--on-error", "fail", "--jobs", "1", codes={3}, writes=out)
        shutil.rmtree(out, ignore_errors=True)
        assert "refused (sparse)" in done.stderr


@pytest.mark.parametrize("extension", ["pyd", "pickle", "pkl", "pth", "npy"])
def test_a_member_that_would_run_is_shown_as_the_bytes_that_it_is(hostile, free, extension):
    path, out = TARS[f"a {extension} member that runs"].write(free / "x.tar"), free / "out"
    hostile.run("index", path, "--out", out, "--jobs", "1", codes={0}, writes=out)
    assert CANARY in hostile.run("cat", out, "m", "--member", extension, codes={0}).stdout
    assert f"m.{extension}" in hostile.run("show", out, "m", codes={0}).stdout
    hostile.run("verify", out, "--level", "decode", codes={0})
