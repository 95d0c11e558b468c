"""Arrow imports pandas where that is installed: shardkit's own processes do without."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from shardkit.testing.images import coloured, write_pictures

PANDAS = """import os
os.close(os.open(os.environ["PANDAS_SEEN"], os.O_CREAT | os.O_WRONLY))
raise ImportError("no pandas")
"""


@pytest.fixture
def run(tmp_path):
    """Run a program where there is a pandas; return whether it was imported."""
    (tmp_path / "site" / "pandas").mkdir(parents=True)
    (tmp_path / "site" / "pandas" / "__init__.py").write_text(PANDAS)
    seen = tmp_path / "seen"

    def call(*arguments):
        seen.unlink(missing_ok=True)
        path = os.pathsep.join([str(tmp_path / "site"), *filter(None, sys.path)])
        done = subprocess.run(
            [sys.executable, *map(str, arguments)], capture_output=True, text=True, check=False,
            env=os.environ | {"PYTHONPATH": path, "PANDAS_SEEN": str(seen)},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return seen.exists()

    return call


def test_arrow_imports_it_elsewhere(run):
    assert run("-c", "import pyarrow; pyarrow.array([1])")


def test_no_command_imports_it(run, tmp_path):
    tree, ds = tmp_path / "tree", tmp_path / "ds"
    tree.mkdir()
    for number, picture in enumerate(coloured(6)):
        folder = tree / f"class{number % 2}"
        folder.mkdir(exist_ok=True)
        (folder / f"{number}.jpg").write_bytes(picture.jpeg)
    shard = ds / "ds-000000.tar"
    for command in (
        ("pack", tree, ds, "--shard-samples", "1", "--jobs", "3"), ("verify", ds), ("ls", ds, "--where", "width > 1"),
        ("inspect", ds), ("export", ds, "--to", "wids"), ("extract", ds, tmp_path / "out"),
        ("repair", ds, "--out", tmp_path / "again"), ("index", shard, "--out", tmp_path / "foreign"),
    ):  # fmt: skip
        assert not run("-m", "shardkit", *command), command


def test_no_worker_imports_it(run, tmp_path):
    ds = write_pictures(tmp_path / "ds", coloured(24), per_shard=4)
    code = (
        "import shardkit.indexing.crew as crew, shardkit, sys, glob\n"
        "from shardkit.running.arrow_start import without_pandas\n"
        "crew.WORTH_PROCESSES_S = 0\n"
        "with without_pandas():\n"  # here, so that it is the workers who are seen
        "    shardkit.index(sorted(glob.glob(sys.argv[1])), out=sys.argv[2], jobs=2)\n"
    )
    assert not run("-c", code, ds / "*.tar", tmp_path / "foreign")


def test_what_needs_it_has_it(run):
    code = (
        "import shardkit.running.arrow_start as start\n"
        "with start.without_pandas():\n"
        "    try:\n"
        "        import pandas\n"
        "    except ModuleNotFoundError:\n"
        "        start.with_pandas()\n"
        "try:\n"
        "    import pandas\n"
        "except ImportError:\n"
        "    pass\n"
    )
    assert run("-c", code)
