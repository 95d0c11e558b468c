"""The file that a page becomes: checked before the work begins, and whole or absent afterwards."""

from __future__ import annotations

import contextlib
import os
import stat

from shardkit.errors import ConfigError, ShardkitError, StorageError, TargetFullError, from_os_error
from shardkit.storage.atomic import remove, replace_file

__all__ = ["check_target", "write_page"]

_ENDINGS = (b".html", b".htm")


def check_target(path: bytes, *, overwrite: bool) -> None:
    """Refuse what a page cannot be written to.

    Raises:
        ConfigError: there is something already, its folder is not there, or its name is not that of a page.
        StorageError: its folder may not be written.
        ShardkitError: the system does not tell; as `from_os_error` maps it.
    """
    if not path.lower().endswith(_ENDINGS):
        # So that a slip of the hand never replaces a shard or a manifest.
        raise ConfigError("the name of a page ends in .html", path=path, remedy="name another file")
    folder = os.path.dirname(os.path.abspath(path))
    if not os.path.isdir(folder):
        raise ConfigError("the folder of the page is not there", path=folder, remedy="make it first")
    if not os.access(folder, os.W_OK | os.X_OK, effective_ids=os.access in os.supports_effective_ids):
        raise StorageError("the folder of the page may not be written", path=folder, remedy="name another file")
    try:
        status = os.lstat(path)
    except FileNotFoundError:
        return
    except OSError as error:
        raise from_os_error(error, "cannot look at a file", path=path) from error
    if not stat.S_ISREG(status.st_mode):
        raise ConfigError("something else than a file has the name of the page", path=path,
                          remedy="name another file")  # fmt: skip
    if not overwrite:
        raise ConfigError("the page is there already", path=path, remedy="name another file, or give --overwrite")


def write_page(path: bytes, page: bytes, *, overwrite: bool) -> None:
    """Write a page, durably and at once; when it fails, what was there is there still.

    Raises:
        ConfigError: as `check_target`: it may have come meanwhile.
        ShardkitError: it cannot be written; as `from_os_error` maps it.
    """
    check_target(path, overwrite=overwrite)
    folder, name = os.path.split(os.path.abspath(path))
    # The process's number: another run that writes the same page has a temporary file of its own.
    temporary = os.path.join(folder, b".shardkit-inspect-%d.tmp" % os.getpid())
    try:
        replace_file(os.path.join(folder, name), page, temporary)
    except BaseException as error:
        with contextlib.suppress(ShardkitError):
            remove(temporary)
        if isinstance(error, ShardkitError):
            error.what, error.path = "cannot write the page", path
        if isinstance(error, TargetFullError):
            error.remedy = "free space (or raise the quota or the file size limit), or name another file"
        raise
