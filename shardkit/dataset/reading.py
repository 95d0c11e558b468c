"""From ids to payloads in memory: locate, plan few long reads, read, and check what needs no decoder."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from shardkit.dataset.bad import inspect_facts, inspect_payloads
from shardkit.dataset.checksums import ChecksumCheck
from shardkit.dataset.runs import GAP_BYTES
from shardkit.dataset.shardset import Located, parse_metadata
from shardkit.dataset.space import space_of
from shardkit.errors import DeviceError, ShardkitError, ShortReadError
from shardkit.storage.coalesce import ReadPlan, coalesce
from shardkit.storage.reader import address_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from typing import TypeAlias

    import numpy.typing as npt

    from shardkit.dataset.resident import ResidentShards
    from shardkit.dataset.samples import Samples
    from shardkit.storage.device import Device
    from shardkit.storage.reader import Pending, Reader

    _Ints = npt.NDArray[np.int64]
    _Bools = npt.NDArray[np.bool_]
    _Bytes = npt.NDArray[np.uint8]
    Fetched: TypeAlias = _Bools | None

__all__ = ["GAP_BYTES", "Payloads", "SampleReader", "SampleReads"]


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
    """Of the images, then the json members, but for those in shards that stay in memory."""
    starts: _Ints
    """[n] where the images begin in the memory that is read into, then the json members; any number for what stays in
    memory."""
    kept: _Bools | None = None
    """[n] samples in shards that stay in memory (`ResidentShards`); None: no sample is."""

    @property
    def nbytes(self) -> int:
        """Bytes of memory to read into."""
        return self.plan.buffer_bytes

    def of(self, chosen: _Ints) -> SampleReads:
        """Return the same reads for some of the samples, int64 [k] places among the n: what `cut` is to look at."""
        count, located = len(self.ids), self.located
        return replace(
            self, ids=self.ids[chosen], kept=None if self.kept is None else self.kept[chosen],
            located=Located(shard=located.shard[chosen], offset=located.offset[chosen], size=located.size[chosen],
                            label=located.label[chosen]),
            json_offset=self.json_offset[chosen] if len(self.json_offset) else self.json_offset,
            json_size=self.json_size[chosen] if len(self.json_size) else self.json_size,
            starts=self.starts[np.concatenate([chosen, count + chosen]) if len(self.json_size) else chosen],
        )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Payloads:
    """The encoded images of n samples in memory."""

    views: list[_Bytes]
    """n arrays, views into the memory that was read into; in device memory they must not be touched."""
    addresses: _Ints
    """[n] where they begin, in the reader's space."""
    metadata: list[dict[str, Any]] | None
    """n json members, `{}` for a sample without one (Any: JSON values); None when they were not asked for."""
    bad: dict[int, str]
    """Places among the n that no decoder will take, with the reason."""


