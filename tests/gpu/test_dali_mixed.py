"""DALI's mixed decoder and its augmenter on a real GPU."""

from __future__ import annotations

import io
import threading

import numpy as np
import pytest
from PIL import Image, ImageOps

from shardkit.errors import ConfigError
from shardkit.pipeline.augment import RANDAUGMENT
from shardkit.pipeline.dali_augmenter import Augmenter
from shardkit.pipeline.dali_mixed import DaliBackend
from shardkit.pipeline.decoder import DecodeSpec
from shardkit.pipeline.gpu_backend import Job, Undecodable
from shardkit.storage.buffers import aligned_memory
from shardkit.storage.reader import address_of
from shardkit.testing.images import corners, jpeg_bytes

pytestmark = pytest.mark.gpu

MB = 1 << 20


@pytest.fixture(scope="module")
def dali(device):
    pytest.importorskip("nvidia.dali")
    from shardkit.pipeline.dali import open_dali

    return open_dali()


@pytest.fixture
def make_backend(dali, device):
    made = []

    def make(batch_size=64, **options):
        made.append(DaliBackend(dali, device, batch_size=batch_size, threads=4, **options))
        return made[-1]

    yield make
    for backend in made:
        backend.close()


def photo(number, width, height):
    """Smooth, with some detail: as easy to compare as a photograph."""
    rng = np.random.default_rng(number)
    small = Image.fromarray(rng.integers(0, 256, (height // 40 + 2, width // 40 + 2, 3), np.uint8))
    image = np.asarray(small.resize((width, height), Image.Resampling.BICUBIC)).astype(int)
    return np.clip(image + rng.integers(-6, 7, image.shape), 0, 255).astype(np.uint8)


JPEGS = [
    jpeg_bytes(photo(number, 333 + 17 * number, 250 + 11 * (number % 7)), subsampling=(2, 2, 1, 0)[number % 4])
    for number in range(24)
]
GOOD = JPEGS[0]
UNREADABLE = bytearray(GOOD)
UNREADABLE[GOOD.index(b"\xff\xda") + 6] = 0xFF  # Huffman tables that there are none of


def payloads(jpegs, memory=None):
    """Return them one behind the other, in memory that may be pinned."""
    sizes = [len(jpeg) for jpeg in jpegs]
    memory = aligned_memory(max(sum(sizes), 1), 4096) if memory is None else memory
    whole, ends = np.frombuffer(memory, np.uint8), np.cumsum(sizes)
    views = [whole[end - size : end] for size, end in zip(sizes, ends, strict=True)]
    for view, jpeg in zip(views, jpegs, strict=True):
        view[:] = np.frombuffer(jpeg, np.uint8)
    return views


def job_of(jpegs, memory=None):
    views = payloads(jpegs, memory)
    unknown = np.zeros(len(views), np.int64)
    sizes = np.array([view.size for view in views], np.int64)
    return Job(views, np.array([view.ctypes.data for view in views], np.int64), sizes, unknown, unknown, unknown)


def to_device(device, array):
    memory, stream = device.memory(array.nbytes), device.stream()
    stream.upload(address_of(memory), array.ctypes.data, array.nbytes)
    stream.synchronize()
    return memory


def from_device(device, address, shape, dtype="uint8"):
    array, stream = np.empty(shape, dtype), device.stream()
    stream.download(array.ctypes.data, int(address), array.nbytes)
    stream.synchronize()
    return array


def images_of(device, decoded):
    pitches = zip(decoded.addresses, decoded.pitch, decoded.width, decoded.height, strict=True)
    return [from_device(device, at, (h, pitch))[:, : 3 * w].reshape(h, w, 3) for at, pitch, w, h in pitches]


def shown(jpeg):
    return np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(jpeg))).convert("RGB"))


def assert_shows(images, jpegs):
    for image, jpeg in zip(images, jpegs, strict=True):
        expected = shown(jpeg)
        assert image.shape == expected.shape
        assert (
            np.abs(image.astype(int) - expected).mean() < 4
        )  # chroma is upsampled in another way; these pictures are all edges


@pytest.mark.parametrize("load", [0.0, 0.65, 1.0])
def test_images_are_those_that_pillow_shows(make_backend, device, load):
    backend = make_backend(hw_decoder_load=load, largest=(724, 316))
    backend.start(job_of(JPEGS))
    decoded = backend.collect()
    assert decoded.orientation.tolist() == [1] * len(JPEGS)
    assert_shows(images_of(device, decoded), JPEGS)


def test_they_lie_in_one_piece_so_that_addresses_cost_nothing(make_backend):
    backend = make_backend()
    backend.start(job_of(JPEGS))
    decoded = backend.collect()
    sizes, images = decoded.pitch * decoded.height, decoded.memory._images
    assert decoded.addresses.tolist() == (images.data_ptr() + np.cumsum(sizes) - sizes).tolist()
    assert decoded.addresses.tolist() == [images[number].data_ptr() for number in range(len(JPEGS))]


