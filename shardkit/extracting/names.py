"""The path of each extracted image: made of texts that anybody may have written, so nothing in them is believed."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

from shardkit.errors import IndexFormatError
from shardkit.format.keys import key_from_path, path_from_source, without_here
from shardkit.format.media_type import CONVERTIBLE, MEDIA_TYPES, extension_of

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "LAYOUTS",
    "MAX_PART_BYTES",
    "MAX_PATH_BYTES",
    "WORK",
    "Layout",
    "Name",
    "class_folders",
    "fault_of",
    "folder_of",
    "name",
]

Layout: TypeAlias = Literal["source", "class"]
LAYOUTS: tuple[Layout, ...] = ("source", "class")
"""`source`: the path that was packed, where it is known and safe. `class`: the class's folder and the sample's key."""
WORK = b".shardkit"
"""The extraction's own folder at the root of the tree; no image is put there."""
MAX_PART_BYTES = 255
"""Bytes of a file's or folder's name, on every file system that Linux has for disks."""
MAX_PATH_BYTES = 4000
"""Bytes of a path below the root: with some room for the root, what a system call takes."""

_JPEG = MEDIA_TYPES.index("jpeg")
_CONVERTED = tuple(map(str.encode, CONVERTIBLE))
_CONTROL = re.compile(rb"[\x01-\x1f\x7f]")


@dataclass(frozen=True, slots=True)
class Name:
    """Where an image goes."""

    path: bytes
    """Relative, with `/` between parts; safe when there is no `fault`."""
    fault: str | None = None
    """Why there is no safe path for the sample; None when there is one."""
    instead: bool = False
    """True when the path was to be the source, and is not, or not byte for byte."""
    unstated: bool = False
    """True when the sample has a label, and the path does not begin with its class."""


def fault_of(path: bytes) -> str | None:
    """Return what forbids a relative path; None when nothing does.

    >>> fault_of(b"cats/tom.jpg"), fault_of(b"../tom.jpg"), fault_of(b"/tom.jpg")
    (None, 'a part is ..', 'it is absolute')
    """
    if not path or path.startswith(b"/"):
        return "it is absolute" if path else "it is empty"
    if b"\0" in path:
        return "it has a NUL byte"
    if len(path) > MAX_PATH_BYTES:
        return f"it is longer than {MAX_PATH_BYTES} bytes"
    parts = path.split(b"/")
    for part in parts:
        if part in (b"", b".", b".."):
            return f"a part is {part.decode()}" if part else "a part is empty"
        if len(part) > MAX_PART_BYTES:
            return f"a part is longer than {MAX_PART_BYTES} bytes"
    return "it lies in the extraction's own folder" if parts[0] == WORK else None


def class_folders(classes: Sequence[str]) -> list[tuple[bytes, str]]:
    """Return, for each class, its folder, made one safe part, and the start that the keys of its samples may have.

    A class called `a/b`, `..` or the like gets `%HH` for what cannot, or should not, stand in a folder's name.

    >>> class_folders(["cats", "..", "a/b"])
    [(b'cats', 'cats/'), (b'%2E%2E', '-x2E-x2E/'), (b'a%2Fb', 'a/b/')]
    """
    return [_class_folder(known) for known in classes]


def folder_of(label: int | None, folders: Sequence[tuple[bytes, str]]) -> tuple[bytes, str] | None:
    """Return what `class_folders` has for a label, or its number where it has no name; None for no label."""
    if label is None or label < 0:
        return None
    return folders[label] if label < len(folders) else (b"%d" % label, "\0")


def _class_folder(known: str) -> tuple[bytes, str]:
    try:
        stated = path_from_source(known)
    except IndexFormatError:
        stated = known.encode("utf-8", "surrogatepass")  # JSON has texts that UTF-8 has not
    folder = _shown(stated.replace(b"/", b"%2F").replace(b"\0", b"%00"))
    if folder in (b"", b".", b"..", WORK):
        folder = folder.replace(b".", b"%2E") or b"%"
    key = key_from_path(stated + b"/x") if stated else ""
    return folder, key.removesuffix("x") if key.endswith("/x") else "\0"


def name(
    layout: Layout, *, key: str, source: str, media_type: int | None, folder: tuple[bytes, str] | None
) -> Name:  # fmt: skip
    """Return the path of one image. A JPEG of a source called .png, .webp or .gif, as `--convert` makes it, is .jpg.

    Args:
        layout: as in `LAYOUTS`.
        key: of the sample.
        source: as the index states it; an empty text where it is not known.
        media_type: code of what the bytes are; None where nobody looked: then the source's extension is believed.
        folder: the class's, from `class_folders`; None for a sample without one.

    >>> name("source", key="a/b", source="../b.jpg", media_type=1, folder=(b"a", "a/"))
    Name(path=b'a/b.jpg', fault=None, instead=True, unstated=False)
    """
    if layout == "source" and source:
        path = _path_of(without_here(source))
        shown = _shown(_as_jpeg(path) if media_type == _JPEG else path)
        if fault_of(shown) is None:
            return Name(shown, instead=shown != path, unstated=not _begins_with(shown, folder))
    extension = _named_extension(source) if media_type is None else extension_of(media_type).encode()
    path = _shown(_by_class(key, extension, folder))
    return Name(path, fault_of(path), layout == "source")


def _as_jpeg(path: bytes) -> bytes:
    stem, _, extension = path.rpartition(b".")
    return stem + b".jpg" if extension.lower() in _CONVERTED else path


def _begins_with(path: bytes, folder: tuple[bytes, str] | None) -> bool:
    """Tell whether a path begins with its class, if there is one: with its folder, or what keys have instead of it."""
    return folder is None or path.startswith((folder[0] + b"/", _bytes(folder[1])))


def _shown(path: bytes) -> bytes:
    """Write control bytes as `%HH`: whoever lists the files on a terminal would give it orders."""
    return _CONTROL.sub(lambda found: b"%%%02X" % found[0][0], path)


def _path_of(source: str) -> bytes:
    """Return the path that a source states; an empty one where it is damaged, which costs a name and no more."""
    try:
        return path_from_source(source)
    except IndexFormatError:
        return b""


def _named_extension(source: str) -> bytes:
    name = _path_of(source).rpartition(b"/")[2]
    return name.rpartition(b".")[2].lower() if b"." in name[:-1] else extension_of(0).encode()


def _by_class(key: str, extension: bytes, folder: tuple[bytes, str] | None) -> bytes:
    key = without_here(key)
    if folder is None:
        return b"%b.%b" % (_bytes(key), extension)
    # A key that was made of the path begins with the class's folder already.
    return b"%b/%b.%b" % (folder[0], _bytes(key.removeprefix(folder[1])), extension)


def _bytes(key: str) -> bytes:
    return key.encode("utf-8", "surrogateescape")
