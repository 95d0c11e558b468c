"""`shardkit ls`, `show` and `cat`: what they print is what other readers see."""

from __future__ import annotations

import io
import json
import os
import pty
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from PIL import Image

import shardkit
from shardkit.cli.main import main
from shardkit.testing.damage import flip_byte
from shardkit.testing.datasets import DraftSample, draft_dataset, draft_shard, tiny_jpeg
from shardkit.testing.foreign import write_tar
from shardkit.testing.packs import tiny_tree

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}


@pytest.fixture
def dataset(tmp_path):
    """Six samples with labels, json members, gray and colour in turn."""
    return draft_dataset().write(tmp_path / "ds")


@pytest.fixture
def run(capfdbinary):
    """Return a function that runs a command and returns its exit code, standard output and standard error."""

    def call(*arguments):
        with pytest.raises(SystemExit) as caught:
            main([*map(str, arguments)])
        out, err = capfdbinary.readouterr()
        return caught.value.code, out, err.decode()

    return call


def listed(run, *arguments):
    code, out, err = run("ls", *arguments)
    assert (code, err) == (0, "")
    return out.decode().splitlines()


# --- ls


def test_the_table(run, dataset):
    assert listed(run, dataset, "--limit", 3) == [
        "key     label        size  pixels  image",
        "c/0000  0 class 0     401     8x8  baseline gray +",
        "c/0001  5 class 5     512   16x24  baseline 4:2:0 +",
        "c/0002  10 class 10   700     8x8  baseline gray +",
        "6 samples, the first 3 shown; --limit 0 lists all",
    ]


def test_all_are_listed_with_limit_0_and_counted_with_any(run, dataset):
    assert len(listed(run, dataset, "--limit", 0)) == 6 + 2
    assert listed(run, dataset)[-1] == "6 samples"
    assert listed(run, dataset, "--where", "width == 16", "--limit", 1)[-1] == (
        "3 of 6 samples, the first 1 shown; --limit 0 lists all"
    )


def test_one_long_key_does_not_widen_every_line(run, tmp_path):
    write_tar(tmp_path / "a.tar", {"a.jpg": tiny_jpeg(1), f"{'x' * 250}.jpg": tiny_jpeg(2)})
    shardkit.index(tmp_path)
    head, short, long, _ = listed(run, tmp_path)
    assert short == f"{'a':60}  -       337   16x24  baseline 4:2:0 +"
    assert long.startswith("x" * 250 + "  -  ")
    assert len(head) < 100


def test_no_sample_is_no_error(run, dataset):
    assert listed(run, dataset, "--where", "width > 5000") == ["0 of 6 samples"]


def test_json_has_the_facts_that_pillow_sees(run, tmp_path):
    tree = tiny_tree(tmp_path / "src", images=12)
    shardkit.pack(tree, tmp_path / "ds", jobs=1)
    code, out, _ = run("ls", tmp_path / "ds", "--where", "components == 3", "--json", "--limit", 2)
    document = json.loads(out)
    assert (code, document["samples"], document["matched"], len(document["rows"])) == (0, 12, 6, 2)
    for one in document["rows"]:
        with Image.open(tree / one["source"]) as image:
            assert (one["width"], one["height"], one["media_type"]) == (*image.size, "jpeg")
        assert (one["components"], one["subsampling"], one["hardware_decodable"]) == (3, "4:2:0", True)
        assert one["class"] == one["source"].split("/")[0]
        with open(tmp_path / "ds" / one["shard"], "rb") as shard:
            shard.seek(one["offset"])
            assert shard.read(one["size"]) == (tree / one["source"]).read_bytes()


def test_classes_are_asked_for_by_name(run, dataset):
    by_name, by_number = (listed(run, dataset, "--where", text) for text in ('class == "class 5"', "label == 5"))
    assert by_name == by_number
    assert by_name[-1].startswith(("1 of", "2 of"))
    code, out, err = run("ls", dataset, "--where", "class in ('class 5', 'Class5')")
    assert (code, out) == (2, b"")
    assert "there is no class Class5: " in err
    assert "did you mean class 5" in err


