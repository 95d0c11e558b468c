"""Which decoder is the faster one: how it is measured, what decides, and what is remembered."""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time

import pytest

from shardkit.dataset.arrangement import open_samples
from shardkit.errors import FormatError, ShardkitError
from shardkit.pipeline.cpu import PillowDecoder
from shardkit.pipeline.dali import DaliDecoder
from shardkit.pipeline.decoder import DecodedBatch, DecodeSpec
from shardkit.testing.images import Picture, coloured, write_pictures
from shardkit.torch.decoders import MOSTLY, choose_name
from shardkit.torch.measured import Memory, better, kind_of, memory_file, rates_of

COUNT = 21
LONG = 20.0
"""Seconds: longer than any machine takes for what does not wait."""
SPEC = DecodeSpec(size=16, train=True, threads=1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_pictures(tmp_path_factory.mktemp("measured") / "ds", coloured(COUNT))


@pytest.fixture
def samples(folder):
    found = open_samples([folder])
    yield found
    found.close()


@pytest.fixture
def memory(tmp_path):
    return Memory(tmp_path / "cache" / "shardkit" / "decoders.json")


# --- what decides ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("nvjpeg", "dali", "name"),
    [(24_000, 24_000, "nvjpeg"), (24_000, 26_000, "nvjpeg"), (24_000, 26_500, "dali"), (10, 9, "nvjpeg")],
)
def test_dali_has_to_be_a_tenth_faster(nvjpeg, dali, name):
    chosen, reason = better({"nvjpeg": nvjpeg, "dali": dali})
    assert chosen == name
    assert f"{nvjpeg:,} images/s with nvjpeg and {dali:,} with dali" in reason


@pytest.mark.parametrize(
    ("share", "refusal", "device_bytes", "name"),
    [
        (1.0, None, False, "nvjpeg"),
        (MOSTLY, None, False, "nvjpeg"),
        (MOSTLY - 0.01, None, False, "dali"),
        (1.0, "no engines", False, "dali"),
        (0.5, None, True, "nvjpeg"),
    ],
)
def test_facts_decide_first(share, refusal, device_bytes, name):
    chosen, reason = choose_name("auto", share=share, refusal=refusal, device_bytes=device_bytes)
    assert chosen == name
    assert reason
    assert choose_name("dali", share=share, refusal=refusal, device_bytes=device_bytes)[0] == "dali"


# --- the measurement -------------------------------------------------------------------------------------------------


def rates(samples, batch_size=4, **decoders):
    return rates_of(decoders, samples, None, batch_size=batch_size)


@pytest.mark.parametrize("batch_size", [1, 4, COUNT, 3 * COUNT])
def test_it_is_made_on_the_datasets_own_images(samples, batch_size):
    decoders = {"cpu": PillowDecoder(SPEC), "dali": DaliDecoder(SPEC, batch_size=batch_size)}
    found = rates(samples, batch_size, **decoders)
    assert list(found) == ["cpu", "dali"]
    for name, decoder in decoders.items():
        assert found[name] > 0
        # Three turns, in each once to warm up, and seven times.
        assert sum(decoder.counts.values()) == 3 * 8 * min(4 * batch_size, COUNT)
        decoder.close()


class Late(PillowDecoder):
    """Waits before batches as long as `late` says of their number, counted over all runs."""

    def __init__(self, late):
        super().__init__(SPEC)
        self._late, self._number = late, 0

    def decode(self, source, epoch):
        for decoded in super().decode(source, epoch):
            time.sleep(0.05 if self._late(self._number) else 0)
            self._number += 1
            yield decoded


def test_the_faster_one_has_the_higher_rate(samples):
    found = rates(samples, slow=Late(lambda _: True), fast=PillowDecoder(SPEC))
    assert found["slow"] < 4 / 0.05 * 1.3
    assert found["fast"] > found["slow"]


@pytest.mark.parametrize(
    "late",
    [
        pytest.param(lambda number: number < 4 * 8, id="in the first turn"),
        pytest.param(lambda number: number % 32 < 16, id="in the first half of each turn"),
    ],
)
def test_a_slow_beginning_is_not_the_rate(samples, late):
    assert rates(samples, late=Late(late))["late"] > 2 * 4 / 0.05


