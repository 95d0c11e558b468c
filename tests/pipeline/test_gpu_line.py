"""The GPU's decoding line, on a device that is host memory: same samples, same pixels, and nothing let go too early."""

from __future__ import annotations

import gc
import io
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections import deque
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import numpy as np
import pytest
from PIL import Image

from shardkit import tracing
from shardkit.dataset.arrangement import open_samples
from shardkit.dataset.bad import BadSamples
from shardkit.dataset.fetch import Fetcher
from shardkit.dataset.order import StoredOrder
from shardkit.dataset.reading import SampleReader
from shardkit.dataset.shardset import open_dataset
from shardkit.dataset.source import BatchReading, SampleSource, Step
from shardkit.errors import DeviceError, FormatError, StorageError
from shardkit.pipeline import gpu_finish
from shardkit.pipeline.cpu import PillowDecoder
from shardkit.pipeline.dali import DaliDecoder, open_dali
from shardkit.pipeline.dali_augmenter import Augmenter
from shardkit.pipeline.dali_mixed import DaliBackend
from shardkit.pipeline.decoder import DecodeSpec
from shardkit.pipeline.gpu_canvas import facts_of
from shardkit.pipeline.gpu_decoder import GpuDecoder
from shardkit.pipeline.gpu_inspection import Inspection
from shardkit.storage.backends import open_reader
from shardkit.storage.buffers import BufferPool
from shardkit.storage.staged import StagedReader
from shardkit.testing.hanging_source import HangingSource
from shardkit.testing.host_kernels import COMPILER
from shardkit.testing.host_machine import HostMachine
from shardkit.testing.images import SPOILT, Picture, jpeg_bytes, spoilt, write_pictures
from shardkit.torch.resize import resize

pytestmark = pytest.mark.skipif(COMPILER is None, reason="the kernels are compiled for the host")


@dataclass(frozen=True)
class Given:
    fetcher: Fetcher
    bad: BadSamples
    pool: BufferPool


@contextmanager
def feed_device(machine, folder, steps, *, epoch=0, depth=2, on_bad="raise", pool_bytes=64 << 20):
    """Read lists of sample numbers into the device's memory."""
    samples, device = open_samples([folder]), machine.device
    host, _ = open_reader("buffered", samples.shard_paths)
    reader = StagedReader(host, device, ring_bytes=8 << 20)
    with BufferPool(pool_bytes, align=reader.align, memory=device.memory) as pool:
        bad = BadSamples(samples, on_bad)
        source = SampleSource(
            SampleReader(samples, reader, inspect=False, device=device), StoredOrder(len(samples)), bad, seed=0
        )
        numbered = (Step(epoch, step, np.asarray(ids, np.int64)) for step, ids in enumerate(steps))
        fetcher = Fetcher(
            BatchReading(source, pool), numbered, depth=depth, replace=source.replace, oldest=reader.oldest
        )
        try:
            yield Given(fetcher, bad, pool)
        finally:
            fetcher.close()
            reader.close()
            samples.close()
            assert pool.lent_bytes == 0


def as_arrays(batch):
    """Wait for a batch, as a consumer's stream does, and return its pixels."""
    batch.ready.wait()
    return list(batch.pixels) if isinstance(batch.pixels, list) else batch.pixels


class AllRead:
    """A source whose batches are all read before the first is given: how many are in flight is the decoder's choice."""

    def __init__(self, fetcher, count):
        self.replace, self.check = fetcher.replace, fetcher.check
        self._batches = deque(fetcher.get(wait=True) for _ in range(count))

    def get(self, *, wait):
        return self._batches.popleft() if self._batches else None


def decode_all(machine, folder, decoder, steps, *, epoch=0, all_read=False, **options):
    """Decode lists of sample numbers; returns ids and pixels of each step."""
    with feed_device(machine, folder, steps, epoch=epoch, **options) as given:
        source = AllRead(given.fetcher, len(steps)) if all_read else given.fetcher
        run = decoder.decode(source, epoch)
        try:
            return [(batch.batch.ids, as_arrays(batch)) for batch in run]
        finally:
            run.close()


@pytest.fixture(params=[1, 3], ids=["one", "three"])
def decode_threads(request):
    return request.param


@pytest.fixture
def machine(decode_threads):
    return HostMachine(decode_threads=decode_threads)


def png_bytes(pixels):
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


