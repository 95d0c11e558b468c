"""Names from an index are not believed: whatever they say, a path below the root comes out, or a reason."""

from __future__ import annotations

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardkit.extracting.names import MAX_PATH_BYTES, class_folders, fault_of, name
from shardkit.format.keys import key_from_path, source_from_path

JPEG = 1


def named(layout="source", *, key="c/k", source="c/s.jpg", folder=(b"c", "c/"), media_type=JPEG):
    return name(layout, key=key, source=source, media_type=media_type, folder=folder)


@pytest.mark.parametrize(
    "path",
    [
        b"", b"/", b"/etc/passwd", b"..", b"../a", b"a/..", b"a/../../b", b".", b"./a", b"a/.", b"a//b", b"a/", b"//a",
        b"a\0b", b"a/" + b"x" * 256, b"x" * 256, b"a/" * 2000 + b"b", b".shardkit/lock", b".shardkit",
    ],
)  # fmt: skip
def test_what_leads_elsewhere_or_cannot_be_a_file_is_refused(path):
    assert fault_of(path)


@pytest.mark.parametrize(
    "path", [b"a", b"...", b"..a/b..", b"a/.shardkit", b"x" * 255, b"\xff\x80", b"a b", b"-rf", b"a\\..\\b", b"~"]
)
def test_what_is_only_odd_is_a_name_like_any_other(path):
    assert fault_of(path) is None
    assert named(source=source_from_path(path)).path == path


@pytest.mark.parametrize("byte", [*range(1, 0x20), 0x7F])
def test_control_bytes_become_text(byte):
    raw, text = b"a%c[31m" % byte, b"a%%%02X[31m" % byte
    source = named(source=source_from_path(raw + b"/" + raw + b".jpg"))
    assert (source.path, source.instead, source.fault) == (text + b"/" + text + b".jpg", True, None)
    (folder,) = class_folders([source_from_path(raw)])
    assert named("class", key=raw.decode(), folder=folder).path == text + b"/" + text + b".jpg"


def test_a_part_that_is_too_long_as_text_gives_way():
    assert named(source=source_from_path(b"\n" * 85)).path == b"%0A" * 85
    assert named(source=source_from_path(b"\n" * 86)).path == b"c/k.jpg"


@pytest.mark.parametrize("source", ["../s.jpg", "/s.jpg", "a%00b.jpg", "%zz", "a%2Eb", "", ".shardkit/x.jpg"])
def test_a_source_that_is_not_safe_or_not_known_gives_way_to_class_and_key(source):
    assert named(source=source).path == b"c/k.jpg"
    assert named(source=source).instead


@pytest.mark.parametrize(
    ("source", "media_type", "path"),
    [("c/a.png", JPEG, b"c/a.jpg"), ("c/a.b.GIF", JPEG, b"c/a.b.jpg"), ("c/a.webp", JPEG, b"c/a.jpg"),
     ("c/a.png", 2, b"c/a.png"), ("c/a.png", None, b"c/a.png"), ("c/a.JPEG", JPEG, b"c/a.JPEG"),
     ("c/a.JPEG", 2, b"c/a.JPEG"), ("c/png", JPEG, b"c/png"), ("c.png/a", JPEG, b"c.png/a")],
)  # fmt: skip
def test_a_jpeg_is_not_called_png(source, media_type, path):
    found = named(source=source, media_type=media_type)
    assert (found.path, found.instead) == (path, path != source.encode())


@pytest.mark.parametrize("start", ["./", "././", "./././"])
def test_a_leading_here_says_nothing_about_the_place(start):
    assert named(source=f"{start}a/s.jpg").path == b"a/s.jpg"
    assert not named(source=f"{start}a/s.jpg").instead
    assert named("class", key=f"{start}k").path == named("class", key=f"{start}c/k").path == b"c/k.jpg"
    assert named("class", key=f"{start}k", folder=None).path == b"k.jpg"


@pytest.mark.parametrize("rest", ["../k", "/k", "a/./k", ".", "a/../k", "./../k"])
def test_what_follows_a_leading_here_must_be_safe_itself(rest):
    assert named(source=f"./{rest}", key=f"./{rest}", folder=None).fault or rest == "."
    assert named(source=f"./{rest}").instead


@pytest.mark.parametrize("key", ["../k", "/k", "a//k", "a\0k", "k" * 256, "a/../../../k"])
def test_a_key_that_is_not_safe_either_is_a_fault(key):
    assert named(source="", key=key).fault
    assert named("class", key=key).fault


@pytest.mark.parametrize(
    ("known", "folder"),
    [("cats", b"cats"), ("100%25", b"100%"), ("a/b", b"a%2Fb"), ("..", b"%2E%2E"), (".", b"%2E"), ("", b"%"),
     ("%FF", b"\xff"), ("50% off", b"50% off"), ("a%00b", b"a%00b"), (".shardkit", b"%2Eshardkit"),
     ("../x", b"..%2Fx"), ("\ud800", b"\xed\xa0\x80")],
)  # fmt: skip
def test_a_class_is_one_folder(known, folder):
    assert class_folders([known])[0][0] == folder
    assert fault_of(folder + b"/k.jpg") is None


@pytest.mark.parametrize("path", [b"cats/tom.jpg", b"two words/tom.jpg", b"100%/a/b.jpg", b"__x/tom.jpg"])
def test_a_class_does_not_stand_twice_in_a_path(path):
    top, _, rest = path.partition(b"/")
    (folder,) = class_folders([source_from_path(top)])
    assert named("class", key=key_from_path(path), folder=folder).path == top + b"/" + rest


def test_the_extension_says_what_the_bytes_are():
    endings = [named("class", media_type=code).path.rpartition(b".")[2] for code in (0, 1, 2, 6, 7, 200)]
    assert endings == [b"bin", b"jpg", b"png", b"tif", b"heic", b"bin"]


_TEXTS = (
    st.text(st.sampled_from([*"ab./%\0~\\-_ \n", "\x1b", "\u00e9", "\udcff", "2", "E", "F"]), max_size=20) | st.text()
)


@given(_TEXTS, _TEXTS, _TEXTS | st.none(), st.sampled_from(["source", "class"]), st.integers(0, 255))
def test_no_texts_lead_out_of_the_root(key, source, known, layout, kind):
    folder = None if known is None else class_folders([known])[0]
    try:
        one = named(layout, key=key, source=source, folder=folder, media_type=kind)
    except UnicodeEncodeError:  # lone surrogates: no index holds them
        return
    if one.fault is not None:
        return
    # The judge is the system's own idea of a path.
    real = os.path.normpath(os.path.join(b"/root", one.path))
    assert real == b"/root/" + one.path
    assert not {*range(0x20), 0x7F} & {*one.path}
    assert len(one.path) <= MAX_PATH_BYTES
    assert all(0 < len(part) <= 255 for part in one.path.split(b"/"))
