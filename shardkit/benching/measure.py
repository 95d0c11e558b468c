"""One run of one row, in the process that calls it."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import itertools
import os
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

from shardkit.benching.clock import Clock, Pace, drop_pages, shards_of
from shardkit.benching.loading import gpu_number, open_loader, settle
from shardkit.benching.plain import PlainReads
from shardkit.errors import ConfigError, IntegrityError
from shardkit.pipeline.again import Again

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from shardkit.benching.case import Case, Settings
    from shardkit.dataset.batch import EncodedBatch
    from shardkit.dataset.encoded import EncodedLoader
    from shardkit.torch.loader import ShardLoader

__all__ = ["Result", "as_fast_as_it_goes", "measure"]

Result: TypeAlias = dict[str, Any]
"""Of one run: JSON values."""
_Options: TypeAlias = "dict[str, Any]"
_HELD = 8  # batches that decoding alone goes round in
_EPOCHS = 3


def measure(case: Case, settings: Settings) -> Result:
    """Measure a row once.

    Raises:
        ShardkitError: it cannot be had, or it fails.
    """
    if settings.cold:
        drop_pages(shards_of(settings.dataset))  # io="auto" looks at what is cached
    return _MEASURES[case.kind](case, settings)


def as_fast_as_it_goes(
    epoch: Callable[[], Iterator[int]], settings: Settings, *, samples: int, settled: Callable[[], None], ahead: int
) -> Result:
    """Count images for the time, or the batches, that the settings name.

    Warm, the clock runs from one batch to another in the middle of the work, and nobody pauses before: else batches
    would be made that are not timed, and be counted. Cold, it runs from nothing until all that was counted is there.

    Args:
        epoch: starts to iterate: yields the number of images of each batch, endless or of an epoch.
        settings: how long, and whether from an empty page cache.
        samples: of an epoch: the most that are counted from an empty page cache.
        settled: waits until all batches so far are really there.
        ahead: batches that may wait for whoever iterates, or on their way; as many come before the clock starts.
    """
    running = epoch()
    for _ in itertools.islice(running, max(settings.warm_up, ahead)):
        pass
    if settings.cold:
        settled()
        _close(running)
        del running
        gc.collect()  # whoever maps the shards must let go before their pages can
        running = epoch()  # begins to read when it is asked
        drop_pages(shards_of(settings.dataset))
    clock, images, batches = Clock(), 0, 0
    for count in running:
        images, batches = images + count, batches + 1
        if batches == settings.batches or (not settings.batches and clock.seconds >= settings.seconds):
            break
        if settings.cold and images >= samples:
            break
    if settings.cold:
        settled()
    result = clock.stop(images)
    settled()
    _close(running)
    return result | {"batches": batches}


def _close(running: Iterator[int]) -> None:
    with contextlib.suppress(AttributeError):
        running.close()  # type: ignore[attr-defined]


def _describe_device(_: Case, settings: Settings) -> Result:
    """Look at the GPU."""
    import torch

    from shardkit.storage.cuda import open_device

    device = open_device(gpu_number(settings))
    return {
        "gpu": device.name, "gpu_free_bytes": device.free_bytes, "torch_cuda": torch.version.cuda,
        "torch_sees_it": torch.cuda.is_available(),
    }  # fmt: skip


def _plain(case: Case, settings: Settings) -> Result:
    reads = PlainReads(
        shards_of(settings.dataset), direct=case.io == "direct", threads=case.threads, chunk_bytes=case.chunk_bytes,
        **dict(case.options),
    )  # fmt: skip
    samples, payload = _totals(settings)
    if not settings.cold:
        reads.read()
    else:
        drop_pages(shards_of(settings.dataset))
    clock, passes = Clock(), 0
    while not passes or (not settings.cold and clock.seconds < settings.seconds):
        reads.read()
        passes += 1
    reads.close()
    return _with_bytes(clock.stop(passes * samples), payload * passes)


def _read(case: Case, settings: Settings) -> Result:
    with _open_encoded(case, settings) as loader:
        samples, payload = _totals(settings)
        numbers = itertools.count()

        def epochs() -> Iterator[int]:
            while True:
                count = size = 0
                for batch in _encoded_batches(loader, next(numbers)):
                    count, size = count + len(batch), size + sum(map(len, batch.views))
                    batch.release()
                    yield len(batch)
                if (count, size) != (samples, payload):
                    raise IntegrityError("an epoch is not whole", expected=(samples, payload), found=(count, size))
                if settings.cold:
                    return

        result = as_fast_as_it_goes(
            epochs, settings, samples=samples, settled=lambda: None, ahead=_ahead(loader)
        )  # fmt: skip
        result |= {"io": loader.choice.backend, "io_reason": loader.choice.reason}
        result["bytes"] = dict(loader.reader.counters)
        return _with_bytes(result, payload / samples * result["images"])


def _open_encoded(case: Case, settings: Settings) -> EncodedLoader:
    from shardkit.dataset.encoded import EncodedLoader, ReadOptions

    options: _Options = dict(case.options)
    place: _Options = {}
    if settings.on_gpu:
        from shardkit.storage.cuda import open_device

        place["device"] = device = open_device(gpu_number(settings))
        options.setdefault("space", device.space)
    read: _Options = {"batch_size": settings.batch_size, "shuffle": case.shuffle, "io": case.io, **options}
    return EncodedLoader.open(settings.dataset, ReadOptions(last_batch="partial", on_bad="raise", **read), **place)


def _encoded_batches(loader: EncodedLoader, epoch: int) -> Iterator[EncodedBatch]:
    from shardkit.dataset.state import Position

    fetcher = loader.start(Position(epoch, 0))
    try:
        while (batch := fetcher.get(wait=True)) is not None:
            yield batch
    finally:
        fetcher.close()


def _ahead(loader: EncodedLoader) -> int:
    return loader.options.most_batches(loader.samples)


def _decode(case: Case, settings: Settings) -> Result:
    from shardkit.torch.measured import held_batches

    held = min(_HELD, max(_totals(settings)[0] // settings.batch_size, 1))
    settings = dataclasses.replace(settings, cold=False)  # nothing is read while the clock runs
    with contextlib.ExitStack() as stack:
        loader = stack.enter_context(open_loader(dataclasses.replace(case, io="buffered", shuffle="none"), settings))
        samples, decoder, device = loader._encoded.samples, loader._decoder, loader._device
        batches = stack.enter_context(
            held_batches(samples, decoder, device, batch_size=settings.batch_size, count=held)
        )  # fmt: skip
        source = Again(batches)

        def decoded() -> Iterator[int]:
            running = decoder.decode(source, 0)
            try:
                for batch in running:
                    yield len(batch.batch)
            finally:
                source.ended = True
                _close(running)  # type: ignore[arg-type]

        result = as_fast_as_it_goes(
            decoded, settings, samples=0, settled=settle(settings), ahead=decoder.in_flight
        )  # fmt: skip
        return result | {"decoder": decoder.name, "decoded_by": dict(decoder.counts)}


def _pipeline(case: Case, settings: Settings) -> Result:
    memory = _GpuMemory(settings)
    if settings.cold:  # one epoch, of which nothing was read before
        case = dataclasses.replace(case, options=(("read_on", False), *case.options))
    began = time.perf_counter()
    with open_loader(case, settings) as loader:
        first: list[float] = []
        settled, pace = memory.looked_at(settle(settings)), Pace()

        def epochs() -> Iterator[int]:
            while True:
                pace.begin()
                for _, labels in loader:
                    if not first:
                        settled()
                        first.append(time.perf_counter() - began)
                    pace.note(len(labels))
                    yield len(labels)
                if settings.cold:
                    return

        samples = len(loader) * settings.batch_size
        before = loader.stats()
        result = as_fast_as_it_goes(
            epochs, settings, samples=samples, settled=settled, ahead=_ahead(loader._encoded)
        )  # fmt: skip
        result |= _told(loader, before.wait_read_s) | memory.taken | pace.figures()
    result["first_s"] = first[0]
    return _with_bytes(result, result["images"] * _mean_bytes(settings))


def _rival(case: Case, settings: Settings) -> Result:
    from shardkit.benching.rival import AHEAD, rival_batches

    memory, began, first = _GpuMemory(settings), time.perf_counter(), list[float]()
    settled = memory.looked_at(settle(settings))
    options: _Options = dict(case.options)

    def counted(endless: Iterator[tuple[Any, Any]]) -> Iterator[int]:  # Any: tensors
        for _, labels in endless:
            if not first:
                settled()
                first.append(time.perf_counter() - began)
            yield len(labels)

    def batches() -> Iterator[int]:
        threads = case.threads or _processors()
        return counted(rival_batches(settings, threads=threads, labelled=_labelled(settings), **options))

    samples, _ = _totals(settings)
    result = as_fast_as_it_goes(batches, settings, samples=samples, settled=settled, ahead=AHEAD) | memory.taken
    result["first_s"] = first[0]
    return _with_bytes(result, result["images"] * _mean_bytes(settings))


def _engines(_: Case, settings: Settings) -> Result:
    from shardkit.benching.engines import measure_engines

    return measure_engines(settings)


def _first(case: Case, settings: Settings) -> Result:
    """Time from the making of a loader to its first batch: with the start of CUDA and DALI, without torch's import."""
    import torch  # noqa: F401 - not counted

    from shardkit.benching.rival import rival_batches
    from shardkit.torch.loader import ShardLoader  # noqa: F401 - likewise

    settled = settle(settings)
    if case.decoder == "rival":
        clock = Clock()
        next(rival_batches(settings, threads=case.threads or _processors(), labelled=_labelled(settings)))
        settled()
        return clock.stop(settings.batch_size) | {"first_s": clock.seconds}
    clock = Clock()
    with open_loader(case, settings) as loader:
        _, labels = next(iter(loader))
        settled()
        result = clock.stop(len(labels)) | {"first_s": clock.seconds}
        return result | _told(loader, 0.0)


