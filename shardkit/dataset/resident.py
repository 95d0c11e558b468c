"""Encoded shards that stay in GPU memory: each byte is read once a job, into a place that it keeps.

A shard that is kept has a place of its size in one piece of device memory, so that a sample's address follows from its
offset. What is there is known by blocks of some kilobytes, since neighbours share them: a read brings whole blocks that
are absent, and never writes on one that is there, which somebody may be decoding.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import numpy as np

from shardkit.dataset.runs import GAP_BYTES, gaps, ranges, runs
from shardkit.errors import ConfigError, IntegrityError
from shardkit.extent import align_up
from shardkit.storage.reader import ReadOps

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

    from shardkit.dataset.samples import Samples
    from shardkit.dataset.shardset import Located
    from shardkit.storage.reader import Reader

    _Ints = npt.NDArray[np.int64]
    _Bools = npt.NDArray[np.bool_]
    _Extents = tuple[_Ints, _Ints]

__all__ = ["ResidentShards", "choose_places"]

_BLOCK = 4096
_ABSENT, _COMING, _PRESENT = range(3)


def choose_places(sizes: _Ints, wanted: _Bools, *, budget_bytes: int, unit: int) -> tuple[_Ints, int]:
    """Return where shards begin in memory that keeps those that fit, in their order, and how much they take.

    Args:
        sizes: int64 [s] bytes of the shards.
        wanted: bool [s] whether anything of a shard is ever asked for.
        budget_bytes: the most that all may take.
        unit: bytes that places are multiples of.

    Returns:
        int64 [s] places, -1 for a shard that is not kept; and bytes of all.

    >>> choose_places(np.array([10, 90, 20]), np.array([True] * 3), budget_bytes=64, unit=16)
    (array([ 0, -1, 16]), 48)
    """
    places, end = np.full(len(sizes), -1, np.int64), 0
    for shard in np.flatnonzero(wanted).tolist():
        size = align_up(int(sizes[shard]), unit)
        if end + size <= budget_bytes:
            places[shard] = end
            end += size
    return places, end


class ResidentShards:
    """The shards of a dataset that are kept, and what of them is there. Threads may share it."""

    def __init__(
        self, samples: Samples, *, budget_bytes: int, align: int, allocate: Callable[[int], memoryview]
    ) -> None:
        """Choose the shards and take the memory; nothing is read yet.

        Args:
            samples: whose shards; stays the caller's.
            budget_bytes: the most that all places may take.
            align: of the reader that will read into them.
            allocate: device memory of a number of bytes, aligned to 4096 and to `align`.

        Raises:
            CapabilityError: the device has no memory left.
        """
        self._samples, self._align = samples, align
        self._block = max(_BLOCK, align)
        self._sizes, wanted = samples.shard_bytes, samples.used_shards()
        self._place, self.nbytes = choose_places(self._sizes, wanted, budget_bytes=budget_bytes, unit=self._block)
        self._kept = np.flatnonzero(self._place >= 0)
        self._first_block: _Ints = self._place[self._kept] // self._block
        self.shards = len(self._kept)
        """How many are kept."""
        self.holds_all = bool((self._place[wanted] >= 0).all())
        """Whether every sample that can be asked for lies in one of them."""
        self._memory: memoryview | None = allocate(self.nbytes) if self.shards else memoryview(bytearray())
        self._states = np.zeros(self.nbytes // self._block, np.uint8)  # of each block
        self._ready = np.zeros(samples.id_count, np.bool_)  # by id; a page of it takes memory when it is written to
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._hits = self._misses = self._hit_bytes = self._read_bytes = 0

    @property
    def memory(self) -> memoryview:
        """All places: device memory, [nbytes].

        Raises:
            ConfigError: it is closed.
        """
        memory = self._memory
        if memory is None:
            raise ConfigError("the shards that stayed in GPU memory were given back")
        return memory

    @property
    def counts(self) -> dict[str, int]:
        """What it served: images taken without a read, and their bytes; images that had to be read; bytes read."""
        with self._lock:
            return {
                "hits": self._hits, "hit bytes": self._hit_bytes, "misses": self._misses,
                "read bytes": self._read_bytes, "shards": self.shards,
            }  # fmt: skip

    def keeps(self, ids: _Ints, located: Located, json_offset: _Ints, json_size: _Ints) -> _Bools:
        """Return which samples lie in shards that are kept; bool [n].

        Args:
            ids: [n].
            located: [n] their images.
            json_offset: [n] of their json members; [0] when they are not read.
            json_size: likewise.

        Raises:
            IntegrityError: the index points outside a shard.
        """
        kept: _Bools = self._place[located.shard] >= 0
        if len(json_size):
            outside = (json_offset < 0) | (json_size < 0) | (json_offset > self._sizes[located.shard] - json_size)
            if (outside & kept).any():
                at = int(np.flatnonzero(outside & kept)[0])
                raise IntegrityError(
                    "the index points outside its shard", path=self._samples.shard_paths[int(located.shard[at])],
                    key=self._samples.keys(ids[at : at + 1])[0], found=f"{json_size[at]} bytes at {json_offset[at]}",
                    expected=f"at most {self._sizes[located.shard[at]]} bytes", remedy="run shardkit verify",
                )  # fmt: skip
        return kept

    def starts(self, shard: npt.NDArray[np.integer], offset: _Ints) -> _Ints:
        """Return where bytes of shards that are kept lie, from the start of `memory`; int64 [k]."""
        found: _Ints = self._place[shard] + offset
        return found

    def bring(
        self, reader: Reader, ids: _Ints, shard: npt.NDArray[np.int32], images: _Extents, json: _Extents | None
    ) -> _Bools:  # fmt: skip
        """Read what is absent of samples; when it returns, all of them are there.

        What another thread is reading is waited for; where that fails, it is read here. A read that fails leaves its
        blocks absent.

        Args:
            reader: over the shards, into the device's memory.
            ids: [k], of shards that are kept.
            shard: [k].
            images: offset and size of their images; int64 [k] each.
            json: likewise of their json members; None when they are not read.

        Returns:
            bool [k], the samples that were there, and `settle`d, before.

        Raises:
            StorageError: a shard cannot be read.
            ConfigError: it is closed.
        """
        known: _Bools = self._ready[ids]
        new = ~known
        if new.any():
            extents = [(offset[new], size[new]) for offset, size in (images, *([] if json is None else [json]))]
            offsets, sizes = (np.concatenate(column) for column in zip(*extents, strict=True))
            self._fill(reader, self.starts(np.tile(shard[new], len(extents)), offsets), sizes)
        with self._lock:
            self._misses += int(new.sum())
            self._hits += int(known.sum())
            self._hit_bytes += int(images[1][known].sum())
        return known

    def settle(self, ids: _Ints) -> None:
        """Note samples that are there as looked at: from now on `bring` says that they were there before."""
        self._ready[ids] = True

    def close(self) -> None:
        """Let go of the memory; idempotent. It goes when no batch looks at it any more."""
        self._memory = None

    def _fill(self, reader: Reader, starts: _Ints, sizes: _Ints) -> None:
        first = starts // self._block
        end = np.where(sizes > 0, -(-(starts + sizes) // self._block), first)
        blocks = np.unique(ranges(first, end - first))
        while (mine := self._claim(blocks)).size:
            state, size = _ABSENT, 0
            try:
                ops = self._ops(mine, reader.span_bytes)
                reader.read_into(ops)
                state, size = _PRESENT, int(ops.need.sum())
            finally:
                with self._lock:
                    self._states[mine] = state
                    self._read_bytes += size
                    self._changed.notify_all()

    def _claim(self, blocks: _Ints) -> _Ints:
        """Return those of some blocks that are absent, and are the caller's to read from now on, with gaps between.

        While others read the rest, it waits; it returns none when all are there.
        """
        with self._lock:
            while True:
                states = self._states[blocks]
                absent: _Ints = blocks[states == _ABSENT]
                if absent.size:
                    mine = self._with_gaps(absent)
                    self._states[mine] = _COMING
                    return mine
                if not (states == _COMING).any():
                    return absent
                self._changed.wait()

    def _with_gaps(self, blocks: _Ints) -> _Ints:
        """Return absent blocks with the small gaps between them that are wholly absent, too."""
        between, owner = gaps(blocks, self._shard_of(blocks), GAP_BYTES // self._block)
        if not between.size:
            return blocks
        taken = np.bincount(owner, self._states[between] != _ABSENT, len(blocks)) > 0
        both: _Ints = np.concatenate([blocks, between[~taken[owner]]])
        both.sort()
        return both

    def _shard_of(self, blocks: _Ints) -> _Ints:
        shards: _Ints = self._kept[np.searchsorted(self._first_block, blocks, side="right") - 1]
        return shards

    def _ops(self, blocks: _Ints, span_bytes: int) -> ReadOps:
        """Return what reads rising blocks into their places."""
        shards = self._shard_of(blocks)
        first, count = runs(blocks, shards, max(span_bytes // self._block, 1))
        shard, start = shards[first], blocks[first] * self._block
        offset, size = start - self._place[shard], self._sizes[shard]
        length = np.minimum(count * self._block, (size + self._align - 1) // self._align * self._align - offset)
        return ReadOps(
            file=shard, offset=offset, length=length, need=np.minimum(length, size - offset), start=start,
            buffer=self.memory,
        )  # fmt: skip
