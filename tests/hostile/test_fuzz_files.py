"""Every reader of a file that somebody else may have written, fed with what resembles one: it answers, or refuses.

`test_fuzz.py` has the parsers of bytes; here are records, journals, lists, other frameworks' indexes, whole datasets.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import shardkit
from shardkit.converting.labels import read_labels
from shardkit.converting.options import ConvertOptions, parse_split
from shardkit.dataset.state import Position, load_state
from shardkit.errors import ConfigError, IntegrityError, ShardkitError, TarFormatError
from shardkit.exporting.record import dump_record as dump_exports
from shardkit.exporting.record import load_record as load_exports
from shardkit.format.checksum import hex_digest
from shardkit.format.dataset_record import FileRecord, ShardRecord
from shardkit.format.manifest import load_manifest
from shardkit.format.tar import BLOCK, encode_header, parse_header
from shardkit.indexing import record as index_record
from shardkit.indexing.record import IndexRecord, index_journal
from shardkit.indexing.refusals import IndexRefusal
from shardkit.indexing.rows import ShardOutcome
from shardkit.inspecting.rejected import read_rejected
from shardkit.packing import record as pack_record
from shardkit.packing.journal import pack_journal
from shardkit.packing.lists import scan_list
from shardkit.packing.options import PackOptions
from shardkit.packing.record import PackRecord
from shardkit.packing.refusals import Refusal
from shardkit.packing.write import ShardResult
from shardkit.running.sealed_record import seal
from shardkit.sizes import parse_size
from shardkit.testing.datasets import draft_dataset, tiny_jpeg
from shardkit.testing.fuzzing import SECONDS, changed, fuzzed, mutated, share_s
from shardkit.testing.hostile_tars import hostile_tars, tar_member

pytestmark = pytest.mark.timeout(120 + SECONDS / 4)
TOKENS = [b'"', b"null", b"-1", b"9" * 40, b"[" * 2000, b"{", b"}", b",", b"\\ud800", b"\\u0000", b"../", b"1e999"]


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A folder that every example of a test uses anew."""
    return tmp_path_factory.mktemp("fuzzed")


# Records of what is not finished: a digest covers each, and anybody can compute it.


def sealed(text: bytes, identity: bytes = b"") -> bytes:
    return hex_digest("xxh3-128", identity + text).encode() + b" " + text + b"\n"


def documents(document, *values):
    """Texts of the document with other values, and of other bytes."""
    return changed(document, values).map(lambda other: json.dumps(other).encode()) | mutated(
        json.dumps(document).encode(), TOKENS
    )


PACK = PackRecord(
    shardkit="1", options={"name": "t", "seed": 0}, classes=["a", "b"], plan="0" * 32, replaces=["t-000000.tar"]
)
INDEX = IndexRecord(shardkit="1", options={"name": "t"}, shards=["a.tar", "b.tar"], replaces=["a.arrow"])


@fuzzed(200)
@example((pack_record, PACK), b'{"classes": null, "options": [], "plan": "", "replaces": [], "shardkit": "1"}')
@example((index_record, INDEX), b'{"options": {}, "replaces": [3], "shardkit": "1", "shards": []}')
@example((pack_record, PACK), b'{"classes": [], "options": {}, "plan": "", "replaces": ["\\ud800"], "shardkit": "1"}')
@example((index_record, INDEX), b'{"options": {}, "replaces": ["a\\u0000"], "shardkit": "1", "shards": []}')
@given(
    st.sampled_from([(pack_record, PACK), (index_record, INDEX)]),
    st.sampled_from([PACK, INDEX]).flatmap(
        lambda record: documents(dataclasses.asdict(record), "x.tar", "\ud800", "a\0")
    ),
)
def test_a_record_of_a_run_is_one_or_none(kind, text):
    module, own = kind
    record = module.load_record(sealed(text))
    if record is None:
        return
    assert isinstance(module.difference(record, own), str)
    assert isinstance(record.identity, bytes)
    for name in record.replaces:
        with contextlib.suppress(OSError):
            os.lstat(os.path.join(b"folder", os.fsencode(name)))
    assert module.load_record(seal(record)) == record


SHARD = ShardRecord(
    name="t-000000.tar", bytes=10240, digest="0" * 32, samples=1, payload=400, padding=0, first_key="a", last_key="a",
    index=FileRecord(bytes=1, digest="0" * 32), dali_index=FileRecord(bytes=1, digest="0" * 32),
)  # fmt: skip
JOURNALS = {
    "pack": (pack_journal, ShardResult(record=SHARD, refused=[Refusal(1, b"a\xff", "empty", "")])),
    "index": (
        index_journal,
        ShardOutcome(record=SHARD, mtime_ns=5, refused=[IndexRefusal(path="a", reason="empty", detail="", offset=0)]),
    ),
}


