"""What `convert` writes in other frameworks' formats is what those frameworks read, and comes back byte for byte."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import shardkit
from shardkit.cli.main import main
from shardkit.errors import ConfigError, FormatError, LockedError, SourceError, UnsafeError
from shardkit.testing.packs import StopAfter, contents

from .conftest import damaged_copy, members_of, refusals_of, rows_of

# The libraries warn, of each other and of their own; `make peers` has environments that hold them.
pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("ignore")]

LIBRARY = {"mds": "streaming", "litdata": "litdata", "hf": "datasets"}
KINDS = [pytest.param("mds", marks=pytest.mark.mds), "litdata", "hf"]
BACK = {"key_column": "key", "json_column": "json", "jobs": 1}


@pytest.fixture(autouse=True)
def _alone(tmp_path, monkeypatch):
    """Let no library ask a hub, or leave a cache behind."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf-home"))


@pytest.fixture(params=KINDS)
def kind(request):
    """A format, where its library is installed."""
    if importlib.util.find_spec(LIBRARY[request.param]) is None:
        pytest.skip(f"{LIBRARY[request.param]} is not installed")
    return request.param


def read_mds(folder):
    from streaming import LocalDataset

    dataset = LocalDataset(str(folder))
    return [dataset[number] for number in range(len(dataset))]


def read_litdata(folder):
    from litdata import StreamingDataset

    dataset = StreamingDataset(str(folder), cache_dir=str(folder.parent / "cache"))
    return [dataset[number] for number in range(len(dataset))]


def read_hf(folder):
    import datasets

    rows = datasets.load_dataset(str(folder), cache_dir=str(folder.parent / "cache"))["train"]
    assert isinstance(rows.features["image"], datasets.Image)
    stored = rows.cast_column("image", datasets.Image(decode=False))
    return [{**row, "image": row["image"]["bytes"]} for row in stored]


READ = {"mds": read_mds, "litdata": read_litdata, "hf": read_hf}


def images(folder):
    return {name: data for name, data in members_of(folder).items() if name.endswith(".jpg")}


def code(arguments):
    """Run the command in this process; return its exit code."""
    with pytest.raises(SystemExit) as caught:
        main([str(each) for each in arguments])
    return caught.value.code


def test_the_framework_reads_images_labels_keys_and_json(listed, tmp_path, kind):
    result = shardkit.convert_to(kind, listed, tmp_path / "out", shard_size=20_000)
    found = READ[kind](tmp_path / "out")
    expected = [
        {"image": sample.jpeg, "label": sample.label, "key": sample.key, "json": sample.metadata}
        for sample in shardkit.open(listed)
    ]
    assert [{**row, "json": json.loads(row["json"])} for row in found] == expected
    part = result.parts[None]
    assert (part.samples, part.payload) == (30, sum(len(row["image"]) for row in found))
    assert part.bytes == sum(path.stat().st_size for path in (tmp_path / "out").iterdir() if path.name != "README.md")
    assert part.files > 3  # of at most 20 kB


def test_shards_come_back_byte_for_byte(listed, tmp_path, kind):
    shardkit.convert_to(kind, listed, tmp_path / "out", shard_size=9000)
    labels = {} if kind == "hf" else {"labels": (tmp_path / "out" / "classes.txt").read_text().split()}
    source = f"{kind}:{tmp_path / 'out'}"
    shardkit.convert(source, tmp_path / "back", name="l", shards=3, **BACK, **labels)
    for path in listed.glob("*.tar"):
        assert (tmp_path / "back" / path.name).read_bytes() == path.read_bytes()
    assert shardkit.open(tmp_path / "back").classes == shardkit.open(listed).classes


def test_what_has_no_label_or_json_says_so(write_tar, sample, tmp_path, kind):
    tar = write_tar("x.tar", [*sample(0, label=2), *sample(1), *sample(2, metadata=b'{"a": 1.50}')])
    shardkit.convert_to(kind, tar, tmp_path / "out")
    none = None if kind == "hf" else -1
    assert [row["label"] for row in READ[kind](tmp_path / "out")] == [2, none, none]
    texts = [row["json"] or "" for row in READ[kind](tmp_path / "out")]
    assert texts == ["", '{"source":"x.tar/000001.jpg"}', '{"a": 1.50}']
    shardkit.convert(f"{kind}:{tmp_path / 'out'}", tmp_path / "back", **BACK)
    shardkit.convert(tar, tmp_path / "straight", jobs=1)
    assert members_of(tmp_path / "back") == members_of(tmp_path / "straight")
    shardkit.convert_to(kind, write_tar("y.tar", sample(0, label=2)), tmp_path / "bare")
    assert set(READ[kind](tmp_path / "bare")[0]) == {"image", "label", "key"}


