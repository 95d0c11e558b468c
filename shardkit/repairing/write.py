"""The files of a repaired dataset: whole shards copied or linked, new ones written, indexes for both."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from shardkit.errors import ConfigError, StorageError
from shardkit.extent import Extent
from shardkit.format.checksum import crc32c, new_digest
from shardkit.format.index import IndexHeader, decode_shard_index
from shardkit.format.layout import place_sample
from shardkit.format.tar import BLOCK, tail_bytes
from shardkit.packing.plan import cls_payload
from shardkit.packing.write import BUFFER_BYTES, BUFFERS, end_shard, write_indexes
from shardkit.repairing.members import sample_head
from shardkit.running.dataset_index import write_index_file
from shardkit.storage.atomic import fsync_dir, os_errors, remove
from shardkit.storage.sequential import SequentialReader
from shardkit.storage.sequential_writer import SequentialWriter, new_buffers

if TYPE_CHECKING:
    import mmap
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from shardkit.format.dataset_record import FileRecord
    from shardkit.format.index import RecordBatch
    from shardkit.format.manifest import ShardRecord
    from shardkit.repairing.damaged_file import DamagedFile
    from shardkit.repairing.salvage import Salvage

__all__ = ["Workshop", "changed_shard", "place_new", "row_bytes", "stage_index"]

_NO_LINK = {errno.EPERM, errno.EXDEV, errno.EMLINK, errno.ENOTSUP, errno.ENOSYS, errno.EACCES}


@dataclass(slots=True)
class Workshop:
    """Writes shards under temporary names. Threads may share it."""

    temporary: Callable[[str], bytes]
    """Gives the temporary path for a final name."""
    algorithm: str
    align: int
    check: Callable[[], None]
    """Called between two pieces of a shard; may raise to end the work."""
    _local: threading.local = field(default_factory=threading.local)

    def buffers(self) -> list[mmap.mmap]:
        """Return the buffers that every shard of this thread is written through."""
        if not hasattr(self._local, "buffers"):
            self._local.buffers = new_buffers(BUFFERS, BUFFER_BYTES)
        buffers: list[mmap.mmap] = self._local.buffers
        return buffers

    def copy(self, path: bytes, name: str, digest: str, *, link: bool) -> None:
        """Make a whole shard stand under its temporary name, too.

        Args:
            path: the shard.
            name: its final name.
            digest: `ALGORITHM:HEX` of it.
            link: as a second name of the same file where the file system lets be; else a copy, digested as it is
                written.

        Raises:
            StorageError: the copy is not what was proved.
            ShardkitError: as `from_os_error` maps it.
        """
        temporary = self.temporary(name)
        if link and _link(os.path.realpath(path), temporary):
            return
        seen = new_digest(self.algorithm)
        writer = SequentialWriter(temporary, self.buffers(), seen.update)
        try:
            with SequentialReader(os.fsdecode(path)) as reader:
                for _, block in reader.blocks([Extent(0, reader.size)] if reader.size else []):
                    self.check()
                    writer.reserve(len(block))
                    writer.buffer[writer.position : writer.position + len(block)] = block
                    writer.advance(len(block))
            writer.finish()
        except BaseException:
            writer.discard()
            raise
        if f"{self.algorithm}:{seen.hexdigest()}" != digest:
            remove(temporary)
            raise changed_shard(path)

    def rebuild(self, file: DamagedFile, name: str, salvage: Salvage) -> tuple[int, str]:
        """Write a new shard of the samples that were found; return its size and `ALGORITHM:HEX`.

        Raises:
            StorageError: the samples are not any more what they were.
            ShardkitError: as `from_os_error` maps it.
        """
        digest = new_digest(self.algorithm)
        writer = SequentialWriter(self.temporary(name), self.buffers(), digest.update)
        try:
            self._write_samples(writer, file, salvage)
            end_shard(writer, self.align)
            size = writer.offset
            writer.finish()
        except BaseException:
            writer.discard()
            raise
        return size, f"{self.algorithm}:{digest.hexdigest()}"

    def _write_samples(self, writer: SequentialWriter, file: DamagedFile, salvage: Salvage) -> None:
        for kept in salvage.kept():
            self.check()
            row = kept.row
            json = file.read(kept.json_offset, row.json_size) if row.json_offset else None
            cls_size = None if row.label is None else len(cls_payload(row.label))
            place = place_sample(writer.offset, cls_size, None if json is None else len(json), row.size, self.align)
            head = sample_head(row.key, row.label, json, row.size, place)
            tail = tail_bytes(row.size)
            writer.reserve(len(head) + row.size + tail)
            at = writer.position
            payload = at + len(head)
            with memoryview(writer.buffer) as view, view[payload : payload + row.size] as image:
                count = file.read_into(image, kept.offset)
                if count != row.size or crc32c(image) != row.crc32c or place.payload_offset != row.offset:
                    raise changed_shard(file.path)
            writer.buffer[at:payload] = head
            writer.buffer[payload + row.size : payload + row.size + tail] = bytes(tail)
            writer.advance(len(head) + row.size + tail)

    def index(self, name: str, size: int, digest: str, rows: RecordBatch) -> ShardRecord:
        """Write both indexes of a shard under temporary names; return the shard's record."""
        header = IndexHeader(shard=name, shard_bytes=size, digest=digest, align=self.align)
        stem = name.removesuffix(".tar")
        payload, headers = row_bytes(rows)
        return write_indexes(rows, header, lambda extension: self.temporary(stem + extension), payload, headers)


