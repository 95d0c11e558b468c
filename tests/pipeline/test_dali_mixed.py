"""DALI's decoder as a back end, on DALI's CPU operators: the same class and the same runs, in host memory."""

from __future__ import annotations

import ctypes
import gc
import io
import logging
import os
import subprocess
import sys
import threading
import weakref

import numpy as np
import pytest
from PIL import Image, ImageOps

from shardkit.errors import CapabilityError, DeviceError
from shardkit.pipeline import dali_mixed
from shardkit.pipeline.dali import open_dali
from shardkit.pipeline.dali_library import device_failure, host_tensors
from shardkit.pipeline.dali_mixed import DaliBackend
from shardkit.pipeline.gpu_backend import Job, Undecodable
from shardkit.testing.host_device import HostDevice
from shardkit.testing.images import corners, jpeg_bytes

GOOD = jpeg_bytes(corners(64))
NAMED = GOOD[:-2]  # DALI decodes all the same, complains, and says which one it was
UNNAMED = GOOD[: len(GOOD) // 2]  # it does not get so far


def job_of(jpegs):
    views = [np.frombuffer(bytearray(jpeg), np.uint8) for jpeg in jpegs]
    unknown = np.zeros(len(views), np.int64)
    addresses = np.array([view.ctypes.data for view in views], np.int64)
    return Job(views, addresses, np.array([view.size for view in views], np.int64), unknown, unknown, unknown)


def plain(side, shade):
    return jpeg_bytes(np.full((side, side + 3, 3), shade, np.uint8))


def pixels_at(decoded, number):
    """Read an image through what a kernel is given: address, pitch and sizes."""
    height, width, pitch = int(decoded.height[number]), int(decoded.width[number]), int(decoded.pitch[number])
    raw = ctypes.string_at(int(decoded.addresses[number]), height * pitch)
    return np.frombuffer(raw, np.uint8).reshape(height, pitch)[:, : 3 * width].reshape(height, width, 3)


def shown(jpeg):
    return np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(jpeg))).convert("RGB"))


@pytest.fixture
def make_backend():
    made = []

    def make(batch_size=16, **options):
        fixed = {"batch_size": batch_size, "threads": 2, "decoder_device": "cpu"}
        made.append(DaliBackend(open_dali(), HostDevice(), **fixed, **options))
        return made[-1]

    yield make
    for backend in made:
        backend.close()


@pytest.fixture
def backend(make_backend):
    return make_backend()


def test_images_lie_where_it_says_whole_and_in_order(backend, photo_jpegs):
    backend.start(job_of(photo_jpegs[:12]))
    decoded = backend.collect()
    assert len(decoded) == 12
    assert len({(w, h) for w, h in zip(decoded.width, decoded.height, strict=True)}) > 1
    for number, jpeg in enumerate(photo_jpegs[:12]):
        assert np.abs(pixels_at(decoded, number).astype(int) - shown(jpeg)).mean() < 1
    for column in (decoded.addresses, decoded.pitch, decoded.width, decoded.height, decoded.orientation):
        assert (column.dtype, column.shape) == (np.int64, (12,))


@pytest.mark.parametrize("orientation", range(1, 9))
def test_orientation_is_applied_and_none_is_left(backend, orientation):
    jpeg = jpeg_bytes(corners()[:48], orientation=orientation, subsampling=0)
    backend.start(job_of([jpeg, GOOD]))
    decoded = backend.collect()
    assert decoded.orientation.tolist() == [1, 1]
    image = pixels_at(decoded, 0)
    assert image.shape == shown(jpeg).shape
    assert np.abs(image.astype(int) - shown(jpeg)).mean() < 6


@pytest.mark.parametrize("kind", ["gray", "progressive", "cmyk", "one pixel"])
def test_every_image_becomes_rgb(backend, kind):
    jpeg = {
        "gray": lambda: jpeg_bytes(Image.fromarray(corners()).convert("L")),
        "progressive": lambda: jpeg_bytes(corners(), progressive=True),
        "cmyk": lambda: jpeg_bytes(Image.fromarray(np.zeros((9, 7, 4), np.uint8), "CMYK")),
        "one pixel": lambda: jpeg_bytes(corners(2)[:1, :1]),
    }[kind]()
    backend.start(job_of([jpeg]))
    decoded = backend.collect()
    with Image.open(io.BytesIO(jpeg)) as image:
        assert (decoded.width[0], decoded.height[0]) == image.size
    assert decoded.pitch[0] == 3 * decoded.width[0]


def test_jobs_in_flight_come_out_in_their_order_whatever_their_size(make_backend):
    backend, waiting = make_backend(batch_size=9), []
    shades = iter(range(10, 250))
    for count in (9, 1, 4, 9, 2, 7, 1, 1, 9):
        some = [next(shades) for _ in range(count)]
        backend.start(job_of([plain(8 + shade % 5, shade) for shade in some]))
        waiting.append(some)
        if len(waiting) == backend.depth:
            check(backend.collect(), waiting.pop(0))
    while waiting:
        check(backend.collect(), waiting.pop(0))


