"""Epochs that follow each other without a gap: the next one is begun when one is over, and nobody sees it."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import threading
import time

import pytest

from shardkit.errors import FormatError
from shardkit.testing.images import Picture, coloured, write_pictures
from shardkit.torch import ShardLoader
from shardkit.torch.epoch import Ahead, outside

COUNT = 61
LONG = 20.0
"""Seconds: longer than any machine takes for what does not wait."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_pictures(tmp_path_factory.mktemp("on") / "ds", coloured(COUNT))


@pytest.fixture
def load(folder):
    """A function that makes loaders, closed at the end; leaves no thread of ours behind."""
    made = []

    def make(batch_size=6, **options):
        made.append(ShardLoader(folder, batch_size, **{"size": 16, "fields": ("index",), "seed": 3} | options))
        return made[-1]

    yield make
    for loader in made:
        loader.close()
    assert our_threads() == []


def our_threads():
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("shardkit")]


def epoch_of(loader):
    return [(extras["index"].tolist(), images.sum(dim=(1, 2, 3)).tolist()) for images, _, extras in loader]


def settle(condition):
    end = time.monotonic() + LONG
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


@pytest.mark.parametrize("decoder", ["dali", "cpu"])
@pytest.mark.parametrize("last_batch", ["drop", "pad", "partial"])
@pytest.mark.parametrize("shuffle", ["global", "window", "none"])
def test_every_epoch_is_the_same_as_without(load, shuffle, last_batch, decoder):
    options = {"shuffle": shuffle, "last_batch": last_batch, "decoder": decoder, "extent_bytes": 4096}
    options |= {"window_extents": 2, "world_size": 2, "rank": 1}
    with_it, without = load(read_on=True, **options), load(read_on=False, **options)
    for _ in range(3):
        assert epoch_of(with_it) == epoch_of(without)


def test_training_reads_on_and_evaluation_does_not(load):
    loader = load()
    epoch_of(loader)
    settle(lambda: loader.stats().buffer_bytes > 0)
    loader.close()
    loader = load(train=False)
    epoch_of(loader)
    assert [name for name in our_threads() if "shardkit-read" not in name] == []  # those are the reader's
    assert loader.stats().buffer_bytes == 0


def test_the_same_threads_go_on(load):
    loader = load(shuffle="none", read_on=True)
    epoch_of(loader)
    threads = {thread.ident for thread in threading.enumerate()}
    batches = iter(loader)
    next(batches)
    assert {thread.ident for thread in threading.enumerate()} <= threads


def test_a_loop_that_counts_its_batches_gets_it_too(load):
    loader, other = load(read_on=True), load(read_on=False)
    threads = set()
    for _ in range(3):
        batches = iter(loader)
        found = [next(batches)[2]["index"].tolist() for _ in range(len(loader))]
        assert found == [ids for ids, _ in epoch_of(other)]
        assert loader.state_dict()["step"] == len(loader)
        threads.add(frozenset(name for name in map(repr, threading.enumerate()) if "fetch" in name))
        del batches
    assert len(threads) == 1


def test_a_last_batch_that_was_followed_by_another_epochs_number_is_the_last_one(load):
    loader = load(read_on=True)
    batches = iter(loader)
    for _ in range(len(loader) - 1):
        next(batches)
    loader.set_epoch(5)
    assert len(list(batches)) == 1
    batches = iter(loader)
    for _ in range(len(loader)):
        next(batches)
    loader.set_epoch(9)  # behind the last one
    assert list(batches) == []
    reference = load(read_on=False)
    reference.set_epoch(9)
    assert epoch_of(loader) == epoch_of(reference)


def test_another_epoch_than_the_next_one_starts_anew(load):
    reference = load(read_on=False)
    epochs = [epoch_of(reference) for _ in range(4)]
    loader = load()
    assert epoch_of(loader) == epochs[0]
    loader.set_epoch(3)
    assert epoch_of(loader) == epochs[3]
    loader.set_epoch(1)
    batches = iter(loader)
    next(batches)
    loader.set_epoch(0)  # in the middle of one
    assert len(list(batches)) == len(loader) - 1
    assert epoch_of(loader) == epochs[0]
    loader.set_epoch(1)  # the next one, by name
    assert epoch_of(loader) == epochs[1]


