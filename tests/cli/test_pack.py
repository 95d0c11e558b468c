"""`shardkit pack`: what a shell sees of it."""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
import pty
import re
import resource
import socket
import struct
import subprocess
import sys
import tarfile
import tempfile
import termios
from pathlib import Path

import click
import pytest
from PIL import Image

from shardkit.cli._render import quote
from shardkit.cli._sizes import parse_size
from shardkit.cli.main import main
from shardkit.cli.pack import pack
from shardkit.format.manifest import load_manifest
from shardkit.packing import options as packing_options
from shardkit.packing.options import PackOptions
from shardkit.storage.clone import REFLINKS
from shardkit.storage.lock import FolderLock
from shardkit.testing.datasets import tiny_jpeg
from shardkit.testing.photos import encode

pytestmark = pytest.mark.timeout(60)
ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-m", "shardkit"]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}
JPEG = encode(Image.new("RGB", (16, 16), "teal"))


def shardkit(*arguments, **given):
    """Run the command; return its exit code, standard output and standard error."""
    command = [*COMMAND, *map(os.fsencode, arguments)]
    given = {"env": ENVIRONMENT, **given}
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=50, **given)
    assert b"Traceback" not in done.stderr
    return done.returncode, done.stdout.decode("utf-8", "surrogateescape"), done.stderr.decode()


def plant(root, *names):
    for name in names:
        path = os.path.join(os.fsencode(root), os.fsencode(name))
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "wb") as file:
            file.write(JPEG)
    return root


@pytest.fixture
def src(tmp_path):
    return plant(tmp_path / "src", *(f"{name}/{i}.jpg" for name in ("cat", "dog") for i in range(4)))


# --- options


def test_help_tells_every_option_and_costs_no_import_of_the_packer(tmp_path):
    code, out, err = shardkit("pack", "--help")
    assert (code, err) == (0, "")
    for parameter in pack.params:
        for name in parameter.opts if isinstance(parameter, click.Option) else ():
            assert re.search(rf"(?<![\w-]){name}(?![\w-])", out), name


RUN = {"classes_file", "jobs", "resume", "overwrite", "reflink", "dry_run", "as_json"}
"""Options of the run; the others are fields of `PackOptions`."""


def test_every_option_of_the_packer_can_be_given():
    given = {p.name for p in pack.params if isinstance(p, click.Option)} - RUN | {"classes"}
    assert given == {field.name for field in dataclasses.fields(PackOptions)}


def test_the_defaults_that_help_tells_are_the_packers():
    fields = {field.name: field.default for field in dataclasses.fields(PackOptions)}
    told = {}
    for option in pack.params:
        match = re.search(r"\[default: (.+)\]$", getattr(option, "help", None) or "")
        if match and option.name in fields:
            assert option.default in (None, False, click.core.UNSET) if hasattr(click.core, "UNSET") else True
            told[option.name] = match[1]
    assert told.pop("name") == "from DST"
    assert told.pop("labels") == "what is there"
    assert told.pop("shuffle") == "shuffle"
    assert fields["shuffle"] is True
    for name, text in told.items():
        default = fields[name]
        assert (parse_size(text) if isinstance(default, int) else text) == default, name
    untold = {name for name, default in fields.items() if default not in (None, False, dataclasses.MISSING)} - {*told}
    assert untold == {"shuffle"}


def test_the_choices_are_the_packers():
    known = {**packing_options._CHOICES, **packing_options._PACK_CHOICES, "reflink": REFLINKS}
    for option in pack.params:
        if isinstance(option.type, click.Choice):
            expected = {choice for choice in known[option.name] if choice}
            assert set(option.type.choices) == expected


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0), ("4096", 4096), ("4096B", 4096), ("1k", 1000), ("1K", 1000), ("1kB", 1000), ("1KiB", 1024),
        ("256MB", 256 * 10**6), ("1GiB", 1 << 30), ("1.5GiB", 3 << 29), ("0.5 MB", 500_000), ("2TiB", 2 << 40),
        ("1PB", 10**15), (" 7 ", 7), ("9007199254740993", 9007199254740993), ("1.1GiB", int(1.1 * (1 << 30))),
        ("", None), ("GB", None), ("1.5", None), ("-1", None), ("1e3", None), ("1iB", None), ("1 G B", None),
        ("0x10", None), ("\u0661", None), ("1EB", None), ("1.GB", None), ("1,5GB", None), ("nan", None),
    ],
)  # fmt: skip
def test_sizes_are_read_as_people_write_them(text, size):
    assert parse_size(text) == size