def test_decoders_take_turns(samples):
    order = []

    class Watched(PillowDecoder):
        def __init__(self, name):
            super().__init__(SPEC)
            self._name = name

        def decode(self, source, epoch):
            order.append(self._name)
            return super().decode(source, epoch)

    rates(samples, one=Watched("one"), other=Watched("other"))
    assert order == ["one", "other"] * 3


def test_an_image_that_cannot_be_decoded_ends_it(tmp_path):
    pictures = [Picture(p.key, b"no picture", p.label, p.metadata) for p in coloured(3)]
    folder = write_pictures(tmp_path / "ds", pictures)
    with contextlib.closing(open_samples([folder])) as samples, pytest.raises(ShardkitError):
        rates(samples, cpu=PillowDecoder(SPEC))


def test_only_what_is_selected_is_decoded(folder):
    decoder = PillowDecoder(SPEC)
    first, last = coloured(COUNT)[0].key, coloured(COUNT)[-1].key
    with contextlib.closing(open_samples([folder], keys=[first, last])) as samples:
        rates(samples, cpu=decoder)
    assert decoder.counts == {"pillow": 3 * 8 * 2}


def test_images_that_are_far_larger_than_those_behind_them_find_memory(tmp_path):
    pictures = [
        Picture(p.key, p.jpeg + bytes(500_000) if number < 16 else p.jpeg, p.label, p.metadata)
        for number, p in enumerate(coloured(400))
    ]
    found = {}
    with contextlib.closing(open_samples([write_pictures(tmp_path / "ds", pictures)])) as samples:
        measuring = threading.Thread(target=lambda: found.update(rates(samples, cpu=PillowDecoder(SPEC))), daemon=True)
        measuring.start()
        measuring.join(LONG)
    assert len(found) == 1


@pytest.mark.parametrize("error", [KeyboardInterrupt, FormatError("the device is gone")])
def test_a_run_that_ends_early_is_closed(samples, error):
    done = []

    class Watched(PillowDecoder):
        def decode(self, source, epoch):
            try:
                for decoded in super().decode(source, epoch):
                    yield Failing(decoded.pixels, decoded.batch)
            finally:
                done.append("run")

    class Failing(DecodedBatch):
        def settle(self):
            raise error

    with pytest.raises((KeyboardInterrupt, FormatError)):
        rates(samples, cpu=Watched(SPEC))
    assert done == ["run"]


# --- what is remembered ----------------------------------------------------------------------------------------------


def test_what_is_kept_is_there_for_the_next_process(memory, tmp_path):
    assert memory.rates("a") is None
    memory.keep("a", {"nvjpeg": 24_000.04, "dali": 23_000.0})
    memory.keep("b", {"nvjpeg": 1.0, "dali": 2.0})
    again = Memory(tmp_path / "cache" / "shardkit" / "decoders.json")
    assert again.rates("a") == {"nvjpeg": 24_000.0, "dali": 23_000.0}
    assert again.rates("c") is None
    memory.keep("a", {"nvjpeg": 5.0, "dali": 6.0})
    assert again.rates("a") == {"nvjpeg": 5.0, "dali": 6.0}
    assert again.rates("b") == {"nvjpeg": 1.0, "dali": 2.0}
    assert [file.name for file in (tmp_path / "cache" / "shardkit").iterdir()] == ["decoders.json"]


def test_one_process_measures_at_a_time(memory, tmp_path):
    order, entered = [], threading.Event()
    again = Memory(tmp_path / "cache" / "shardkit" / "decoders.json")

    def other():
        entered.set()
        with again.alone():
            order.append(again.rates("a"))

    waiting = threading.Thread(target=other, daemon=True)
    with memory.alone():
        waiting.start()
        assert entered.wait(LONG)
        time.sleep(0.3)  # it would have been in by now
        memory.keep("a", {"nvjpeg": 1.0, "dali": 2.0})
    waiting.join(LONG)
    assert order == [{"nvjpeg": 1.0, "dali": 2.0}]