@pytest.fixture(scope="session")
def mixed_jpegs(photo_jpegs):
    """All that a decoder meets: every orientation, and codings that no engine takes, among plain photographs."""
    pixels = np.asarray(Image.open(io.BytesIO(photo_jpegs[0])).convert("RGB"))[:150, :211]
    special = [jpeg_bytes(pixels, orientation=number) for number in range(1, 9)]
    special += [
        jpeg_bytes(pixels[:, :, 0]), jpeg_bytes(pixels, progressive=True),
        jpeg_bytes(pixels, progressive=True, orientation=6), jpeg_bytes(Image.fromarray(pixels).convert("CMYK")),
        jpeg_bytes(pixels[:1, :1]), jpeg_bytes(pixels[:, :3]), jpeg_bytes(pixels[:2]),
        jpeg_bytes(pixels, subsampling=1), jpeg_bytes(pixels, restart_marker_rows=1), png_bytes(pixels),
    ]  # fmt: skip
    return [*special, *photo_jpegs[:14]]


SPECIAL = 18
BY_PILLOW = 4


@pytest.fixture(scope="session")
def mixed_folder(tmp_path_factory, mixed_jpegs):
    pictures = [Picture(f"m/{number}", jpeg, number % 5) for number, jpeg in enumerate(mixed_jpegs)]
    return write_pictures(tmp_path_factory.mktemp("mixed") / "ds", pictures)


def steps_of(count, batch):
    return [np.arange(count)[::-1][at : at + batch] for at in range(0, count, batch)]


def in_255(pixels, spec):
    """Undo the normalisation."""
    shape = (-1,) if spec.channels_last else (-1, 1, 1)
    mean, std = (np.asarray(a, np.float64).reshape(shape) for a in (spec.mean, spec.std))
    return pixels.astype(np.float64) * std + mean if spec.dtype != "uint8" else pixels.astype(np.float64)


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("dtype", ["uint8", "float16", "float32"])
@pytest.mark.parametrize("channels_last", [False, True])
def test_pixels_are_pillows(machine, mixed_folder, decoded, train, dtype, channels_last, decode_threads):
    spec = DecodeSpec(size=48, train=train, dtype=dtype, channels_last=channels_last, threads=2)
    steps = steps_of(32, 9)
    expected = decoded(mixed_folder, PillowDecoder(spec), steps, epoch=3)
    decoder = machine.decoder(spec, batch_size=9)
    found = decode_all(machine, mixed_folder, decoder, steps, epoch=3)
    for ids, (found_ids, pixels), wanted in zip(steps, found, expected, strict=True):
        assert found_ids.tolist() == ids.tolist()
        assert (pixels.shape, pixels.dtype) == (wanted.shape, wanted.dtype)
        assert np.abs(in_255(pixels, spec) - in_255(wanted, spec)).max() <= (1.2 if dtype == "float16" else 1.001)
    assert decoder.counts == {"nvjpeg": 32 - BY_PILLOW, "pillow": BY_PILLOW}
    assert machine.engines.threads <= {f"shardkit-decode-{number}" for number in range(decode_threads)}


def test_whole_images_are_the_files_as_they_are_shown(machine, mixed_folder, decoded):
    spec = DecodeSpec(size=1, train=True, augment="none", threads=2)
    steps = steps_of(32, 10)
    expected = decoded(mixed_folder, PillowDecoder(spec), steps)
    found = decode_all(machine, mixed_folder, machine.decoder(spec), steps)
    for (_, images), wanted in zip(found, expected, strict=True):
        assert [image.shape for image in images] == [image.shape for image in wanted]
        assert all(np.array_equal(a, b) for a, b in zip(images, wanted, strict=True))


def test_an_image_of_unknown_size_is_cut_within_its_edges(machine, tmp_path, mixed_jpegs, decoded):
    jpegs = [png_bytes(np.full((side, side + 1, 3), 200, np.uint8)) for side in range(1, 20)]
    folder = write_pictures(tmp_path / "ds", [Picture(f"p/{at}", jpeg, 0) for at, jpeg in enumerate(jpegs)])
    spec = DecodeSpec(size=8, train=True, dtype="uint8")
    for epoch in range(4):
        ((_, pixels),) = decode_all(machine, folder, machine.decoder(spec), [range(19)], epoch=epoch)
        assert (pixels == 200).all()
        assert (decoded(folder, PillowDecoder(spec), [range(19)], epoch=epoch)[0] == 200).all()


@pytest.mark.parametrize("budget_bytes", [1 << 20, 2 << 20])
def test_a_batch_that_does_not_fit_is_decoded_in_several_jobs(machine, photo_folder, decoded, budget_bytes):
    spec = DecodeSpec(size=32, train=True, dtype="uint8", threads=2)
    steps = [range(24)] * 3
    decoder = machine.decoder(spec, budget_bytes=budget_bytes)
    found = decode_all(machine, photo_folder, decoder, steps)
    expected = decoded(photo_folder, PillowDecoder(spec), steps)
    assert all(np.abs(a[1].astype(int) - b).max() <= 1 for a, b in zip(found, expected, strict=True))
    assert len(machine.engines.batches) > 3 * 4
    assert sum(decoder.counts.values()) == 72


