"""Images that cannot be decoded: named or replaced, in both decoders, and the run goes on."""

from __future__ import annotations

import io
import logging
import os
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image

from shardkit.dataset.shardset import open_dataset
from shardkit.errors import FormatError
from shardkit.format.jpeg_header import fault, is_plain_jpeg
from shardkit.pipeline.cpu import PillowDecoder
from shardkit.pipeline.crops import random_crops
from shardkit.pipeline.decoder import DecodeSpec
from shardkit.testing.images import SPOILT as HOWS
from shardkit.testing.images import Picture, coloured, corners, jpeg_bytes, write_pictures
from shardkit.testing.images import spoilt as damaged
from shardkit.torch import ShardLoader
from shardkit.torch.resize import resize

MODES = [False, True]
SOF = b"\xff\xc0"


@pytest.mark.parametrize("train", MODES)
@pytest.mark.parametrize("how", HOWS)
def test_an_image_that_cannot_be_decoded_is_named(tmp_path, name, train, how, photo_jpegs, decoded, make):
    jpegs = list(photo_jpegs[:6])
    jpegs[3] = damaged(jpegs[3], how)
    folder = write_pictures(tmp_path / "ds", pictures_of(jpegs), per_shard=2)
    with pytest.raises(FormatError, match=r"pictures-000001\.tar:\d+ \[sample p/3\]") as caught:
        decoded(folder, make(name, DecodeSpec(size=32, train=train)), [[0, 5], [1, 3, 2], [4]])
    with open_dataset(folder) as dataset:
        assert caught.value.offset == dataset.columns["offset"][3]
    if "cut" in how or how == "truncated":
        assert "truncated" in str(caught.value)


def pictures_of(jpegs):
    return [Picture(f"p/{number}", jpeg, 0) for number, jpeg in enumerate(jpegs)]


