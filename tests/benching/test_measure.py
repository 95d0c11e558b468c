"""What a run counts, in this process; on a CPU."""

from __future__ import annotations

import dataclasses
import itertools
import os
import time

import pytest

from shardkit.benching.case import Case, Settings
from shardkit.benching.clock import SETTLED, Clock, Pace, drop_pages, read_all, shards_of
from shardkit.benching.measure import as_fast_as_it_goes, measure
from shardkit.benching.plain import PlainReads
from shardkit.benching.training import idle_share
from shardkit.errors import CapabilityError, ConfigError
from shardkit.storage.residency import cached_share
from shardkit.testing.images import coloured, write_pictures

COUNT = 36


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return write_pictures(tmp_path_factory.mktemp("benching") / "ds", coloured(COUNT))


@pytest.fixture
def settings(dataset):
    return Settings(dataset=str(dataset), batch_size=8, size=16, batches=4, warm_up=1)


def payload_bytes(dataset):
    from shardkit import open as open_dataset

    with open_dataset(dataset) as opened:
        return opened.manifest.totals.payload


@pytest.mark.parametrize("shuffle", ["none", "window", "global"])
@pytest.mark.parametrize("cold", [False, True])
def test_reads_are_counted_and_name_their_way(settings, shuffle, cold):
    result = measure(
        Case(kind="read", io="buffered", shuffle=shuffle), dataclasses.replace(settings, cold=cold, batches=3)
    )
    assert (result["batches"], result["images"], result["io"]) == (3, 24, "buffered")
    assert result["images_s"] == pytest.approx(24 / result["seconds"])
    assert result["gb_s"] > 0


def test_cold_reads_end_with_the_epoch(settings, dataset):
    result = measure(
        Case(kind="read", io="buffered", shuffle="none"), dataclasses.replace(settings, cold=True, batches=1000)
    )
    assert result["images"] == COUNT
    assert result["gb_s"] * result["seconds"] * 1e9 == pytest.approx(payload_bytes(dataset))


def test_warm_reads_go_on_with_the_next_epoch(settings):
    result = measure(Case(kind="read", io="auto", shuffle="global"), dataclasses.replace(settings, batches=12))
    assert result["batches"] == 12
    assert result["images"] > COUNT
    assert result["io_reason"]


@pytest.mark.parametrize("cold", [False, True])
def test_finished_batches_are_counted_with_what_the_loader_says(settings, cold):
    case = Case(kind="pipeline", io="buffered", decoder="cpu", shuffle="global", threads=1)
    result = measure(case, dataclasses.replace(settings, cold=cold))
    assert (result["images"], result["io"], result["decoder"]) == (32, "buffered", "cpu")
    assert sum(result["decoded_by"].values()) >= 32
    assert result["first_s"] > 0


def test_decoding_alone_goes_round_in_memory(settings):
    result = measure(Case(kind="decode", decoder="cpu", threads=1), dataclasses.replace(settings, batches=20))
    assert (result["batches"], result["images"], result["decoder"]) == (20, 160, "cpu")


def test_epochs_are_timed_one_by_one(settings):
    result = measure(Case(kind="epochs", io="buffered", decoder="cpu", threads=1), settings)
    assert result["images"] == COUNT // 8 * 8
    assert all(result[f"epoch_{number}_images_s"] > 0 for number in range(3))


def test_the_first_batch_is_timed_from_the_making_of_the_loader(settings):
    result = measure(Case(kind="first", io="buffered", decoder="cpu", threads=1), settings)
    assert result["images"] == 8
    assert result["first_s"] >= result["seconds"]


@pytest.mark.parametrize("kind", ["pipeline", "decode", "first"])
def test_a_dataset_that_fills_no_batch_is_refused(settings, kind):
    with pytest.raises(ConfigError, match="no whole global batch"):
        measure(Case(kind=kind, decoder="cpu"), dataclasses.replace(settings, batch_size=COUNT + 1))


@pytest.mark.parametrize("kind", ["engines", "train"])
def test_what_only_a_gpu_does_is_refused_on_a_cpu(settings, kind):
    with pytest.raises(ConfigError, match="GPU"):
        measure(Case(kind=kind), settings)


def test_the_rival_gives_batches_of_the_same_kind(settings):
    pytest.importorskip("nvidia.dali")
    result = measure(Case(kind="rival", threads=1), settings)
    assert (result["images"], result["batches"]) == (32, 4)
    result = measure(Case(kind="rival", threads=1, options=(("decode", False),)), settings)
    assert result["images"] == 32


def test_plain_reads_give_every_byte(dataset):
    paths = shards_of(str(dataset))
    total = sum(os.path.getsize(path) for path in paths)
    reads = PlainReads(paths, direct=False, threads=3, chunk_bytes=4096)
    assert reads.read() == reads.read() == reads.total_bytes == total
    reads.close()
    reads.close()


def test_plain_reads_are_a_row(settings):
    case = Case(kind="plain", io="buffered", threads=2, chunk_bytes=1 << 20)
    result = measure(case, dataclasses.replace(settings, seconds=0.05))
    assert result["images"] % COUNT == 0