def test_results_stay_when_all_memory_is_used_again(machine, photo_folder):
    """Work is carried out as late as somebody waits, engines write at once: what is reused too early is seen."""
    spec = DecodeSpec(size=32, train=True, dtype="uint8", threads=2)
    steps = [np.random.default_rng(step).permutation(24)[:6] for step in range(40)]
    with feed_device(machine, photo_folder, steps) as given:
        decoder = machine.decoder(spec, batch_size=6, budget_bytes=12 << 20)
        batches = list(decoder.decode(given.fetcher, 0))  # nobody waits for a batch before all are made
        found = [as_arrays(batch) for batch in batches]
    alone = decode_all(machine, photo_folder, machine.decoder(spec), [[number] for number in range(24)])
    for ids, pixels in zip(steps, found, strict=True):
        assert np.array_equal(pixels, np.concatenate([alone[number][1] for number in ids]))


def whole_then_damaged(folder, jpegs, bad):
    """Write a dataset whose index was made before the damage: every fact in it says that all is well."""
    pictures = [Picture(f"p/{at}", jpeg, at) for at, jpeg in enumerate(jpegs)]
    write_pictures(folder, pictures)
    with open_dataset(folder) as dataset:
        offsets, sizes = dataset.columns["offset"][:], dataset.columns["size"][:]
        paths, shards = dataset.shard_paths, dataset.locate(np.arange(len(jpegs))).shard
    for at, data in bad.items():
        with open(paths[int(shards[at])], "r+b") as file:
            file.seek(int(offsets[at]))
            file.write(data.ljust(int(sizes[at]), b"\0")[: int(sizes[at])])
    return folder


@pytest.mark.parametrize("indexed", [True, False])
@pytest.mark.parametrize("batch", [1, 4, 30])
def test_bad_images_are_replaced_as_on_the_cpu(machine, tmp_path, photo_jpegs, feed, indexed, batch):
    jpegs = [photo_jpegs[number % 24] for number in range(30)]
    bad = {at: spoilt(jpegs[at], how) for at, how in zip((1, 2, 5, 6, 9, 13, 17, 22, 23, 24, 29), SPOILT, strict=True)}
    if indexed:
        folder = whole_then_damaged(tmp_path / "ds", jpegs, bad)
    else:
        pictures = [Picture(f"p/{at}", bad.get(at, jpeg), at) for at, jpeg in enumerate(jpegs)]
        folder = write_pictures(tmp_path / "ds", pictures)
    spec, steps = DecodeSpec(size=24, train=True, dtype="uint8", threads=2), steps_of(30, batch)
    with feed(folder, steps, on_bad="substitute") as given:
        expected = [(one.batch.ids, np.asarray(one.pixels)) for one in PillowDecoder(spec).decode(given.fetcher, 0)]
        reasons = dict(given.bad.by_key)
    with feed_device(machine, folder, steps, on_bad="substitute") as given:
        run = machine.decoder(spec, batch_size=batch).decode(given.fetcher, 0)
        found = []
        for one in run:
            found.append((one.batch.ids, as_arrays(one)))
            labels, ids = one.numbers
            assert labels.dtype == ids.dtype == np.int64
            assert labels.tolist() == one.batch.labels.tolist()  # the substitutes', too
            assert ids.tolist() == one.batch.ids.tolist()
        assert dict(given.bad.by_key) == reasons
    assert set(reasons) == {f"p/{at}" for at in bad}
    for (ids, pixels), (wanted_ids, wanted) in zip(found, expected, strict=True):
        assert ids.tolist() == wanted_ids.tolist()
        assert np.abs(pixels.astype(int) - wanted).max() <= 1


def test_a_bad_image_is_raised_with_its_name_after_the_batches_before_it(machine, tmp_path, photo_jpegs):
    bad = {5: spoilt(photo_jpegs[5], "a Huffman table that cannot be")}
    folder = whole_then_damaged(tmp_path / "ds", photo_jpegs[:12], bad)
    with feed_device(machine, folder, [[0, 1], [2], [5, 6], [7]], depth=4) as given:
        run = machine.decoder(DecodeSpec(size=16, train=False)).decode(given.fetcher, 0)
        assert [next(run).batch.step, next(run).batch.step] == [0, 1]
        with pytest.raises(FormatError, match=r"\[sample p/5\]"):
            next(run)
        given.fetcher.close()
        assert given.pool.lent_bytes == 0


def longer(jpeg, size):
    """The same image in a file of another size: comments fill it."""
    comments = b""
    while (left := size - len(jpeg) - len(comments)) > 0:
        length = min(left, 60_000) - 4 if left - 60_000 not in range(1, 4) else left // 2 - 4
        comments += b"\xff\xfe" + (length + 2).to_bytes(2, "big") + bytes(length)
    return jpeg[:2] + comments + jpeg[2:]


