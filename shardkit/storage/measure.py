"""A short measurement of the ways to read some files: what each of them gives on bytes that are not cached yet."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Literal, TypeAlias

import numpy as np

from shardkit.errors import ShardkitError
from shardkit.splitmix import mix
from shardkit.storage.buffers import BufferPool
from shardkit.storage.reader import PAGE_CACHE, SPAN_BYTES, ReadOps
from shardkit.storage.residency import held_share, open_to_ask

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from shardkit.storage.reader import Reader

__all__ = ["BUDGET_BYTES", "BUDGET_S", "Pattern", "SpanSource", "measure"]

Pattern: TypeAlias = Literal["random", "sequential"]
"""How a loader goes through files: a sample here, a sample there, or from front to back."""

BUDGET_BYTES = 128 << 20
"""What all ways together read, at most."""
BUDGET_S = 0.3
"""When no further read is started; the ones before may take longer where the storage is slow."""

_SPAN: dict[Pattern, int] = {"random": 96 << 10, "sequential": SPAN_BYTES}
"""Bytes of a read: an image, or what a plan of neighbours is cut into."""
_FIRST: dict[Pattern, int] = {"random": 8, "sequential": 2}
"""Reads of the first batch of each way, which opens files, starts threads and tells how slow the storage is."""
_MOST: dict[Pattern, int] = {"random": 192, "sequential": 18}
"""Reads of the other batches, at most: about as many bytes as a loader's batch, so that as many are in flight."""
_BATCH_S = 0.2
"""What another batch may take, if it ran like the first one; it runs faster, because more is in flight."""
_ROUNDS = 2
_APART = 1.5
"""Speeds that differ by this factor need no second look."""
_CACHED_SHARE = 0.25
"""A span of which more than this is in memory does not count as one that is read from the storage."""
_FILES = 64
_TRIES = 4


@dataclass(slots=True)
class _Way:
    name: str
    reader: Reader
    rates: list[float]
    """Bytes a second of each batch; the first one opens files and starts threads."""


