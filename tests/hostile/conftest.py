"""A command on hostile input: held to a time, a space and a place, and watched while it runs."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from shardkit.testing.commands import Commands, NoTracerError
from shardkit.testing.hostile_tars import CANARY
from shardkit.testing.packs import snapshot

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardkit.testing.commands import Done

ROOT = Path(__file__).parents[2]
TIME_S = 20.0
PEAK_KIB = 700 << 10
"""Of resident memory; the interpreter with its libraries has 100 MiB before it begins."""
ADDRESSES = 6 << 30
"""Bytes of address space, so that a bomb ends its process and not the machine."""

_RUNS = ("execve", "execveat", "connect", "socket")
_WRITES = (
    "open",
    "openat",
    "creat",
    "mkdir",
    "mkdirat",
    "mknod",
    "mknodat",
    "rename",
    "renameat",
    "renameat2",
    "link",
    "linkat",
    "symlink",
    "symlinkat",
    "unlink",
    "unlinkat",
    "rmdir",
    "truncate",
    "chmod",
    "fchmodat",
    "chown",
    "fchownat",
)
_CALLS = [f"?{name}" for name in (*_RUNS, *_WRITES)]
_LINE = re.compile(r"^\d+ +(\w+)\((.*)$", re.MULTILINE)
_PATH = re.compile(r'(?:(?:AT_FDCWD|\d+)<((?:[^>\\]|\\.)*)>, )?"((?:[^"\\]|\\.)*)"')
_HARMLESS = ("/dev/null", "/__pycache__/", "/matplotlib")
"""Among them what matplotlib keeps in the user's own folders."""
_UNPRINTABLE = re.compile(r"[^\n -~\xa1-\u024f]")


@dataclass(frozen=True, slots=True)
class Hostile:
    """Runs commands beside a folder that none of them may touch, which is also where they stand."""

    commands: Commands
    outside: Path

    def run(self, *arguments: str | os.PathLike[str], codes: set[int], writes: Path | None = None) -> Done:
        """Run a command on hostile input.

        Args:
            arguments: of `shardkit`.
            codes: the exit codes that the pages promise.
            writes: the only folder in which anything may change; None for a command that only reads.
        """
        before = snapshot(self.outside)
        child = self.commands.start(*arguments)
        resource.prlimit(child.pid, resource.RLIMIT_AS, (ADDRESSES, ADDRESSES))
        child.go()
        done = child.wait(TIME_S)
        said = f"{' '.join(map(ascii, map(os.fspath, arguments)))[:300]}\n{done.stdout[-500:]}\n{done.stderr[-2000:]}"
        assert done.code in codes, f"exit code {done.code}: {said}"
        assert "Traceback" not in done.stderr, said
        assert done.peak_kib < PEAK_KIB, said
        assert not _UNPRINTABLE.search(done.stderr), said
        if arguments[0] != "cat":
            assert not _UNPRINTABLE.search(done.stdout), said
        assert (done.code in {0, 3}) == (not done.stderr) or done.code == 3 or arguments[0] in {"verify", "repair"}, (
            said
        )
        assert snapshot(self.outside) == before, said
        assert not Path(self.outside, CANARY).exists()
        assert forbidden(done.trace, writes) == [], said
        return done


def forbidden(trace: str, writes: Path | None) -> list[str]:
    """The system calls that run, that call others, or that write outside of a folder."""
    found = []
    for call, rest in _LINE.findall(trace):
        if call in _RUNS:
            if call != "socket" or "AF_INET" in rest:
                found.append(f"{call}({rest}")
            continue
        if call in {"open", "openat"} and not re.search(r"O_(WRONLY|RDWR|CREAT|TRUNC|APPEND|TMPFILE)", rest):
            continue
        paths = [os.path.normpath(os.path.join(folder, name)) for folder, name in _PATH.findall(rest)]
        for path in paths[1:] if call.startswith("symlink") else paths:
            inside = writes is not None and (path == str(writes) or path.startswith(f"{writes}/"))
            if not inside and not any(mark in path for mark in _HARMLESS):
                found.append(f"{call}({rest}")
    return found


@pytest.fixture(scope="session")
def outside(tmp_path_factory) -> Path:
    """A folder with what hostile input would like to reach."""
    folder = tmp_path_factory.mktemp("outside")
    (folder / "secret.txt").write_text("nobody's business")
    (folder / "secret.bin").write_bytes(bytes(10240))
    (folder / "folder").mkdir()
    return folder


@pytest.fixture(scope="session")
def commands(outside) -> Iterator[Commands]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT))
        patch.chdir(outside)
        running = Commands(watch=_CALLS)
    with running:
        yield running


@pytest.fixture
def hostile(commands, outside) -> Hostile:
    return Hostile(commands, outside)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """Turn a tracer that is missing into a skip; in CI, which installs it, into a failure."""
    if call.excinfo is not None and call.excinfo.errisinstance(NoTracerError) and not os.environ.get("CI"):
        with contextlib.suppress(pytest.skip.Exception):
            pytest.skip(str(call.excinfo.value))
    return (yield)


@pytest.fixture
def free() -> Iterator[Path]:
    """A folder that is removed at once: a table of tars is some hundred megabytes. In memory where that can be."""
    place = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="shardkit-", dir=place) as folder:
        yield Path(folder)