def check(decoded, shades):
    assert decoded.width.tolist() == [8 + shade % 5 + 3 for shade in shades]
    for number, shade in enumerate(shades):
        assert np.abs(pixels_at(decoded, number).astype(int) - shade).max() <= 2


@pytest.mark.parametrize("read_only", [False, True])
def test_payloads_may_be_read_only(backend, read_only):
    job = job_of([GOOD] * 3)
    for view in job.views:
        view.flags.writeable = not read_only
    backend.start(job)
    assert backend.collect().width.tolist() == [64] * 3


NO_TABLE = bytearray(GOOD)
NO_TABLE[GOOD.index(b"\xff\xda") + 6] = 0xFF  # Huffman tables that there are none of


@pytest.mark.parametrize("bad", [NAMED, NO_TABLE], ids=["cut", "no table"])
def test_an_image_that_dali_names_is_the_only_bad_one(backend, bad):
    backend.start(job_of([GOOD, GOOD, bad, GOOD]))
    with pytest.raises(Undecodable) as caught:
        backend.collect()
    assert caught.value.bad == {2: "DALI cannot decode it"}


def test_a_run_that_names_none_is_bad_as_a_whole_and_told_once(backend, caplog):
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            backend.start(job_of([GOOD, UNNAMED, GOOD]))
            with pytest.raises(Undecodable) as caught:
                backend.collect()
            assert list(caught.value.bad) == [0, 1, 2]
            assert all(why.startswith("DALI: ") and "\n" not in why for why in caught.value.bad.values())
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_it_goes_on_after_any_number_of_failures(backend):
    for shade, bad in enumerate([NAMED, UNNAMED] * 20):
        backend.start(job_of([GOOD, bad]))
        backend.start(job_of([plain(8 + shade % 5, shade)]))
        with pytest.raises(Undecodable):
            backend.collect()
        check(backend.collect(), [shade])


def watched(job):
    return [weakref.ref(view) for view in job.views]


@pytest.mark.parametrize("bad", [None, NAMED, UNNAMED])
def test_payloads_are_held_until_the_job_is_collected_and_no_longer(backend, bad):
    job = job_of([GOOD, bad or GOOD])
    views = watched(job)
    backend.start(job)
    del job
    assert all(view() is not None for view in views)
    try:
        backend.collect()
    except Undecodable:
        assert bad is not None
    assert [view() for view in views] == [None, None]


def test_payloads_of_a_failed_job_are_held_while_another_is_under_way(backend):
    """On a GPU the failed run may still read them; the other one has waited for it when it is through."""
    job = job_of([UNNAMED])
    views = watched(job)
    backend.start(job)
    backend.start(job_of([GOOD]))
    del job
    with pytest.raises(Undecodable):
        backend.collect()
    assert views[0]() is not None
    backend.collect()
    assert views[0]() is None


def test_every_job_may_fail(backend):
    views = []
    for _ in range(12):
        for _ in range(backend.depth):
            job = job_of([UNNAMED])
            views += watched(job)
            backend.start(job)
            del job
        for _ in range(backend.depth):
            with pytest.raises(Undecodable):
                backend.collect()
        assert all(view() is None for view in views)


def test_the_smallest_image_is_one():
    image = Image.open(io.BytesIO(dali_mixed._SMALLEST))
    image.load()
    assert (image.size, image.mode) == ((8, 8), "L")


def test_pixels_stay_while_their_memory_is_held(backend):
    kept = []
    for shade in range(20, 60):
        backend.start(job_of([plain(8 + shade % 5, shade)] * 4))
        decoded = backend.collect()
        if shade % 4 == 0:
            kept.append((decoded, shade))
    for decoded, shade in kept:
        check(decoded, [shade] * 4)


def test_pixels_outlive_the_back_end(backend):
    backend.start(job_of([plain(12, 90)]))
    decoded = backend.collect()
    backend.close()
    gc.collect()
    assert np.abs(pixels_at(decoded, 0).astype(int) - 90).max() <= 2


def test_memory_does_not_grow_with_jobs(backend):
    def resident():
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    job = job_of([jpeg_bytes(np.zeros((500, 500, 3), np.uint8))] * 4)
    for number in range(200):
        backend.start(job)
        backend.collect()
        if number == 50:
            before = resident()
    assert resident() - before < 30 << 20  # a job makes 3 MB


@pytest.mark.parametrize("started", [0, 1, 2])
def test_closing_in_the_middle_gives_everything_back(make_backend, started):
    backend, views = make_backend(), []
    before = threading.active_count()
    for bad in ([GOOD], [UNNAMED])[:started]:
        job = job_of([GOOD] * 8 + bad)
        views += watched(job)
        backend.start(job)
        del job
    backend.close()
    assert all(view() is None for view in views)
    backend.close()
    assert threading.active_count() <= before


