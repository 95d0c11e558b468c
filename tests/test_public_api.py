"""The public names: where they lead, and that nothing takes their place."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import shardkit

PACKAGE = Path(shardkit.__file__).parent
FUNCTIONS = ("convert", "export", "index", "inspect", "open", "pack", "repair", "verify")


def run(code: str) -> None:
    subprocess.run([sys.executable, "-c", code], check=True)


def test_all_is_what_can_be_seen():
    seen = {name for name in dir(shardkit) if not name.startswith("_")} - {"annotations", "TYPE_CHECKING"}
    folders = {path.stem for path in PACKAGE.iterdir()}
    assert seen - folders == set(shardkit.__all__) - {"__version__"}


def test_every_public_name_leads_somewhere():
    for name in shardkit.__all__:
        assert getattr(shardkit, name) is not None
    assert all(callable(getattr(shardkit, name)) for name in FUNCTIONS)


def test_names_for_the_type_checker_are_the_names_for_the_run():
    tree = ast.parse((PACKAGE / "__init__.py").read_text())
    block = next(node for node in tree.body if isinstance(node, ast.If))
    imported = {
        alias.asname or alias.name: (node.module, alias.name)
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert imported == shardkit._HOMES


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match=r"'shardkit' has no attribute 'unpack'"):
        shardkit.unpack  # noqa: B018


def test_no_folder_or_file_bears_a_public_name():
    assert {path.stem for path in PACKAGE.iterdir()} & set(shardkit.__all__) == set()


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_survive_the_import_of_their_modules(name):
    module, attribute = shardkit._HOMES[name]
    late = f"import shardkit, {module}; assert shardkit.{name} is {module}.{attribute}"
    early = f"import shardkit; before = shardkit.{name}; import {module}; assert shardkit.{name} is before"
    taken = f"from shardkit import {name}; import {module}; assert {name} is {module}.{attribute}"
    run("\n".join((late, early, taken)))


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_every_module_states_its_public_names(path):
    body = ast.parse(path.read_text()).body
    defines = any(isinstance(node, ast.FunctionDef | ast.ClassDef) for node in body)
    assigned = {target.id for node in body if isinstance(node, ast.Assign) for target in node.targets if named(target)}
    assert "__all__" in assigned or not defines  # the page of a folder defines nothing


def named(target: ast.expr) -> bool:
    return isinstance(target, ast.Name)