def test_an_image_of_another_size_than_the_index_says_never_reaches_an_engine(machine, tmp_path, photo_jpegs, decoded):
    """An engine writes as many pixels as the file says, over what lies behind its place."""
    larger = jpeg_bytes(np.tile(np.arange(16, dtype=np.uint8), (900, 75))[:, :, None].repeat(3, 2), quality=50)
    folder = whole_then_damaged(tmp_path / "ds", photo_jpegs[:6], {1: longer(larger, len(photo_jpegs[1]))})
    spec = DecodeSpec(size=32, train=True, dtype="uint8", threads=2)
    decoder = machine.decoder(spec)
    ((_, pixels),) = decode_all(machine, folder, decoder, [range(6)])
    assert decoder.counts == {"nvjpeg": 5, "pillow": 1}
    assert np.abs(pixels.astype(int) - decoded(folder, PillowDecoder(spec), [range(6)])[0]).max() <= 1


@pytest.mark.parametrize("limit", [1, 250_000])
def test_many_images_of_pillows_are_sent_in_groups(machine, tmp_path, photo_jpegs, decoded, limit, monkeypatch):
    monkeypatch.setattr(gpu_finish, "_GROUP_BYTES", limit)
    pixels = [np.asarray(Image.open(io.BytesIO(jpeg)))[: 120 + 9 * at, :200] for at, jpeg in enumerate(photo_jpegs[:8])]
    pictures = [Picture(f"p/{at}", jpeg_bytes(image, progressive=True), 0) for at, image in enumerate(pixels)]
    folder = write_pictures(tmp_path / "ds", pictures)
    spec = DecodeSpec(size=32, train=True, dtype="uint8", threads=2)
    ((_, found),) = decode_all(machine, folder, machine.decoder(spec), [range(8)])
    assert np.abs(found.astype(int) - decoded(folder, PillowDecoder(spec), [range(8)])[0]).max() <= 1


def brighter(images):
    from nvidia.dali import fn

    return fn.brightness(images, brightness_shift=0.1)


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("augment", [brighter, "randaugment"])
def test_a_graph_gets_the_same_squares_as_on_the_cpu(machine, mixed_folder, decoded, augment, train):
    spec = DecodeSpec(size=40, train=train, dtype="float32", threads=2, augment=augment, channels_last=train)
    steps = steps_of(32, 9)
    augmenter = partial(_augmenter, spec, machine.device)
    found = decode_all(machine, mixed_folder, machine.decoder(spec, batch_size=9, augmenter=augmenter), steps, epoch=2)
    expected = decoded(mixed_folder, DaliDecoder(spec, batch_size=9, resize=resize), steps, epoch=2)
    for (_, pixels), wanted in zip(found, expected, strict=True):
        distance = np.abs(in_255(pixels, spec) - in_255(wanted, spec))
        assert (distance > 2).mean() < (
            1e-9 if augment is brighter else 0.1
        )  # some operations, as equalising, spread one level
        assert distance.mean() < 1


def _augmenter(spec, device, epoch):
    return Augmenter(open_dali(), spec, batch_size=9, epoch=epoch, device=device, operators="cpu")


@pytest.mark.parametrize("train", [False, True])
def test_a_back_end_that_takes_host_memory_gives_the_same(machine, mixed_folder, tmp_path, decoded, feed, train):
    """DALI's, decoding on the processor."""
    spec = DecodeSpec(size=48, train=train, dtype="uint8", threads=2)
    steps = steps_of(32, 9)
    backend = DaliBackend(open_dali(), machine.device, batch_size=9, threads=2, decoder_device="cpu")
    decoder = GpuDecoder(spec, [backend], machine.device, machine.kernels, machine.allocate, batch_size=9)
    assert decoder.accepts == "host"
    with feed(mixed_folder, steps, epoch=3) as given:
        found = [(batch.batch.ids, as_arrays(batch)) for batch in decoder.decode(given.fetcher, 3)]
    expected = decoded(mixed_folder, PillowDecoder(spec), steps, epoch=3)
    for ids, (found_ids, pixels), wanted in zip(steps, found, expected, strict=True):
        assert found_ids.tolist() == ids.tolist()
        assert np.abs(pixels.astype(int) - wanted).max() <= 1
    assert decoder.counts == {"dali": 31, "pillow": 1}  # all but the PNG
    decoder.close()


def test_a_failed_batch_is_halved_until_its_bad_image_is_found(machine, tmp_path, photo_jpegs):
    bad = {5: spoilt(photo_jpegs[5], "a Huffman table that cannot be")}
    folder = whole_then_damaged(tmp_path / "ds", photo_jpegs[:16], bad)
    decoder = machine.decoder(DecodeSpec(size=16, train=False, threads=2))
    ((ids, _),) = decode_all(machine, folder, decoder, [range(16)], on_bad="substitute")
    assert 5 not in ids
    assert machine.engines.batches == [16, 8, 8, 4, 4, 2, 2, 1, 1, 15, 1]
    assert decoder.counts == {"nvjpeg": 16, "pillow": 0}