@pytest.mark.parametrize("where", ["colour == 1", "width", "import os", "width == 'a'", ""])
def test_a_condition_that_cannot_be_asked_ends_with_2(run, dataset, where):
    code, out, err = run("ls", dataset, "--where", where)
    assert (code, out) == (2, b"")
    assert all(column in err for column in ("label", "restart_interval", "source")) or where in ("", "width == 'a'")
    assert "width >= 256 and label != 7" in err


def test_a_dataset_without_labels(run, tmp_path):
    ds = draft_dataset((2,), labels=False).write(tmp_path / "ds")
    assert listed(run, ds)[1].split()[:2] == ["c/0000", "-"]
    assert listed(run, ds, "--where", "label is None")[-1] == "2 of 2 samples"


@pytest.mark.parametrize("command", [["ls"], ["show", "k"], ["cat", "k"]])
def test_what_is_no_dataset_ends_with_2(run, tmp_path, command):
    name, *more = command
    assert run(name, tmp_path / "nowhere", *more)[0] == 2


@pytest.mark.parametrize("command", [["ls"], ["show", "k"], ["cat", "k"]])
def test_an_empty_name_is_not_the_current_folder(run, dataset, monkeypatch, command):
    monkeypatch.chdir(dataset)
    name, *more = command
    code, out, err = run(name, "", *more)
    assert (code, out) == (2, b"")
    assert "DATASET is the name of a folder; found an empty one" in err


def test_the_json_has_every_column_of_the_index(run, dataset):
    from shardkit.format.index import SCHEMA

    code, out, _ = run("ls", dataset, "--json")
    rows = json.loads(out)["rows"]
    assert (code, set(SCHEMA.names) - set(rows[0])) == (0, set())
    with shardkit.open(dataset) as opened:
        for name in ("sample_offset", "sample_size", "json_offset", "json_size"):
            assert [row[name] for row in rows] == list(opened.columns[name])


def test_a_dataset_without_a_shard(run, tmp_path):
    ds = draft_dataset(()).write(tmp_path / "ds")
    assert listed(run, ds) == ["0 samples"]
    assert listed(run, ds, "--where", "width > 1 and key == 'a'") == ["0 of 0 samples"]
    assert run("show", ds, "k")[0] == run("cat", ds, "k")[0] == 2
    assert run("extract", ds, tmp_path / "out")[0] == 0
    assert run("export", ds, "--to", "wids,energon,timm,openclip,huggingface,aistore,dali")[0] == 0
    assert run("inspect", ds)[0] == 0


@pytest.fixture(params=["none", "header", "full"])
def adopted(request, tmp_path):
    """A foreign shard of a baseline and a progressive JPEG, a PNG, and a JPEG that is none; and how it was indexed."""
    files = {"base.jpg": tiny_jpeg(1), "text.jpg": b"no JPEG at all", "torn.jpg": tiny_jpeg(2)[:60]}
    for name, options in {"prog.jpg": {"format": "JPEG", "progressive": True}, "dot.png": {"format": "PNG"}}.items():
        stream = io.BytesIO()
        Image.new("RGB", (20, 10)).save(stream, **options)
        files[name] = stream.getvalue()
    write_tar(tmp_path / "a.tar", files)
    shardkit.index(tmp_path, facts=request.param)
    return tmp_path, request.param


