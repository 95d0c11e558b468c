"""Decoding by NVIDIA DALI on the CPU, and the only importer of it.

One graph an epoch (building it takes milliseconds), fed by hand: `external_source` looks at our memory without a copy
(`no_copy`). Two batches are in flight, so that DALI's threads find work while Python hands out the one before. DALI
works them off in order and is through with an input when its output is there, so the oldest lease ends then.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from shardkit.errors import CapabilityError, FormatError
from shardkit.format.jpeg import JpegRefusal, inspect_jpeg
from shardkit.pipeline.crops import Crops, random_crops
from shardkit.pipeline.decoder import BatchSource, DecodedBatch, DecodeSpec
from shardkit.storage.reader import HOST, MemorySpace

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy.typing as npt

    from shardkit.dataset.batch import EncodedBatch

__all__ = ["DaliDecoder"]

_Foreign: TypeAlias = Any  # DALI has no types: pipelines, nodes of their graphs, tensors
_IN_FLIGHT = 2
_SEEDS = (1 << 31) - 1  # DALI takes more, its random operators use no more
_JPEG, _ANCHOR, _SHAPE, _MIRROR = "jpeg", "anchor", "shape", "mirror"


class DaliDecoder:
    """A `Decoder` on DALI's CPU operators."""

    accepts: MemorySpace = HOST
    in_flight = _IN_FLIGHT

    def __init__(self, spec: DecodeSpec, *, batch_size: int) -> None:
        """Prepare to decode batches of at most `batch_size` images.

        Raises:
            CapabilityError: DALI is not installed or cannot be loaded.
        """
        self._dali = _import_dali()
        self._spec = spec
        self._batch_size = batch_size

    def decode(self, source: BatchSource, epoch: int) -> Iterator[DecodedBatch]:
        """Decode every batch of `source`, in order; see `Decoder`."""
        run = _Run(self, source, epoch)
        try:
            while (decoded := run.next()) is not None:
                yield decoded
        finally:
            run.close()

    def graph(self, batch_size: int, threads: int, epoch: int) -> _Foreign:
        """Return a built pipeline with the inputs jpeg and, for training, anchor, shape and mirror; one output."""
        fn, types, spec = self._dali.fn, self._dali.types, self._spec
        # A queue of 1 is what makes `schedule_run` start one batch at a time; how many run is up to `_Run`.
        pipe = self._dali.pipeline(
            batch_size=batch_size, num_threads=threads, device_id=None, prefetch_queue_depth=1,
            seed=(spec.seed * 1_000_003 + epoch) % _SEEDS,
        )  # fmt: skip
        with pipe:
            jpeg = fn.external_source(name=_JPEG, no_copy=True, dtype=types.UINT8, ndim=1)
            square = self._train_square(jpeg) if spec.train else self._eval_square(jpeg)
            mirror = fn.external_source(name=_MIRROR, no_copy=True, dtype=types.INT32, ndim=0) if spec.train else 0
            pipe.set_outputs(self._normalised(square, mirror))
        pipe.build()
        return pipe

    def feed(self, pipe: _Foreign, views: Sequence[npt.NDArray[np.uint8]], crops: Crops | None) -> None:
        """Start a batch. DALI looks at `views` and at the crops until its output is there."""
        pipe.feed_input(_JPEG, views)
        if crops is not None:
            pipe.feed_input(_ANCHOR, crops.anchor)
            pipe.feed_input(_SHAPE, crops.shape)
            pipe.feed_input(_MIRROR, crops.mirror)
        pipe.schedule_run()

    def crops(self, batch: EncodedBatch) -> Crops | None:
        """Return the random choices for a batch; None in evaluation, which has none."""
        if not self._spec.train:
            return None
        return random_crops(batch.ids, batch.width, batch.height, seed=self._spec.seed, epoch=batch.epoch)

    def empty(self) -> npt.NDArray[Any]:  # Any: the spec's dtype
        """Return the pixels of no image."""
        size = self._spec.size
        shape = (0, size, size, 3) if self._spec.channels_last else (0, 3, size, size)
        return np.empty(shape, self._spec.dtype)

    @property
    def spec(self) -> DecodeSpec:
        """What is made of an image."""
        return self._spec

    @property
    def batch_size(self) -> int:
        """The most images of a batch."""
        return self._batch_size

    def _train_square(self, jpeg: _Foreign) -> _Foreign:
        fn, types = self._dali.fn, self._dali.types
        # The decoder cuts: what lies outside the crop costs entropy decoding only.
        anchor = fn.external_source(name=_ANCHOR, no_copy=True, dtype=types.FLOAT, ndim=1)
        shape = fn.external_source(name=_SHAPE, no_copy=True, dtype=types.FLOAT, ndim=1)
        crop = fn.decoders.image_slice(jpeg, anchor, shape, axes=[0, 1], output_type=types.RGB)
        return fn.resize(crop, size=[self._spec.size, self._spec.size])

    def _eval_square(self, jpeg: _Foreign) -> _Foreign:
        fn, types = self._dali.fn, self._dali.types
        whole = fn.decoders.image(jpeg, output_type=types.RGB)
        resized = fn.resize(whole, resize_shorter=self._spec.shorter)
        return fn.crop(resized, crop=[self._spec.size, self._spec.size])

    def _normalised(self, square: _Foreign, mirror: _Foreign) -> _Foreign:
        fn, types, spec = self._dali.fn, self._dali.types, self._spec
        if spec.augment is not None:
            square = spec.augment(square)
        plain = spec.dtype == "uint8"
        return fn.crop_mirror_normalize(
            square,
            mirror=mirror,
            dtype={"float32": types.FLOAT, "float16": types.FLOAT16, "uint8": types.UINT8}[spec.dtype],
            output_layout="HWC" if spec.channels_last else "CHW",
            mean=[0.0] * 3 if plain else list(spec.mean),
            std=[1.0] * 3 if plain else list(spec.std),
        )


