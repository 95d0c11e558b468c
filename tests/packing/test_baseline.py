"""`--baseline`: the same coefficients, markers and pixels, in a coding that a GPU's JPEG engines take."""

from __future__ import annotations

import io
import json
import subprocess
import tarfile
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pyarrow as pa
import pytest
from PIL import Image, ImageCms

import shardkit
from shardkit.errors import CapabilityError, ConfigError
from shardkit.format.jpeg import inspect_jpeg
from shardkit.packing import lossless, workers
from shardkit.packing.lossless import baseline_jpeg, can_be_baseline
from shardkit.packing.refusals import RefusedError
from shardkit.testing.awkward import stored_for_orientation
from shardkit.testing.packs import contents
from shardkit.testing.photos import encode

SRGB = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(scope="module")
def photo(photographs, require_tool):
    require_tool("jpegtran")  # whose package brings the library
    return Image.fromarray(photographs[0]).crop((101, 53, 302, 170))  # 201 x 117: no whole number of blocks


@pytest.fixture
def jpegtran(require_tool):
    """Return a function: a JPEG after libjpeg-turbo's own command, all markers copied. It comes with our library."""
    command = require_tool("jpegtran")

    def run(data, *arguments):
        given = [command, "-copy", "all", *arguments]
        return subprocess.run(given, input=data, capture_output=True, check=True, timeout=20).stdout

    return run


def made(data):
    facts = inspect_jpeg(data)
    assert can_be_baseline(facts)
    return baseline_jpeg(data, facts)


def pixels(data):
    with Image.open(io.BytesIO(data)) as image:
        return np.asarray(image)


def extended(data):
    """Return a baseline JPEG as an extended one, which differs in the marker's number alone."""
    at = data.index(b"\xff\xc0")
    return data[: at + 1] + b"\xc1" + data[at + 2 :]


def damaged(data, count=400):
    """Return it with other bytes in its first scan."""
    at = data.index(b"\xff\xda") + 40
    return data[:at] + b"\x55" * count + data[at + count :]


def packed(folder, files, **options):
    """Pack the files, by name; return payload and index row of each, and the refusals."""
    (folder / "src").mkdir()
    for name, data in files.items():
        (folder / "src" / name).write_bytes(data)
    shardkit.pack(folder / "src", folder / "ds", **{"name": "t", "jobs": 1, "baseline": True, **options})
    return stored(folder / "ds"), refusals(folder / "ds")


def stored(folder):
    """Return payload and index row of each key, as Python's tarfile and Arrow read them."""
    rows = pa.ipc.open_file(pa.py_buffer((folder / "index.arrow").read_bytes())).read_all().to_pylist()
    found = {}
    for shard in folder.glob("*.tar"):
        with tarfile.open(shard) as tar:
            found |= {member.name: tar.extractfile(member).read() for member in tar}
    return {row["key"]: (found[row["key"] + ".jpg"], row) for row in rows}


def refusals(folder):
    path = folder / "rejected.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return {line["path"]: (line["reason"], line["detail"]) for line in map(json.loads, lines)}


# --- one image


@pytest.mark.parametrize("subsampling", [0, 1, 2])
@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_a_progressive_image_keeps_every_pixel(photo, jpegtran, mode, subsampling):
    data = encode(photo.convert(mode), progressive=True, subsampling=subsampling)
    result = made(data)
    facts = inspect_jpeg(result)
    assert facts.hardware_decodable
    assert (facts.sof, facts.scans) == (0, 1)
    assert np.array_equal(pixels(result), pixels(data))
    assert result == jpegtran(data)
    # The coefficients, too: coded progressively again, they are the source's bytes.
    assert jpegtran(result, "-progressive") == jpegtran(data, "-progressive")


