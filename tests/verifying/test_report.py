"""What a report says, and that it says the same in the documentation."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import numpy as np
import pytest

from shardkit.format.index import decode_shard_index
from shardkit.testing.damage import flip_byte
from shardkit.testing.datasets import draft_dataset
from shardkit.verifying import report as report_module
from shardkit.verifying.keys import repeated_keys
from shardkit.verifying.report import CODES, LEVELS, MAX_KEPT, TROUBLE, Finding, FindingLog
from shardkit.verifying.rows import Rows
from shardkit.verifying.run import verify

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "verify.md"


def report_of(*codes):
    log = FindingLog()
    for code in codes:
        log.add(Finding(code=code, file="a.tar", message="wrong"))
    return report_module.Report(
        dataset="ds", level="checksum", generation=None, shards=1, samples=1, bytes_read=1, read_path="direct",
        findings=tuple(log.findings), counts=dict(log.counts),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("codes", "exit_code"),
    [
        ((), 0),
        (("read-error",), 6),
        (("changed",), 6),
        (("changed", "read-error"), 6),
        (("payload",), 4),
        (("read-error", "payload", "changed"), 4),
        (("no-manifest",), 4),
    ],
)
def test_damage_outweighs_what_could_not_be_read(codes, exit_code):
    assert report_of(*codes).exit_code == exit_code


@pytest.mark.parametrize("code", sorted(CODES))
def test_every_code_is_damage_or_trouble(code):
    assert report_of(code).exit_code == (6 if code in TROUBLE else 4)
    assert report_of(code).findings[0].damage == (code not in TROUBLE)


def test_all_findings_are_counted_and_the_first_ones_kept():
    told = []
    log = FindingLog(told.append, kept=3)
    other = FindingLog(kept=4)
    for i in range(2):
        log.add(Finding(code="header", file=f"{i}", message=""))
    for i in range(2, 8):
        other.add(Finding(code="payload", file=f"{i}", message=""))
    log.absorb(other)
    log.add(Finding(code="header", file="8", message=""))
    assert log.counts == {"header": 3, "payload": 6}
    assert [finding.file for finding in log.findings] == ["0", "1", "2"]
    assert told == log.findings


def test_more_findings_than_a_report_keeps_are_still_counted(tmp_path, monkeypatch):
    draft = draft_dataset((9, 9))
    path = draft.write(tmp_path / "ds")
    for shard in draft.shards:
        for row in shard.rows:
            flip_byte(path / shard.name, row.offset)
    monkeypatch.setattr(FindingLog.__init__, "__defaults__", (None, 4))
    report = verify(path, jobs=1, direct=False)
    assert (len(report.findings), report.total_findings, report.counts) == (4, 18, {"payload": 18})
    assert MAX_KEPT == 10_000


def test_a_report_is_json_and_the_same_every_time(dataset):
    flip_byte(dataset / "tiny-000001.tar", 20)
    one, other = (json.dumps(verify(dataset, direct=False).to_json(), sort_keys=True) for _ in range(2))
    assert one == other
    document = json.loads(one)
    assert document["findings"][0]["code"] == "header"
    assert document["exit_code"] == 4


def test_a_finding_is_one_printable_line_whatever_the_names_are():
    finding = Finding(
        code="header",
        file="a\x1b[31m\n.tar",
        key="\u202ekey",
        message="wrong",
        offset=7,
        region="header",
        expected="this",
        found=3,
    )
    assert str(finding) == ("header: a\\x1b[31m\\n.tar:7 [sample \\u202ekey] header: wrong; expected this; found 3")


def test_names_from_a_hostile_shard_are_escaped_in_every_text(tmp_path):
    draft = draft_dataset()
    row = draft.shards[0].rows[1]
    draft.shards[0].tar[row.sample_offset : row.sample_offset + 4] = b"\x1b[2J"
    draft.shards[0].tar[row.json_offset : row.json_offset + 4] = b"\x1b]0;"
    path = draft.write(tmp_path / "ds")
    (path / "\x1b[31m.tar").write_bytes(b"")
    report = verify(path, jobs=1, direct=False)
    assert report.counts == {"extra-file": 1, "header": 1, "json": 1}
    assert all(str(finding).isprintable() for finding in report.findings)


def table(heading):
    """Return the first cells of the table under a heading of the page, without their code marks."""
    section = re.search(rf"^## {re.escape(heading)}$(.*?)(?=^## |\Z)", PAGE.read_text(), re.M | re.S)[1]
    return re.findall(r"^\| `([^`]+)`", section, re.M)


def test_the_page_lists_every_level_and_code():
    assert table("Levels") == list(LEVELS)
    assert sorted(table("Findings")) == sorted(CODES)


def test_the_page_lists_every_field_of_the_json_report(dataset):
    document = verify(dataset).to_json()
    fields = [*document, "seconds", *(f"findings[].{field.name}" for field in dataclasses.fields(Finding))]
    assert table("The JSON report") == fields


def test_equal_hashes_of_different_keys_are_no_repetition():
    draft = draft_dataset((2, 2))
    rows = [Rows(decode_shard_index(draft.files()[f"tiny-00000{i}.arrow"]).rows) for i in (0, 1)]
    names = [shard.name for shard in draft.shards]
    alike = [np.zeros(2, np.int64)] * 2
    assert list(repeated_keys(names, alike, rows.__getitem__)) == []
    twice = list(repeated_keys(names, alike, lambda _: rows[0]))
    assert [(finding.shard, finding.key) for finding in twice] == [(names[1], "c/0000"), (names[1], "c/0001")]
    assert list(repeated_keys([], [], rows.__getitem__)) == []
