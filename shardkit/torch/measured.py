"""Which of two decoders is the faster one on this machine with images like these: measured once, and remembered."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from shardkit.dataset.encoded import EncodedLoader, ReadOptions
from shardkit.dataset.state import Position
from shardkit.errors import ShardkitError
from shardkit.pipeline.again import Again
from shardkit.storage.atomic import replace_file

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from shardkit.dataset.batch import EncodedBatch
    from shardkit.pipeline.decoder import Decoder
    from shardkit.storage.device import Device

__all__ = ["Memory", "better", "images_per_second", "kind_of", "memory_file", "rates_of"]

_BATCHES = 4
"""Held while it is measured; 93 MB of photographs in batches of 256."""
_TIMES = 5
"""How often each is decoded, after a first time that does not count: 0.2 s of an H200's engines."""
_WORTH = 1.1
"""By how much dali has to be faster: nvjpeg takes a fourth less of the processors, and runs differ by a twentieth."""
_MOST_KEPT = 256
_MOST_BYTES = 1 << 20
_VERSION = 1

_D = TypeVar("_D", bound="Decoder")

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
    decoders: Mapping[str, Callable[[], _D]], path: Path | str, device: Device | None, *, batch_size: int
) -> Iterator[tuple[str, _D, float]]:
    """Yield decoders and what they do with the first images of a dataset; who takes one closes it.

    Args:
        decoders: make them, by their names.
        path: of the dataset.
        device: where they work; None for the CPU.
        batch_size: images of a batch.

    Raises:
        ShardkitError: the images cannot be read or decoded, or a decoder cannot be made.
    """
    for name, make in decoders.items():
        decoder = make()
        try:
            options = ReadOptions(
                batch_size=batch_size, shuffle="none", last_batch="partial", io="buffered", prefetch=_BATCHES,
                in_flight=_BATCHES + decoder.in_flight, space=decoder.accepts, on_bad="raise",
            )  # fmt: skip
            with EncodedLoader.open(path, options, device=device) as loader, _held(loader) as batches:
                rate = images_per_second(decoder, batches)
        except BaseException:
            decoder.close()
            raise
        yield name, decoder, rate


def images_per_second(decoder: Decoder, batches: list[EncodedBatch]) -> float:
    """Return how many images a decoder makes a second of batches that are in memory, once it is warm."""
    began, count, decoded = 0.0, 0, None
    decoding = decoder.decode(Again(batches, times=1 + _TIMES), batches[0].epoch)
    for number, decoded in enumerate(decoding, 1):
        if number == len(batches):
            decoded.settle()
            began = time.perf_counter()
        elif number > len(batches):
            count += len(decoded.batch)
    assert decoded is not None, "there is a batch"
    decoded.settle()
    return count / (time.perf_counter() - began)


@contextlib.contextmanager
def _held(loader: EncodedLoader) -> Iterator[list[EncodedBatch]]:
    fetcher, batches = loader.start(Position(0, 0)), list[Any]()
    try:
        # To wait while it holds some is right here: there is memory for all of them.
        while len(batches) < _BATCHES and (batch := fetcher.get(wait=True)) is not None:
            batches.append(batch)
        yield batches
    finally:
        for batch in batches:
            batch.release()
        fetcher.close()


def kind_of(pixels: float, nbytes: float) -> str:
    """Return the kind of images, to a factor of two: what was measured for one holds for others like it."""
    return f"images of 2^{round(math.log2(max(pixels, 1)))} pixels and 2^{round(math.log2(max(nbytes, 1)))} bytes"


def memory_file() -> Path:
    """Return where measurements are kept: `$XDG_CACHE_HOME/shardkit/decoders.json`, by default in `~/.cache`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "shardkit", "decoders.json")


class Memory:
    """Measurements in a file, which is a help and no more: what cannot be read or written is measured again."""

    def __init__(self, file: Path) -> None:
        """Use a file, which need not be there."""
        self._file = file

    def rates(self, key: str) -> Mapping[str, float] | None:
        """Return what was measured for a machine and a kind of images, or None."""
        return self._read().get(key)

    def keep(self, key: str, rates: Mapping[str, float]) -> None:
        """Keep a measurement; of old ones the last 256 stay."""
        kept = self._read()
        kept.pop(key, None)
        kept[key] = {name: round(rate, 1) for name, rate in rates.items()}
        text = json.dumps({"version": _VERSION, "decoders": dict(list(kept.items())[-_MOST_KEPT:])}, indent=1)
        path = os.fsencode(self._file)
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            # Several processes may do so at once; the last one's file stays, and each is whole.
            replace_file(path, text.encode(), path + f".{os.getpid()}.tmp".encode())
        except (OSError, ShardkitError) as error:
            _log.info("a measurement is not kept: %s", error)

    def _read(self) -> dict[str, dict[str, float]]:
        try:
            with self._file.open("rb") as file:
                stated = json.loads(file.read(_MOST_BYTES))
            if stated["version"] != _VERSION:
                return {}
            return {key: rates for key, rates in stated["decoders"].items() if _is_measured(rates)}
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return {}


def _is_measured(rates: object) -> bool:
    return isinstance(rates, dict) and all(
        isinstance(rates.get(name), int | float) and 0 < rates[name] < math.inf for name in ("nvjpeg", "dali")
    )
