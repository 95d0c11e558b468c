"""Which of two decoders is the faster one on this machine with images like these: measured once, and remembered."""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import math
import os
import secrets
import statistics
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from shardkit.dataset.encoded import EncodedLoader, ReadOptions
from shardkit.dataset.samples import Part, Samples
from shardkit.dataset.shardset import open_dataset
from shardkit.dataset.state import Position
from shardkit.errors import LockedError, ShardkitError
from shardkit.pipeline.again import Again
from shardkit.storage.atomic import remove, replace_file
from shardkit.storage.lock import FolderLock
from shardkit.storage.regular import open_regular

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from shardkit.dataset.batch import EncodedBatch
    from shardkit.pipeline.decoder import Decoder
    from shardkit.storage.device import Device

__all__ = ["Memory", "better", "held_batches", "kind_of", "memory_file", "rates_of"]

_BATCHES = 4
"""Held while it is measured; 93 MB of photographs in batches of 256."""
_ROUNDS = 7
"""How often all are decoded in a turn, after a first time that does not count: 0.3 s of an H200's engines."""
_TURNS = 3
"""Of each decoder: in the first second of a process, and of a GPU that had nothing to do, all are slow."""
_WORTH = 1.1
"""By how much dali has to be faster: nvjpeg takes a fourth less of the processors, and runs differ by a twentieth."""
_PATIENCE_S, _LOOK_S = 60.0, 0.05
_MOST_KEPT = 256
_MOST_BYTES = 1 << 20
_MOST_RATE = 1e9
"""Images a second: no decoder's, and small enough to be a float, which a whole number in JSON need not be."""
_VERSION = 2
_log = logging.getLogger(__name__)


def better(rates: Mapping[str, float]) -> tuple[str, str]:
    """Decide between nvjpeg and dali.

    Args:
        rates: images a second of each.

    Returns:
        The name, and the reason as a clause.
    """
    nvjpeg, dali = rates["nvjpeg"], rates["dali"]
    told = f"measured here {nvjpeg:,.0f} images/s with nvjpeg and {dali:,.0f} with dali"
    if dali > _WORTH * nvjpeg:
        return "dali", told
    return "nvjpeg", f"{told}, and nvjpeg takes less of the processors"


def rates_of(
    decoders: Mapping[str, Decoder], samples: Samples, device: Device | None, *, batch_size: int
) -> dict[str, float]:
    """Return how many of the first images of some samples decoders make a second, the best of turns that they take.

    Whole numbers, so that a rate that was kept is told as it was told when it was measured.

    Args:
        decoders: by their names; stay the caller's.
        samples: of a mix those of its first dataset count; stay the caller's.
        device: where the decoders work; None for the CPU.
        batch_size: images of a batch.

    Raises:
        ShardkitError: the images cannot be read or decoded.
    """
    rates = dict.fromkeys(decoders, 0.0)
    with contextlib.ExitStack() as stack:
        held = {
            name: stack.enter_context(held_batches(samples, decoder, device, batch_size=batch_size, count=_BATCHES))
            for name, decoder in decoders.items()
        }
        for _ in range(_TURNS):
            for name, decoder in decoders.items():
                rates[name] = max(rates[name], round(_images_per_second(decoder, held[name])))
    return rates


def _images_per_second(decoder: Decoder, batches: list[EncodedBatch]) -> float:
    """Return the rate at which batches that are in memory are decoded: the median of some rounds.

    In a single one there may be more or less than it took: a decoder that was held up has some batches ready, or has
    to get memory first.
    """
    ends, count = list[float](), sum(len(batch) for batch in batches)
    decoding: Any = decoder.decode(Again(batches, times=1 + _ROUNDS), batches[0].epoch)  # a generator
    with contextlib.closing(decoding):  # an error of the device or Ctrl-C leaves it in its run
        for number, decoded in enumerate(decoding, 1):
            if number % len(batches) == 0:
                decoded.settle()
                ends.append(time.perf_counter())
    return count / statistics.median(after - before for before, after in itertools.pairwise(ends))


