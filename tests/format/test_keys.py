from __future__ import annotations

import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from shardkit.errors import IndexFormatError
from shardkit.format.keys import MAX_KEY_BYTES, is_safe_key, key_from_path, path_from_source, source_from_path

ANY_PATH = st.binary(min_size=1, max_size=120)
# Bytes that the rule treats specially, so that random draws meet the corners.
TRICKY = st.lists(st.sampled_from([b"-", b"x", b"2", b"E", b"F", b"_", b"/", b".", b"a", b"\xff"]), min_size=1)
TRICKY_PATH = TRICKY.map(b"".join)
LONG_PATH = st.tuples(st.binary(max_size=40), st.integers(60, 200)).map(lambda pair: b"n" * pair[1] + pair[0])
PATH = ANY_PATH | TRICKY_PATH | LONG_PATH


def extensionless(path):
    folder, slash, name = path.rpartition(b"/")
    dot = name.rfind(b".")
    return folder + slash + (name if dot <= 0 else name[:dot])


def unescaped(key):
    return re.sub(rb"-x([0-9A-F]{2})", lambda m: bytes.fromhex(m[1].decode()), key.encode())


def is_hashed(key):
    return re.fullmatch(r".{62}-[0-9a-f]{32}", key) is not None


@given(PATH)
def test_a_key_is_safe_in_every_reader(path):
    key = key_from_path(path)
    assert is_safe_key(key)
    assert re.fullmatch(r"[A-Za-z0-9_/-]{1,95}", key)
    for extension in ("cls", "json", "jpg"):
        member = f"{key}.{extension}"
        assert len(member) <= 100
        assert "" not in member.split("/")
        assert member.rpartition("/")[2].count(".") == 1
        assert not member.rpartition("/")[2].startswith(".")
        assert not re.match(r"__[^/]*__($|/)", member)  # webdataset's rule for what it passes over
        assert not any(re.match(r"__[^/]*__$", part) for part in key.split("/"))


@given(PATH)
def test_a_key_leads_back_to_its_path_without_extension(path):
    key = key_from_path(path)
    assert is_hashed(key) or unescaped(key) == extensionless(path)


@given(PATH, PATH)
@example(b"a-x2Eb.jpg", b"a.b.jpg")
@example(b"a-x2Db.jpg", b"a-b.jpg")
@example(b"-x2Dx2E.jpg", b"-x2E.jpg")
@example(b"__a__.jpg", b"-x5F_a__.jpg")
@example(b"/a.jpg", b"-x2Fa.jpg")
@example(b"a//b.jpg", b"a/b.jpg")
def test_different_paths_have_different_keys(left, right):
    if extensionless(left) != extensionless(right):
        assert key_from_path(left) != key_from_path(right)


@given(LONG_PATH, st.sampled_from([b"", b".jpg", b".JPEG"]))
def test_a_file_that_is_called_like_a_hashed_key_does_not_meet_it(path, extension):
    key = key_from_path(path)
    named_like_it = key.encode() + extension
    if is_hashed(key) and named_like_it != path:
        assert key_from_path(named_like_it) != key


@pytest.mark.parametrize(
    ("path", "key"),
    [
        (b"a.jpg", "a"),
        (b"a.jpeg", "a"),
        (b"a", "a"),
        (b"a.b.jpg", "a-x2Eb"),
        (b"a..jpg", "a-x2E"),
        (b".jpg", "-x2Ejpg"),
        (b"cats/.hidden.jpg", "cats/-x2Ehidden"),
        (b"../a.jpg", "-x2E-x2E/a"),
        (b"/etc/a.jpg", "-x2Fetc/a"),
        (b"cats/", "cats-x2F"),
        (b"a b\n\x1b.jpg", "a-x20b-x0A-x1B"),
        (b"a-x2E.jpg", "a-x2Dx2E"),
        (b"a-x2e.jpg", "a-x2e"),
        (b"a--x2E.jpg", "a--x2Dx2E"),
        (b"__init__.jpg", "-x5F_init__"),
        (b"a/__b__/c.jpg", "a/-x5F_b__/c"),
        (b"___.jpg", "-x5F__"),
        (b"_a/_b.jpg", "_a/_b"),
        (b"a__b__.jpg", "a__b__"),
        ("猫.jpg".encode(), "-xE7-x8C-xAB"),
        (b"n" * 95 + b".jpg", "n" * 95),
        (b"n" * 96 + b".jpg", "n" * 62 + "-4238c6669b9261ff3930386cc17b8172"),
    ],
)
def test_the_rule_by_example(path, key):
    assert key_from_path(path) == key


def test_long_paths_that_differ_only_in_the_extension_do_not_meet():
    assert key_from_path(b"n" * 96 + b".jpg") != key_from_path(b"n" * 96 + b".jpeg")


@pytest.mark.parametrize(
    "key", ["", "/a", "a/", "a//b", "a.b", "a b", "é", "a\n", "n" * 96, "__a", "a/__b__", "a\\b", "a:b", "*"]
)
def test_what_some_reader_takes_otherwise_is_not_safe(key):
    assert not is_safe_key(key)


@pytest.mark.parametrize("key", ["a", "a/b-c_d", "n" * 95, "_a", "a__b__", "-x5F_a__", "0", "A/B/C/9"])
def test_plain_keys_are_safe(key):
    assert is_safe_key(key)
    assert len(key) <= MAX_KEY_BYTES


@given(ANY_PATH | TRICKY_PATH | st.text().map(lambda text: text.encode("utf-8", "surrogatepass")))
@example(b"")
@example(b"100%25.jpg")
@example(b"\xed\xa0\x80")  # a surrogate in UTF-8, which UTF-8 forbids
@example(b"\xc3")
def test_a_source_leads_back_to_its_path(path):
    source = source_from_path(path)
    source.encode("utf-8")  # Arrow and JSON take it
    assert path_from_source(source) == path


@given(st.text())
def test_a_source_that_is_utf8_without_percent_stays_as_it_is(text):
    text = text.replace("%", "")
    assert source_from_path(text.encode()) == text


@given(st.text() | st.text("%0123456789ABCDEFabcdef+- c\u00e9"))
@example("%")
@example("%4")
@example("%41")
@example("%c3")
@example("%+1")
@example("%C3%A9")
@example("\ud800")
def test_a_text_that_is_no_source_is_refused_and_nothing_else_happens(source):
    try:
        path = path_from_source(source)
    except IndexFormatError:
        return
    assert source_from_path(path) == source