@pytest.mark.parametrize("orientation", range(1, 9))
def test_orientation_is_applied(make_backend, device, orientation):
    jpeg = jpeg_bytes(photo(1, 120, 80), orientation=orientation)
    backend = make_backend()
    backend.start(job_of([jpeg, GOOD]))
    assert_shows(images_of(device, backend.collect()), [jpeg, GOOD])


@pytest.mark.parametrize("kind", ["gray", "progressive", "restart markers", "one pixel"])
def test_every_kind_becomes_rgb(make_backend, device, kind):
    jpeg = {
        "gray": lambda: jpeg_bytes(Image.fromarray(photo(2, 90, 60)).convert("L")),
        "progressive": lambda: jpeg_bytes(photo(3, 90, 60), progressive=True),
        "restart markers": lambda: jpeg_bytes(photo(4, 90, 60), restart_marker_rows=1),
        "one pixel": lambda: jpeg_bytes(corners(2)[:1, :1]),
    }[kind]()
    backend = make_backend()
    backend.start(job_of([GOOD, jpeg]))
    assert_shows(images_of(device, backend.collect()), [GOOD, jpeg])


@pytest.mark.parametrize("pinned", [False, True])
def test_jobs_in_flight_keep_their_order_and_let_go_of_their_payloads(make_backend, device, pinned):
    """Payloads are overwritten as soon as a job is collected, while the next one is decoded."""
    backend = make_backend(pinned=pinned)
    memories = [aligned_memory(4 * MB, 4096) for _ in range(backend.depth)]
    if pinned:
        for memory in memories:
            device.pin(memory)
    expected, waiting = {}, []

    def collect():
        decoded, (first, memory) = backend.collect(), waiting.pop(0)
        np.frombuffer(memory, np.uint8)[:] = 0x5A
        sums = [int(image.sum(dtype=np.int64)) for image in images_of(device, decoded)]
        assert sums == expected.setdefault(first, sums)
        memories.append(memory)

    for number in range(150):
        first = number % 5
        memory = memories.pop(0)
        backend.start(job_of(JPEGS[first : first + 3 + first * 2], memory))
        waiting.append((first, memory))
        if len(waiting) == backend.depth:
            collect()
    while waiting:
        collect()
    assert len(expected) == 5
    backend.start(job_of(JPEGS[:3]))
    images = images_of(device, backend.collect())
    assert_shows(images, JPEGS[:3])
    assert [int(image.sum(dtype=np.int64)) for image in images] == expected[0]


@pytest.mark.parametrize("pinned", [False, True])
def test_it_goes_on_after_any_number_of_failures(make_backend, device, pinned):
    backend = make_backend(pinned=pinned)
    memory = aligned_memory(4 * MB, 4096)
    if pinned:
        device.pin(memory)
    for _ in range(20):
        backend.start(job_of([GOOD, UNREADABLE, GOOD], memory))
        with pytest.raises(Undecodable) as caught:
            backend.collect()
        assert 1 in caught.value.bad
        assert backend._given_up == []
    backend.start(job_of(JPEGS, memory))
    assert_shows(images_of(device, backend.collect()), JPEGS)


def test_pixels_stay_while_their_memory_is_held(make_backend, device):
    backend, kept = make_backend(), []
    for number in range(30):
        backend.start(job_of(JPEGS[number % 8 : number % 8 + 8]))
        decoded = backend.collect()
        if number % 5 == 0:
            kept.append((decoded, number % 8))
    for decoded, first in kept:
        assert_shows(images_of(device, decoded), JPEGS[first : first + 8])


def test_the_gpus_memory_does_not_fill_up(make_backend, device):
    backend, job = make_backend(), job_of(JPEGS)
    for number in range(220):
        backend.start(job)
        backend.collect()
        if number == 20:
            before = device.free_bytes
    assert before - device.free_bytes <= 64 * MB  # a job makes 10


@pytest.mark.parametrize("started", [1, 2])
def test_closing_in_the_middle(make_backend, started):
    backend, before = make_backend(), threading.active_count()
    for _ in range(started):
        backend.start(job_of(JPEGS))
    backend.close()
    backend.close()
    assert threading.active_count() <= before


def squares_of(count, size, seed=0):
    return np.stack([photo(seed + number, size, size) for number in range(count)])


def augmented_by(device, dali, operators, spec, squares, mirror, ids=None):
    augmenter = Augmenter(dali, spec, batch_size=len(squares), epoch=2, device=device, operators=operators)
    memory = to_device(device, squares)
    ids = np.arange(len(squares)) if ids is None else ids
    made = augmenter.augmented_on_device(address_of(memory), ids, 2, mirror)
    size = spec.size
    shape = (len(squares), size, size, 3) if spec.channels_last else (len(squares), 3, size, size)
    return from_device(device, made.address, shape, spec.dtype)


def invert(images):
    return 255 - images


def brighten(images):
    from nvidia.dali import fn

    return fn.brightness_contrast(images, brightness=1.2, contrast=0.8)


def turn_over(images):
    from nvidia.dali import fn

    return fn.flip(images, horizontal=0, vertical=1)