def test_what_only_the_engines_refuse_is_no_bad_image(machine, photo_folder, decoded, caplog):
    spec = DecodeSpec(size=32, train=True, dtype="uint8", threads=2)
    for _ in range(2 * 12 - 1):  # the batch and every part of it
        machine.engines.fail_next(6)
    decoder = machine.decoder(spec)
    found = decode_all(machine, photo_folder, decoder, [range(12), range(12, 24)], on_bad="raise")
    expected = decoded(photo_folder, PillowDecoder(spec), [range(12), range(12, 24)])
    assert all(np.abs(a[1].astype(int) - b).max() <= 1 for a, b in zip(found, expected, strict=True))
    assert decoder.counts == {"nvjpeg": 12, "pillow": 12}
    assert [record.getMessage()[:36] for record in caplog.records] == ["nvJPEG has decoded none of 12 images"]


def test_a_batch_that_fails_for_no_image_goes_to_pillow_whole(machine, photo_folder):
    machine.engines.fail_next(8)
    decoder = machine.decoder(DecodeSpec(size=16, train=False, threads=2))
    decode_all(machine, photo_folder, decoder, [range(12)])
    assert decoder.counts == {"nvjpeg": 0, "pillow": 12}


def ours():
    threads = {thread for thread in threading.enumerate() if thread.name.startswith("shardkit-")}
    return {thread for thread in threads if not thread.name.startswith(("shardkit-read", "shardkit-fetch"))}


FAILURES = ["decode", "fatal", "upload", "record", "download", "memory"]


@pytest.mark.parametrize("failure", FAILURES)
def test_a_gpu_that_fails_is_told_with_the_batchs_first_sample_and_all_ends(machine, photo_folder, failure):
    before = ours()
    decoder = machine.decoder(DecodeSpec(size=16, train=False, threads=2))
    with feed_device(machine, photo_folder, [[4, 5], [6, 7], [8, 9]]) as given:
        run = decoder.decode(given.fetcher, 0)
        time.sleep(0.3)  # all is read
        if failure == "decode":
            machine.engines.fail_next(DeviceError("a GPU failed an operation", found="it was told to"))
        elif failure == "fatal":
            machine.engines.fail_next(7)
        else:
            machine.device.fail_next(failure)
        with pytest.raises(Exception, match=r"told to|ARCH_MISMATCH") as caught:
            list(run)
        if isinstance(caught.value, DeviceError):
            assert caught.value.key == "p/4"
            assert caught.value.path.endswith("pictures-000000.tar")
        given.fetcher.close()
        assert given.pool.lent_bytes == 0
        assert ours() == before
    # The decoder goes on with the next epoch, although the error is still there.
    assert len(decode_all(machine, photo_folder, decoder, [[0, 1], [2]])) == 2
    assert all(backend._slabs.lent_bytes == 0 for backend in decoder._backends)
    decoder.close()


def test_after_an_error_behind_a_launch_the_gpu_is_through_before_memory_goes(machine, photo_folder):
    decoder = machine.decoder(DecodeSpec(size=16, train=False, threads=2))
    stream, real, waiting = decoder.stream, decoder.stream.record, []

    def fail(**_):
        waiting.append(stream.waiting)
        raise DeviceError("a GPU failed an operation", found="it was told to")

    stream.record = fail
    with feed_device(machine, photo_folder, [[4, 5]]) as given, pytest.raises(DeviceError, match="told to") as caught:
        list(decoder.decode(given.fetcher, 0))
    assert waiting[0] > 0
    assert stream.waiting == 0
    assert all(backend._slabs.lent_bytes == 0 for backend in decoder._backends), "the error keeps memory"
    assert caught.value.key == "p/4"
    stream.record = real
    assert len(decode_all(machine, photo_folder, decoder, [[0, 1]])) == 1


@pytest.mark.parametrize("failure", ["download", "record"])
def test_after_an_error_of_an_inspection_the_gpu_is_through_before_memory_goes(machine, photo_folder, failure):
    inspection = Inspection(machine.device, machine.kernels, machine.device.space, batch_size=4)
    places = np.arange(3)
    with feed_device(machine, photo_folder, [[4, 5, 6]]) as given:
        batch = given.fetcher.get(wait=True)
        for look in (
            lambda: inspection.taken(batch, places, facts_of(batch, places)),
            lambda: inspection.on_host(batch, places),
        ):
            look()
            machine.device.fail_next(failure)
            with pytest.raises(DeviceError, match="told to"):
                look()
            assert inspection._stream.waiting == 0
        batch.release()


