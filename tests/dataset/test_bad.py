"""Samples that cannot be used: told apart from good ones, written down, replaced by others that anyone can name."""

from __future__ import annotations

import io
import logging
import threading
import zipfile
from collections import Counter

import numpy as np
import pytest
from PIL import Image

from shardkit.dataset.bad import ATTEMPTS, BadSamples, inspect_payloads, substitute_position
from shardkit.errors import FormatError
from shardkit.format.media_type import MEDIA_TYPES, PILLOW_FORMATS
from shardkit.testing.datasets import Draft, DraftSample, draft_dataset, draft_shard, tiny_jpeg
from shardkit.testing.images import corners, jpeg_bytes, jpeg_facts

UNKNOWN = jpeg_facts(b"")
JPEG = jpeg_bytes(corners(16))
FACTS = jpeg_facts(JPEG)


def archive():
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as written:
        written.writestr("a.txt", "hello")
    return out.getvalue()


def stored(kind):
    """Return what Pillow writes for a format."""
    out = io.BytesIO()
    Image.fromarray(corners(16)).save(out, kind)
    return out.getvalue()


@pytest.fixture
def inspect(stack, tmp_path):
    """A function from (payload, facts of the index) rows to the places that are bad, read as one batch."""

    def run(*rows):
        samples = [
            DraftSample(key=f"k/{number}", jpeg=payload, label=0, facts=facts)
            for number, (payload, facts) in enumerate(rows)
        ]
        draft = Draft(name="odd", align=512, classes=("a",), shards=[draft_shard("odd-000000.tar", samples, 512)])
        on = stack(draft.write(tmp_path / "odd"))
        return on.reader.read_alone(np.arange(len(rows)))[1].bad

    return run


def kind(name):
    return UNKNOWN | {"media_type": MEDIA_TYPES.index(name)}


@pytest.mark.parametrize(
    ("payload", "facts", "reason"),
    [
        (b"", FACTS, "the payload is empty"),
        (b"", UNKNOWN, "the payload is empty"),
        (b"\xff", FACTS, "the index says jpeg, the first bytes say unknown"),
        (b"\xff\xd8", FACTS, "the index says jpeg, the first bytes say unknown"),
        (b"\x00" + JPEG[1:], FACTS, "the index says jpeg, the first bytes say unknown"),
        (JPEG[:2] + b"\x00" + JPEG[3:], FACTS, "the index says jpeg, the first bytes say unknown"),
        (bytes(len(JPEG)), FACTS, "the index says jpeg, the first bytes say unknown"),
        (stored("PNG"), FACTS, "the index says jpeg, the first bytes say png"),
        (JPEG, kind("png"), "the index says png, the first bytes say jpeg"),
        (b"<!DOCTYPE html><html>404</html>", kind("html"), "it is no image, the first bytes say html"),
        (b"<?xml version='1.0'?>", kind("xml"), "it is no image, the first bytes say xml"),
        (b"not found", kind("text"), "it is no image, the first bytes say text"),
        (b"not found", UNKNOWN, "it is no image, the first bytes say text"),
        (b"%PDF-1.7 ...", UNKNOWN, "it is no image, the first bytes say pdf"),
        (b"\x1f\x8b\x08\x00", UNKNOWN, "it is no image, the first bytes say gzip"),
        (archive(), kind("zip"), "it is no image, the first bytes say zip"),
        (JPEG, FACTS | {"precision": 12}, "a JPEG of 12 bits a component"),
        (JPEG, FACTS | {"precision": 16}, "a JPEG of 16 bits a component"),
        (JPEG, FACTS | {"sof": 3}, "a JPEG whose frame is SOF3, neither baseline, extended nor progressive"),
        (JPEG, FACTS | {"sof": 9}, "a JPEG whose frame is SOF9, neither baseline, extended nor progressive"),
        (JPEG, FACTS | {"media_type": 99}, None),  # a kind that a newer shardkit knows: the decoder's business
    ],
)
def test_what_no_decoder_takes_is_told_with_the_reason(inspect, payload, facts, reason):
    assert inspect((tiny_jpeg(), FACTS), (payload, facts), (JPEG, FACTS)) == ({} if reason is None else {1: reason})


