"""EncodedLoader: a data set, a selection or a mix of them, as batches of encoded images; and what it leaves behind."""

from __future__ import annotations

import contextlib
import gc
import threading
from pathlib import Path

import numpy as np
import pyarrow.compute as pc
import pytest

from shardkit.dataset.encoded import EncodedLoader, ReadOptions
from shardkit.dataset.shardset import open_dataset
from shardkit.dataset.state import Position, dump_state, load_state
from shardkit.errors import CapabilityError, ConfigError, FormatError, ShardkitError
from shardkit.testing.damage import flip_byte
from shardkit.testing.datasets import draft_dataset
from shardkit.testing.reading import open_descriptors

TOTAL, OTHER = 40, 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return draft_dataset((15, 25), sizes=(600, 900, 5000)).write(tmp_path_factory.mktemp("encoded") / "ds")


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    return draft_dataset((OTHER,), name="other", sizes=(777,)).write(tmp_path_factory.mktemp("encoded") / "other")


@pytest.fixture
def load():
    """A function that makes loaders; closed at the end."""
    made = []

    def make(path, *, selection=None, **options):
        try:
            loader = EncodedLoader.open(
                path, ReadOptions(**{"batch_size": 6, "io": "buffered", **options}), **selection or {}
            )
        except CapabilityError as error:
            pytest.skip(str(error))
        made.append(loader)
        return loader

    yield make
    for loader in made:
        loader.close()
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith("shardkit")] == []


def run(loader, epoch=0, step=0):
    """Return the rest of an epoch: ids, and key and bytes of each sample, batch by batch."""
    fetcher, found = loader.start(Position(epoch, step)), []
    try:
        while (batch := fetcher.get(wait=True)) is not None:
            assert (batch.epoch, batch.step) == (epoch, step + len(found))
            rows = zip(batch.samples.keys(batch.ids), (view.tobytes() for view in batch.views), strict=True)
            found.append((batch.ids.tolist(), list(rows)))
            batch.release()
    finally:
        assert fetcher.close()
    assert loader.pool.lent_bytes == 0
    return found


def ids_of(batches):
    return [number for ids, _ in batches for number in ids]


def truth_of(*folders):
    """Return key and bytes of every sample by its id."""
    rows = []
    for folder in folders:
        with open_dataset(folder) as dataset:
            rows += [(sample.key, sample.jpeg) for sample in dataset]
    return rows


@pytest.mark.parametrize("io", ["auto", "buffered", "direct", "uring"])
@pytest.mark.parametrize("shuffle", ["global", "window", "none"])
def test_an_epoch_of_a_data_set_has_every_sample_once(load, folder, io, shuffle):
    loader = load(folder, io=io, shuffle=shuffle, last_batch="partial", extent_bytes=8000, window_extents=3)
    truth = truth_of(folder)
    epochs = [run(loader, epoch) for epoch in range(3)]
    for batches in epochs:
        assert sorted(ids_of(batches)) == list(range(TOTAL))
        assert [row for ids, rows in batches for row in rows] == [truth[number] for number in ids_of(batches)]
    assert (ids_of(epochs[0]) == list(range(TOTAL))) == (shuffle == "none")
    assert (ids_of(epochs[0]) == ids_of(epochs[1])) == (shuffle == "none")
    assert loader.choice.backend == (io if io != "auto" else loader.choice.backend)


def test_a_mix_draws_by_weight_and_tells_the_data_sets_apart(load, folder, other):
    loader = load([(folder, 1.0), (Path(other), 3.0)], batch_size=4)
    truth, found = truth_of(folder, other), []
    for epoch in range(20):
        for ids, rows in run(loader, epoch):
            assert rows == [truth[number] for number in ids]
            found += ids
    assert set(found) == set(range(TOTAL + OTHER))
    assert 0.68 < np.mean(np.asarray(found) >= TOTAL) < 0.82


def test_a_selection_is_all_that_comes(load, folder):
    with open_dataset(folder) as dataset:
        keys, labels, widths = dataset.columns["key"][:], dataset.columns["label"][:], dataset.columns["width"][:]
    for shuffle in ("global", "window", "none"):
        loader = load(folder, selection={"labels": [0, "class 5"]}, shuffle=shuffle, last_batch="partial")
        assert sorted(ids_of(run(loader))) == np.flatnonzero(np.isin(labels, [0, 5])).tolist()
        loader = load(folder, selection={"where": pc.field("width") > 8}, shuffle=shuffle, last_batch="partial")
        assert sorted(ids_of(run(loader))) == np.flatnonzero(np.asarray(widths) > 8).tolist()
        loader = load(folder, selection={"keys": iter(keys[3:9])}, shuffle=shuffle, last_batch="partial")
        assert sorted(ids_of(run(loader))) == list(range(3, 9))


