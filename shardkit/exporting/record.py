"""`exports.json`: which files of a folder are exports, so that a later one may replace them and nothing else."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardkit.format.strict_json import dump_json, parse_json_object

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["RECORD", "dump_record", "load_record"]

RECORD = "exports.json"

_FORMAT = "shardkit-exports"


def dump_record(generation: str, digests: Mapping[str, str]) -> bytes:
    """Return the record: the XXH3-128 of each file, by name, and the generation of the latest export."""
    files = ",\n".join(f"  {dump_json(name)}: {dump_json(digest)}" for name, digest in sorted(digests.items()))
    head = f' "format": "{_FORMAT}",\n "format_version": 1,\n "generation": {dump_json(generation)},\n'
    return f'{{\n{head} "files": {{\n{files}\n }}\n}}\n'.encode()


def load_record(data: bytes) -> dict[str, str] | None:
    """Return the digests by name; None for a file that `dump_record` has not written."""
    try:
        document = parse_json_object(data.decode("ascii"))
    except ValueError:
        return None
    files = document.get("files")
    if document.get("format") != _FORMAT or document.get("format_version") != 1 or not isinstance(files, dict):
        return None
    return {name: digest for name, digest in files.items() if isinstance(digest, str)}
