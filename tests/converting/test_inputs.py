"""What a text on the command line stands for; nothing of it is ever run or fetched."""

from __future__ import annotations

import os

import pytest

from shardkit.converting.inputs import find_inputs
from shardkit.errors import ConfigError, UnsafeError


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("a-0.tar", "a-1.tar", "a-2.tar", "b.tar", "x{1}.tar", "s[1].tar", "sub/c.tar"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"")
    (tmp_path / "dataset").mkdir()
    return tmp_path


def names(folder, *specs):
    return [os.path.relpath(each.path, folder) for each in find_inputs(specs)]


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("b.tar", ["b.tar"]),
        ("a-{0..2}.tar", ["a-0.tar", "a-1.tar", "a-2.tar"]),
        ("a-{2,0}.tar", ["a-2.tar", "a-0.tar"]),
        ("{{a-{0..1},b},sub/c}.tar", ["a-0.tar", "a-1.tar", "b.tar", "sub/c.tar"]),
        ("a-*.tar", ["a-0.tar", "a-1.tar", "a-2.tar"]),
        ("{b,a-?}.tar", ["b.tar", "a-0.tar", "a-1.tar", "a-2.tar"]),
        ("*/c.tar", ["sub/c.tar"]),
        ("b.tar::a-1.tar", ["b.tar", "a-1.tar"]),
        ("x{1}.tar", ["x{1}.tar"]),
        ("s[1].tar", ["s[1].tar"]),
        ("dataset", ["dataset"]),
    ],
)
def test_a_text_stands_for_paths_in_a_fixed_order(folder, spec, expected):
    assert names(folder, spec) == expected
    assert names(folder, str(folder / spec) if "::" not in spec else spec) == expected


def test_kinds(folder):
    assert [each.kind for each in find_inputs(["dataset", "b.tar"])] == ["dataset", "tar"]


def test_a_list_has_an_input_a_line_relative_to_itself(folder, monkeypatch):
    (folder / "sub" / "shards.txt").write_text("# these\nc.tar\n\n../a-{0..1}.tar\r\n")
    monkeypatch.chdir("/")
    assert names(folder, str(folder / "sub" / "shards.txt")) == ["sub/c.tar", "a-0.tar", "a-1.tar"]


def test_a_list_names_no_list_and_is_never_empty(folder):
    (folder / "one.txt").write_text("two.txt\n")
    with pytest.raises(ConfigError, match="not further lists"):
        find_inputs(["one.txt"])
    (folder / "one.txt").write_text("# nothing\n")
    with pytest.raises(ConfigError, match="names nothing"):
        find_inputs(["one.txt"])
    (folder / "one.txt").write_text("pipe:touch owned\n")
    with pytest.raises(UnsafeError, match="nothing is run"):
        find_inputs(["one.txt"])


@pytest.mark.parametrize("spec", ["pipe:touch owned", "b.tar::pipe:touch owned", "http://x/y.tar", "s3://b/{0..9}.tar",
                                  "gs://x", "file:///b.tar"])  # fmt: skip
def test_commands_and_urls_are_unsafe(folder, spec):
    with pytest.raises(UnsafeError) as caught:
        find_inputs([spec])
    assert caught.value.exit_code == 9
    assert not (folder / "owned").exists()


@pytest.mark.parametrize("spec", ["{0..9999999}.tar", "{a,b}" * 25, "*" * 20 + ".tar"])
def test_bombs_are_unsafe(folder, spec):
    with pytest.raises(UnsafeError):
        find_inputs([spec])


@pytest.mark.parametrize("spec", ["gone.tar", "a-{0..5}.tar", "q*.tar", "", "a\0b", "b.tar/c.tar", "gone.txt"])
def test_what_is_not_there_is_a_mistake_of_the_caller(folder, spec):
    with pytest.raises(ConfigError) as caught:
        find_inputs([spec])
    assert str(caught.value).isprintable()


def test_no_input_at_all(folder):
    with pytest.raises(ConfigError, match="nothing to convert"):
        find_inputs([])


def test_a_fifo_is_refused_and_never_waited_for(folder):
    os.mkfifo(folder / "f.tar")
    os.mkfifo(folder / "f.txt")
    for name in ("f.tar", "f.txt"):
        with pytest.raises(UnsafeError):
            find_inputs([name])
