"""The command line: parse, one call, render."""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import signal
import sys
import time
import traceback
from typing import TYPE_CHECKING, NoReturn

import click

from shardkit.cli._render import print_error, print_json, warn
from shardkit.cli.bench import bench
from shardkit.cli.convert import convert
from shardkit.cli.doctor import doctor
from shardkit.cli.export import export
from shardkit.cli.extract import extract
from shardkit.cli.index import index
from shardkit.cli.inspect import inspect
from shardkit.cli.look import cat, ls, show
from shardkit.cli.pack import pack
from shardkit.cli.repair import repair
from shardkit.cli.verify import verify
from shardkit.errors import ShardkitError, from_os_error
from shardkit.escaping import escape
from shardkit.running.arrow_start import without_pandas
from shardkit.version import __version__

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Stopped", "cli", "main"]

EXIT_BUG = 1
EXIT_USAGE = 2
EXIT_STOPPED = 128
"""Plus the number of the signal: 130 for SIGINT, 143 for SIGTERM."""

_ALONE = {"cat", "export", "extract", "index", "inspect", "ls", "pack", "repair", "show", "verify"}
"""Commands that call no library which might ask for pandas."""
_STOPPING = (signal.SIGINT, signal.SIGTERM)
_PATIENCE_S = 1.0
"""A second signal within this time is the same one: a terminal and a wrapper may both send it."""
_COMPLETE = "_SHARDKIT_COMPLETE"


class Stopped(BaseException):
    """SIGINT or SIGTERM: unwinds, so that what was started is stopped and what is finished is kept."""

    def __init__(self, number: int) -> None:
        """Keep the number of the signal."""
        super().__init__(number)
        self.number = number


class _Stopper:
    """Handles both signals: the first one unwinds, a later one ends the process at once."""

    def __init__(self) -> None:
        self._first: float | None = None

    def __call__(self, number: int, _frame: object) -> None:
        now = time.monotonic()
        if self._first is None:
            self._first = now
            raise Stopped(number)
        if now - self._first >= _PATIENCE_S:
            os.write(2, b"shardkit: stopped at once; a pack's temporary files are swept when it is run again\n")
            os._exit(EXIT_STOPPED + number)


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="shardkit")
@click.option("--debug", is_flag=True, help="Show the traceback of an error; may stand anywhere.")
def cli(debug: bool) -> None:
    """Turn folders of JPEGs into aligned, indexed WebDataset shards, and prove them whole."""


cli.add_command(bench)
cli.add_command(cat)
cli.add_command(convert)
cli.add_command(doctor)
cli.add_command(extract)
cli.add_command(index)
cli.add_command(inspect)
cli.add_command(ls)
cli.add_command(export)
cli.add_command(pack)
cli.add_command(repair)
cli.add_command(show)
cli.add_command(verify)


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run a command and exit with its code; the codes are in docs/errors.md."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    _fill_standard_streams()
    stopper = _Stopper()
    for number in _STOPPING:
        if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup and a shell's `&` set it
            signal.signal(number, stopper)
    debug = "--debug" in given
    code = _run([argument for argument in given if argument != "--debug"], debug=debug, as_json=_wants_json(given))
    _settle_output()
    for number in _STOPPING:
        signal.signal(number, signal.SIG_IGN)  # the interpreter, when it ends, would let one kill it
    sys.exit(code)


def _wants_json(arguments: list[str]) -> bool:
    """Return whether standard output is for JSON; `bench --json` names a file, and only "-" is standard output."""
    if "bench" not in arguments:
        return "--json" in arguments
    return "--json=-" in arguments or ("--json", "-") in itertools.pairwise(arguments)


def _fill_standard_streams() -> None:
    """Open what the caller has closed of 0, 1 and 2: else a shard would get the number, and the messages."""
    with contextlib.suppress(OSError):
        fd = os.open(os.devnull, os.O_RDWR)
        while fd <= 2:
            fd = os.open(os.devnull, os.O_RDWR)
        os.close(fd)
    sys.stdout = sys.stdout or open(1, "w", closefd=False)  # noqa: SIM115 - for as long as the process lives
    sys.stderr = sys.stderr or open(2, "w", closefd=False)  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a name that the terminal's encoding lacks is no error


def _run(arguments: list[str], *, debug: bool, as_json: bool) -> int:
    try:
        with without_pandas() if arguments[:1] and arguments[0] in _ALONE else contextlib.nullcontext():
            return _invoke(arguments)
    except BrokenPipeError:
        return 0  # the reader of our output has gone, as with `| head`: not an error of ours, and nobody to tell
    except BaseException as error:
        if isinstance(error, SystemExit):
            raise
        if debug and not isinstance(error, click.ClickException):
            traceback.print_exc()
        with contextlib.suppress(OSError):  # there may be nowhere to say it
            return _report(error, as_json=as_json)
        return _code(error)


def _invoke(arguments: list[str]) -> int:
    instruction = os.environ.get(_COMPLETE)
    if instruction:
        from click.shell_completion import shell_complete

        return shell_complete(cli, {}, "shardkit", _COMPLETE, instruction)
    try:
        # Not `cli.main`, which takes a closed pipe for an error and Ctrl-C for an exception of its own.
        with cli.make_context("shardkit", arguments) as context:
            return int(cli.invoke(context) or 0)
    except click.exceptions.Exit as end:
        return end.exit_code


def _report(error: BaseException, *, as_json: bool) -> int:
    """Say what ended the command; return its exit code."""
    if isinstance(error, click.ClickException):
        shown = io.StringIO()
        error.show(shown)  # the usage, too
        message = "\n".join(map(escape, shown.getvalue().rstrip("\n").split("\n")))
        warn(message)
    else:
        if isinstance(error, OSError) and not isinstance(error, ShardkitError):
            error = from_os_error(error, "the system refused an operation")
        message = _message(error)
        warn(f"shardkit: {message}") if isinstance(error, Stopped) else print_error(message)
    code = _code(error)
    if as_json:
        print_json({"error": type(error).__name__, "message": message, "exit_code": code})
    return code


def _message(error: BaseException) -> str:
    if isinstance(error, ShardkitError):
        return str(error)
    if isinstance(error, Stopped):
        how = "interrupted" if error.number == signal.SIGINT else "terminated"
        return "; ".join([how, *getattr(error, "__notes__", ())])
    return f"this is a bug in shardkit: {type(error).__name__}: {escape(str(error))}; --debug shows where"


def _code(error: BaseException) -> int:
    if isinstance(error, click.ClickException):
        return EXIT_USAGE
    if isinstance(error, ShardkitError):
        return error.exit_code
    return EXIT_STOPPED + error.number if isinstance(error, Stopped) else EXIT_BUG


def _settle_output() -> None:
    """Write what is buffered; let it go nowhere, instead of failing once more when the interpreter ends."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            with contextlib.suppress(OSError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
