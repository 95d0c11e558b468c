"""Samples that are joined all at once are those that are joined one by one."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from shardkit.format import sample_columns
from shardkit.format.foreign_header import Refusal
from shardkit.format.foreign_member import Member, MemberKind, as_members
from shardkit.format.grouping import IMAGE_EXTENSIONS, group_members, sample_parts
from shardkit.format.plain_headers import NAME_BYTES, PlainRun
from shardkit.format.sample_columns import SampleColumns, SampleJoiner, columns_of

SIZES = (100, 0, 512, 513)


def plain_run(names: list[str], start: int = 0) -> PlainRun:
    """Return members as the parser hands them out in columns; sizes differ."""
    sizes = np.array([SIZES[number % len(SIZES)] for number in range(len(names))], np.int64)
    lengths = 512 + (sizes + 511) // 512 * 512
    starts = start + np.concatenate(([0], np.cumsum(lengths)[:-1]))
    return PlainRun(np.array([name.encode() for name in names], np.bytes_), starts, sizes)


def runs_of(names: list[str], lengths: list[int], alone: list[bool]) -> list[list[Member] | PlainRun]:
    """Return members in runs of some lengths; in columns, or one by one."""
    runs, start, turn = [], 0, 0
    while names:
        length, names_now = lengths[turn % len(lengths)], names
        run, names = plain_run(names_now[:length], start), names_now[length:]
        start, turn = run.end, turn + 1
        runs.append(as_members(run) if alone[turn % len(alone)] else run)
    return runs


def shown(found: SampleColumns) -> list[object]:
    """Return everything that columns state, sample by sample."""
    text = lambda value: value.decode() if isinstance(value, bytes) else value  # noqa: E731
    members = [
        (owner, text(name), found.extensions[code], offset, size)
        for owner, name, code, offset, size in zip(
            found.owners, found.names, found.codes, found.offsets, found.sizes, strict=True
        )
    ]
    samples = zip(found.keys, found.starts, found.ends, found.images, found.labels, found.objects, strict=True)
    return [members, [(text(key), *numbers) for key, *numbers in samples], dict(found.obstacles)]


def joined(runs: list[list[Member] | PlainRun]) -> tuple[SampleColumns, SampleJoiner]:
    joiner = SampleJoiner()
    for run in runs:
        joiner.add(run)
    return joiner.columns(IMAGE_EXTENSIONS), joiner


def careful(runs: list[list[Member] | PlainRun]) -> SampleColumns:
    return columns_of(group_members([member for run in runs for member in as_members(run)]))


def went_the_short_way(found: SampleColumns) -> bool:
    return found.names.dtype.kind == "S"


PARTS = ["a", "b", "n/", "./", "__", "_", ".", "/", ".jpg", ".JPG", ".cls", ".json", ".png", ".seg.png", "é",
         "x" * 60, ".x" * 9, ".metadata.json.gz", ".a b", "%"]  # fmt: skip
TEXTS = st.lists(st.sampled_from(PARTS), min_size=1, max_size=4).map("".join)
TIDY = st.lists(st.integers(0, 15), max_size=12, unique=True).map(
    lambda numbers: [f"d.1/{n:03d}{end}" for n in sorted(numbers) for end in (".cls", ".JPG", ".json")[n % 3 :]]
)

MIXED = st.tuples(TIDY, st.lists(TEXTS, max_size=3)).map(lambda two: two[0] + two[1])


def plain(names: list[str]) -> list[str]:
    """Return those that a header of the common kind may have."""
    names = [name[:NAME_BYTES] for name in names]
    return [name for name in names if name.isascii() and ".." not in name and not name.startswith("/")
            and not name.endswith("/")]  # fmt: skip


@settings(max_examples=400)
@given(
    st.one_of(TIDY, st.lists(TEXTS, max_size=12), MIXED),
    st.lists(st.integers(1, 5), min_size=1, max_size=3), st.lists(st.booleans(), min_size=1, max_size=3),
)  # fmt: skip
@example(["a.jpg", "a.jpg"], [5], [False])
@example(["a.jpg", "b.jpg", "a.cls"], [5], [False])
@example(["a.jpg", "a.JPG"], [1], [False])
@example([".a/.b.jpg", "d/.jpg", "e/a.jpg"], [5], [False])
@example(["__a__/b.jpg", "a.jpg"], [5], [True])
@example(["a.jpg.", "b."], [5], [False])
@example(["a.jpg", "bcde."], [5], [False])
@example(["a.png", "a.jpg", "b.jpeg", "b.webp"], [5], [False])
@example(["a.jpg", "xjpg", "b.jpg"], [5], [False])
def test_all_at_once_is_one_by_one(names, lengths, alone):
    runs = runs_of(plain(names), lengths, alone)
    assert shown(joined(runs)[0]) == shown(careful(runs))


@settings(max_examples=200)
@given(
    st.lists(st.tuples(TEXTS, st.sampled_from([*MemberKind]), st.sampled_from([None, None, Refusal.LINK])), max_size=6),
    TIDY, st.integers(0, 6), st.sampled_from(["", "../é.jpg", "x/" * 60 + "y.jpg", "d.1/001.cls", "\udcff.jpg"]),
)  # fmt: skip
@example([("d.1/001.cls", MemberKind.LINK, Refusal.LINK)], ["d.1/001.jpg", "d.1/002.jpg"], 0, "")
@example([("d.1/README", MemberKind.LINK, Refusal.LINK)], ["d.1/001.jpg", "d.1/002.jpg"], 0, "")
def test_members_that_stand_alone_spoil_nothing(odd, names, at, further):
    tidy, between = runs_of(names, [4], [False]), []
    for number, (name, kind, refusal) in enumerate([*odd, *([(further, MemberKind.FILE, None)] if further else [])]):
        start = (1 << 30) + number * 1024
        between.append(Member(name, kind, start, start + 512, 100, refusal))
    runs = [*tidy[:at], between, *tidy[at:]]
    found, joiner = joined(runs)
    assert shown(found) == shown(careful(runs))
    assert joiner.refused == [member for member in between if member.refusal is not None]


@given(st.one_of(TIDY, st.lists(TEXTS, min_size=1, max_size=12)))
def test_the_code_of_each_member_is_that_of_its_extension(names):
    names = plain(names)
    if not names:
        return
    joiner = SampleJoiner()
    codes = joiner.add(plain_run(names))
    if codes is None:
        return
    by_code = {code: extension for extension, code in joiner.extensions.items()}
    parts = [sample_parts(name) for name in names]
    assert [by_code.get(code) for code in codes.tolist()] == [None if part is None else part[1] for part in parts]


@pytest.mark.parametrize(
    "names",
    [
        ["a/1.cls", "a/1.jpg", "a/1.json", "a/2.jpg", "README", "a/3.seg.png", "a/3.JPG"],
        ["./a.v2/1.jpg", "./a.v2/1.json", "./b.jpg"],
        [f"{n}.{end}" for n in range(3000) for end in ("jpg", "json")],
    ],
)
def test_tidy_members_go_the_short_way(names):
    """Else it would be right, and for nothing."""
    for alone in (True, False):
        runs = runs_of(names, [500, 7], [alone])
        found, _ = joined(runs)
        assert went_the_short_way(found)
        assert shown(found) == shown(careful(runs))


def test_more_extensions_than_can_be_told_apart_go_the_careful_way():
    for count in (sample_columns._MOST_EXTENSIONS, sample_columns._MOST_EXTENSIONS + 1):
        names = ["a.jpg", *(f"a.{number}" for number in range(count - 1))]
        runs = runs_of(names, [100], [False])
        found, _ = joined(runs)
        assert went_the_short_way(found) == (count == sample_columns._MOST_EXTENSIONS)
        assert shown(found) == shown(careful(runs))


def test_no_member_is_no_sample():
    assert len(joined([])[0]) == len(columns_of([])) == 0