def test_it_is_the_selection_of_a_conversion_to_shards(packed, tmp_path, kind):
    given = {"where": "label != 1", "shuffle": True, "seed": 5, "labels": {"a": "x", "c": "y", "b": None}}
    split = {"split": {"hard-train": "0.5", "val": "0.5"}}
    result = shardkit.convert_to(kind, packed, tmp_path / "out", **given, **split)
    shardkit.convert(packed, tmp_path / "ours", jobs=1, **given, **split)
    assert dict(result.passed_over) == {"by --where": 10}
    assert [part.samples for part in result.parts.values()] == [
        len(rows_of(tmp_path / "ours" / part)) for part in ("hard-train", "val")
    ]
    for part in ("hard-train", "val"):
        if kind == "hf":
            import datasets

            loaded = datasets.load_dataset(str(tmp_path / "out"), cache_dir=str(tmp_path / "cache"))
            rows = loaded[part.replace("-", "_")]
            assert rows.features["label"].names == ["x", "y"]
        else:
            rows = READ[kind](tmp_path / "out" / part)
            assert (tmp_path / "out" / part / "classes.txt").read_text() == "x\ny\n"
        order = list(rows_of(tmp_path / "ours" / part))
        assert [row["key"] for row in rows] == order
        assert [row["label"] for row in rows] == [row["label"] for row in rows_of(tmp_path / "ours" / part).values()]


def test_damage_and_what_fails_a_check_are_left_out_and_named(packed, tmp_path, kind):
    source = damaged_copy(packed, tmp_path / "src")
    assert code(["convert", source, f"{kind}:{tmp_path / 'out'}"]) == 3
    assert [line["reason"] for line in refusals_of(tmp_path / "out")] == ["damaged"]
    assert "b/00004" not in {row["key"] for row in READ[kind](tmp_path / "out")}
    assert len(READ[kind](tmp_path / "out")) == 29
    with pytest.raises(SourceError, match=r"CRC-32C"):
        shardkit.convert_to(kind, source, tmp_path / "no", on_error="fail")
    with pytest.raises(SourceError, match="every sample was refused"):
        shardkit.convert_to(kind, source, tmp_path / "no", max_pixels=1)
    assert sorted(os.listdir(tmp_path))[-2:] == ["out", "src"]


def test_an_interruption_leaves_nothing_and_an_older_dataset_whole(packed, tmp_path, kind):
    for overwrite in (False, True):
        before = contents(tmp_path)
        with pytest.raises(StopAfter.Stop):
            shardkit.convert_to(
                kind, packed, tmp_path / "out", overwrite=overwrite, shard_size=9000, progress=StopAfter(2)
            )
        assert contents(tmp_path) == before
        shardkit.convert_to(kind, packed, tmp_path / "out", overwrite=overwrite, key="index")
    with pytest.raises(ConfigError, match=r"not empty.*--overwrite"):
        shardkit.convert_to(kind, packed, tmp_path / "out")
    assert READ[kind](tmp_path / "out")[0]["key"] == "000000000"


@pytest.mark.mds
def test_an_interruption_prints_nothing_of_the_library(packed, tmp_path, caplog):
    pytest.importorskip("streaming")
    for reports in range(1, 30, 4):  # its threads have work waiting at some of them
        with contextlib.suppress(StopAfter.Stop):
            shardkit.convert_to("mds", packed, tmp_path / f"out{reports}", shard_size=500, progress=StopAfter(reports))
    assert not caplog.records


