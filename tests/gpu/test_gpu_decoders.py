"""Decoders on a real GPU: the same samples and pixels as Pillow's, and nothing that depends on what ran before."""

from __future__ import annotations

import ctypes
import io
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from shardkit.dataset.arrangement import open_samples
from shardkit.dataset.bad import BadSamples
from shardkit.dataset.fetch import Fetcher
from shardkit.dataset.order import StoredOrder
from shardkit.dataset.reading import SampleReader
from shardkit.dataset.source import BatchReading, SampleSource, Step
from shardkit.errors import CapabilityError
from shardkit.pipeline.cpu import PillowDecoder
from shardkit.pipeline.dali import DaliDecoder, open_dali
from shardkit.pipeline.dali_augmenter import Augmenter
from shardkit.pipeline.dali_mixed import DaliBackend
from shardkit.pipeline.decoder import DecodeSpec
from shardkit.pipeline.gpu_decoder import GpuDecoder
from shardkit.pipeline.nvjpeg import NvjpegBackend, slab_budget
from shardkit.pipeline.nvjpeg_library import DESTINATION, open_nvjpeg
from shardkit.storage.backends import open_reader
from shardkit.storage.buffers import BufferPool
from shardkit.storage.reader import HOST, address_of
from shardkit.storage.staged import StagedReader
from shardkit.testing.images import Picture, jpeg_bytes, spoilt, write_pictures
from shardkit.testing.photos import photo_file

pytestmark = pytest.mark.gpu

COUNT, SPECIAL, BY_PILLOW = 96, 18, 5
QUARTER = (Path(__file__).parents[1] / "golden" / "jpeg" / "4-1-1.jpg").read_bytes()
POISON = 0xA5


def fill(device, address, nbytes):
    """Fill device memory with poison, and wait until it is."""
    poison, stream = np.full(nbytes, POISON, np.uint8), device.stream()
    stream.upload(address, poison.ctypes.data, nbytes)
    stream.synchronize()


class Poisoned:
    """nvJPEG, but the place of every image is full of poison before it is decoded."""

    def __init__(self, library, device):
        self.library, self.device = library, device

    def decode(self, addresses, sizes, destinations, stream):
        first, last = destinations["channel"][:, 0].min(), destinations["channel"][:, 0].max()
        fill(self.device, int(first), int(last - first) + int(destinations["pitch"][:, 0].min()))
        self.library.decode(addresses, sizes, destinations, stream)


class OnDevice:
    """A `DeviceArray` whose pixels are their own address: the host copies them when it looks."""

    def __init__(self, device, shape, dtype):
        self.device, self.shape, self.dtype = device, shape, np.dtype(dtype)
        self.memory = device.memory(int(np.prod(shape)) * self.dtype.itemsize)
        self.address, self.pixels = address_of(self.memory), self
        fill(device, self.address, self.memory.nbytes)

    def split(self, shapes):
        ends = np.cumsum([int(np.prod(shape)) for shape in shapes]).tolist()
        return [(self, end - int(np.prod(shape)), shape) for shape, end in zip(shapes, ends, strict=True)]

    def on_host(self):
        array = np.empty(self.shape, self.dtype)
        if array.nbytes:
            stream = self.device.stream()
            stream.download(array.ctypes.data, self.address, array.nbytes)
            stream.synchronize()
        return array


def looked_at(batch):
    batch.ready.wait()
    if not isinstance(batch.pixels, list):
        return batch.pixels.on_host()
    return [whole.on_host()[start : start + int(np.prod(shape))].reshape(shape) for whole, start, shape in batch.pixels]


def special(pixels):
    found = [jpeg_bytes(pixels, orientation=number) for number in range(1, 9)]
    return [
        *found, jpeg_bytes(pixels[:, :, 0]), jpeg_bytes(pixels, restart_marker_rows=1), jpeg_bytes(pixels[:1, :1]),
        jpeg_bytes(pixels, subsampling=1), jpeg_bytes(pixels, subsampling=0), jpeg_bytes(pixels, progressive=True),
        jpeg_bytes(pixels, progressive=True, orientation=8), jpeg_bytes(Image.fromarray(pixels).convert("CMYK")),
        QUARTER, png(pixels),
    ]  # fmt: skip


