"""Write docs/cli.md from the commands' own help; a test compares the two.

With `-` as argument it goes to standard output.
"""

from __future__ import annotations

import sys
from pathlib import Path

import click

from shardkit.cli.main import cli

INTRODUCTION = """\
# Commands

This page is what `shardkit COMMAND --help` prints, written by `scripts/make_cli_docs.py`.

Sizes are written as `4096`, `256MB` (powers of 1000) or `1GiB` (powers of 1024). Progress goes to standard error, and
only when that is a terminal; `--json` prints one document on standard output. Exit codes are in
[errors.md](errors.md).
"""


def page() -> str:
    root = click.Context(cli, info_name="shardkit", terminal_width=100, **cli.context_settings)
    parts = [INTRODUCTION, section("shardkit", cli.get_help(root))]
    for name in cli.list_commands(root):
        command = cli.get_command(root, name)
        assert command is not None
        context = click.Context(command, info_name=name, parent=root, terminal_width=100)
        parts.append(section(f"shardkit {name}", command.get_help(context)))
    return "\n".join(parts)


def section(title: str, text: str) -> str:
    return f"## {title}\n\n```\n{text.rstrip()}\n```\n"


if __name__ == "__main__":
    if sys.argv[1:] == ["-"]:
        sys.stdout.write(page())
        sys.exit()
    Path(__file__).parent.parent.joinpath("docs", "cli.md").write_text(page(), encoding="utf-8")