@pytest.mark.parametrize("how", ["no file", "no folder to be had", "held for too long"])
def test_who_cannot_wait_measures_all_the_same(tmp_path, monkeypatch, how):
    file = tmp_path / "cache" / "decoders.json"
    monkeypatch.setattr("shardkit.torch.measured._PATIENCE_S", 0.1)
    with contextlib.ExitStack() as stack:
        if how == "no folder to be had":
            (tmp_path / "cache").write_text("a file")
        if how == "held for too long":
            stack.enter_context(Memory(file).alone())
        with Memory(None if how == "no file" else file).alone():
            pass


def test_the_oldest_go_when_there_are_too_many(memory):
    for number in range(300):
        memory.keep(str(number), {"nvjpeg": 1.0, "dali": 1.0})
    assert memory.rates("43") is None
    assert memory.rates("44") is not None
    assert memory.rates("299") is not None


@pytest.mark.parametrize(
    "text",
    ["", "no JSON", "[]", "{}", '{"version": 1, "decoders": {"a": {"nvjpeg": 1, "dali": 1}}}', "[" * 100_000, "\xff"]
    + [
        json.dumps({"version": 2, "decoders": {"a": rates}})
        for rates in (
            *(None, 3, {}, {"nvjpeg": 1}, {"nvjpeg": 1, "dali": "2"}, {"nvjpeg": 0, "dali": 1}),
            {"nvjpeg": 10**400, "dali": 1},
        )
    ],
)  # fmt: skip
def test_what_is_no_measurement_is_measured_again(tmp_path, text):
    file = tmp_path / "decoders.json"
    file.write_bytes(text.encode("latin-1"))
    memory = Memory(file)
    assert memory.rates("a") is None
    memory.keep("a", {"nvjpeg": 2.0, "dali": 1.0})
    assert memory.rates("a") == {"nvjpeg": 2.0, "dali": 1.0}


def test_a_place_that_cannot_be_written_is_no_error(tmp_path, caplog):
    (tmp_path / "file").write_text("in the way")
    memory = Memory(tmp_path / "file" / "decoders.json")
    with caplog.at_level("INFO"):
        memory.keep("a", {"nvjpeg": 2.0, "dali": 1.0})
    assert memory.rates("a") is None
    assert "not kept" in caplog.text


def test_a_file_that_is_none_is_not_waited_for_and_no_file_stays_behind(tmp_path, caplog):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    with (tmp_path / "large").open("wb") as file:
        file.truncate(1 << 40)
    for name in ("pipe", "folder", "large"):
        memory = Memory(tmp_path / name)
        assert memory.rates("a") is None
        with caplog.at_level("INFO"):
            memory.keep("a", {"nvjpeg": 2.0, "dali": 1.0})
        assert (memory.rates("a") is None) == (name == "folder")
    assert caplog.text.count("not kept") == 1
    assert sorted(file.name for file in tmp_path.iterdir()) == ["folder", "large", "pipe"]


def test_many_that_keep_at_once_leave_a_whole_file(memory, tmp_path):
    def keep(number):
        for _ in range(5):
            memory.keep(str(number), {"nvjpeg": 2.0, "dali": 1.0})
            assert len(memory._read()) >= 1

    threads = [threading.Thread(target=keep, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert any(memory.rates(str(number)) for number in range(8))
    assert [file.name for file in (tmp_path / "cache" / "shardkit").iterdir()] == ["decoders.json"]


def test_a_user_without_a_home_measures_each_time(monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(os, "getuid", lambda: 1 << 30)
    assert memory_file() is None
    memory = Memory(memory_file())
    memory.keep("a", {"nvjpeg": 2.0, "dali": 1.0})
    assert memory.rates("a") is None


def test_it_lies_in_the_users_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert memory_file() == tmp_path / "shardkit" / "decoders.json"
    monkeypatch.setenv("HOME", str(tmp_path))
    for other in ("", "relative"):
        monkeypatch.setenv("XDG_CACHE_HOME", other)
        assert memory_file() == tmp_path / ".cache" / "shardkit" / "decoders.json"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert memory_file() == tmp_path / ".cache" / "shardkit" / "decoders.json"


def test_images_of_one_size_class_share_a_measurement():
    assert kind_of(200_000, 70_000) == kind_of(250_000, 90_000) == "images of 2^18 pixels and 2^16 bytes"
    assert kind_of(90_000, 90_000) != kind_of(200_000, 90_000)
    assert kind_of(0, 0) == "images of 2^0 pixels and 2^0 bytes"