def png(pixels):
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


@pytest.fixture(scope="session")
def jpegs(photographs):
    photos = [photo_file(photographs, number, classes=5).data for number in range(COUNT - SPECIAL)]
    return special(np.asarray(Image.open(io.BytesIO(photos[0])).convert("RGB"))[:150, :211]) + photos


@pytest.fixture(scope="session")
def folder(tmp_path_factory, jpegs):
    pictures = [Picture(f"m/{at}", jpeg, at % 5) for at, jpeg in enumerate(jpegs)]
    return write_pictures(tmp_path_factory.mktemp("gpu") / "ds", pictures)


@pytest.fixture(params=["nvjpeg", "dali"])
def name(request):
    return request.param


@pytest.fixture
def make(device, kernels, name):
    """A function that makes a decoder."""
    made = []

    def new(spec, folder, batch_size=32, *, poisoned=False):
        allocate = lambda shape, dtype: OnDevice(device, shape, dtype)  # noqa: E731
        options = {}
        if name == "nvjpeg":
            try:
                library = open_nvjpeg(device)
            except CapabilityError as error:
                pytest.skip(str(error))
            samples = open_samples([folder])
            library = Poisoned(library, device) if poisoned else library
            backend = NvjpegBackend(library, device, budget_bytes=slab_budget(samples, batch_size))
            samples.close()
            options["shares"] = backend.shares
        else:
            backend = DaliBackend(open_dali(), device, batch_size=batch_size, threads=4)
        if spec.recipe.graph:
            options["augmenter"] = lambda epoch: Augmenter(
                open_dali(), spec, batch_size=batch_size, epoch=epoch, device=device
            )
        made.append(GpuDecoder(spec, [backend], device, kernels, allocate, batch_size=batch_size, **options))
        return made[-1]

    yield new
    for decoder in made:
        decoder.close()


def all_came_back(pool):
    """DALI lets go of its last input a moment after it has given its output."""
    end = time.monotonic() + 2
    while pool.lent_bytes and time.monotonic() < end:
        time.sleep(0.01)
    return not pool.lent_bytes


def run(folder, decoder, steps, *, device=None, epoch=0, on_bad="raise", look=looked_at):
    """Decode steps; returns ids and pixels of each, and why samples were bad."""
    samples = open_samples([folder])
    reader, _ = open_reader("buffered", samples.shard_paths)
    memory = None
    if decoder.accepts != HOST:
        reader, memory = StagedReader(reader, device, ring_bytes=16 << 20), device.memory
    with BufferPool(256 << 20, align=reader.align, memory=memory) as pool:
        bad = BadSamples(samples, on_bad)
        on = device if memory is not None else None
        source = SampleSource(
            SampleReader(samples, reader, inspect=False, device=on), StoredOrder(len(samples)), bad, seed=0
        )
        numbered = (Step(epoch, step, np.asarray(ids, np.int64)) for step, ids in enumerate(steps))
        fetcher = Fetcher(BatchReading(source, pool), numbered, depth=3, replace=source.replace, oldest=reader.oldest)
        decoding = decoder.decode(fetcher, epoch)
        try:
            return [(batch.batch.ids, look(batch)) for batch in decoding], dict(bad.by_key)
        finally:
            decoding.close()
            fetcher.close()
            assert all_came_back(pool)
            reader.close()
            samples.close()


def on_cpu(folder, spec, steps, **options):
    return run(folder, PillowDecoder(spec), steps, look=lambda batch: batch.pixels, **options)