@pytest.mark.parametrize("orientation", range(1, 9))
def test_markers_and_what_stands_behind_the_image_are_kept(photo, jpegtran, orientation):
    turned = stored_for_orientation(photo, orientation)
    with Image.open(io.BytesIO(turned)) as image:
        exif = image.getexif()
        data = encode(image, progressive=True, exif=exif, icc_profile=SRGB, comment=b"shot in summer", dpi=(300, 300))
    data += b"a maker's trailer"
    result = made(data)
    facts = inspect_jpeg(result)
    assert (facts.orientation, facts.trailing) == (orientation, 17)
    assert result.endswith(b"\xff\xd9a maker's trailer")
    with Image.open(io.BytesIO(result)) as after, Image.open(io.BytesIO(data)) as before:
        names = ("exif", "icc_profile", "comment", "dpi", "jfif")
        assert {name: after.info[name] for name in names} == {name: before.info[name] for name in names}
        assert after.info["icc_profile"] == SRGB
        assert np.array_equal(np.asarray(after), np.asarray(before))


def test_an_extended_image_and_one_of_several_scans_become_baseline(photo, jpegtran, tmp_path):
    plain = encode(photo)
    (tmp_path / "scans").write_text("0;\n1;\n2;\n")
    scans = jpegtran(plain, "-scans", str(tmp_path / "scans"))
    assert (inspect_jpeg(scans).sof, inspect_jpeg(scans).scans) == (0, 3)
    for data in (scans, extended(plain)):
        assert made(data) == jpegtran(plain)
        assert np.array_equal(pixels(made(data)), pixels(plain))


def test_what_engines_take_or_never_would_is_left_alone(photo, jpegtran):
    others = {
        "baseline": encode(photo),
        "cmyk": encode(photo.convert("CMYK"), progressive=True),
        "arithmetic": jpegtran(encode(photo), "-arithmetic"),
        "further images": encode(photo, "MPO", save_all=True, append_images=[photo.rotate(180)], progressive=True),
    }
    assert not [name for name, data in others.items() if can_be_baseline(inspect_jpeg(data))]
    assert inspect_jpeg(others["further images"]).sof == 2


def test_tables_of_sixteen_bits_are_left_alone(photo):
    data = encode(photo, progressive=True, qtables=[[300] * 64] * 2)
    assert inspect_jpeg(data).sof == 2
    assert made(data) is None


@pytest.mark.parametrize(("count", "told"), [(400, "Huffman table"), (3, "Corrupt JPEG data")])
def test_damage_that_the_library_fails_at_or_warns_of_is_refused(photo, count, told):
    with pytest.raises(RefusedError, match=f"TurboJPEG: {told}") as caught:
        made(damaged(encode(photo, progressive=True), count))
    assert caught.value.reason == "undecodable"


def test_scans_without_end_are_refused(photo):
    data = encode(photo, progressive=True)
    last = data.rindex(b"\xff\xda")
    with pytest.raises(RefusedError, match="500 scans"):
        made(data[:last] + data[last:-2] * 600 + data[-2:])


def test_another_size_is_refused(photo, monkeypatch):
    other = encode(photo.resize((200, 117)))
    monkeypatch.setattr(lossless, "_transformed", lambda _data: other)
    with pytest.raises(RefusedError, match="another image of it: width"):
        made(encode(photo, progressive=True))
    progressive = encode(photo, progressive=True)
    monkeypatch.setattr(lossless, "_transformed", lambda data: data)
    with pytest.raises(RefusedError, match="no baseline"):
        made(progressive)


def test_threads_do_not_disturb_each_other(photo):
    sources = [encode(photo.rotate(10 * n), progressive=True) for n in range(6)]
    expected = [made(data) for data in sources]
    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(made, sources * 10)) == expected * 10


# --- a pack


def test_a_pack_stores_it_and_says_so(photo, tmp_path):
    progressive, plain, cmyk = encode(photo, progressive=True), encode(photo), encode(photo.convert("CMYK"))
    files = {"a.jpg": progressive, "b.jpg": plain, "c.jpg": damaged(progressive), "d.jpg": cmyk}
    found, refused = packed(tmp_path, files)
    assert found["a"][0] == made(progressive)
    assert (found["b"][0], found["d"][0]) == (plain, cmyk)
    assert found["a"][1].items() >= {"sof": 0, "scans": 1, "size": len(made(progressive))}.items()
    assert [(path, reason) for path, (reason, _) in refused.items()] == [("c.jpg", "undecodable")]
    assert shardkit.verify(tmp_path / "ds", level="decode").exit_code == 0


