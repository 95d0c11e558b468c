from __future__ import annotations

import dataclasses
import json
import re
import uuid

import braceexpand
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from shardkit.errors import ManifestError, UnsupportedVersionError
from shardkit.format.index import FORMAT_VERSION
from shardkit.format.manifest import (
    FileRecord,
    Manifest,
    ShardRecord,
    Totals,
    brace_spec,
    dump_manifest,
    load_manifest,
)

HEX = "0123456789abcdef" * 2
COUNT = st.integers(0, 1 << 40)
TEXT = st.text(max_size=20)
DIGEST = st.text("0123456789abcdef", min_size=32, max_size=32)
FILE = st.builds(FileRecord, bytes=COUNT, digest=DIGEST)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)


def make(shards=(), **changes):
    """Return a manifest whose totals fit its shards."""
    sums = {name: sum(getattr(s, name) for s in shards) for name in ("samples", "payload", "padding", "bytes")}
    totals = Totals(**sums, shards=len(shards), headers=sums["bytes"] - sums["payload"] - sums["padding"], refused=0)
    values = {
        "shardkit": "0.1.0", "name": "photos", "align": 4096, "digest_algorithm": "xxh3-128", "seed": 0,
        "options": {"check": "header", "jobs": None}, "classes": ["cat", "dog"],
        "index": FileRecord(bytes=9, digest=HEX), "rejected": None, "shards": list(shards), "totals": totals,
    }  # fmt: skip
    return Manifest(**values | changes)


def shard(number=0, **changes):
    values = {
        "name": f"photos-{number:06}.tar", "bytes": 20480, "digest": HEX, "samples": 2, "payload": 9000,
        "padding": 8000, "index": FileRecord(bytes=4000, digest=HEX), "dali_index": FileRecord(bytes=90, digest=HEX),
        "first_key": "cat/1", "last_key": "dog/2",
    }  # fmt: skip
    return ShardRecord(**values | changes)


TWO = make([shard(0), shard(1)], splits={"train": ["photos-000000.tar"], "val": ["photos-000001.tar"]})


@st.composite
def manifests(draw):
    shards = []
    for number in range(draw(st.integers(0, 4))):
        payload, padding = draw(COUNT), draw(COUNT)
        shards.append(
            shard(
                number, bytes=payload + padding + draw(COUNT), payload=payload, padding=padding, samples=draw(COUNT),
                digest=draw(DIGEST), index=draw(FILE), dali_index=draw(FILE), first_key=draw(TEXT), last_key=draw(TEXT),
            )
        )  # fmt: skip
    return make(
        shards, options=draw(st.dictionaries(TEXT, JSON, max_size=3)), classes=draw(st.none() | st.lists(TEXT)),
        index=draw(FILE), rejected=draw(st.none() | FILE), seed=draw(COUNT), shardkit=draw(TEXT),
        align=draw(st.sampled_from([512 << i for i in range(11)])),
    )  # fmt: skip


@given(manifests())
def test_a_loaded_manifest_is_what_was_dumped(manifest):
    text = dump_manifest(manifest)
    assert text.isascii()
    assert text.endswith("}\n")
    assert load_manifest(text) == load_manifest(text.encode()) == manifest
    assert dump_manifest(load_manifest(text)) == text


def sealed(document):
    """Return canonical text of `document` with a right digest: written from docs/format.md, not from our code."""
    lines = {}
    for name in document.keys() - {"digest"}:
        value = json.dumps(document[name], sort_keys=True)
        if name == "shards" and isinstance(document[name], list) and document[name]:
            value = "[\n" + ",\n".join("  " + json.dumps(s, sort_keys=True) for s in document[name]) + "\n ]"
        lines[name] = f" {json.dumps(name)}: {value}"

    def text():
        return "{\n" + ",\n".join(lines[name] for name in sorted(lines)) + "\n}\n"

    lines["digest"] = ' "digest": "xxh3-128:' + xxhash.xxh3_128_hexdigest(text().encode()) + '"'
    return text()