def entries(folder, kind):
    """The lines of a journal with one entry, and the entry as JSON."""
    make, entry = JOURNALS[kind]
    path = folder / "written"
    path.unlink(missing_ok=True)
    make(os.fsencode(path), b"run").append(0, entry)
    return json.loads(path.read_bytes().split(b" ", 1)[1])


@pytest.mark.parametrize("kind", JOURNALS)
@fuzzed(200)
@given(data=st.data())
def test_a_line_of_a_journal_is_an_entry_or_not_there(place, kind, data):
    make, own = JOURNALS[kind]
    text = data.draw(documents(entries(place, kind), "../x.tar", 3, "\ud800.tar"))
    path = place / "journal"
    path.write_bytes(b"\n" + sealed(text, b"run"))
    found = make(os.fsencode(path), b"run").read()
    for number, entry in found.items():
        assert isinstance(number, int)
        assert number >= 0
        assert type(entry) is type(own)
        if entry.record is not None:
            assert "/" not in entry.record.name
            os.fsencode(entry.record.name)
        for refusal in entry.refused:
            assert isinstance(refusal.reason, str)
        make(os.fsencode(place / "again"), b"run").append(number, entry)


@fuzzed(200)
@given(documents(json.loads(dump_exports("g", {"a.json": "0" * 32, "b/c.json": "1" * 32}))))
def test_a_record_of_exports_is_names_and_digests_or_none(text):
    record = load_exports(text)
    assert record is None or all(isinstance(item, str) for pair in record.items() for item in pair)


REFUSED = b"".join(
    json.dumps({"path": path, "reason": "empty", "detail": ""}).encode() + b"\n" for path in ("a", "b/\u00fc", "c")
)
MANIFEST = load_manifest(draft_dataset((2, 1)).files()["manifest.json"])


@fuzzed(200)
@given(mutated(REFUSED, TOKENS), st.integers(0, 4))
def test_a_list_of_refused_sources_is_counted_or_damaged(place, data, lines):
    (place / "rejected.jsonl").write_bytes(data)
    manifest = dataclasses.replace(
        MANIFEST,
        rejected=FileRecord(bytes=len(data), digest="0" * 32),
        totals=dataclasses.replace(MANIFEST.totals, refused=lines),
    )
    try:
        found = read_rejected(str(place), manifest)
    except IntegrityError:
        return
    assert found.total == lines == sum(found.reasons.values())


STATE = {
    "version": 1, "epoch": 2, "step": 3, "run": {"seed": 0, "datasets": ["a 3 b 1/1"], "lanes": 8},
}  # fmt: skip


@fuzzed(200)
@given(changed(STATE, [4, 5]))
def test_a_state_is_a_position_or_an_error_of_configuration(state):
    try:
        position = load_state(state, STATE["run"], 4)
    except ConfigError:
        return
    assert position == Position(state["epoch"], state["step"])
    assert 0 <= position.step <= 4


# What a person hands over


LIST = b"path,label,more\na.jpg,0,x\nb.jpg,1,\n"
LINES = b'{"path": "a.jpg", "label": 0, "more": [1]}\n{"path": "b.jpg", "label": "1"}\n'
CELLS = [b",", b'"', b"\n", b"\r\n", b"\0", b"\xff", b"\xef\xbb\xbf", b"label", b"path", b"..", b"9" * 5000, *TOKENS]


@fuzzed(200)
@given(
    st.tuples(st.just("list.csv"), mutated(LIST, CELLS)) | st.tuples(st.just("list.jsonl"), mutated(LINES, CELLS)),
    st.sampled_from([None, "none", "column"]),
)
def test_a_list_is_rows_or_an_error_that_names_it(place, file, labels):
    name, data = file
    (place / "a.jpg").write_bytes(tiny_jpeg())
    path = place / name
    path.write_bytes(data)
    try:
        found = scan_list(os.fsencode(path), PackOptions(name="t", labels=labels))
    except ShardkitError:
        return
    assert sum(len(rows) for rows in (found.refused,)) <= data.count(b"\n") + data.count(b"\r") + 1


@fuzzed(200)
@given(mutated(b"a\nb\nc\n", CELLS) | documents({"a": 0, "b": None, "c": "d"}))
def test_a_file_of_labels_is_names_or_an_object_or_refused(place, data):
    path = place / "labels"
    path.write_bytes(data)
    try:
        found = read_labels(str(path))
    except ShardkitError:
        return
    assert isinstance(found, dict) or all(isinstance(name, str) and name for name in found)