def test_a_state_is_that_of_what_was_handed_out(load):
    loader, other = load(), load()
    epoch_of(loader)
    settle(lambda: loader.stats().buffer_bytes > 0)
    state = json.loads(json.dumps(loader.state_dict()))
    assert (state["epoch"], state["step"]) == (1, 0)
    other.load_state_dict(state)
    assert epoch_of(other) == epoch_of(loader)
    loader.load_state_dict(state)  # back again, past what is ahead
    batches = iter(loader)
    next(batches)
    kept = loader.state_dict()
    rest = [extras["index"].tolist() for _, _, extras in batches]
    loader.load_state_dict(kept)
    assert [ids for ids, _ in epoch_of(loader)] == rest
    assert loader.epoch == 2


def test_a_state_behind_the_last_batch_gives_none_of_that_epoch(load):
    loader = load()
    batches = iter(loader)
    for _ in range(len(loader)):
        next(batches)
    state = loader.state_dict()
    loader.close()
    other, epochs = load(), load(read_on=False)
    other.load_state_dict(state)
    other.set_epoch(0)
    assert epoch_of(other) == []
    epoch_of(epochs)
    assert epoch_of(other) == epoch_of(epochs)


def test_damage_in_the_next_epoch_is_told_in_that_epoch(load, tmp_path):
    whole = load()
    left_out = set(range(COUNT)) - {number for ids, _ in epoch_of(whole) for number in ids}
    assert left_out - (set(range(COUNT)) - {number for ids, _ in epoch_of(whole) for number in ids})
    pictures = [
        Picture(p.key, b"no picture" if number in left_out else p.jpeg, p.label, p.metadata)
        for number, p in enumerate(coloured(COUNT))
    ]
    folder = write_pictures(tmp_path / "ds", pictures)
    with ShardLoader(folder, 6, size=16, fields=("index",), seed=3, on_bad="raise") as loader:
        assert len(list(loader)) == len(loader)
        with pytest.raises(FormatError):
            list(loader)


def test_a_loader_that_is_dropped_between_epochs_ends_its_threads(folder):
    loader = ShardLoader(folder, 6, size=16)
    assert len(list(loader)) == len(loader)
    assert our_threads()
    del loader
    gc.collect()
    settle(lambda: our_threads() == [])


def test_ctrl_c_while_a_stream_is_left_costs_no_epoch(load):
    class Interrupted(Ahead):
        times = 1

        def leave(self, stream):
            super().leave(stream)
            if self.times:
                self.times -= 1
                raise KeyboardInterrupt

    loader, reference = load(), load(read_on=False)
    loader._ahead.__class__ = Interrupted  # whoever closes it has this one
    batches = iter(loader)  # and it is kept, as by the traceback of who handles the interrupt
    with pytest.raises(KeyboardInterrupt):
        list(batches)
    epoch_of(reference)
    assert epoch_of(loader) == epoch_of(reference)


def test_what_the_garbage_collector_ends_in_one_of_our_threads_ends_in_its_order():
    ended = []

    def end_stream():
        time.sleep(0.05)
        ended.append("stream")

    def end_loader():
        outside(os.getpid(), end_stream)
        ended.append("loader")

    thread = threading.Thread(target=outside, args=(os.getpid(), end_loader), name="shardkit-fetch-0")
    thread.start()
    thread.join()
    settle(lambda: len(ended) == 2)
    assert ended == ["stream", "loader"]


FORKING = """
import os, sys
from shardkit.torch import ShardLoader
loader = ShardLoader(sys.argv[1], 6, size=16, decoder=sys.argv[2])
assert len(list(loader)) == len(loader)
if (child := os.fork()) == 0:
    if sys.argv[3] == "drops it":
        del loader
    sys.exit()
assert os.waitpid(child, 0)[1] == 0
assert len(list(loader)) == len(loader)
"""


@pytest.mark.parametrize("child", ["ends", "drops it"])
@pytest.mark.parametrize("decoder", ["dali", "cpu"])
def test_a_child_that_was_forked_between_epochs_ends(folder, decoder, child):
    command = [sys.executable, "-c", FORKING, str(folder), decoder, child]
    done = subprocess.run(command, capture_output=True, text=True, timeout=2 * LONG, check=False)
    assert (done.returncode, done.stderr) == (0, "")