def test_an_option_reaches_the_packer(src, tmp_path, require_tool):
    flags = [
        "--name=n", "--shards=2", "--labels=none", "--key=index", "--align=512", "--no-shuffle", "--seed=5",
        "--check=decode", "--max-pixels=1000", "--max-bytes=1MiB", "--on-error=fail", "--convert", "--resize=8",
        "--quality=50", "--follow-symlinks", "--digest=sha256", "--jobs=2", "--baseline",
    ]  # fmt: skip
    require_tool("jpegtran")  # whose package brings the library of --baseline
    assert shardkit("pack", src, tmp_path / "ds", *flags)[0] == 0
    manifest = load_manifest((tmp_path / "ds/manifest.json").read_bytes())
    recorded = dict(manifest.options)
    del recorded["source_list"]
    assert recorded == {
        "name": "n", "shard_size": None, "shard_samples": None, "shards": 2, "labels": "none", "key": "index",
        "align": 512, "shuffle": False, "seed": 5, "check": "decode", "max_pixels": 1000, "max_bytes": 1 << 20,
        "on_error": "fail", "convert": True, "resize": 8, "quality": 50, "follow_symlinks": True, "digest": "sha256",
        "baseline": True,
    }  # fmt: skip


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
@pytest.mark.parametrize("newline", [b"\n", b"\r\n"])
def test_a_class_list_pins_the_labels(src, tmp_path, mark, newline):
    (tmp_path / "classes").write_bytes(mark + newline.join([b"dog", b"100% cow", b"cat", b""]))
    assert shardkit("pack", src, tmp_path / "ds", "--classes", tmp_path / "classes")[0] == 0
    manifest = load_manifest((tmp_path / "ds/manifest.json").read_bytes())
    assert manifest.classes == ["dog", "100%25 cow", "cat"]
    with tarfile.open(tmp_path / "ds/ds-000000.tar") as tar:
        assert tar.extractfile("cat/0.cls").read() == b"2"


# --- results


def test_the_first_of_many_classes_are_named_on_one_line(src, tmp_path):
    for number in range(60):
        plant(src, f"bird {number:02}\n/1.jpg")
    out = shardkit("pack", src, tmp_path / "ds")[1]
    (line,) = (line for line in out.splitlines() if line.startswith("  classes "))
    assert line.startswith("  classes     bird 00\\n, bird 01\\n, ")
    assert line.endswith(" ...")
    assert len(line) <= 100


def test_classes_without_a_sample_are_counted_and_named(src, tmp_path):
    assert "  empty " not in shardkit("pack", src, tmp_path / "full")[1]
    plant(src, "cow/notes.txt", "elk/1.jpg")
    (src / "cow\n").mkdir()
    for flags in (["--dry-run"], [], ["--resume"]):  # the last finds all done
        out = shardkit("pack", src, tmp_path / "ds", *flags)[1]
        assert "  empty       2 of 5 classes without a sample: cow, cow\\n\n" in out, flags
    for flags in (["--dry-run"], ["--resume"]):
        document = json.loads(shardkit("pack", src, tmp_path / "ds", *flags, "--json")[1])
        assert document["classes"] == ["cat", "cow", "cow\n", "dog", "elk"]
        assert document["classes_without_samples"] == ["cow", "cow\n"]


def test_a_class_of_which_every_image_is_refused_has_no_sample(src, tmp_path):
    for image in (src / "dog").iterdir():
        image.write_bytes(b"")
    code, out, _ = shardkit("pack", src, tmp_path / "ds", "--jobs", "1")
    assert (code, "  empty       1 of 2 classes without a sample: dog\n" in out) == (3, True)