SHARES = st.lists(
    st.sampled_from(["a", "b", "=", ",", "0.5", "1", "-1", "1e999", "nan", "inf", "9" * 5000, " ", "/", "\u0665", "."]),
    max_size=10,
).map("".join)


@fuzzed(200)
@given(SHARES)
def test_a_split_is_shares_or_an_error_of_configuration(text):
    try:
        options = ConvertOptions(name="t", split=parse_split(text))
    except ConfigError:
        return
    assert len(options.split) >= 2


@fuzzed(200)
@example("9" * 5000 + "MB")
@example("0." + "9" * 5000 + "MB")
@given(st.lists(st.sampled_from([*"0123456789. kMGTPiB-+e_", "\u0665", "9" * 300]), max_size=8).map("".join))
def test_a_size_is_a_number_of_bytes_or_none(text):
    size = parse_size(text)
    assert size is None or size >= 0


# Headers of our own


@fuzzed(200)
@given(mutated(encode_header("a/b.jpg", 70000), [b"\0", b" ", b"8", b"x", b"/"]) | st.binary(max_size=600))
def test_a_canonical_header_is_what_was_written_or_refused(block):
    try:
        header = parse_header(block)
    except TarFormatError as error:
        offset = error.offset or 0
    else:
        offset = None
    if offset is not None:
        assert 0 <= offset < BLOCK
        return
    assert encode_header(header.name, header.size, padding=header.padding) == block


# Whole datasets


PLAIN = draft_dataset((2, 1), sizes=(401,))
FILES = PLAIN.files()
PARTS = [b"".join(part for part in tar.parts if isinstance(part, bytes)) for tar in hostile_tars()]
TARS = st.lists(
    st.sampled_from([tar_member(f"{key}.{end}", tiny_jpeg(1) if end == "jpg" else b"1", dialect=dialect)
                     for key in "ab" for end in ("jpg", "cls", "json") for dialect in ("pax", "gnu", "ustar")])
    | st.sampled_from([part for part in PARTS if len(part) < 20_000]),
    min_size=1, max_size=6,
).map(b"".join)  # fmt: skip


def anew(folder: Path, *names: str) -> list[Path]:
    """Paths in a folder at which nothing is."""
    paths = [folder / name for name in names]
    for path in paths:
        shutil.rmtree(path, ignore_errors=True)
    return paths


@fuzzed(20)
@given(TARS.flatmap(mutated) | TARS)
def test_what_index_takes_of_a_tar_verify_finds_whole(place, data):
    (place / "x.tar").write_bytes(data)
    (out,) = anew(place, "out")
    try:
        manifest, code = shardkit.index(place / "x.tar", out=out, jobs=1), 0
    except ShardkitError as error:
        manifest, code = None, error.exit_code
    assert code in {0, 3, 4, 9}
    if manifest is None:
        return
    report = shardkit.verify(out, jobs=1)
    assert report.samples == manifest.totals.samples > 0
    assert not report.findings, report.findings


@fuzzed(20)
@given(st.data())
def test_of_a_damaged_dataset_repair_makes_a_whole_one_or_refuses(place, data):
    old, new = anew(place, "old", "new")
    PLAIN.write(old)
    for name in data.draw(st.sets(st.sampled_from(sorted(FILES)), min_size=1, max_size=3)):
        (old / name).write_bytes(data.draw(mutated(FILES[name])))
    before = {path.name: path.read_bytes() for path in old.iterdir()}
    code = 0
    try:
        shardkit.verify(old, jobs=1)
        shardkit.repair(old, out=new)
    except ShardkitError as error:
        code = error.exit_code
    assert code in {0, 2, 3, 4, 7, 9}
    assert {path.name: path.read_bytes() for path in old.iterdir()} == before
    if (new / "manifest.json").exists():
        assert not shardkit.verify(new, jobs=1).findings


def test_a_class_that_only_a_damaged_sample_names_keeps_its_name(tmp_path):
    """Without a manifest the names of classes come from headers; this sample only its row finds."""
    folder = PLAIN.write(tmp_path / "old")
    (folder / "manifest.json").unlink()
    shard = folder / "tiny-000000.tar"
    shard.write_bytes(b"\0" + shard.read_bytes()[1:])
    shardkit.repair(folder, out=tmp_path / "new")
    assert not shardkit.verify(tmp_path / "new", jobs=1).findings
    assert shardkit.open(tmp_path / "new").classes[0] == "class 0"