def test_work_that_fails_after_its_batch_was_handed_over_is_told_at_the_end(machine, photo_folder):
    decoder = machine.decoder(DecodeSpec(size=16, train=False, threads=2))
    with feed_device(machine, photo_folder, [[4, 5]]) as given:
        time.sleep(0.3)

        def broken(*_):
            raise DeviceError("a GPU failed an operation", found="an illegal address")

        machine.kernels.inner.finish = broken
        run = decoder.decode(given.fetcher, 0)
        assert next(run).batch.ids.tolist() == [4, 5]
        with pytest.raises(DeviceError, match="an illegal address"):
            next(run)


def test_a_library_that_waits_for_a_lost_gpu_is_not_waited_for(photo_folder):
    machine, go, asked = HostMachine(), threading.Event(), threading.Event()
    decoder = machine.decoder(DecodeSpec(size=16, train=False, threads=2))

    def wait_without_end():
        asked.set()
        go.wait(30)
        raise DeviceError("a GPU failed an operation", found="told too late")

    decoder._backends[0].collect = wait_without_end
    with feed_device(machine, photo_folder, [[4, 5]]) as given:
        run = decoder.decode(given.fetcher, 0)
        threading.Thread(target=lambda: asked.wait(20) and setattr(machine.device, "lost", True), daemon=True).start()
        with pytest.raises(DeviceError, match="it is lost") as caught:
            next(run)
        assert caught.value.key == "p/4"
        run.close()
        (left,) = [thread for thread in threading.enumerate() if thread.name == "shardkit-decode-0"]
        go.set()
        left.join(20)
        decoder.close()
        del caught, run
        gc.collect()


def test_work_that_fails_late_is_told_in_the_name_of_its_batch_and_not_of_the_next(photo_folder):
    machine = HostMachine()  # one thread decodes, so that the first batch's work is the first
    decoder = machine.decoder(DecodeSpec(size=16, train=False, threads=2))
    with feed_device(machine, photo_folder, [[4, 5], [6]]) as given:
        waiting, finish = threading.Event(), machine.kernels.inner.finish

        def broken(*_):
            waiting.wait(10)  # the next batch is in the line, too
            raise DeviceError("a GPU failed an operation", found="an illegal address")

        machine.kernels.inner.finish = broken
        run = decoder.decode(given.fetcher, 0)
        first = next(run).batch
        waiting.set()
        with pytest.raises(DeviceError, match="an illegal address") as raised:
            next(run)
        machine.kernels.inner.finish = finish
        assert raised.value.key == first.key(0) != ""
        run.close()


def test_an_error_of_the_source_comes_after_the_batches_before_it(machine, photo_folder):
    with feed_device(machine, photo_folder, [[0], [1], [2], [3]], depth=4) as given:
        run = machine.decoder(DecodeSpec(size=16, train=False)).decode(Failing(given.fetcher, 3), 0)
        assert [next(run).batch.step for _ in range(3)] == [0, 1, 2]
        with pytest.raises(StorageError, match="no more"):
            next(run)
        assert list(run) == []
        while (left := given.fetcher.get(wait=True)) is not None:
            left.release()


class Failing:
    def __init__(self, source, after):
        self.source, self.left = source, after
        self.replace, self.check = source.replace, source.check

    def get(self, *, wait):
        if not self.left:
            raise StorageError("no more", path="/x")
        batch = self.source.get(wait=wait)
        self.left -= batch is not None
        return batch


@pytest.mark.parametrize("taken", [0, 1, 3])
def test_closing_in_the_middle_gives_all_back(machine, photo_folder, taken):
    before = ours()
    decoder = machine.decoder(DecodeSpec(size=16, train=True, threads=2))
    with feed_device(machine, photo_folder, [range(24)] * 9) as given:
        run = decoder.decode(given.fetcher, 0)
        for _ in range(taken):
            next(run)
        run.close()
        assert ours() == before
        given.fetcher.close()
        assert given.pool.lent_bytes == 0
    assert all(backend._slabs.lent_bytes == 0 for backend in decoder._backends)
    engines = weakref.ref(machine.engines)
    machine.engines = None
    decoder.close()
    decoder.close()
    assert engines() is None, "a closed decoder that is kept holds the library, and the GPU's memory that it has"
    del decoder, run
    assert machine.device.allocated_bytes == 0


def test_an_empty_batch_and_an_empty_epoch(machine, photo_folder):
    spec = DecodeSpec(size=16, train=True)
    assert decode_all(machine, photo_folder, machine.decoder(spec), []) == []
    found = decode_all(machine, photo_folder, machine.decoder(spec), [[], [3], []])
    assert [pixels.shape for _, pixels in found] == [(0, 3, 16, 16), (1, 3, 16, 16), (0, 3, 16, 16)]