def _epochs(case: Case, settings: Settings) -> Result:
    """Time whole epochs, the first one from the state that the settings name: what a cache is worth."""
    settled, result = settle(settings), Result()
    with open_loader(case, settings) as loader:
        if settings.cold:
            drop_pages(shards_of(settings.dataset))
        for epoch in range(_EPOCHS):
            clock = Clock()
            images = sum(len(labels) for _, labels in loader)
            settled()
            result |= clock.stop(images) | {f"epoch_{epoch}_images_s": images / clock.seconds}
        result |= _told(loader, 0.0)
    return _with_bytes(result, result["images"] * _mean_bytes(settings))


def _train(case: Case, settings: Settings) -> Result:
    from shardkit.benching.training import measure_training

    if not settings.on_gpu:
        raise ConfigError("training is measured on a GPU only", expected="device='cuda'", found=settings.device)
    return measure_training(case, settings)


def _told(loader: ShardLoader, waited_before_s: float) -> Result:
    """Return what the loader says of itself."""
    stats = loader.stats()
    found: Result = {}
    for field in dataclasses.fields(stats):
        value = getattr(stats, field.name)
        if isinstance(value, Mapping):
            found[field.name] = dict(value)
        elif isinstance(value, str | int | float):
            found[field.name] = value
    # How many batches and bytes there were says the clock; these are sums over all epochs, the warm-up's too.
    renamed = {f"all_{name}": found.pop(name) for name in ("batches", "samples") if name in found}
    return found | renamed | {"wait_read_s": stats.wait_read_s - waited_before_s}