def changed(path, value, manifest=TWO):
    """Return sealed text with the value at `path` replaced, as a forger would do it."""
    document = json.loads(dump_manifest(manifest))
    inner = document
    for step in path[:-1]:
        inner = inner[step]
    inner[path[-1]] = value
    return sealed(document)


def test_the_canonical_form_is_the_documented_one():
    assert sealed(json.loads(dump_manifest(TWO))) == dump_manifest(TWO)


def test_the_digest_is_that_of_the_other_lines():
    lines = dump_manifest(TWO).splitlines(keepends=True)
    (stated,) = [line for line in lines if line.startswith(' "digest":')]
    lines.remove(stated)
    assert stated == f' "digest": "xxh3-128:{xxhash.xxh3_128_hexdigest("".join(lines).encode())}",\n'


def test_every_flipped_bit_is_refused():
    data = dump_manifest(make([shard(0)])).encode()
    for at in range(len(data)):
        for bit in range(8):
            damaged = bytearray(data)
            damaged[at] ^= 1 << bit
            with pytest.raises((ManifestError, UnsupportedVersionError)):
                load_manifest(bytes(damaged))


def test_a_damaged_manifest_says_so():
    data = dump_manifest(make([shard(0)])).replace('"seed": 0', '"seed": 1')
    with pytest.raises(
        ManifestError, match=r"edited or damaged; expected digest 'xxh3-128:\w+'; found xxh3-128:\w+; restore"
    ):
        load_manifest(data)


def test_every_cut_every_lost_byte_and_every_added_byte_is_refused():
    data = dump_manifest(make([shard(0)])).encode()
    for at in range(len(data)):
        for damaged in (
            data[:at],
            data[:at] + data[at + 1 :],
            data[:at] + b" " + data[at:],
            data[:at] + b"\n" + data[at:],
        ):
            with pytest.raises(ManifestError):
                load_manifest(damaged)
    for extra in (b" ", b"\n", b"\0", b"{}"):
        with pytest.raises(ManifestError):
            load_manifest(data + extra)


@pytest.mark.parametrize("name", [f.name for f in dataclasses.fields(Manifest)] + ["format", "generation", "brace"])
def test_a_missing_field_is_refused(name):
    document = json.loads(dump_manifest(TWO))
    del document[name]
    with pytest.raises(ManifestError):
        load_manifest(sealed(document))


def test_an_unknown_field_is_refused():
    for path in (["surplus"], ["totals", "surplus"], ["shards", 0, "surplus"], ["index", "surplus"]):
        with pytest.raises(ManifestError, match="canonical"):
            load_manifest(changed(path, 1))


PLACES = [
    ["shardkit"], ["name"], ["layout"], ["align"], ["digest_algorithm"], ["seed"], ["options"], ["splits"], ["index"],
    ["shards"], ["totals"], ["index", "bytes"], ["index", "digest"], ["shards", 0], ["shards", 1, "name"],
    ["shards", 0, "bytes"], ["shards", 0, "digest"], ["shards", 0, "samples"], ["shards", 0, "index"],
    ["shards", 0, "dali_index", "bytes"], ["shards", 0, "first_key"], ["totals", "samples"], ["totals", "refused"],
    ["splits", "train"], ["splits", "train", 0], ["classes", 0], ["format"], ["format_version"], ["generation"],
    ["brace"],
]  # fmt: skip
WRONG = [None, True, -1, 1.5, 2**64, 10**4000, "\x1b[31m\n", "../x", [], [1], [[]], {}, {"a": [{}]}]


@pytest.mark.parametrize("place", PLACES, ids=lambda place: "-".join(map(str, place)))
def test_a_forged_value_of_a_wrong_type_is_refused(place):
    document = json.loads(dump_manifest(TWO))
    right = document
    for step in place:
        right = right[step]
    free_text = place[-1] in ("shardkit", "first_key") or place == ["classes", 0]
    for value in WRONG:
        allowed = (
            (free_text and isinstance(value, str))
            or (place == ["options"] and isinstance(value, dict))
            or (place[0] == "splits" and value in ([], {}))
        )
        if value != right and not allowed:
            with pytest.raises((ManifestError, UnsupportedVersionError)) as refusal:
                load_manifest(changed(place, value))
            assert str(refusal.value).isprintable()
            assert len(str(refusal.value)) < 400