@pytest.mark.parametrize("function", [invert, brighten, turn_over])
@pytest.mark.parametrize("channels_last", [False, True])
def test_a_function_does_on_the_gpu_what_it_does_on_the_cpu(device, dali, function, channels_last):
    spec = DecodeSpec(size=96, train=True, dtype="uint8", channels_last=channels_last, augment=function)
    squares, mirror = squares_of(16, 96), np.arange(16, dtype=np.int32) % 2
    by_gpu, by_cpu = (augmented_by(device, dali, where, spec, squares, mirror) for where in ("gpu", "cpu"))
    assert np.abs(by_gpu.astype(int) - by_cpu).max() <= 1
    assert np.abs(by_gpu[0].astype(int) - by_gpu[1]).max() > 10


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("train", [False, True])
def test_values_are_normalised_and_mirrored(device, dali, dtype, train):
    spec = DecodeSpec(size=64, train=train, dtype=dtype, mean=(10, 20, 30), std=(20, 30, 40), augment=invert)
    squares, mirror = squares_of(6, 64), np.array([0, 1, 1, 0, 1, 0], np.int32)
    pixels = augmented_by(device, dali, "gpu", spec, squares, mirror if train else None)
    turned = 255 - squares.astype(float)
    if train:
        turned[mirror == 1] = turned[mirror == 1][:, :, ::-1]
    expected = ((turned - (10, 20, 30)) / (20, 30, 40)).transpose(0, 3, 1, 2)
    assert np.abs(pixels - expected).max() < 0.02


def test_randaugment_chooses_alike_on_the_gpu(device, dali):
    """Each image gets its two operations; rounding and interpolation differ a little between CPU and GPU."""
    spec = DecodeSpec(size=96, train=True, dtype="uint8", channels_last=True, seed=3, augment="randaugment")
    squares, mirror = squares_of(64, 96), np.zeros(64, np.int32)
    by_gpu, by_cpu = (augmented_by(device, dali, where, spec, squares, mirror).astype(int) for where in ("gpu", "cpu"))
    difference = np.abs(by_gpu - by_cpu).mean(axis=(1, 2, 3))
    assert np.median(difference) < 1
    assert difference.max() < 6
    done = np.abs(by_gpu - squares).mean(axis=(1, 2, 3))
    assert (done > 6).sum() > 30  # the bound above tells operations apart
    assert RANDAUGMENT.operations == 2


def test_randaugment_on_the_gpu_is_the_samples_own(device, dali):
    spec = DecodeSpec(size=64, train=True, dtype="uint8", seed=3, augment="randaugment")
    squares, mirror = squares_of(12, 64), np.arange(12, dtype=np.int32) % 2
    whole = augmented_by(device, dali, "gpu", spec, squares, mirror)
    some = np.array([11, 2, 7])
    part = augmented_by(device, dali, "gpu", spec, squares[some], mirror[some], ids=some)
    assert np.array_equal(part, whole[some])


@pytest.mark.parametrize("augment", ["randaugment", brighten])
def test_two_hundred_batches_do_not_fill_the_gpu_and_keep_their_pixels(device, dali, augment):
    """Squares are overwritten when a batch is there, results are looked at when others came after them."""
    spec = DecodeSpec(size=64, train=True, dtype="float16", channels_last=True, augment=augment)
    augmenter = Augmenter(dali, spec, batch_size=32, epoch=0, device=device)
    squares, mirror = squares_of(32, 64), np.arange(32, dtype=np.int32) % 2
    memory, rubbish, stream = device.memory(squares.nbytes), np.full_like(squares, 0x5A), device.stream()
    expected, made = None, []
    for number in range(200):
        count = 32 if number % 3 == 0 else 1 + number % 31
        stream.upload(address_of(memory), squares.ctypes.data, squares.nbytes)
        stream.synchronize()
        made.append((augmenter.augmented_on_device(address_of(memory), np.arange(count), 0, mirror[:count]), count))
        stream.upload(address_of(memory), rubbish.ctypes.data, squares.nbytes)
        stream.synchronize()
        if len(made) > 2:
            old, count = made.pop(0)
            assert old.nbytes == count * 64 * 64 * 3 * 2
            pixels = from_device(device, old.address, (count, 64, 64, 3), "float16")
            expected = pixels if expected is None else expected
            assert np.array_equal(pixels, expected[:count])
        if number == 20:
            before = device.free_bytes
    assert before - device.free_bytes <= 32 * MB


def another_size(images):
    from nvidia.dali import fn

    return fn.resize(images, size=[8, 8])


def fails_while_it_runs(images):
    from nvidia.dali import fn

    return fn.crop(images, crop=[400, 400])


@pytest.mark.parametrize(
    ("function", "told"), [(another_size, "expected 2 of 16 x 16 x 3; found 2 of 8 x 8 x 3"), (fails_while_it_runs, "")]
)
def test_a_function_that_does_not_do_what_it_must_is_named(device, dali, function, told):
    spec = DecodeSpec(size=16, train=False, augment=function)
    with pytest.raises(ConfigError, match="augment=") as caught:
        augmented_by(device, dali, "gpu", spec, squares_of(2, 16), None)
    assert told in str(caught.value)
