"""What is to be converted: dataset folders and tars, named by paths, globs, brace expressions and lists of them."""

from __future__ import annotations

import errno
import os
import re
import stat
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, cast

from shardkit.converting.parquet import PARQUET
from shardkit.errors import ConfigError, UnsafeError, from_os_error
from shardkit.escaping import escape
from shardkit.format.brace import MAX_NAMES, expand_braces
from shardkit.local_path import is_url
from shardkit.storage.regular import matching_paths, read_named

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from shardkit.converting.options import ConvertOptions
    from shardkit.storage.clone import Reflink

    InputKind = Literal["dataset", "tar", "tree", "mds", "litdata", "hf"]

__all__ = ["Input", "check_columns", "checked_inputs", "find_inputs"]

_LISTS = (".txt", ".list")
_MAX_LIST_BYTES = 1 << 28
_FOREIGN = re.compile(r"(mds|litdata|hf|tree):(.+)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Input:
    """A dataset's folder, a tar, the folder of another framework's dataset, or a folder of images."""

    kind: InputKind
    path: str
    """Absolute; a link stays one."""


def find_inputs(specs: Sequence[str]) -> list[Input]:
    """Return what some texts mean, in their order; the matches of a glob sorted by name.

    Only local files are looked at, and no text is ever run.

    Args:
        specs: each a dataset's folder, a tar, a glob or brace expression of those, several joined by `::`, or a list:
            a file that ends in .txt or .list, with one of these a line, relative to its own folder. With `mds:`,
            `litdata:` or `hf:` before it, the folder of a dataset of that kind; with `tree:`, a folder of images.

    Raises:
        ConfigError: there is nothing of that name, or it is neither a dataset nor a file.
        UnsafeError: a command (`pipe:`), a URL, an expression that stands for too many names, or a special file.
        ShardkitError: one cannot be looked at; as `from_os_error` maps it.
    """
    found: list[Input] = []
    for spec in specs:
        for path in _paths(spec, ""):
            if path.endswith(_LISTS) and not _FOREIGN.fullmatch(path):
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
    """Yield the absolute paths that one text stands for, those of foreign datasets with their kind before them."""
    if not spec or "\0" in spec:
        raise ConfigError("an input has a name", found=escape(spec) if spec else "an empty one")
    for piece in spec.split("::"):
        if piece.startswith("pipe:"):
            raise UnsafeError("a command instead of shards: nothing is run", found=escape(piece[:80]),
                              remedy="run it yourself, and convert the files that it writes")  # fmt: skip
        if is_url(piece):
            raise UnsafeError("only local files are converted", found=escape(piece[:80]),
                              remedy="download the shards first")  # fmt: skip
        whole = os.path.abspath(os.path.join(folder, piece))
        if os.path.lexists(whole):
            yield whole
            continue
        foreign = _FOREIGN.fullmatch(piece)
        kind = "" if foreign is None else f"{foreign[1]}:"
        if foreign is not None:
            whole = os.path.abspath(os.path.join(folder, foreign[2]))
        literal = "{" not in whole or os.path.lexists(whole)
        for path in [whole] if literal else expand_braces(whole):
            yield from (kind + match for match in matching_paths(path))


def _lines(path: str) -> list[str]:
    texts = [os.fsdecode(line.strip()) for line in read_named(path, "the list", _MAX_LIST_BYTES).split(b"\n")]
    wanted = [text for text in texts if text and not text.startswith("#")]
    if not wanted:
        raise ConfigError("the list names nothing", path=path)
    nested = next((text for text in wanted if text.endswith(_LISTS)), None)
    if nested is not None:
        raise ConfigError("a list names shards, not further lists", path=path, found=escape(nested[:80]))
    return wanted


def _input(path: str) -> Input:
    foreign = _FOREIGN.fullmatch(path)  # every other path is absolute
    mode = _mode(path if foreign is None else foreign[2])
    if foreign is not None:
        file = foreign[1] == "hf" and foreign[2].endswith(PARQUET) and stat.S_ISREG(mode)
        if not file and not stat.S_ISDIR(mode):
            raise ConfigError("there is no such folder", path=foreign[2])
        return Input(cast("InputKind", foreign[1]), foreign[2])
    if stat.S_ISDIR(mode):
        return Input("dataset", path)
    if not stat.S_ISREG(mode):
        raise UnsafeError(
            "neither a folder nor a regular file", path=path,
            remedy="look at what it is; what comes out of a pipe must be written into a file first",
        )  # fmt: skip
    if path.endswith(PARQUET):
        raise ConfigError("a Parquet file is no tar", path=path, remedy=f"name it as hf:{escape(path)}")
    return Input("tar", path)


def _mode(path: str) -> int:
    try:
        return os.stat(path).st_mode
    except (FileNotFoundError, NotADirectoryError) as error:
        raise ConfigError("there is no such input", path=path) from error
    except (OSError, ValueError) as error:
        if isinstance(error, ValueError):
            raise ConfigError("an input has a name that no file can have", found=escape(path[:80])) from error
        if error.errno in (errno.ELOOP, errno.ENAMETOOLONG):
            raise ConfigError("there is no such input", path=path, found=error.strerror) from error
        raise from_os_error(error, "cannot look at an input", path=path) from error


def checked_inputs(src: Sequence[str | os.PathLike[str]], target: str) -> list[Input]:
    """Return the inputs, none of which lies in the target or around it.

    Raises:
        ConfigError: one does.
        ShardkitError: as `find_inputs`.
    """
    inputs = find_inputs([os.fspath(each) for each in src])
    real = os.path.realpath(target)
    for each in inputs:
        place = os.path.realpath(each.path)
        inside = (real + os.sep).startswith(place.rstrip(os.sep) + os.sep) and each.kind != "tar"
        if inside or place.startswith(real.rstrip(os.sep) + os.sep):
            raise ConfigError("the target and an input lie in one another", path=target, found=escape(each.path),
                              remedy="choose a folder of its own")  # fmt: skip
    return inputs


def check_columns(inputs: Sequence[Input], options: ConvertOptions, reflink: Reflink) -> None:
    """Refuse options that foreign datasets cannot serve, or only they could.

    Raises:
        ConfigError: names one.
    """
    foreign = next((each for each in inputs if each.kind not in ("dataset", "tar", "tree")), None)
    bare = options.label_column == "" and any(each.kind == "tree" for each in inputs)  # its folders are no classes then
    label = None if bare else options.label_column
    columns = (options.image_column, label, options.key_column, options.json_column)
    if foreign is None and any(column is not None for column in columns):
        raise ConfigError("no input has columns to choose from", expected="mds:DIR, litdata:DIR or hf:DIR")
    if foreign is not None and reflink == "always":
        raise ConfigError("blocks cannot be shared with another framework's dataset", path=foreign.path,
                          remedy="give --reflink auto")  # fmt: skip