def test_a_pack_says_what_it_did_and_what_to_type_next(src, tmp_path):
    plant(src, "cat/notes.txt", "cat/drawing.png")
    code, out, err = shardkit("pack", src, tmp_path / "my set")
    assert (code, err) == (0, "")
    assert out.startswith("packed 8 samples into 1 shard in ")
    assert re.search(r"ignored     1 .(txt|png), 1 .(txt|png); --convert takes .png, .webp and .gif, too\n", out)
    assert "  labels      2 classes\n  classes     cat, dog\n" in out
    assert out.splitlines()[-1] == f"next: shardkit verify '{tmp_path}/my set'"
    next_command = out.splitlines()[-1].removeprefix("next: shardkit ")
    shell = ["/bin/sh", "-c", f"{sys.executable} -m shardkit {next_command}"]
    assert subprocess.run(shell, capture_output=True, env=ENVIRONMENT).returncode == 0


def test_json_is_one_document_that_agrees_with_the_manifest(src, tmp_path):
    (src / "cat/bad.jpg").write_bytes(b"")
    plant(src, "cat/notes.txt")
    code, out, err = shardkit("pack", src, tmp_path / "ds", "--json")
    assert (code, err) == (3, "")
    document = json.loads(out)
    manifest = load_manifest((tmp_path / "ds/manifest.json").read_bytes())
    assert document.pop("seconds") >= 0
    assert document == {
        **dataclasses.asdict(manifest.totals), "name": "ds", "generation": manifest.generation,
        "brace": "ds-000000.tar", "bytes_shared": 0, "bytes_copied": manifest.totals.payload, "kept_shards": 0,
        "refused_by_reason": {"empty": 1}, "ignored": {".txt": 1}, "labelled": manifest.totals.samples,
        "classes": manifest.classes, "classes_without_samples": [],
    }  # fmt: skip


def test_reflinks_are_told_where_they_are_wished(src, tmp_path, folder_on):
    disk = folder_on("xfs")
    (disk / "src").mkdir()
    (disk / "src/0.jpg").write_bytes(tiny_jpeg(0, 20_000))
    code, out, _ = shardkit("pack", disk / "src", disk / "ds", "--reflink", "always")
    assert code == 0
    assert "  reflinks    16.4 kB are blocks of the sources, 3.6 kB copied\n" in out
    code, out, _ = shardkit("pack", disk / "src", disk / "json", "--reflink", "auto", "--json")
    document = json.loads(out)
    assert (document["bytes_shared"], document["bytes_copied"]) == (16_384, 3_616)
    assert "  reflinks" not in shardkit("pack", src, tmp_path / "ds")[1]
    code, out, err = shardkit("pack", disk / "src", folder_on("ext4") / "ds", "--reflink", "always")
    assert (code, out) == (7, "")
    assert "different file systems" in err
    code, out, _ = shardkit("pack", disk / "src", folder_on("ext4") / "ds", "--reflink", "auto")
    assert code == 0
    assert "  reflinks    0 B are blocks of the sources, 20.0 kB copied\n" in out


def test_refused_sources_end_with_3_and_where_to_look(src, tmp_path):
    (src / "cat/bad.jpg").write_bytes(b"")
    (src / "dog/bad.jpg").write_bytes(b"GIF89a")
    code, out, _ = shardkit("pack", src, tmp_path / "ds")
    assert code == 3
    told = re.search(r"refused     2: (.*); see (.*)", out)
    assert set(told[1].split(", ")) == {"1 empty", "1 not-jpeg"}
    assert told[2] == f"{tmp_path}/ds/rejected.jsonl"


