"""ShardLoader: what comes out, in which order, how often, and what is left behind when it ends."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import torch

from shardkit.dataset.shardset import open_dataset
from shardkit.errors import CapabilityError, ConfigError, ShardkitError
from shardkit.pipeline.decoder import IMAGENET_MEAN, IMAGENET_STD
from shardkit.testing.images import COLOURS, Picture, coloured, write_pictures
from shardkit.torch import ShardLoader
from shardkit.torch.decoders import Chosen

COUNT = 61


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_pictures(tmp_path_factory.mktemp("loader") / "ds", coloured(COUNT))


@pytest.fixture
def load(folder):
    """A function that makes loaders, closed at the end; leaves no thread of ours behind."""
    made = []

    def make(batch_size=8, path=folder, **options):
        made.append(ShardLoader(path, batch_size, **{"size": 16} | options))
        return made[-1]

    yield make
    for loader in made:
        loader.close()
    assert [t.name for t in threading.enumerate() if t.name.startswith("shardkit")] == []


def ids_of(loader):
    return [extras["index"].tolist() for _, _, extras in loader]


def test_images_and_labels_are_those_of_the_samples(load, folder):
    loader = load(fields=("key", "index", "json"))
    with open_dataset(folder) as dataset:
        for images, labels, extras in loader:
            assert (images.shape, images.dtype, images.device.type) == ((8, 3, 16, 16), torch.float32, "cpu")
            assert (labels.shape, labels.dtype) == ((8,), torch.int64)
            assert list(extras) == ["key", "index", "json"]
            assert extras["index"].dtype == torch.int64
            for i, number in enumerate(extras["index"].tolist()):
                sample = dataset[number]
                assert (sample.key, sample.label, sample.metadata) == (
                    extras["key"][i], labels[i].item(), extras["json"][i],
                )  # fmt: skip
                shown = images[i].mean(dim=(1, 2)).numpy() * loader.std + loader.mean
                assert np.abs(shown - COLOURS[labels[i]]).max() < 3


def test_without_fields_a_batch_is_images_and_labels(load):
    images, labels = next(iter(load()))
    assert len(images) == len(labels) == 8


def test_unlabelled_samples_have_label_minus_one(load, tmp_path):
    pictures = [Picture(p.key, p.jpeg, None, p.metadata) for p in coloured(6)]
    loader = load(3, path=write_pictures(tmp_path / "ds", pictures))
    assert [labels.tolist() for _, labels in loader] == [[-1] * 3] * 2


@pytest.mark.parametrize(
    ("labelled", "told"),
    [(slice(0), r"no sample of \S+ds has a label, all are -1.* --labels dir or column"),
     (slice(4), r"2 of 6 samples of \S+ds have no label, theirs is -1: where='label is not None'"),
     (slice(6), None)],
)  # fmt: skip
def test_samples_without_a_label_are_told_once(load, tmp_path, caplog, labelled, told):
    pictures = coloured(6)
    pictures[labelled.stop :] = [Picture(p.key, p.jpeg, None, p.metadata) for p in pictures[labelled.stop :]]
    loader = load(3, path=write_pictures(tmp_path / "ds", pictures))
    for _ in range(2):
        list(loader)
    assert [bool(re.match(told, message)) for message in caplog.messages] == [True] if told else not caplog.messages


def test_of_a_selection_without_unlabelled_samples_nothing_is_told(load, tmp_path, caplog):
    pictures = [*coloured(3), Picture("z", coloured(1)[0].jpeg, None, {})]
    load(3, path=write_pictures(tmp_path / "ds", pictures), where="label is not None")
    assert not caplog.messages


@pytest.mark.parametrize("last_batch", ["drop", "pad", "partial"])
@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("shuffle", ["global", "none"])
def test_an_epoch_over_all_ranks_is_every_sample_once(load, last_batch, world_size, shuffle):
    batch = 5
    ranks = [
        load(batch, last_batch=last_batch, rank=rank, world_size=world_size, shuffle=shuffle, fields=("index",))
        for rank in range(world_size)
    ]
    steps = [ids_of(loader) for loader in ranks]
    assert {len(ids) for ids in steps} == {len(loader) for loader in ranks}
    flat = [number for ids in steps for step in ids for number in step]
    if last_batch == "drop":
        assert len(flat) == len(set(flat)) == COUNT // (batch * world_size) * batch * world_size
    else:
        assert set(flat) == set(range(COUNT))
        assert len(flat) == (COUNT if last_batch == "partial" else len(steps[0]) * batch * world_size)
    if last_batch != "partial":
        assert all(len(step) == batch for ids in steps for step in ids)


def test_global_batches_are_the_same_for_every_world_size(load):
    def global_batches(world_size):
        ranks = [
            ids_of(load(12 // world_size, rank=rank, world_size=world_size, fields=("index",), seed=4))
            for rank in range(world_size)
        ]
        return [sorted(number for ids in step for number in ids) for step in zip(*ranks, strict=True)]

    assert global_batches(1) == global_batches(2) == global_batches(3)


def test_a_world_size_that_does_not_divide_the_lanes_is_refused(load):
    with pytest.raises(ConfigError, match="lanes"):
        load(8, rank=0, world_size=3, lanes=8)


def test_training_shuffles_and_drops_and_evaluation_does_not(load):
    train, evaluation = load(fields="index"), load(train=False, fields="index")
    assert ids_of(evaluation) == [list(range(i, min(i + 8, COUNT))) for i in range(0, COUNT, 8)]
    assert (len(train), len(evaluation)) == (COUNT // 8, -(-COUNT // 8))
    assert ids_of(train) != ids_of(evaluation)[: len(train)]


def test_epochs_differ_and_a_seed_repeats(load):
    def run(loader, epochs):
        out = []
        for epoch in epochs:
            loader.set_epoch(epoch)
            out.append([(images, labels) for images, labels in loader])
        return out

    def same(a, b):
        return all(torch.equal(x, y) and torch.equal(u, v) for (x, u), (y, v) in zip(a, b, strict=True))

    first, second, again = run(load(seed=1), [0, 1, 0])
    assert not same(first, second)
    assert same(first, again)
    assert same(second, run(load(seed=1), [1])[0])
    assert same(first, run(load(seed=1, prefetch=1, threads=1, io="buffered"), [0])[0])
    assert same(first, run(load(seed=np.int64(1)), [np.int64(0)])[0])
    assert not same(first, run(load(seed=2), [0])[0])


def test_the_epoch_moves_on_by_itself(load):
    named, counting = load(fields="index"), load(fields="index")
    for epoch in range(3):
        assert counting.epoch == epoch
        named.set_epoch(epoch)
        assert ids_of(counting) == ids_of(named)
    counting.set_epoch(0)
    named.set_epoch(0)
    next(iter(counting))  # an epoch that was left early has been used, too
    assert counting.epoch == 1


@pytest.mark.parametrize("decoder", ["auto", "dali", "cpu"])
@pytest.mark.parametrize("dtype", ["float32", torch.float16, "uint8"])
def test_types_decoders_and_memory_format(load, decoder, dtype):
    images, _ = next(iter(load(decoder=decoder, dtype=dtype, channels_last=True)))
    assert images.dtype == (dtype if isinstance(dtype, torch.dtype) else getattr(torch, dtype))
    assert images.shape == (8, 3, 16, 16)
    assert images.is_contiguous(memory_format=torch.channels_last)
    plain, _ = next(iter(load(decoder=decoder, dtype=dtype)))
    assert plain.is_contiguous()
    assert torch.equal(plain, images)


def test_mean_and_std_are_what_was_applied(load):
    loader = load()
    assert (loader.mean, loader.std) == (IMAGENET_MEAN, IMAGENET_STD)
    other = load(mean=[0, 0, 0], std=[255] * 3)
    assert other.std == (255.0, 255.0, 255.0)
    images, _ = next(iter(other))
    assert images.min() >= 0
    assert 0.5 < images.max() <= 1


def test_augment_is_called_on_dali_nodes(load):
    plain, _ = next(iter(load(dtype="uint8")))
    inverted, _ = next(iter(load(dtype="uint8", augment=lambda images: 255 - images)))
    assert torch.equal(inverted, 255 - plain)


def test_batches_stay_when_the_loader_moves_on(load):
    loader = load()
    kept = [images for images, _ in loader]
    copies = [images.clone() for images in kept]
    for _ in loader:
        pass
    assert all(torch.equal(a, b) for a, b in zip(kept, copies, strict=True))


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"shuffle": "yes"}, "global or window or none"),
        ({"shuffle": False}, "global or window or none"),
        ({"shuffle": ""}, "global or window or none"),
        ({"last_batch": False}, "drop or pad or partial"),
        ({"mean": (0.485, 0.456, 0.406)}, r"0\.\.255.*123\.675, 116\.280, 103\.530"),
        ({"std": (0.229, 0.224, 0.225)}, r"0\.\.255.*58\.395"),
        ({"shuffle": "window", "extent_bytes": 0}, "extent_bytes >= 1"),
        ({"shuffle": "window", "window_extents": 0}, "window_extents >= 1"),
        ({"check": "md5"}, "none or crc"),
        ({"on_bad": "skip"}, "substitute or raise"),
        ({"stuck_after": 0}, "stuck_after > 0"),
        ({"timeout": "soon"}, "timeout > 0"),
        ({"labels": ["no such"]}, "no such"),
        ({"keys": ["no such"]}, "no such"),
        ({"path": []}, "mix of no datasets"),
        ({"path": 3}, "path, or"),
        ({"last_batch": "keep"}, "drop or pad or partial"),
        ({"io": "fast"}, "auto or buffered or direct or uring"),
        ({"decoder": "gpu"}, "auto or nvjpeg or dali or cpu"),
        ({"decoder": "nvjpeg"}, "a GPU's.*device='cuda'"),
        ({"io": "gds"}, "a GPU's memory.*device='cuda'"),
        ({"cache_gpu": "1GiB"}, "a GPU's memory.*device='cuda'"),
        ({"cache_gpu": "much"}, "16GiB"),
        ({"staging": "paged"}, "pinned or managed"),
        ({"fields": ("key", "path")}, "key or index or json"),
        ({"dtype": "int8"}, "float32 or float16 or uint8"),
        ({"dtype": torch.float64}, "float32 or float16 or uint8"),
        ({"device": "toaster"}, "no such device"),
        ({"device": "cpu:3"}, "one CPU"),
        ({"cache_gpu": True}, "cache_gpu is a whole number"),
        ({"prefetch": True}, "prefetch is a whole number"),
        ({"read_on": "no"}, "read_on is true or false"),
        ({"channels_last": "no"}, "channels_last is true or false"),
        ({"train": "no"}, "train is true or false"),
        ({"train": None}, "train is true or false"),
        ({"rank": 0}, "named together"),
        ({"rank": 2, "world_size": 2}, "no such rank"),
        ({"prefetch": 0}, "prefetch >= 1"),
        ({"threads": 0}, "threads >= 1"),
        ({"size": 0}, "size >= 1"),
        ({"size": 10**9}, "size <= 65536"),
        ({"fields": None}, "key, index, json"),
        ({"fields": 3}, "key, index, json"),
        ({"mean": (1, 2)}, "red, green and blue"),
        ({"std": (1, 1, 0)}, "above 0"),
        ({"decoder": "cpu", "augment": lambda images: images}, "DALI"),
        ({"batch_size": 0}, "batch_size"),
        ({"batch_size": 8.0}, "batch_size is a whole number"),
        ({"seed": "0"}, "seed is a whole number"),
        ({"seed": 2**64}, "seed"),
        ({"lanes": "all"}, "lanes is a whole number"),
        ({"rank": 0.0, "world_size": 1}, "rank is a whole number"),
        ({"mean": 3}, "red, green and blue"),
        ({"std": ("a", "b", "c")}, "red, green and blue"),
        ({"batch_size": COUNT + 1}, "drop"),
        ({"path": "/nowhere"}, "no such dataset"),
    ],
    ids=lambda value: None if isinstance(value, str) else "-".join(value),
)
def test_what_cannot_be_served_is_refused_with_the_choices(load, options, match):
    with pytest.raises(ConfigError, match=match):
        load(**options)


@pytest.mark.parametrize("device", ["cuda", "cuda:1", torch.device("cuda")])
def test_a_gpu_that_is_not_there_is_refused_honestly(load, device):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(CapabilityError, match=r"no NVIDIA driver.*device='cpu'"):
        load(device=device)


def test_stats_count_batches_bytes_and_waits(load, folder):
    loader = load(read_on=False)
    assert loader.stats().batches == 0
    for _ in range(2):
        for _ in loader:
            pass
    stats = loader.stats()
    assert (stats.batches, stats.samples) == (2 * len(loader), 2 * len(loader) * 8)
    assert sum(stats.bytes.values()) > 2 * 0.9 * sum(sizes(folder))
    assert stats.io in ("buffered", "direct", "uring")
    assert stats.io_reason
    assert stats.decoder == "dali"
    assert stats.decoded_by.get("dali", 0) + stats.decoded_by.get("pillow", 0) >= stats.samples
    assert stats.wait_read_s >= 0
    assert stats.wait_decode_s > 0
    assert stats.bad == {}
    assert stats.buffer_bytes == 0  # an epoch that is over holds nothing
    batches = iter(loader)
    next(batches)
    assert 0 < loader.stats().buffer_bytes <= stats.buffer_budget_bytes
    assert f"at most {stats.buffer_budget_bytes} bytes" in repr(loader)
    batches.close()
    assert loader.stats().buffer_bytes == 0
    stats = loader.stats()
    loader.close()
    assert loader.stats().samples == stats.samples


def test_a_loader_shows_its_decoder_and_why_auto_took_it(load):
    assert "decoder='dali' (auto: on a CPU DALI is the fastest), at most" in repr(load())
    for name in ("dali", "cpu"):
        assert f"decoder={name!r}, at most" in repr(load(decoder=name))


def test_a_long_reason_is_cut_and_stays_on_its_line(load):
    decoder = load()._chosen.decoder
    told = str(Chosen(decoder, "nvJPEG is not here: found libnvjpeg.so:\n" + 30 * "cannot open it "))
    assert told.startswith("'dali' (auto: nvJPEG is not here: found libnvjpeg.so: cannot open it")
    assert "\n" not in told
    assert len(told) < 150


def sizes(folder):
    with open_dataset(folder) as dataset:
        return dataset.columns["size"][:]


def test_direct_reads_give_the_same_batches(load):
    try:
        direct = load(io="direct", fields=("key", "json"))
    except CapabilityError as error:
        pytest.skip(str(error))
    for a, b in zip(direct, load(io="buffered", fields=("key", "json")), strict=True):
        assert torch.equal(a[0], b[0])
        assert a[2] == b[2]
    assert direct.stats().bytes["direct"] > 0


def test_leaving_early_leaves_no_threads(load):
    loader = load(prefetch=2)
    for _ in loader:
        break
    gc.collect()
    left = [t.name for t in threading.enumerate() if t.name.startswith("shardkit-")]
    assert [name for name in left if not name.startswith("shardkit-read")] == []  # the reader's are the loader's
    loader.close()
    loader.close()
    assert [t.name for t in threading.enumerate() if t.name.startswith("shardkit-")] == []
    with pytest.raises(ConfigError, match="closed"):
        iter(loader)


def test_a_new_iteration_ends_the_one_before(load):
    loader = load(fields="index")
    first = iter(loader)
    next(first)
    assert len(list(iter(loader))) == len(loader)
    with pytest.raises(ConfigError, match=r"this iteration is over: another one .*a loader of its own"):
        next(first)  # a loop that ended here as if the epoch were over would miss batches in silence
    second = iter(loader)
    next(second)
    loader.close()
    with pytest.raises(ConfigError, match="the loader was closed"):
        next(second)


def test_an_iteration_that_is_over_stays_over(load):
    batches = iter(load())
    assert len(list(batches)) == COUNT // 8
    load().close()
    with pytest.raises(StopIteration):
        next(batches)


class InWorkers(torch.utils.data.IterableDataset):
    def __init__(self, loader):
        self.loader = loader

    def __iter__(self):
        return iter(self.loader)


def test_a_worker_of_a_data_loader_is_refused_since_all_of_them_would_read_everything(load):
    loader = load()
    workers = torch.utils.data.DataLoader(
        InWorkers(loader), batch_size=None, num_workers=2, multiprocessing_context="fork"
    )
    with pytest.raises(ConfigError, match=r"used in the process that made it.*ShardDataset"):
        next(iter(workers))
    with pytest.raises(ConfigError, match="does not go to another process"):
        pickle.dumps(loader)
    assert len(list(loader)) == len(loader)


@pytest.mark.filterwarnings("error")
def test_the_garbage_collector_may_end_a_loader_in_its_own_reading_thread(folder):
    gone = threading.Event()

    def abandon():
        loader = ShardLoader(folder, 8, size=16, decoder="cpu", threads=1, prefetch=100)
        reader = loader._encoded._source.reader
        original = reader.read

        def read(reads, memory):
            gone.wait(10)
            gc.collect()
            return original(reads, memory)

        reader.read = read
        cycle = [loader, iter(loader)]
        cycle.append(cycle)

    gc.collect()
    gc.disable()
    try:
        abandon()
        gone.set()
        deadline = time.monotonic() + 20
        while left := [t.name for t in threading.enumerate() if t.name.startswith("shardkit-")]:
            assert time.monotonic() < deadline, left
            time.sleep(0.02)
    finally:
        gc.enable()


def test_the_loader_is_a_context_manager(folder):
    with ShardLoader(folder, 8, size=16) as loader:
        next(iter(loader))
    with pytest.raises(ConfigError):
        iter(loader)


def test_twenty_loaders_leave_descriptors_and_threads_flat(folder):
    def use(close):
        loader = ShardLoader(folder, 8, size=16)
        for step, _ in enumerate(loader):
            if step == 2:
                break
        if close:
            loader.close()

    use(close=True)
    gc.collect()
    tasks, files = (len(os.listdir(f"/proc/self/{what}")) for what in ("task", "fd"))
    for number in range(20):
        use(close=number % 2 == 0)  # those that are only dropped, too
    gc.collect()
    assert len(os.listdir("/proc/self/task")) <= tasks
    assert len(os.listdir("/proc/self/fd")) <= files


INTERRUPTED = """
import sys, threading, time
from shardkit.torch import ShardLoader
loader = ShardLoader(sys.argv[1], 8, size=16)
try:
    while True:
        for images, labels in loader:
            print("batch", flush=True)
            time.sleep(0.02)