@pytest.mark.parametrize("known", [True, False])
def test_good_images_of_every_kind_pass(inspect, known):
    rows = [(stored(name), kind(name.lower()) if known else UNKNOWN) for name in PILLOW_FORMATS]
    rows += [(JPEG, FACTS if known else UNKNOWN)]
    rows += [(jpeg_bytes(corners(16), progressive=True), FACTS | {"sof": 2}), (JPEG, FACTS | {"sof": 1})]
    rows += [(jpeg_bytes(Image.fromarray(corners(16)).convert(mode)), FACTS) for mode in ("L", "CMYK")]
    rows += [(JPEG, FACTS | {"precision": 0, "width": 0, "height": 0})]  # packed without a look at it
    assert inspect(*rows) == {}


def test_the_reasons_are_of_the_places_asked_for(inspect):
    rows = [(JPEG, FACTS), (b"", FACTS), (JPEG, FACTS), (b"nothing", FACTS), (JPEG, FACTS | {"sof": 3})]
    assert list(inspect(*rows)) == [1, 3, 4]


@pytest.mark.parametrize("short", [b"\xff", b"\xff\xd8"])
def test_bytes_of_the_next_payload_do_not_complete_a_short_one(stack, tmp_path, short):
    payloads = [short, (b"\xd8" if len(short) == 1 else b"") + b"\xff" + JPEG, JPEG]
    rows = [DraftSample(key=f"k/{at}", jpeg=one, label=0, facts=FACTS) for at, one in enumerate(payloads)]
    draft = Draft(name="odd", align=512, classes=("a",), shards=[draft_shard("odd-000000.tar", rows, 512)])
    samples, ids = stack(draft.write(tmp_path / "odd")).samples, np.arange(3)
    starts = np.cumsum([0, *map(len, payloads[:2])])
    whole = np.frombuffer(b"".join(payloads), np.uint8)
    assert list(inspect_payloads(samples, ids, samples.locate(ids), whole, starts)) == [0, 1]


def test_nothing_is_inspected_of_nothing(stack, tmp_path):
    on = stack(draft_dataset((2,)).write(tmp_path / "ds"))
    none = np.zeros(0, np.int64)
    assert inspect_payloads(on.samples, none, on.samples.locate(none), np.zeros(0, np.uint8), none) == {}


# --- the record ------------------------------------------------------------------------------------------------------


@pytest.fixture
def samples(stack, tmp_path):
    return stack(draft_dataset((4, 4)).write(tmp_path / "ds"), draft_dataset((3,)).write(tmp_path / "other")).samples


def test_a_bad_sample_is_known_by_its_id(samples):
    bad = BadSamples(samples, "substitute")
    assert (bad.known(np.arange(11)), dict(bad.by_key)) == ({}, {})
    bad.note(6, "it is torn", ("/data/a.tar", 4096), lasting=True)
    bad.note(9, "it is bent", ("/data/b.tar", 8192), lasting=True)
    assert bad.known(np.array([9, 6, 5, 6])) == {0: "it is bent", 1: "it is torn", 3: "it is torn"}
    assert bad.known(np.array([1, 2])) == {}
    assert bad.by_key == {"c/0006": "it is torn", "c/0001": "it is bent"}  # number 1 of the second data set


def test_a_verdict_that_may_depend_on_the_crop_is_told_but_not_known(samples):
    bad = BadSamples(samples, "substitute")
    bad.note(6, "its crop is torn", ("/data/a.tar", 4096), lasting=False)
    assert bad.known(np.arange(11)) == {}
    assert list(bad.by_key.values()) == ["its crop is torn"]
    bad.note(6, "it is torn", ("/data/a.tar", 4096), lasting=True)
    assert bad.known(np.arange(11)) == {6: "it is torn"}


