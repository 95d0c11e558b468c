"""Each check is needed: a lie that only it sees, in a dataset whose digests are all right, passes when it is gone."""

from __future__ import annotations

import dataclasses
import json
import warnings
from typing import NamedTuple

import pytest

from shardkit.format.checksum import crc32c
from shardkit.format.dali_index import IndexedMember
from shardkit.format.index import decode_shard_index
from shardkit.format.media_type import MEDIA_TYPES
from shardkit.testing.damage import append, flip_byte
from shardkit.testing.datasets import DraftSample, draft_dataset, draft_shard, tiny_jpeg
from shardkit.verifying import index_checks, run, sample_checks, shard, survey
from shardkit.verifying.report import LEVELS
from shardkit.verifying.run import verify

TABLES = {
    "file": index_checks.FILE_CHECKS,
    "dataset": survey.DATASET_CHECKS,
    "index": index_checks.INDEX_CHECKS,
    "sample": sample_checks.SAMPLE_CHECKS,
    "shard": shard.SHARD_CHECKS,
    "keys": run.KEY_CHECKS,
}


def relay(draft, number, **changes):
    """Lay one shard down again with other keys, labels or images; everything about it is then sealed anew."""
    old = draft.shards[number]
    samples = []
    for place, row in enumerate(old.rows):
        sample = DraftSample(
            key=row.key,
            label=row.label,
            jpeg=bytes(old.tar[row.offset : row.offset + row.size]),
            metadata=json.loads(old.tar[row.json_offset : row.json_offset + row.json_size]),
            source=row.source,
            facts={name: getattr(row, name) for name in sample_facts(row)},
        )
        samples.append(dataclasses.replace(sample, **changes) if place == 1 else sample)
    draft.shards[number] = draft_shard(old.name, samples, draft.align)


def sample_facts(row):
    return row._fields[row._fields.index("width") : row._fields.index("source")]


def a_size_in_the_manifest(draft):
    def lie(record):
        index = record.dali_index
        return dataclasses.replace(record, dali_index=dataclasses.replace(index, bytes=index.bytes + 1))

    draft.records[0] = lie


def a_number_of_refusals(draft):
    draft.refused = 2


def a_batch_too_many(draft):
    draft.dataset_rows[2] = draft.shards[0].rows


def an_index_of_another_shard(draft):
    draft.headers[1] = lambda header: dataclasses.replace(header, digest="xxh3-128:" + "0" * 32)


def two_rows_swapped(draft):
    rows, members = draft.shards[0].rows, draft.shards[0].members
    rows[1], rows[2] = rows[2], rows[1]
    members[1], members[2] = members[2], members[1]


def a_key_with_a_dot(draft):
    relay(draft, 0, key="c/0.1")


def a_label_without_a_class(draft):
    relay(draft, 0, label=12, metadata={"source": draft.shards[0].rows[1].source})


def a_first_key(draft):
    draft.records[1] = lambda record: dataclasses.replace(record, first_key="c/9999")


def a_label_in_the_text_index(draft):
    member = draft.shards[0].members[1][0]
    draft.shards[0].members[1][0] = IndexedMember("cls", member.offset, member.size, "c/0002.cls")


def a_source_in_the_dataset_index(draft):
    rows = list(draft.shards[1].rows)
    rows[1] = rows[1]._replace(source="elsewhere.jpg")
    draft.dataset_rows[1] = rows


def a_time_in_a_header(draft):
    draft.shards[0].tar[draft.shards[0].rows[1].sample_offset + 140] ^= 1


def a_label_in_its_member(draft):
    draft.shards[0].tar[draft.shards[0].rows[1].sample_offset + 512] = ord("9")


def a_byte_of_padding(draft):
    draft.shards[0].tar[draft.shards[0].rows[1].offset - 600] ^= 1


def a_json_member_that_is_a_list(draft):
    row = draft.shards[0].rows[1]
    draft.shards[0].tar[row.json_offset : row.json_offset + row.json_size] = b"[" + b" " * (row.json_size - 2) + b"]"


