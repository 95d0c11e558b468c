"""What other tools' files say, and what their tars hold, without shardkit's own readers."""

from __future__ import annotations

import contextlib
import json
import sqlite3
import tarfile
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["database_rows", "payloads_by_key", "read_json", "tar_members"]


def tar_members(path: Path) -> list[tuple[str, int, bytes]]:
    """Return name, payload offset and payload of every file in a tar, as Python's tarfile sees them."""
    with tarfile.open(path) as archive:
        files = [(member, archive.extractfile(member)) for member in archive if member.isreg()]
        return [(member.name, member.offset_data, file.read()) for member, file in files if file is not None]


def payloads_by_key(dataset: Path) -> dict[str, dict[str, bytes]]:
    """Return key to {extension: payload} of every shard in a folder; keys have no dots."""
    found: dict[str, dict[str, bytes]] = {}
    for shard in sorted(dataset.glob("*.tar")):
        for name, _, payload in tar_members(shard):
            key, _, extension = name.partition(".")
            found.setdefault(key, {})[extension] = payload
    return found


def read_json(path: Path) -> dict[str, Any]:  # Any: JSON values
    """Return the object that a JSON file holds."""
    document: dict[str, Any] = json.loads(path.read_text())
    return document


def database_rows(path: Path, table: str) -> list[tuple[Any, ...]]:  # Any: what SQLite stores
    """Return the rows of a table of an SQLite file, in stored order."""
    with contextlib.closing(sqlite3.connect(path)) as connection:
        return connection.execute(f"SELECT * FROM {table} ORDER BY rowid").fetchall()