except KeyboardInterrupt:
    started = time.monotonic()
    loader.close()
    left = [t.name for t in threading.enumerate() if t is not threading.main_thread()]
    print("left", left, time.monotonic() - started < 1)
"""


def test_ctrl_c_ends_it_within_a_second(folder):
    process = subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED, str(folder)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "batch\n"
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=20)
    assert out.splitlines()[-1] == "left [] True", err
    assert process.returncode == 0


def test_a_process_that_ends_in_mid_epoch_ends(folder):
    code = f"from shardkit.torch import ShardLoader\nbatches = iter(ShardLoader({str(folder)!r}, 8, size=16))\n"
    done = subprocess.run(
        [sys.executable, "-c", code + "next(batches)"], capture_output=True, text=True, timeout=30, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_without_torch_the_error_says_what_to_install():
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "try: from shardkit.torch import ShardLoader\n"
        "except Exception as error: print(type(error).__name__, error.exit_code, error)"
    )
    said = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert said.startswith("CapabilityError 7 ")
    assert "pip install 'shardkit[torch]'" in said


def test_a_trace_shows_what_the_threads_did(load, tmp_path):
    loader, path = load(read_on=False), tmp_path / "trace.json"
    with loader.trace(path):
        steps = sum(1 for _ in loader)
    spans = [event for event in json.loads(path.read_text())["traceEvents"] if event["ph"] == "X"]
    names = {event["name"] for event in spans}
    assert {"plan", "read", "consumer waits"} <= names
    assert sorted(event["args"]["step"] for event in spans if event["name"] == "read") == list(range(steps))
    before = path.read_bytes()
    assert sum(1 for _ in loader) == steps
    assert path.read_bytes() == before  # outside of the block nothing is recorded


def test_a_trace_that_cannot_be_written_is_an_error_with_its_path(load, tmp_path):
    with pytest.raises(ShardkitError, match=r"trace.*nowhere"), load().trace(tmp_path / "nowhere" / "trace.json"):
        pass


@pytest.mark.parametrize(
    "wrong", [{"mean": (1, 2, float("nan"))}, {"std": (float("nan"),) * 3}, {"std": (9, 9, float("inf"))}]
)
def test_mean_and_std_are_numbers(load, wrong):
    with pytest.raises(ConfigError):
        load(**wrong)


def test_a_trace_that_cannot_be_written_hides_no_error_of_the_training(load, tmp_path):
    folder = tmp_path / "there"
    folder.mkdir()
    loader = load()

    def train():
        with loader.trace(folder / "trace.json"):
            shutil.rmtree(folder)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        train()


def test_closing_from_another_thread_waits_for_the_batch_that_is_asked_for(load):
    for _ in range(5):
        loader = load(batch_size=2)
        batches, errors = iter(loader), []
        next(batches)

        def close(loader=loader, errors=errors):
            try:
                loader.close()
            except BaseException as error:
                errors.append(error)

        closing = threading.Thread(target=close)
        closing.start()
        with contextlib.suppress(ConfigError):  # "the loader was closed", unless the epoch was over before
            list(batches)
        closing.join(20)
        assert not closing.is_alive()
        assert errors == []


@pytest.mark.parametrize(("before", "after"), [(None, "16"), ("1", "1")])
def test_the_import_asks_the_driver_for_queues_unless_somebody_has(before, after):
    names = {name: value for name, value in os.environ.items() if name != "CUDA_DEVICE_MAX_CONNECTIONS"}
    line = "import os, shardkit.torch; print(os.environ['CUDA_DEVICE_MAX_CONNECTIONS'])"
    told = subprocess.run(
        [sys.executable, "-c", line], env=names | ({"CUDA_DEVICE_MAX_CONNECTIONS": before} if before else {}),
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert told.stdout.strip() == after
