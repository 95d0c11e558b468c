"""The kernels' arithmetic, compiled for the processor: against Pillow, and against the host's own look at headers."""

from __future__ import annotations

import ctypes
import io
import mmap
import struct

import numpy as np
import pytest
from PIL import Image

from shardkit.format.jpeg_header import fault, is_plain_jpeg
from shardkit.pipeline.kernels import IMAGE, PAYLOAD, TYPES, VERDICTS, Output
from shardkit.storage.reader import address_of
from shardkit.testing.host_device import HostDevice
from shardkit.testing.host_kernels import COMPILER, HostKernels

pytestmark = pytest.mark.skipif(COMPILER is None, reason="there is no C++ compiler")

SIZE = 32
TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT, 3: Image.Transpose.ROTATE_180, 4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE, 6: Image.Transpose.ROTATE_270, 7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}  # fmt: skip


@pytest.fixture(scope="module")
def kernels():
    return HostKernels()


@pytest.fixture
def stream():
    return HostDevice().stream()


def picture(height, width, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3)).astype(np.uint8)


def shown(stored, orientation):
    image = Image.fromarray(stored)
    return image.transpose(TURNS[orientation]) if orientation in TURNS else image


def row_of(source, target, *, orientation=1, box=None, out=(SIZE, SIZE), cut=(0, 0), size=None, mirror=0, planar=False):
    """Return one IMAGE row; box is (x, y, w, h) as shown."""
    height, width = source.shape[:2]
    as_shown = (height, width) if orientation >= 5 else (width, height)
    x, y, w, h = box or (0, 0, *as_shown)
    target_width, target_height = size or out
    row = np.zeros(1, IMAGE)
    values = {
        "source": source.ctypes.data, "target": target.ctypes.data, "pitch": source.strides[0], "width": width,
        "height": height, "orientation": orientation, "x": x, "y": y, "w": w, "h": h, "out_width": out[0],
        "out_height": out[1], "cut_x": cut[0], "cut_y": cut[1], "target_width": target_width,
        "target_height": target_height, "mirror": mirror, "row": target_width * (1 if planar else 3),
    }  # fmt: skip
    for name, value in values.items():
        row[name] = value
    return row


