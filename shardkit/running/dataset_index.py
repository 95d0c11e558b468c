"""Writing `index.arrow`: a synced file, digested and counted as it passes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardkit.format.checksum import new_digest
from shardkit.format.dataset_record import FileRecord
from shardkit.format.index import write_dataset_index
from shardkit.storage.atomic import BufferedFile

if TYPE_CHECKING:
    from collections.abc import Iterable

    from shardkit.format.checksum import Digest
    from shardkit.format.index import RecordBatch

__all__ = ["write_index_file"]


def write_index_file(path: bytes, shards: Iterable[RecordBatch], algorithm: str) -> FileRecord:
    """Write all shards' rows, one batch a shard, to a new file, synced; return its record.

    Raises:
        ShardkitError: as `from_os_error` maps it; the file is gone then.
    """
    digest = new_digest(algorithm)
    with BufferedFile(path) as file:
        sink = _Digesting(file, digest)
        write_dataset_index(shards, sink)
    return FileRecord(bytes=sink.bytes, digest=digest.hexdigest())


class _Digesting:
    """A sink that digests and counts what passes."""

    def __init__(self, file: BufferedFile, digest: Digest) -> None:
        self.bytes = 0
        self._file = file
        self._digest = digest

    def write(self, data: bytes | memoryview, /) -> int:
        self._digest.update(data)
        self.bytes += len(data)
        return self._file.write(data)
