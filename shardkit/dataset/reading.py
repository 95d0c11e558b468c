"""From ids to payloads in memory: locate, plan few long reads, read, and check what needs no decoder."""

from __future__ import annotations

import contextlib
import os
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from shardkit.dataset.bad import inspect_payloads
from shardkit.dataset.shardset import Located, parse_metadata
from shardkit.errors import CapabilityError, ShardkitError, ShortReadError
from shardkit.extent import align_down, align_up
from shardkit.format.checksum import crc32c
from shardkit.storage.backends import open_reader
from shardkit.storage.buffers import aligned_memory
from shardkit.storage.coalesce import ReadPlan, coalesce

if TYPE_CHECKING:
    import numpy.typing as npt

    from shardkit.dataset.samples import Samples
    from shardkit.storage.reader import Pending, Reader

    _Ints = npt.NDArray[np.int64]
    _Bytes = npt.NDArray[np.uint8]

__all__ = ["GAP_BYTES", "SPAN_BYTES", "Payloads", "SampleReader", "SampleReads"]

GAP_BYTES = 32 * 1024
"""Bytes between two wanted ranges that are read along: about what a further request costs."""
SPAN_BYTES = 1 << 20
"""Bytes of one request when neighbours are joined: large enough for the device, small enough to share out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleReads:
    """What has to be read for n samples; nothing is read yet."""

    ids: _Ints
    """[n] ids of the samples."""
    located: Located
    """[n] their images."""
    json_offset: _Ints
    """[n] bytes from the start of the shard to the json member; [0] when metadata is not asked for."""
    json_size: _Ints
    """Likewise; 0 for a sample without one."""
    plan: ReadPlan
    """Of the images, then the json members."""

    @property
    def nbytes(self) -> int:
        """Bytes of memory to read into."""
        return self.plan.buffer_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Payloads:
    """The encoded images of n samples in memory."""

    views: list[_Bytes]
    """n arrays, views into the memory that was read into."""
    metadata: list[dict[str, Any]] | None
    """n json members, `{}` for a sample without one (Any: JSON values); None when they were not asked for."""
    bad: dict[int, str]
    """Places among the n that no decoder will take, with the reason."""


class SampleReader:
    """Reads samples by their ids, many at once. Threads may share it."""

    def __init__(
        self, samples: Samples, reader: Reader, *, metadata: bool = False, crc: bool = False, inspect: bool = True
    ) -> None:
        """Bind samples to the reader of their shards; both stay the caller's.

        Args:
            samples: where ids count.
            reader: over `samples.shard_paths`, in host memory.
            metadata: read the json members, too.
            crc: compare the CRC-32C of every image with the index's; about 7 us for 100 kB.
            inspect: look whether a decoder will take each image, by the index's facts and its first bytes.
        """
        self.samples, self.reader = samples, reader
        self.metadata = metadata
        """Whether the json members are read."""
        self._crc, self._inspect = crc, inspect
        self.crc_retries = 0
        """Images whose CRC was wrong in what was read first, and right past the page cache."""
        self._again: set[Reader] = set()  # those that read past the page cache now
        self._lock = threading.Lock()

    def plan(self, ids: _Ints) -> SampleReads:
        """Return what has to be read for samples.

        Args:
            ids: int64 [n]; may repeat.

        Raises:
            IntegrityError: the index points outside a shard.
        """
        located = self.samples.locate(ids)
        none = np.zeros(0, np.int64)
        json_offset, json_size = none, none
        if self.metadata:
            json_offset, json_size = (self.samples.gather(name, ids) for name in ("json_offset", "json_size"))
        shard = located.shard.astype(np.int64)
        plan = coalesce(
            np.concatenate([shard, shard[: len(json_size)]]), np.concatenate([located.offset, json_offset]),
            np.concatenate([located.size, json_size]),
            align=self.reader.align, gap_bytes=GAP_BYTES, max_bytes=SPAN_BYTES,
        )  # fmt: skip
        return SampleReads(ids=ids, located=located, json_offset=json_offset, json_size=json_size, plan=plan)

    def read(self, reads: SampleReads, memory: memoryview) -> Payloads:
        """Read into memory and cut the payloads out of it; not a byte of them is copied.

        Args:
            reads: from `plan`.
            memory: at least `reads.nbytes` writable bytes, host memory, aligned as the reader demands.

        Raises:
            StorageError: a shard cannot be read; names shard, offset and the first sample that it hit.
            IntegrityError: a json member is damaged.
        """
        ids, located = reads.ids, reads.located
        try:
            self.reader.read_into(reads.plan.ops(memory))
        except ShardkitError as error:
            if error.key is None:
                _name_sample(error, self.samples, reads)
            raise
        whole, starts = np.frombuffer(memory, np.uint8), reads.plan.buffer_start
        ends = starts + np.concatenate([located.size, reads.json_size])
        views = [whole[start:end] for start, end in zip(starts.tolist(), ends.tolist(), strict=True)]
        images, texts = views[: len(ids)], views[len(ids) :]
        bad = inspect_payloads(self.samples, ids, located, whole, starts[: len(ids)]) if self._inspect else {}
        if self._crc:
            bad |= self._check_crc(ids, located, images, bad)
        return Payloads(views=images, metadata=self._parse(reads, texts) if self.metadata else None, bad=bad)

    def oldest(self) -> Pending | None:
        """Return the read that has run the longest, those past the page cache among them; see `Reader.oldest`."""
        found = [reader.oldest() for reader in (self.reader, *tuple(self._again))]
        return max((one for one in found if one is not None), key=lambda one: one.seconds, default=None)

    def read_alone(self, ids: _Ints) -> tuple[SampleReads, Payloads]:
        """Read a few samples into memory of their own, outside of every budget."""
        reads = self.plan(ids)
        return reads, self.read(reads, aligned_memory(reads.nbytes, self.reader.align))

    def _parse(self, reads: SampleReads, texts: list[_Bytes]) -> list[dict[str, Any]]:  # Any: JSON values
        keys, paths = self.samples.keys(reads.ids), self.samples.shard_paths
        rows = zip(texts, reads.located.shard.tolist(), reads.json_offset.tolist(), keys, strict=True)
        return [
            parse_metadata(text.tobytes(), path=paths[shard], offset=start, key=key) if text.size else {}
            for text, shard, start, key in rows
        ]

    def _check_crc(self, ids: _Ints, located: Located, views: list[_Bytes], known: dict[int, str]) -> dict[int, str]:
        """Compare checksums; a wrong one is read once more past the page cache, and the view replaced if that helps."""
        bad = {}
        for at, stated in enumerate(self.samples.gather("crc32c", ids).tolist()):
            if at in known or crc32c(views[at].data) == stated:
                continue
            path = self.samples.shard_paths[int(located.shard[at])]
            try:
                again = self._read_past_cache(path, int(located.offset[at]), int(located.size[at]))
            except ShardkitError as error:
                error.key = self.samples.keys(ids[at : at + 1])[0]
                raise
            found = crc32c(again)
            if found == stated:
                with self._lock:
                    self.crc_retries += 1
                views[at] = np.frombuffer(again, np.uint8)
            else:
                bad[at] = f"its CRC-32C is {found:08x}, the index says {stated:08x}, also past the page cache"
        return bad

    def _read_past_cache(self, path: str, offset: int, size: int) -> memoryview:
        """Read a range from the device itself, or, where that cannot be had, after dropping it from the page cache."""
        try:
            reader, _ = open_reader("direct", [path], threads=1)
        except CapabilityError:
            with contextlib.suppress(OSError), open(path, "rb") as file:
                os.posix_fadvise(file.fileno(), offset, size, os.POSIX_FADV_DONTNEED)
            reader, _ = open_reader("buffered", [path], threads=1)
        self._again.add(reader)
        try:
            first = align_down(offset, reader.align)
            memory = aligned_memory(align_up(offset + size, reader.align) - first, reader.align)
            plan = coalesce([0], [offset], [size], align=reader.align, gap_bytes=0, max_bytes=1)
            reader.read_into(plan.ops(memory))
            return memory[offset - first : offset - first + size]
        finally:
            self._again.discard(reader)
            reader.close()


def _name_sample(error: ShardkitError, samples: Samples, reads: SampleReads) -> None:
    """Give an error of a read the key of the first sample that it hit; a read serves several samples."""
    ids, located = reads.ids, reads.located
    path = os.fspath(error.path) if error.path is not None else ""
    if path not in samples.shard_paths:
        return
    end, lost = located.offset + located.size, error.offset or 0
    if len(reads.json_size):
        end = np.maximum(end, reads.json_offset + reads.json_size)
    if isinstance(error, ShortReadError):
        with contextlib.suppress(OSError):  # its name may be gone
            lost = os.stat(path).st_size
    hit = np.flatnonzero((located.shard == samples.shard_paths.index(path)) & (end > lost))
    if hit.size:
        first = hit[np.argmin(located.offset[hit])]
        error.key, error.offset = samples.keys(ids[first : first + 1])[0], int(located.offset[first])