def in_255(pixels, spec):
    shape = (-1,) if spec.channels_last else (-1, 1, 1)
    mean, std = (np.asarray(a, np.float64).reshape(shape) for a in (spec.mean, spec.std))
    return pixels.astype(np.float64) * std + mean if spec.dtype != "uint8" else pixels.astype(np.float64)


STEPS = [np.arange(COUNT)[::-1][at : at + 32] for at in range(0, COUNT, 32)]


@pytest.mark.parametrize("other", [PillowDecoder, lambda spec: DaliDecoder(spec, batch_size=32)])
@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("options", [{"dtype": "uint8"}, {"dtype": "float16", "channels_last": True}, {}])
def test_samples_and_pixels_are_those_of_the_cpu(device, make, name, folder, train, options, other):
    """nvJPEG's colour upsampling is another one than libjpeg's: up to 27 of 255 at an edge, under 1 on average."""
    spec = DecodeSpec(size=96, train=train, threads=4, **options)
    decoder = make(spec, folder)
    found, _ = run(folder, decoder, STEPS, device=device, epoch=3)
    expected, _ = run(folder, other(spec), STEPS, epoch=3, look=lambda batch: batch.pixels)
    for ids, (found_ids, pixels), (_, wanted) in zip(STEPS, found, expected, strict=True):
        assert found_ids.tolist() == ids.tolist()
        distance = np.abs(in_255(pixels, spec) - in_255(wanted, spec)).reshape(len(ids), -1)
        assert distance.max() <= 40, ids[distance.max(1) > 40]
        assert distance.mean(1).max() < 2.5, ids[distance.mean(1) >= 2.5]
        assert distance.mean() < 1
    by_pillow = BY_PILLOW if name == "nvjpeg" else 1  # the PNG
    assert decoder.counts == {name: COUNT - by_pillow, "pillow": by_pillow}


def test_whole_images_have_the_shapes_of_the_files(device, make, folder):
    spec = DecodeSpec(size=1, train=True, augment="none", threads=4)
    found, _ = run(folder, make(spec, folder), STEPS, device=device)
    expected, _ = on_cpu(folder, spec, STEPS)
    for (_, images), (_, wanted) in zip(found, expected, strict=True):
        assert [image.shape for image in images] == [image.shape for image in wanted]
        assert all(np.abs(a.astype(int) - b).mean() < 2.5 for a, b in zip(images, wanted, strict=True))


@pytest.mark.parametrize("augment", ["randaugment", lambda images: images])
def test_a_graph_works_on_the_squares(device, make, folder, augment):
    spec = DecodeSpec(size=64, train=True, dtype="uint8", augment=augment, threads=4)
    found, _ = run(folder, make(spec, folder), STEPS, device=device)
    assert [pixels.shape for _, pixels in found] == [(32, 3, 64, 64)] * 3
    if augment != "randaugment":
        plain = DecodeSpec(size=64, train=True, dtype="uint8", threads=4)
        expected, _ = run(folder, make(plain, folder), STEPS, device=device)
        assert all(np.array_equal(a[1], b[1]) for a, b in zip(found, expected, strict=True))


def test_damage_that_only_decoding_finds_costs_one_image(device, make, tmp_path, jpegs):
    jpegs = list(jpegs[SPECIAL : SPECIAL + 32])
    for at in (3, 17, 18):
        jpegs[at] = spoilt(jpegs[at], "a Huffman table that cannot be")
    folder = write_pictures(tmp_path / "ds", [Picture(f"p/{at}", jpeg, 0) for at, jpeg in enumerate(jpegs)])
    spec = DecodeSpec(size=64, train=True, dtype="uint8", threads=4)
    ((ids, _),), bad = run(folder, make(spec, folder), [range(32)], device=device, on_bad="substitute")
    assert set(bad) == {"p/3", "p/17", "p/18"}
    assert not {3, 17, 18} & set(ids.tolist())


