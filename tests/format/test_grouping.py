from __future__ import annotations

import io
import itertools
import tarfile

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from shardkit.format.foreign_header import Refusal
from shardkit.format.foreign_member import Member, MemberKind
from shardkit.format.foreign_tar import ForeignTarParser
from shardkit.format.grouping import IMAGE_EXTENSIONS, SampleVerdict, group_members, split_name

V = SampleVerdict


def members_of(*names: str) -> list[Member]:
    """Return members of 100 bytes, as a parser states them; a name with a leading '>' is a link."""
    return [
        Member(
            name=name.lstrip(">"), kind=MemberKind.LINK if name[0] == ">" else MemberKind.FILE, start=at * 1024,
            offset=at * 1024 + 512, size=100, refusal=Refusal.LINK if name[0] == ">" else None,
        )
        for at, name in enumerate(names)
    ]  # fmt: skip


def verdicts_of(*names: str) -> list[tuple[str, set[SampleVerdict]]]:
    return [(sample.key, set(sample.verdicts)) for sample in group_members(members_of(*names))]


NAMES = st.lists(st.sampled_from(["a", "b", "A", ".", "/", "_", "__", "jpg", ".jpg", "é"]), min_size=1, max_size=7)


@settings(max_examples=300)
@example([".//."], tarfile.PAX_FORMAT)
@given(st.lists(NAMES.map("".join), max_size=8), st.sampled_from([tarfile.PAX_FORMAT, tarfile.GNU_FORMAT]))
def test_webdataset_makes_the_same_samples(names, tar_format):
    tariterators = pytest.importorskip("webdataset.tariterators")
    # What our parser refuses, webdataset would take.
    names = [name for name in names if name[0] != "/" and name[-1] != "/" and ".." not in name.split("/")]
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tar_format) as tar:
        for number, name in enumerate(names):
            info = tarfile.TarInfo(name)
            info.size = number + 1
            tar.addfile(info, io.BytesIO(bytes(number + 1)))
    data = out.getvalue()
    parser, members = ForeignTarParser(len(data)), []
    while parser.wanted is not None:
        members.append(parser.feed(data[parser.wanted.offset : parser.wanted.end]))
    ours = [
        (sample.key, {extension: member.size for extension, member in sample.members.items()})
        for sample in group_members(filter(None, members))
    ]
    files = tariterators.tar_file_expander([{"url": "x.tar", "stream": io.BytesIO(data)}])
    samples = tariterators.group_by_keys(files, handler=lambda error: True)
    theirs = [
        (sample["__key__"], {name: len(data) for name, data in sample.items() if name not in ("__key__", "__url__")})
        for sample in samples
    ]
    assert ours == theirs


def test_every_name_is_cut_where_webdataset_cuts_it():
    tariterators = pytest.importorskip("webdataset.tariterators")
    names = ["".join(letters) for length in range(8) for letters in itertools.product("aB./", repeat=length)]
    for name in [*names, "é.É", "a b.jpg", "d/a.tar.gz"]:
        key, extension = tariterators.base_plus_ext(name)
        assert split_name(name) == (None if key is None else (key, extension.lower())), name


def test_a_whole_sample_has_its_image_and_everything_else_beside_it():
    members = members_of("d", "n/1.CLS", "n/1.json", "n/1.JPEG", "n/1.seg.png", "n/1.txt", "n/1.npy", "__meta__/x.jpg")
    (sample,) = group_members(members)
    assert (sample.key, sample.image, sample.usable, sample.verdicts) == ("n/1", "jpeg", True, frozenset())
    assert list(sample.members) == ["cls", "json", "jpeg", "seg.png", "txt", "npy"]
    assert (sample.start, sample.end) == (members[1].start, members[6].end)


CASES = {
    "image alone": (["a.jpg"], [("a", set())]),
    "no image": (["a.cls", "a.txt", "b.png"], [("a", {V.NO_IMAGE}), ("b", set())]),
    "image of another name": (["a.left.jpg"], [("a", {V.NO_IMAGE})]),
    "several images": (["a.webp", "a.png", "a.jpg"], [("a", {V.SEVERAL_IMAGES})]),
    "torn": (["a.jpg", "b.jpg", "a.cls"], [("a", {V.NOT_ADJACENT}), ("b", set()), ("a", {V.NOT_ADJACENT, V.NO_IMAGE})]),
    "torn thrice": (
        ["a.jpg", "b.jpg", "a.cls", "c.jpg", "a.txt"],
        [("a", {V.NOT_ADJACENT}), ("b", set()), ("a", {V.NOT_ADJACENT, V.NO_IMAGE}), ("c", set()),
         ("a", {V.NOT_ADJACENT, V.NO_IMAGE})],
    ),
    "repeated": (["a.jpg", "a.cls", "b.jpg", "a.jpg", "a.cls"],
                 [("a", set()), ("b", set()), ("a", {V.DUPLICATE_KEY})]),
    "repeated in part": (["a.jpg", "a.cls", "b.jpg", "a.jpg"], [("a", set()), ("b", set()), ("a", {V.DUPLICATE_KEY})]),
    "two of an extension": (["a.jpg", "a.JPG"], [("a", {V.DUPLICATE_MEMBER})]),
    "link before": ([">a.cls", "a.jpg"], [("a", {V.REFUSED_MEMBER})]),
    "link behind": (["a.jpg", ">a.cls", "b.jpg"], [("a", {V.REFUSED_MEMBER}), ("b", set())]),
    "link far away": (["a.jpg", "b.jpg", ">a.cls"], [("a", {V.REFUSED_MEMBER}), ("b", set())]),
    "link of another": (["a.jpg", ">b.cls", "a.cls"], [("a", set())]),
    "nothing between": (["a.jpg", "README", "__x__", "a.cls"], [("a", set())]),
    "case of the key counts": (["a.jpg", "A.jpg"], [("a", set()), ("A", set())]),
    "hidden": (["d/a.jpg", "d/.DS_Store", "d/a.cls"],
               [("d/a", {V.NOT_ADJACENT}), ("d/", {V.NO_IMAGE}), ("d/a", {V.NOT_ADJACENT, V.NO_IMAGE})]),
    "empty": ([], []),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_each_case_has_its_verdict(case):
    names, verdicts = CASES[case]
    assert verdicts_of(*names) == verdicts


def test_only_several_images_leave_a_sample_usable():
    for names, _ in CASES.values():
        for sample in group_members(members_of(*names)):
            assert sample.usable == (sample.verdicts in (set(), {V.SEVERAL_IMAGES}))


@pytest.mark.parametrize("present", [("png", "jpg"), ("webp", "jpeg"), ("webp", "png"), ("jpeg", "jpg"), ("webp",)])
def test_one_of_several_images_is_chosen_by_the_stated_order(present):
    (sample,) = group_members(members_of(*(f"a.{extension}" for extension in present)))
    assert sample.image == min(present, key=IMAGE_EXTENSIONS.index)


def test_of_a_repeated_extension_the_first_member_counts():
    (sample,) = group_members(members_of("a.jpg", "a.JPG"))
    assert sample.members["jpg"].start == 0


@given(st.lists(st.sampled_from([f"{key}.{end}" for key in "abc" for end in ("jpg", "png", "cls")]), max_size=12))
def test_usable_samples_have_keys_of_their_own(names):
    samples = group_members(members_of(*names))
    assert [key for key, _ in itertools.groupby(name[0] for name in names)] == [sample.key for sample in samples]
    usable = [sample.key for sample in samples if sample.usable]
    assert len(usable) == len(set(usable))
