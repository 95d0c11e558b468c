"""The sources: a tree of image files, walked once, into a table sorted by path."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc

from shardkit.errors import ConfigError, UnsafeError, from_os_error
from shardkit.format.keys import source_from_path
from shardkit.format.media_type import CONVERTIBLE
from shardkit.packing.classes import number_classes
from shardkit.packing.labels import LabelCount
from shardkit.packing.refusals import Refusal

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardkit.packing.options import PackOptions

__all__ = ["LIST_SCHEMA", "TREE_SCHEMA", "SourceRows", "Sources", "convertible", "names_taken", "scan_tree"]

EXTENSIONS = frozenset({b"jpg", b"jpeg", b"jpe", b"jfif"})
_HIDDEN = ("hidden", "AppleDouble")

TREE_SCHEMA = pa.schema(
    [
        pa.field("path", pa.large_binary()),  # relative to the root, or absolute
        pa.field("label", pa.int32()),
        pa.field("size", pa.int64()),  # bytes, by stat
        pa.field("mtime_ns", pa.int64()),
        pa.field("metadata", pa.null()),
        pa.field("number", pa.null()),  # a tree's order is by path
    ]
)
"""Rows of a tree; the columns that it does not have take no memory."""
LIST_SCHEMA = pa.schema(
    [
        *(TREE_SCHEMA.field(i) for i in range(4)),
        pa.field("metadata", pa.large_binary()),  # JSON object, or null
        pa.field("number", pa.int64()),  # row of the list, from 0 on
    ]
)
"""Rows of a list."""
_BATCH_ROWS = 1 << 14
_MAX_VISITS = 1000
"""Folders that link to one another make a number of paths that doubles with every link."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """Everything that is to be packed, and what is not."""

    root: bytes
    """Folder that relative paths start from."""
    inside: bytes | None = None
    """Real path of the folder that every source must lie in when it is opened; None for anywhere."""
    table: pa.Table
    """`TREE_SCHEMA` sorted by path, or `LIST_SCHEMA` as listed: 28 or 44 bytes a row, the path and the metadata."""
    classes: tuple[str, ...] | None
    """Class names in label order; None without names."""
    refused: list[Refusal] = field(default_factory=list)
    """What could not even become a source."""
    skipped: Counter[str] = field(default_factory=Counter)
    """Entries that are not images by name, counted by kind."""

    def count_labels(self) -> LabelCount:
        """Return how many sources have a label, and which classes none has."""
        count = LabelCount(self.classes)
        count.see(self.table.column("label").drop_null().to_numpy())
        return count


class SourceRows:
    """Collects source rows into Arrow memory, so that a row costs tens of bytes and not a Python object each."""

    def __init__(self, schema: pa.Schema) -> None:
        """Start empty, for rows of `TREE_SCHEMA` or `LIST_SCHEMA`."""
        self._schema = schema
        self._rows: list[tuple[bytes, int | None, int, int, bytes | None, int | None]] = []
        self._batches: list[pa.RecordBatch] = []

    def add(
        self, path: bytes, label: int | None, status: os.stat_result, metadata: bytes | None = None,
        number: int | None = None,
    ) -> None:  # fmt: skip
        """Append one source."""
        self._rows.append((path, label, status.st_size, status.st_mtime_ns, metadata, number))
        if len(self._rows) >= _BATCH_ROWS:
            self._flush()

    def table(self) -> pa.Table:
        """Return all rows, each column in one piece, and forget them."""
        self._flush()
        batches, self._batches = self._batches, []
        table = pa.Table.from_batches(batches, self._schema)
        batches.clear()
        columns = {}
        for name in self._schema.names:
            columns[name] = table[name].combine_chunks()
            table = table.drop_columns(name)
            _release_memory()
        return pa.table(columns, self._schema)

    def _flush(self) -> None:
        if self._rows:
            columns = zip(*self._rows, strict=True)
            arrays = [pa.array(c, kind) for c, kind in zip(columns, self._schema.types, strict=True)]
            self._batches.append(pa.RecordBatch.from_arrays(arrays, schema=self._schema))
            self._rows = []


def scan_tree(root: bytes, options: PackOptions) -> Sources:
    """Walk a folder.

    Args:
        root: the folder.
        options: `labels`, `classes`, `convert` and `follow_symlinks` count here.

    Raises:
        ConfigError: `root` is not a folder, or a class is unknown.
        UnsafeError: links that make paths without end.
        ShardkitError: `root` itself cannot be read.
    """
    if not os.path.isdir(root):
        raise ConfigError("the source is not a folder", path=root)
    try:
        extensions = EXTENSIONS | set(map(str.encode, CONVERTIBLE)) if options.convert else EXTENSIONS
        walk = _Walk(root, extensions, options.follow_symlinks)
        folders = [] if options.labels == "none" else walk.class_folders()
    except OSError as error:
        raise from_os_error(error, "cannot read the source folder", path=root) from error
    labelled = bool(folders) or options.labels == "dir"
    if options.classes is not None and not labelled:
        raise ConfigError("a class list, but no class folders", path=root, remedy="leave the class list away")
    numbers = number_classes([source_from_path(f) for f in folders], options.classes) if labelled else {}
    rows = SourceRows(TREE_SCHEMA)
    for path, status in walk.files():
        folder, slash, _ = path.partition(b"/")
        if labelled and not slash:
            walk.refuse(path, "no-class", "it lies beside the class folders")
        elif labelled and source_from_path(folder) not in numbers:
            walk.refuse(path, "no-class", "its folder was not there, or not readable, when the classes were numbered")
        elif status.st_size > options.max_bytes:
            walk.refuse(path, "too-large", f"{status.st_size} bytes; at most {options.max_bytes}")
        else:
            rows.add(path, numbers[source_from_path(folder)] if labelled else None, status)
    return Sources(
        root=root, inside=None if options.follow_symlinks else walk.real_root, table=_by_path(rows.table()),
        classes=tuple(numbers) if labelled else None, refused=walk.refused, skipped=walk.skipped,
    )  # fmt: skip


def names_taken(skipped: Counter[str]) -> str:
    """Return what to do about names that are no images', given what of a tree was passed over, by kind.

    >>> names_taken(Counter({".txt": 3}))
    'names end in .jpg, .jpeg, .jpe or .jfif'
    """
    if convertible(skipped):
        return "give --convert, which takes files called .png, .webp and .gif, too, and stores them as JPEGs"
    return "names end in .jpg, .jpeg, .jpe or .jfif"


def convertible(skipped: Counter[str]) -> int:
    """Return how many files of those that were passed over `convert` would take."""
    return sum(skipped[f".{extension}"] for extension in CONVERTIBLE)


def _by_path(table: pa.Table) -> pa.Table:
    """Return rows sorted by the bytes of the whole path: no matter how folders are walked, and in every locale."""
    order = pc.sort_indices(table["path"])
    columns = {}
    for name in table.column_names:
        columns[name] = table[name].chunk(0).take(order) if len(order) else table[name]
        table = table.drop_columns(name)
        _release_memory()
    return pa.table(columns, TREE_SCHEMA)


def _release_memory() -> None:
    """Give a copied column's memory back, so that a large table is never there twice; Arrow's pool would keep it."""
    pa.default_memory_pool().release_unused()


@dataclass(frozen=True, slots=True)
class _Folder:
    """A folder that is to be walked."""

    path: bytes
    """Relative to the root; empty for the root."""
    around: frozenset[tuple[int, int]]
    """Device and inode of it and of the folders around it."""
    linked: bool
    """Whether a symbolic link leads to it, or to a folder around it."""


class _Walk:
    """One pass over a tree; links are followed only to where they may lead."""

    def __init__(self, root: bytes, extensions: frozenset[bytes], outside: bool) -> None:
        self.root = root
        self.extensions = extensions
        self.outside = outside
        self.real_root = os.path.realpath(root)
        status = os.stat(root)
        self.root_identity = (status.st_dev, status.st_ino)
        self.visits: Counter[tuple[int, int]] = Counter()  # of folders that links lead to
        self.refused: list[Refusal] = []
        self.skipped: Counter[str] = Counter()

    def refuse(self, path: bytes, reason: str, detail: str) -> None:
        self.refused.append(Refusal(0, path, reason, detail))

    def class_folders(self) -> list[bytes]:
        """Return the folders of the first level that are entered: they name the classes."""
        with os.scandir(self.root) as entries:
            looked = ((e.name, self._look(e, e.name)) for e in entries if _is_folder(e))
            found = ((name, status) for name, status in looked if isinstance(status, os.stat_result))
            return sorted(name for name, status in found if (status.st_dev, status.st_ino) != self.root_identity)

    def files(self) -> Iterator[tuple[bytes, os.stat_result]]:
        """Yield every image file by name, with its status; order is not defined."""
        pending = [_Folder(b"", frozenset({self.root_identity}), linked=False)]
        while pending:
            folder = pending.pop()
            try:
                with os.scandir(os.path.join(self.root, folder.path) if folder.path else self.root) as entries:
                    for entry in entries:
                        path = folder.path + b"/" + entry.name if folder.path else entry.name
                        found = self._look(entry, path)
                        if isinstance(found, Refusal):
                            self.refused.append(found)
                        elif isinstance(found, str):
                            self.skipped[found] += 1
                        elif stat.S_ISDIR(found.st_mode):
                            pending += self._entered(entry, path, found, folder)
                        else:
                            yield path, found
            except OSError as error:
                if not folder.path:
                    raise from_os_error(error, "cannot read the source folder", path=self.root) from error
                self.refuse(folder.path, "unreadable", f"cannot list the folder: {error.strerror}")

    def _look(self, entry: os.DirEntry[bytes], path: bytes) -> os.stat_result | Refusal | str:
        """Return the status of a folder to enter or an image to take, a refusal, or the kind to count it under."""
        kind = _kind_of_name(entry.name, self.extensions, _is_folder(entry))
        if kind is not None:
            lost = kind not in _HIDDEN and entry.is_symlink() and not os.path.exists(entry.path)
            return "broken link" if lost else kind
        try:
            if entry.is_symlink() and not self.outside and not self._inside(os.path.realpath(entry.path)):
                return Refusal(0, path, "outside-link", "it leads out of the source folder")
            status = entry.stat()
        except OSError as error:
            lost = error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)
            reason = "unreadable" if not lost else "broken-link" if entry.is_symlink() else "missing"
            return Refusal(0, path, reason, error.strerror or str(error))
        if stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode):
            return status
        return Refusal(0, path, "not-a-file", f"a {_file_type(status.st_mode)}")

    def _entered(self, entry: os.DirEntry[bytes], path: bytes, status: os.stat_result, outer: _Folder) -> list[_Folder]:
        """Return the folder to walk, or none where a link leads back."""
        identity = (status.st_dev, status.st_ino)
        if identity in outer.around:
            self.refuse(path, "broken-link", "it leads back to a folder around it")
            return []
        linked = outer.linked or entry.is_symlink()
        if linked:
            self.visits[identity] += 1
            if self.visits[identity] > _MAX_VISITS:
                raise UnsafeError(
                    "symbolic links lead to one folder again and again", path=os.path.join(self.root, path),
                    expected=f"at most {_MAX_VISITS} paths to it", remedy="remove links that lead to one another",
                )  # fmt: skip
        return [_Folder(path, outer.around | {identity}, linked)]

    def _inside(self, target: bytes) -> bool:
        return target == self.real_root or target.startswith(self.real_root.rstrip(b"/") + b"/")


def _is_folder(entry: os.DirEntry[bytes]) -> bool:
    with contextlib.suppress(OSError):  # a link in a circle, or through a folder that is closed to us
        return entry.is_dir()
    return False


def _kind_of_name(name: bytes, extensions: frozenset[bytes], folder: bool) -> str | None:
    """Return None for an image or a folder to enter, else the kind to count it under."""
    if name.startswith(b"._") or name in (b".AppleDouble", b"__MACOSX"):
        return "AppleDouble"
    if name.startswith(b"."):
        return "hidden"
    if folder:
        return None
    if name.lower() in (b"thumbs.db", b"desktop.ini"):
        return name.lower().decode().capitalize()
    stem, dot, extension = name.rpartition(b".")
    if dot and extension.lower() in extensions:
        return None
    if not dot or not stem or len(extension) > 12 or not extension.isalnum():
        return "no extension"
    return "." + extension.lower().decode("ascii", "replace")


def _file_type(mode: int) -> str:
    names = {stat.S_IFIFO: "FIFO", stat.S_IFSOCK: "socket", stat.S_IFCHR: "device", stat.S_IFBLK: "device"}
    return names.get(stat.S_IFMT(mode), "folder" if stat.S_ISDIR(mode) else "special file")