def a_field_that_stands_twice(draft):
    row = draft.shards[0].rows[1]
    text = b'{"source": 1, "source": "c/0001.jpg"}'.ljust(row.json_size)
    draft.shards[0].tar[row.json_offset : row.json_offset + row.json_size] = text


def another_source_in_its_member(draft):
    draft.shards[0].tar[draft.shards[0].rows[1].json_offset + 12] = ord("d")


def another_class_in_its_member(draft):
    draft.classes = (*draft.classes[:5], "class V", *draft.classes[6:])


def a_source_that_no_path_gives(draft):
    row = draft.shards[0].rows[1]
    relay(draft, 0, source="c/%zz.jpg", metadata={"source": "c/%zz.jpg", "class": f"class {row.label}"})


def shards_out_of_order(draft):
    draft.shards[0].name, draft.shards[1].name = draft.shards[1].name, draft.shards[0].name


def a_shard_of_another_name(draft):
    draft.shards[1].name = "huge-000001.tar"


def a_comment_in_an_image(draft):
    draft.shards[0].tar[draft.shards[0].rows[1].offset + 30] ^= 1  # not a pixel: only the checksum sees it


def an_orientation(draft):
    draft.shards[0].rows[1] = draft.shards[0].rows[1]._replace(orientation=3)


def a_media_type(draft):
    facts = dict.fromkeys(sample_facts(draft.shards[0].rows[1]), 0) | {"media_type": 2, "adobe_transform": -1}
    draft.shards[0].rows[1] = draft.shards[0].rows[1]._replace(**facts)


def an_image_without_a_quantisation_table(draft):
    jpeg = tiny_jpeg(1, 512)
    start = jpeg.index(b"\xff\xdb")
    table = int.from_bytes(jpeg[start + 2 : start + 4], "big") + 2
    relay(draft, 0, jpeg=jpeg[:start] + jpeg[start + table :].replace(b"\xff\xdb", b"\xff\xfe"))


def an_image_of_four_gigapixels(draft):
    jpeg = bytearray(tiny_jpeg(1, 512))
    frame = jpeg.index(b"\xff\xc0") + 5
    jpeg[frame : frame + 4] = (65500).to_bytes(2, "big") * 2
    row = draft.shards[0].rows[1]
    facts = {name: getattr(row, name) for name in sample_facts(row)} | {"width": 65500, "height": 65500}
    relay(draft, 0, jpeg=bytes(jpeg), facts=facts)


def a_byte_after_the_end_blocks(draft):
    draft.shards[0].tar[-1] = 1


def a_key_of_the_other_shard(draft):
    relay(draft, 1, key=draft.shards[0].rows[1].key)


def a_byte_that_arrow_skips(path):
    """Flip a byte of an Arrow file's own padding: it decodes to the same rows and the same header."""
    file = path / "tiny-000000.arrow"
    data = file.read_bytes()
    known = decode_shard_index(data)
    for offset in range(len(data) - 1, 8, -1):
        changed = bytearray(data)
        changed[offset] ^= 1
        try:
            index = decode_shard_index(bytes(changed))
        except ValueError:
            continue
        if index.header == known.header and index.rows.equals(known.rows):
            flip_byte(file, offset)
            return
    raise AssertionError("every byte of the index matters")


def a_shard_that_nobody_named(path):
    (path / "tiny-000009.tar").write_bytes((path / "tiny-000000.tar").read_bytes())


def a_list_that_nobody_named(path):
    (path / "other.idx").write_bytes(b"v1.2 0\n")


def a_zero_at_the_end_of_a_shard(path):
    append(path / "tiny-000001.tar", b"\0")


def a_letter_in_a_json_member(path):
    data = (path / "tiny-000000.tar").read_bytes()
    flip_byte(path / "tiny-000000.tar", data.index(b"picture 1"))


class Lie(NamedTuple):
    table: str
    check: str
    code: str
    tell: object
    sealed: bool = True  # told before the digests are computed

    def __str__(self):
        return f"{self.table}-{self.check}-{self.tell.__name__}"