class _GpuMemory:
    """Memory that this process takes of the GPU, beyond a context: "gpu_bytes"."""

    def __init__(self, settings: Settings) -> None:
        self._device = settings.device if settings.on_gpu else None
        self._free = self._now()
        self.taken: Result = {}

    def looked_at(self, settled: Callable[[], None]) -> Callable[[], None]:
        """Return a call that looks, too: what ends a run takes away what it would see."""

        def settled_and_seen() -> None:
            settled()
            if self._device is not None:
                self.taken = {"gpu_bytes": self._free - self._now()}

        return settled_and_seen

    def _now(self) -> int:
        if self._device is None:
            return 0
        import torch

        torch.zeros(1, device=self._device)  # the context is there now
        return int(torch.cuda.mem_get_info(self._device)[0])


def _totals(settings: Settings) -> tuple[int, int]:
    """Return the dataset's samples, and the bytes of their images."""
    from shardkit.dataset.shardset import open_dataset

    with open_dataset(settings.dataset) as dataset:
        return len(dataset), dataset.manifest.totals.payload


def _mean_bytes(settings: Settings) -> float:
    samples, payload = _totals(settings)
    return payload / samples


def _labelled(settings: Settings) -> bool:
    from shardkit.dataset.shardset import open_dataset

    with open_dataset(settings.dataset) as dataset:
        return dataset.classes is not None


def _with_bytes(result: Result, payload: float) -> Result:
    """Add the encoded images' bytes a second."""
    return result | {"gb_s": payload / result["seconds"] / 1e9}


def _processors() -> int:
    return len(os.sched_getaffinity(0))


_MEASURES: dict[str, Callable[[Case, Settings], Result]] = {
    "device": _describe_device, "plain": _plain, "read": _read, "decode": _decode, "pipeline": _pipeline,
    "rival": _rival, "engines": _engines, "first": _first, "epochs": _epochs, "train": _train,
}  # fmt: skip
