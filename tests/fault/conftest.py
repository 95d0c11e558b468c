from __future__ import annotations

import contextlib
import os
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import shardkit
from shardkit.errors import ShardkitError
from shardkit.testing.commands import Commands, NoTracerError
from shardkit.testing.mounts import NoMountsError, private_mounts
from shardkit.testing.packs import contents, tiny_tree

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardkit.testing.commands import Child, Done
    from shardkit.testing.mounts import LoopMount

SHARDS = 3


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """Turn what this machine cannot do into a skip with its reason, wherever in a test it shows."""
    if call.excinfo is not None and call.excinfo.errisinstance((NoTracerError, NoMountsError)):
        reason = str(call.excinfo.value)
        # CI installs every tool, so that no test is skipped there without anybody's knowledge.
        if not (os.environ.get("CI") and reason.endswith("is not installed")):
            call.excinfo = pytest.ExceptionInfo.from_exc_info(_skipped(reason))
    return (yield)


def _skipped(reason):
    try:
        pytest.skip(reason)
    except pytest.skip.Exception as skip:
        return type(skip), skip, skip.__traceback__


@dataclass(frozen=True, slots=True)
class Packing:
    """A tiny tree, what an undisturbed pack makes of it, and the means to disturb one."""

    commands: Commands
    source: Path
    whole: dict[str, bytes]
    """Every file of an undisturbed pack."""

    def arguments(self, target: Path, *more: str) -> list[str]:
        return ["pack", str(self.source), str(target), "--name", "t", "--shards", str(SHARDS), "--jobs", "1", *more]

    def run(self, target: Path, *more: str, inject: str | None = None) -> Done:
        return self.commands.run(*self.arguments(target, *more), inject=[inject] if inject else ())

    def start(self, target: Path, *more: str, inject: str | None = None) -> Child:
        return self.commands.start(*self.arguments(target, *more), inject=[inject] if inject else ())

    def tells_no_lie(self, target: Path) -> None:
        """Every file with a final name is whole, and only a whole dataset has a manifest."""
        if not target.exists():
            return
        there = contents(target)
        finals = {name for name in there if not name.startswith(".shardkit/")}
        assert finals <= set(self.whole)
        for name in finals:
            assert there[name] == self.whole[name], f"{name} is not what an undisturbed pack makes"
        if "manifest.json" in finals:
            assert finals == set(self.whole)
            return
        with pytest.raises(ShardkitError):
            shardkit.open(target)
        assert shardkit.verify(target).exit_code == 4

    def resumes(self, target: Path, *more: str) -> None:
        """Going on makes what an undisturbed pack makes, and leaves nothing else."""
        done = self.run(target, "--resume", *more)
        assert (done.code, done.stderr) == (3, "")
        assert contents(target) == self.whole


class CutPower:
    """Progress during which the power fails, after some shards."""

    def __init__(self, disk: LoopMount, reports: int) -> None:
        self.disk = disk
        self.left = reports

    def begin(self, samples: int, source_bytes: int) -> None:
        pass

    def advance(self, samples: int, source_bytes: int, refused: int) -> None:
        if self.left == 0:
            self.disk.cut_power()
        self.left -= 1


def pack_until_the_power_fails(source: Path, target: Path, **options: Any) -> ShardkitError | None:
    """Return the error, or None when the pack was quicker."""
    try:
        shardkit.pack(source, target, **options)
    except ShardkitError as error:
        # Neither the traceback nor what it came from may keep files open.
        link: BaseException | None = error
        while link is not None:
            link.__traceback__ = None
            link = link.__cause__ or link.__context__
        return error
    return None


def what_was_acknowledged_is_there(
    source: Path, target: Path, whole: dict[str, bytes], acknowledged: int, **options: Any
) -> None:
    """So many shards are whole after a power cut, nothing else lies, and the pack goes on to the end."""
    survived = contents(target)
    for number in range(acknowledged):
        for extension in ("tar", "arrow", "idx"):
            name = f"t-{number:06d}.{extension}"
            assert survived[name] == whole[name]
    for name, data in survived.items():
        assert name.startswith(".shardkit/") or data == whole[name]
    if "manifest.json" not in survived:
        journal = survived.get(".shardkit/journal", b"")
        assert len([line for line in journal.split(b"\n") if line]) >= acknowledged
    shardkit.pack(source, target, **options, resume=True)
    assert contents(target) == whole


def told_as_kept(error: ShardkitError | None, shards: int) -> int:
    """How many shards the error says are kept; a dead disk may hide even those, and then nothing is claimed."""
    told = re.match(r"(\d) of|nothing|every", "every" if error is None else error.kept or "nothing")
    assert told is not None
    return int(told[1] or (0 if told[0] == "nothing" else shards))


@pytest.fixture(scope="session")
def commands() -> Iterator[Commands]:
    with contextlib.suppress(NoMountsError):
        private_mounts()  # what is mounted later must be seen by this server
    with Commands() as running:
        yield running


@pytest.fixture(scope="session")
def memory() -> Iterator[Path]:
    """A folder in memory where there is one: a process that is killed loses nothing of what it wrote there."""
    place = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=place) as folder:
        yield Path(folder)


@pytest.fixture
def target(memory: Path) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        yield Path(folder, "dataset")


@pytest.fixture(scope="session")
def packing(commands: Commands, memory: Path) -> Packing:
    source = tiny_tree(memory / "source")
    undisturbed = Packing(commands, source, {})
    done = undisturbed.run(memory / "undisturbed")
    assert (done.code, done.stderr) == (3, "")
    assert shardkit.verify(memory / "undisturbed").exit_code == 0
    whole = contents(memory / "undisturbed")
    assert len(whole) == 3 * SHARDS + 3
    return Packing(commands, source, whole)
