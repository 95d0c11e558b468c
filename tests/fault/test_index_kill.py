"""SIGKILL before every system call that `shardkit index` makes, one after the other; and calls that fail."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import pytest

import shardkit
from shardkit.errors import ShardkitError
from shardkit.testing.datasets import tiny_jpeg
from shardkit.testing.foreign import foreign_files, write_tar
from shardkit.testing.packs import contents

if TYPE_CHECKING:
    from pathlib import Path

MOST = 1000
"""System calls of one kind; a sweep that gets there does not end."""


def finals(out: Path) -> dict[str, bytes]:
    """Return the files with a final name; a temporary link may lead to nothing."""
    return {path.name: path.read_bytes() for path in out.iterdir() if path.name != ".shardkit"}


class Indexing:
    """Two tars, one of them with a torn sample, what an undisturbed run makes of them, and the means to disturb one."""

    def __init__(self, commands, memory: Path) -> None:
        self.commands = commands
        self.shards = memory / "foreign"
        self.shards.mkdir()
        write_tar(self.shards / "a.tar", foreign_files(count=3))
        torn = [("t.jpg", tiny_jpeg(0)), ("u.jpg", tiny_jpeg(1)), ("t.cls", b"1")]
        write_tar(self.shards / "b.tar", [*torn, *foreign_files(3, 3).items()])
        done = self.run(memory / "index-undisturbed")
        assert (done.code, done.stderr) == (3, "")
        self.whole = contents(memory / "index-undisturbed")
        assert len(self.whole) == 2 * 3 + 3

    def run(self, out: Path, *more: str, inject: str | None = None):
        arguments = ["index", self.shards, "--out", out, "--name", "d", "--jobs", "1", *more]
        return self.commands.run(*arguments, inject=[inject] if inject else ())

    def tells_no_lie(self, out: Path) -> None:
        """Every file with a final name is whole, and only a whole dataset has a manifest."""
        if not out.exists():
            return
        there = finals(out)
        for name, data in there.items():
            assert self.whole[name] == data, f"{name} is not what an undisturbed run makes"
        if "manifest.json" in there:
            assert there == self.whole
        else:
            with pytest.raises(ShardkitError):
                shardkit.open(out)

    def resumes(self, out: Path) -> None:
        """Going on makes what an undisturbed run makes, and leaves nothing else."""
        done = self.run(out, "--resume")
        assert (done.code, done.stderr) == (3, "")
        assert contents(out) == self.whole


@pytest.fixture(scope="module")
def indexing(commands, memory):
    return Indexing(commands, memory)


@pytest.mark.parametrize("call", ["mkdir", "write", "fsync", "rename", "unlink", "rmdir", "flock", "symlink"])
def test_a_run_killed_at_any_call_lies_about_nothing_and_can_be_resumed(indexing, target, call):
    """The resume is killed half as far on its way, too."""
    for number in range(1, MOST):
        done = indexing.run(target, inject=f"{call}:signal=KILL:when={number}")
        indexing.tells_no_lie(target)
        if not done.injected:
            break
        indexing.run(target, "--resume", inject=f"{call}:signal=KILL:when={1 + number // 2}")
        indexing.tells_no_lie(target)
        indexing.resumes(target)
        shutil.rmtree(target)
    assert 1 < number < MOST - 1
    assert contents(target) == indexing.whole


@pytest.mark.parametrize("call", ["unlink", "rename", "fsync"])
def test_an_overwrite_killed_at_any_call_leaves_the_old_dataset_or_a_run_that_can_be_resumed(indexing, memory, call):
    """The old one has another name and a shard more."""
    old, more, target = (memory / f"{name}-{call}" for name in ("old", "more", "copy"))  # as deep: links are relative
    more.mkdir()
    write_tar(more / "c.tar", foreign_files(9, 2))
    arguments = ["index", indexing.shards, more / "c.tar", "--out", old, "--name", "old", "--jobs", "1"]
    assert indexing.commands.run(*arguments).code == 3
    for number in range(1, MOST):
        shutil.copytree(old, target, symlinks=True)
        done = indexing.run(target, "--overwrite", inject=f"{call}:signal=KILL:when={number}")
        if not done.injected:
            break
        left = finals(target)
        if left.get("manifest.json") == contents(old)["manifest.json"]:
            assert left == contents(old)
            assert indexing.run(target, "--overwrite").code == 3
        else:
            assert "manifest.json" not in left or left == indexing.whole
            indexing.resumes(target)
        assert contents(target) == indexing.whole
        shutil.rmtree(target)
    assert 1 < number < MOST - 1
    assert contents(target) == indexing.whole


@pytest.mark.parametrize(
    ("rule", "code"),
    [("fsync", "ENOSPC"), ("write", "ENOSPC"), ("rename", "EIO"), ("preadv2", "EIO"), ("symlink", "EACCES")],
)
def test_a_call_that_fails_ends_the_run_with_its_code_and_it_goes_on(indexing, target, rule, code):
    done = indexing.run(target, inject=f"{rule}:error={code}:when=2")
    assert done.injected
    assert done.code == {"ENOSPC": 5, "EIO": 6, "EACCES": 6}[code], done.stderr
    assert code in done.stderr
    assert "Traceback" not in done.stderr
    indexing.tells_no_lie(target)
    indexing.resumes(target)


@pytest.mark.parametrize(("number", "code"), [("INT", 130), ("TERM", 143)])
def test_a_signal_ends_it_clean_and_it_goes_on(indexing, target, number, code):
    done = indexing.run(target, inject=f"symlink:signal={number}:when=2")
    assert done.code == code, done.stderr
    assert "1 of 2 shards are indexed and kept; run again with --resume to go on" in done.stderr
    assert not list((target / ".shardkit").glob("run-*"))
    indexing.resumes(target)
