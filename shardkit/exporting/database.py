"""A new SQLite file on the disk: the only place that knows SQLite."""

from __future__ import annotations

import contextlib
import os
import sqlite3
from typing import TYPE_CHECKING

from shardkit.errors import StorageError, TargetFullError
from shardkit.escaping import escape
from shardkit.storage.atomic import os_errors, remove

if TYPE_CHECKING:
    from shardkit.exporting.table import Database

__all__ = ["write_database"]


def write_database(path: bytes, database: Database) -> None:
    """Make `path` hold the database, synced; a leftover of that name is removed first.

    Equal rows give equal bytes with one version of SQLite: the file is written once, in order.

    Raises:
        ShardkitError: `database.repeated`, when a row repeats what must be there once.
        TargetFullError: no space, or no room for one file more.
        StorageError: a failed write. What is left of the file is the caller's to remove.
    """
    remove(path)
    # Where it cannot be made, SQLite does not say why; an empty file is a new database.
    with os_errors("cannot write", path), open(path, "xb"):
        pass
    try:
        with contextlib.closing(sqlite3.connect(os.fsdecode(path), isolation_level=None)) as connection:
            # A file that nobody sees before it is whole needs neither a journal nor a sync of its own.
            connection.execute("PRAGMA journal_mode = OFF")
            connection.execute("PRAGMA synchronous = OFF")
            connection.execute("BEGIN")
            for statement in database.tables:
                connection.execute(statement)
            for statement, rows in database.rows:
                connection.executemany(statement, rows)
            for statement in database.indexes:
                connection.execute(statement)
            connection.execute("COMMIT")
        _sync(path)
    except sqlite3.IntegrityError as error:
        database.repeated.found = escape(str(error))[:200]
        raise database.repeated from error
    except sqlite3.Error as error:
        raise _mapped(error, path) from error


def _sync(path: bytes) -> None:
    with os_errors("cannot write", path), open(path, "rb") as file:
        os.fsync(file.fileno())


def _mapped(error: sqlite3.Error, path: bytes) -> TargetFullError | StorageError:
    found = escape(str(error))[:200]
    if getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL:
        return TargetFullError("cannot write", path=path, found=found, remedy="free space and run again")
    return StorageError("cannot write", path=path, found=found)