def test_the_command_says_what_it_did_and_what_means_nothing(packed, tmp_path, kind, capsys):
    target = f"{kind}:{tmp_path / 'out'}"
    assert code(["convert", packed, target, "--dry-run"]) == 0
    assert "nothing was written" in capsys.readouterr().out
    assert os.listdir(tmp_path) == []
    given = [("--jobs", "2"), ("--align", "512"), ("--digest", "sha256"), ("--resume",), ("--reflink", "auto")]
    for option in [*given, ("--name", "x"), ("--shards", "2"), ("--shard-samples", "2")]:
        assert code(["convert", packed, target, *option]) == 2
        assert f"{option[0]} means nothing for {kind}:DIR" in capsys.readouterr().err
    if kind != "hf":
        assert code(["convert", packed, target, "--shard-size", "4GiB"]) == 2
        assert "32 bits" in capsys.readouterr().err
    assert code(["convert", packed, target, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["format"], document["samples"], document["parts"][0]["part"]) == (kind, 30, None)
    assert code(["convert", packed, target]) == 2
    assert code(["convert", packed, target, "--overwrite"]) == 0
    assert "wrote 30 samples" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="convert_to"):
        shardkit.convert(packed, target)


def test_images_are_reencoded_as_for_shards(tmp_path, kind):
    from PIL import Image

    (tmp_path / "src").mkdir()
    for number in range(3):
        Image.effect_noise((80 + number, 60), 50).save(tmp_path / "src" / f"{number}.jpg")
    shardkit.pack(tmp_path / "src", tmp_path / "ds", name="ds", shards=1, jobs=1)
    shardkit.convert_to(kind, tmp_path / "ds", tmp_path / "out", resize=32)
    sizes = {min(Image.open(io.BytesIO(row["image"])).size) for row in READ[kind](tmp_path / "out")}
    assert sizes == {32}


RUN = "import sys; from shardkit.cli.main import main; main(sys.argv[1:])"


def start(*arguments, **more):
    environment = {**os.environ, "PYTHONPATH": str(Path(shardkit.__file__).parents[1])}
    command = [sys.executable, "-W", "ignore", "-c", RUN, *map(str, arguments)]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment, **more)


def test_a_full_disk_is_said_and_leaves_nothing(packed, tmp_path, kind):
    before = contents(tmp_path)

    def limit():
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))

    with start("convert", packed, f"{kind}:{tmp_path / 'out'}", preexec_fn=limit) as process:
        _, said = process.communicate()
    assert process.returncode == 5, said
    assert "nothing was changed" in said
    assert contents(tmp_path) == before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_signal_ends_it_and_the_next_run_begins_anew(packed, tmp_path, kind, number):
    arguments = ["convert", *[packed] * 40, f"{kind}:{tmp_path / 'out'}", "--check", "decode", "--key", "index"]
    with start(*arguments) as process:
        while process.poll() is None and not (tmp_path / ".out.shardkit" / "new").exists():
            time.sleep(0.002)
        process.send_signal(number)
        _, said = process.communicate()
    if process.returncode != 0:  # else it was quicker
        assert process.returncode == (130 if number == signal.SIGINT else -9)
        assert not (tmp_path / "out").exists()
        assert number == signal.SIGKILL or "nothing was changed" in said
        assert number == signal.SIGKILL or os.listdir(tmp_path) == []
    shardkit.convert_to(kind, packed, tmp_path / "out", key="index", overwrite=True)
    assert [name for name in os.listdir(tmp_path) if "shardkit" in name] == []
    assert len(READ[kind](tmp_path / "out")) == 30


# --- compressed datasets


def compressed_mds(folder, rows):
    from streaming import MDSWriter

    columns = {"image": "bytes", "label": "int"}
    with MDSWriter(out=str(folder), columns=columns, compression="zstd:3", size_limit=9000) as out:
        for row in rows:
            out.write(row)


def compressed_litdata(folder, rows, level):
    from litdata.streaming.writer import BinaryWriter
    from PIL import Image

    writer = BinaryWriter(str(folder), chunk_bytes=9000, compression="zstd", compression_level=level)
    for number, row in enumerate(rows):  # of mere bytes the library compresses nothing
        file = folder.parent / f"{number}.jpg"
        file.write_bytes(row["image"])
        writer.add_item(number, {**row, "image": Image.open(file)})
    writer.done()
    writer.merge(1)


COMPRESSED = [pytest.param("mds", marks=pytest.mark.mds), "litdata-chunk", "litdata-batch", "litdata-sample"]


