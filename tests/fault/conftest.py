from __future__ import annotations

import contextlib
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import shardkit
from shardkit.errors import ShardkitError
from shardkit.testing.commands import Commands, NoTracerError
from shardkit.testing.mounts import NoMountsError, private_mounts
from shardkit.testing.packs import contents, tiny_tree

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardkit.testing.commands import Child, Done

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