def test_a_dry_run_tells_the_plan_and_writes_nothing(src, tmp_path):
    (src / "stray.jpg").write_bytes(JPEG)
    before = sorted(tmp_path.rglob("*"))
    code, out, err = shardkit("pack", src, tmp_path / "ds", "--shard-samples=3", "--dry-run")
    assert (code, err) == (3, "")
    assert "8 samples (" in out
    assert "2 classes) would become 3 shards" in out
    assert "refused     1 before any image was read: 1 no-class" in out
    assert out.splitlines()[-1].startswith("nothing was written")
    _, out, _ = shardkit("pack", src, tmp_path / "ds", "--shard-samples=3", "--dry-run", "--json")
    plan = json.loads(out)
    assert sorted(tmp_path.rglob("*")) == before
    _, out, _ = shardkit("pack", src, tmp_path / "ds", "--shard-samples=3", "--json")
    result = json.loads(out)
    assert {name: plan[name] for name in ("name", "samples", "payload", "bytes")} == {
        name: result[name] for name in ("name", "samples", "payload", "bytes")
    }
    manifest = load_manifest((tmp_path / "ds/manifest.json").read_bytes())
    assert plan["shards"] == [{"bytes": shard.bytes, "samples": shard.samples} for shard in manifest.shards]
    assert (plan["classes"], plan["refused"], plan["ignored"]) == (["cat", "dog"], 1, {})
    assert all(source == key + ".jpg" for key, source in plan["keys"].items())


def test_names_reach_the_terminal_escaped(tmp_path):
    src = plant(tmp_path / "src", b"c\x1b/\xff\n.jpg")
    target = os.fsencode(tmp_path) + b"/d\x1b[31m'\n\xff"
    code, out, _ = shardkit("pack", src, target, "--dry-run")
    assert code == 0
    assert "c\\x1b/\\xff\\n.jpg" in out
    (tmp_path / "src/bad").mkdir()
    (tmp_path / "src/bad/x.jpg").write_bytes(b"")
    code, out, err = shardkit("pack", src, target)
    assert (code, err) == (3, "")
    assert "\x1b" not in out
    # What is told to be typed is typed.
    command = f"{sys.executable} -m shardkit {out.splitlines()[-1].removeprefix('next: shardkit ')}"
    assert subprocess.run(["bash", "-c", command], capture_output=True, env=ENVIRONMENT).returncode == 0


@pytest.mark.parametrize(
    "path", ["a", "a b", "a'b", "a\\b", "a\nb'\\", "\x1b[31m", "\u202egpj", "\udcff1", "caf\u00e9", "-x", "$x`y`"]
)
def test_a_quoted_path_is_that_path_to_a_shell(path):
    quoted = quote(path)
    assert quoted.isprintable()
    told = subprocess.run(["bash", "-c", f"printf %s {quoted}"], capture_output=True, env={"LC_ALL": "C.UTF-8"}).stdout
    assert told == os.fsencode(path)


def test_a_terminal_without_unicode_is_no_error(tmp_path):
    src = plant(tmp_path / "src", "caf\u00e9/\u96ea.jpg")
    environment = {**ENVIRONMENT, "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0", "LC_ALL": "C"}
    for flags in (["--dry-run"], ["--json"], ["--overwrite"]):
        code, _, err = shardkit("pack", src, tmp_path / "d\u00e9", *flags, env=environment)
        assert (code, err) == (0, ""), flags


# --- progress


