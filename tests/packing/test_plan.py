"""The plan: every source once, shards of nearly equal payload under the limit, sizes that come true, bounded memory."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from shardkit.errors import ConfigError, SourceError, UnsafeError
from shardkit.format.checksum import new_digest
from shardkit.format.layout import place_sample, shard_bytes
from shardkit.packing import plan as planning
from shardkit.packing.cuts import equal_payload
from shardkit.packing.options import PackOptions
from shardkit.packing.plan import PLAN_SCHEMA, arrange, json_payload, make_plan, plan_batches, update_identity
from shardkit.packing.run import plan_pack, run_pack
from shardkit.packing.scan import LIST_SCHEMA, TREE_SCHEMA, Sources
from shardkit.running import sorted_numbers
from shardkit.running import spool as spool_module


def options(**given):
    return PackOptions(**{"name": "t", "shuffle": False, **given})


def sources(sizes, *, paths=None, labels=True, metadata=None, numbers=None):
    count = len(sizes)
    schema = TREE_SCHEMA if metadata is None and numbers is None else LIST_SCHEMA
    columns = [
        paths or [b"c/%07d.jpg" % i for i in range(count)], [0 if labels else None] * count, sizes, [0] * count,
        metadata or [None] * count, numbers if numbers is not None else [None if schema is TREE_SCHEMA else 0] * count,
    ]  # fmt: skip
    arrays = [pa.array(c, kind) for c, kind in zip(columns, schema.types, strict=True)]
    return Sources(root=b"/src", table=pa.table(arrays, schema), classes=("c",) if labels else None)


def payloads(plan, sizes):
    """Return the payload of each shard."""
    in_order = np.asarray(sizes)[plan.order]
    return [int(in_order[a:b].sum()) for a, b in pairwise(plan.bounds)]


def check_whole(plan, count):
    """Every source is in one shard, and no shard is empty."""
    assert sorted(plan.order.tolist()) == list(range(count))
    assert (plan.bounds[0], plan.bounds[-1]) == (0, count)
    assert all(a < b for a, b in pairwise(plan.bounds.tolist()))
    assert len(plan.bytes) == plan.shards == len(plan.bounds) - 1


# --- cutting

SIZES = st.lists(st.integers(0, 200_000), min_size=1, max_size=60)


@given(SIZES, st.data())
def test_shards_differ_from_the_mean_by_at_most_one_image_where_none_is_larger_than_it(sizes, data):
    shards = data.draw(st.integers(1, max(1, min(len(sizes), sum(sizes) // max(1, *sizes, 1)))))
    plan = make_plan(sources(sizes), options(shard_size=None, shards=shards))
    check_whole(plan, len(sizes))
    assert plan.shards == shards
    for payload in payloads(plan, sizes):
        # An empty file counts as one byte, or it would never move a cut.
        assert abs(payload - sum(sizes) / shards) <= max(sizes) + len(sizes)


@given(SIZES, st.data())
def test_any_number_of_shards_up_to_that_of_the_images_can_be_had(sizes, data):
    shards = data.draw(st.integers(1, len(sizes)))
    plan = make_plan(sources(sizes), options(shard_size=None, shards=shards))
    check_whole(plan, len(sizes))
    assert plan.shards == shards


@given(st.lists(st.integers(50_000, 150_000), min_size=40, max_size=80), st.integers(1, 20))
def test_shards_of_images_of_usual_sizes_differ_by_at_most_one_image(sizes, shards):
    plan = make_plan(sources(sizes), options(shard_size=None, shards=shards))
    mean = sum(sizes) / shards
    assert max(abs(payload - mean) for payload in payloads(plan, sizes)) <= max(sizes) + 2


@given(st.lists(st.integers(50_000, 150_000), min_size=40, max_size=80), st.integers(1, 20))
def test_every_cut_is_at_the_nearest_end_of_an_image(sizes, shards):
    plan = make_plan(sources(sizes), options(shard_size=None, shards=shards))
    ends = np.cumsum(payloads(plan, sizes))
    fair = sum(sizes) * np.arange(1, shards + 1) / shards
    assert np.abs(ends - fair).max() <= max(sizes) / 2 + len(sizes)


def test_no_shard_is_ever_empty():
    for count in range(1, 7):
        for sizes in itertools.product((0, 1, 4), repeat=count):
            for shards in range(1, count + 1):
                bounds = equal_payload(np.array(sizes), shards).tolist()
                assert (bounds[0], bounds[-1], len(bounds)) == (0, count, shards + 1)
                assert all(a < b for a, b in pairwise(bounds)), (sizes, shards)


def test_empty_files_do_not_take_the_shards_of_others():
    plan = make_plan(sources([5, 0, 0, 5, 5]), options(shard_size=None, shards=4))
    assert np.diff(plan.bounds).tolist() == [1, 2, 1, 1]


@given(SIZES, st.sampled_from([512, 4096, 65536, 524288]), st.integers(1, 8), st.booleans())
def test_the_size_of_a_shard_is_that_of_its_layout(sizes, align, shards, labels):
    given = sources(sizes, labels=labels)
    plan = make_plan(given, options(shard_size=None, shards=min(shards, len(sizes)), align=align))
    assert len(plan.bytes) == plan.shards
    for number, (first, last) in enumerate(pairwise(plan.bounds.tolist())):
        end = 0
        for row in range(first, last):
            cls, text = (1, None) if labels else (None, len(json_payload(b"c/%07d.jpg" % row, None, None)))
            end = place_sample(end, cls, text, sizes[row], align).end
        assert plan.bytes[number] == shard_bytes(end, align)


def test_images_of_one_size_are_shared_out_evenly():
    counts = np.diff(make_plan(sources([1000] * 103), options(shard_size=None, shards=10)).bounds)
    assert sorted(counts.tolist()) == [10] * 7 + [11] * 3


def test_one_huge_image_does_not_starve_the_shards_behind_it():
    sizes = [1000] * 50 + [1_000_000] + [1000] * 49
    plan = make_plan(sources(sizes), options(shard_size=None, shards=10))
    others = [payload for payload in payloads(plan, sizes) if payload < 1_000_000]
    assert len(others) == 9
    assert 5_000 <= min(others) <= max(others) <= 17_000  # 11 each, and the huge one may fall between two cuts


@given(
    SIZES, st.sampled_from([512, 4096, 65536]), st.integers(1, 2_000_000), st.booleans(),
    st.sampled_from([None, b'{"x":"' + b"x" * 600 + b'"}']),
)  # fmt: skip
def test_shards_stay_under_the_limit_unless_one_image_is_larger(sizes, align, limit, labels, metadata):
    given = sources(sizes, labels=labels, metadata=[metadata] * len(sizes))
    plan = make_plan(given, options(shard_size=limit, align=align))
    check_whole(plan, len(sizes))
    counts = np.diff(plan.bounds)
    assert all(count == 1 for count, size in zip(counts, plan.bytes, strict=True) if size > limit)


@given(st.lists(st.integers(1, 100_000), min_size=1, max_size=200), st.integers(300_000, 3_000_000))
def test_the_limit_is_used(sizes, limit):
    plan = make_plan(sources(sizes), options(shard_size=limit))
    assert plan.shards <= 1 + sum(size + 8192 for size in sizes) // (limit - 108_192 - shard_bytes(0, 4096))


def test_an_image_above_the_limit_has_a_shard_of_its_own_and_the_others_stay_full():
    sizes = [10_000] * 500 + [5_000_000] + [10_000] * 500
    plan = make_plan(sources(sizes), options(shard_size=1_000_000))
    alone = [i for i, size in enumerate(plan.bytes) if size > 1_000_000]
    assert [np.diff(plan.bounds)[i] for i in alone] == [1]
    assert plan.shards == 2 * 9 + 1  # 500 images of 16 KiB with headers and padding on either side
    assert min(payloads(plan, sizes)) > 500_000


@pytest.mark.parametrize("limit", ["shard_size", "shard_samples", "shards"])
def test_one_image_is_one_shard(limit):
    plan = make_plan(sources([5000]), options(**{"shard_size": None, limit: 1}))
    check_whole(plan, 1)
    assert (plan.payload, plan.shards) == (5000, 1)


@pytest.mark.parametrize(("count", "samples"), [(10, 3), (10, 10), (10, 11), (21, 3), (100_003, 7), (5, 1)])
def test_shard_samples_bounds_the_samples(count, samples):
    counts = np.diff(make_plan(sources([1] * count), options(shard_size=None, shard_samples=samples)).bounds)
    assert len(counts) == -(-count // samples)
    assert counts.max() <= samples
    assert counts.max() - counts.min() <= 1


def test_more_shards_than_images_is_an_error():
    with pytest.raises(ConfigError, match="more shards than images; expected at most 2; found 3"):
        make_plan(sources([1, 1]), options(shard_size=None, shards=3))


@pytest.mark.timeout(60)
@pytest.mark.parametrize("limit", [{"shard_size": 1}, {"shard_size": None, "shard_samples": 1},
                                   {"shard_size": None, "shards": 1_000_001}])  # fmt: skip
def test_a_million_shards_are_the_most(limit):
    count = 1_000_001
    table = pa.table(
        [pa.array([b"a.jpg"] * count, pa.large_binary()), pa.array(np.zeros(count), pa.int32()),
         pa.array(np.full(count, 9), pa.int64()), pa.nulls(count, pa.int64()), pa.nulls(count), pa.nulls(count)],
        TREE_SCHEMA,
    )  # fmt: skip
    many = Sources(root=b"/", table=table, classes=None)
    with pytest.raises(UnsafeError, match="too many shards") as caught:
        make_plan(many, options(key="index", **limit))
    assert caught.value.exit_code == 9


@given(SIZES, st.integers(1, 60), st.integers(1, 300_000), st.integers(1, 9), st.booleans())
def test_a_plan_is_the_same_however_few_numbers_are_looked_at_at_a_time(
    tmp_path_factory, sizes, shards, limit, span, shuffle
):
    size, small = np.array(sizes), np.arange(len(sizes)) % 3 * 512
    for how in ({"shards": min(shards, len(sizes)), "shard_size": None}, {"shard_size": limit}):
        chosen = options(shuffle=shuffle, seed=3, **how)
        whole = arrange(size, small, chosen)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(spool_module, "_SPAN", span)
            patch.setattr(spool_module, "_HELD_BYTES", 64)
            patch.setattr(sorted_numbers, "_SORTED_BYTES", 64)
            spooled = arrange(size, small, chosen, os.fsencode(tmp_path_factory.getbasetemp()))
        for name in ("order", "bounds", "bytes"):
            assert getattr(whole, name).tolist() == getattr(spooled, name).tolist()
        assert whole.payload == spooled.payload == sum(sizes)


def test_payloads_of_petabytes_do_not_overflow():
    sizes = [2**32 - 1] * 3000
    plan = make_plan(sources(sizes), options(shard_size=None, shards=1000))
    assert plan.payload == 3000 * (2**32 - 1)
    assert set(np.diff(plan.bounds).tolist()) == {3}
    weights = np.full(4000, 2**61 // 4000)
    assert set(np.diff(equal_payload(weights, 2000)).tolist()) == {2}


# --- order


def test_the_order_is_the_same_for_ever():
    expected = {
        0: [2, 9, 5, 0, 11, 8, 3, 6, 4, 1, 10, 7],
        1: [0, 8, 10, 1, 3, 5, 4, 9, 2, 6, 7, 11],
        2**64 - 1: [7, 8, 9, 1, 3, 4, 5, 6, 2, 10, 11, 0],
    }
    for seed, order in expected.items():
        assert make_plan(sources([1] * 12), options(shuffle=True, seed=seed)).order.tolist() == order


@pytest.mark.parametrize("seed", [0, 7, 2**64 - 1])
def test_the_order_is_that_of_splitmix64(seed):
    def mixed(row):
        x = (row + xxhash.xxh3_64_intdigest(b"shardkit pack order %d" % seed)) % 2**64
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
        return x ^ (x >> 31)

    plan = make_plan(sources([1] * 500), options(shuffle=True, seed=seed))
    assert plan.order.tolist() == sorted(range(500), key=mixed)


def test_another_seed_is_another_order_and_none_is_that_of_the_sources():
    orders = {tuple(make_plan(sources([1] * 100), options(shuffle=True, seed=s)).order.tolist()) for s in range(20)}
    assert len(orders) == 20
    assert make_plan(sources([1] * 100), options()).order.tolist() == list(range(100))


# --- keys


@pytest.mark.parametrize(
    ("names", "rule", "remedy"),
    [
        (("c/a.jpg", "c/a.jpeg"), "relpath", "rename one, or give --key index"),
        (("c/a.jpg", "c/a.JPG"), "relpath", "rename one, or give --key index"),
        (("c/a.jpg", "d/a.jpg"), "stem", "give --key relpath or --key index"),
    ],
)
def test_two_sources_with_one_key_are_an_error_before_anything_is_written(plant, tmp_path, names, rule, remedy):
    root = plant(*names, "c/z.jpg")
    with pytest.raises(ConfigError, match="two sources have one key") as caught:
        run_pack(root, tmp_path / "ds", options(key=rule), jobs=1)
    for name in names:
        assert name in str(caught.value)
    assert remedy in str(caught.value)
    assert not (tmp_path / "ds").exists()
    assert run_pack(root, tmp_path / "ds", options(key="index"), jobs=1).manifest.totals.samples == 3


def test_names_that_differ_in_case_or_odd_bytes_have_keys_of_their_own(plant, tmp_path):
    names = [b"a.jpg", b"A.jpg", b"a b.jpg", b"a-x20b.jpg", b"__x__.jpg", b"_x__.jpg", b"a..jpg", b"a.b.jpg",
             b"\xff.jpg", b"\n.jpg", b"x" * 251 + b".jpg", b"x" * 250 + b".jpg", b"x" * 250 + b".jpe"]  # fmt: skip
    result = run_pack(plant(*names), tmp_path / "ds", options(), jobs=1)
    assert result.manifest.totals.samples == len(names)


def test_a_row_that_stands_twice_is_an_error_with_both_rows():
    paths = [b"a.jpg", b"b\n.jpg", b"c.jpg", b"b\n.jpg"]
    twice = sources([1] * 4, paths=paths, numbers=[0, 3, 5, 9])
    with pytest.raises(ConfigError) as caught:
        make_plan(twice, options())
    assert "found b\\n.jpg in the rows 4 and 10 of the list; remove one, or give --key index" in str(caught.value)
    assert make_plan(twice, options(key="index")).order.tolist() == [0, 1, 2, 3]


def test_two_keys_with_one_hash_are_two_keys(monkeypatch):
    monkeypatch.setattr(planning, "hash64", lambda data: len(data))
    assert make_plan(sources([1] * 5), options()).shards == 1
    with pytest.raises(ConfigError, match="two sources have one key"):
        make_plan(sources([1] * 3, paths=[b"a.jpg", b"b.jpg", b"a.jpe"]), options())


def test_an_index_key_is_the_number_in_source_order():
    plan = make_plan(sources([1] * 5), options(shuffle=True, key="index"))
    (batch,) = plan_batches(sources([1] * 5), plan, "index")
    assert batch.column("key").to_pylist() == [f"{row:09d}" for row in plan.order]


# --- rows


@given(st.binary(min_size=1, max_size=40), st.none() | st.text(st.characters(exclude_categories=["Cs"]), max_size=20))
def test_a_json_member_is_what_pythons_json_writes(path, name):
    own = {"source": json_text(path)} | ({} if name is None else {"class": name})
    plain = json_payload(path, name, None)
    assert plain == json.dumps(own, ensure_ascii=False, separators=(",", ":")).encode()
    assert json.loads(json_payload(path, name, b'{"x":[1]}')) == {**own, "x": [1]}


def json_text(path):
    return "".join(
        f"%{ord(c) - 0xDC00:02X}" if "\udc80" <= c <= "\udcff" else "%25" if c == "%" else c
        for c in path.decode("utf-8", "surrogateescape")
    )


def test_the_plan_says_all_that_a_worker_needs():
    rows = sources([7, 8], paths=[b"a.jpg", b"\xff/b.jpg"], metadata=[None, b'{"x":1}'], numbers=[4, 9])
    (batch,) = plan_batches(rows, make_plan(rows, options()), "relpath")
    assert batch.schema.equals(PLAN_SCHEMA)
    assert batch.to_pylist() == [
        {"key": "a", "path": b"a.jpg", "label": 0, "size": 7, "mtime_ns": 0, "json": None, "number": 4},
        {"key": "-xFF/b", "path": b"\xff/b.jpg", "label": 0, "size": 8, "mtime_ns": 0, "number": 9,
         "json": b'{"source":"%FF/b.jpg","class":"c","x":1}'},
    ]  # fmt: skip


@pytest.mark.parametrize("labels", [True, False])
def test_how_many_rows_are_objects_at_a_time_changes_nothing(monkeypatch, labels):
    rows = sources([7 * i for i in range(50)], labels=labels)
    chosen = options(shard_size=None, shards=3, shuffle=True)

    def planned():
        plan, full, portable = make_plan(rows, chosen), new_digest("xxh3-128"), new_digest("xxh3-128")
        batches = list(plan_batches(rows, plan, "relpath"))
        for batch in batches:
            update_identity(batch, full, portable)
        return plan.bytes.tolist(), [batch.to_pylist() for batch in batches]

    expected = planned()
    monkeypatch.setattr(planning, "_ROWS", 7)
    assert planned() == expected


def identities(**changed):
    row = {"key": "a", "path": b"a.jpg", "label": 1, "size": 7, "mtime_ns": 5, "json": None, "number": 0, **changed}
    full, portable = new_digest("xxh3-128"), new_digest("xxh3-128")
    update_identity(pa.RecordBatch.from_pylist([row], PLAN_SCHEMA), full, portable)
    return full.hexdigest(), portable.hexdigest()


@pytest.mark.parametrize("changed", [{"path": b"b.jpg"}, {"label": None}, {"label": 2}, {"size": 8}, {"json": b"{}"}])
def test_another_source_is_another_list(changed):
    assert not set(identities()) & set(identities(**changed))


def test_another_time_is_another_run_of_the_same_list():
    (full, portable), (later, same) = identities(), identities(mtime_ns=6)
    assert (full != later, portable == same) == (True, True)


# --- nothing


@pytest.mark.parametrize(
    ("names", "given", "message"),
    [
        ((), {}, r"there is no JPEG to pack.*found nothing.*names end in \.jpg, \.jpeg, \.jpe or \.jfif"),
        (("a.png", "b.png", "c"), {}, "found 2 .png, 1 no extension"),
    ],
)
def test_nothing_to_pack_is_an_error_that_says_what_was_there(plant, tmp_path, names, given, message):
    with pytest.raises(ConfigError, match=message):
        run_pack(plant(*names), tmp_path / "ds", options(**given), jobs=1)
    assert not (tmp_path / "ds").exists()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"labels": "dir"}, r"found 2 no-class, such as a.jpg \(.*give --labels none"),
        ({"max_bytes": 1}, r"found 2 too-large, such as a.jpg \(.*at most 1\).*give a larger --max-bytes"),
    ],
)
def test_nothing_left_after_refusals_is_no_wrong_usage(plant, tmp_path, given, message):
    with pytest.raises(SourceError, match=message):
        run_pack(plant("a.jpg", "b.jpg"), tmp_path / "ds", options(**given), jobs=1)
    assert not (tmp_path / "ds").exists()


# --- coming true


@pytest.mark.parametrize("kind", ["labelled", "unlabelled", "list", "list without labels"])
@pytest.mark.parametrize(("align", "limit"), [(512, 30_000), (4096, 100_000), (65536, 1_000_000)])
def test_the_planned_sizes_come_true(plant, tmp_path, kind, align, limit):
    names = [f"c{i % 3}/{'long name ' * (i % 7)}{i}.jpg" for i in range(40)]
    root = source = plant(*names)
    if kind.startswith("list"):
        source = root / "list.jsonl"
        rows = [{"path": name, "label": i % 3, "caption": "x" * (40 * i)} for i, name in enumerate(names)]
        source.write_text("\n".join(map(json.dumps, rows)))
    chosen = options(
        shard_size=limit, align=align, shuffle=True,
        labels="none" if kind in ("unlabelled", "list without labels") else None,
    )  # fmt: skip
    plan = plan_pack(source, tmp_path / "ds", chosen)
    assert not (tmp_path / "ds").exists()
    manifest = run_pack(source, tmp_path / "ds", chosen, jobs=1).manifest
    sizes = [os.stat(tmp_path / "ds" / shard.name).st_size for shard in manifest.shards]
    assert list(plan.bytes) == sizes
    assert list(plan.counts) == [shard.samples for shard in manifest.shards]
    assert (plan.payload, plan.samples) == (manifest.totals.payload, 40)
    assert 1 < len(sizes) < 20


# --- memory

MEASURE = """
import os, re, sys, time
import pyarrow as pa
from shardkit.format.checksum import new_digest
from shardkit.packing.options import PackOptions
from shardkit.packing.plan import PLAN_SCHEMA, make_plan, plan_batches, update_identity
from shardkit.packing.scan import TREE_SCHEMA, SourceRows, Sources, _by_path
count, path = int(sys.argv[1]), sys.argv[2]
status = os.stat("/")
started = time.process_time()
rows = SourceRows(TREE_SCHEMA)
for i in range(count):
    rows.add(b"n%08d/n%08d_%d.JPEG" % (i % 1000, i % 1000, i), i % 1000, status)
sources = Sources(root=b"/", table=_by_path(rows.table()), classes=tuple(map(str, range(1000))))
options = PackOptions(name="t", shard_size=1 << 24)
plan = make_plan(sources, options)
digests = new_digest("xxh3-128"), new_digest("xxh3-128")
with pa.OSFile(path, "wb") as file, pa.ipc.new_file(file, PLAN_SCHEMA) as writer:
    for batch in plan_batches(sources, plan, options.key):
        writer.write_batch(batch)
        update_identity(batch, *digests)
# Not getrusage: its peak is inherited from whoever started this process.
peak = int(re.search(r"VmHWM:\\s*([0-9]+) kB", open("/proc/self/status").read())[1]) * 1024
print(peak, time.process_time() - started)
"""


def test_the_plan_costs_less_than_200_bytes_a_file(tmp_path):
    few, many = 60_000, 300_000
    peaks = []
    for count in (few, many):
        command = [sys.executable, "-c", MEASURE, str(count), str(tmp_path / "plan.arrow")]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        peak, seconds = map(float, done.stdout.split())
        peaks.append(peak)
    assert (peaks[1] - peaks[0]) / (many - few) < 200
    assert seconds / many < 50e-6  # of CPU; ten million in minutes
