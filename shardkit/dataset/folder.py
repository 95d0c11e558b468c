"""The files of a dataset's folder: the manifest is read, the index mapped, and each checked against the other."""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from shardkit.dataset.columns import Rows, map_column
from shardkit.errors import ConfigError, IndexFormatError, IntegrityError, ShardkitError, from_os_error
from shardkit.escaping import escape
from shardkit.format.dataset_record import DATASET_INDEX, MANIFEST
from shardkit.format.index import iter_dataset_index
from shardkit.format.manifest import MAX_MANIFEST_BYTES, Manifest, load_manifest
from shardkit.format.remedy import remedy_without_manifest
from shardkit.storage.regular import folders_with, open_regular

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from shardkit.dataset.columns import TextColumn

__all__ = ["DATASET_INDEX", "MANIFEST", "WORK", "check_shards", "map_index", "read_manifest"]

WORK = ".shardkit"
"""The folder of a pack in progress, inside the dataset's."""
_BATCHES_AT_ONCE = 16
_SCATTERED = 32 << 20  # bytes of an index from which reading it whole takes longer than reading a few pages a batch


def read_manifest(path: str) -> Manifest:
    """Read the manifest of the dataset in folder `path`.

    Raises:
        ConfigError: there is no finished dataset; says what is there instead.
        ManifestError: it is damaged.
        StorageError: the system failed to read it.
    """
    file = os.path.join(path, MANIFEST)
    try:
        with open_regular(file, MAX_MANIFEST_BYTES) as stream:
            data = stream.read()
    except (FileNotFoundError, NotADirectoryError) as error:
        raise _no_dataset(path) from error
    except OSError as error:
        raise from_os_error(error, "cannot read the manifest", path=file) from error
    try:
        return load_manifest(data)
    except ShardkitError as error:
        error.path = file
        raise


def _no_dataset(path: str) -> ConfigError:
    if not os.path.exists(path):
        return ConfigError("there is no such dataset", path=path, expected="the folder of a dataset")
    if not os.path.isdir(path):
        return ConfigError("a dataset is a folder", path=path, found="a file", remedy="name the folder that it lies in")
    if os.path.isdir(os.path.join(path, WORK)):
        return ConfigError(
            "this dataset is not finished: it has no manifest, but a pack in progress", path=path,
            remedy="wait for the pack that runs, or finish it: run the same shardkit pack with --resume",
        )  # fmt: skip
    names: list[str] = []
    with contextlib.suppress(OSError):
        names = os.listdir(path)
    remedy = remedy_without_manifest(names, folders_with(path, MANIFEST))
    return ConfigError(
        "not a dataset: the folder has no manifest.json", path=path,
        remedy=remedy
        or "make one: shardkit pack takes a folder of JPEGs, convert tree:DIR, mds:DIR, litdata:DIR, hf:DIR",
    )  # fmt: skip


def map_index(path: str, manifest: Manifest) -> tuple[npt.NDArray[np.uint8], list[Any]]:
    """Map the index of the dataset in folder `path`, and compare it with the manifest.

    Compared are its size and, for each shard, the number of rows and the first and last key: the index of another pack
    has others. Afterwards next to nothing of the map is resident, however large it is.

    Returns:
        The map, uint8 [file size], read-only, and a pyarrow record batch a shard, views into it (Any: pyarrow has no
        types).

    Raises:
        IntegrityError: it is not the index that the manifest means.
        IndexFormatError: it is damaged.
        StorageError: the system failed to open it.
    """
    file = os.path.join(path, DATASET_INDEX)
    mapping = _map(file, manifest.index.bytes)
    memory = np.frombuffer(mapping, np.uint8)
    try:
        batches, keys = _read_batches(mapping, memory)
    except ShardkitError as error:
        error.path = file
        raise
    _check_rows(file, [shard.samples for shard in manifest.shards], [batch.num_rows for batch in batches])
    _check_keys(file, manifest, keys)
    return memory, batches


def _map(file: str, expected: int) -> mmap.mmap:
    try:
        with open_regular(file) as stream:
            size = os.fstat(stream.fileno()).st_size
            if size != expected:
                raise IntegrityError(
                    "the index is not the manifest's", path=file, expected=f"{expected} bytes",
                    found=f"{size} bytes", remedy="restore the file, or pack again",
                )  # fmt: skip
            return mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise from_os_error(error, "cannot map the index", path=file) from error
    except ValueError as error:  # mmap has no empty files
        raise IndexFormatError("the index is empty", path=file) from error


def _read_batches(mapping: mmap.mmap, memory: npt.NDArray[np.uint8]) -> tuple[list[Any], list[str]]:
    """Return every batch, and the first and last key of each that has rows; looks at about six pages a batch."""
    batches: list[Any] = []
    keys: list[str] = []
    # The kernel reads a whole read-ahead around a page that is not cached (with one of 8 MB, all of a large index), and
    # maps the 16 pages around one that is (0.3 MB a batch, counted as resident).
    scattered = len(mapping) >= _SCATTERED
    if scattered:
        mapping.madvise(mmap.MADV_RANDOM)
    source = iter_dataset_index(memory)
    while some := list(itertools.islice(source, _BATCHES_AT_ONCE)):
        batches += some
        rows = Rows([batch.num_rows for batch in some])
        ends = np.stack([rows.starts[:-1], rows.starts[1:] - 1], axis=1)[np.diff(rows.starts) > 0]
        keys += cast("TextColumn", map_column("key", some, rows, memory))[ends.ravel()]
        mapping.madvise(mmap.MADV_DONTNEED)  # unmapped, not forgotten: the page cache keeps them
    if scattered:
        mapping.madvise(mmap.MADV_NORMAL)
    return batches, keys


def _check_rows(file: str, expected: list[int], found: list[int]) -> None:
    if len(expected) != len(found):
        raise IntegrityError(
            "the index is not the manifest's",
            path=file,
            expected=f"{len(expected)} shards",
            found=f"{len(found)} shards",
        )
    for number, (samples, rows) in enumerate(zip(expected, found, strict=True)):
        if samples != rows:
            what = f"shard {number} of the index is not the manifest's"
            raise IntegrityError(what, path=file, expected=f"{samples} rows", found=f"{rows} rows")


def _check_keys(file: str, manifest: Manifest, found: Sequence[str]) -> None:
    shards = [shard for shard in manifest.shards if shard.samples]
    expected = [key for shard in shards for key in (shard.first_key, shard.last_key)]
    for at, (wanted, actual) in enumerate(zip(expected, found, strict=True)):
        if wanted != actual:
            raise IntegrityError(
                f"the {'last' if at % 2 else 'first'} key of {shards[at // 2].name} in the index is another one",
                path=file, expected=escape(wanted), found=escape(actual), remedy="run shardkit verify",
            )  # fmt: skip


def check_shards(paths: Sequence[str], manifest: Manifest) -> None:
    """Look whether every shard is there, with the size that the manifest says.

    Raises:
        IntegrityError: a shard has another size.
        StorageError: one is missing or cannot be looked at.
    """
    for path, shard in zip(paths, manifest.shards, strict=True):
        try:
            size = os.stat(path).st_size
        except OSError as error:
            raise from_os_error(error, "a shard of the dataset cannot be found", path=path) from error
        if size != shard.bytes:
            raise IntegrityError(
                "a shard has another size than the manifest says", path=path, expected=f"{shard.bytes} bytes",
                found=f"{size} bytes", remedy="run shardkit verify",
            )  # fmt: skip