def finish(kernels, stream, row, *, dtype="uint8", planar=False, mean=(0, 0, 0), scale=(1, 1, 1)):
    width, height = int(row["target_width"].max()), int(row["target_height"].max())
    output = Output(dtype=dtype, planar=planar, width=width, height=height, mean=mean, scale=scale)
    kernels.finish(stream, row.ctypes.data, len(row), output)


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize(("height", "width"), [(1, 1), (1, 40), (37, 5), (64, 48), (300, 210)])
def test_a_part_is_turned_and_resized_as_pillow_does_it(kernels, stream, orientation, height, width):
    stored = picture(height, width, orientation)
    image = shown(stored, orientation)
    w, h = max(image.width * 2 // 3, 1), max(image.height // 2, 1)
    x, y = image.width - w, (image.height - h) // 2
    result = np.zeros((SIZE, SIZE, 3), np.uint8)
    finish(kernels, stream, row_of(stored, result, orientation=orientation, box=(x, y, w, h)))
    expected = np.asarray(image.crop((x, y, x + w, y + h)).resize((SIZE, SIZE), Image.Resampling.BILINEAR), np.int16)
    difference = np.abs(result - expected)
    # Pillow chooses which axis is rounded to 8 bits first; the kernel does not.
    assert difference.max() <= 2
    assert difference.mean() < 0.5


def test_a_pixel_that_is_not_resized_is_itself(kernels, stream):
    stored = picture(21, 34)
    for orientation in range(1, 9):
        expected = np.asarray(shown(stored, orientation))
        result = np.zeros_like(expected)
        out = expected.shape[1], expected.shape[0]
        finish(kernels, stream, row_of(stored, result, orientation=orientation, out=out))
        assert np.array_equal(result, expected), orientation


def test_the_cut_takes_a_window_of_the_resized_image(kernels, stream):
    stored = picture(90, 120)
    whole, part = np.zeros((50, 66, 3), np.uint8), np.zeros((SIZE, SIZE, 3), np.uint8)
    finish(kernels, stream, row_of(stored, whole, out=(66, 50)))
    finish(kernels, stream, row_of(stored, part, out=(66, 50), cut=(17, 9), size=(SIZE, SIZE)))
    assert np.array_equal(part, whole[9 : 9 + SIZE, 17 : 17 + SIZE])


def test_mirroring_swaps_left_and_right_of_the_result(kernels, stream):
    stored = picture(90, 120)
    plain, turned = np.zeros((SIZE, SIZE, 3), np.uint8), np.zeros((SIZE, SIZE, 3), np.uint8)
    finish(kernels, stream, row_of(stored, plain, box=(3, 4, 50, 60)))
    finish(kernels, stream, row_of(stored, turned, box=(3, 4, 50, 60), mirror=1))
    assert np.array_equal(turned, plain[:, ::-1])


def test_rows_may_be_further_apart_than_their_pixels(kernels, stream):
    wide = picture(40, 64)
    narrow = wide[:, :50]
    apart, dense = np.zeros((SIZE, SIZE, 3), np.uint8), np.zeros((SIZE, SIZE, 3), np.uint8)
    finish(kernels, stream, row_of(narrow, apart))
    closer = np.ascontiguousarray(narrow)
    finish(kernels, stream, row_of(closer, dense))
    assert np.array_equal(apart, dense)


@pytest.mark.parametrize("planar", [False, True])
@pytest.mark.parametrize("dtype", TYPES)
def test_values_are_normalised_in_float32_and_then_cast(kernels, stream, dtype, planar):
    stored = picture(70, 60)
    squares = np.zeros((SIZE, SIZE, 3), np.uint8)
    finish(kernels, stream, row_of(stored, squares))
    mean, scale = (123.675, 116.28, 103.53), (0.0171, 0.0175, 0.0174)
    result = np.zeros((3, SIZE, SIZE) if planar else (SIZE, SIZE, 3), dtype)
    finish(kernels, stream, row_of(stored, result, planar=planar), dtype=dtype, planar=planar, mean=mean, scale=scale)
    expected = squares.astype(np.float32)
    if dtype != "uint8":
        expected = (expected - np.float32(mean)) * np.float32(scale)
    seen = result.transpose(1, 2, 0) if planar else result
    assert np.array_equal(seen, expected.astype(dtype))


def test_every_image_of_a_launch_goes_to_its_own_place_and_nothing_beside_it_is_written(kernels, stream):
    sources = [picture(30 + at, 50 - at, at) for at in range(5)]
    memory = np.full((11, 16, 16, 3), 0xA5, np.uint8)
    places = [1, 3, 5, 7, 9]
    rows = [row_of(source, memory[at], out=(16, 16)) for source, at in zip(sources, places, strict=True)]
    finish(kernels, stream, np.concatenate(rows))
    assert (memory[::2] == 0xA5).all()
    for source, at in zip(sources, places, strict=True):
        alone = np.zeros((16, 16, 3), np.uint8)
        finish(kernels, stream, row_of(source, alone, out=(16, 16)))
        assert np.array_equal(memory[at], alone)


def jpeg(width=33, height=21, **options):
    written = io.BytesIO()
    mode = options.pop("mode", "RGB")
    Image.fromarray(picture(height, width)).convert(mode).save(written, "JPEG", **options)
    return written.getvalue()


def verdict(kernels, stream, payload, *, width=33, height=21, components=3, sof=0):
    memory = HostDevice().memory(len(payload))
    np.frombuffer(memory, np.uint8)[:] = np.frombuffer(payload, np.uint8)
    rows = np.zeros(1, PAYLOAD)
    for name, value in (("address", address_of(memory)), ("size", len(payload)), ("width", width), ("height", height),
                        ("components", components), ("sof", sof)):  # fmt: skip
        rows[name] = value
    codes = np.full(1, -1, np.int32)
    kernels.inspect(stream, rows.ctypes.data, 1, codes.ctypes.data)
    return VERDICTS[codes[0]]


@pytest.mark.parametrize(
    "options", [{}, {"quality": 95}, {"subsampling": 0}, {"restart_marker_rows": 1}, {"comment": "x" * 900}]
)
def test_a_baseline_image_as_the_index_says_is_fine(kernels, stream, options):
    assert verdict(kernels, stream, jpeg(**options)) == ""


def test_a_grey_image_has_one_component(kernels, stream):
    assert verdict(kernels, stream, jpeg(mode="L"), components=1) == ""
    assert "frame" in verdict(kernels, stream, jpeg(mode="L"), components=3)


@pytest.mark.parametrize("stated", [{"width": 32}, {"width": 34}, {"height": 20}, {"components": 1}])
def test_a_frame_that_is_not_as_the_index_says_is_seen(kernels, stream, stated):
    assert "frame" in verdict(kernels, stream, jpeg(), **stated)


def test_a_progressive_frame_leads_nowhere_for_a_baseline_index(kernels, stream):
    assert verdict(kernels, stream, jpeg(progressive=True)) != ""


@pytest.mark.parametrize("payload", [b"", b"\xff", b"\xff\xd8\xff", b"hello world, this is text" * 9, bytes(300)])
def test_what_does_not_begin_as_a_jpeg_is_seen(kernels, stream, payload):
    assert "begin" in verdict(kernels, stream, payload)


def test_a_missing_end_is_seen(kernels, stream):
    assert "end" in verdict(kernels, stream, jpeg()[:-2])
    assert verdict(kernels, stream, jpeg() + b"\0" * 40) == ""


def test_a_thousand_segments_are_followed_no_further(kernels, stream):
    comments = b"".join(b"\xff\xfe" + struct.pack(">H", 2) for _ in range(1100))
    payload = jpeg()
    assert "segments" in verdict(kernels, stream, payload[:2] + comments + payload[2:])


def test_what_the_kernel_calls_fine_the_host_calls_fine(kernels, stream):
    """Every damaged byte of a header: the kernel may be stricter than the host, never laxer."""
    whole = jpeg()
    header = whole.index(b"\xff\xda") + 14
    accepted = 0
    for at in range(header):
        for value in {whole[at] ^ 0xFF, whole[at] ^ 1, 0, 0xFF} - {whole[at]}:
            damaged = whole[:at] + bytes([value]) + whole[at + 1 :]
            if verdict(kernels, stream, damaged) == "":
                accepted += 1
                view = np.frombuffer(damaged, np.uint8)
                assert fault(view) is None, (at, value)
                assert is_plain_jpeg(view), (at, value)
    assert accepted > header  # most bytes of tables may be anything


@pytest.mark.parametrize("cut", range(2, 620, 7))
def test_a_header_that_is_cut_off_is_never_read_past_its_end(kernels, stream, cut):
    assert verdict(kernels, stream, jpeg()[:cut] + b"\xff\xd9") != ""


@pytest.mark.parametrize("width", [1, 2, 3, 5, 8, 37, 200])
def test_no_byte_outside_of_the_image_is_read(kernels, stream, width):
    """The image lies between two pages that may not be touched, at the end of what lies between."""
    page, libc = mmap.PAGESIZE, ctypes.CDLL(None, use_errno=True)
    height = page // (3 * width)
    memory = mmap.mmap(-1, 3 * page)
    whole = np.frombuffer(memory, np.uint8)
    start = whole.ctypes.data
    for guard in (start, start + 2 * page):
        assert libc.mprotect(ctypes.c_void_p(guard), page, 0) == 0
    source = whole[2 * page - 3 * width * height : 2 * page].reshape(height, width, 3)
    source[:] = picture(height, width)
    for orientation in range(1, 9):
        result = np.zeros((SIZE, SIZE, 3), np.uint8)
        finish(kernels, stream, row_of(source, result, orientation=orientation))
        image = shown(source, orientation).resize((SIZE, SIZE), Image.Resampling.BILINEAR)
        assert np.abs(result - np.asarray(image, np.int16)).max() <= 2
