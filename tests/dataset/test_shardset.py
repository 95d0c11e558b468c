"""The opened dataset: every sample as it was packed, the index as columns, and what is wrong said at open."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import struct
import tarfile
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import shardkit
from shardkit.dataset.shardset import Dataset, open_dataset
from shardkit.errors import ConfigError, FormatError, IndexFormatError, IntegrityError, ShortReadError, StorageError
from shardkit.format.index import SCHEMA
from shardkit.testing.datasets import draft_dataset
from shardkit.testing.steps import lines_run

COUNTS = (3, 1, 5, 2)
TOTAL = sum(COUNTS)


@pytest.fixture(scope="module")
def draft():
    return draft_dataset(COUNTS, sizes=(401, 512, 700, 4096, 9001))


@pytest.fixture(scope="module")
def rows(draft):
    return [(shard, row) for shard in draft.shards for row in shard.rows]


@pytest.fixture
def folder(draft, tmp_path):
    return draft.write(tmp_path / "ds")


@pytest.fixture
def dataset(folder):
    with open_dataset(folder) as opened:
        yield opened


def members(folder):
    """What Python's tarfile finds, by member name: the truth that is not ours."""
    found = {}
    for path in sorted(folder.glob("*.tar")):
        with tarfile.open(path) as archive:
            found |= {member.name: archive.extractfile(member).read() for member in archive if member.isfile()}
    return found


def test_every_sample_is_what_tarfile_finds(dataset, folder):
    truth = members(folder)
    assert len(dataset) == TOTAL
    for sample in dataset:
        assert sample.jpeg == truth[f"{sample.key}.jpg"]
        assert sample.label == int(truth[f"{sample.key}.cls"])
        assert sample.metadata == json.loads(truth[f"{sample.key}.json"])
    assert len({sample.key for sample in dataset}) == TOTAL


def test_shardkit_open_is_open_dataset(folder):
    with shardkit.open(folder) as opened:
        assert isinstance(opened, Dataset)
        assert isinstance(opened[0], shardkit.Sample)
        assert opened.classes == tuple(f"class {i}" for i in range(12))
        assert opened.generation == opened.manifest.generation


def test_a_dataset_without_labels_and_json_says_none(tmp_path):
    with open_dataset(draft_dataset((2,), labels=False).write(tmp_path / "plain")) as plain:
        assert plain.classes is None
        assert plain[0].label is None
        assert plain.locate([0, 1]).label.tolist() == [-1, -1]
    with open_dataset(draft_dataset((2,), metadata=False).write(tmp_path / "bare")) as bare:
        assert bare[0].metadata is None


@pytest.mark.parametrize("number", [0, 2, 3, 4, TOTAL - 1])
def test_negative_numbers_count_from_the_end(dataset, number):
    assert dataset[number] == dataset[number - TOTAL]
    assert dataset[np.int64(number)] == dataset[number]


@pytest.mark.parametrize("number", [TOTAL, -TOTAL - 1, 10**30])
def test_a_number_outside_is_an_index_error(dataset, number):
    with pytest.raises(IndexError, match=f"{TOTAL} samples"):
        dataset[number]
    with pytest.raises(IndexError):
        dataset.columns["size"][number]
    if abs(number) < 1 << 62:
        with pytest.raises(IndexError, match=f"{TOTAL} samples"):
            dataset.locate([0, number])


@pytest.mark.parametrize("number", [slice(0, 2), 1.0, "c/0000", [0]])
def test_what_is_no_number_is_refused_with_advice(dataset, number):
    with pytest.raises(TypeError, match=r"ds.columns\[name\]\[a:b\]"):
        dataset[number]


def test_samples_are_found_by_key(dataset):
    for number in range(TOTAL):
        sample = dataset[number]
        assert dataset.by_key(sample.key) == sample


@pytest.mark.parametrize("key", ["", "c/000", "c/00000", "c/0099", "/0000", "c/0000\0", "é"])
def test_a_key_that_is_not_there_is_a_key_error(dataset, key):
    with pytest.raises(KeyError):
        dataset.by_key(key)


@pytest.mark.parametrize("name", SCHEMA.names)
def test_columns_are_the_rows_that_were_written(dataset, rows, name):
    column = dataset.columns[name]
    truth = [getattr(row, name) for _, row in rows]
    assert len(column) == TOTAL
    assert list(column[:]) == truth
    assert list(column[2:9:3]) == truth[2:9:3]
    assert list(column[::-1]) == truth[::-1]
    assert list(column[np.array([9, 0, 3, 3, -1])]) == [truth[i] for i in (9, 0, 3, 3, -1)]
    assert list(column[[]]) == []
    assert [column[i] for i in range(-TOTAL, TOTAL)] == truth * 2
    if name not in ("key", "source"):
        assert column[:].dtype == column.dtype == np.dtype(str(SCHEMA.field(name).type))
        assert np.asarray(column).tolist() == truth
        assert isinstance(column[0], int)