def test_back_ends_decode_at_the_same_time(machine, photo_folder, decode_threads, monkeypatch):
    """Each call waits until as many are under way as there are threads, so that fewer would not get anywhere."""
    spec, together = DecodeSpec(size=16, train=True, dtype="uint8"), threading.Barrier(decode_threads, timeout=20)
    decode = machine.engines.decode

    def meeting(*given):
        together.wait()
        decode(*given)

    monkeypatch.setattr(machine.engines, "decode", meeting)
    steps = steps_of(24, 4)  # 6 batches: a multiple of the threads
    decoder = machine.decoder(spec, batch_size=4)
    found = decode_all(machine, photo_folder, decoder, steps, all_read=True)
    assert [ids.tolist() for ids, _ in found] == [step.tolist() for step in steps]
    assert len(machine.engines.threads) == decode_threads
    assert decoder.in_flight == decode_threads + 2


def recorded(work):
    """Do work; returns its spans, each with the name of its row."""
    tracer = tracing.start()
    try:
        work()
    finally:
        tracing.stop(tracer)
    events = tracer.events()
    rows = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    return [event | {"row": rows[event["tid"]]} for event in events if event["ph"] == "X"]


def test_a_trace_shows_what_the_device_did_for_each_step(photo_folder, decode_threads, monkeypatch):
    machine, together = HostMachine(lazy=False, decode_threads=decode_threads), threading.Barrier(decode_threads)
    decode = machine.engines.decode

    def slow(*given):
        together.wait(20)
        time.sleep(0.03)
        decode(*given)

    monkeypatch.setattr(machine.engines, "decode", slow)
    steps = steps_of(24, 4)
    decoder = machine.decoder(DecodeSpec(size=16, train=True), batch_size=4)
    spans = recorded(lambda: decode_all(machine, photo_folder, decoder, steps, all_read=True))
    device = [span for span in spans if span["cat"] == "device"]
    for row, name in (("copy", "copy"), ("inspect", "inspect"), ("decode", "decode"), ("finish", "kernel")):
        found = [span["args"]["step"] for span in device if (span["row"], span["name"]) == (row, name)]
        assert sorted(found) == list(range(6)), name
    with open_dataset(photo_folder) as dataset:
        sizes = np.asarray(dataset.columns["size"][:])
    decoding = [span for span in device if span["name"] == "decode"]
    assert {span["args"]["step"]: span["args"]["bytes"] for span in decoding} == {
        step: sizes[ids].sum() for step, ids in enumerate(steps)
    }
    assert len({span["tid"] for span in decoding}) == decode_threads  # a row a stream
    calls = {s["args"]["step"]: s for s in spans if (s["name"], s["cat"]) == ("decode", "host")}
    for span in decoding:
        call = calls[span["args"]["step"]]
        assert span["dur"] >= 30_000  # from before the call until it has returned
        assert call["ts"] - 1000 <= span["ts"] < call["ts"] + call["dur"]


def test_a_trace_shows_the_copies_of_images_that_pillow_has_decoded(machine, mixed_folder, mixed_jpegs):
    decoder = machine.decoder(DecodeSpec(size=16, train=True, threads=2))
    spans = recorded(lambda: decode_all(machine, mixed_folder, decoder, [np.arange(32)]))
    up = [span["args"] for span in spans if (span["row"], span["name"]) == ("finish", "copy")]
    down = [span["args"] for span in spans if span["name"] == "copy to the host"]
    assert sum(args["bytes"] for args in up) == 3 * 150 * 211 * BY_PILLOW
    assert {args["step"] for args in up + down} == {0}
    assert sum(args["bytes"] for args in down) == sum(len(mixed_jpegs[at]) for at in (9, 10, 11, 17))


def test_what_a_decoder_takes_of_the_device_is_told(machine, photo_folder, decode_threads):
    decoder = machine.decoder(DecodeSpec(size=16, train=True), budget_bytes=8 << 20)
    assert decoder.device_bytes == machine.device.allocated_bytes == decode_threads * 8 << 20
    with feed_device(machine, photo_folder, [range(12)]) as given:
        read_into = machine.device.allocated_bytes - (decode_threads * 8 << 20)
        run = decoder.decode(given.fetcher, 0)
        batch = next(run)
        handed_over = batch.pixels.nbytes + sum(numbers.nbytes for numbers in batch.numbers)
        assert decoder.device_bytes == machine.device.allocated_bytes - read_into - handed_over
        run.close()


def test_a_batch_is_its_consumers_alone(machine, photo_folder):
    """What a decoder still held would go in the middle of the next call, and take its memory till then."""
    decoder, count = machine.decoder(DecodeSpec(size=16, train=True)), 0
    with feed_device(machine, photo_folder, [range(12)] * 3) as given:
        for batch in decoder.decode(given.fetcher, 0):
            batch.ready.wait()
            kept = [weakref.ref(array) for array in (batch.pixels, *batch.numbers)]
            del batch
            end = time.monotonic() + 5  # the finishing thread lets go a moment later
            while any(one() is not None for one in kept):
                assert time.monotonic() < end
                time.sleep(0.001)
            count += 1
    assert count == 3