@pytest.mark.parametrize("shuffle", ["global", "window", "none"])
def test_an_epoch_goes_on_from_any_position(load, folder, shuffle):
    loader = load(folder, shuffle=shuffle, last_batch="pad")
    whole = run(loader, epoch=4)
    for step in range(len(whole) + 1):
        again = load(folder, shuffle=shuffle, last_batch="pad", prefetch=1 + step % 3)
        position = load_state(dump_state(loader.identity, Position(4, step)), again.identity, again.plan.steps)
        assert run(again, position.epoch, position.step) == whole[step:]


@pytest.mark.parametrize("shuffle", ["global", "window"])
def test_global_batches_are_the_same_for_every_number_of_ranks(load, folder, shuffle):
    given = {"shuffle": shuffle, "lanes": 12, "last_batch": "pad", "extent_bytes": 4000, "window_extents": 2}
    alone = load(folder, batch_size=12, **given)
    wanted = [sorted(ids) for ids, _ in run(alone)]
    for world in (2, 3, 4):
        ranks = [load(folder, batch_size=12 // world, rank=rank, world_size=world, **given) for rank in range(world)]
        assert all(rank.identity == alone.identity for rank in ranks)
        steps = zip(*(run(rank) for rank in ranks), strict=True)
        assert [sorted(ids_of(step)) for step in steps] == wanted


def test_a_run_is_known_by_its_own_arguments(load, folder):
    first = load(folder)
    assert load(folder, prefetch=1, io="direct").identity == first.identity
    for changes in ({"seed": 1}, {"shuffle": "none"}, {"batch_size": 5}, {"last_batch": "pad"}):
        assert load(folder, **changes).identity != first.identity


def test_checksums_are_compared_on_demand(load, tmp_path):
    folder = draft_dataset((8,), sizes=(6000,)).write(tmp_path / "ds")
    with open_dataset(folder) as dataset:
        flip_byte(folder / "tiny-000000.tar", dataset.columns["offset"][5] + 3000)
    plain, checked = (load(folder, batch_size=8, check=check) for check in ("none", "crc"))
    assert 5 in ids_of(run(plain))
    assert 5 not in ids_of(run(checked))
    assert list(checked.bad.by_key) == ["c/0005"]
    assert (plain.bad.substitutions, checked.bad.substitutions, checked.crc_retries) == (0, 1, 0)
    strict = load(folder, batch_size=8, check="crc", on_bad="raise")
    with pytest.raises(FormatError, match=r"\[sample c/0005\].*CRC-32C"):
        run(strict)


def test_the_memory_is_what_was_planned(load, folder):
    loader = load(folder, prefetch=2)
    assert loader.pool.budget_bytes == loader.pool.memory.nbytes
    fetcher = loader.start(Position(0, 0))
    most = 0
    while (batch := fetcher.get(wait=True)) is not None:
        most = max(most, loader.pool.lent_bytes)
        batch.release()
    assert 0 < most <= loader.pool.budget_bytes
    fetcher.close()


# --- the end ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("io", ["buffered", "direct", "uring"])
@pytest.mark.parametrize("wait", [True, False])
def test_nothing_stays_open_over_many_rounds(folder, other, io, wait):
    try:
        EncodedLoader.open(folder, ReadOptions(batch_size=4, io=io)).close()
    except CapabilityError as error:
        pytest.skip(str(error))
    gc.collect()  # what other tests left behind
    before = open_descriptors()
    for turn in range(50):
        path = [(folder, 0.5), (other, 0.5)] if turn % 2 else folder
        shuffle = "window" if turn % 4 == 0 else "global"
        loader = EncodedLoader.open(path, ReadOptions(batch_size=4, io=io, shuffle=shuffle, check="crc"))
        fetcher = loader.start(Position(turn, 0))
        for _ in range(turn % 5):
            fetcher.get(wait=True).release()
        assert fetcher.close()
        loader.close(wait=wait)
        loader.close(wait=wait)
    for thread in [thread for thread in threading.enumerate() if thread.name.startswith("shardkit")]:
        thread.join(10)
    del loader, fetcher
    gc.collect()
    assert open_descriptors() == before
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith("shardkit")] == []


def test_close_ends_a_wait_for_memory(folder):
    loader = EncodedLoader.open(folder, ReadOptions(batch_size=20, io="buffered", prefetch=1))
    held = loader.pool.acquire(loader.pool.budget_bytes)
    fetcher = loader.start(Position(0, 0))
    waiting = threading.Timer(0.2, loader.close)
    waiting.start()
    with contextlib.suppress(ConfigError):  # the pool's, if the fetcher is not closed yet
        assert fetcher.get(wait=True) is None
    waiting.join()
    assert fetcher.close()
    del held


def test_a_start_ends_what_an_interrupt_has_left_behind(folder, reading_threads):
    """Ctrl-C may come when a fetcher runs and nobody knows it yet; its memory would be missing for ever."""
    with EncodedLoader.open(
        folder, ReadOptions(batch_size=4, io="buffered", shuffle="window", extent_bytes=99)
    ) as loader:
        for epoch in range(20):
            loader.start(Position(epoch, 0)).get(wait=True)  # as if it had been lost
        assert len(reading_threads()) <= 3
        fetcher, seen = loader.start(Position(0, 0)), 0
        while (batch := fetcher.get(wait=True)) is not None:
            seen += len(batch)
            batch.release()
        assert seen == loader.plan.steps * 4
    assert reading_threads() == []


def test_a_closed_loader_has_closed_its_data_sets(folder, other):
    loader = EncodedLoader.open([(folder, 1), (other, 1)], ReadOptions(batch_size=4, io="buffered"))
    loader.close()
    for part in loader.samples.parts:
        with pytest.raises(ConfigError, match="is closed"):
            part.dataset[0]


def test_a_view_outlives_the_loader(folder):
    loader = EncodedLoader.open(folder, ReadOptions(batch_size=4, io="buffered"))
    view = np.frombuffer(loader.pool.acquire(4096), np.uint8)
    loader.close()
    view[:] = 7
    assert view.sum() == 7 * 4096


@pytest.mark.parametrize("wait", [True, False])
def test_the_ring_stays_mapped_until_the_reader_is_closed(folder, wait):
    loader = EncodedLoader.open(folder, ReadOptions(batch_size=4, io="buffered"))
    address = np.frombuffer(loader.pool.memory, np.uint8).ctypes.data
    seen, reader = [], loader.reader

    class Watching:
        def close(self):
            seen.append(is_mapped(address))
            reader.close()

    loader.reader = Watching()
    assert is_mapped(address)
    loader.close(wait=wait)
    for thread in [thread for thread in threading.enumerate() if thread.name == "shardkit-close"]:
        thread.join(10)
    assert seen == [True]
    assert not is_mapped(address)


def is_mapped(address):
    areas = [line.split(maxsplit=1)[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines()]
    return any(int(first, 16) <= address < int(end, 16) for first, end in areas)


@pytest.mark.parametrize(
    ("options", "selection", "message"),
    [
        ({"batch_size": 41}, {}, "no whole global batch"),
        ({"batch_size": 4, "lanes": 3}, {}, "equally from every lane"),
        ({"batch_size": 4, "world_size": 2, "lanes": 3}, {}, "cannot be shared out"),
        ({"batch_size": 4, "shuffle": "random"}, {}, "shuffle has no such value"),
        ({"batch_size": 4, "io": "fast"}, {}, "io has no such value"),
        ({"batch_size": 4, "check": "md5"}, {}, "check has no such value"),
        ({"batch_size": 4, "on_bad": "skip"}, {}, "on_bad has no such value"),
        ({"batch_size": 4, "prefetch": 0}, {}, "prefetch >= 1"),
        ({"batch_size": 4, "timeout_s": 0}, {}, "timeout_s > 0"),
        ({"batch_size": 4}, {"keys": ["nobody"]}, "1 of 1 keys"),
        ({"batch_size": 4}, {"labels": "class 5"}, "labels is a list"),
    ],
)
def test_what_cannot_be_served_is_refused_and_leaves_nothing_open(folder, options, selection, message):
    gc.collect()  # what other tests left behind
    before = open_descriptors()
    for _ in range(2):
        with pytest.raises(ShardkitError, match=message):
            EncodedLoader.open(folder, ReadOptions(**options), **selection)
    gc.collect()
    assert open_descriptors() == before


def test_a_mix_by_windows_is_refused(folder, other):
    with pytest.raises(ConfigError, match="not shuffled by windows"):
        EncodedLoader.open([(folder, 1), (other, 1)], ReadOptions(batch_size=4, shuffle="window"))


@pytest.mark.parametrize(
    ("batch_size", "prefetch", "waiting"), [(1, None, 8), (8, None, 8), (100, None, 6), (1000, None, 3), (1, 2, 2)]
)
def test_as_many_batches_wait_as_64_mib_hold(tmp_path, batch_size, prefetch, waiting):
    folder = draft_dataset((4,), sizes=(100_000,)).write(tmp_path / "ds")
    with EncodedLoader.open(folder, ReadOptions(batch_size=batch_size, prefetch=prefetch, last_batch="pad")) as loader:
        assert loader.options.waiting(loader.samples) == waiting