def test_what_is_not_known_of_an_image_is_a_dash_and_null(run, adopted):
    dataset, facts = adopted
    cells = [line.split(maxsplit=4) for line in listed(run, dataset)[1:-1]]
    known = {"base": ["16x24", "baseline 4:2:0 +"], "text": ["-", "text"], "torn": ["-", "jpeg"],
             "prog": ["20x10", "progressive 4:2:0"], "dot": ["-", "png"]}  # fmt: skip
    expected = {key: ["-", "-"] for key in known} if facts == "none" else known
    assert {key: told for key, _, _, *told in cells} == expected
    rows = {row["key"]: row for row in json.loads(run("ls", dataset, "--json")[1])["rows"]}
    measured = ("width", "height", "sof", "components", "subsampling", "precision", "scans", "orientation")
    for key in ("text", "torn", "dot"):
        assert {rows[key][name] for name in measured} == {None}
    if facts == "none":
        assert {rows[key][name] for key in rows for name in (*measured, "media_type", "hardware_decodable")} == {None}
    else:
        assert [rows["base"][name] for name in measured] == [16, 24, 0, 3, "4:2:0", 8, 1, 0]
        assert [rows[key]["media_type"] for key in known] == ["jpeg", "text", "jpeg", "jpeg", "png"]
        assert [rows[key]["hardware_decodable"] for key in known] == [True, False, False, False, False]
        assert (rows["prog"]["scans"] is None) == (facts == "header")


def test_show_has_no_facts_that_nobody_knows(run, adopted):
    dataset, facts = adopted
    text = {key: run("show", dataset, key)[1].decode() for key in ("base", "prog", "dot")}
    if facts == "none":
        assert "  image       -; 337 B, CRC-32C unknown\n  coding      -\n" in text["base"]
    else:
        assert "  image       16x24, baseline 4:2:0; " in text["base"]
        assert ("scans not counted" in text["prog"]) == (facts == "header")
        assert "  image       png; " in text["dot"]
    assert "\n  coding      -\n" in text["dot"]
    assert "0x0" not in "".join(text.values())


# --- show


def test_show_says_where_everything_lies(run, dataset):
    code, out, err = run("show", dataset, "c/0004", "--json")
    document = json.loads(out)
    assert (code, err) == (0, "")
    with tarfile.open(dataset / document["shard"]) as tar:
        expected = {
            member.name: (member.offset_data, member.size) for member in tar if member.name.startswith("c/0004.")
        }
    assert {one["name"]: (one["offset"], one["size"]) for one in document["members"]} == expected
    assert [one["member"] for one in document["members"] if one["image"]] == ["jpg"]
    assert document["metadata"] == {"source": "c/0004.jpg", "class": "class 8", "caption": "picture 4"}
    assert (document["key"], document["label"], document["class"]) == ("c/0004", 8, "class 8")


def test_show_in_words(run, dataset):
    _, out, _ = run("show", dataset, "c/0001")
    text = out.decode()
    assert "sample c/0001\n" in text
    assert "  label       5 class 5\n" in text
    assert "  image       16x24, baseline 4:2:0; 512 B, CRC-32C " in text
    assert '    caption: "picture 1"\n' in text
    assert text.count("  member  ") == 3


def test_names_are_escaped(run, tmp_path):
    draft = draft_dataset((1,))
    odd = DraftSample(
        key="\x1b[31m", jpeg=tiny_jpeg(), label=0, source="\u202e", metadata={"\x1b]0;": "\x1b\x7f\u202e"}
    )
    draft.classes = ("\x07",)
    draft.shards = [draft_shard("tiny-000000.tar", [odd], 4096)]
    ds = draft.write(tmp_path / "ds")
    for command in (
        ["ls", ds],
        ["show", ds, "\x1b[31m"],
        ["show", ds, "\x07nothing"],
        ["cat", ds, "\x1b[31m", "--member", "\x07"],
    ):
        _, out, err = run(*command)
        text = out.decode() + err
        assert len(text) > 20
        assert not set("\x1b\x07\x7f\u202e") & set(text)


# --- cat


@pytest.mark.parametrize("member", ["jpg", "cls", "json", None])
def test_cat_writes_what_tarfile_reads(run, dataset, member):
    code, out, err = run("cat", dataset, "c/0003", *(["--member", member] if member else []))
    assert (code, err) == (0, "")
    with tarfile.open(dataset / "tiny-000001.tar") as tar:
        assert out == tar.extractfile(f"c/0003.{member or 'jpg'}").read()