def test_only_what_is_not_scaled_is_left_to_it(photo, tmp_path):
    small, large = encode(photo, progressive=True), encode(photo.resize((402, 234)), progressive=True)
    found, _ = packed(tmp_path, {"small.jpg": small, "large.jpg": large}, resize=117)
    assert found["small"][0] == made(small)
    assert (found["large"][1]["sof"], found["large"][1]["height"]) == (0, 117)


def test_without_a_check_what_is_no_jpeg_is_still_taken(photo, tmp_path):
    found, refused = packed(tmp_path, {"a.jpg": b"no image", "b.jpg": encode(photo, progressive=True)}, check="none")
    assert (found["a"][0], found["b"][1]["sof"], refused) == (b"no image", 0, {})


def test_any_number_of_jobs_makes_the_same(photo, tmp_path):
    files = {f"{n}.jpg": encode(photo.rotate(n), progressive=bool(n % 3)) for n in range(12)}
    packed(tmp_path, files, shards=4)
    for jobs in (2, 3):
        shardkit.pack(tmp_path / "src", tmp_path / str(jobs), name="t", shards=4, baseline=True, jobs=jobs)
        assert contents(tmp_path / str(jobs)) == contents(tmp_path / "ds")


def test_what_grows_beyond_a_buffer_is_whole(photo, tmp_path, monkeypatch):
    files = {f"{n}.jpg": encode(photo.rotate(n), progressive=True, quality=30 + n) for n in range(40)}
    expected = packed(tmp_path, files)
    monkeypatch.setattr(workers, "BUFFER_BYTES", 16384)
    shardkit.pack(tmp_path / "src", tmp_path / "small", name="t", jobs=1, baseline=True)
    assert (stored(tmp_path / "small"), refusals(tmp_path / "small")) == expected
    assert contents(tmp_path / "small") == contents(tmp_path / "ds")


def test_it_is_recorded_where_it_is_given_and_parts_packs(photo, tmp_path):
    packed(tmp_path, {"a.jpg": encode(photo)})
    shardkit.pack(tmp_path / "src", tmp_path / "without", name="t", jobs=1)
    with_it, without = (json.loads((tmp_path / name / "manifest.json").read_text()) for name in ("ds", "without"))
    assert with_it["options"].pop("baseline") is True
    assert with_it["options"] == without["options"]
    with pytest.raises(ConfigError, match="baseline was true and is not given"):
        shardkit.pack(tmp_path / "src", tmp_path / "ds", name="t", jobs=1, resume=True)


def test_a_conversion_does_it_too(photo, tmp_path):
    progressive = encode(photo, progressive=True)
    packed(tmp_path, {"a.jpg": progressive}, baseline=False)
    assert stored(tmp_path / "ds")["a"][0] == progressive
    shardkit.convert(tmp_path / "ds", tmp_path / "out", name="t", jobs=1, baseline=True)
    payload, row = stored(tmp_path / "out")["a"]
    assert (payload, row["sof"]) == (made(progressive), 0)
    assert shardkit.verify(tmp_path / "out", level="decode").exit_code == 0


@pytest.mark.parametrize("command", ["pack", "convert"])
def test_without_the_library_nothing_is_written(photo, tmp_path, monkeypatch, command):
    packed(tmp_path, {"a.jpg": encode(photo)}, baseline=False)
    monkeypatch.setattr(lossless, "_LIBRARY", "libturbojpeg-that-is-not.so.0")
    lossless.require_turbojpeg.cache_clear()
    source = tmp_path / {"pack": "src", "convert": "ds"}[command]
    with pytest.raises(CapabilityError, match="apt-get install libturbojpeg0") as caught:
        getattr(shardkit, command)(source, tmp_path / "out", jobs=1, baseline=True)
    assert caught.value.exit_code == 7
    assert not (tmp_path / "out").exists()
