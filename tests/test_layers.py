"""The layers of the package, read from its syntax trees: imports only go down, wherever in a file they stand."""

from __future__ import annotations

import ast
import graphlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

ROOT = Path(__file__).parent.parent

_GROUND = ("errors", "escaping", "extent", "local_path", "sizes", "splitmix", "tracing", "version")
LAYERS: dict[str, tuple[str, ...]] = {
    # what: what it may import besides itself; a name stands for everything below it
    "escaping": (),
    "version": (),
    "sizes": (),
    "splitmix": (),
    "errors": ("escaping",),
    "extent": ("errors",),
    "local_path": ("errors", "escaping"),
    "tracing": ("errors",),
    "format": _GROUND,
    "storage": _GROUND,
    "dataset": ("format", "storage", *_GROUND),
    "pipeline": ("dataset", "format", "storage", *_GROUND),
    "torch": ("pipeline", "dataset", "storage", *_GROUND),
    "running": ("format", "storage.atomic", "storage.lock", "storage.regular", *_GROUND),
    "packing": (
        *("running", "format", "storage.atomic", "storage.clone", "storage.lock", "storage.regular"),
        *("storage.sequential_writer", *_GROUND),
    ),
    "verifying": ("format", "storage", *_GROUND),
    "indexing": (
        *("running", "format", "storage.atomic", "storage.lock", "storage.regular", "storage.residency"),
        *("storage.sequential", *_GROUND),
    ),
    "diagnosing": ("storage", *_GROUND),
    "extracting": (
        *("running", "dataset", "format", "storage.atomic", "storage.clone", "storage.lock", "storage.regular"),
        *_GROUND,
    ),
    "looking": ("dataset", "format", "storage.atomic", "storage.regular", *_GROUND),
    "exporting": (
        *("running", "dataset", "format", "storage.atomic", "storage.lock", "storage.regular"),
        *_GROUND,
    ),
    "repairing": (
        *("packing", "running", "format", "storage.atomic", "storage.regular", "storage.sequential"),
        *("storage.sequential_writer", *_GROUND),
    ),
    "inspecting": ("looking", "verifying", "dataset", "format", "storage.atomic", "storage.regular", *_GROUND),
    "converting": (
        *("packing", "running", "indexing.scan", "indexing.refusals", "indexing.images", "dataset.folder", "format"),
        *("extracting.names", "extracting.tree"),
        *("storage.atomic", "storage.clone", "storage.exchange", "storage.regular", *_GROUND),
    ),
    "testing": ("pipeline", "dataset", "format", "storage", *_GROUND),
    "benching": ("torch", "pipeline", "dataset", "format", "storage", *_GROUND),
    "cli": (
        *("benching", "packing", "verifying", "diagnosing", "exporting", "dataset", "storage.probe", *_GROUND),
        *("converting", "extracting", "indexing", "inspecting", "looking", "repairing", "running.arrow_start"),
        *("storage.cuda", "storage.cufile_errors", "storage.gds", "storage.kvikio_settings"),  # what `doctor` asks
        "pipeline.nvjpeg_library",
    ),
    "__main__": ("cli",),
    # shardkit/__init__.py: the public names
    "": (
        *("converting", "exporting", "indexing", "inspecting", "packing", "repairing", "verifying"),
        *("dataset", "format", "errors", "version"),
    ),
}

HOMES: dict[str, tuple[str, ...]] = {
    # each foreign library: the files or folders that may import it
    "torch": ("torch/", "benching/"),
    "nvidia.dali": ("pipeline/dali.py", "benching/rival.py"),
    "nvtx": ("tracing.py",),
    "matplotlib": ("benching/plot.py", "inspecting/charts.py"),
    "kvikio": ("storage/gds_library.py", "storage/kvikio_settings.py"),
    "cuda.bindings.cufile": ("storage/gds_library.py",),
    "cuda": ("storage/cuda.py", "pipeline/kernels.py", "pipeline/nvjpeg_library.py"),
    "click": ("cli/",),
    "streaming": ("converting/mds.py", "converting/mds_writer.py"),
    "litdata": ("converting/litdata.py", "converting/litdata_writer.py"),
    "datasets": ("converting/huggingface.py", "converting/huggingface_writer.py"),
    "tqdm": ("cli/",),
    "crc32c": ("format/checksum.py",),
    "xxhash": ("format/checksum.py",),
    "PIL": ("packing/picture.py", "verifying/images.py", "inspecting/thumbnails.py", "pipeline/cpu.py", "testing/"),
    "hypothesis": ("testing/fuzzing.py",),
    "pytest": ("testing/",),
    "pyarrow": (
        *("format/index.py", "format/index_columns.py", "format/text_columns.py", "format/expression.py"),
        *("format/where.py", "converting/", "packing/"),
        "repairing/salvage.py",
    ),
    "numpy": (
        *("splitmix.py", "format/", "storage/", "dataset/", "pipeline/", "torch/", "packing/", "verifying/"),
        *("benching/engines.py", "testing/", "converting/", "extracting/", "inspecting/", "looking/", "repairing/"),
        *("indexing/", "running/sorted_numbers.py", "running/spool.py"),
    ),
}

