"""`shardkit doctor`: what this machine can do, why not, and the remedy."""

from __future__ import annotations

import os
import re
import shutil
import sys
import textwrap
from typing import TYPE_CHECKING

import click

from shardkit.cli._choices import PATH, refuse_missing
from shardkit.cli._render import print_error, print_json, print_lines
from shardkit.errors import ConfigError
from shardkit.escaping import escape

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardkit.diagnosing.line import Line
    from shardkit.diagnosing.report import Demand, Report

__all__ = ["doctor"]

_ASK_CUDA = (sys.executable, "-m", "shardkit.cli._ask_cuda")
_ASK_KVIKIO = (sys.executable, "-m", "shardkit.cli._ask_kvikio")
_COLOURS = {"ok": "green", "warn": "yellow", "fail": "red", "info": "bright_black"}
_NUMBER = re.compile(r"-?([0-9]{1,9})")
_STATUS = 4
_GAP = "  "


@click.command(short_help="Say what this machine can do, why not, and the remedy.")
@click.argument("path", type=PATH, default=".")
@click.option(
    "--require",
    type=click.Choice(["gpu", "gds", "direct", "uring"]),
    multiple=True,
    help="Fail when this cannot be had: a GPU that CUDA can use; for PATH GPUDirect Storage, direct reads, io_uring. "
    "May be given several times.",
)
@click.option("--explain", metavar="CODE", help="Explain an error of cuFile's: its number, its name or the message.")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON, with every fact that was read.")
def doctor(path: str, require: tuple[Demand, ...], explain: str | None, as_json: bool) -> int:
    """Examine this machine, and the storage that holds PATH (here, by default).

    Every line is ok, warn (works, but slower than it could), fail (cannot work) or info, and says what was found; the
    remedy follows. Nothing is changed.

    Exit code 0, whatever is found. 7: something that --require names cannot be had.
    """
    if explain is not None:
        return _explain(explain, as_json=as_json)
    refuse_missing(path)
    from shardkit.diagnosing.gather import gather
    from shardkit.diagnosing.report import examine

    report = examine(gather(path, cuda_command=_ASK_CUDA, kvikio_command=_ASK_KVIKIO), require)
    if as_json:
        print_json(report.to_json())
    else:
        print_lines(list(_lines(report)))
    for line in report.demands:
        if line.status == "fail":
            print_error(f"{line.name} is required and cannot be had: {escape(line.found)}; {escape(line.remedy)}")
    return report.exit_code


def _explain(text: str, *, as_json: bool) -> int:
    from shardkit.storage.cufile_errors import cufile_code_in, explain_cufile_error

    code = int(number[1]) if (number := _NUMBER.fullmatch(text.strip())) else cufile_code_in(text)
    if code is None:
        raise ConfigError(
            "no error of cuFile's", expected="5033, CU_FILE_DIO_NOT_SET, or a message that has either",
            found=escape(text) or "nothing",
        )  # fmt: skip
    name, meaning, remedy = explain_cufile_error(code)
    if as_json:
        print_json({"code": code, "name": name, "meaning": meaning, "remedy": remedy})
    else:
        print_lines([f"{code} {name}", f"  {meaning}", f"  -> {remedy}"])
    return 0


def _lines(report: Report) -> Iterator[str]:
    terminal = sys.stdout.isatty()
    colour = terminal and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"
    width = shutil.get_terminal_size().columns if terminal else None
    every = [*(line for lines in report.sections.values() for line in lines), *report.demands]
    indent = max(len(escape(line.name)) for line in every)
    titles = {"storage": f"storage of {escape(report.facts.storage.path)}"}
    for name, lines in [*report.sections.items(), ("required", report.demands)]:
        if lines:
            yield titles.get(name, name)
        for line in lines:
            yield from _line(line, indent, width, colour=colour)
    counts = report.counts
    yield ", ".join(f"{counts[status]} {status}" for status in ("ok", "warn", "fail", "info"))


def _line(line: Line, indent: int, width: int | None, *, colour: bool) -> Iterator[str]:
    status = line.status.ljust(_STATUS)
    shown = click.style(status, fg=_COLOURS[line.status]) if colour else status
    margin = len(_GAP) * 3 + _STATUS + indent
    first, *others = _wrapped(escape(line.found), width, margin)
    yield f"{_GAP}{shown}{_GAP}{escape(line.name):{indent}}{_GAP}{first}"
    yield from (" " * margin + text for text in others)
    if line.remedy:
        for number, text in enumerate(_wrapped(escape(line.remedy), width, margin + 3)):
            yield " " * margin + ("   " if number else "-> ") + text


def _wrapped(text: str, width: int | None, margin: int) -> list[str]:
    if width is None or width - margin < 30:
        return [text]
    return textwrap.wrap(text, width - margin, break_long_words=False, break_on_hyphens=False) or [""]