LIES = [
    Lie("file", "size", "file-size", a_size_in_the_manifest),
    Lie("file", "digest", "file-digest", a_byte_that_arrow_skips, sealed=False),
    Lie("dataset", "extra-files", "extra-file", a_shard_that_nobody_named, sealed=False),
    Lie("dataset", "extra-files", "extra-file", a_list_that_nobody_named, sealed=False),
    Lie("dataset", "names", "shard-name", shards_out_of_order),
    Lie("dataset", "names", "shard-name", a_shard_of_another_name),
    Lie("dataset", "rejected", "rejected-lines", a_number_of_refusals),
    Lie("dataset", "batches", "dataset-index", a_batch_too_many),
    Lie("index", "header", "index-header", an_index_of_another_shard),
    Lie("index", "geometry", "row-geometry", two_rows_swapped),
    Lie("index", "keys", "key-unsafe", a_key_with_a_dot),
    Lie("index", "sources", "source-text", a_source_that_no_path_gives),
    Lie("index", "labels", "label-range", a_label_without_a_class),
    Lie("index", "record", "shard-record", a_first_key),
    Lie("index", "dali-index", "dali-index", a_label_in_the_text_index),
    Lie("index", "dataset-index", "dataset-index", a_source_in_the_dataset_index),
    Lie("sample", "framing", "header", a_time_in_a_header),
    Lie("sample", "framing", "cls", a_label_in_its_member),
    Lie("sample", "framing", "padding", a_byte_of_padding),
    Lie("sample", "json", "json", a_json_member_that_is_a_list),
    Lie("sample", "json", "json", a_field_that_stands_twice),
    Lie("sample", "json", "json", another_source_in_its_member),
    Lie("sample", "json", "json", another_class_in_its_member),
    Lie("sample", "payload", "payload", a_comment_in_an_image),
    Lie("sample", "facts", "facts", an_orientation),
    Lie("sample", "facts", "facts", a_media_type),
    Lie("sample", "decoding", "decode", an_image_without_a_quantisation_table),
    Lie("sample", "decoding", "bomb", an_image_of_four_gigapixels),
    Lie("shard", "size", "shard-size", a_zero_at_the_end_of_a_shard, sealed=False),
    Lie("shard", "tail", "end", a_byte_after_the_end_blocks),
    Lie("shard", "digest", "shard-digest", a_letter_in_a_json_member, sealed=False),
    Lie("keys", "duplicates", "key-duplicate", a_key_of_the_other_shard),
]


@pytest.fixture
def tell(tmp_path):
    def write(lie):
        draft = draft_dataset()
        if lie.sealed:
            lie.tell(draft)
        path = draft.write(tmp_path / "ds")
        if not lie.sealed:
            lie.tell(path)
        return path

    return write


@pytest.mark.parametrize("lie", LIES, ids=str)
def test_a_lie_is_found_by_its_check_alone(monkeypatch, tell, lie):
    path = tell(lie)
    report = verify(path, "decode", jobs=1, direct=False)
    assert report.counts == {lie.code: 1}
    assert report.exit_code == 4
    monkeypatch.delitem(TABLES[lie.table], lie.check)
    assert verify(path, "decode", jobs=1, direct=False).counts == {}


@pytest.mark.parametrize("lie", LIES, ids=str)
def test_a_lie_is_found_from_the_level_of_its_check_on(tell, lie):
    path = tell(lie)
    entry = TABLES[lie.table][lie.check]
    first = LEVELS.index(entry[0] if isinstance(entry, tuple) else "index")
    for number, level in enumerate(LEVELS):
        found = {lie.code: 1} if number >= first else {}
        assert verify(path, level, jobs=1, direct=False).counts == found


def test_every_check_has_its_lie():
    assert {(lie.table, lie.check) for lie in LIES} == {
        (name, check) for name, table in TABLES.items() for check in table
    }


def test_the_kit_lays_down_what_its_rows_say():
    draft = draft_dataset((3, 2), align=512, labels=False)
    for part in draft.shards:
        for row in part.rows:
            assert crc32c(part.tar[row.offset : row.offset + row.size]) == row.crc32c
            assert part.tar[row.sample_offset : row.sample_offset + 11] == f"{row.key}.json".encode()


