"""Texts and paths that are no dataset and no tar: each command says so, with the code that the pages promise."""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING

import pytest

from shardkit.testing.datasets import draft_dataset
from shardkit.testing.hostile_tars import CANARY

if TYPE_CHECKING:
    from pathlib import Path

MANY = 10**12

SPECS = {
    "pipe": (f"pipe:touch {CANARY}", 9),
    "pipe in capitals": (f"PIPE:touch {CANARY}", 2),
    "pipe behind a blank": (f" pipe:touch {CANARY}", 2),
    "shell": (f"$(touch {CANARY}).tar", 2),
    "shell in back quotes": (f"`touch {CANARY}`", 2),
    "command": (f"x.tar; touch {CANARY}", 2),
    "bar": (f"|touch {CANARY}", 2),
    "range of 10^12": (f"x-{{1..{MANY}}}.tar", 9),
    "range of 10^17": ("x-{0..99999999999999999}.tar", 9),
    "range down": (f"x-{{{MANY}..0}}.tar", 9),
    "two ranges": ("x-{0..9999}{0..9999}.tar", 9),
    "ranges of two each": ("{0,1}" * 64, 9),
    "nested": ("{" * 500 + "a,b" + "}" * 500, 9),
    "nested ranges": ("{a,{b,{c,{d,{e,{f,{g,{h,{0..99999999}}}}}}}}}", 9),
    "opened only": ("{" * 60_000, 2),
    "closed only": ("}" * 3000, 2),
    "long": ("{a,b}" + "x" * 70_000, 9),
    "choices of nothing": ("{" + "," * 60_000 + "}{,,,,,,,,,,,,,,,,,,}", 9),
    "step of nothing": ("x-{1..2..0}.tar", 2),
    "number of many digits": ("x-{1.." + "9" * 1000 + "}.tar", 2),
    "long names, many times": ("{0..999999}" + "x" * 5000, 9),
    "S3": ("s3://bucket/x.tar", 2),
    "HTTP": ("http://127.0.0.1:9/x.tar", 2),
    "file URL": ("file:///etc/passwd", 2),
    "URL with a bomb": ("gs://bucket/{0..99999999}.tar", 2),
    "URL with a line break": ("s3://bucket/\n\x1b[2J.tar", 2),
    "dash": ("-", 2),
    "nothing": ("", 2),
    "blank": (" ", 2),
    "dot": (".", 2),
    "control characters": ("\x1b[2J\r\n.tar", 2),
    "not UTF-8": ("\udcff\udcfe.tar", 2),
    "name of 5,000 bytes": ("n" * 5000, 2),
    "name 100,000 folders deep": ("d/" * 50_000, 2),
    "home": ("~/x.tar", 2),
}
"""What to the text and the exit code of `index`."""


@pytest.mark.parametrize("what", SPECS)
def test_a_spec_is_refused_and_never_run_or_fetched(hostile, free, what):
    spec, code = SPECS[what]
    done = hostile.run("index", "--out", free / "out", "--", spec, codes={code}, writes=free / "out")
    assert len(done.stderr) < 6000
    hostile.run("convert", "--", spec, free / "new", codes={code, 9}, writes=free / "new")
    assert not any((free / "new").iterdir()) if (free / "new").exists() else True
    hostile.run("ls", "--", spec, codes={2, 6})


def test_a_list_of_shards_is_read_as_one_would_type_it(hostile, free):
    for what in ("pipe", "shell", "range of 10^12", "opened only", "HTTP", "name 100,000 folders deep"):
        spec, code = SPECS[what]
        (free / "list.txt").write_text(f"{spec}\n")
        hostile.run("convert", free / "list.txt", free / "new", codes={code, 9}, writes=free / "new")
    (free / "zeros.txt").symlink_to("/dev/zero")
    hostile.run("convert", free / "zeros.txt", free / "new", codes={9}, writes=free / "new")
    (free / "itself.txt").write_text("itself.txt\n")
    hostile.run("convert", free / "itself.txt", free / "new", codes={2, 4, 9}, writes=free / "new")


def odd_path(kind: str, path: Path) -> Path:
    """Make something that is no regular file."""
    if kind == "folder":
        path.mkdir()
    elif kind == "FIFO":
        os.mkfifo(path)
    elif kind == "loop":
        path.symlink_to(path.name)
    elif kind == "link to nothing":
        path.symlink_to("not-there")
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(os.path.relpath(path))
    else:
        path.symlink_to(kind)
    return path


KINDS = {
    "folder": (2, 2), "FIFO": (9, 2), "loop": (2, 6), "link to nothing": (2, 2), "socket": (9, 2), "/dev/zero": (9, 2),
    "/dev/random": (9, 2), "/dev/tty": (9, 2), "/proc/self/mem": (4, 2), "/proc/kmsg": (4, 2),
}  # fmt: skip
"""Kind of a path to the codes of `index`, and of commands that take a dataset."""


def reading(folder: Path, key: str = "c/0000") -> list[list[str | Path]]:
    """The commands that read a dataset; those that write have their target beside it."""
    return [
        ["verify", folder], ["inspect", folder], ["ls", folder, "--limit", "0"], ["show", folder, key],
        ["cat", folder, key], ["cat", folder, key, "--member", "cls"],
    ]  # fmt: skip


def writing(folder: Path, target: Path) -> list[list[str | Path]]:
    return [
        ["extract", folder, target / "tree"], ["extract", folder, target / "rest", "--on-error", "skip"],
        ["repair", folder, "--out", target / "mended"],
        ["export", folder, "--to", "dali,wids,energon", "--out", target],
        ["convert", folder, target / "new", "--jobs", "1"],
    ]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_file_is_refused_at_once(hostile, free, kind):
    path = odd_path(kind, free / "x.tar")
    tar, dataset = KINDS[kind]
    (free / "target").mkdir()
    hostile.run("index", path, "--out", free / "target", codes={tar}, writes=free / "target")
    hostile.run("convert", path, free / "target/new", "--jobs", "1", codes={2, 3, 4, 6, 9}, writes=free / "target")
    for command in reading(path):
        hostile.run(*command, codes={dataset, 2, 4} if command[0] == "verify" else {dataset})
    for command in writing(path, free / "target"):
        if command[0] != "convert":
            hostile.run(*command, codes={dataset}, writes=free / "target")


FILES = ("tiny-000000.tar", "tiny-000000.arrow", "tiny-000000.idx", "index.arrow", "manifest.json", "rejected.jsonl")


@pytest.mark.parametrize("kind", ["FIFO", "loop", "/dev/zero"])
@pytest.mark.parametrize("name", FILES)
def test_a_dataset_with_something_else_under_a_files_name_is_no_trap(hostile, free, kind, name):
    folder, target = draft_dataset((2, 2)).write(free / "data"), free / "target"
    (folder / name).unlink()
    odd_path(kind, folder / name)
    target.mkdir()
    for command in [*reading(folder), *writing(folder, target)]:
        codes = {4, 6} if command[0] == "verify" else {0, 2, 3, 4, 6, 9}
        hostile.run(*command, codes=codes, writes=target)
    hostile.run("repair", folder, codes={2, 4, 6}, writes=folder)
