"""Before a decoder sees encoded images: which of them a GPU's engines take, and bytes that the host needs after all."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import numpy as np

from shardkit.errors import DeviceError
from shardkit.format.jpeg import hardware_decodable
from shardkit.format.jpeg_header import MAX_PIXELS, fault, is_plain_jpeg
from shardkit.pipeline.gpu_memory import Table
from shardkit.pipeline.kernels import PAYLOAD
from shardkit.storage.reader import HOST
from shardkit.storage.stream_spans import StreamSpans

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy.typing as npt

    from shardkit.dataset.batch import EncodedBatch
    from shardkit.pipeline.gpu_canvas import Facts
    from shardkit.pipeline.kernels import Kernels
    from shardkit.storage.device import Device
    from shardkit.storage.reader import MemorySpace

    _Ints = npt.NDArray[np.int64]
    _Bytes = npt.NDArray[np.uint8]

__all__ = ["Inspection"]


class Inspection:
    """Looks at encoded images in the space in which they lie; for one thread."""

    def __init__(self, device: Device, kernels: Kernels, space: MemorySpace, *, batch_size: int) -> None:
        """Prepare for batches of `batch_size` images in `space`."""
        self._kernels, self._on_device = kernels, space != HOST
        self._stream = device.stream()
        self._spans = StreamSpans(device, self._stream, "inspect")
        self._payloads = Table(device, PAYLOAD, batch_size)
        self._verdicts = Table(device, np.int32, batch_size)

    @property
    def nbytes(self) -> int:
        """What it takes of the device."""
        return self._payloads.nbytes + self._verdicts.nbytes

    def taken(self, batch: EncodedBatch, places: _Ints, facts: Facts) -> npt.NDArray[np.bool_]:
        """Return which images are for the back end.

        Engines that read the device's memory write as many pixels as the bytes say, into a place that was measured by
        the index: they get what they can decode by the index's facts, if the bytes agree with them. DALI, which reads
        host memory and decodes by software what the engines do not, gets every JPEG whose header can be followed.

        Args:
            batch: whose bytes are there.
            places: [m] of it.
            facts: [m].
        """
        if not self._on_device:
            views = batch.views
            return np.fromiter((_is_sound(views[at]) for at in places.tolist()), np.bool_, len(places))
        known = hardware_decodable(facts.sof, facts.precision, facts.scans, facts.components, facts.subsampling)
        known &= (facts.width > 0) & (facts.height > 0) & (facts.width * facts.height <= MAX_PIXELS)
        which = np.flatnonzero(known)
        if which.size:
            known[which] = self._verdicts_on(batch, places[which], facts[which]) == 0
        return known

    def on_host(self, batch: EncodedBatch, places: _Ints) -> list[_Bytes]:
        """Return payloads in host memory, copied from the device where they lie there."""
        if not self._on_device:
            return [batch.views[at] for at in places.tolist()]
        sizes = batch.located.size[places]
        ends = np.cumsum(sizes)
        memory = np.empty(int(sizes.sum()), np.uint8)
        base = memory.ctypes.data
        rows = zip((ends - sizes).tolist(), sizes.tolist(), batch.addresses[places].tolist(), strict=True)
        with self._settled("copy to the host", batch.step, memory.nbytes):
            for start, size, address in rows:
                if size:
                    self._stream.download(base + start, address, size)
            self._stream.record().wait()
        return np.split(memory, ends[:-1])

    def _verdicts_on(self, batch: EncodedBatch, places: _Ints, facts: Facts) -> npt.NDArray[np.int32]:
        rows = np.zeros(len(places), PAYLOAD)
        rows["address"], rows["size"] = batch.addresses[places], batch.located.size[places]
        for name in ("width", "height", "components", "sof"):
            rows[name] = getattr(facts, name)
        count = len(rows)
        with self._settled("inspect", batch.step):
            payloads = self._payloads.upload(self._stream, rows)
            self._kernels.inspect(self._stream, payloads, count, self._verdicts.reserve(count))
            return self._verdicts.download(self._stream, count)

    @contextlib.contextmanager
    def _settled(self, work: str, step: int, nbytes: int = 0) -> Iterator[None]:
        """Let no error out before the device is through with memory that goes with it; work that is waited for."""
        try:
            begun = self._spans.begin()
            yield
            if begun is not None:
                self._spans.end(begun, work, step=step, nbytes=nbytes).wait()
                self._spans.note()
        except BaseException:
            with contextlib.suppress(DeviceError):
                self._stream.synchronize()
            raise


def _is_sound(payload: _Bytes) -> bool:
    return fault(payload) is None and is_plain_jpeg(payload)