class SampleReader:
    """Reads samples by their ids, many at once. Threads may share it."""

    def __init__(
        self, samples: Samples, reader: Reader, *, metadata: bool = False, crc: bool = False, inspect: bool = True,
        device: Device | None = None, resident: ResidentShards | None = None,
    ) -> None:  # fmt: skip
        """Bind samples to the reader of their shards; both stay the caller's.

        Args:
            samples: where ids count.
            reader: over `samples.shard_paths`.
            metadata: read the json members, too.
            crc: compare the CRC-32C of every image with the index's; about 7 us for 100 kB in host memory. From device
                memory each image is fetched for it.
            inspect: look whether a decoder will take each image, by the index's facts and, in host memory, its first
                bytes.
            device: whose memory the reader reads into; None for host memory.
            resident: shards that stay in the device's memory. A sample of them is read once, into its place there.

        Raises:
            ConfigError: the reader reads into another memory, or `crc` is asked for where no checksum is known.
        """
        self.samples, self.reader = samples, reader
        self.space = space_of(reader, device)
        """Where the images lie."""
        self.metadata = metadata
        """Whether the json members are read."""
        self._crc = ChecksumCheck(samples, self.space) if crc else None
        self._inspect, self._resident = inspect, resident

    @property
    def crc_retries(self) -> int:
        """Images whose CRC was wrong in what was read first, and right past the page cache."""
        return 0 if self._crc is None else self._crc.retries

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
        extents = (
            np.concatenate([shard, shard[: len(json_size)]]), np.concatenate([located.offset, json_offset]),
            np.concatenate([located.size, json_size]),
        )  # fmt: skip
        kept = None if self._resident is None else self._resident.keeps(ids, located, json_offset, json_size)
        if kept is not None and not kept.any():
            kept = None
        read = slice(None) if kept is None else ~np.concatenate([kept, kept[: len(json_size)]])
        reader = self.reader
        plan = coalesce(
            *(part[read] for part in extents), align=reader.align, gap_bytes=GAP_BYTES, max_bytes=reader.span_bytes
        )  # fmt: skip
        starts = np.zeros(len(extents[0]), np.int64)
        starts[read] = plan.buffer_start
        return SampleReads(
            ids=ids, located=located, json_offset=json_offset, json_size=json_size, plan=plan, starts=starts, kept=kept
        )  # fmt: skip

    def read(self, reads: SampleReads, memory: memoryview) -> Payloads:
        """Read into memory and cut the payloads out of it; not a byte of them is copied.

        Args:
            reads: from `plan`.
            memory: at least `reads.nbytes` writable bytes in the reader's space, aligned as the reader demands.

        Raises:
            StorageError: a shard cannot be read; names shard, offset and the first sample that it hit.
            IntegrityError: a json member is damaged.
            DeviceError: the device failed a copy.
        """
        return self.cut(reads, memory, self.fetch(reads, memory))

    def fetch(self, reads: SampleReads, memory: memoryview) -> Fetched:
        """Do the first half of `read`, which waits for the storage.

        Returns:
            Which samples were in memory that stays, and looked at, before; bool [n] or None.
        """
        with self._naming(reads):
            self.reader.read_into(reads.plan.ops(memory))
            return self._bring(reads)

    def cut(self, reads: SampleReads, memory: memoryview, fetched: Fetched) -> Payloads:
        """Do the second half of `read`, which computes: for all samples, or with `SampleReads.of` for some of them."""
        with self._naming(reads):
            return self._payloads(reads, memory, fetched)

    def oldest(self) -> Pending | None:
        """Return the read that has run the longest, those past the page cache among them; see `Reader.oldest`."""
        found = [self.reader.oldest(), *(self._crc.pending() if self._crc is not None else ())]
        return max((one for one in found if one is not None), key=lambda one: one.seconds, default=None)

    def read_alone(self, ids: _Ints) -> tuple[SampleReads, Payloads]:
        """Read a few samples into memory of their own, outside of every budget."""
        reads = self.plan(ids)
        memory = self.space.allocate(reads.nbytes, self.reader.align) if reads.nbytes else memoryview(bytearray())
        return reads, self.read(reads, memory)

    @contextlib.contextmanager
    def _naming(self, reads: SampleReads) -> Iterator[None]:
        """Give errors the key of the first sample that they hit."""
        try:
            yield
        except ShardkitError as error:
            if error.key is None:
                _name_sample(error, self.samples, reads)
            raise

    def _payloads(self, reads: SampleReads, memory: memoryview, known: _Bools | None) -> Payloads:
        """Cut out what was read, and look at it; `known`: what was looked at before."""
        count = len(reads.ids)
        views, addresses = self._cut(reads, memory)
        images, texts = views[:count], views[count:]
        bad, wrong = self._inspected(reads, memory), {}
        if self._crc is not None:
            skip = np.zeros(count, np.bool_) if known is None else known.copy()
            skip[list(bad)] = True
            wrong = self._crc.wrong(reads.ids, reads.located, images, addresses[:count], skip)
        if self._resident is not None and reads.kept is not None and known is not None:
            found = reads.kept & ~known
            found[list(wrong)] = False
            self._resident.settle(reads.ids[found])
        metadata = self._parse(reads, self.space.look(texts, addresses[count:])) if self.metadata else None
        return Payloads(views=images, addresses=addresses[:count], metadata=metadata, bad=bad | wrong)

    def _bring(self, reads: SampleReads) -> _Bools | None:
        """Have samples of shards that stay in memory there; return which were there, and looked at, before; [n]."""
        if self._resident is None or reads.kept is None:
            return None
        at = np.flatnonzero(reads.kept)
        images = reads.located.offset[at], reads.located.size[at]
        json = (reads.json_offset[at], reads.json_size[at]) if self.metadata else None
        known = np.zeros(len(reads.ids), np.bool_)
        known[at] = self._resident.bring(self.reader, reads.ids[at], reads.located.shard[at], images, json)
        return known

    def _cut(self, reads: SampleReads, memory: memoryview) -> tuple[list[_Bytes], _Ints]:
        """Return views of the images, then of the json members, and where they begin."""
        whole = np.frombuffer(memory, np.uint8)
        starts, sizes = reads.starts, np.concatenate([reads.located.size, reads.json_size])
        if self._resident is None or reads.kept is None:
            rows = zip(starts.tolist(), (starts + sizes).tolist(), strict=True)
            return [whole[start:end] for start, end in rows], starts + address_of(memory)
        more = len(reads.json_size)
        kept = np.concatenate([reads.kept, reads.kept[:more]])
        shard = np.concatenate([reads.located.shard, reads.located.shard[:more]])
        placed = starts.copy()
        offset = np.concatenate([reads.located.offset, reads.json_offset])
        placed[kept] = self._resident.starts(shard[kept], offset[kept])
        places = self._resident.memory
        both = whole, np.frombuffer(places, np.uint8)
        picked = zip(kept.tolist(), placed.tolist(), (placed + sizes).tolist(), strict=True)
        views = [both[which][start:end] for which, start, end in picked]
        return views, placed + np.where(kept, address_of(places), address_of(memory))

    def _inspected(self, reads: SampleReads, memory: memoryview) -> dict[int, str]:
        if not self._inspect:
            return {}
        if not self.space.is_host:
            return inspect_facts(self.samples, reads.ids, reads.located)
        whole = np.frombuffer(memory, np.uint8)
        return inspect_payloads(self.samples, reads.ids, reads.located, whole, reads.starts[: len(reads.ids)])

    def _parse(self, reads: SampleReads, texts: Iterable[_Bytes]) -> list[dict[str, Any]]:  # Any: JSON values
        keys, paths = self.samples.keys(reads.ids), self.samples.shard_paths
        rows = zip(texts, reads.located.shard.tolist(), reads.json_offset.tolist(), keys, strict=True)
        return [
            parse_metadata(text.tobytes(), path=paths[shard], offset=start, key=key) if text.size else {}
            for text, shard, start, key in rows
        ]


def _name_sample(error: ShardkitError, samples: Samples, reads: SampleReads) -> None:
    """Give an error of a read the key of the first sample that it hit; a read serves several samples."""
    ids, located = reads.ids, reads.located
    if isinstance(error, DeviceError) and error.path is None and len(ids):  # of a copy: one of these
        error.path, error.offset = samples.shard_paths[int(located.shard[0])], int(located.offset[0])
        error.key = samples.keys(ids[:1])[0]
        return
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
