"""`ShardLoader(device="cuda")`: what a training loop gets, whatever is in flight behind it."""

from __future__ import annotations

import gc
import itertools
import json
import re
import subprocess
import sys
import warnings

import numpy as np
import pytest

from shardkit.errors import CapabilityError, ConfigError, FormatError
from shardkit.testing.images import Picture, write_pictures
from shardkit.testing.photos import photo_file

torch = pytest.importorskip("torch")

from shardkit.torch import ShardLoader  # noqa: E402 - only where there is torch

pytestmark = pytest.mark.gpu

COUNT, BATCH = 200, 16
DECODERS = ["nvjpeg", "dali"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory, photographs, device):
    pictures = [Picture(f"p/{at:03}", photo_file(photographs, at, classes=7).data, at % 7) for at in range(COUNT)]
    return write_pictures(tmp_path_factory.mktemp("gpu-loader") / "ds", pictures)


@pytest.fixture
def load(folder):
    made = []

    def make(**options):
        given = {"batch_size": BATCH, "size": 96, "device": "cuda:0", "seed": 5, "dtype": "uint8", **options}
        made.append(ShardLoader(folder, **given))
        return made[-1]

    yield make
    for loader in made:
        loader.close()


def epoch_of(loader):
    return [(images.cpu(), labels.cpu()) for images, labels in loader]


def assert_equal(found, expected):
    assert len(found) == len(expected)
    for (images, labels), (other_images, other_labels) in zip(found, expected, strict=True):
        assert torch.equal(labels, other_labels)
        assert torch.equal(images, other_images)


@pytest.mark.parametrize("shuffle", ["global", "window", "none"])
@pytest.mark.parametrize("decoder", [*DECODERS, "cpu"])
def test_samples_labels_and_pixels_are_those_of_the_cpu(load, decoder, shuffle):
    given = {"shuffle": shuffle, "fields": ("key", "index"), "extent_bytes": 200_000, "window_extents": 3}
    ours = load(decoder=decoder, **given)
    for found, wanted in zip(ours, load(device="cpu", decoder="cpu", **given), strict=True):
        assert found[2]["key"] == wanted[2]["key"]
        for part, other in ((found[1], wanted[1]), (found[2]["index"], wanted[2]["index"])):
            assert part.device.type == "cuda"
            assert torch.equal(part.cpu(), other)
        distance = (found[0].cpu().int() - wanted[0].int()).abs()
        assert distance.max() <= 48
        assert distance.float().mean() < 1.2


@pytest.mark.parametrize("decoder", DECODERS)
def test_defaults_are_float16_on_the_device_in_its_memory_order(load, decoder):
    images, labels = next(iter(load(decoder=decoder, dtype=None, channels_last=True)))
    assert (images.dtype, images.shape, labels.dtype) == (torch.float16, (BATCH, 3, 96, 96), torch.int64)
    assert images.is_contiguous(memory_format=torch.channels_last)
    assert 0.2 < float(images.float().std()) < 3


@pytest.mark.parametrize("decoder", DECODERS)
def test_an_epoch_goes_on_exactly_behind_the_last_batch(load, decoder):
    whole = epoch_of(load(decoder=decoder))
    first = load(decoder=decoder)
    batches = iter(first)
    begun = [next(batches) for _ in range(4)]
    state = json.loads(json.dumps(first.state_dict()))
    first.close()
    other = load(decoder=decoder)
    other.load_state_dict(state)
    assert_equal([(images.cpu(), labels.cpu()) for images, labels in begun] + epoch_of(other), whole)


@pytest.mark.parametrize(
    "options", [{"prefetch": 1}, {"prefetch": 8}, {"io": "buffered"}, {"io": "direct"}, {"io": "gds"}]
)
def test_pixels_do_not_depend_on_prefetch_or_the_way_to_read(load, options):
    assert_equal(epoch_of(load(decoder="nvjpeg", **options)), epoch_of(load(decoder="nvjpeg")))


