"""The manifest file: what a dataset consists of. Written last, so a folder without one is not a dataset.

Canonical JSON: the same manifest is the same bytes, and a file that does not equal its own canonical form has been
edited or damaged. A line a field and a line a shard; the line `digest` covers all the others.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
from typing import TYPE_CHECKING, Any, TypeVar

from shardkit.errors import ManifestError, UnsupportedVersionError
from shardkit.format.checksum import hex_digest
from shardkit.format.dataset_record import (
    FileRecord,
    Manifest,
    ShardRecord,
    Totals,
    brace_spec,
    check_dataset,
    check_shard_name,
    shown,
)
from shardkit.format.index import FORMAT_VERSION
from shardkit.format.strict_json import dump_json, parse_json_object

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = [
    "MAX_MANIFEST_BYTES",
    "FileRecord",
    "Manifest",
    "ShardRecord",
    "Totals",
    "brace_spec",
    "dump_manifest",
    "load_manifest",
    "load_shard",
    "load_without_version",
]

MAX_MANIFEST_BYTES = 1 << 30
"""Bytes; a larger file is refused before it is parsed. About two million shards."""
_MAX = 2**64 - 1
_DIGEST = "xxh3-128"
_FORMAT = "shardkit"
_VERSION_LINE = re.compile(rb'^ "format_version": [^\n]*,\n', re.MULTILINE)
_DIGEST_LINE = re.compile(r'^ "digest": "[a-z0-9:-]*",\n', re.MULTILINE)
_TOTALS = tuple(f.name for f in dataclasses.fields(Totals))
_Value = TypeVar("_Value")


def dump_manifest(manifest: Manifest) -> str:
    """Return the manifest file's text; ASCII, ends in a newline.

    Raises:
        ManifestError: a value that no dataset has; `load_manifest` would refuse it.
    """
    check_dataset(manifest)
    document: dict[str, object] = {f.name: getattr(manifest, f.name) for f in dataclasses.fields(manifest)}
    document |= {"format": _FORMAT, "format_version": FORMAT_VERSION, "brace": manifest.brace}
    try:
        document["generation"] = manifest.generation
        lines = {name: _line(name, value) for name, value in document.items()}
    except ValueError as error:
        raise ManifestError("a value that JSON does not have", found=str(error)[:200]) from error
    lines["digest"] = _line("digest", _own_digest(_text(lines)))
    return _text(lines)


def load_manifest(data: str | bytes) -> Manifest:
    """Return the manifest that a file states; the inverse of `dump_manifest`.

    Args:
        data: the whole file, as read or decoded.

    Raises:
        UnsupportedVersionError: written by a newer shardkit.
        ManifestError: not a manifest, or one whose bytes are not what was written.
    """
    text, document = _parse(data)
    if document.get("format") != _FORMAT or not isinstance(document.get("format_version"), int):
        raise ManifestError("not a shardkit manifest", expected=f'"format": "{_FORMAT}" and a format_version')
    if document["format_version"] > FORMAT_VERSION:
        raise UnsupportedVersionError(
            "a dataset of a newer format", expected=f"at most {FORMAT_VERSION}",
            found=str(document["format_version"])[:20], remedy="upgrade shardkit",
        )  # fmt: skip
    actual = _own_digest(_DIGEST_LINE.sub("", text, count=1))
    stated = document.get("digest")
    if stated != actual:
        raise ManifestError("the manifest was edited or damaged", expected=f"digest {shown(stated)}", found=actual,
                            remedy="restore the file, or pack again")  # fmt: skip
    manifest = _manifest(document)
    if dump_manifest(manifest) != text:
        raise ManifestError("the manifest is not in canonical form: it was edited or damaged")
    return manifest


def load_without_version(data: bytes) -> Manifest | None:
    """Return the manifest of a file whose own digest proves that nothing but its format_version is damaged.

    Args:
        data: a whole file that `load_manifest` refuses.
    """
    for version in range(1, FORMAT_VERSION + 1):
        mended, found = _VERSION_LINE.subn(b' "format_version": %d,\n' % version, data, count=1)
        if found:
            with contextlib.suppress(ManifestError):
                return load_manifest(mended)
    return None


def load_shard(document: object) -> ShardRecord:
    """Return the record of one shard that a JSON object states, wherever it stands.

    Args:
        document: a value that JSON has.

    Raises:
        ManifestError: it states none.
    """
    if not isinstance(document, dict):
        raise ManifestError("not the record of a shard", expected="an object", found=shown(document))
    record = _shard(document, "a shard")
    check_shard_name(record.name)
    return record


def _manifest(document: dict[str, Any]) -> Manifest:
    splits = _take(document, "manifest", "splits", dict)
    return Manifest(
        **_texts(document, "manifest", "shardkit", "name", "layout", "digest_algorithm"),
        **_numbers(document, "manifest", "align", "seed"),
        options=_take(document, "manifest", "options", dict),
        classes=None if document.get("classes") is None else _list_of(document, "classes", str),
        splits={name: _list_of(splits, name, str) for name in splits},
        index=_file(document, "index"),
        rejected=None if document.get("rejected") is None else _file(document, "rejected"),
        shards=[_shard(shard, f"shard {i}") for i, shard in enumerate(_list_of(document, "shards", dict))],
        totals=Totals(**_numbers(_take(document, "manifest", "totals", dict), "totals", *_TOTALS)),
    )


def _shard(document: dict[str, Any], where: str) -> ShardRecord:
    return ShardRecord(
        **_texts(document, where, "name", "digest", "first_key", "last_key"),
        **_numbers(document, where, "bytes", "samples", "payload", "padding"),
        index=_file(document, "index"),
        dali_index=_file(document, "dali_index"),
    )


def _file(document: dict[str, Any], name: str) -> FileRecord:
    inner = _take(document, "manifest", name, dict)
    return FileRecord(**_numbers(inner, name, "bytes"), **_texts(inner, name, "digest"))


def _texts(document: dict[str, Any], where: str, *names: str) -> dict[str, Any]:
    return {name: _take(document, where, name, str) for name in names}


def _numbers(document: dict[str, Any], where: str, *names: str) -> dict[str, Any]:
    return {name: _take(document, where, name, int) for name in names}


def _list_of(document: dict[str, Any], name: str, kind: type) -> list[Any]:
    values: list[Any] = _take(document, "manifest", name, list)
    for i, value in enumerate(values):
        if not isinstance(value, kind):
            raise ManifestError(
                f"{shown(name)}[{i}] is of another type", expected=kind.__name__, found=type(value).__name__
            )
    return values


def _take(document: dict[str, Any], where: str, name: str, kind: type[_Value]) -> _Value:
    value = document.get(name)
    if not isinstance(value, kind) or isinstance(value, bool) or (isinstance(value, int) and not 0 <= value <= _MAX):
        raise ManifestError(f"{where} has no usable field {shown(name)}", expected=kind.__name__, found=shown(value))
    return value


def _line(name: str, value: object) -> str:
    if name == "shards" and isinstance(value, list | tuple) and value:
        return ' "shards": [\n' + ",\n".join("  " + dump_json(shard) for shard in value) + "\n ]"
    return f" {json.dumps(name)}: {dump_json(value)}"


def _text(lines: Mapping[str, str]) -> str:
    return "{\n" + ",\n".join(lines[name] for name in sorted(lines)) + "\n}\n"


def _own_digest(text: str) -> str:
    return f"{_DIGEST}:{hex_digest(_DIGEST, text.encode('utf-8', 'surrogatepass'))}"


def _parse(data: str | bytes) -> tuple[str, dict[str, Any]]:
    if len(data) > MAX_MANIFEST_BYTES:
        raise ManifestError(
            "the manifest is too large", expected=f"at most {MAX_MANIFEST_BYTES} bytes", found=f"{len(data)} bytes"
        )
    try:
        text = data if isinstance(data, str) else data.decode("ascii")
        return text, parse_json_object(text)
    except ValueError as error:
        raise ManifestError("the manifest is not JSON", found=str(error)[:200], remedy="restore the file") from error