def test_the_consumer_never_waits_for_the_device(machine, photo_folder):
    """Neither an event nor a stream is waited for in its thread."""
    waits = []
    with feed_device(machine, photo_folder, [range(12)] * 6) as given:
        meet = machine.device.meet
        machine.device.meet = lambda call: (waits.append((call, threading.current_thread().name)), meet(call))[1]
        for _ in machine.decoder(DecodeSpec(size=16, train=True)).decode(given.fetcher, 0):
            waits.append(("batch", ""))
        machine.device.meet = meet
    last = len(waits) - waits[::-1].index(("batch", ""))
    main = threading.main_thread().name
    assert not [call for call, name in waits[:last] if name == main and call in {"wait", "done", "synchronize"}]


def test_a_substitute_that_is_never_read_is_an_error_and_its_thread_is_left_behind(machine, one_bad):
    decoder = machine.decoder(DecodeSpec(size=16, train=False))
    with feed_device(machine, one_bad, [range(4), range(4, 8), range(8, 12)], on_bad="substitute") as given:
        source, before = HangingSource(given.fetcher), ours()
        run = decoder.decode(source, 0)
        started = time.monotonic()
        with pytest.raises(StorageError, match="/x:7"):
            next(run)
        assert time.monotonic() - started < 5
        (left,) = ours() - before
        assert left.daemon
        source.let_go.set()
        left.join(10)
        assert not left.is_alive()
        given.fetcher.close()
        assert given.pool.lent_bytes == 0


def interrupt_when(condition, after):
    """Send Ctrl-C to the main thread, once."""

    def run():
        end = time.monotonic() + 20
        while not condition() and time.monotonic() < end:
            time.sleep(0.01)
        time.sleep(after)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # of one that meets a finaliser
@pytest.mark.parametrize("late", [False, True])
def test_ctrl_c_skips_no_step(machine, one_bad, late):
    """While a batch is waited for, or while the end is."""
    decoder = machine.decoder(DecodeSpec(size=16, train=False))
    with feed_device(machine, one_bad, [range(4), range(4, 8), range(8, 12)], on_bad="substitute") as given:
        source, before = HangingSource(given.fetcher), ours()
        run = decoder.decode(source, 0)
        thread = interrupt_when(lambda: source.checks == 2 if late else source.inside.is_set(), after=0.15)
        with pytest.raises(KeyboardInterrupt):
            next(run)
        thread.join()
        assert len(ours() - before) <= 1
        source.let_go.set()
        for left in ours() - before:
            left.join(10)
        assert ours() == before
        given.fetcher.close()
        assert given.pool.lent_bytes == 0


BUSY = """
import sys
sys.path[:0] = sys.argv[3:]
from test_gpu_line import HostMachine, feed_device
from shardkit.pipeline.decoder import DecodeSpec
machine = HostMachine()
feeding = feed_device(machine, sys.argv[2], [range(12)] * 1000)
given = feeding.__enter__()
run = machine.decoder(DecodeSpec(size=64, train=True), budget_bytes=int(sys.argv[1])).decode(given.fetcher, 0)
next(run)
print("working", flush=True)
"""


@pytest.mark.parametrize("budget_bytes", [64 << 20, 1 << 20])
def test_a_process_that_ends_while_it_decodes_does_not_crash(photo_folder, budget_bytes):
    """Nor does it hang where a job waits for memory that jobs before it have."""
    command = [sys.executable, "-c", BUSY, str(budget_bytes), str(photo_folder), os.path.dirname(__file__), *sys.path]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout) == (0, "working\n"), done.stderr[-2000:]


def test_payloads_that_a_back_end_still_looks_at_do_not_stop_the_reading(machine, mixed_folder, monkeypatch):
    """DALI's graph keeps its last input until the next one; here there is memory for one batch, and no next one."""
    decoder, kept = machine.decoder(DecodeSpec(size=16, train=False, dtype="uint8", threads=2)), []
    backend = decoder._backends[0]
    start = backend.start

    def starting(job):
        kept[:] = [job.views[:]]
        start(job)

    monkeypatch.setattr(backend, "start", starting)
    monkeypatch.setattr(backend, "rest", kept.clear)
    dataset = open_dataset(mixed_folder)
    largest = int(np.max([dataset.columns["size"][at] for at in range(len(dataset))]))
    dataset.close()
    steps = [[at] for at in range(SPECIAL, SPECIAL + 14)]
    found = decode_all(machine, mixed_folder, decoder, steps, pool_bytes=largest + 8192)
    assert [ids.tolist() for ids, _ in found] == steps
    assert kept == []
    decoder.close()