def with_terminal(*arguments):
    """Run the command with a terminal as its standard error; return its exit code and what the terminal shows."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0))
    command = [*COMMAND, *map(os.fsencode, arguments)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=theirs, env=ENVIRONMENT) as process:
        os.close(theirs)
        shown = b""
        try:
            while part := os.read(ours, 4096):
                shown += part
        except OSError:  # the other end is closed
            pass
        out = process.stdout.read()
    os.close(ours)
    return process.returncode, out.decode(), shown.decode()


def test_progress_is_shown_on_a_terminal_only(src, tmp_path):
    (src / "cat/bad.jpg").write_bytes(b"")
    code, out, shown = with_terminal("pack", src, tmp_path / "ds")
    assert code == 3
    assert out.startswith("packed 8 samples")
    assert "pack: 100%" in shown
    assert "9/9 samples, 1 refused" in shown
    code, _, err = shardkit("pack", src, tmp_path / "ds", "--overwrite")
    assert (code, err) == (3, "")


def test_an_error_after_progress_stands_on_a_line_of_its_own(src, tmp_path):
    (src / "cat/bad.jpg").write_bytes(b"")
    code, _, shown = with_terminal("pack", src, tmp_path / "ds", "--on-error=fail")
    assert code == 3
    assert re.search(r"(^|\n)shardkit: error: refused a source \(empty\)", shown)


# --- bad input


def listed(tmp_path, text):
    path = tmp_path / "list.csv"
    path.write_bytes(text)
    return path


def file(path, data=b""):
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(data)
    return path


def one(t):
    return plant(t / "x", "a.jpg")


BAD = {
    # what: how to make SRC, how to make DST, further flags, exit code, what the message has to say
    "an empty tree": (lambda t: (t / "x").mkdir() or t / "x", None, [], 2, "there is no JPEG to pack"),
    "no JPEG in it": (lambda t: plant(t / "x", "a.png", "b.png"), None, [], 2, "found 2 .png"),
    "SRC inside DST": (lambda t: plant(t / "ds/x", "a.jpg"), None, [], 2, "the source lies inside the target"),
    "DST inside SRC": (lambda t: plant(t, "a.jpg"), None, [], 2, "the target lies inside the source"),
    "SRC is DST": (lambda t: plant(t / "ds", "a.jpg"), None, [], 2, "the target lies inside the source"),
    "SRC missing": (lambda t: t / "nowhere", None, [], 2, "the source is not there"),
    "SRC a plain file": (lambda t: file(t / "x.tar"), None, [], 2, "neither a folder nor a list"),
    "SRC a dangling link": (lambda t: (t / "x").symlink_to("y") or t / "x", None, [], 2, "the source is not there"),
    "SRC a FIFO": (lambda t: os.mkfifo(t / "x.csv") or t / "x.csv", None, [], 2, "the list is not a regular file"),
    "SRC no name": (lambda t: "", None, [], 2, "SRC and DST"),
    "DST a file": (one, lambda t: file(t / "ds"), [], 2, "the target is not a folder"),
    "DST below a file": (one, lambda t: file(t / "y") / "ds", [], 2, "is not a folder"),
    "DST no name": (one, lambda t: "", [], 2, "SRC and DST"),
    "DST in use": (one, lambda t: file(t / "ds/a-000000.tar").parent, [], 2, "not this pack's"),
    "all refused": (lambda t: file(t / "x/a.jpg").parent, None, [], 3, "every source was refused"),
    "one refused": (lambda t: file(t / "x/a.jpg").parent, None, ["--on-error=fail"], 3, "refused a source (empty)"),
    "a missing column": (lambda t: listed(t, b"file\na.jpg\n"), None, [], 2, "has no column 'path'"),
    "missing files": (lambda t: listed(t, b"path\na.jpg\n"), None, [], 3, "found 1 missing, such as a.jpg"),
    "duplicate rows": (lambda t: listed(plant(t, "a.jpg"), b"path\na.jpg\na.jpg\n"), None, [], 2, "the rows 1 and 2"),
    "two names, one key": (lambda t: plant(t / "x", "a.jpg", "a.jpe"), None, [], 2, "two sources have one key"),
    "an odd name": (lambda t: plant(t / "x", b"\x1b\n\xff.jpg", b"\x1b\n\xff.jpe"), None, [], 2, "\\x1b\\n\\xff.jpg"),
    "a class list that is no file": (one, None, ["--classes=/dev/null"], 9, "not a regular file"),
    "labels of a column": (one, None, ["--labels=column"], 2, "needs a list"),
    "an alignment": (one, None, ["--align=1000"], 2, "a power of two"),
    "no shard": (one, None, ["--shards=0"], 2, "shards is at least 1"),
    "too many shards": (one, None, ["--shards=2"], 2, "more shards than images"),
    "no job": (one, None, ["--jobs=0"], 2, "jobs is at least 1"),
    "two limits": (one, None, ["--shards=1", "--shard-size=1GB"], 2, "give one of"),
    "resume and overwrite": (one, None, ["--resume", "--overwrite"], 2, "give one of them"),
    "a name": (one, None, ["--name=A/\x1b"], 2, "give --name"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_input_ends_with_one_line_that_says_what_to_do(tmp_path, case):
    make_source, make_target, flags, expected, message = BAD[case]
    source = make_source(tmp_path)
    target = tmp_path / "ds" if make_target is None else make_target(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    code, out, err = shardkit("pack", source, target, *flags, cwd=tmp_path)
    assert (code, out) == (expected, "")
    assert err.startswith("shardkit: error: ")
    assert err.count("\n") == 1
    assert err[:-1].isprintable()
    assert message in err
    if expected == 2:
        assert sorted(tmp_path.rglob("*")) == before


def test_an_error_is_a_json_document_too(tmp_path):
    code, out, err = shardkit("pack", tmp_path / "nowhere", tmp_path / "ds", "--json")
    document = json.loads(out)
    assert (code, document["exit_code"], document["error"]) == (2, 2, "ConfigError")
    assert err == f"shardkit: error: {document['message']}\n"


@pytest.mark.parametrize("flags", [["--no-such"], ["--check=all"], ["--shard-size=big"], ["--seed=x"]])
def test_usage_errors_end_with_2(src, tmp_path, flags):
    code, out, err = shardkit("pack", src, tmp_path / "ds", *flags)
    assert (code, out) == (2, "")
    assert "Usage: shardkit pack" in err


def test_a_held_target_ends_with_8(src, tmp_path):
    (tmp_path / "ds/.shardkit").mkdir(parents=True)
    with FolderLock(os.fsencode(tmp_path / "ds/.shardkit/lock")):
        code, _, err = shardkit("pack", src, tmp_path / "ds")
    assert code == 8
    assert f"found process {os.getpid()} on {socket.gethostname()}" in err


def test_links_without_end_end_with_9(tmp_path):
    for i in range(14):
        (tmp_path / f"src/{i}").mkdir(parents=True)
        for name in "ab" if i < 13 else "":
            (tmp_path / f"src/{i}/{name}").symlink_to(f"../{i + 1}")
    assert shardkit("pack", tmp_path / "src", tmp_path / "ds")[0] == 9


def test_a_file_size_limit_ends_with_5(src, tmp_path):
    def limit():
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))

    code, _, err = shardkit("pack", src, tmp_path / "ds", preexec_fn=limit)
    assert code == 5
    assert "EFBIG" in err
    assert "--resume" in err
    assert err.count("\n") == 1


@pytest.fixture
def by_nobody(open_folder, unprivileged, capsys):
    """Return a function: run the command in this process with the rights of nobody; and a folder for it."""
    import shardkit.packing.run  # noqa: F401 - nobody might not be able to read this Python's own files

    plant(open_folder, "src/c/a.jpg", "src/c/b.jpg")

    def run(*arguments):
        with unprivileged(), pytest.raises(SystemExit) as caught:
            main(["pack", *map(str, arguments), "--jobs=1"])
        return (caught.value.code, *capsys.readouterr())

    return run, open_folder


def test_a_target_that_may_not_be_written_ends_with_6(by_nobody):
    run, folder = by_nobody
    (folder / "locked").mkdir()
    (folder / "locked").chmod(0o555)
    for target in ("locked", "locked/new"):
        code, _, err = run(folder / "src", folder / target)
        assert code == 6
        assert "EACCES" in err
        assert "check the owner" in err
        assert err.count("\n") == 1


def test_sources_that_may_not_be_read_are_refused(by_nobody):
    run, folder = by_nobody
    (folder / "src/c/a.jpg").chmod(0)
    (folder / "ds").mkdir()
    (folder / "ds").chmod(0o777)
    code, out, _ = run(folder / "src", folder / "ds")
    assert code == 3
    assert "1 unreadable" in out
    (folder / "src").chmod(0)
    code, _, err = run(folder / "src", folder / "ds", "--overwrite")
    assert code == 6
    assert "cannot read the source folder" in err


def test_another_file_system_gets_the_same_bytes(src, tmp_path):
    memory = Path("/dev/shm")
    if not os.access(memory, os.W_OK) or os.stat(memory).st_dev == os.stat(tmp_path).st_dev:
        pytest.skip("no second file system")
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        for target in (Path(folder) / "ds", tmp_path / "ds"):
            assert shardkit("pack", src, target)[0] == 0
        names = sorted(path.name for path in (tmp_path / "ds").iterdir())
        assert names == sorted(os.listdir(Path(folder) / "ds"))
        assert all((Path(folder) / "ds" / n).read_bytes() == (tmp_path / "ds" / n).read_bytes() for n in names)
