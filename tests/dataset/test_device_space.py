"""Encoded images in a GPU's memory: the batches are the host's, their bytes are where the addresses say, the host looks
at none of them, and memory is what was counted.

The device is `HostDevice`: its memory is host memory, poisoned when it is new, and copies happen as late as they may.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import logging
import mmap

import numpy as np
import pytest

from shardkit.dataset.encoded import EncodedLoader, ReadOptions
from shardkit.dataset.reading import SampleReader
from shardkit.dataset.resident import ResidentShards
from shardkit.dataset.samples import Part, Samples
from shardkit.dataset.shardset import open_dataset
from shardkit.dataset.state import Position
from shardkit.errors import CapabilityError, ConfigError, DeviceError, ShardkitError, StorageError
from shardkit.format.media_type import MEDIA_TYPES
from shardkit.storage.buffered import BufferedReader
from shardkit.storage.reader import HOST, address_of
from shardkit.storage.staged import StagedReader
from shardkit.testing.damage import flip_byte
from shardkit.testing.datasets import draft_dataset
from shardkit.testing.host_device import HostDevice, HostStream
from shardkit.testing.reading import in_child

COUNTS = (15, 22, 13)
TOTAL, SEED = sum(COUNTS), 3
SIZES = (700, 5000, 12_000, 401)
BAD = (4, 21, 22, 40)  # their first bytes are damaged
ORDERS = ["global", "window", "none"]
CACHES = ["none", "some", "all"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return draft_dataset(COUNTS, sizes=SIZES).write(tmp_path_factory.mktemp("device") / "ds")


@pytest.fixture(scope="module")
def damaged(tmp_path_factory):
    written = draft_dataset(COUNTS, sizes=SIZES).write(tmp_path_factory.mktemp("damaged") / "ds")
    with open_dataset(written) as dataset:
        for number in BAD:
            shard = int(np.searchsorted(np.cumsum(COUNTS), number, side="right"))
            flip_byte(written / f"tiny-{shard:06}.tar", dataset.columns["offset"][number], 0xFF)
    return written


@pytest.fixture
def device():
    return HostDevice(lazy=True)


@pytest.fixture
def load():
    """A function that makes loaders; closed at the end."""
    made = []

    def make(path, device=None, **options):
        given = {
            "batch_size": 6, "io": "buffered", "last_batch": "partial", "seed": SEED, "extent_bytes": 25_000,
            "window_extents": 2, "space": HOST if device is None else device.space,
        }  # fmt: skip
        selection = {"labels": options.pop("labels", None)}
        made.append(EncodedLoader.open(path, ReadOptions(**{**given, **options}), device=device, **selection))
        return made[-1]

    yield make
    for loader in made:
        loader.close()


def cached(folder, which):
    """Return the bytes that keep no shard, the first one and the last, or all."""
    sizes = [path.stat().st_size for path in sorted(folder.glob("*.tar"))]
    return {"none": 0, "some": -(-sizes[0] // 4096) * 4096 + -(-sizes[2] // 4096) * 4096, "all": 1 << 30}[which]


def bytes_of(batch):
    rows = zip(batch.addresses.tolist(), batch.located.size.tolist(), strict=True)
    return [ctypes.string_at(address, size) for address, size in rows]


def run(loader, epoch=0, step=0, *, decoder=False):
    """Return the rest of an epoch: of each batch all that a decoder may ask of it.

    Args:
        loader: of any space.
        epoch: of the loader.
        step: of the epoch.
        decoder: replace what is no JPEG, as a decoder does that sees the bytes.
    """
    fetcher, found = loader.start(Position(epoch, step)), []
    while (batch := fetcher.get(wait=True)) is not None:
        while decoder and (bad := {at: "torn" for at, image in enumerate(bytes_of(batch)) if image[:2] != b"\xff\xd8"}):
            batch = fetcher.replace(batch, bad)
        assert batch.space == loader.options.space
        assert [view.ctypes.data for view in batch.views] == batch.addresses.tolist()
        assert [view.size for view in batch.views] == batch.located.size.tolist()
        columns = [getattr(batch, name).tolist() for name in ("positions", "ids", "labels", "attempts")]
        found.append((batch.step, columns, batch.samples.keys(batch.ids), bytes_of(batch), batch.metadata))
        batch.release()
    assert fetcher.close()
    assert loader.pool.lent_bytes == 0
    return found


def drain(fetcher):
    while (batch := fetcher.get(wait=True)) is not None:
        batch.release()


# --- the same batches ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("shuffle", ORDERS)
@pytest.mark.parametrize("options", [{}, {"metadata": True, "check": "crc"}, {"io": "direct", "metadata": True}])
def test_batches_are_those_of_host_memory(load, folder, device, shuffle, cache, options):
    host = load(folder, shuffle=shuffle, **options)
    try:
        on_device = load(folder, device, shuffle=shuffle, cache_gpu=cached(folder, cache), **options)
    except CapabilityError as error:
        pytest.skip(str(error))
    for epoch in (0, 1, 2):
        assert run(on_device, epoch) == run(host, epoch)


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("shuffle", ORDERS)
@pytest.mark.parametrize("check", ["none", "crc"])
def test_the_same_others_stand_in_for_bad_ones(load, damaged, device, shuffle, cache, check):
    host = load(damaged, shuffle=shuffle, metadata=True)
    on_device = load(damaged, device, shuffle=shuffle, metadata=True, check=check, cache_gpu=cached(damaged, cache))
    for epoch in (0, 1, 2):
        assert run(on_device, epoch, decoder=True) == run(host, epoch)
    assert set(on_device.bad.by_key) == set(host.bad.by_key) == {f"c/{number:04}" for number in BAD}


@pytest.mark.parametrize("shuffle", ORDERS)
def test_an_epoch_goes_on_from_any_step(load, folder, device, shuffle):
    loader = load(folder, device, shuffle=shuffle, cache_gpu=cached(folder, "some"))
    whole = run(loader, 1)
    for step in range(len(whole) + 1):
        assert run(loader, 1, step) == whole[step:]


def test_a_mix_keeps_shards_of_all_its_data_sets(load, folder, damaged, device):
    paths = [(folder, 1.0), (damaged, 2.0)]
    host, on_device = load(paths), load(paths, device, cache_gpu=1 << 30)
    for epoch in range(3):
        assert run(on_device, epoch, decoder=True) == run(host, epoch)
    assert on_device.cache_counts["shards"] == 2 * len(COUNTS)


@pytest.mark.parametrize(("last", "batch"), [("drop", 7), ("pad", 8), ("partial", 49)])
def test_ends_of_epochs_are_the_same(load, folder, device, last, batch):
    for rank in range(2):
        given = {"last_batch": last, "batch_size": batch // 2, "rank": rank, "world_size": 2}
        found = [run(load(folder, on, **given)) for on in (None, device)]
        assert found[0] == found[1]


def test_what_the_index_says_is_judged_without_a_look_at_the_bytes(load, device, tmp_path):
    draft = draft_dataset((8,), sizes=(500,))
    wrong = [
        ({"media_type": MEDIA_TYPES.index("pdf")}, "it is no image, the index says pdf"),
        ({"precision": 12}, "a JPEG of 12 bits a component"),
        ({"sof": 9}, "a JPEG whose frame is SOF9, neither baseline, extended nor progressive"),
        ({"size": 0, "crc32c": 0}, "the payload is empty"),
        ({"media_type": MEDIA_TYPES.index("png")}, None),  # Pillow's business
    ]
    for number, (facts, _) in enumerate(wrong):
        draft.shards[0].rows[number] = draft.shards[0].rows[number]._replace(**facts)
    loader = load(draft.write(tmp_path / "ds"), device, batch_size=8)
    run(loader)
    assert loader.bad.by_key == {f"c/{n:04}": reason for n, (_, reason) in enumerate(wrong) if reason is not None}


# --- what the host does not do ---------------------------------------------------------------------------------------


class GuardedDevice(HostDevice):
    """A device whose memory the host cannot touch: a crash, as on a GPU. Only copies of its streams may."""

    def memory(self, nbytes):
        memory = super().memory(nbytes)
        self.protect(address_of(memory), memory.nbytes, 0)
        return memory

    def stream(self, *, urgent=False):
        return GuardedStream(self, urgent=urgent)

    @staticmethod
    def protect(address, nbytes, rights):
        first = address // mmap.PAGESIZE * mmap.PAGESIZE
        if nbytes:
            libc = ctypes.CDLL(None)
            assert libc.mprotect(ctypes.c_void_p(first), ctypes.c_size_t(address + nbytes - first), rights) == 0


class GuardedStream(HostStream):
    def _move(self, target, source, nbytes, *, on_device):  # one at a time, says the device
        for address in on_device:
            self.device.protect(address, nbytes, mmap.PROT_READ | mmap.PROT_WRITE)
        super()._move(target, source, nbytes, on_device=on_device)
        for address in on_device:
            self.device.protect(address, nbytes, 0)


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("touched", [False, True])
def test_the_host_touches_no_byte_of_device_memory(damaged, cache, touched):
    def law():
        faulthandler.disable()  # the crash is what is wanted
        device = GuardedDevice()
        options = ReadOptions(
            batch_size=6,
            io="buffered",
            space=device.space,
            metadata=True,
            check="crc",
            cache_gpu=cached(damaged, cache),
        )
        with EncodedLoader.open(damaged, options, device=device) as loader:
            for epoch in range(2):
                fetcher = loader.start(Position(epoch, 0))
                while (batch := fetcher.get(wait=True)) is not None:
                    assert "views" not in repr(batch)
                    batch = fetcher.replace(batch, {1: "torn"})
                    if touched:
                        batch.views[1].tobytes()
                    batch.release()
                fetcher.close()
        return True

    assert in_child(law) is not touched


def test_metadata_alone_fetches_json_alone(load, folder, device):
    loader = load(folder, device, metadata=True)
    fetched = 0
    move = HostStream.download

    def download(self, target, source, nbytes):
        nonlocal fetched
        fetched += nbytes
        move(self, target, source, nbytes)

    HostStream.download = download
    try:
        run(loader)
    finally:
        HostStream.download = move
    assert fetched == loader.samples.gather("json_size", np.arange(TOTAL)).sum()


# --- checksums -------------------------------------------------------------------------------------------------------


class WrongAtFirst(BufferedReader):
    """A reader that turns one bit of the first image that it reads, as a page that went bad in memory does."""

    turned = False

    def read_into(self, ops, /):
        super().read_into(ops)
        if not self.turned and ops:
            self.turned = True
            ops[0].dst[300] ^= 1


@pytest.mark.parametrize("cache", [False, True])
def test_what_is_right_past_the_page_cache_is_put_right_in_device_memory(folder, device, cache):
    with open_dataset(folder) as dataset:
        samples = Samples([Part(dataset)])
        staged = StagedReader(WrongAtFirst(dataset.shard_paths, threads=1), device, ring_bytes=1 << 20)
        kept = ResidentShards(samples, budget_bytes=1 << 30, align=1, allocate=device.memory) if cache else None
        reader = SampleReader(samples, staged, crc=True, device=device, resident=kept)
        for retries in (1, 1 if cache else 2):
            _, payloads = reader.read_alone(np.array([3, 7]))
            held = dataset[3].jpeg, dataset[7].jpeg
            found = [
                ctypes.string_at(at, len(jpeg)) for at, jpeg in zip(payloads.addresses.tolist(), held, strict=True)
            ]
            assert (found, payloads.bad, reader.crc_retries) == ([*held], {}, retries)
            assert all(device.may_touch(at, 400, on_device=True) for at in payloads.addresses.tolist())
            staged._reader.turned = False
        staged.close()


@pytest.mark.parametrize("cache", CACHES)
def test_a_byte_that_is_wrong_in_the_file_is_a_bad_sample_in_every_epoch(load, device, tmp_path, cache):
    folder = draft_dataset((8, 8, 8), sizes=(6000,)).write(tmp_path / "ds")
    with open_dataset(folder) as dataset:
        flip_byte(folder / "tiny-000000.tar", dataset.columns["offset"][5] + 3000)
    loader = load(folder, device, batch_size=8, check="crc", cache_gpu=cached(folder, cache))
    for epoch in range(3):
        assert 5 not in [number for _, columns, *_ in run(loader, epoch) for number in columns[1]]
    assert list(loader.bad.by_key) == ["c/0005"]
    assert loader.bad.substitutions == 3


# --- memory ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("shuffle", ORDERS)
def test_memory_is_what_was_counted_and_does_not_grow(load, folder, device, shuffle, cache):
    loader = load(folder, device, shuffle=shuffle, cache_gpu=cached(folder, cache))
    counted = loader.memory
    assert counted["gpu cache"] <= cached(folder, cache)
    assert (counted["host"], counted["pinned"]) == (0, sum(device.pinned.values()))
    fetcher = loader.start(Position(0, 0))
    while (batch := fetcher.get(wait=True)) is not None:
        assert device.allocated_bytes == counted["gpu encoded"] + counted["gpu cache"]
        assert loader.pool.lent_bytes <= loader.pool.budget_bytes == counted["gpu encoded"]
        batch.release()
    fetcher.close()
    assert loader.memory == counted
    loader.close()
    del batch, fetcher
    gc.collect()
    assert (device.allocated_bytes, device.pinned) == (0, {})


def test_what_all_stays_needs_no_pool(load, folder, device):
    for shuffle in ORDERS:
        assert load(folder, device, shuffle=shuffle, cache_gpu=1 << 30).memory["gpu encoded"] == 4096


@pytest.mark.parametrize("staging", ["pinned", "managed"])
def test_the_ring_on_the_way_is_counted(load, folder, device, staging):
    counted = load(folder, device, staging=staging).memory
    assert (counted["pinned"] == 0) == (staging == "managed")
    assert counted["gpu encoded"] == device.allocated_bytes


def test_host_memory_for_a_device_is_pinned(load, folder, device):
    loader, plain = load(folder, device, space=HOST), load(folder)
    assert loader.memory == {"host": 0, "pinned": plain.pool.budget_bytes, "gpu encoded": 0, "gpu cache": 0}
    assert plain.memory == {"host": plain.pool.budget_bytes, "pinned": 0, "gpu encoded": 0, "gpu cache": 0}
    assert run(loader) == run(plain)
    batch = (fetcher := loader.start(Position(0, 0))).get(wait=True)
    pages = [(at, at + size) for at, size in device.pinned.items()]
    assert all(any(low <= at < high for low, high in pages) for at in batch.addresses.tolist())
    batch.release()
    fetcher.close()
    loader.close()
    del batch, fetcher
    gc.collect()
    assert device.pinned == {}


def test_host_memory_that_cannot_be_pinned_is_counted_as_such(load, folder, device):
    device.fail_next("pin")
    loader = load(folder, device, space=HOST)
    assert (loader.memory["pinned"], loader.memory["host"]) == (0, loader.pool.budget_bytes)
    assert len(run(loader)) == loader.plan.steps


@pytest.mark.parametrize("call", ["memory", "stream"])
@pytest.mark.parametrize("cache", CACHES)
def test_a_device_that_refuses_leaves_nothing_behind(folder, device, call, cache):
    options = ReadOptions(batch_size=6, io="buffered", space=device.space, cache_gpu=cached(folder, cache))
    device.fail_next(call)
    device.fail_next(call)  # less memory is asked for, too
    with pytest.raises(ShardkitError):
        EncodedLoader.open(folder, options, device=device)
    gc.collect()
    assert (device.allocated_bytes, device.pinned) == (0, {})


def test_a_device_that_fails_a_copy_is_an_error_of_the_batch(load, folder, device):
    loader = load(folder, device, check="crc")
    device.fail_next("download")
    fetcher = loader.start(Position(0, 0))
    with pytest.raises(DeviceError, match=r"operation: .*tiny-\d+\.tar:\d+ \[sample c/\d+\]; found download"):
        drain(fetcher)
    fetcher.close()
    assert len(run(loader)) == loader.plan.steps


def test_images_wanted_elsewhere_are_refused(folder, device):
    options = ReadOptions(batch_size=6, io="buffered", space="cuda:1")
    for given in (None, device):
        with pytest.raises(ConfigError, match=r"need that GPU; expected cuda:1"):
            EncodedLoader.open(folder, options, device=given)
    with open_dataset(folder) as dataset:
        staged = StagedReader(BufferedReader(dataset.shard_paths), device, ring_bytes=1 << 20)
        with pytest.raises(ConfigError, match="needs that GPU"):
            SampleReader(Samples([Part(dataset)]), staged)
        staged.close()


def test_what_needs_a_decoder_in_gpu_memory_is_refused_without_one():
    with pytest.raises(ConfigError, match=r"cache_gpu keeps.*decoder='nvjpeg'"):
        ReadOptions(batch_size=1, cache_gpu=1)
    with pytest.raises(ConfigError, match=r"(?s)io='gds' reads.*decoder='nvjpeg'"):
        ReadOptions(batch_size=1, io="gds")
    with pytest.raises(ConfigError, match="cache_gpu >= 0"):
        ReadOptions(batch_size=1, cache_gpu=-1, space="cuda:0")
    with pytest.raises(ConfigError, match="staging has no such value"):
        ReadOptions(batch_size=1, staging="unified")


def test_a_cache_smaller_than_every_shard_is_told_and_does_without(load, folder, device, caplog):
    with caplog.at_level(logging.WARNING):
        loader = load(folder, device, cache_gpu=5000)
    assert "cache_gpu keeps nothing" in caplog.text
    assert (loader.cache_counts, loader.memory["gpu cache"]) == ({}, 0)
    assert len(run(loader)) == loader.plan.steps


# --- what stays ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("metadata", [False, True])
@pytest.mark.parametrize("shuffle", ORDERS)
def test_a_second_epoch_moves_no_byte(load, folder, device, shuffle, metadata):
    loader = load(folder, device, shuffle=shuffle, cache_gpu=1 << 30, metadata=metadata)
    run(loader)
    read, uploads = dict(loader.reader.counters), device.calls["upload"]
    assert 0 < sum(read.values()) <= loader.samples.shard_bytes.sum()
    for epoch in (1, 2):
        run(loader, epoch)
    assert (dict(loader.reader.counters), device.calls["upload"]) == (read, uploads)
    counts = loader.cache_counts
    assert (counts["misses"], counts["hits"]) == (TOTAL, 2 * TOTAL)
    assert counts["hit bytes"] == 2 * loader.samples.total_payload
    assert counts["read bytes"] == sum(read.values())


def test_a_window_is_read_into_its_places_in_long_reads(load, folder, device):
    loader = load(folder, device, shuffle="window", cache_gpu=1 << 30, extent_bytes=1 << 30, window_extents=1)
    calls = []
    read_into = loader.reader.read_into
    loader.reader.read_into = lambda ops: (calls.append(len(ops)), read_into(ops))
    run(loader)
    assert sum(calls) <= 2 * len(COUNTS)  # the ring begins inside of a shard


@pytest.mark.parametrize("shuffle", ORDERS)
def test_of_shards_that_do_not_fit_each_epoch_reads_again_and_of_others_none(load, folder, device, shuffle):
    loader = load(folder, device, shuffle=shuffle, cache_gpu=cached(folder, "some"))
    run(loader)
    first = sum(loader.reader.counters.values())
    run(loader, 1)
    again = sum(loader.reader.counters.values()) - first
    located = loader.samples.locate(np.arange(TOTAL))
    images, stored = int(located.size[located.shard == 1].sum()), int(loader.samples.shard_bytes[1])
    assert images <= again < 1.1 * stored < first - 1.5 * images
    assert loader.cache_counts["shards"] == 2


def test_a_selection_keeps_only_shards_that_it_takes_from(load, tmp_path, device):
    draft = draft_dataset((4, 4, 4), sizes=(900,))
    for shard, label in enumerate((0, 1, 0)):
        draft.shards[shard].rows = [row._replace(label=label) for row in draft.shards[shard].rows]
    loader = load(draft.write(tmp_path / "ds"), device, labels=[1], batch_size=2, cache_gpu=1 << 30)
    assert loader.cache_counts["shards"] == 1
    assert [number for _, columns, *_ in run(loader) for number in columns[1]]
    assert loader.memory["gpu encoded"] == 4096


def test_substitutes_come_from_what_stays(load, damaged, device):
    loader = load(damaged, device, cache_gpu=1 << 30)
    for epoch in range(4):
        run(loader, epoch, decoder=True)
    assert sum(loader.reader.counters.values()) <= loader.samples.shard_bytes.sum()


def test_a_read_that_failed_is_made_again(load, tmp_path, device):
    folder = draft_dataset(COUNTS, sizes=SIZES).write(tmp_path / "ds")
    loader = load(folder, device, cache_gpu=1 << 30, shuffle="none")
    (folder / "tiny-000001.tar").rename(folder / "away")
    with pytest.raises(StorageError, match=r"tiny-000001\.tar:\d+ \[sample c/0015\]"):
        run(loader)
    (folder / "away").rename(folder / "tiny-000001.tar")
    assert run(loader) == run(load(folder, shuffle="none"))