@pytest.mark.parametrize(
    "name",
    ["", ".tar", "x", "x.tgz", "../x.tar", "/x.tar", "a/b.tar", "a\\b.tar", "a\nb.tar", "a\0.tar", "\x1b[0m.tar",
     ".x.tar", "-x.tar", "a b.tar", "é.tar", "index.tar", "n" * 300 + ".tar", "x.tar/", "x.tar\n", "..",
     "photos-000000.tar"],
)  # fmt: skip
def test_a_shard_name_that_is_no_plain_file_name_or_stands_twice_is_refused(name):
    with pytest.raises(ManifestError, match="name"):
        load_manifest(changed(["shards", 1, "name"], name, make([shard(0), shard(1)])))


@pytest.mark.parametrize("field", ["shards", "samples", "payload", "padding", "bytes", "headers"])
def test_totals_that_are_not_those_of_the_shards_are_refused(field):
    right = getattr(TWO.totals, field)
    with pytest.raises(ManifestError, match=f"{field}.*expected {right}; found {right + 1}"):
        load_manifest(changed(["totals", field], right + 1))


@pytest.mark.parametrize("digest", ["", "0" * 31, "0" * 33, "g" * 32, "A" * 32, " " + "0" * 31, "0" * 64])
@pytest.mark.parametrize("place", [["index"], ["shards", 0], ["shards", 1, "dali_index"]])
def test_a_digest_that_is_none_is_refused(place, digest):
    with pytest.raises(ManifestError, match="not a digest"):
        load_manifest(changed([*place, "digest"], digest))


@pytest.mark.parametrize(
    "text",
    [
        "", " ", "null", "[]", "1", '"x"', "{", "{}", "\ufeff{}", "NaN", '{"a": 1, "a": 1}', '{"a": {"b": 1, "b": 2}}',
        '{"a": NaN}', '{"a": Infinity}', '{"a": -Infinity}', '{"a": 1e999}', '{"a": ' + "9" * 5000 + "}",
        "[" * 100_000, '{"a":' * 100_000, '{"a": ' + "[" * 100_000 + "]" * 100_000 + "}",
        '{"a": "\ud800"}', '{"a": "\\ud800"}',
        '{"format": "shardkit", "format_version": 1, "digest": "' + "x" * 10_000 + '"}',
        '{"format": "shardkit", "format_version": 1e5}', '{"format": "tar", "format_version": 1}',
    ],
    ids=lambda text: text[:30].encode("unicode_escape").decode(),
)  # fmt: skip
def test_bombs_and_what_is_no_manifest_are_refused(text):
    with pytest.raises(ManifestError):
        load_manifest(text)
    with pytest.raises(ManifestError):
        load_manifest(text.encode("utf-8", "surrogatepass"))


@pytest.mark.parametrize("depth", [50, 300, 500, 900, 990, 2000])
def test_nesting_that_python_can_just_read_is_no_crash(depth):
    text = dump_manifest(TWO)
    bomb = text.replace('"options": {', '"options": {"a": ' + "[" * depth + "]" * depth + ", ")
    assert bomb != text
    with pytest.raises(ManifestError):
        load_manifest(bomb)
    body = re.sub(r'^ "digest": .*\n', "", bomb, flags=re.MULTILINE)
    forged = bomb.replace(load_digest(text), "xxh3-128:" + xxhash.xxh3_128_hexdigest(body.encode()))
    try:
        assert load_manifest(forged).shards == TWO.shards
    except ManifestError:
        assert depth > 100


def load_digest(text):
    return json.loads(text)["digest"]