@pytest.fixture(params=COMPRESSED)
def compressed(request, packed, tmp_path):
    """A compressed dataset and the images in it."""
    name, _, level = request.param.partition("-")
    if importlib.util.find_spec(LIBRARY[name]) is None:
        pytest.skip(f"{LIBRARY[name]} is not installed")
    rows = [{"image": sample.jpeg, "label": sample.label} for sample in shardkit.open(packed)]
    compressed_litdata(tmp_path / "src", rows, level) if level else compressed_mds(tmp_path / "src", rows)
    whole = any("zstd" in path.name for path in (tmp_path / "src").iterdir())
    assert whole == (level in ("", "chunk"))
    return f"{name}:{tmp_path / 'src'}", rows


def test_a_compressed_dataset_comes_over_byte_for_byte(compressed, tmp_path):
    source, rows = compressed
    before = contents(tmp_path / "src")
    shardkit.convert(source, tmp_path / "out", name="t", shards=3, jobs=1)
    assert images(tmp_path / "out") == {f"{number:09d}.jpg": row["image"] for number, row in enumerate(rows)}
    assert [row["label"] for row in rows_of(tmp_path / "out").values()] == [row["label"] for row in rows]
    assert contents(tmp_path / "src") == before
    with pytest.raises(ConfigError, match="in order"):
        shardkit.convert(source, tmp_path / "no", shuffle=True, jobs=1)


def test_one_file_is_unpacked_at_a_time(compressed, tmp_path, monkeypatch):
    from shardkit.converting.compressed import CompressedFiles

    unpack, sizes = CompressedFiles._unpacked, []

    def watched(self, *given):
        assert self._data == b""
        data = unpack(self, *given)
        sizes.append(len(data))
        return data

    monkeypatch.setattr(CompressedFiles, "_unpacked", watched)
    source, _ = compressed
    shardkit.convert(source, tmp_path / "out", name="t", shards=1, jobs=1)
    files = sum("zstd" in path.name for path in (tmp_path / "src").iterdir())
    assert len(sizes) == 2 * files  # to look, and to take
    assert not sizes or max(sizes) < 12_000


@pytest.mark.parametrize("compressed", COMPRESSED[2:], indirect=True)
def test_a_frame_that_is_a_bomb_is_refused_before_it_is_unpacked(compressed, tmp_path, monkeypatch):
    from shardkit.converting import compressed as packed_files

    monkeypatch.setattr(packed_files, "MAX_BYTES", 2000)
    source, _ = compressed
    with pytest.raises(UnsafeError, match="too large for memory; expected at most 2000 bytes") as caught:
        shardkit.convert(source, tmp_path / "out", name="t", jobs=1)
    assert caught.value.exit_code == 9


@pytest.mark.parametrize("compressed", COMPRESSED[:2], indirect=True)
def test_a_file_that_states_more_than_its_format_has_is_refused(compressed, tmp_path):
    source, _ = compressed
    index = tmp_path / "src" / "index.json"
    document = json.loads(index.read_text())
    for entry in document.get("chunks", []):
        entry["chunk_bytes"] = 1 << 33
    for entry in document.get("shards", []):
        entry["raw_data"]["bytes"] = 1 << 33
    index.write_text(json.dumps(document))
    with pytest.raises(UnsafeError, match=r"too large for its offsets: .*; expected at most 4294967295 bytes"):
        shardkit.convert(source, tmp_path / "out", name="t", jobs=1)


@pytest.mark.parametrize("compressed", COMPRESSED[:2], indirect=True)
def test_a_compressed_file_that_is_damaged_ends_the_run(compressed, tmp_path):
    source, _ = compressed
    files = [path for path in (tmp_path / "src").iterdir() if "zstd" in path.name]
    kept = sorted(files)[1].read_bytes()
    sorted(files)[1].write_bytes(kept[:-20])
    with pytest.raises(FormatError, match=r"cannot be unpacked.*zstd"):
        shardkit.convert(source, tmp_path / "out", name="t", jobs=1)
    for path in sorted(files)[1:]:  # of another number of samples in the last
        path.write_bytes(kept)
    with pytest.raises(FormatError, match="not what the index states"):
        shardkit.convert(source, tmp_path / "out", name="t", jobs=1)


def test_only_one_run_writes_a_target(packed, tmp_path, kind):
    from shardkit.converting.outputs import Output
    from shardkit.converting.whole_folder import WholeFolder

    with WholeFolder(Output(kind, str(tmp_path / "out"))).hold(overwrite=False), pytest.raises(LockedError):
        shardkit.convert_to(kind, packed, tmp_path / "out")
