"""Datasets whose manifest, index or shards lie, every digest of them right: each command has a verdict."""

from __future__ import annotations

import re

import pyarrow as pa
import pytest

from shardkit.format.checksum import hex_digest
from shardkit.testing.datasets import draft_dataset, tiny_jpeg
from shardkit.testing.hostile import HOSTILE_TEXTS
from shardkit.testing.hostile_tars import hostile_tars, jpeg_bomb

U32, U64 = 2**32 - 1, 2**64 - 1


SEEN = {0, 2, 3, 4, 6, 7, 9}
"""Codes of a command that may not meet the lie; 1 is a bug, and any other a crash."""


def commands(folder, target, key="c/0001"):
    """Every command that takes a dataset, by name; those that write, below `target`."""
    where = "size > 0 and width < 4000000000"
    return {
        "verify": ["verify", folder, "--level", "decode"],
        "inspect": ["inspect", folder],
        "show": ["show", folder, key],
        "ls": ["ls", folder, "--limit", "0", "--where", where],
        "cat": ["cat", folder, key, "--member", "json"],
        "extract": ["extract", folder, target / "tree"],
        "left out": ["extract", folder, target / "rest", "--on-error", "skip", "--layout", "class"],
        "export": ["export", folder, "--to", "dali,wids,energon,openclip", "--out", target],
        "repair": ["repair", folder, "--out", target / "mended"],
        "convert": ["convert", folder, target / "new", "--jobs", "1"],
    }


def hold(hostile, folder, free, names=None, verify=(4, 7), result=(0,), key="c/0001"):
    """Run the commands; what they make of it is whole."""
    target = free / "target"
    target.mkdir()
    wanted = commands(folder, target, key)
    for name in names or wanted:
        hostile.run(*wanted[name], codes=set(verify) if name == "verify" else SEEN, writes=target)
    for made in ("mended", "new"):
        if (target / made / "manifest.json").exists():
            hostile.run("verify", target / made, codes=set(result))
    return target


ROWS = {
    "offset beyond the shard": {"offset": 1 << 40},
    "offset that overflows": {"offset": U64 - 4095},
    "size beyond the shard": {"size": U32},
    "offset and size that wrap around": {"offset": U64 - 100, "size": 4096},
    "sample of 2^64 bytes": {"sample_offset": 4096, "sample_size": U64},
    "sample that begins last": {"sample_offset": U64, "sample_size": U64},
    "json beyond the shard": {"json_offset": U64, "json_size": 100},
    "json of 4 GiB": {"json_size": U32},
    "image of nothing": {"size": 0},
    "image over the header": {"offset": 0, "size": 512},
    "pixels without end": {"width": U32, "height": U32},
    "codes that are none": {
        "media_type": 255,
        "subsampling": 255,
        "orientation": 255,
        "sof": 255,
        "components": 255,
        "precision": 255,
        "adobe_transform": -128,
        "scans": 255,
    },
    "label below zero": {"label": -(2**31)},
    "label without a class": {"label": 2**31 - 1},
    "key upwards": {"key": "../../etc/m"},
    "key that is absolute": {"key": "/etc/m"},
    "key with a NUL": {"key": "a\0b"},
    "key of control characters": {"key": "\x1b[2J\x1b]0;x\x07\r\n"},
    "key of 10^5 bytes": {"key": "k" * 100_000},
    "key of nothing": {"key": ""},
    "key of overrides": {"key": "\u202ecod\u2066"},
    "key of the work folder": {"key": ".shardkit/x"},
    "source upwards": {"source": "../../etc/m.jpg"},
    "source that is absolute": {"source": "/etc/m.jpg"},
    "source of escapes": {"source": "%2e%2e/%2e%2e/m.jpg%00"},
    "source of 10^5 bytes": {"source": "s/" * 50_000},
    "source of control characters": {"source": "\x1b[2J\n"},
    "source in the work folder": {"source": ".shardkit/m.jpg"},
}


BY_ROW = ("verify", "show", "extract", "left out", "repair", "convert")