@settings(max_examples=300)
@given(st.binary(max_size=200) | st.text(max_size=200))
def test_any_bytes_or_text_are_refused_and_nothing_else_happens(data):
    with pytest.raises(ManifestError):
        load_manifest(data)


@pytest.mark.parametrize(
    "changes",
    [{"options": {"x": float("nan")}}, {"options": {"x": float("inf")}}, {"align": 1000}, {"layout": "odd"},
     {"digest_algorithm": "md5"}, {"name": "../x"}, {"name": ""}, {"splits": {"train": ["other.tar"]}}],
)  # fmt: skip
def test_what_could_not_be_loaded_is_not_dumped(changes):
    with pytest.raises(ManifestError):
        dump_manifest(make([shard(0)], **changes))


def test_a_newer_format_is_refused_with_the_remedy():
    newer = json.dumps({"format": "shardkit", "format_version": FORMAT_VERSION + 1, "whatever": []})
    with pytest.raises(UnsupportedVersionError, match="upgrade shardkit"):
        load_manifest(newer)


@pytest.mark.parametrize("version", [0, -1, True, False, 1.0, None, "1"])
def test_a_version_that_never_was_is_refused(version):
    with pytest.raises(ManifestError):
        load_manifest(changed(["format_version"], version))


def test_the_generation_is_of_the_content_alone():
    one = TWO.generation
    same = [
        dataclasses.replace(TWO, seed=5), dataclasses.replace(TWO, options={}), dataclasses.replace(TWO, shardkit="9"),
        make([shard(0, index=FileRecord(bytes=1, digest="0" * 32)), shard(1)]),
    ]  # fmt: skip
    other = [
        make([shard(0)]), make([shard(1), shard(0)]), make([shard(0, digest="0" * 32), shard(1)]),
        dataclasses.replace(TWO, classes=["dog", "cat"]), dataclasses.replace(TWO, classes=None),
    ]  # fmt: skip
    assert {manifest.generation for manifest in same} == {one}
    assert len({manifest.generation for manifest in other} | {one}) == len(other) + 1


def test_the_generation_follows_the_documented_rule():
    assert uuid.UUID(TWO.generation).variant == uuid.RFC_4122
    assert uuid.UUID(TWO.generation).version == 8
    content = json.dumps([1, [[s.name, s.digest] for s in TWO.shards], ["cat", "dog"]])
    hexes = xxhash.xxh3_128_hexdigest(content.encode())
    expected = f"{hexes[:8]}-{hexes[8:12]}-8{hexes[13:16]}-8{hexes[17:20]}-{hexes[20:]}"
    assert TWO.generation == expected


NUMBERS = st.lists(st.integers(0, 200), min_size=1, max_size=12, unique=True).map(sorted)


@given(NUMBERS, st.sampled_from(["x-", "a-b-", "data-2024-"]), st.sampled_from([1, 3, 6]))
def test_the_brace_expression_expands_to_the_shards(numbers, prefix, width):
    names = [f"{prefix}{number:0{width}}.tar" for number in numbers]
    assert list(braceexpand.braceexpand(brace_spec(names))) == names


@pytest.mark.parametrize(
    "names", [["a.tar"], ["a.tar", "b.tar"], ["a-1.tar", "b-2.tar"], ["x-1.tar", "x-01.tar"], ["x-2.tar", "x-1.tar"],
              ["x-1.tar", "x.tar"], ["7.tar", "8.tar"]],
)  # fmt: skip
def test_names_without_a_common_number_are_listed(names):
    assert list(braceexpand.braceexpand(brace_spec(names))) == names


def test_no_shards_are_no_brace_expression():
    assert brace_spec([]) == ""


def test_shards_of_another_tool_make_a_manifest():
    names = ["train.tar", "more-1.tar", "2024.01.tar"]
    foreign = make([shard(name=name) for name in names], layout="foreign", align=512)
    assert load_manifest(dump_manifest(foreign)).brace == "{train.tar,more-1.tar,2024.01.tar}"
