"""The pages agree with the code: commands, exit codes, links and examples."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote

import click
import pytest

import shardkit.errors
from shardkit.cli import main as cli
from shardkit.packing.refusals import REASONS

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = sorted([ROOT / "README.md", *ROOT.glob("CHANGELOG.md"), *DOCS.rglob("*.md")])

_FENCE = re.compile(r"^(?P<mark>(?:<!-- run -->\n+)?)```(?P<language>\w*)[^\n]*\n(?P<code>.*?)^```", re.M | re.S)
_LINK = re.compile(r"(?<!!)\[[^\]\n]*\]\((?P<to>[^)\s]+)\)|!\[[^\]\n]*\]\((?P<image>[^)\s]+)\)")


class Example(NamedTuple):
    page: Path
    line: int
    code: str
    runs: bool


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def examples_of(page: Path) -> list[Example]:
    text = page.read_text("utf-8")
    return [
        Example(page, text.count("\n", 0, match.start("code")) + 1, match["code"], bool(match["mark"]))
        for match in _FENCE.finditer(text)
        if match["language"] == "python"
    ]


def broken_links(page: Path) -> list[str]:
    text = _FENCE.sub("", page.read_text("utf-8"))
    links = [match["to"] or match["image"] for match in _LINK.finditer(text)]
    return [link for link in links if not resolves(page, link)]


def resolves(page: Path, link: str) -> bool:
    if re.match(r"[a-z][a-z0-9+.-]*:", link):
        return True
    path, _, anchor = unquote(link).partition("#")
    target = page.parent / path if path else page
    if not anchor or target.suffix != ".md":
        return target.exists()
    return target.exists() and anchor in anchors_of(target)


def anchors_of(page: Path) -> set[str]:
    """The anchors that GitHub makes of the headings of a page."""
    headings = re.findall(r"^#+ +(.+?) *#*$", _FENCE.sub("", page.read_text("utf-8")), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def group() -> click.Group:
    return next(value for value in vars(cli).values() if isinstance(value, click.Group))


def commands() -> dict[str, click.Command]:
    root = group()
    context = click.Context(root, info_name="shardkit")
    found = {name: root.get_command(context, name) for name in root.list_commands(context)}
    return {name: command for name, command in found.items() if command is not None}


EXAMPLES = [example for page in PAGES if page.exists() for example in examples_of(page)]


def test_the_pages_that_others_rely_on_exist():
    wanted = ["README.md", "CHANGELOG.md", "LICENSE", *(f"docs/{name}.md" for name in ("cli", "errors", "format"))]
    assert [name for name in wanted if not (ROOT / name).is_file()] == []


@pytest.mark.parametrize("name", sorted(commands()))
def test_every_command_is_documented_and_has_help(name):
    page = (DOCS / "cli.md").read_text("utf-8")
    command = commands()[name]
    assert f"shardkit {name}" in page
    assert command.help
    for parameter in command.params:
        if not isinstance(parameter, click.Option) or parameter.hidden:
            continue
        assert parameter.help, f"{name}: {parameter.opts} has no help"
        for option in (*parameter.opts, *parameter.secondary_opts):
            assert re.search(rf"(?<![\w-]){re.escape(option)}(?![\w-])", page), (
                f"{name}: {option} is not in docs/cli.md"
            )


def test_every_error_and_its_exit_code_is_documented():
    page = (DOCS / "errors.md").read_text("utf-8")
    for name in shardkit.errors.__all__:
        error = getattr(shardkit.errors, name)
        if not isinstance(error, type):
            continue
        lines = [line for line in page.splitlines() if re.search(rf"\b{name}\b", line)]
        assert lines, f"{name} is not in docs/errors.md"
        assert any(re.search(rf"\b{error.exit_code}\b", line) for line in lines), f"{name} exits {error.exit_code}"


def test_every_reason_for_a_refusal_is_documented():
    rows = re.findall(r"^\| `([a-z-]+)` \| (.+) \|$", (DOCS / "errors.md").read_text("utf-8"), re.M)
    assert dict(rows) == REASONS


def test_the_page_of_commands_is_what_they_print():
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "make_cli_docs.py"), "-"],
        env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout == (DOCS / "cli.md").read_text("utf-8"), "run scripts/make_cli_docs.py"


def test_every_exit_code_is_documented():
    page = (DOCS / "errors.md").read_text("utf-8")
    assert [code for code in (*range(10), 130, 143) if not re.search(rf"^\| *`?{code}`? *\|", page, re.M)] == []


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_relative_links_resolve(page):
    assert broken_links(page) == []


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: f"{name_of(example.page)}:{example.line}")
def test_examples_compile(example):
    compile("\n" * (example.line - 1) + example.code, name_of(example.page), "exec")


@pytest.mark.parametrize(
    "example",
    [example for example in EXAMPLES if example.runs],
    ids=lambda example: f"{name_of(example.page)}:{example.line}",
)
def test_examples_marked_to_run_do_run(example, tmp_path, photo_tree):
    """They find a tree of photographs as `photos/` in an empty folder."""
    (tmp_path / "photos").symlink_to(photo_tree)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", example.code], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_a_broken_page_would_be_seen(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("# One  heading\n[a](#one--heading) [b](gone.md) [c](page.md#two) ![d](e.png) [f](https://g.h)\n")
    assert broken_links(page) == ["gone.md", "page.md#two", "e.png"]
    page.write_text("x\n<!-- run -->\n```python\n1 +\n```\n\n```python\n2\n```\n```sh\n3\n```\n")
    assert examples_of(page) == [Example(page, 4, "1 +\n", True), Example(page, 8, "2\n", False)]