def test_the_cache_gives_the_same_batches_and_reads_once(load):
    given = {"decoder": "nvjpeg", "last_batch": "partial"}  # else each epoch leaves other samples out
    plain, cached = load(**given), load(**given, cache_gpu="1GiB", read_on=False)
    read = []
    for epoch in range(3):
        for loader in (plain, cached):
            loader.set_epoch(epoch)
        assert_equal(epoch_of(cached), epoch_of(plain))
        read.append(sum(cached.stats().bytes.values()))
    assert read[0] == read[1] == read[2] > 0
    assert cached.stats().cache["hits"] == 2 * COUNT


@pytest.mark.parametrize("decoder", DECODERS)
def test_the_consumers_path_never_waits_for_the_device(load, decoder):
    total = torch.zeros((), device="cuda:0")
    batches = iter(load(decoder=decoder))
    images, labels = next(batches)
    total += images.float().mean() + labels.float().mean()  # what torch does once, it has done
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch tells that the mode does not see everything
        torch.cuda.set_sync_debug_mode("error")
    try:
        for images, labels in batches:
            total += images.float().mean() + labels.float().mean()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert float(total) > 0


@pytest.mark.parametrize("decoder", DECODERS)
def test_batches_are_whole_however_late_a_busy_stream_looks_at_them(load, decoder):
    """Batches are dropped at once while the kernels that read them still wait behind others."""
    expected = [int(images.long().sum()) for images, _ in epoch_of(load(decoder=decoder))]
    stream = torch.cuda.Stream()
    work = torch.randn(3000, 3000, device="cuda:0")
    sums = []
    loader = load(decoder=decoder, prefetch=6)
    with torch.cuda.stream(stream):
        for images, _ in loader:
            for _ in range(3):
                work = torch.tanh(work @ work)
            sums.append(images.long().sum())
            del images
        found = [int(value) for value in sums]
    assert found == expected


def test_two_thousand_batches_are_those_of_one_after_the_other(load):
    """What each epoch gives is the same whether batches are awaited one by one or run ahead."""
    slow = load(decoder="nvjpeg", prefetch=1, size=32, batch_size=4)
    fast = load(decoder="nvjpeg", prefetch=12, size=32, batch_size=4)
    for epoch in range(20):
        for loader in (slow, fast):
            loader.set_epoch(epoch)
        late = []
        for images, _ in slow:
            torch.cuda.synchronize()
            late.append(int(images.long().sum()))
        ahead = [images.long().sum() for images, _ in fast]
        assert [int(value) for value in ahead] == late


def test_kept_batches_outlive_their_loader(load):
    loader = load(decoder="nvjpeg")
    kept = [images for images, _ in loader]
    copies = [images.clone() for images in kept]
    loader.close()
    load(decoder="nvjpeg", seed=6)
    epoch_of(load(decoder="nvjpeg", seed=6))
    assert all(torch.equal(a, b) for a, b in zip(kept, copies, strict=True))


def test_loaders_that_were_left_in_the_middle_give_their_memory_back(load, device):
    def some(count):
        for _ in range(count):
            loader = load(decoder="nvjpeg")
            next(iter(loader))
            loader.close()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return device.free_bytes

    before = some(3)
    assert before - some(6) < 64 << 20


@pytest.mark.parametrize("augment", ["none", "randaugment"])
def test_recipes_run_on_the_device(load, augment):
    images, _ = next(iter(load(decoder="nvjpeg", augment=augment)))
    if augment == "none":
        assert all(image.device.type == "cuda" and image.shape[2] == 3 for image in images)
        return
    assert images.shape == (BATCH, 3, 96, 96)


@pytest.mark.parametrize("augment", ["none", None, "randaugment"])
@pytest.mark.parametrize("decoder", DECODERS)
def test_a_rank_without_a_sample_in_the_last_batch_gets_an_empty_one(load, decoder, augment):
    loader = load(decoder=decoder, augment=augment, keys=["p/003"], last_batch="partial", rank=1, world_size=2)
    ((images, labels),) = loader
    assert (len(images), labels.shape, labels.device.type) == (0, (0,), "cuda")


