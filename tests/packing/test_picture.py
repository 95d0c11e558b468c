"""Re-encoding keeps what a picture shows: its shape, uprightness and colours; a failure is a refusal."""

from __future__ import annotations

import io
import warnings
import zlib

import numpy as np
import pytest
from PIL import Image, ImageCms, ImageOps, JpegImagePlugin

from shardkit.format.jpeg import SUBSAMPLINGS, inspect_jpeg
from shardkit.packing.picture import CONVERTIBLE, JPEG, check_decodes, encode_jpeg
from shardkit.packing.refusals import RefusedError
from shardkit.testing.awkward import stored_for_orientation
from shardkit.testing.photos import encode

PIXELS = 178_956_970
SRGB = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()


@pytest.fixture(scope="session")
def photo(photographs):
    return Image.fromarray(photographs[0])  # 640 x 427


def shrunk(data, resize, **given):
    return encode_jpeg(data, **{"resize": resize, "quality": 90, "max_pixels": PIXELS, "formats": JPEG, **given})


def converted(data, **given):
    return shrunk(data, None, formats=CONVERTIBLE, **given)


def opened(data):
    """Return the decoded result, after making sure that it is what the packer promises."""
    facts = inspect_jpeg(data)
    assert (facts.sof, facts.precision, facts.scans, facts.orientation, facts.trailing) == (0, 8, 1, 0, 0)
    image = Image.open(io.BytesIO(data))
    image.load()
    assert image.format == "JPEG"
    assert "exif" not in image.info
    return image


def difference(one, two):
    """Return the mean distance of two pictures, 0 to 255, of blocks of 4 x 4 pixels: dithering is no difference."""
    assert one.size == two.size
    coarse = (np.asarray(image.convert("RGB").reduce(4), float) for image in (one, two))
    return float(np.abs(next(coarse) - next(coarse)).mean())


# --- resize


@pytest.mark.parametrize("size", [(640, 427), (427, 640), (640, 640)])
@pytest.mark.parametrize("resize", [426, 256, 100, 1])
def test_the_shorter_side_gets_the_size_and_the_shape_stays(photo, size, resize):
    image = opened(shrunk(encode(photo.resize(size)), resize))
    assert min(image.size) == resize
    assert abs(max(image.size) - max(size) * resize / min(size)) <= 0.5


@pytest.mark.parametrize("resize", [427, 428, 10_000])
def test_a_picture_is_never_enlarged_nor_encoded_for_nothing(photo, resize):
    assert shrunk(encode(photo), resize) is None


def test_a_strip_keeps_one_pixel(photo):
    assert opened(shrunk(encode(photo.resize((3000, 4))), 2)).size == (1500, 2)


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("told", [True, False])
def test_the_result_is_upright_without_exif(photo, orientation, told):
    data = stored_for_orientation(photo, orientation)
    image = opened(shrunk(data, 200, orientation=orientation if told else None))
    assert image.size == (300, 200)
    assert difference(image, photo.resize((300, 200), Image.Resampling.LANCZOS)) < 4


@pytest.mark.parametrize("orientation", [0, 9, 255])
def test_an_orientation_that_says_nothing_changes_nothing(photo, orientation):
    assert opened(shrunk(encode(photo), 200, orientation=orientation)).size == (300, 200)


@pytest.mark.parametrize(
    "exif",
    [
        b"Exif\0\0", b"Exif\0\0no TIFF at all", b"Exif\0\0II*\0\xff\xff\xff\xff",
        b"Exif\0\0MM\0*\0\0\0\x08\0\x01\x01\x12\0\x03",
    ],
)  # fmt: skip
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_broken_exif_is_got_over(photo, exif, kind):
    data = encode(photo, kind, exif=exif)
    image = opened(shrunk(data, 200, formats=(kind,)))
    assert image.size == (300, 200)


@pytest.mark.parametrize("mode", ["L", "RGB", "CMYK"])
def test_colours_are_kept(photo, mode):
    source = photo.convert(mode)
    image = opened(shrunk(encode(source, quality=95), 200, quality=95))
    assert image.mode == mode
    assert difference(image, source.resize((300, 200), Image.Resampling.LANCZOS)) < 4


