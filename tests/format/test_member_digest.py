"""The digest of what stands where depends on the members alone."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardkit.format import member_digest
from shardkit.format.foreign_header import Refusal
from shardkit.format.foreign_member import Member, MemberKind, as_members
from shardkit.format.member_digest import members_digest
from shardkit.format.plain_headers import NAME_BYTES, PlainRun

COLUMNS = st.lists(st.tuples(st.text("ab/.", min_size=1, max_size=5), st.integers(0, 1 << 40), st.integers(0, 1 << 33)),
                   min_size=1, max_size=5).map(
    lambda rows: PlainRun(*(np.array(column, kind) for column, kind in zip(
        zip(*rows, strict=True), (f"S{NAME_BYTES}", np.int64, np.int64), strict=True))))  # fmt: skip
ONE_BY_ONE = st.lists(
    st.builds(
        Member, st.sampled_from(["a.jpg", "é.jpg", "\udcff", "x\0"]), st.sampled_from(MemberKind), st.integers(0, 9),
        st.integers(0, 9), st.integers(0, 9), st.sampled_from([None, Refusal.LINK]),
    ), max_size=4,
)  # fmt: skip


def test_what_is_digested_is_a_line_for_the_file_and_a_text_for_each_member():
    run = PlainRun(np.array([b"a/1.jpg", b"a/1.cls"], f"S{NAME_BYTES}"), np.array([0, 1536]), np.array([700, 1]))
    link = Member("\udcff", MemberKind.LINK, 2560, 3072, 0, Refusal.LINK)
    text = b"9000\nfile 0 512 700 a/1.jpg\0file 1536 2048 1 a/1.cls\0link 2560 3072 0 \xff\0"
    assert members_digest("sha256", 9000, [run, [link]]) == hashlib.sha256(text).hexdigest()


@given(st.lists(st.one_of(COLUMNS, ONE_BY_ONE), max_size=6), st.integers(1, 3))
def test_it_is_the_same_however_members_are_cut_into_runs(runs, together):
    members = [member for run in runs for member in as_members(run)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(member_digest, "_TOGETHER", together)
        found = members_digest("xxh3-128", 1 << 41, runs)
    assert found == members_digest("xxh3-128", 1 << 41, [members])