def test_a_truncated_image_is_refused_whatever_its_crop(tmp_path, name, decoded, make, photo_jpegs):
    """A decoder does not miss what lies below the crop; the file is bad all the same, in every epoch."""
    jpeg = photo_jpegs[0]
    folder = write_pictures(tmp_path / "ds", pictures_of([jpeg[: len(jpeg) * 9 // 10], jpeg]))
    with open_dataset(folder) as dataset:
        sides = [dataset.columns[side][[1]].astype(np.int64) for side in ("width", "height")]
    spec = DecodeSpec(size=16, train=True)
    drawn = (random_crops(np.array([0]), *sides, seed=0, epoch=epoch) for epoch in range(1000))
    epoch = next(epoch for epoch, crops in enumerate(drawn) if crops.anchor[0, 0] + crops.shape[0, 0] < 0.4)
    with pytest.raises(FormatError, match="truncated"):
        decoded(folder, make(name, spec), [[0]], epoch=epoch)


def test_batches_before_a_bad_image_come_first_and_the_decoder_goes_on(tmp_path, name, decoded, make, feed):
    pictures = coloured(8)
    pictures[5] = Picture("bad", pictures[5].jpeg[:-40], 5)
    folder = write_pictures(tmp_path / "ds", pictures)
    decoder = make(name, DecodeSpec(size=16, train=False))
    with feed(folder, [[0, 1], [2], [5], [6]], depth=4) as given:
        run = decoder.decode(given.fetcher, 0)
        assert [next(run).batch.step, next(run).batch.step] == [0, 1]
        with pytest.raises(FormatError, match="sample bad"):
            next(run)
        given.fetcher.close()
        assert given.pool.lent_bytes == 0
    assert len(decoded(folder, decoder, [[0, 1], [2]])) == 2


@pytest.mark.parametrize("batch_size", [1, 3, 40])
@pytest.mark.parametrize("train", MODES)
def test_bad_images_are_replaced_and_all_else_stays(tmp_path, photo_jpegs, name, train, batch_size, make, feed):
    """Every kind at once, several in one batch, batches in flight before and behind them."""
    jpegs = [photo_jpegs[number % 24] for number in range(60)]
    whole = write_pictures(tmp_path / "whole", pictures_of(jpegs))
    bad = dict(zip((7, 8, 9, 20, 21, 33, 41, 42, 43, 44, 59), HOWS, strict=True))
    for at, how in bad.items():
        jpegs[at] = damaged(jpegs[at], how)
    folder = write_pictures(tmp_path / "ds", pictures_of(jpegs))
    spec = DecodeSpec(size=32, train=train, dtype="uint8")
    steps = [range(at, min(at + batch_size, 60)) for at in range(0, 60, batch_size)]
    with feed(folder, steps, on_bad="substitute") as given:
        run = make(name, spec, batch_size).decode(given.fetcher, 0)
        batches = [(batch.batch, np.from_dlpack(batch.pixels)) for batch in run]
        assert [batch.step for batch, _ in batches] == list(range(len(steps)))
        assert set(given.bad.by_key) == {f"p/{at}" for at in bad}
        ids = np.concatenate([batch.ids for batch, _ in batches])
    assert all(ids[at] == at for at in range(60) if at not in bad)
    assert not set(ids) & set(bad)
    with feed(whole, [[number] for number in ids]) as given:
        expected = [np.from_dlpack(batch.pixels)[0] for batch in make(name, spec, 1).decode(given.fetcher, 0)]
    assert np.array_equal(np.concatenate([pixels for _, pixels in batches]), np.stack(expected))


def test_a_bad_substitute_is_replaced_too(tmp_path, name, make, feed, photo_jpegs, caplog):
    jpegs = [damaged(jpeg, "a Huffman table that cannot be") for jpeg in photo_jpegs[:20]] + photo_jpegs[20:]
    folder = write_pictures(tmp_path / "ds", pictures_of(jpegs))
    with feed(folder, [range(24)] * 2, on_bad="substitute") as given, caplog.at_level(logging.WARNING):
        for batch in make(name, DecodeSpec(size=16, train=False)).decode(given.fetcher, 0):
            assert set(batch.batch.ids) <= {20, 21, 22, 23}
        assert set(given.bad.by_key) == {f"p/{number}" for number in range(20)}
    assert len(caplog.records) == 20


def test_when_nothing_can_be_decoded_the_run_ends_with_an_error(tmp_path, name, make, feed, photo_jpegs):
    jpegs = [damaged(jpeg, "a Huffman table that cannot be") for jpeg in photo_jpegs[:5]]
    folder = write_pictures(tmp_path / "ds", pictures_of(jpegs))
    with feed(folder, [range(5)] * 3, on_bad="substitute") as given:
        with pytest.raises(FormatError, match="no sample can stand in"):
            list(make(name, DecodeSpec(size=16, train=True)).decode(given.fetcher, 0))
        given.fetcher.close()
        assert given.pool.lent_bytes == 0


def test_a_bad_image_does_not_disturb_the_random_numbers_of_a_graph(tmp_path, photo_jpegs, make, feed):
    from nvidia.dali import fn

    def jitter(images):
        return fn.brightness(images, brightness=fn.random.uniform(range=(0.5, 1.5)))

    spec = DecodeSpec(size=16, train=False, dtype="uint8", augment=jitter)
    pixels = []
    for how in (None, "a Huffman table that cannot be"):
        jpegs = list(photo_jpegs[:12])
        jpegs[1] = damaged(jpegs[1], how) if how else jpegs[1]
        folder = write_pictures(tmp_path / f"ds{how is None}", pictures_of(jpegs))
        with feed(folder, [range(4), range(4, 8), range(8, 12)], on_bad="substitute") as given:
            run = make("dali", spec).decode(given.fetcher, 0)
            pixels.append(np.concatenate([np.from_dlpack(batch.pixels) for batch in run]))
    same = (pixels[0] == pixels[1]).all(axis=(1, 2, 3))
    assert same.tolist() == [number != 1 for number in range(12)]


CRASHES = """
import sys
sys.path[:0] = sys.argv[2:]
from conftest import feed_decoder, make_decoder
from shardkit.pipeline.decoder import DecodeSpec
decoder = make_decoder("dali", DecodeSpec(size=16, train=True, threads=16))
with feed_decoder(sys.argv[1], [range(at, at + 50) for at in range(0, 500, 50)], on_bad="substitute") as given:
    assert len(list(decoder.decode(given.fetcher, 0))) == 10
    assert len(given.bad.by_key) == 100
print("alive")
"""


def test_what_crashes_dali_never_reaches_it(tmp_path, photo_jpegs):
    """DALI 2.4 dies of each of these within some batches (SIGSEGV), so another process tries."""
    jpegs = [photo_jpegs[number % 24] for number in range(500)]
    hows = ("text", "empty", "a length that leads nowhere", "a broken PNG", "no frame")
    for at in range(100):
        jpegs[5 * at] = damaged(jpegs[5 * at], hows[at % 5])
    folder = write_pictures(tmp_path / "ds", pictures_of(jpegs))
    command = [sys.executable, "-c", CRASHES, str(folder), os.path.dirname(__file__), *sys.path]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "alive\n"), done.stderr[-2000:]


def plain(jpeg):
    return is_plain_jpeg(np.frombuffer(jpeg, np.uint8))


def test_headers_that_lead_to_a_scan_are_plain():
    pixels = corners()
    for options in ({}, {"progressive": True}, {"orientation": 6}, {"restart_marker_rows": 1}, {"comment": b"x" * 999}):
        assert plain(jpeg_bytes(pixels, **options))
    jpeg = jpeg_bytes(pixels)
    scan = jpeg.index(b"\xff\xda")
    after = scan + 2 + int.from_bytes(jpeg[scan + 2 : scan + 4], "big")
    assert plain(jpeg[:after])
    assert not any(plain(jpeg[:size]) for size in range(after))


@pytest.mark.parametrize(("at", "value"), [(4, 12), (4, 0), (9, 0), (9, 2), (9, 9), (3, 16)])
def test_frames_that_dali_does_not_know_are_not_plain(at, value):
    jpeg = bytearray(jpeg_bytes(corners()))
    assert plain(bytes(jpeg))
    jpeg[jpeg.index(SOF) + at] = value
    assert not plain(bytes(jpeg))


def test_an_end_is_looked_for_behind_trailing_bytes_too():
    jpeg = jpeg_bytes(corners())
    assert fault(np.frombuffer(jpeg + bytes(100_000), np.uint8)) is None
    assert fault(np.frombuffer(jpeg[:-1], np.uint8)) == "a truncated JPEG: it has no end marker (EOI)"
    assert fault(np.zeros(0, np.uint8)) == "the payload is empty"
    assert fault(np.frombuffer(b"\x89PNG\r\n", np.uint8)) is None  # not ours to judge


class Failing:
    """DALI, whose runs fail in another way than a bad image makes them fail."""

    def __init__(self, pipe, message):
        self.pipe, self.message = pipe, message

    def __getattr__(self, name):
        return getattr(self.pipe, name)

    def share_outputs(self):
        self.pipe.share_outputs()
        self.pipe.release_outputs()
        raise RuntimeError(
            f"Error in CPU operator `x`,\nwhich was used here:\n  File y\n\nencountered:\n\n{self.message}\nIt is over."
        )


@pytest.fixture
def failing(monkeypatch):
    """A function after which every run of DALI fails with a message."""

    def fail(message):
        import nvidia.dali.pipeline

        real = nvidia.dali.pipeline.pipeline_def
        wrapped = lambda *a, **k: lambda **options: Failing(real(*a, **k)(**options), message)  # noqa: E731
        monkeypatch.setattr(nvidia.dali.pipeline, "pipeline_def", wrapped)

    return fail


@pytest.mark.parametrize("train", MODES)
def test_when_dali_fails_as_a_whole_pillow_takes_over_and_it_is_told_once(
    photo_folder, train, failing, make, feed, decoded, caplog
):
    spec = DecodeSpec(size=32, train=train, dtype="uint8")
    steps = [range(12), range(12, 24)]
    expected = decoded(photo_folder, PillowDecoder(spec, resize=resize), steps)
    failing("bad_alloc: not enough memory")
    decoder = make("dali", spec)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            found = decoded(photo_folder, decoder, steps)
            assert all(np.array_equal(a, b) for a, b in zip(found, expected, strict=True))
    (said,) = [record.getMessage() for record in caplog.records]
    assert said.endswith("DALI: bad_alloc: not enough memory")
    assert decoder.counts == {"dali": 0, "pillow": 48}


def test_memory_that_dali_gave_up_is_free_when_nothing_of_it_runs(photo_folder, failing, make, feed):
    failing("not enough memory")
    with feed(photo_folder, [range(24)]) as given:
        run = make("dali", DecodeSpec(size=16, train=True)).decode(given.fetcher, 0)
        batch = next(run)
        assert given.pool.lent_bytes == 0
        assert len(batch.batch) == 24
        run.close()


def test_what_dali_alone_refuses_is_no_bad_image(photo_folder, failing, make, feed, decoded):
    """DALI saw the crop, Pillow sees all of it: so the verdict is not a matter of the epoch."""
    spec = DecodeSpec(size=32, train=True, dtype="uint8")
    (expected,) = decoded(photo_folder, PillowDecoder(spec, resize=resize), [range(6)], epoch=2)
    failing("Failed to decode sample #0 : ")
    decoder = make("dali", spec)
    with feed(photo_folder, [range(6)], on_bad="raise", epoch=2) as given:
        (batch,) = decoder.decode(given.fetcher, 2)
        assert np.array_equal(np.from_dlpack(batch.pixels), expected)
        assert given.bad.by_key == {}
    assert decoder.counts == {"dali": 0, "pillow": 6}


def test_images_are_counted_by_who_decoded_them(tmp_path, photo_jpegs, name, decoded, make):
    jpegs = list(photo_jpegs[:6])
    buffer = io.BytesIO()
    Image.open(io.BytesIO(jpegs[0])).save(buffer, "PNG")
    jpegs[2] = buffer.getvalue()
    jpegs[3] = damaged(jpegs[3], "a Huffman table that cannot be")
    folder = write_pictures(tmp_path / "ds", pictures_of(jpegs))
    decoder = make(name, DecodeSpec(size=16, train=False))
    decoded(folder, decoder, [range(6)] * 2, on_bad="substitute")
    counts = dict(decoder.counts)
    assert sum(counts.values()) == 12
    if name == "dali":
        assert 2 <= counts["pillow"] <= 4  # the PNG, and where it stands in for the bad one
    else:
        assert list(counts) == ["pillow"]


@pytest.mark.parametrize("name", ["dali", "cpu"])
@pytest.mark.parametrize("train", MODES)
def test_a_loader_names_damage_that_only_decoding_finds(tmp_path, photo_jpegs, name, train):
    jpegs = list(photo_jpegs)
    jpegs[7] = damaged(jpegs[7], "a Huffman table that cannot be")
    assert fault(np.frombuffer(jpegs[7], np.uint8)) is None
    assert plain(jpegs[7])
    folder = write_pictures(tmp_path / "ds", pictures_of(jpegs))
    with ShardLoader(folder, 6, size=32, decoder=name, train=train, fields=("index",)) as loader:
        for _ in range(2):
            ids = [number for _, _, extras in loader for number in extras["index"].tolist()]
            assert len(ids) == 24
            assert set(ids) == set(range(24)) - {7}
        assert list(loader.stats().bad) == ["p/7"]
        assert "Huffman" in loader.stats().bad["p/7"] or "Pillow" in loader.stats().bad["p/7"]
    with (
        ShardLoader(folder, 6, size=32, decoder=name, train=train, on_bad="raise") as loader,
        pytest.raises(FormatError, match=r"pictures-000000\.tar:\d+ \[sample p/7\]"),
    ):
        list(loader)


def test_both_decoders_give_the_same_reason(tmp_path, photo_jpegs, make, feed):
    jpegs = list(photo_jpegs[:12])
    for at, how in ((2, "a Huffman table that cannot be"), (5, "sampling that cannot be"), (9, "no frame")):
        jpegs[at] = damaged(jpegs[at], how)
    folder = write_pictures(tmp_path / "ds", pictures_of(jpegs))
    told = []
    for name in ("dali", "cpu"):
        with feed(folder, [range(12)], on_bad="substitute") as given:
            list(make(name, DecodeSpec(size=16, train=False)).decode(given.fetcher, 0))
            told.append(dict(given.bad.by_key))
    assert told[0] == told[1]
    assert "sampling factors" in told[0]["p/5"]
