"""No byte of a dataset can change, and none can be missing at its end, without a finding that says where."""

from __future__ import annotations

import contextlib
import os
from typing import NamedTuple

import pytest

from shardkit.errors import UnsupportedVersionError
from shardkit.storage.sequential import SequentialReader
from shardkit.testing.damage import append, cut
from shardkit.testing.datasets import draft_dataset
from shardkit.verifying.folder import Folder
from shardkit.verifying.indexes import check_indexes
from shardkit.verifying.report import FindingLog
from shardkit.verifying.run import verify
from shardkit.verifying.shard import check_shard
from shardkit.verifying.survey import load_checked, survey_dataset


class Region(NamedTuple):
    end: int
    code: str
    key: str | None
    start: int | None = None  # where the finding must point; None: at the very byte


def regions_of(shard):
    """Return what the format puts where in a shard of labelled samples with metadata, by the rows alone."""
    for row in shard.rows:
        digits = len(str(row.label))
        yield Region(row.sample_offset + 512, "header", row.key)
        yield Region(row.sample_offset + 512 + digits, "cls", row.key)
        yield Region(row.sample_offset + 1024, "padding", row.key)
        yield Region(row.json_offset, "header", row.key)
        yield Region(row.json_offset + row.json_size, "json", row.key, row.json_offset)
        yield Region(row.offset - 512, "padding", row.key)
        yield Region(row.offset, "header", row.key)
        yield Region(row.offset + row.size, "payload", row.key, row.offset)
        yield Region(row.sample_offset + row.sample_size, "padding", row.key)
    yield Region(len(shard.tar), "end", None)


def damages(path):
    """Yield each offset of a file while one bit of the byte there is inverted."""
    original = path.read_bytes()
    with open(path, "r+b", buffering=0) as file:
        for offset, byte in enumerate(original):
            os.pwrite(file.fileno(), bytes([byte ^ 1 << offset % 8]), offset)
            yield offset
            os.pwrite(file.fileno(), bytes([byte]), offset)
    assert path.read_bytes() == original


@contextlib.contextmanager
def surveyed(path):
    """Yield what verify knows before it looks at the shards of a whole dataset."""
    folder = Folder(str(path), lambda name: SequentialReader(name, direct=False), None)
    survey = survey_dataset(folder, FindingLog())
    with survey.dataset_index:
        yield survey


@pytest.mark.parametrize("number", [0, 1])
def test_every_byte_of_a_shard_is_guarded_and_placed(tmp_path, number):
    draft = draft_dataset((3, 2), align=1024)
    path = draft.write(tmp_path / "ds")
    shard = draft.shards[number]
    with surveyed(path) as survey:
        known = check_indexes(survey, survey.shards[number])
    assert known.log.total == 0
    regions = regions_of(shard)
    region = next(regions)
    for offset in damages(path / shard.name):
        while offset >= region.end:
            region = next(regions)
        (finding,) = check_shard(survey.folder, "checksum", known.facts, known.indexed).findings
        if finding.code == "shard-digest":
            # A json member has no checksum of its own, so a change that leaves it JSON is placed by exclusion.
            assert (region.code, finding.region, finding.file) == ("json", "json", shard.name)
            continue
        at = offset if region.start is None else region.start
        assert (finding.code, finding.file, finding.offset, finding.key) == (region.code, shard.name, at, region.key)
    assert check_shard(survey.folder, "checksum", known.facts, known.indexed).total == 0


def test_every_byte_of_the_arrow_indexes_is_guarded(tmp_path):
    path = draft_dataset((2,), align=1024).write(tmp_path / "ds")
    with surveyed(path) as survey:
        records = {"index.arrow": survey.manifest.index, "tiny-000000.arrow": survey.manifest.shards[0].index}
        for name, record in records.items():
            for offset in damages(path / name):
                log = FindingLog()
                assert load_checked(survey, name, log, record=record, keep=name != "index.arrow") is None
                assert log.counts == {"file-digest": 1}
                if offset % 16 == 0:
                    assert verify(path, "index", jobs=1, direct=False).findings[0].file == name


@pytest.mark.parametrize("name", ["manifest.json", "rejected.jsonl", "tiny-000000.idx"])
def test_every_byte_of_the_text_files_is_guarded(tmp_path, name):
    path = draft_dataset((2,), align=1024).write(tmp_path / "ds")
    for offset in damages(path / name):
        try:
            report = verify(path, "index", jobs=1, direct=False)
        except UnsupportedVersionError:  # a digit of the version became a larger one: no verdict, but no silence
            assert name == "manifest.json"
            continue
        assert report.exit_code == 4, offset
        assert {finding.file for finding in report.findings} == {name}, offset
    assert verify(path, "index", jobs=1, direct=False).exit_code == 0


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("align", [512, 4096])
def test_a_shard_cannot_end_early(tmp_path, number, align):
    draft = draft_dataset((3, 2), align=align)
    path = draft.write(tmp_path / "ds")
    shard = draft.shards[number]
    file = path / shard.name
    whole = bytes(shard.tar)
    sizes = {size for block in range(0, len(whole) + 1, 512) for size in (block - 1, block, block + 1)}
    for size in sorted(size for size in sizes if 0 <= size < len(whole)):
        cut(file, size)
        findings = verify(path, jobs=1, direct=False).findings
        lost = next((row.key for row in shard.rows if row.offset + row.size > size), None)
        assert [(f.code, f.shard, f.offset, f.key) for f in findings] == [("shard-size", shard.name, size, lost)]
        file.write_bytes(whole)


def test_no_other_file_can_end_early(tmp_path):
    path = draft_dataset((2,), align=1024).write(tmp_path / "ds")
    for name in ("index.arrow", "manifest.json", "rejected.jsonl", "tiny-000000.arrow", "tiny-000000.idx"):
        whole = (path / name).read_bytes()
        for size in {0, 1, 511, 512, 513, len(whole) // 2, len(whole) - 1}:
            cut(path / name, min(size, len(whole) - 1))
            report = verify(path, "index", jobs=1, direct=False)
            assert {finding.file for finding in report.findings} == {name}
            (path / name).write_bytes(whole)


@pytest.mark.parametrize(
    "extra", [b"\0", b"x", bytes(512), bytes(10240)], ids=["a zero", "a byte", "a block", "a record"]
)
@pytest.mark.parametrize("level", ["index", "structure", "checksum"])
def test_no_file_can_go_on_after_its_end(tmp_path, extra, level):
    path = draft_dataset((2,), align=1024).write(tmp_path / "ds")
    for entry in sorted(path.iterdir()):
        whole = entry.read_bytes()
        append(entry, extra)
        report = verify(path, level, jobs=1, direct=False)
        assert {finding.file for finding in report.findings} == {entry.name}
        if entry.suffix == ".tar":
            assert report.counts == {"shard-size": 1}
        entry.write_bytes(whole)


def test_a_whole_second_archive_after_the_first_is_seen(tmp_path):
    path = draft_dataset((2, 2), align=1024).write(tmp_path / "ds")
    append(path / "tiny-000000.tar", (path / "tiny-000001.tar").read_bytes())
    assert verify(path, "index", jobs=1, direct=False).counts == {"shard-size": 1}
