"""Each format is what its own tool makes or takes; where the tool is not installed, what its documents say."""

from __future__ import annotations

import itertools
import json
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from shardkit.errors import ConfigError, UnsafeError
from shardkit.exporting.run import export
from shardkit.format.dali_index import parse_dali_index
from shardkit.testing.datasets import draft_dataset
from shardkit.testing.exports import database_rows, payloads_by_key, read_json, tar_members

SHARDS = ["tiny-000000.tar", "tiny-000001.tar", "tiny-000002.tar"]
COUNTS = [3, 2, 1]
SPLITS = {"train": [0, 2], "val": [1]}


def test_wids_reads_every_sample_by_our_index(dataset, wids_samples):
    export(dataset, "wids")
    assert wids_samples(dataset / "shardindex.json") == payloads_by_key(dataset)
    assert not list(dataset.glob("shardindex-*"))


def test_wids_reads_a_split_by_its_own_index(split_dataset, wids_samples):
    export(split_dataset, "wids")
    assert list(wids_samples(split_dataset / "shardindex-val.json")) == ["c/0003", "c/0004"]
    assert {path.name for path in split_dataset.glob("shardindex*")} == {
        "shardindex.json", "shardindex-train.json", "shardindex-val.json",
    }  # fmt: skip


def test_the_list_for_wids_is_the_one_that_widsindex_makes_without_its_md5(dataset, tmp_path):
    export(dataset, "wids")
    program = Path(sys.executable).with_name("widsindex")
    if not program.exists():
        pytest.skip("widsindex is not installed")
    made = tmp_path / "made.json"
    subprocess.run([program, "create", "-o", made, *SHARDS], cwd=dataset, check=True, capture_output=True)
    theirs = [{name: value for name, value in s.items() if name != "md5sum"} for s in read_json(made)["shardlist"]]
    ours = read_json(dataset / "shardindex.json")
    assert ours["shardlist"] == theirs
    assert {ours[name] == read_json(made)[name] for name in ("__kind__", "wids_version")} == {True}


@pytest.mark.parametrize("options", [{}, {"align": 512}, {"labels": False}, {"metadata": False}], ids=str)
def test_the_index_for_dali_is_the_one_that_wds2idx_makes(tmp_path, options):
    dataset = draft_dataset((3, 2), **options).write(tmp_path / "ds")
    export(dataset, "dali", out=tmp_path / "out")
    for shard in sorted(dataset.glob("*.tar")):
        made = tmp_path / "made.idx"
        program = Path(sys.executable).with_name("wds2idx")
        subprocess.run([program, shard, made], check=True, stdout=subprocess.DEVNULL)
        assert (tmp_path / "out" / f"{shard.stem}.idx").read_bytes() == made.read_bytes()


def test_dali_reads_every_sample_by_our_index(dataset, tmp_path):
    from nvidia import dali

    export(dataset, "dali", out=tmp_path)

    @dali.pipeline_def(batch_size=6, num_threads=1, device_id=None)
    def graph():
        return tuple(
            dali.fn.readers.webdataset(
                paths=[str(dataset / name) for name in SHARDS],
                index_paths=[str(tmp_path / name.replace(".tar", ".idx")) for name in SHARDS],
                ext=["cls", "json", "jpg"], dtypes=[dali.types.UINT8] * 3,
            )
        )  # fmt: skip

    pipeline = graph()
    pipeline.build()
    columns = [[bytes(memoryview(output.at(i))) for i in range(6)] for output in pipeline.run()]
    expected = [[sample[name] for sample in payloads_by_key(dataset).values()] for name in ("cls", "json", "jpg")]
    assert columns == expected


def test_energon_finds_each_sample_and_each_part_where_the_tar_has_it(dataset):
    export(dataset, "energon")
    database = dataset / ".nv-meta" / "index.sqlite"
    stored = {(shard, index): key for shard, key, index, _, _ in database_rows(database, "samples")}
    for number, name in enumerate(SHARDS):
        parts = [row for row in database_rows(database, "sample_parts") if row[0] == number]
        found = [(f"{stored[shard, index]}.{part}", at, size) for shard, index, part, at, size in parts]
        assert found == [(name, at, len(payload)) for name, at, payload in tar_members(dataset / name)]
        offsets = struct.unpack(f"<{COUNTS[number] + 1}Q", (dataset / f"{name}.idx").read_bytes())
        ranges = [(row[3], row[3] + row[4]) for row in database_rows(database, "samples") if row[0] == number]
        assert ranges == list(itertools.pairwise(offsets))
        assert offsets[0] == 0
        assert (dataset / name).read_bytes()[offsets[-1] :].strip(b"\0") == b""


def test_the_meta_folder_for_energon_by_example(dataset):
    export(dataset, "energon")
    folder = dataset / ".nv-meta"
    assert read_json(folder / ".info.json") == {
        "energon_version": "7.4.1", "shard_counts": dict(zip(SHARDS, COUNTS, strict=True)),
    }  # fmt: skip
    assert (folder / "split.yaml").read_text() == (
        'split_parts:\n  "train": ["tiny-{000000..000002}.tar"]\n  "val": []\n  "test": []\nexclude: []\n'
    )
    assert (folder / "dataset.yaml").read_text() == (
        "sample_type:\n  __module__: megatron.energon\n  __class__: ImageClassificationSample\n"
        'field_map:\n  image: "jpg"\n  label: cls\n'
    )
    assert (folder / "index.uuid").read_text() == read_json(dataset / "manifest.json")["generation"]