COLUMNS = [
    {"sample_offset": 512},
    {"sample_size": 512},
    {"offset": 4096},
    {"offset": 2**64 - 1, "sample_offset": 2**64 - 1, "sample_size": 2**64 - 1},
    {"size": 513},
    {"size": 2**32 - 1},
    {"json_offset": 0},
    {"json_offset": 512},
    {"json_size": 2**32 - 1},
    {"label": None},
    {"label": None, "json_offset": 0, "json_size": 0},
]


@pytest.mark.parametrize("columns", COLUMNS, ids=str)
@pytest.mark.parametrize("level", ["index", "decode"])
def test_a_row_that_points_elsewhere_is_found_before_anything_follows_it(tmp_path, columns, level):
    draft = draft_dataset()
    row = draft.shards[0].rows[1]
    assert any(getattr(row, name) != value for name, value in columns.items())
    draft.shards[0].rows[1] = row._replace(**columns)
    draft.records[0] = lambda record: dataclasses.replace(record, payload=1000)  # a sum that no manifest refuses
    report = verify(draft.write(tmp_path / "ds"), level, jobs=1, direct=False)
    assert report.counts["row-geometry"] == 1
    assert set(report.counts) <= {"row-geometry", "dali-index", "shard-record"}
    (finding,) = (finding for finding in report.findings if finding.code == "row-geometry")
    assert (finding.shard, finding.file) == ("tiny-000000.tar", "tiny-000000.arrow")
    assert finding.key in {"c/0001", "c/0002"}


@pytest.mark.parametrize(
    ("columns", "region"), [({"size": 1}, "header"), ({"json_offset": 0, "json_size": 0}, "padding")], ids=str
)
def test_a_row_that_moves_nothing_is_found_in_the_shard(tmp_path, columns, region):
    draft = draft_dataset()
    row = draft.shards[0].rows[1]
    draft.shards[0].rows[1] = row._replace(**columns)
    draft.shards[0].members[1] = [
        IndexedMember(m.extension, m.offset, 1 if m.extension == "jpg" and "size" in columns else m.size, m.name)
        for m in draft.shards[0].members[1]
        if m.extension != "json" or "size" in columns
    ]
    path = draft.write(tmp_path / "ds")
    assert set(verify(path, "index", jobs=1, direct=False).counts) <= {"shard-record"}
    findings = verify(path, "structure", jobs=1, direct=False).findings
    assert (region, "c/0001") in {(finding.region, finding.key) for finding in findings}


@pytest.mark.parametrize("at", [0, -1])
def test_rows_that_leave_a_sample_out_do_not_cover_their_shard(tmp_path, at):
    draft = draft_dataset((12, 2))
    del draft.shards[0].rows[at], draft.shards[0].members[at]
    counts = verify(draft.write(tmp_path / "ds"), jobs=1, direct=False).counts
    assert counts["row-geometry"] == 1


def test_a_label_that_only_the_row_states_is_found_in_the_shard(tmp_path):
    draft = draft_dataset()
    row = draft.shards[0].rows[1]
    draft.shards[0].rows[1] = row._replace(label=row.label + 1)
    finding, other = verify(draft.write(tmp_path / "ds"), "structure", jobs=1, direct=False).findings
    assert (other.code, other.key, other.expected, other.found) == ("json", row.key, "'class 6'", "'class 5'")
    assert (finding.code, finding.key, finding.offset) == ("cls", row.key, row.sample_offset + 512)
    assert (finding.expected, finding.found) == (str(row.label + 1), str(row.label))


@pytest.mark.parametrize(
    "fields",
    [{"samples": 4}, {"payload": 5}, {"padding": 5}, {"first_key": "c/0001"}, {"last_key": "c/0001"}],
    ids=str,
)
def test_every_field_of_a_record_is_held_against_the_rows(tmp_path, fields):
    draft = draft_dataset()
    draft.records[0] = lambda record: dataclasses.replace(record, **fields)
    (finding,) = verify(draft.write(tmp_path / "ds"), "index", jobs=1, direct=False).findings
    assert (finding.code, finding.file, finding.shard) == ("shard-record", "manifest.json", "tiny-000000.tar")
    assert finding.found == next(iter(fields.values()))