@pytest.mark.parametrize("what", ROWS)
def test_a_row_that_lies_leads_nowhere(hostile, free, what):
    draft = draft_dataset((3,))
    draft.shards[0].rows[1] = draft.shards[0].rows[1]._replace(**ROWS[what])
    # What an image is, and where it came from, a digest proves: repair believes it, and verify looks for itself.
    result = (0, 4) if what.startswith(("pixels", "codes", "source")) else (0,)
    key = draft.shards[0].rows[1].key.replace("\0", "?")[:1000] or "c/0001"
    hold(hostile, draft.write(free / "data"), free, BY_ROW, result=result, key=key)


def test_all_rows_that_lie_are_shown_and_exported_as_text(hostile, free):
    draft = draft_dataset([2] * len(ROWS))
    for number, lie in enumerate(ROWS.values()):
        draft.shards[number].rows[1] = draft.shards[number].rows[1]._replace(**lie)
    hold(hostile, draft.write(free / "data"), free, ("verify", "inspect", "ls", "export", "left out"))


def resealed(text: str) -> str:
    """A manifest whose own digest is right again."""
    digest = hex_digest("xxh3-128", re.sub(r'^ "digest": "[^"]*",\n', "", text, count=1, flags=re.M).encode())
    return re.sub(r'^ "digest": "[^"]*",\n', f' "digest": "xxh3-128:{digest}",\n', text, count=1, flags=re.M)


SHARD = "tiny-000000.tar"
MANIFESTS = {
    "shard upwards": lambda text: text.replace(f'"{SHARD}"', '"../../../etc/x.tar"'),
    "shard that is absolute": lambda text: text.replace(f'"{SHARD}"', '"/etc/x.tar"'),
    "shard with a NUL": lambda text: text.replace(f'"{SHARD}"', '"a\\u0000.tar"'),
    "shard that is a command": lambda text: text.replace(f'"{SHARD}"', '"pipe:touch canary-was-run.tar"'),
    "shard of half a surrogate": lambda text: text.replace(f'"{SHARD}"', '"\\ud800.tar"'),
    "name of the dataset upwards": lambda text: text.replace('"name": "tiny"', '"name": "../tiny"'),
    "sizes of 10^400": lambda text: re.sub(r'"bytes": \d+', '"bytes": 1' + "0" * 400, text),
    "sizes below zero": lambda text: re.sub(r'"bytes": \d+', '"bytes": -1', text),
    "sizes of 2^64": lambda text: re.sub(r'"samples": \d+', f'"samples": {U64}', text),
    "sizes that are no numbers": lambda text: re.sub(r'"bytes": \d+', '"bytes": NaN', text),
    "numbers of 5,000 digits": lambda text: re.sub(r'"seed": \d+', '"seed": ' + "9" * 5000, text),
    "alignment of 3": lambda text: re.sub(r'"align": \d+', '"align": 3', text),
    "format of tomorrow": lambda text: text.replace('"format_version": 1', '"format_version": 999999999999'),
    "layout of nobody": lambda text: text.replace('"layout": "aligned"', '"layout": "\\u001b[2J"'),
    "foreign layout": lambda text: text.replace('"layout": "aligned"', '"layout": "foreign"'),
    "field twice": lambda text: text.replace('"name": "tiny"', '"name": "tiny",\n "name": "tiny"'),
    "options nested 190 deep": lambda text: text.replace(
        '"options": {}', '"options": {"a": ' + "[" * 190 + "]" * 190 + "}"
    ),
    "options nested 900 deep": lambda text: text.replace(
        '"options": {}', '"options": {"a": ' + "[" * 900 + "]" * 900 + "}"
    ),
    "shards nested without end": lambda text: text.replace('"options": {}', '"options": ' + "[" * 1_000_000),
    "options of 4 MiB": lambda text: text.replace('"options": {}', '"options": {"a": "' + "x" * (4 << 20) + '"}'),
    "nothing": lambda text: "",
    "a list": lambda text: "[]",
    "a number": lambda text: "1" * 100_000,
    "not ASCII": lambda text: text.replace("tiny", "t\u00efny"),
    "NULs": lambda text: "\0" * 4096,
}


BY_MANIFEST = ("verify", "ls", "left out", "export", "repair", "convert")