@pytest.mark.parametrize("decoder", DECODERS)
@pytest.mark.rare
def test_the_current_device_stays_the_consumers(load, decoder):
    if torch.cuda.device_count() < 2:
        pytest.skip("there is one GPU")
    torch.cuda.set_device(0)
    loader = load(decoder=decoder, device="cuda:1", augment="randaugment")
    for images, labels in loader:
        assert (images.device.index, labels.device.index, torch.cuda.current_device()) == (1, 1, 0)
    loader.close()
    del loader, images, labels
    gc.collect()
    assert torch.cuda.current_device() == 0


def test_a_trace_shows_copies_decoding_and_kernels_of_each_step(load, tmp_path):
    loader, path = load(decoder="nvjpeg", read_on=False), tmp_path / "trace.json"
    with loader.trace(path):
        steps = len(epoch_of(loader))
    events = json.loads(path.read_text())["traceEvents"]
    rows = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    spans = [event for event in events if event["ph"] == "X"]
    names = {event["name"] for event in spans}
    assert {"plan", "read", "stage", "copy", "prepare", "decode", "finish", "kernel", "consumer waits"} <= names
    device = [event | {"row": rows[event["tid"]]} for event in spans if event["cat"] == "device"]
    begins, ends = {}, {}
    for row, name in (("copy", "copy"), ("inspect", "inspect"), ("decode", "decode"), ("finish", "kernel")):
        found = [event for event in device if (event["row"], event["name"]) == (row, name)]
        assert {event["args"]["step"] for event in found} == set(range(steps)), name
        for event in found:
            key = name, event["args"]["step"]
            begins[key] = min(begins.get(key, event["ts"]), event["ts"])
            ends[key] = max(ends.get(key, 0.0), event["ts"] + event["dur"])
        if name in {"copy", "decode"}:
            assert min(event["args"]["bytes"] for event in found) > 1000
    # The clocks of the streams are tied one by one: what follows by the host's waits does so in the trace.
    for step in range(steps):
        for name, after in (("copy", "inspect"), ("inspect", "decode"), ("decode", "kernel")):
            assert ends[name, step] <= begins[after, step] + 1000, (name, after, step)
    for tid in {event["tid"] for event in device}:
        on_row = sorted((event for event in device if event["tid"] == tid), key=lambda event: event["ts"])
        for event, after in itertools.pairwise(on_row):
            assert event["ts"] + event["dur"] <= after["ts"] + 100


LOST = """
import faulthandler, sys, torch
faulthandler.enable()
faulthandler.dump_traceback_later(30, exit=True)
from shardkit.errors import ShardkitError
from shardkit.torch import ShardLoader
folder, decoder = sys.argv[1:]
loader = ShardLoader(folder, batch_size=4, size=96, device="cuda:0", decoder=decoder)
batches = iter(loader)
next(batches)
torch.zeros(1, device="cuda")[torch.tensor([10**9], device="cuda")]  # a real error: the context is lost
try:
    for _ in range(100):
        next(batches)
except ShardkitError as error:
    print("told:", error.path, error.offset, error.key, error, flush=True)
loader.close()
print("closed", flush=True)
"""


@pytest.mark.parametrize("decoder", DECODERS)
def test_a_gpu_that_is_lost_is_told_with_shard_and_key_and_the_loader_closes(folder, decoder):
    """At the process's end PyTorch and DALI may still abort when they free what is theirs, as without us."""
    command = [sys.executable, "-c", LOST, str(folder), decoder]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)
    told = re.search(r"told: (\S+\.tar) \d+ (p/\d+)", done.stdout)
    assert told, (done.stdout, done.stderr[-2000:])
    assert done.stdout.endswith("closed\n"), done.stderr[-2000:]
    assert done.returncode == 0 or "what():  CUDA" in done.stderr, done.stderr[-2000:]
    assert "Traceback" not in done.stderr
    assert "nvjpeg::" not in done.stderr, "its destructors are ours to spare"