def test_a_progressive_picture_and_one_of_many_pictures_are_taken(photo):
    assert opened(shrunk(encode(photo, progressive=True), 200)).size == (300, 200)
    many = encode(photo, "MPO", save_all=True, append_images=[photo.rotate(180)])
    assert Image.open(io.BytesIO(many)).format == "MPO"
    image = opened(shrunk(many, 200))
    assert difference(image, photo.resize((300, 200), Image.Resampling.LANCZOS)) < 4
    assert shrunk(many, 427) is None


def test_the_picture_is_decoded_small(photo, monkeypatch):
    drafts = []
    big = encode(photo.resize((2560, 1708)))
    original = JpegImagePlugin.JpegImageFile.draft

    def watched(self, mode, size):
        result = original(self, mode, size)
        drafts.append((size, self.size))
        return result

    monkeypatch.setattr(JpegImagePlugin.JpegImageFile, "draft", watched)
    assert opened(shrunk(big, 200)).size == (300, 200)
    assert drafts == [((600, 400), (640, 427))]  # an eighth would be too small, a quarter is enough


def test_a_quality_is_obeyed(photo):
    low, high = (len(shrunk(encode(photo), 200, quality=quality)) for quality in (30, 95))
    assert low < high / 2


@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_a_fitting_profile_is_kept_and_another_dropped(photo, mode):
    image = opened(shrunk(encode(photo.convert(mode), icc_profile=SRGB), 200))
    assert image.info.get("icc_profile") == (SRGB if mode == "RGB" else None)


def test_the_same_bytes_come_out_twice(photo):
    data = encode(photo, comment=b"shot in summer")
    assert shrunk(data, 200) == shrunk(data, 200)
    assert "comment" not in opened(shrunk(data, 200)).info


# --- convert


@pytest.mark.parametrize("kind", ["PNG", "WEBP", "GIF"])
@pytest.mark.parametrize("mode", ["RGB", "L", "P", "1", "RGBA", "LA"])
def test_every_mode_becomes_a_jpeg_that_shows_the_same(photo, kind, mode):
    source = photo.convert(mode)
    try:
        data = encode(source, kind, **({"lossless": True} if kind == "WEBP" else {}))
    except OSError:
        pytest.skip(f"Pillow writes no {mode} {kind}")
    image = opened(converted(data, quality=95))
    assert image.mode in ("RGB", "L")
    assert difference(image, Image.open(io.BytesIO(data))) < 4


@pytest.mark.parametrize("size", [None, 200])
def test_transparency_is_white(photo, size):
    clear = photo.convert("RGBA")
    clear.putalpha(0)
    assert opened(shrunk(encode(clear, "PNG"), size, formats=CONVERTIBLE)).getextrema() == ((255, 255),) * 3
    half = photo.convert("RGBA")
    half.putalpha(128)
    expected = Image.blend(Image.new("RGB", half.size, "white"), photo, 0.5)
    assert difference(opened(converted(encode(half, "PNG"))), expected) < 4


@pytest.mark.parametrize("mode", ["L", "RGB", "P"])
def test_a_transparent_colour_is_white(mode):
    black = Image.new(mode, (16, 16), 0)
    data = encode(black, "PNG", transparency=(0, 0, 0) if mode == "RGB" else 0)
    assert "transparency" in Image.open(io.BytesIO(data)).info
    assert opened(converted(data)).convert("L").getextrema() == (255, 255)


def test_sixteen_bits_are_scaled_to_eight():
    ramp = np.linspace(0, 65535, 256 * 16).astype(np.uint16).reshape(16, 256)
    image = opened(converted(encode(Image.fromarray(ramp), "PNG"), quality=100))
    assert image.mode == "L"
    assert np.abs(np.asarray(image, float) - ramp / 257).max() < 4


def test_the_first_picture_of_an_animation_is_taken(photo):
    frames = [photo.rotate(90 * i).convert("P") for i in range(3)]
    for kind in ("GIF", "WEBP", "PNG"):
        data = encode(frames[0], kind, save_all=True, append_images=frames[1:])
        assert Image.open(io.BytesIO(data)).n_frames == 3
        assert difference(opened(converted(data)), frames[0]) < 8
        assert difference(opened(converted(data)), frames[1]) > 30


def test_a_converted_picture_is_turned_upright(photo):
    exif = Image.Exif()
    exif[0x0112] = 6
    for kind in ("PNG", "WEBP"):
        data = encode(photo, kind, exif=exif)
        expected = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
        assert difference(opened(converted(data)), expected) < 8