@pytest.mark.parametrize("what", MANIFESTS)
def test_a_manifest_that_lies_is_damage(hostile, free, what):
    folder = draft_dataset((3,)).write(free / "data")
    path = folder / "manifest.json"
    changed = MANIFESTS[what](path.read_text())
    assert changed != path.read_text()
    path.write_text(resealed(changed))
    harmless = {"options of 4 MiB", "options nested 190 deep"}
    hold(hostile, folder, free, BY_MANIFEST, verify=(0,) if what in harmless else (4, 7))


def test_a_class_that_leads_up_is_a_name_like_any_other(hostile, free):
    classes = (
        "../../etc",
        "..",
        "/etc",
        "",
        "\x1b[2J\r\n",
        "\u202ecod",
        ".shardkit",
        "a\0b",
        "d/" * 3000,
        *HOSTILE_TEXTS,
    )
    draft = draft_dataset((12,), metadata=False)
    draft.classes = (*classes, *(f"class {number}" for number in range(len(classes), 12)))
    target = hold(hostile, draft.write(free / "data"), free, verify=(0,))
    assert {path.name for path in target.iterdir()} >= {"mended", "new", "rest", "tree"}


def test_a_manifest_that_is_too_large_is_not_read(hostile, free):
    folder = draft_dataset((3,)).write(free / "data")
    with open(folder / "manifest.json", "r+b") as file:
        file.truncate(1 << 42)
    hold(hostile, folder, free, BY_MANIFEST, verify=(4, 9))


def rewritten(data: bytes, change) -> bytes:
    """An index file with other content."""
    batch = pa.ipc.open_file(data).get_batch(0)
    sink = pa.BufferOutputStream()
    schema, batches, options = change(batch)
    with pa.ipc.new_file(sink, schema, options=options) as writer:
        for one in batches:
            writer.write_batch(one)
    return bytes(sink.getvalue())


def with_dictionary(batch):
    column = batch.column("key").dictionary_encode()
    other = batch.set_column(0, pa.field("key", column.type, False), column)
    return other.schema, [other], None


def with_nulls(batch):
    key = pa.array([None] * batch.num_rows, pa.utf8())
    fields = [pa.field(field.name, field.type) for field in batch.schema]
    other = pa.RecordBatch.from_arrays([key, *batch.columns[1:]], schema=pa.schema(fields, batch.schema.metadata))
    return other.schema, [other], None


def compressed(batch):
    return batch.schema, [batch], pa.ipc.IpcWriteOptions(compression="zstd")


def without_rows(batch):
    return batch.schema, [batch.slice(0, 0)] * 500, None


def without_columns(batch):
    return pa.schema([], batch.schema.metadata), [], None


def with_metadata(batch):
    metadata = {**batch.schema.metadata, b"shardkit.shard": b"../../etc/\x1b[2J", b"shardkit.shard_bytes": b"9" * 18}
    return batch.schema.with_metadata(metadata), [batch.replace_schema_metadata(metadata)], None


def of_a_newer_version(batch):
    metadata = {**batch.schema.metadata, b"shardkit.format_version": b"9" * 9}
    return batch.schema.with_metadata(metadata), [batch.replace_schema_metadata(metadata)], None


def of_other_text(batch):
    key = pa.array([b"\xff\xfe"] * batch.num_rows, pa.binary()).view(pa.utf8())
    other = pa.RecordBatch.from_arrays([key, *batch.columns[1:]], schema=batch.schema)
    return other.schema, [other], None


def places(data: bytes, name: str) -> tuple[int, int]:
    """Where in an index file the offsets of a text column, and where its number of rows lie."""
    base = pa.py_buffer(data)
    column = pa.ipc.open_file(base).get_batch(0).column(name)
    return column.buffers()[1].address - base.address, column.buffers()[2].address - base.address


def with_offsets(values):
    def change(data):
        at = places(data, "key")[0]
        raw = b"".join(value.to_bytes(4, "little", signed=True) for value in values)
        return data[:at] + raw + data[at + len(raw) :]

    return change


def with_more_rows(data):
    """Every number 3 of the file's last record batch message made 2^40: its rows, and those of its columns."""
    three, many = (3).to_bytes(8, "little"), (1 << 40).to_bytes(8, "little")
    return data.replace(three, many)