@pytest.mark.parametrize("decoder", DECODERS)
def test_a_batch_without_room_is_told_and_the_next_loader_goes_on(load, decoder):
    loader = load(decoder=decoder, batch_size=64, size=512, dtype="float32")  # 200 MB a batch
    batches = iter(loader)
    kept = [next(batches)[0].shape]
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(1e-4)
    try:
        with pytest.raises(CapabilityError, match="no memory for a buffer") as caught:
            kept.extend(images for images, _ in batches)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert caught.value.key in {f"p/{at:03}" for at in range(COUNT)}
    loader.close()
    assert len(epoch_of(load(decoder=decoder))) == COUNT // BATCH


def test_stats_tell_what_decoded_and_what_it_takes(load):
    loader = load(decoder="nvjpeg")
    epoch_of(loader)
    stats = loader.stats()
    assert stats.decoder == "nvjpeg"
    assert "by name" in stats.decoder_reason
    assert stats.decoded_by["nvjpeg"] >= len(loader) * BATCH
    assert stats.memory["gpu encoded"] > 0
    assert stats.memory["gpu decoder"] > 1 << 20


def test_auto_measures_once_and_remembers(load, measurements):
    measurements.unlink(missing_ok=True)
    loader = load(decoder="auto", read_on=False)
    (rates,) = json.loads(measurements.read_text())["decoders"].values()
    assert set(rates) == {"nvjpeg", "dali"}
    assert min(rates.values()) > 100
    assert f"{rates['dali']:,.0f} with dali" in loader.stats().decoder_reason
    assert sum(loader.stats().decoded_by.values()) == 0
    batches = epoch_of(loader)
    assert_equal(batches, epoch_of(load(decoder="nvjpeg")))
    told = measurements.read_text()
    for name, nvjpeg, dali in (("nvjpeg", 30_000.0, 20_000.0), ("dali", 20_000.0, 30_000.0)):
        measurements.write_text(told.replace(str(rates["nvjpeg"]), str(nvjpeg)).replace(str(rates["dali"]), str(dali)))
        again = load(decoder="auto")
        assert again.stats().decoder == name
        assert f"{nvjpeg:,.0f} images/s" in again.stats().decoder_reason
        assert_equal(epoch_of(again), batches)


@pytest.mark.parametrize("error", [CapabilityError("no room"), FormatError("no picture")])
def test_auto_is_nvjpeg_where_nothing_can_be_measured(load, measurements, monkeypatch, error):
    def fail(*_, **__):
        raise error

    measurements.unlink(missing_ok=True)
    monkeypatch.setattr("shardkit.torch.decoders.rates_of", fail)
    loader = load(decoder="auto")
    assert loader.stats().decoder == "nvjpeg"
    assert "the JPEG engines take 100.0%" in loader.stats().decoder_reason
    assert not measurements.exists()
    assert_equal(epoch_of(loader), epoch_of(load(decoder="nvjpeg")))


def test_the_cache_is_for_bytes_on_the_device(load):
    with pytest.raises(ConfigError, match="nvjpeg"):
        load(decoder="dali", cache_gpu=1 << 30)


@pytest.mark.rare
def test_each_gpu_has_loaders_of_its_own(load):
    if torch.cuda.device_count() < 2:
        pytest.skip("there is one GPU")
    loaders = [load(decoder=decoder, device=f"cuda:{gpu}") for decoder in DECODERS for gpu in (0, 1)]
    for batches in zip(*loaders, strict=True):
        assert [images.device.index for images, _ in batches] == [0, 1, 0, 1]
        for _, labels in batches[1:]:
            assert torch.equal(labels.cpu(), batches[0][1].cpu())
        assert torch.equal(batches[1][0].cpu(), batches[0][0].cpu())
        assert torch.equal(batches[3][0].cpu(), batches[2][0].cpu())


def test_the_arrays_are_the_callers(load):
    batches = [images for images, _ in load(decoder="nvjpeg")]
    assert len({images.data_ptr() for images in batches}) == len(batches)
    first = batches[0].clone()
    for images in batches[1:]:
        images.zero_()
    assert torch.equal(batches[0], first)
    assert np.prod(first.shape) == first.numel()
