"""What is to be converted: dataset folders and tars, named by paths, globs, brace expressions and lists of them."""

from __future__ import annotations

import errno
import glob
import os
import re
import stat
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from shardkit.errors import ConfigError, UnsafeError, from_os_error
from shardkit.escaping import escape
from shardkit.format.brace import MAX_NAMES, expand_braces
from shardkit.storage.regular import open_regular

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["Input", "find_inputs"]

_LISTS = (".txt", ".list")
_MAX_LIST_BYTES = 1 << 28
_MAX_GLOB_LENGTH = 4096
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")


@dataclass(frozen=True, slots=True)
class Input:
    """A dataset's folder, or a tar."""

    kind: Literal["dataset", "tar"]
    path: str
    """Absolute; a link stays one."""


def find_inputs(specs: Sequence[str]) -> list[Input]:
    """Return what some texts mean, in their order; the matches of a glob sorted by name.

    Only local files are looked at, and no text is ever run.

    Args:
        specs: each a dataset's folder, a tar, a glob or brace expression of those, several joined by `::`, or a list:
            a file that ends in .txt or .list, with one of these a line, relative to its own folder.

    Raises:
        ConfigError: there is nothing of that name, or it is neither a dataset nor a file.
        UnsafeError: a command (`pipe:`), a URL, an expression that stands for too many names, or a special file.
        ShardkitError: one cannot be looked at; as `from_os_error` maps it.
    """
    found: list[Input] = []
    for spec in specs:
        for path in _paths(spec, ""):
            if path.endswith(_LISTS):
                inner = (each for line in _lines(path) for each in _paths(line, os.path.dirname(path)))
                found += map(_input, inner)
            else:
                found.append(_input(path))
            if len(found) > MAX_NAMES:
                raise UnsafeError("too many inputs", expected=f"at most {MAX_NAMES}", found=escape(spec[:80]))
    if not found:
        raise ConfigError("there is nothing to convert", expected="a dataset's folder, tars, or a list of them")
    return found


def _paths(spec: str, folder: str) -> Iterator[str]:
    """Yield the absolute paths that one text stands for."""
    if not spec or "\0" in spec:
        raise ConfigError("an input has a name", found=escape(spec) if spec else "an empty one")
    for piece in spec.split("::"):
        if piece.startswith("pipe:"):
            raise UnsafeError("a command instead of shards: nothing is run", found=escape(piece[:80]),
                              remedy="run it yourself, and convert the files that it writes")  # fmt: skip
        if _SCHEME.match(piece):
            raise UnsafeError("only local files are converted", found=escape(piece[:80]),
                              remedy="download the shards first")  # fmt: skip
        whole = os.path.abspath(os.path.join(folder, piece))
        if os.path.lexists(whole):
            yield whole
            continue
        for path in expand_braces(whole) if "{" in whole else [whole]:
            yield from _matches(path)


def _matches(path: str) -> list[str]:
    if not glob.has_magic(path) or os.path.lexists(path):
        return [path]
    if len(path) > _MAX_GLOB_LENGTH or path.count("*") > 16:
        raise UnsafeError("too long for a glob", found=escape(path[:80]), remedy="name the files in a list")
    matches = sorted(glob.glob(path, recursive=False), key=os.fsencode)
    if not matches:
        raise ConfigError("nothing matches", found=escape(path))
    return matches


def _lines(path: str) -> list[str]:
    try:
        with open_regular(path, _MAX_LIST_BYTES) as file:
            lines = file.read().split(b"\n")
    except FileNotFoundError as error:
        raise ConfigError("there is no such list", path=path) from error
    except OSError as error:
        raise from_os_error(error, "cannot read a list of shards", path=path) from error
    texts = [os.fsdecode(line.strip()) for line in lines]
    wanted = [text for text in texts if text and not text.startswith("#")]
    if not wanted:
        raise ConfigError("the list names nothing", path=path)
    nested = next((text for text in wanted if text.endswith(_LISTS)), None)
    if nested is not None:
        raise ConfigError("a list names shards, not further lists", path=path, found=escape(nested[:80]))
    return wanted


def _input(path: str) -> Input:
    try:
        mode = os.stat(path).st_mode
    except (FileNotFoundError, NotADirectoryError) as error:
        raise ConfigError("there is no such input", path=path) from error
    except (OSError, ValueError) as error:
        if isinstance(error, ValueError):
            raise ConfigError("an input has a name that no file can have", found=escape(path[:80])) from error
        if error.errno in (errno.ELOOP, errno.ENAMETOOLONG):
            raise ConfigError("there is no such input", path=path, found=error.strerror) from error
        raise from_os_error(error, "cannot look at an input", path=path) from error
    if stat.S_ISDIR(mode):
        return Input("dataset", path)
    if not stat.S_ISREG(mode):
        raise UnsafeError("neither a folder nor a regular file", path=path, remedy="look at what it is")
    return Input("tar", path)
