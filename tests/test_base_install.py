"""What works without the extras, and what is said about the ones that are missing."""

from __future__ import annotations

import subprocess
import sys

import pytest

_EXTRAS = ("torch", "nvidia", "kvikio", "cupy", "sklearn", "webdataset", "hypothesis", "pytest")


def without(libraries: tuple[str, ...], code: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run `code` in a Python that has none of `libraries`."""
    hidden = f"import sys\nsys.modules.update(dict.fromkeys({libraries!r}))\n"
    command = [sys.executable, "-c", hidden + code, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def dataset(photo_tree, tmp_path_factory):
    path = tmp_path_factory.mktemp("base") / "dataset"
    done = without(_EXTRAS, "import shardkit\nshardkit.pack(sys.argv[1], sys.argv[2])", photo_tree, path)
    assert done.returncode == 0, done.stderr
    return path


def test_verify_and_open_need_the_base_only(dataset):
    code = "import shardkit\nshardkit.verify(sys.argv[1])\nassert len(shardkit.open(sys.argv[1])) == 40"
    done = without(_EXTRAS, code, dataset)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("library", "extra"), [("torch", "torch"), ("nvidia", "dali")])
def test_a_missing_extra_is_named_with_its_command(dataset, library, extra):
    code = "from shardkit.torch import ShardLoader\nnext(iter(ShardLoader(sys.argv[1], batch_size=8, device='cpu')))"
    done = without((library,), code, dataset)
    assert done.returncode != 0
    last = done.stderr.splitlines()[-1]
    assert "pip install 'shardkit[" in last
    assert extra in last.partition("pip install 'shardkit[")[2].partition("]")[0]


def test_the_hidden_libraries_are_hidden():
    assert "ModuleNotFoundError" in without(("torch",), "import torch").stderr
