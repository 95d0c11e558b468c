"""Which shards are meant: files, folders and brace expressions, as paths of regular files in a fixed order."""

from __future__ import annotations

import errno
import os
import re
import stat
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardkit.errors import ConfigError, ShardkitError, UnsafeError, from_os_error
from shardkit.escaping import escape
from shardkit.format.brace import expand_braces
from shardkit.local_path import is_url
from shardkit.storage.regular import matching_paths

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = ["MAX_SHARDS", "ShardFile", "find_shards"]

MAX_SHARDS = 1_000_000
"""Shards of one dataset."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,199}")
_NO_FILE = (errno.ELOOP, errno.ENAMETOOLONG)


@dataclass(frozen=True, slots=True)
class ShardFile:
    """A shard that is to be indexed."""

    name: str
    """File name; unique among those of a run, and fit for a manifest."""
    path: str
    """Absolute; a link that leads to the shard stays one."""
    bytes: int
    """Its size when it was found."""

    @property
    def stem(self) -> str:
        """The file name without `.tar`; the index files are named after it."""
        return self.name.removesuffix(".tar")


def find_shards(specs: Iterable[str | os.PathLike[str]]) -> Sequence[ShardFile]:
    """Return the shards that some texts mean, in the order of the texts; those of a folder by name.

    Nothing but local files is looked at, and no text is ever run.

    Args:
        specs: paths of tars, of folders with tars, or globs and brace expressions of such paths; what a glob matches
            comes by name.

    Raises:
        ConfigError: there is no such file, or two have one name; also for a URL.
        UnsafeError: a command (`pipe:`), an expression that stands for too many names, or no regular file.
        ShardkitError: one cannot be looked at; as `from_os_error` maps it.
    """
    found: list[ShardFile] = []
    for spec in specs:
        text = os.fspath(spec)
        if not isinstance(text, str):
            raise ConfigError("a shard is named by text", found=type(text).__name__)
        for path in _expanded(text):
            found += _shards_at(path)
            if len(found) > MAX_SHARDS:
                raise UnsafeError("too many shards for one dataset", expected=f"at most {MAX_SHARDS}")
    if not found:
        raise ConfigError("no shard is given", expected="tars, folders that hold some, globs or brace expressions")
    _refuse_repeated(found)
    return found


def _expanded(text: str) -> list[str]:
    if not text or "\0" in text:
        raise ConfigError("a shard has the name of a file", found="an empty one" if not text else escape(text))
    if text.startswith("pipe:"):
        raise UnsafeError("a command instead of a shard: nothing is run", found=escape(text[:80]),
                          remedy="run it yourself, and index the file that it writes")  # fmt: skip
    if is_url(text):
        raise ConfigError("only local files are indexed", found=escape(text[:80]), remedy="download the shards first")
    if "{" not in text or os.path.lexists(text):
        return matching_paths(text)
    return [match for name in expand_braces(text, MAX_SHARDS) for match in matching_paths(name)]


def _shards_at(path: str) -> list[ShardFile]:
    try:
        status = os.stat(path)
        if not stat.S_ISDIR(status.st_mode):
            return [_shard(path, status)]
        names = sorted(os.fsencode(name) for name in os.listdir(path) if name.endswith(".tar"))
        paths = [os.path.join(path, os.fsdecode(name)) for name in names]
        found = [_shard(inner, os.stat(inner)) for inner in paths if not os.path.isdir(inner)]
    except (FileNotFoundError, NotADirectoryError) as error:
        raise _no_shard(error.filename or path) from error
    except ShardkitError:
        raise
    except ValueError as error:
        raise ConfigError("a shard has the name of a file", found=escape(path)) from error
    except OSError as error:
        if error.errno in _NO_FILE:
            raise ConfigError("there is no such shard", path=path, found=error.strerror) from error
        raise from_os_error(error, "cannot look at a shard", path=path) from error
    if not found:
        raise ConfigError("the folder holds no shard", path=path, expected="files whose names end in .tar")
    return found


def _no_shard(path: str) -> ConfigError:
    if os.path.islink(path):
        return ConfigError("a link to a shard leads nowhere", path=path, found=escape(os.readlink(path)),
                           remedy="mend the link, or remove it")  # fmt: skip
    return ConfigError("there is no such shard", path=path)


def _shard(path: str, status: os.stat_result) -> ShardFile:
    if not stat.S_ISREG(status.st_mode):
        raise UnsafeError("not a regular file", path=path, remedy="look at what it is")
    name = os.path.basename(path)
    if not _NAME.fullmatch(name) or not name.endswith(".tar") or name in (".tar", "index.tar"):
        raise ConfigError(
            "a name that a dataset's shard cannot have",
            path=path,
            expected="letters, digits, _, . and -, .tar at the end, and not index.tar",
            remedy="rename it, or make a link to it under such a name, and index that",
        )
    return ShardFile(name, os.path.abspath(path), status.st_size)


def _refuse_repeated(found: Sequence[ShardFile]) -> None:
    by_name: dict[str, ShardFile] = {}
    for shard in found:
        other = by_name.setdefault(shard.stem, shard)
        if other is not shard:
            same = os.path.realpath(other.path) == os.path.realpath(shard.path)
            what = "a shard is given twice" if same else "two shards have one name: their indexes would, too"
            remedy = "name it once" if same else "make a dataset of each folder, or links under names that differ"
            raise ConfigError(what, path=shard.path, found=None if same else escape(other.path), remedy=remedy)