@pytest.mark.parametrize(
    "fields", [{"shard": "tiny-000001.tar"}, {"shard_bytes": 10240}, {"digest": "sha256:00"}, {"align": 512}], ids=str
)
def test_every_field_of_an_index_header_is_held_against_the_manifest(tmp_path, fields):
    draft = draft_dataset()
    draft.headers[0] = lambda header: dataclasses.replace(header, **fields)
    assert verify(draft.write(tmp_path / "ds"), "index", jobs=1, direct=False).counts == {"index-header": 1}


@pytest.mark.parametrize(
    ("classes", "counts"), [(None, {}), ((), {"label-range": 3}), (("a", "b"), {"label-range": 2})]
)
def test_labels_are_numbers_of_the_classes_that_the_manifest_lists(tmp_path, classes, counts):
    draft = draft_dataset((3,))
    assert [row.label for row in draft.shards[0].rows] == [0, 5, 10]
    draft.classes = classes
    assert verify(draft.write(tmp_path / "ds"), "index", jobs=1, direct=False).counts == counts


@pytest.mark.parametrize("align", [512, 1024, 4096, 65536, 524288])
@pytest.mark.parametrize("labels", [False, True])
@pytest.mark.parametrize("metadata", [False, True])
@pytest.mark.parametrize("algorithm", ["xxh3-128", "sha256"])
def test_what_the_format_allows_is_found_whole(tmp_path, align, labels, metadata, algorithm):
    draft = draft_dataset((4, 1, 3), align=align, labels=labels, metadata=metadata, algorithm=algorithm)
    path = draft.write(tmp_path / "ds")
    for level in LEVELS:
        report = verify(path, level, jobs=1, direct=False)
        assert (report.exit_code, report.counts, report.samples, report.shards) == (0, {}, 8, 3)


def test_a_payload_that_is_no_jpeg_is_fine_when_its_row_says_so(tmp_path):
    draft = draft_dataset()
    facts = dict.fromkeys(sample_facts(draft.shards[0].rows[1]), 0)
    relay(
        draft,
        0,
        jpeg=b"just some words",
        facts=facts | {"media_type": MEDIA_TYPES.index("text"), "adobe_transform": -1},
    )
    path = draft.write(tmp_path / "ds")
    assert verify(path, jobs=1, direct=False).counts == {}
    assert verify(path, "decode", jobs=1, direct=False).counts == {"decode": 1}


def test_a_warning_of_pillow_is_a_finding(tmp_path):
    draft = draft_dataset()
    jpeg = draft.shards[0].tar[draft.shards[0].rows[1].offset :][: draft.shards[0].rows[1].size]
    pages = (
        b"MPF\0II*\0\x08\0\0\0\x01\0\x00\xb0\x07\0\x04\0\0\0" + b"0100" + bytes(4)
    )  # one entry, and not the ones it needs
    jpeg = jpeg[:2] + b"\xff\xe2" + (len(pages) + 2).to_bytes(2, "big") + pages + jpeg[2:]
    row = draft.shards[0].rows[1]
    relay(draft, 0, jpeg=bytes(jpeg), facts={name: getattr(row, name) for name in sample_facts(row)})
    path = draft.write(tmp_path / "ds")
    assert verify(path, jobs=1, direct=False).counts == {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        (finding,) = verify(path, "decode", jobs=1, direct=False).findings
    assert finding.code == "decode"
    assert "Warning" in finding.found


def test_an_image_that_was_always_bad_does_not_hide_damage_elsewhere(tmp_path):
    draft = draft_dataset(metadata=True)
    an_image_without_a_quantisation_table(draft)
    path = draft.write(tmp_path / "ds")
    assert verify(path, "decode", jobs=1, direct=False).counts == {"decode": 1}
    a_letter_in_a_json_member(path)
    assert verify(path, "decode", jobs=1, direct=False).counts == {"decode": 1, "shard-digest": 1}