INDEXES = {
    "a dictionary": lambda data: rewritten(data, with_dictionary),
    "nulls": lambda data: rewritten(data, with_nulls),
    "compressed": lambda data: rewritten(data, compressed),
    "500 empty batches": lambda data: rewritten(data, without_rows),
    "no columns": lambda data: rewritten(data, without_columns),
    "metadata": lambda data: rewritten(data, with_metadata),
    "a newer version": lambda data: rewritten(data, of_a_newer_version),
    "no UTF-8": lambda data: rewritten(data, of_other_text),
    "offsets beyond the file": with_offsets((0, 2**31 - 1, 2**31 - 1, 2**31 - 1)),
    "offsets below zero": with_offsets((-(2**31), -1, -1, -1)),
    "offsets that go back": with_offsets((0, 18, 6, 18)),
    "an inner offset beyond the file": with_offsets((0, 2**30, 12, 18)),
    "2^40 rows": with_more_rows,
    "magic only": lambda data: b"ARROW1\0\0" + b"ARROW1",
    "a footer of 2 GiB": lambda data: data[:-10] + (2**31 - 1).to_bytes(4, "little") + data[-6:],
    "a footer below zero": lambda data: data[:-10] + b"\xff\xff\xff\xff" + data[-6:],
    "a Feather file of 2016": lambda data: b"FEA1" + data[4:-4] + b"FEA1",
    "nothing": lambda data: b"",
    "a pickle": lambda data: b"\x80\x04cos\nsystem\n(S'touch canary-was-run'\ntR.",
}


@pytest.mark.parametrize("where", ["index.arrow", "tiny-000000.arrow"])
@pytest.mark.parametrize("what", INDEXES)
def test_an_index_that_lies_is_damage(hostile, free, what, where):
    draft = draft_dataset((3,))
    folder = draft.write(free / "data")
    old = (folder / where).read_bytes()
    new = INDEXES[what](old)
    assert new != old
    (folder / where).write_bytes(new)
    manifest = (folder / "manifest.json").read_text()
    records = [f'"bytes": {len(data)}, "digest": "{hex_digest("xxh3-128", data)}"' for data in (old, new)]
    assert records[0] in manifest
    manifest = manifest.replace(*records)
    (folder / "manifest.json").write_text(resealed(manifest))
    harmless = what == "metadata" and where == "index.arrow"
    names = ("verify", "show", "repair") if where != "index.arrow" else ("verify", "ls", "show", "repair", "convert")
    hold(hostile, folder, free, names, verify=(0,) if harmless else (4, 7))


def test_shards_that_are_another_thing_cost_only_themselves(hostile, free):
    """Every tar of the table in the place of a shard, of one dataset, whose digests know nothing of it."""
    tars = list(hostile_tars())
    folder = draft_dataset([1] * len(tars) + [2]).write(free / "data")
    for number, tar in enumerate(tars):
        tar.write(folder / f"tiny-{number:06}.tar")
    done = hostile.run("verify", folder, "--json", codes={4})
    assert set(re.findall(r"tiny-\d{6}\.tar", done.stdout)) == {f"tiny-{number:06}.tar" for number in range(len(tars))}
    target = free / "target"
    target.mkdir()
    last = f"c/{len(tars):04}"
    for name, command in commands(folder, target, last).items():
        hostile.run(*command, codes={4} if name in {"verify", "inspect"} else SEEN - {0}, writes=target)
    assert list((target / "rest").rglob("*.jpg")) == []
    hostile.run("cat", folder, last, codes={4, 6})


def test_a_bomb_is_a_row_and_never_a_picture(hostile, free):
    assert len(jpeg_bomb()) < 1000
    (free / "tree/a").mkdir(parents=True)
    (free / "tree/a/bomb.jpg").write_bytes(jpeg_bomb())
    (free / "tree/a/good.jpg").write_bytes(tiny_jpeg())
    for check in ("header", "decode", "none"):
        target = free / f"of {check}"
        codes = {0} if check == "none" else {3}
        hostile.run(
            "pack", free / "tree", target, "--name", "t", "--check", check, "--jobs", "1", codes=codes, writes=target
        )
    page = free / "page"
    page.mkdir()
    hostile.run("inspect", free / "of none", "--html", page / "page.html", codes={0}, writes=page)
    hostile.run("verify", free / "of none", "--level", "decode", codes={4})
