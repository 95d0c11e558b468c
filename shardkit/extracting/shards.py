"""Opening a dataset for what is to come out of it: a shard that is not whole is told with what of it is."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from typing import TYPE_CHECKING

import numpy as np

from shardkit.dataset.folder import map_index, read_manifest
from shardkit.dataset.shardset import open_dataset
from shardkit.errors import IntegrityError, ShardkitError, StorageError
from shardkit.escaping import escape
from shardkit.sizes import count

if TYPE_CHECKING:
    from shardkit.dataset.shardset import Dataset
    from shardkit.format.dataset_record import Manifest, ShardRecord
    from shardkit.format.index import RecordBatch

__all__ = ["open_for_extraction"]

_NOTHING = "nothing was extracted"


def open_for_extraction(dataset: str | os.PathLike[str]) -> Dataset:
    """Open a dataset.

    Raises:
        IntegrityError: its files disagree; of a shard of another size it says which samples are whole, and what to do.
        StorageError: one is missing or cannot be read.
        ShardkitError: as `shardkit.dataset.shardset.open_dataset`.
    """
    try:
        return open_dataset(dataset)
    except (IntegrityError, StorageError) as error:
        # The index may be damaged, too: then the error stays as short as it is.
        with contextlib.suppress(ShardkitError, OSError):
            _tell_shard(error, os.path.abspath(os.fspath(dataset)))
        raise


def _tell_shard(error: ShardkitError, folder: str) -> None:
    manifest = read_manifest(folder)
    _, batches = map_index(folder, manifest)
    for shard, rows in zip(manifest.shards, batches, strict=True):
        path = os.path.join(folder, shard.name)
        if error.path != path:
            continue
        if isinstance(error, IntegrityError):
            status = os.stat(path)
            if not stat.S_ISREG(status.st_mode):
                error.what, error.found = "something else has the name of a shard", stat.filemode(status.st_mode)
            else:
                _tell_size(error, shard, rows, status.st_size)
        elif error.errno == errno.ENOENT:
            error.what = "a shard of the dataset is missing"
            error.expected = f"{shard.bytes} bytes, {_samples(shard)}"
            error.found = "no such file"
        else:
            return
        error.kept, error.remedy = _NOTHING, _remedy(manifest, folder)


def _tell_size(error: ShardkitError, shard: ShardRecord, rows: RecordBatch, size: int) -> None:
    starts, sizes = (rows.column(name).to_numpy().astype(np.int64) for name in ("sample_offset", "sample_size"))
    whole = int(np.count_nonzero(starts + sizes <= size))
    error.expected = f"{shard.bytes} bytes, {_samples(shard)}"
    error.found = f"{size} bytes, with {'all' if whole == len(rows) else whole} of the samples"
    if size > shard.bytes:
        error.what, error.offset = "a shard goes on behind its end", shard.bytes
        return
    error.what, error.offset = "a shard ends early", size
    if whole < len(rows):
        error.key = rows.column("key")[whole].as_py()


def _samples(shard: ShardRecord) -> str:
    keys = f"{escape(shard.first_key)} to {escape(shard.last_key)}"
    return f"{count(shard.samples, 'sample')}, {keys}" if shard.samples > 1 else f"the sample {escape(shard.first_key)}"


def _remedy(manifest: Manifest, folder: str) -> str:
    if manifest.layout == "foreign":
        return "put the whole tar back, or make a dataset of those that are whole: shardkit index --overwrite"
    return f"restore the shard from a copy, or save what is whole: shardkit repair {escape(folder)} --out DIR"