@contextlib.contextmanager
def held_batches(
    samples: Samples, decoder: Decoder, device: Device | None, *, batch_size: int, count: int
) -> Iterator[list[EncodedBatch]]:
    """Give the first batches of some samples, all of them in memory from which a decoder takes them.

    Args:
        samples: of a mix those of its first dataset count; stay the caller's.
        decoder: says which memory; stays the caller's.
        device: where it works; None for the CPU.
        batch_size: images of a batch; the last one may have fewer.
        count: the most batches.

    Raises:
        ShardkitError: the images cannot be read, or there is no memory for them.
    """
    options = ReadOptions(
        batch_size=batch_size, shuffle="none", last_batch="partial", io="buffered", prefetch=count,
        in_flight=count + decoder.in_flight, space=decoder.accepts, on_bad="raise",
    )  # fmt: skip
    # Of these samples alone, so that there is memory for all of them, whatever their size.
    with EncodedLoader(_first(samples, count * batch_size), options, device=device) as loader:
        fetcher, batches = loader.start(Position(0, 0)), list[Any]()
        try:
            # To wait while it holds some is right here: there is memory for all that come.
            while len(batches) < count and (batch := fetcher.get(wait=True)) is not None:
                batches.append(batch)
            yield batches
        finally:
            for batch in batches:
                batch.release()
            fetcher.close()


def _first(samples: Samples, count: int) -> Samples:
    part = next(part for part in samples.parts if len(part))
    rows = np.arange(min(count, len(part))) if part.rows is None else part.rows[:count]
    return Samples([Part(open_dataset(part.dataset.path), rows)])


def kind_of(pixels: float, nbytes: float) -> str:
    """Return the kind of images, to a factor of two: what was measured for one holds for others like it."""
    return f"images of 2^{round(math.log2(max(pixels, 1)))} pixels and 2^{round(math.log2(max(nbytes, 1)))} bytes"


def memory_file() -> Path | None:
    """Return where measurements are kept: `$XDG_CACHE_HOME/shardkit/decoders.json`, by default in `~/.cache`.

    None for a user without a home, as in a container that gives processes a number of its own.
    """
    given, default = os.environ.get("XDG_CACHE_HOME", ""), os.path.expanduser("~/.cache")
    folder = given if os.path.isabs(given) else default  # the standard says to pass over one that is relative
    return Path(folder, "shardkit", "decoders.json") if os.path.isabs(folder) else None


class Memory:
    """Measurements in a file, which is a help and no more: what cannot be read or written is measured again."""

    def __init__(self, file: Path | None) -> None:
        """Use a file, which need not be there; None forgets everything."""
        self._file = file

    def rates(self, key: str) -> Mapping[str, float] | None:
        """Return what was measured for a machine and a kind of images, or None."""
        return self._read().get(key)

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Wait until no other process measures, a minute at most, and keep others waiting meanwhile."""
        with contextlib.ExitStack() as stack:
            if self._file is not None:
                stack.enter_context(_turn(self._file))
            yield

    def keep(self, key: str, rates: Mapping[str, float]) -> None:
        """Keep a measurement; of old ones the last 256 stay."""
        kept = self._read()
        kept.pop(key, None)
        kept[key] = {name: round(rate, 1) for name, rate in rates.items()}
        text = json.dumps({"version": _VERSION, "decoders": dict(list(kept.items())[-_MOST_KEPT:])}, indent=1)
        if self._file is None:
            return
        path = os.fsencode(self._file)
        # A name of its own: of several processes at once, also of other hosts, the last one's file stays, and is whole.
        temporary = path + f".{secrets.token_hex(8)}.tmp".encode()
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            replace_file(path, text.encode(), temporary)
        except (OSError, ShardkitError) as error:
            _log.info("a measurement is not kept: %s", error)
            with contextlib.suppress(ShardkitError):
                remove(temporary)

    def _read(self) -> dict[str, dict[str, float]]:
        if self._file is None:
            return {}
        try:
            with open_regular(os.fsencode(self._file), _MOST_BYTES) as file:
                stated = json.loads(file.read(_MOST_BYTES))
            if stated["version"] != _VERSION:
                return {}
            return {key: rates for key, rates in stated["decoders"].items() if _is_measured(rates)}
        except (OSError, ShardkitError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return {}


@contextlib.contextmanager
def _turn(file: Path) -> Iterator[None]:
    """Hold the lock beside a file, if it can be had."""
    path, until = os.fsencode(file) + b".lock", time.monotonic() + _PATIENCE_S
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError, ShardkitError):
            file.parent.mkdir(parents=True, exist_ok=True)
            while True:
                try:
                    stack.enter_context(FolderLock(path))
                    break
                except LockedError:
                    if time.monotonic() > until:
                        raise
                    time.sleep(_LOOK_S)
        yield


def _is_measured(rates: object) -> bool:
    return isinstance(rates, dict) and all(
        isinstance(rates.get(name), int | float) and 0 < rates[name] < _MOST_RATE for name in ("nvjpeg", "dali")
    )