def test_columns_are_a_mapping_of_the_schema(dataset):
    assert list(dataset.columns) == SCHEMA.names
    assert len(dataset.columns) == len(SCHEMA.names)
    with pytest.raises(KeyError):
        dataset.columns["colour"]
    with pytest.raises(TypeError):
        dataset.columns["size"][[0.5]]
    with pytest.raises(TypeError):
        dataset.columns["size"][[True, False]]


@pytest.mark.parametrize("missing", [{0}, {0, 1, 2}, {4, 8}, set(range(9)), {10}])
def test_a_missing_label_reads_as_minus_one(tmp_path, missing):
    draft = draft_dataset(COUNTS)
    number = 0
    for shard in draft.shards:
        for at, row in enumerate(shard.rows):
            shard.rows[at] = row._replace(label=None if number in missing else number)
            number += 1
    with open_dataset(draft.write(tmp_path / "ds")) as dataset:
        expected = [-1 if i in missing else i for i in range(TOTAL)]
        assert dataset.columns["label"][:].tolist() == expected
        assert dataset.locate(np.arange(TOTAL)).label.tolist() == expected
        assert dataset[min(missing)].label is None


def test_locate_finds_the_bytes_of_each_sample(dataset, rows):
    ids = np.random.default_rng(0).integers(-TOTAL, TOTAL, 100)
    found = dataset.locate(ids)
    assert [found.shard.dtype, found.offset.dtype, found.size.dtype, found.label.dtype] == [np.int32] + [np.int64] * 3
    for i, number in enumerate(ids):
        shard, row = rows[number]
        path = dataset.shard_paths[found.shard[i]]
        assert os.path.basename(path) == shard.name
        assert (found.offset[i], found.size[i], found.label[i]) == (row.offset, row.size, row.label)


@pytest.mark.parametrize(("offset", "size"), [(10**6, 401), (4096, 1 << 31), (2**64 - 1, 401), (2**63, 1)])
def test_an_index_that_points_outside_its_shard_is_refused(tmp_path, offset, size):
    draft = draft_dataset(COUNTS)
    rows = draft.dataset_rows[2] = list(draft.shards[2].rows)
    rows[1] = rows[1]._replace(offset=offset, size=size)
    with open_dataset(draft.write(tmp_path / "ds")) as dataset:
        with pytest.raises(IntegrityError, match=r"000002\.tar:\d+ \[sample c/0005\]"):
            dataset.locate(np.arange(TOTAL))
        with pytest.raises(IntegrityError, match="outside its shard"):
            dataset[5]
        assert dataset[4].key == "c/0004"


def test_a_flipped_byte_is_found_when_the_sample_is_read(dataset, rows):
    row = rows[4][1]
    path = dataset.shard_paths[2]
    with open(path, "r+b") as stream:
        stream.seek(row.offset + row.size - 1)
        stream.write(b"!")
    with pytest.raises(IntegrityError) as caught:
        dataset[4]
    assert (caught.value.path, caught.value.offset, caught.value.key) == (path, row.offset, row.key)
    assert dataset[5].key == rows[5][1].key


def test_damaged_json_is_named(tmp_path):
    draft = draft_dataset((2,))
    row = draft.shards[0].rows[1]
    draft.shards[0].tar[row.json_offset] = ord("[")
    with (
        open_dataset(draft.write(tmp_path / "ds")) as dataset,
        pytest.raises(IntegrityError, match=rf":{row.json_offset} \[sample c/0001\]"),
    ):
        dataset[1]


def test_a_shard_cut_after_opening_names_the_sample(dataset, rows):
    os.truncate(dataset.shard_paths[0], rows[1][1].offset + 5)
    assert dataset[0].key == rows[0][1].key
    with pytest.raises(ShortReadError, match=rf":{rows[1][1].offset} \[sample c/0001\]"):
        dataset[1]


def test_threads_may_share_a_dataset(dataset):
    truth = [sample.jpeg for sample in dataset]
    ids = list(range(TOTAL)) * 40
    with ThreadPoolExecutor(8) as threads:
        assert [s.jpeg for s in threads.map(dataset.__getitem__, ids)] == [truth[i] for i in ids]


def test_a_dataset_pickles_by_path(dataset, folder):
    dataset.columns["size"][0]
    copy = pickle.loads(pickle.dumps(dataset))
    assert list(copy) == list(dataset)
    assert len(pickle.dumps(dataset)) < 500


def test_a_pickle_of_another_edition_is_refused(dataset, folder):
    data = pickle.dumps(dataset)
    shutil.rmtree(folder)
    draft_dataset((2,)).write(folder)
    with pytest.raises(ConfigError, match="replaced"):
        pickle.loads(data)