class _Run:
    """One pass over a source: a graph, and the batches that are in it."""

    def __init__(self, decoder: DaliDecoder, source: BatchSource, epoch: int) -> None:
        self._decoder = decoder
        self._source = source
        self._epoch = epoch
        self._pipe = decoder.graph(decoder.batch_size, decoder.spec.thread_count, epoch)
        self._flying: deque[tuple[EncodedBatch, Crops | None]] = deque()
        self._failed: BaseException | None = None
        self._ended = False

    def next(self) -> DecodedBatch | None:
        self._top_up()
        if not self._flying:
            if self._failed is not None:
                raise self._failed
            return None
        batch, crops = self._flying[0]
        pixels = self._output(batch, crops) if len(batch) else self._decoder.empty()
        self._flying.popleft()
        batch.release()
        return DecodedBatch(pixels, batch)

    def close(self) -> None:
        self._pipe = None  # waits for the batch that DALI works on and forgets the others
        while self._flying:
            self._flying.popleft()[0].release()

    def _top_up(self) -> None:
        """Feed what is read, and wait for a read only when nothing is in flight, as `Fetcher` demands."""
        while len(self._flying) < _IN_FLIGHT and not self._ended:
            try:
                batch = self._source.get(wait=not self._flying)
            except BaseException as error:
                if not self._flying:
                    raise
                self._failed, self._ended = error, True  # the batches before it come first
                return
            if batch is None:
                self._ended = not self._flying
                return
            crops = self._decoder.crops(batch)
            self._flying.append((batch, crops))
            if len(batch):
                self._decoder.feed(self._pipe, batch.views, crops)

    def _output(self, batch: EncodedBatch, crops: Crops | None) -> _Foreign:
        try:
            (images,) = self._pipe.share_outputs()
        except RuntimeError as error:
            bad = self._find_bad(batch, crops)
            if bad is None:
                raise
            raise _undecodable(batch, *bad) from error
        self._pipe.release_outputs()  # for its queue; the memory stays whoever's holds `images`
        return images.as_tensor()

    def _find_bad(self, batch: EncodedBatch, crops: Crops | None) -> tuple[int, RuntimeError] | None:
        """Decode one image after another until one fails: DALI names no sample in most of its messages."""
        single = self._decoder.graph(1, 1, self._epoch)
        for at, view in enumerate(batch.views):
            part = slice(at, at + 1)
            alone = crops and Crops(crops.anchor[part], crops.shape[part], crops.mirror[part])
            self._decoder.feed(single, [view], alone)
            try:
                single.share_outputs()
            except RuntimeError as error:
                return at, error
            single.release_outputs()
        return None


def _undecodable(batch: EncodedBatch, at: int, error: RuntimeError) -> FormatError:
    path, offset = batch.place(at)
    try:
        inspect_jpeg(batch.views[at].data)
        found = "DALI: " + _told(error)
    except JpegRefusal as refusal:
        found = refusal.detail
    return FormatError(
        "an image cannot be decoded", path=path, offset=offset, key=batch.key(at), found=found,
        remedy="pack again with --check decode, which refuses such files",
    )  # fmt: skip


def _told(error: RuntimeError) -> str:
    """Return the one line of DALI's message that tells what happened in its operator."""
    lines = [line.strip() for line in str(error).splitlines()]
    after = lines[lines.index("encountered:") + 1 :] if "encountered:" in lines else lines
    return next((line for line in after if line), "an error without a message")[:200]


@dataclass(frozen=True, slots=True)
class _Dali:
    """What is used of DALI."""

    pipeline: _Foreign
    fn: _Foreign
    types: _Foreign


def _import_dali() -> _Dali:
    try:
        from nvidia.dali import fn, types
        from nvidia.dali.pipeline import Pipeline
    except ImportError as error:
        raise CapabilityError(
            "decoding needs NVIDIA DALI, which is not installed", found=str(error),
            remedy="pip install 'shardkit[dali]', or take decoder='cpu' (Pillow, slower)",
        ) from error  # fmt: skip
    return _Dali(Pipeline, fn, types)