def test_tensors_in_pieces_are_found_one_by_one():
    arrays = [np.zeros((4 + number, 5, 3), np.uint8) for number in range(3)]
    tensors = open_dali().tensors
    images = tensors.TensorListCPU([tensors.TensorCPU(array) for array in arrays], None, False)
    decoded = dali_mixed._decoded(images, images)
    assert decoded.addresses.tolist() == [array.ctypes.data for array in arrays]
    assert decoded.height.tolist() == [4, 5, 6]


def test_payloads_are_not_copied():
    views = [np.zeros(100 + number, np.uint8) for number in range(3)]
    tensors = host_tensors(open_dali(), views)
    assert [tensors[number].data_ptr() for number in range(3)] == [view.ctypes.data for view in views]


def test_dalis_threads_are_not_the_last_to_hold_a_payload(backend):
    """They would wait for the interpreter's lock for each, up to 5 ms beside one busy Python thread."""
    job = job_of([GOOD] * 16)
    counts = [sys.getrefcount(view) for view in job.views]
    backend.start(job)
    (images,) = backend._pipe.share_outputs()  # the run is over
    assert [sys.getrefcount(view) for view in job.views] == [count + 1 for count in counts]
    del images
    backend._started.clear()
    assert [sys.getrefcount(view) for view in job.views] == counts


def test_nothing_of_dalis_is_waited_for_or_freed_once_the_device_is_lost(make_backend):
    backend = make_backend()
    backend.start(job_of([plain(32, 90)]))
    decoded = backend.collect()
    backend.start(job_of([plain(32, 90)]))
    pipe, inner, images = backend._pipe, weakref.ref(backend._pipe._pipe), weakref.ref(decoded.memory._images)
    pipe.share_outputs = None  # who waits fails
    backend._device.lost = True
    backend.rest()
    backend.close()
    del pipe, decoded
    gc.collect()
    assert inner() is not None, "to shut it down would wait for ever"
    assert images() is not None, "to free them would end the process"


AT_THE_END = """
import sys
from shardkit.pipeline.dali import open_dali
from shardkit.pipeline.dali_mixed import DaliBackend
from shardkit.testing.host_device import HostDevice
device = HostDevice()
backend = DaliBackend(open_dali(), device, batch_size=4, threads=1, decoder_device="cpu")
kind = type(backend._pipe)
really = kind._shutdown
def shutdown(pipe):
    print("threads to end:", pipe._pipe is not None)
    really(pipe)
kind._shutdown = shutdown
device.lost = sys.argv[1] == "lost"
"""


@pytest.mark.parametrize("lost", [True, False])
def test_at_the_end_of_the_process_dali_does_not_shut_down_what_works_on_a_lost_device(lost):
    command = [sys.executable, "-c", AT_THE_END, "lost" if lost else "there"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, f"threads to end: {not lost}\n"), done.stderr


def test_images_are_freed_with_who_holds_them_as_long_as_the_device_is_there(make_backend):
    backend = make_backend()
    backend.start(job_of([plain(32, 90)]))
    decoded = backend.collect()
    images = weakref.ref(decoded.memory._images)
    del decoded
    gc.collect()
    assert images() is None


@pytest.mark.parametrize(
    ("largest", "hint"),
    [((0, 0), (0, 0)), ((640, 480), (640, 480)), ((1182, 1182), (1182, 1182)), ((1183, 1183), (0, 0))],
)
def test_engines_prepare_for_the_largest_image_unless_that_takes_a_gigabyte(largest, hint):
    assert dali_mixed._hint(largest, 256) == hint


@pytest.mark.parametrize(
    ("error", "of_device"),
    [
        (RuntimeError("encountered:\n\nCUDA runtime API error cudaErrorIllegalAddress (700):"), True),
        (RuntimeError("CUDA driver API error CUDA_ERROR_ECC_UNCORRECTABLE"), True),
        (RuntimeError("CUDA allocation failed"), True),
        (RuntimeError("Can't allocate 123 bytes on device 0."), True),
        (MemoryError("std::bad_alloc"), True),
        (RuntimeError("Failed to decode sample #3 : "), False),
        (RuntimeError("nvImageCodec failure: '#4'"), False),
    ],
)
def test_errors_of_the_gpu_are_told_from_those_of_images(error, of_device):
    failure = device_failure(error, HostDevice())
    assert (failure is not None) == of_device
    assert failure is None or (isinstance(failure, DeviceError) and "\n" not in str(failure))
    device = HostDevice()
    device.lost = True
    assert isinstance(device_failure(error, device), DeviceError)


@pytest.mark.skipif(os.path.exists("/dev/nvidiactl"), reason="there is a GPU")
def test_without_a_gpu_the_mixed_decoder_says_so():
    with pytest.raises(CapabilityError, match="decoder='cpu'"):
        DaliBackend(open_dali(), HostDevice(), batch_size=4, threads=1)
