"""What arguments may be, known without importing what does the work."""

from __future__ import annotations

import os

import click

from shardkit.errors import ConfigError, from_os_error

__all__ = ["LEVELS", "PATH", "refuse_empty", "refuse_missing"]

LEVELS = ("index", "structure", "checksum", "decode")
"""Of `shardkit.verifying.report.LEVELS`."""

PATH = click.Path(readable=False)
"""Any text: what is wrong with what lies there the library says, in its words and by its exit codes, not click."""


def refuse_empty(names: str, *given: str | None) -> None:
    """Refuse an empty name, such as an empty variable of a shell gives: it would be the current folder.

    Args:
        names: what the arguments are called, as the subject of a sentence: `DATASET is the name of a folder`.
        given: the arguments; None for one that was not given.

    Raises:
        ConfigError: one is empty.
    """
    if "" in given:
        raise ConfigError(names, found="an empty one")


def refuse_missing(path: str) -> None:
    """Refuse a path at which nothing lies.

    Raises:
        ConfigError: nothing does.
        StorageError: the system does not say.
    """
    try:
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise ConfigError("there is no such path", path=path, remedy="name a file or folder that exists") from error
    except OSError as error:
        raise from_os_error(error, "cannot look at a path", path=path) from error