def test_cat_of_any_shard_that_tar_can_write(tmp_path, run):
    """The members of a sample are found whatever else a shard's headers are: here GNU's long names and PAX records."""
    stem = "c/" + "long" * 40
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=tarfile.GNU_FORMAT) as tar:
        for extension, data in (("txt", b"a caption"), ("seg.png", b"more"), ("jpg", tiny_jpeg(1))):
            member = tarfile.TarInfo(f"{stem}.{extension}")
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    draft = draft_dataset((1,), align=512)
    shard = draft.shards[0]
    whole = file.getvalue()
    at = whole.index(tiny_jpeg(1))
    row = shard.rows[0]
    end = at + -(-len(tiny_jpeg(1)) // 512) * 512
    shard.rows[0] = row._replace(
        offset=at, size=len(tiny_jpeg(1)), sample_offset=0, sample_size=end, json_offset=0, json_size=0,
    )  # fmt: skip
    shard.tar[:] = whole[:end] + bytes(-end % 10240 + 10240)
    ds = draft.write(tmp_path / "ds")
    assert run("cat", ds, row.key, "--member", "txt")[1] == b"a caption"
    assert run("cat", ds, row.key, "--member", "seg.png")[1] == b"more"


@pytest.mark.parametrize("arguments", [("c/9999",), ("c/0000", "--member", "txt"), ("c/0000", "--member", "")])
def test_what_is_not_there_ends_with_2(run, dataset, arguments):
    code, out, err = run("cat", dataset, *arguments)
    assert (code, out) == (2, b"")
    assert "shardkit ls lists the keys" in err or "expected cls or json or jpg" in err


@pytest.mark.parametrize("command", ["show", "cat"])
@pytest.mark.parametrize("name", ["two words/ü 1", "two words/ü 1.jpg"])
def test_who_names_a_file_is_told_its_key(run, tmp_path, command, name):
    (tmp_path / "src" / "two words").mkdir(parents=True)
    (tmp_path / "src" / "two words" / "ü 1.jpg").write_bytes(tiny_jpeg())
    shardkit.pack(tmp_path / "src", tmp_path / "ds", name="d", jobs=1)
    code, _, err = run(command, tmp_path / "ds", name)
    assert code == 2
    assert "did you mean two-x20words/-xC3-xBC-x201?" in err


def test_a_damaged_image_is_not_written(run, dataset):
    flip_byte(dataset / "tiny-000000.tar", draft_dataset().shards[0].rows[1].offset + 50)
    for command in (["cat"], ["cat", "--member", "jpg"], ["show"]):
        code, out, err = run(command[0], dataset, "c/0001", *command[1:])
        assert (code, out) == (4, b"")
        assert "[sample c/0001]" in err
    assert run("cat", dataset, "c/0001", "--member", "cls")[1] == b"5"


def test_a_damaged_header_is_damage(run, dataset):
    flip_byte(dataset / "tiny-000000.tar", draft_dataset().shards[0].rows[0].sample_offset + 150)
    code, out, err = run("show", dataset, "c/0000")
    assert (code, out) == (4, b"")
    assert "the members of a sample cannot be read" in err


def test_a_terminal_is_given_text_only(dataset):
    def on_a_terminal(*arguments):
        reader, terminal = pty.openpty()
        command = [sys.executable, "-m", "shardkit", "cat", dataset, "c/0001", *arguments]
        done = subprocess.run(command, stdout=terminal, stderr=subprocess.PIPE, env=ENVIRONMENT, text=True, check=False)
        os.write(terminal, b".")  # so that there is something to read
        drawn = b""
        while not drawn.endswith(b"."):
            drawn += os.read(reader, 10_000)
        os.close(terminal)
        os.close(reader)
        return done, drawn

    done, drawn = on_a_terminal()
    assert (done.returncode, drawn) == (2, b".")
    assert "> FILE" in done.stderr
    done, drawn = on_a_terminal("--member", "json")
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(drawn[:-1])["caption"] == "picture 1"


def test_a_reader_that_has_gone_is_no_error(dataset):
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "shardkit", "cat", dataset, "c/0001"]
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, env=ENVIRONMENT, check=False)
    os.close(writing)
    assert (done.returncode, done.stderr) == (0, b"")