def test_an_image_without_its_end_is_the_same_to_everybody(device, make, tmp_path, jpegs):
    """Of photographs whose facts are known, one ends before its end, and two end in what is not theirs."""
    jpegs = list(jpegs[SPECIAL : SPECIAL + 32])
    for at, tail in ((3, b""), (17, bytes(10)), (30, b"\xff")):
        jpegs[at] = jpegs[at][:-2] + tail
    pictures = [Picture(f"p/{at}", jpeg, 0) for at, jpeg in enumerate(jpegs)]
    folder = write_pictures(tmp_path / "ds", pictures, strict=False)
    spec = DecodeSpec(size=64, train=True, dtype="uint8", threads=4)
    given = {"on_bad": "substitute", "epoch": 1}
    ((ids, pixels),), bad = run(folder, make(spec, folder), [range(32)], device=device, **given)
    ((wanted_ids, wanted),), wanted_bad = on_cpu(folder, spec, [range(32)], **given)
    assert (ids.tolist(), set(bad)) == (wanted_ids.tolist(), set(wanted_bad))
    assert np.abs(pixels.astype(int) - wanted).mean() < 1


def test_results_do_not_depend_on_what_is_in_flight(device, make, folder, request):
    """2,000 batches into memory that is used over and over, and poisoned: engines do not keep the order of streams."""
    spec = DecodeSpec(size=32, train=False, dtype="uint8", threads=4)
    batches = 2000
    rng = np.random.default_rng(0)
    steps = [rng.choice(np.arange(SPECIAL, COUNT), 16, replace=False) for _ in range(batches)]
    alone, _ = run(folder, make(spec, folder, 1), [[at] for at in range(COUNT)], device=device)
    sums = np.array([int(pixels.astype(np.int64).sum()) for _, pixels in alone])
    look = lambda batch: looked_at(batch).astype(np.int64).sum((1, 2, 3))  # noqa: E731
    found, _ = run(folder, make(spec, folder, 16, poisoned=True), steps, device=device, look=look)
    wrong = [step for step, (ids, (_, got)) in enumerate(zip(steps, found, strict=True)) if (got != sums[ids]).any()]
    assert wrong == []


@pytest.mark.parametrize("sampling", [0, 1, 2])
@pytest.mark.parametrize("sides", [(17, 33), (1, 1), (8, 8), (15, 100), (250, 3)])
def test_an_engine_writes_no_byte_outside_of_its_image(device, sampling, sides):
    """What `plan_slab` relies on; the bytes behind each row are part of it."""
    try:
        library = open_nvjpeg(device)
    except CapabilityError as error:
        pytest.skip(str(error))
    height, width = sides
    jpeg = jpeg_bytes(np.random.default_rng(0).integers(0, 255, (height, width, 3), np.uint8), subsampling=sampling)
    stream, encoded = device.stream(), device.memory(len(jpeg))
    pitch = -(-3 * width // 32) * 32
    poison = np.full((height + 64) * pitch, 0xA5, np.uint8)
    slab = device.memory(poison.nbytes)
    kept = ctypes.create_string_buffer(jpeg, len(jpeg))
    stream.upload(address_of(encoded), ctypes.addressof(kept), len(jpeg))
    stream.upload(address_of(slab), poison.ctypes.data, poison.nbytes)
    stream.synchronize()
    destination = np.zeros(1, DESTINATION)
    destination["channel"][0, 0], destination["pitch"][0, 0] = address_of(slab) + 16 * pitch, pitch
    library.decode(np.array([address_of(encoded)], np.uint64), np.array([len(jpeg)], np.uint64), destination, stream)
    stream.download(poison.ctypes.data, address_of(slab), poison.nbytes)
    stream.synchronize()
    rows = poison.reshape(-1, pitch)
    assert (rows[:16] == 0xA5).all(), "before it"
    assert (rows[16 + height :] == 0xA5).all(), f"below: {np.flatnonzero((rows[16 + height :] != 0xA5).any(1)).max()}"
    assert (rows[16 : 16 + height, 3 * width :] == 0xA5).all(), "beside it"