def test_dropped_pages_are_read_from_the_disk_again(dataset):
    paths = shards_of(str(dataset))
    files = [(path, os.path.getsize(path)) for path in paths]
    read_all(paths)
    if cached_share(files, seed=1) in (None, 0.0):
        pytest.skip("this kernel does not tell what it has cached")
    drop_pages(paths)
    if cached_share(files, seed=2) == 1.0:
        pytest.skip("this file system lies in memory")
    assert cached_share(files, seed=3) < 0.5


def test_time_ends_a_run_that_no_number_of_batches_ends():
    def endless():
        while True:
            time.sleep(0.001)
            yield 2

    settings = Settings(dataset="", seconds=0.05)
    result = as_fast_as_it_goes(endless, settings, samples=1, settled=lambda: None, ahead=1)
    assert result["seconds"] >= 0.05
    assert result["images"] == 2 * result["batches"] > 0


def test_the_warm_up_is_not_counted():
    given = []

    def three():
        for number in range(3):
            given.append(number)
            yield 1

    settings = Settings(dataset="", batches=100, warm_up=2)
    assert as_fast_as_it_goes(three, settings, samples=1, settled=lambda: None, ahead=1)["images"] == 1
    assert given == [0, 1, 2]


class Maker:
    """Makes a batch of one image a second, on a clock of its own, while fewer than `room` are not taken yet."""

    def __init__(self, monkeypatch, room):
        self.now, self.room = 0.0, room
        monkeypatch.setattr("time.perf_counter", lambda: self.now)

    def pause(self):
        self.now += 100.0

    def batches(self):
        made, taken = 0.0, []
        for number in itertools.count():
            made = max(made, taken[number - self.room] if number >= self.room else 0.0) + 1.0
            self.now = max(self.now, made)
            taken.append(self.now)
            yield 1
            if not number:
                self.pause()  # as whoever looks when the first one is there


@pytest.mark.parametrize("batches", [1, 2, 50])
@pytest.mark.parametrize("warm_up", [1, 8])
def test_what_was_made_before_the_clock_started_is_not_counted(monkeypatch, batches, warm_up):
    maker = Maker(monkeypatch, room=5)
    settings = Settings(dataset="", batches=batches, warm_up=warm_up)
    result = as_fast_as_it_goes(maker.batches, settings, samples=1, settled=maker.pause, ahead=maker.room + 1)
    assert (result["batches"], result["images_s"]) == (batches, pytest.approx(1.0))


def test_a_cold_run_of_the_loader_begins_with_nothing_read(settings):
    """Whatever comes before it ends with an epoch here, behind which a training loader reads on."""
    case = Case(kind="pipeline", io="buffered", decoder="cpu", shuffle="none", threads=1)
    cold = dataclasses.replace(settings, cold=True, batches=4)
    alone = dataclasses.replace(case, options=(("read_on", False),))
    assert measure(case, cold)["bytes"] == measure(alone, cold)["bytes"]


def test_the_clock_counts_the_processors_own_time():
    clock = Clock()
    end = time.process_time() + 0.2
    while time.process_time() < end:
        pass
    result = clock.stop(100)
    assert 1500 < result["cpu_us"] < 4000
    assert 0 <= result["others"] <= 1
    assert result["images_s"] == pytest.approx(100 / result["seconds"])


def test_idle_is_the_time_between_steps():
    assert idle_share([0.0, 1.0, 2.0], [1.0, 2.0, 3.0]) == 0.0
    assert idle_share([0.0, 3.0], [1.0, 4.0]) == 0.5
    assert idle_share([0.0], [0.0]) == 0.0


def test_a_network_that_nobody_else_measures_would_compare_with_nobody():
    torch = pytest.importorskip("torch")
    from shardkit.benching.resnet import resnet50

    network = resnet50()
    assert sum(part.numel() for part in network.parameters()) == 25_557_032  # torchvision's resnet50
    network.eval()
    with torch.no_grad():
        assert network(torch.zeros(1, 3, 64, 64)).shape == (1, 1000)


def test_a_training_step_trains():
    torch = pytest.importorskip("torch")
    from shardkit.benching.resnet import training_step

    torch.manual_seed(0)
    network = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.Flatten(), torch.nn.Linear(4 * 6 * 6, 2))
    images, labels = torch.randn(8, 3, 8, 8), torch.arange(8) % 2

    def loss():
        with torch.no_grad():
            return torch.nn.functional.cross_entropy(network(images), labels).item()

    before = loss()
    step = training_step(network, "cpu")
    for _ in range(5):
        step(images, labels)
    assert loss() < before


def test_rings_that_cannot_be_had_are_refused_as_such(settings):
    with pytest.raises((CapabilityError, ConfigError)):
        measure(Case(kind="read", io="gds", shuffle="none"), settings)


def test_the_pace_within_epochs_leaves_their_beginnings_out(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    pace = Pace()
    assert pace.figures() == {}
    for _ in range(3):
        pace.begin()
        for number in range(SETTLED + 5):
            now[0] += 5.0 if number < SETTLED else 0.1
            pace.note(20)
    assert pace.figures() == {"within_images_s": pytest.approx(200.0)}