EFFECTS = {
    *("asyncio", "fcntl", "io", "mmap", "multiprocessing", "os", "pathlib", "shutil", "signal", "socket"),
    *("subprocess", "tempfile", "threading", "time"),
}
"""Modules of the standard library that reach outside the process's memory: not for the pure layer, format/."""

_OPENERS = {"open", "memory_map", "OSFile", "fromfile", "memmap"}


class Module(NamedTuple):
    name: str  # dotted, without the leading "shardkit."; "" is shardkit/__init__.py
    file: str  # relative to the package
    tree: ast.Module


class Import(NamedTuple):
    line: int
    target: str  # dotted and absolute, with the imported attribute: "os.path.join"


def modules_of(package: Path) -> list[Module]:
    found = []
    for path in sorted(package.rglob("*.py")):
        file = path.relative_to(package)
        parts = file.parent.parts if file.name == "__init__.py" else file.with_suffix("").parts
        found.append(Module(".".join(parts), file.as_posix(), ast.parse(path.read_text("utf-8"), str(path))))
    return found


def imports_of(module: Module) -> Iterator[Import]:
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            yield from (Import(node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = absolute(module, node.level, node.module or "")
            yield from (Import(node.lineno, f"{base}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and name_called(node) in {"import_module", "__import__"}:
            argument = node.args[0] if node.args else None
            if isinstance(argument, ast.Constant):
                yield Import(node.lineno, str(argument.value))
            elif module.name != "":
                yield Import(node.lineno, "a name that only the run knows")


def absolute(module: Module, level: int, base: str) -> str:
    if level == 0:
        return base
    package = module.name.split(".") if module.file.endswith("__init__.py") else module.name.split(".")[:-1]
    return ".".join(["shardkit", *package[: len(package) - level + 1], base]).strip(".")


def name_called(call: ast.Call) -> str:
    function = call.func
    return function.id if isinstance(function, ast.Name) else getattr(function, "attr", "")


def within(name: str, prefixes: Iterable[str]) -> bool:
    return any(name == prefix or name.startswith(f"{prefix}.") for prefix in prefixes)


def layer_of(module: Module) -> str:
    return module.name.split(".")[0]


def inner(target: str, names: set[str]) -> str | None:
    """Return the module of the package that `target` means, None for a foreign one; `__version__` is no module."""
    if not within(target, ["shardkit"]) or target == "shardkit.__version__":
        return None
    name = target.removeprefix("shardkit").removeprefix(".")
    return name if name in names else name.rpartition(".")[0]


def layer_violations(modules: list[Module]) -> Iterator[str]:
    names = {module.name for module in modules}
    for module in modules:
        layer = layer_of(module)
        if layer not in LAYERS:
            yield f"{module.file} belongs to no layer"
            continue
        for line, target in imports_of(module):
            name = inner(target, names)
            if name is not None and name != module.name and not within(name, (*LAYERS[layer], *filter(None, [layer]))):
                yield f"{module.file}:{line} imports {target}, allowed: {', '.join(LAYERS[layer])}"


def foreign_violations(modules: list[Module]) -> Iterator[str]:
    for module in modules:
        for line, target in imports_of(module):
            top = target.split(".")[0]
            if top in {"shardkit", "_typeshed", *sys.stdlib_module_names}:
                continue
            homes = next((homes for library, homes in HOMES.items() if within(target, [library])), ())
            if not any(module.file == home or (home.endswith("/") and module.file.startswith(home)) for home in homes):
                yield f"{module.file}:{line} imports {target}, allowed in: {', '.join(homes) or 'no file'}"


def purity_violations(modules: list[Module]) -> Iterator[str]:
    for module in modules:
        if layer_of(module) != "format":
            continue
        for line, target in imports_of(module):
            if within(target, EFFECTS):
                yield f"{module.file}:{line} imports {target}, but format/ takes and gives bytes only"
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Call) and name_called(node) in _OPENERS:
                yield f"{module.file}:{node.lineno} opens a file, but format/ takes and gives bytes only"


def print_violations(modules: list[Module]) -> Iterator[str]:
    for module in modules:
        for node in ast.walk(module.tree):
            printed = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
            written = isinstance(node, ast.Attribute) and node.attr in {"stdout", "stderr"}
            written = written and isinstance(node.value, ast.Name) and node.value.id == "sys"
            if (printed or written) and layer_of(module) != "cli":
                yield f"{module.file}:{node.lineno} prints, but only cli/ talks to the terminal"


def cycle_violations(modules: list[Module]) -> Iterator[str]:
    names = {module.name for module in modules}
    graph = {
        module.name: {name for _, target in imports_of(module) if (name := inner(target, names)) is not None}
        - {module.name}
        for module in modules
    }
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        yield f"cycle: {' <- '.join(error.args[1])}"


CHECKS = [layer_violations, foreign_violations, purity_violations, print_violations, cycle_violations]


@pytest.fixture(scope="module")
def package() -> list[Module]:
    return modules_of(ROOT / "shardkit")


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_the_package_keeps_its_layers(package, check):
    assert list(check(package)) == []


def test_the_tables_allow_only_what_is_used(package):
    names = {module.name for module in package}
    assert set(LAYERS) <= {layer_of(module) for module in package}
    assert {name for allowed in LAYERS.values() for name in allowed} <= names
    for library, homes in HOMES.items():
        users = {module.file for module in package if any(within(i.target, [library]) for i in imports_of(module))}
        unused = [home for home in homes if not any(file.startswith(home) for file in users)]
        assert not users or not unused, f"{library} is not imported in {unused}"


FAULTS = [
    ("format/tar.py", "import shardkit.storage.direct", layer_violations, "format/tar.py:1 imports shardkit.storage"),
    ("format/tar.py", "def f():\n    from shardkit.storage import direct", layer_violations, "format/tar.py:2"),
    ("format/tar.py", "from ..storage import direct", layer_violations, "shardkit.storage.direct"),
    ("storage/direct.py", "from shardkit.format.tar import pad", layer_violations, "shardkit.format.tar"),
    ("packing/run.py", "from shardkit.storage.direct import x", layer_violations, "packing/run.py:1"),
    ("verifying/run.py", "from shardkit.packing import run", layer_violations, "shardkit.packing.run"),
    ("packing/run.py", "from shardkit import pack", layer_violations, "shardkit.pack"),
    ("packing/run.py", "if TYPE_CHECKING:\n    import shardkit.cli.main", layer_violations, "shardkit.cli.main"),
    ("packing/run.py", "importlib.import_module('shardkit.cli.main')", layer_violations, "shardkit.cli.main"),
    ("mending/run.py", "", layer_violations, "belongs to no layer"),
    ("pipeline/dali.py", "import torch", foreign_violations, "allowed in: torch/"),
    ("pipeline/dali.py", "def f():\n    from torch import nn", foreign_violations, "torch.nn"),
    ("torch/loader.py", "from nvidia import dali", foreign_violations, "nvidia.dali"),
    ("torch/loader.py", "import kvikio", foreign_violations, "allowed in: storage/gds_library.py"),
    ("packing/run.py", "import tqdm.auto", foreign_violations, "allowed in: cli/"),
    ("cli/main.py", "import requests", foreign_violations, "no file"),
    ("storage/gds_library.py", "__import__(name)", foreign_violations, "a name that only the run knows"),
    ("format/tar.py", "import os.path", purity_violations, "os.path"),
    ("format/tar.py", "from pathlib import Path", purity_violations, "pathlib.Path"),
    ("format/tar.py", "open('x')", purity_violations, "opens a file"),
    ("format/index.py", "pa.memory_map('x')", purity_violations, "opens a file"),
    ("packing/run.py", "print(1)", print_violations, "packing/run.py:1 prints"),
    ("packing/run.py", "import sys\nsys.stderr.write('x')", print_violations, "packing/run.py:2 prints"),
    ("format/tar.py", "from shardkit.format import index", cycle_violations, "cycle"),
]


@pytest.mark.parametrize(("file", "source", "check", "message"), FAULTS)
def test_each_check_sees_its_violation(tmp_path, file, source, check, message):
    whole = {
        "__init__.py": "__version__ = '1'",
        "cli/main.py": "import click\nfrom shardkit.packing.run import pack",
        "format/index.py": "from shardkit.format import tar",
        "format/tar.py": "import struct",
        "packing/run.py": "from shardkit import __version__\nfrom shardkit.format.tar import pad",
        "pipeline/dali.py": "import nvidia.dali.fn",
        "storage/direct.py": "import os",
        "storage/gds_library.py": "import kvikio",
        "torch/loader.py": "from torch import Tensor",
    }

    def tree(sources: dict[str, str]) -> list[Module]:
        for name, text in sources.items():
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_text(text)
        return modules_of(tmp_path)

    assert list(check(tree(whole))) == []
    assert any(message in violation for violation in check(tree({file: source})))
