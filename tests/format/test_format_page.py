"""docs/format.md is normative: its tables are compared with the code."""

from __future__ import annotations

import dataclasses
import re
import runpy
from pathlib import Path

import pytest

from shardkit.format.index import FORMAT_VERSION, SCHEMA
from shardkit.format.jpeg import SUBSAMPLINGS
from shardkit.format.keys import key_from_path, source_from_path
from shardkit.format.manifest import FileRecord, Manifest, ShardRecord, Totals
from shardkit.format.media_type import MEDIA_TYPES
from shardkit.format.tar import encode_header

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "format.md").read_text(encoding="utf-8")


def table(heading):
    """Return the cells of the table whose first line starts with `heading`, back quotes removed."""
    (start,) = [m.start() for m in re.finditer(rf"^\| {re.escape(heading)} \|", PAGE, re.MULTILINE)]
    lines = PAGE[start:].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip().replace("`", "") for cell in line.strip("|").split("|")] for line in lines]


def test_the_page_is_of_this_version():
    assert PAGE.startswith(f"# The format, version {FORMAT_VERSION}\n")
    assert f"| `format_version` | number | {FORMAT_VERSION} |" in PAGE


def test_the_columns_are_those_of_the_index():
    assert [(name, kind) for name, kind, _ in table("column")] == [(f.name, str(f.type)) for f in SCHEMA]


@pytest.mark.parametrize(("name", "codes"), [("media_type", MEDIA_TYPES), ("subsampling", SUBSAMPLINGS)])
def test_the_code_tables_are_those_of_the_code(name, codes):
    assert table(f"code | {name}") == [[str(code), text] for code, text in enumerate(codes)]


@pytest.mark.parametrize(
    ("heading", "kind", "further"),
    [
        ("manifest field", Manifest, {"format", "format_version", "generation", "brace", "digest"}),
        ("file field", FileRecord, set()),
        ("shard field", ShardRecord, set()),
        ("totals field", Totals, set()),
    ],
)
def test_the_manifest_fields_are_those_of_the_code(heading, kind, further):
    names = [row[0] for row in table(heading)]
    assert len(set(names)) == len(names)
    assert set(names) == {f.name for f in dataclasses.fields(kind)} | further


@pytest.mark.parametrize(("name", "size"), [("cat/tom.jpg", 141), ("n" * 100, 8**11 - 1)])
@pytest.mark.parametrize("padding", [False, True])
def test_a_header_built_from_the_table_is_ours(name, size, padding):
    own = {"name": name, "size": f"{size:011o}\0", "chksum": " " * 8, "typeflag": "x" if padding else "0"}
    block = bytearray()
    for field, offset, width, value in table("field"):
        assert len(block) == int(offset)
        literal = re.fullmatch(r"([0-9a-z\\]+)(, then NUL)?", value)
        text = own[field] if field in own else literal[1].replace("\\0", "\0") if literal else ""
        assert field in own or literal or value == "NUL"
        block += text.encode("ascii").ljust(int(width), b"\0")
    block[148:156] = b"%06o\0 " % sum(block)
    assert bytes(block) == encode_header(name, size, padding=padding)


def test_the_example_keys_and_sources_follow_the_rules():
    for path, key in table("path | key"):
        assert key_from_path(path.encode()) == key
    for path, source in table("path | source text"):
        raw = bytes.fromhex(path.removesuffix("(hex)")) if path.endswith("(hex)") else path.encode()
        assert source_from_path(raw) == source


def test_the_worked_example_is_what_the_code_makes():
    script = runpy.run_path(str(ROOT / "scripts" / "format_example.py"))
    assert script["example"]() in PAGE
    assert script["with_example"](PAGE) == PAGE


def test_the_dump_of_the_worked_example_reads_back_to_the_shard(tmp_path, require_tool):
    import subprocess

    dump = PAGE.partition("```text\n")[2].partition("```")[0].splitlines()
    data, before = bytearray(), b""
    for line in dump:
        at = line.split()[0]
        if at != "*":
            while len(data) < int(at, 16):
                data += before
            before = bytes.fromhex(line[10:59])
            data += before
    (tmp_path / "photos-000000.tar").write_bytes(data)
    listed = subprocess.run(
        [require_tool("tar"), "-tf", tmp_path / "photos-000000.tar"], check=True, stdout=subprocess.PIPE
    )
    assert listed.stdout.split() == [b"cat/tom.cls", b"cat/tom.json", b"cat/tom.jpg"]
    assert len(data) == 20480