# Other frameworks' indexes; their libraries stay in a process of their own.

TABLES = """
import json, os, struct, sys, warnings
warnings.simplefilter("ignore")
from hypothesis import given, strategies as st
from shardkit.converting.columns import stay_inside
from shardkit.converting.litdata import LitDataTable
from shardkit.converting.mds import MdsTable
from shardkit.errors import CapabilityError, ShardkitError
from shardkit.testing.datasets import tiny_jpeg
from shardkit.testing.fuzzing import changed, fuzzed, mutated

folder = sys.argv[1]

def framed(items):
    at, ends = 4 * (len(items) + 2), []
    for item in items:
        ends.append(at)
        at += len(item)
    return struct.pack(f"<{len(items) + 2}I", len(items), *ends, at) + b"".join(items)

def sized(*parts):
    return b"".join(struct.pack("<I", len(part)) for part in parts) + b"".join(parts)

rows = [(tiny_jpeg(number), number) for number in range(3)]
mds = {"version": 2, "shards": [{
    "column_encodings": ["jpeg", "int", "json"], "column_names": ["image", "label", "more"],
    "column_sizes": [None, 8, None], "compression": None, "format": "mds", "hashes": [],
    "raw_data": {"basename": "data", "bytes": 5000, "hashes": {}}, "samples": 3, "size_limit": 1 << 26,
    "version": 2, "zip_data": None,
}]}
# As the index lists them: sizes of the columns without a fixed one, then the columns.
mds_data = framed([sized(image, b"[1]")[:8] + image + struct.pack("<q", n) + b"[1]" for image, n in rows])
leaf = {"type": None, "context": None, "children_spec": []}
spec = {"type": "builtins.dict", "context": json.dumps(["image", "label"]), "children_spec": [leaf, leaf]}
litdata = {"chunks": [{"chunk_bytes": 5000, "chunk_size": 3, "dim": None, "filename": "data"}], "config": {
    "chunk_bytes": 5000, "chunk_size": None, "compression": None, "data_format": ["jpeg", "int"],
    "data_spec": json.dumps([1, spec]), "encryption": None, "item_loader": "PyTreeLoader",
}, "updated_at": "1"}
lit_data = framed([sized(image, struct.pack("<q", n)) for image, n in rows])
deep = "[" * 100_000
values = ["pkl", "pickle", "graph", "../x", "/etc/passwd", deep, json.dumps([1, deep]), "jpeg", 4, 3, 2**32 - 1]

def use(table, document, data):
    for name, text in (("index.json", document), ("data", data)):
        with open(os.path.join(folder, name), "wb") as file:
            file.write(text)
    try:
        found = table(folder)
    except ShardkitError as error:
        return error
    assert len(found) >= 0
    assert all(os.path.realpath(path).startswith(os.path.realpath(folder) + "/") for path in found.files)
    read = []
    for number in range(min(len(found), 5)):
        try:
            read.append(found.row(number))
        except Exception as error:  # the row cannot be read
            read.append(error)
    return read

table, document, data = {"mds": (MdsTable, mds, mds_data), "litdata": (LitDataTable, litdata, lit_data)}[sys.argv[3]]
whole = use(table, json.dumps(document).encode(), data)
if isinstance(whole, CapabilityError):
    sys.exit(f"{whole}: skipped")
assert [bytes(row["image"]) for row in whole] == [image for image, _ in rows], whole

pieces = [b"\\xff\\xff\\xff\\x7f", b"\\0\\0\\0\\0", b"\\x80\\4cos\\nsystem\\n"]
@fuzzed(int(sys.argv[2]))
@given(
    changed(document, values).map(json.dumps).map(str.encode) | st.just(json.dumps(document).encode()),
    mutated(data, pieces) | st.just(data),
)
def run(index, shard):
    use(table, index, shard)

run()
print("survived")
"""


@pytest.mark.peers
@pytest.mark.parametrize("kind", ["litdata", pytest.param("mds", marks=pytest.mark.mds)])
@fuzzed(0)
def test_an_index_of_another_framework_is_a_table_or_refused(tmp_path, kind):
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", TABLES, str(tmp_path), "200", kind], timeout=100 + SECONDS,
        env={**os.environ, "SHARDKIT_FUZZ_S": str(share_s())}, cwd=Path(__file__).parents[2],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
    )  # fmt: skip
    said = done.stdout.strip()
    if said.endswith(": skipped"):
        pytest.skip(said)
    assert said.endswith("survived"), f"exit {done.returncode}: {said[-3000:]}"