def test_samples_without_labels_are_left_to_the_users_own_cooker_of_energon(tmp_path):
    dataset = draft_dataset((2, 2), labels=False).write(tmp_path / "ds")
    export(dataset, "energon")
    text = (dataset / ".nv-meta" / "dataset.yaml").read_text()
    assert text == "__module__: megatron.energon\n__class__: CrudeWebdataset\n"


def test_the_splits_for_energon_are_those_of_the_manifest(split_dataset):
    export(split_dataset, "energon")
    assert (split_dataset / ".nv-meta" / "split.yaml").read_text() == (
        'split_parts:\n  "train": ["tiny-{000000,000002}.tar"]\n  "val": ["tiny-000001.tar"]\n  "test": []\n'
        "exclude: []\n"
    )


def test_the_list_for_timm_by_example(dataset):
    export(dataset, "timm")
    assert read_json(dataset / "_info.json") == {
        "splits": {"train": {"name": "train", "num_samples": 6, "filenames": SHARDS, "shard_lengths": COUNTS}}
    }


def test_the_splits_for_timm_are_those_of_the_manifest(split_dataset):
    export(split_dataset, "timm")
    splits = read_json(split_dataset / "_info.json")["splits"]
    assert {name: split["num_samples"] for name, split in splits.items()} == {"train": 4, "val": 2}
    for name, numbers in SPLITS.items():
        assert splits[name]["filenames"] == [SHARDS[i] for i in numbers]
        assert splits[name]["shard_lengths"] == [COUNTS[i] for i in numbers]


def test_the_sizes_for_openclip_by_example(dataset):
    export(dataset, "openclip")
    assert read_json(dataset / "sizes.json") == dict(zip(SHARDS, COUNTS, strict=True))


def test_the_card_for_huggingface_by_example(split_dataset):
    export(split_dataset, "huggingface")
    front, text = (split_dataset / "README.md").read_text().removeprefix("---\n").split("---\n")
    assert front == (
        'configs:\n- config_name: default\n  data_files:\n  - split: "train"\n    path:\n    - "tiny-000000.tar"\n'
        '    - "tiny-000002.tar"\n  - split: "val"\n    path:\n    - "tiny-000001.tar"\n'
    )
    assert text.startswith("\n# tiny\n\n6 images in 3 WebDataset shards, ")


def test_of_our_own_shards_a_label_that_some_samples_lack_is_refused(tmp_path):
    draft = draft_dataset((6, 2))
    draft.shards[1].rows[1] = draft.shards[1].rows[1]._replace(label=None)
    dataset = draft.write(tmp_path / "ds")
    with pytest.raises(ConfigError, match=r"timm: .* label .*tiny-000001\.tar \[sample c/0007\]; expected cls"):
        export(dataset, "timm")
    export(dataset, "huggingface")  # None is what `datasets` has there


def test_of_our_own_shards_metadata_that_only_later_samples_have_is_refused(tmp_path):
    draft = draft_dataset((6, 2))
    for number in range(6):
        draft.shards[0].rows[number] = draft.shards[0].rows[number]._replace(json_offset=0, json_size=0)
    dataset = draft.write(tmp_path / "ds")
    with pytest.raises(ConfigError, match=r"tiny-000001\.tar \[sample c/0006\]; expected cls, jpg; found json"):
        export(dataset, "huggingface")
    export(dataset, "timm")


def test_the_lines_for_aistore_name_every_member_in_stored_order(dataset):
    export(dataset, "aistore")
    lines = [json.loads(line) for line in (dataset / "aistore.jsonl").read_text().splitlines()]
    assert lines == [
        {"objname": shard, "archpath": name} for shard in SHARDS for name, _, _ in tar_members(dataset / shard)
    ]


def test_a_dataset_without_labels_has_no_cls_member_anywhere(tmp_path):
    dataset = draft_dataset((2,), labels=False).write(tmp_path / "ds")
    export(dataset, ["aistore", "energon", "dali"])
    names = [json.loads(line)["archpath"] for line in (dataset / "aistore.jsonl").read_text().splitlines()]
    assert names == [name for name, _, _ in tar_members(dataset / SHARDS[0])]
    assert {row[2] for row in database_rows(dataset / ".nv-meta" / "index.sqlite", "sample_parts")} == {"json", "jpg"}
    assert len(parse_dali_index((dataset / "tiny-000000.idx").read_bytes())[0]) == 2


def test_one_part_of_a_split_has_its_name(dataset, change_manifest):
    change_manifest(dataset, options={"part": "val"})
    export(dataset, ["timm", "huggingface", "energon"])
    (split,) = read_json(dataset / "_info.json")["splits"].values()
    assert (split["name"], split["filenames"]) == ("val", SHARDS)
    card = (dataset / "README.md").read_text()
    assert '- split: "val"' in card
    assert "train" not in card
    lines = (dataset / ".nv-meta" / "split.yaml").read_text().splitlines()
    assert lines[1:4] == ['  "val": ["tiny-{000000..000002}.tar"]', '  "train": []', '  "test": []']


@pytest.mark.parametrize("part", ["../up", "", {"a": 1}])
def test_a_part_whose_name_cannot_be_in_a_file_name_is_refused(dataset, change_manifest, part):
    change_manifest(dataset, options={"part": part})
    with pytest.raises(UnsafeError, match="split's name"):
        export(dataset, "timm")


def test_a_dash_in_the_name_of_a_part_is_written_so_that_every_tool_takes_it(dataset, change_manifest):
    change_manifest(dataset, options={"part": "val-1"})
    export(dataset, "huggingface")
    assert '- split: "val_1"' in (dataset / "README.md").read_text()


def test_no_part_is_the_split_train(dataset, change_manifest):
    change_manifest(dataset, options={"part": None})
    export(dataset, "timm")
    assert list(read_json(dataset / "_info.json")["splits"]) == ["train"]