class SpanSource:
    """Draws spans of files that are not cached, none of them twice."""

    def __init__(self, files: Sequence[tuple[str, int]], pattern: Pattern, seed: int) -> None:
        """Open up to 64 of the files, to ask what is cached of them.

        Args:
            files: (path, bytes) of each.
            pattern: whether spans lie scattered, or one behind the other.
            seed: of the places.
        """
        self.span = _SPAN[pattern]
        self._step = 1 if pattern == "sequential" else 0
        large = [(path, size // self.span) for path, size in files if size >= self.span]
        self.paths: list[str] = []
        """The files that spans are drawn from, addressed by their index."""
        self._open: list[int] = []
        self._first = [0]
        for path, slots in large[:: -(-len(large) // _FILES)] if large else []:
            with contextlib.suppress(OSError):  # the reader will tell, with everything that belongs to it
                self._open.append(open_to_ask(path))
                self.paths.append(path)
                self._first.append(self._first[-1] + slots)
        self._state = mix(seed)
        self._drawn = 0
        self._taken: set[int] = set()

    def close(self) -> None:
        """Close the files."""
        while self._open:
            os.close(self._open.pop())

    def draw(self, count: int, buffer: memoryview) -> ReadOps:
        """Return up to `count` reads, back to back into `buffer`: fewer when few bytes are left that are not cached."""
        slots = list(self._slots_of(count))
        file = np.searchsorted(self._first, slots, side="right") - 1
        offset = (np.asarray(slots, np.int64) - np.asarray(self._first, np.int64)[file]) * self.span
        order = np.lexsort((offset, file))  # as a plan has them
        length = np.full(len(slots), self.span, np.int64)
        start = np.arange(len(slots), dtype=np.int64) * self.span
        return ReadOps(
            file=file[order].astype(np.int64), offset=offset[order], length=length, need=length, start=start,
            buffer=buffer,
        )  # fmt: skip

    def _slots_of(self, count: int) -> Iterator[int]:
        total = self._first[-1]
        slot, found = -1, 0
        for _ in range(_TRIES * count if total else 0):
            if found == count:
                return
            if self._step and slot >= 0:
                slot = (slot + 1) % total
            else:
                self._drawn += 1
                slot = mix(self._state + self._drawn) % total
            if slot not in self._taken and not self._cached(slot):
                self._taken.add(slot)
                found += 1
                yield slot

    def _cached(self, slot: int) -> bool:
        file = int(np.searchsorted(self._first, slot, side="right")) - 1
        share = held_share(self._open[file], (slot - self._first[file]) * self.span, self.span)
        return share is not None and share > _CACHED_SHARE


def measure(
    files: Sequence[tuple[str, int]],
    ways: Mapping[str, Callable[[Sequence[str]], Reader]],
    *,
    pattern: Pattern,
    seed: int,
    budget_bytes: int = BUDGET_BYTES,
    budget_s: float = BUDGET_S,
) -> dict[str, float]:
    """Return the speed of each way to read these files, in GB/s (10**9 bytes a second).

    The ways take turns, so that what else the machine does meets all of them. A way that cannot be opened, fails, or
    ends up in the page cache though it was to pass it by, is left out; so is every way when the files are too small.

    Args:
        files: (path, bytes) of each; of one file system.
        ways: names, and what opens a reader of host memory over some paths.
        pattern: how the reads lie.
        seed: of the places; another one each time, so that no cache below the kernel's knows them.
        budget_bytes: the most that is read.
        budget_s: seconds after which no further read is started.
    """
    with contextlib.ExitStack() as stack:
        source = SpanSource(files, pattern, seed)
        stack.callback(source.close)
        pool = stack.enter_context(BufferPool(_MOST[pattern] * source.span))
        view = pool.acquire(pool.budget_bytes)
        np.frombuffer(view, np.uint8).fill(0)  # touched: page faults are no part of reading
        running = []
        for name, opens in ways.items():
            with contextlib.suppress(ShardkitError):
                reader = opens(source.paths)
                stack.callback(reader.close)
                reader.register(view)
                running.append(_Way(name, reader, []))
        running = _take_turns(running, source, view, pattern, budget_bytes, budget_s)
        # The fastest batch, because what else the machine does meanwhile only makes a batch slower.
        return {way.name: max(way.rates[1:] or way.rates) / 1e9 for way in running if way.rates}


def _take_turns(
    ways: list[_Way], source: SpanSource, view: memoryview, pattern: Pattern, budget_bytes: int, budget_s: float
) -> list[_Way]:
    count, spent, start = _FIRST[pattern], 0, perf_counter()
    for turn in range(1 + _ROUNDS):
        for way in ways[:: 1 - 2 * (turn % 2)]:
            ops = source.draw(count, view)
            over = spent + len(ops) * source.span > budget_bytes or perf_counter() - start > budget_s
            if not len(ops) or (turn and over):
                return ways
            if not _read(way, ops):
                ways = [other for other in ways if other is not way]
            spent += len(ops) * source.span
        if turn and _clear(ways):
            return ways
        if not turn:
            slowest = min((way.rates[0] for way in ways), default=0.0)
            share = (budget_bytes - spent) // (_ROUNDS * max(len(ways), 1))
            count = min(min(int(slowest * _BATCH_S), share) // source.span, _MOST[pattern])
            if count < _FIRST[pattern]:
                return ways  # so slow that the first batch has to do
    return ways


def _clear(ways: list[_Way]) -> bool:
    """Return whether one round tells enough: some way is clearly behind the fastest."""
    rates = [way.rates[-1] for way in ways]
    return len(rates) > 1 and max(rates) > _APART * min(rates)


def _read(way: _Way, ops: ReadOps) -> bool:
    begin = perf_counter()
    try:
        way.reader.read_into(ops)
    except ShardkitError:
        return False
    way.rates.append(int(ops.length.sum()) / (perf_counter() - begin))
    return not (len(way.reader.counters) > 1 and way.reader.counters.get(PAGE_CACHE))