def test_a_grey_profile_does_not_reach_a_colour_picture(photo):
    grey = SRGB[:16] + b"GRAY" + SRGB[20:]
    data = encode(photo.convert("LA"), "PNG", icc_profile=grey)
    assert "icc_profile" not in opened(converted(data)).info
    assert opened(converted(encode(photo, "PNG", icc_profile=SRGB))).info["icc_profile"] == SRGB


def test_convert_takes_the_formats_it_names_and_no_other(photo):
    for kind in ("BMP", "TIFF", "JPEG"):
        with pytest.raises(RefusedError, match="UnidentifiedImageError: cannot identify image file the data"):
            converted(encode(photo, kind))


# --- limits and damage


def test_the_pixel_limit_is_exact_and_pillows_own_is_left_as_it_was(photo):
    before = Image.MAX_IMAGE_PIXELS
    count = 640 * 427
    assert shrunk(encode(photo), 200, max_pixels=count) is not None
    for limit in (count - 1, count // 3, 1):  # Pillow has a limit at twice ours
        with pytest.raises(RefusedError) as caught:
            shrunk(encode(photo, "PNG"), 200, max_pixels=limit, formats=CONVERTIBLE)
        assert caught.value.reason == "too-many-pixels"
    assert before == Image.MAX_IMAGE_PIXELS
    check_decodes(encode(photo), count)


def test_a_picture_that_declares_too_much_is_not_decoded():
    png = bytearray(encode(Image.new("L", (1, 1)), "PNG"))
    png[16:24] = (65500).to_bytes(4, "big") * 2
    png[29:33] = zlib.crc32(png[12:29]).to_bytes(4, "big")
    with pytest.raises(RefusedError) as caught:
        converted(bytes(png))
    assert caught.value.reason == "too-many-pixels"


@pytest.mark.parametrize("kind", ["PNG", "WEBP", "GIF"])
@pytest.mark.parametrize("cut", [0.02, 0.5, 0.9])
def test_a_cut_picture_is_refused(photo, kind, cut):
    data = encode(photo.resize((64, 48)), kind)
    with pytest.raises(RefusedError) as caught:
        converted(data[: int(len(data) * cut)])
    assert caught.value.reason == "undecodable"
    assert "\n" not in caught.value.detail
    assert "0x" not in caught.value.detail  # an address would make equal packs differ


@pytest.mark.parametrize("kind", ["PNG", "WEBP", "GIF", "JPEG"])
def test_no_damage_escapes_as_another_error(photo, kind):
    whole = encode(photo.resize((64, 48)), kind)
    rng = np.random.default_rng(0)
    for _ in range(150):
        data = bytearray(whole)
        for at in rng.integers(0, len(data), 3):
            data[at] = rng.integers(256)
        try:
            result = shrunk(bytes(data), 20, formats=(kind,))
        except RefusedError:
            continue
        assert result is None or Image.open(io.BytesIO(result)).format == "JPEG"


def test_a_side_longer_than_a_jpegs_is_refused():
    with pytest.raises(RefusedError) as caught:
        converted(encode(Image.new("L", (70_000, 1)), "PNG"))
    assert caught.value.reason == "undecodable"


def test_a_whole_decode_finds_damaged_tables_and_counts_warnings_as_errors(photo, monkeypatch):
    whole = encode(photo)
    check_decodes(whole, PIXELS)
    damaged = bytearray(whole)
    table = whole.index(b"\xff\xc4")
    damaged[table + 5 : table + 21] = b"\xff" * 16
    assert inspect_jpeg(bytes(damaged)).sof == 0
    with pytest.raises(RefusedError) as caught:
        check_decodes(bytes(damaged), PIXELS)
    assert caught.value.reason == "undecodable"
    load = Image.Image.load

    def warned(self):
        warnings.warn("odd", UserWarning, stacklevel=1)
        return load(self)

    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", warned)
    with pytest.raises(RefusedError, match="odd"):
        check_decodes(whole, PIXELS)


def test_a_check_opens_nothing_but_jpegs(photo):
    with pytest.raises(RefusedError):
        check_decodes(encode(photo, "PNG"), PIXELS)


def test_the_subsampling_of_a_result_suits_the_gpus_engine(photo):
    facts = inspect_jpeg(shrunk(encode(photo, subsampling="4:4:4"), 200))
    assert SUBSAMPLINGS[facts.subsampling] == "4:2:0"
    assert facts.hardware_decodable