def test_a_forked_child_reads_on(dataset):
    first = dataset[0]
    child = os.fork()
    if child == 0:
        os._exit(0 if dataset[0] == first and dataset[TOTAL - 1].key else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_closed_dataset_reads_no_more_and_closes_again(dataset):
    column = dataset.columns["size"]
    dataset[0]
    dataset.close()
    dataset.close()
    with pytest.raises(ConfigError, match="closed"):
        dataset[0]
    assert len(column[:]) == TOTAL


def test_a_dropped_dataset_gives_its_descriptors_back(folder):
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        open_dataset(folder)[0]
    assert len(os.listdir("/proc/self/fd")) <= before


def test_a_path_that_is_no_dataset_gets_advice(tmp_path, folder):
    with pytest.raises(ConfigError, match="no such dataset"):
        open_dataset(tmp_path / "nothing")
    with pytest.raises(ConfigError, match="a dataset is a folder"):
        open_dataset(folder / "index.arrow")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="shardkit pack"):
        open_dataset(tmp_path / "empty")


def test_an_unfinished_pack_is_told_from_no_dataset(folder):
    (folder / "manifest.json").unlink()
    (folder / ".shardkit").mkdir()
    with pytest.raises(ConfigError, match="--resume"):
        open_dataset(folder)


@pytest.mark.parametrize("name", ["manifest.json", "index.arrow"])
def test_a_damaged_file_is_named(folder, name):
    path = folder / name
    path.write_bytes(bytes(path.stat().st_size))
    with pytest.raises(FormatError) as caught:
        open_dataset(folder)
    assert str(folder / name) in str(caught.value)


def test_an_index_of_another_size_is_refused(folder):
    with open(folder / "index.arrow", "ab") as stream:
        stream.write(b"\0")
    with pytest.raises(IntegrityError, match=r"index\.arrow"):
        open_dataset(folder)


def test_an_empty_index_is_refused(folder):
    (folder / "index.arrow").write_bytes(b"")
    with pytest.raises(IntegrityError, match="found 0 bytes"):
        open_dataset(folder)


def test_an_index_with_other_rows_is_refused(tmp_path):
    draft = draft_dataset(COUNTS)
    draft.dataset_rows[2] = draft.shards[2].rows[:-1]
    with pytest.raises(IntegrityError, match=r"shard 2 .* expected 5 rows; found 4 rows"):
        open_dataset(draft.write(tmp_path / "ds"))


@pytest.mark.parametrize(("shard", "row", "which"), [(0, 0, "first"), (0, 2, "last"), (1, 0, "first"), (3, 1, "last")])
def test_an_index_with_other_keys_is_refused(tmp_path, shard, row, which):
    draft = draft_dataset(COUNTS)
    rows = draft.dataset_rows[shard] = list(draft.shards[shard].rows)
    rows[row] = rows[row]._replace(key="c/other")
    with pytest.raises(IntegrityError, match=f"the {which} key of tiny-00000{shard}.tar"):
        open_dataset(draft.write(tmp_path / "ds"))


def test_a_missing_shard_is_found_at_open(folder):
    (folder / "tiny-000001.tar").unlink()
    with pytest.raises(StorageError, match=r"tiny-000001\.tar.*ENOENT"):
        open_dataset(folder)


@pytest.mark.parametrize("change", [-1, 1])
def test_a_shard_of_another_size_is_found_at_open(folder, change):
    path = folder / "tiny-000003.tar"
    os.truncate(path, path.stat().st_size + change)
    with pytest.raises(IntegrityError, match=r"tiny-000003\.tar"):
        open_dataset(folder)


@pytest.mark.parametrize("wild", [-5, 1 << 30, -(1 << 31), 7])
def test_a_wild_text_offset_ends_in_an_error_and_not_in_a_crash(folder, wild):
    # Keys of six characters, so the offsets of shard 2 are 0, 6, 12, ...; the third one is damaged in the file.
    path = folder / "index.arrow"
    data = bytearray(path.read_bytes())
    pattern = struct.pack("<6i", 0, 6, 12, 18, 24, 30)
    at = data.index(pattern) + 8
    data[at : at + 4] = struct.pack("<i", wild)
    path.write_bytes(data)
    with open_dataset(folder) as dataset:
        keys = dataset.columns["key"]
        if wild == 7:  # inside the texts: only the digest tells
            assert [keys[5], keys[6]] == ["c", "/0005c/0006"]
        else:
            for number in (5, 6):
                with pytest.raises(IndexFormatError, match="damaged"):
                    keys[number]
        assert dataset.by_key("c/0000").key == keys[0]
        with pytest.raises(KeyError):
            dataset.by_key("c/0005")


def test_rows_are_located_without_a_step_for_each(tmp_path):
    """They are located as columns: the same lines of Python run for 4096 of them as for 64."""
    with open_dataset(draft_dataset((500, 500)).write(tmp_path / "ds")) as dataset:
        ids = np.random.default_rng(0).integers(0, 1000, 4096)
        dataset.locate(ids)  # what is done once, at the first use
        assert lines_run(lambda: dataset.locate(ids)) == lines_run(lambda: dataset.locate(ids[:64])) > 0