def test_a_bad_sample_is_told_once_with_its_place(samples, caplog):
    bad = BadSamples(samples, "substitute")
    with caplog.at_level(logging.WARNING):
        for number, reason in ((6, "it is torn"), (6, "it is bent"), (2, "it is torn"), (6, "it is torn")):
            bad.note(number, reason, ("/data/a\n.tar", 4096), lasting=True)
    assert [record.getMessage() for record in caplog.records] == [
        "/data/a\\n.tar:4096 [sample c/0006] cannot be used, another sample stands in for it: it is torn",
        "/data/a\\n.tar:4096 [sample c/0002] cannot be used, another sample stands in for it: it is torn",
    ]
    assert bad.by_key["c/0006"] == "it is torn"  # the first reason stays


def test_to_raise_names_shard_offset_and_key(samples, caplog):
    bad = BadSamples(samples, "raise")
    with pytest.raises(FormatError, match="it is torn") as caught:
        bad.note(6, "it is torn", ("/data/a.tar", 4096), lasting=True)
    assert (caught.value.path, caught.value.offset, caught.value.key) == ("/data/a.tar", 4096, "c/0006")
    assert not caplog.records
    assert not bad.known(np.array([6]))


def test_threads_may_write_down_at_the_same_time(samples, caplog):
    bad, start = BadSamples(samples, "substitute"), threading.Barrier(8)

    def work():
        start.wait()
        for number in range(11):
            bad.note(number, "it is torn", ("/data/a.tar", number), lasting=True)
            bad.count_substitutions(1)
            assert number in bad.known(np.arange(11))
            assert len(bad.by_key) <= 11

    with caplog.at_level(logging.WARNING):
        working = [threading.Thread(target=work) for _ in range(8)]
        for thread in working:
            thread.start()
        for thread in working:
            thread.join()
    assert (bad.substitutions, len(caplog.records)) == (88, 11)


# --- who stands in ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "position"),
    [
        ((0, 0, 1000, 0, 0), 665),
        ((0, 1, 1000, 0, 0), 305),
        ((1, 0, 1000, 0, 0), 537),
        ((999, 63, 1000, 7, 90), 843),
        ((2**40 - 1, 0, 2**40, 2**64 - 1, 2**40), 483608943540),
    ],
)
def test_substitutes_are_these_for_ever(arguments, position):
    place, attempt, n, seed, epoch = arguments
    assert substitute_position(place, attempt, n, seed=seed, epoch=epoch) == position


@pytest.mark.parametrize("n", [1, 2, 3, 1000, 2**40])
def test_a_substitute_is_of_the_epoch(n):
    for position in range(0, n, max(n // 50, 1)):
        assert 0 <= substitute_position(position, 3, n, seed=5, epoch=1) < n


def test_attempts_epochs_and_seeds_choose_others():
    def rows(**changes):
        given = {"attempt": 0, "seed": 1, "epoch": 2} | changes
        attempt = given.pop("attempt")
        return [substitute_position(position, attempt, 10**9, **given) for position in range(500)]

    variants = [{}, {"attempt": 1}, {"attempt": ATTEMPTS - 1}, {"seed": 2}, {"epoch": 3}, {"seed": 2, "epoch": 1}]
    chosen = [number for changes in variants for number in rows(**changes)]
    assert max(Counter(chosen).values()) <= 2  # 3,000 of 10**9 hardly meet; equal rows would meet 500 times
    assert len(set(chosen)) > 2990


@pytest.mark.parametrize("by", ["position", "attempt", "epoch", "seed"])
def test_substitutes_are_spread_evenly(by):
    given = {"position": 7, "attempt": 0, "epoch": 3, "seed": 11}
    drawn = []
    for value in range(64 if by == "attempt" else 6400):
        where = given | {by: value}
        choice = {name: where[name] for name in ("seed", "epoch")}
        drawn.append(substitute_position(where["position"], where["attempt"], 64, **choice))
    counts = np.bincount(drawn, minlength=64)
    if by == "attempt":
        assert np.count_nonzero(counts) > 30  # of 64, as chance has it: about 40
    else:
        chi_square = ((counts - 100) ** 2 / 100).sum()
        assert 25 < chi_square < 115  # 63 degrees of freedom: one in ten thousand lies outside