def row_bytes(rows: RecordBatch) -> tuple[int, int]:
    """Return the bytes of a shard's images, and of its headers and small members."""
    labelled = ~rows.column("label").is_null().to_numpy(zero_copy_only=False)
    json_offset, json_size, size = (
        rows.column(name).to_numpy(zero_copy_only=False).astype(np.int64)
        for name in ("json_offset", "json_size", "size")
    )
    json = np.where(json_offset > 0, BLOCK - (-json_size // BLOCK) * BLOCK, 0)
    return int(size.sum()), int((np.where(labelled, 2 * BLOCK, 0) + json + BLOCK).sum())


def stage_index(path: bytes, indexes: Sequence[bytes], algorithm: str) -> FileRecord:
    """Write `index.arrow` to `path` from the paths of the shards' indexes; return its record."""
    return write_index_file(path, _batches(indexes), algorithm)


def place_new(temporary: bytes, final: bytes) -> None:
    """Give a synced file its final name, where nothing may be.

    Raises:
        ConfigError: something has the name.
        ShardkitError: as `from_os_error` maps it.
    """
    with os_errors("cannot give a file its final name", final):
        try:
            os.link(temporary, final)
        except FileExistsError as error:
            raise ConfigError("something has appeared under a name that was free", path=final) from error
        except OSError as error:
            if error.errno not in _NO_LINK or os.path.lexists(final):
                raise
            os.rename(temporary, final)  # a file system without links; the lock keeps other repairs away
    remove(temporary)
    fsync_dir(os.path.dirname(final))


def _batches(indexes: Iterable[bytes]) -> Iterator[RecordBatch]:
    for path in indexes:
        with os_errors("cannot read a shard's index", path), open(path, "rb") as file:
            data = file.read()
        yield decode_shard_index(data).rows


def _link(path: bytes, temporary: bytes) -> bool:
    remove(temporary)
    with contextlib.suppress(OSError):  # another file system, or one without links: the copy says what else is wrong
        os.link(path, temporary)
        return True
    return False


def changed_shard(path: bytes) -> StorageError:
    """Return the error of a run under which a shard has changed."""
    return StorageError(
        "the shard changed while it was repaired", path=path, remedy="run again when nothing writes to it"
    )
