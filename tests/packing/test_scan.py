"""A tree becomes sources: what is taken, what it is labelled, what is refused and what is passed over, each by name."""

from __future__ import annotations

import contextlib
import os
import stat
import sys
import time

import pytest

from shardkit.errors import ConfigError, ShardkitError, UnsafeError
from shardkit.packing import scan
from shardkit.packing.classes import number_classes
from shardkit.packing.scan import scan_tree

pytestmark = pytest.mark.timeout(30)  # whatever opens a FIFO waits for ever


def paths(sources):
    return sources.table["path"].to_pylist()


def labels(sources):
    return dict(zip(paths(sources), sources.table["label"].to_pylist(), strict=True))


def reasons(sources):
    return {refusal.path: refusal.reason for refusal in sources.refused}


@pytest.fixture
def scanned(tmp_path, make_options):
    """Return a function: scan `tmp_path/src`."""

    def run(root=None, **options):
        return scan_tree(os.fsencode(root or tmp_path / "src"), make_options(**options))

    return run


# --- classes


def test_the_first_folder_level_is_the_class(plant, scanned):
    plant("cat/a.jpg", "dog/b.jpg", "dog/deep/er/c.jpg")
    sources = scanned()
    assert sources.classes == ("cat", "dog")
    assert labels(sources) == {b"cat/a.jpg": 0, b"dog/b.jpg": 1, b"dog/deep/er/c.jpg": 1}


def test_a_flat_folder_has_no_labels(plant, scanned):
    plant("a.jpg", "b.jpg")
    sources = scanned()
    assert (sources.classes, sources.count_labels().labelled) == (None, False)
    assert labels(sources) == {b"a.jpg": None, b"b.jpg": None}


def test_a_file_beside_the_class_folders_is_refused(plant, scanned):
    plant("cat/a.jpg", "stray.jpg")
    assert reasons(scanned()) == {b"stray.jpg": "no-class"}
    sources = scanned(labels="none")
    assert (reasons(sources), labels(sources)) == ({}, {b"cat/a.jpg": None, b"stray.jpg": None})


def test_labels_dir_takes_a_flat_folder_at_its_word(plant, scanned):
    plant("a.jpg")
    assert reasons(scanned(labels="dir")) == {b"a.jpg": "no-class"}


def test_an_empty_class_keeps_its_number(plant, scanned, tmp_path):
    plant("cat/a.jpg", "dog/b.jpg")
    (tmp_path / "src/cow").mkdir()
    sources = scanned()
    assert sources.classes == ("cat", "cow", "dog")
    assert labels(sources)[b"dog/b.jpg"] == 2


def test_a_class_list_pins_the_numbers(plant, scanned):
    plant("cat/a.jpg", "dog/b.jpg")
    sources = scanned(classes=("zebra", "dog", "cat"))
    assert sources.classes == ("zebra", "dog", "cat")
    assert labels(sources) == {b"cat/a.jpg": 2, b"dog/b.jpg": 1}


def test_a_class_that_the_list_lacks_is_an_error_that_names_it(plant, scanned):
    plant("cat/a.jpg", "d\x1bog/b.jpg")
    with pytest.raises(ConfigError, match=r"found d\\x1bog; add it") as caught:
        scanned(classes=("cat",))
    assert caught.value.exit_code == 2


def test_many_unknown_classes_are_counted():
    with pytest.raises(ConfigError, match="found c0, c1, c2, c3, c4 and 4 more"):
        number_classes([f"c{i}" for i in range(9)], ())


def test_a_class_list_for_a_flat_folder_is_an_error(plant, scanned):
    plant("a.jpg")
    with pytest.raises(ConfigError, match="a class list, but no class folders"):
        scanned(classes=("cat",))


def test_class_names_are_sorted_as_text_and_odd_bytes_are_escaped(plant, scanned):
    plant("b/1.jpg", "B/1.jpg", b"\xff/1.jpg", "100%/1.jpg", "\u00e9/1.jpg")
    assert scanned().classes == ("%FF", "100%25", "B", "b", "\u00e9")


def test_hidden_folders_are_no_classes(plant, scanned):
    plant("cat/a.jpg", ".git/b.jpg", "__MACOSX/c.jpg")
    sources = scanned()
    assert sources.classes == ("cat",)
    assert sources.skipped == {"hidden": 1, "AppleDouble": 1}


def test_a_class_that_appears_while_the_tree_is_walked_is_refused(plant, scanned, jpeg, monkeypatch, tmp_path):
    plant("cat/a.jpg")
    numbered = scan.number_classes

    def late(*arguments):
        plant("dog/b.jpg")
        return numbered(*arguments)

    monkeypatch.setattr(scan, "number_classes", late)
    sources = scanned()
    assert (sources.classes, paths(sources), reasons(sources)) == (("cat",), [b"cat/a.jpg"], {b"dog/b.jpg": "no-class"})


# --- names


@pytest.mark.parametrize("extension", ["jpg", "JPG", "jpeg", "JpEg", "jpe", "JPE", "jfif", "JFIF"])
def test_an_image_is_known_by_its_extension_in_any_case(plant, scanned, extension):
    plant(f"a.b.{extension}")
    assert paths(scanned()) == [f"a.b.{extension}".encode()]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        (".a.jpg", "hidden"), (".jpg", "hidden"), ("._a.jpg", "AppleDouble"), ("Thumbs.db", "Thumbs.db"),
        ("THUMBS.DB", "Thumbs.db"), ("desktop.ini", "Desktop.ini"), ("a.png", ".png"), ("a.TXT", ".txt"),
        ("jpg", "no extension"), ("a.jpg.", "no extension"), ("a.", "no extension"), ("README", "no extension"),
        ("a.jpg\n", "no extension"), ("a.jpg ", "no extension"), ("a.j\x1bpg", "no extension"),
        ("a." + "x" * 13, "no extension"), (b"a.\xff", "no extension"), ("a.jpg~", "no extension"),
    ],
)  # fmt: skip
def test_what_is_no_image_by_name_is_counted_by_kind(plant, scanned, name, kind):
    plant("z.jpg", name)
    sources = scanned()
    assert (paths(sources), dict(sources.skipped)) == ([b"z.jpg"], {kind: 1})


ODD_NAMES = [
    b"two\nlines.jpg", b"\x1b[31mred.jpg", b"\xff\xfe.jpg", b"x" * 251 + b".jpg", b"a.jpg.jpg", b"a..jpg",
    b"__x__.jpg", b" .jpg", b"-rf.jpg", b"*.jpg", b"%41.jpg", b"\\.jpg", b"A.jpg", b"a.jpg",
]  # fmt: skip


def test_odd_names_are_sources_under_their_own_bytes(plant, scanned):
    plant(*ODD_NAMES)
    sources = scanned()
    assert paths(sources) == sorted(ODD_NAMES)
    assert not sources.refused
    assert not sources.skipped


def test_the_order_is_that_of_the_paths_bytes(plant, scanned):
    # A folder's slash counts: "a-b" comes before "a/".
    plant("a/z.jpg", "a-b/a.jpg", "a0/a.jpg", "a/b/c.jpg", "a/B.jpg", "a/\u00e9.jpg", b"a/\xff.jpg")
    found = paths(scanned())
    assert found == sorted(found)
    assert len(found) == 7


def test_the_order_of_the_folder_does_not_matter(plant, scanned, monkeypatch):
    plant(*(f"c{i % 3}/s{i % 2}/{i}.jpg" for i in range(30)), "c0/x.txt", "stray.jpg")
    expected = scanned()
    listed = os.scandir

    @contextlib.contextmanager
    def backwards(path):
        with listed(path) as entries:
            yield iter(sorted(entries, key=lambda entry: entry.name)[::-1])

    monkeypatch.setattr(scan.os, "scandir", backwards)
    found = scanned()
    assert found.table.equals(expected.table)
    assert (found.classes, found.skipped) == (expected.classes, expected.skipped)
    assert reasons(found) == reasons(expected)


def test_size_and_time_are_the_files(plant, scanned):
    path = plant("a.jpg") / "a.jpg"
    os.utime(path, ns=(1, 1_234_567_890_123_456_789))
    row = scanned().table.to_pylist()[0]
    assert (row["size"], row["mtime_ns"]) == (path.stat().st_size, 1_234_567_890_123_456_789)


# --- links


def test_links_inside_are_followed(plant, scanned, tmp_path):
    plant("cat/a.jpg", "dog/b.jpg", "dog/deep/c.jpg")
    (tmp_path / "src/cat/file.jpg").symlink_to("../dog/b.jpg")
    (tmp_path / "src/cat/folder").symlink_to(tmp_path / "src/dog/deep")
    sources = scanned()
    assert labels(sources) == {
        b"cat/a.jpg": 0, b"cat/file.jpg": 0, b"cat/folder/c.jpg": 0, b"dog/b.jpg": 1, b"dog/deep/c.jpg": 1,
    }  # fmt: skip
    assert not sources.refused


def test_the_folder_itself_may_be_a_link(plant, scanned, tmp_path):
    plant("cat/a.jpg")
    (tmp_path / "src/cat/b.jpg").symlink_to("a.jpg")
    (tmp_path / "link").symlink_to("src")
    assert paths(scanned(tmp_path / "link")) == [b"cat/a.jpg", b"cat/b.jpg"]


def test_links_to_outside_are_refused_unless_followed(plant, scanned, tmp_path):
    plant("cat/a.jpg")
    outside = plant("b.jpg", root="src-outside")  # a longer name that starts with the folder's
    (tmp_path / "src/cat/file.jpg").symlink_to(outside / "b.jpg")
    (tmp_path / "src/cat/folder").symlink_to(outside)
    (tmp_path / "src/more").symlink_to(outside)
    sources = scanned()
    assert reasons(sources) == dict.fromkeys([b"cat/file.jpg", b"cat/folder", b"more"], "outside-link")
    assert sources.classes == ("cat",)
    followed = scanned(follow_symlinks=True)
    assert labels(followed) == {b"cat/a.jpg": 0, b"cat/file.jpg": 0, b"cat/folder/b.jpg": 0, b"more/b.jpg": 1}


def test_a_link_that_leads_out_by_way_of_a_link_inside_is_refused(plant, scanned, tmp_path):
    plant("cat/a.jpg")
    outside = plant("b.jpg", root="outside")
    (tmp_path / "src/cat/out").symlink_to(outside)
    (tmp_path / "src/cat/second.jpg").symlink_to("out/b.jpg")
    assert reasons(scanned()) == {b"cat/out": "outside-link", b"cat/second.jpg": "outside-link"}


def test_links_to_nothing_are_refused_or_counted(plant, scanned, tmp_path):
    plant("cat/a.jpg")
    (tmp_path / "src/cat/gone.jpg").symlink_to("nothing.jpg")
    (tmp_path / "src/cat/self.jpg").symlink_to("self.jpg")
    (tmp_path / "src/dog").symlink_to("nowhere")  # perhaps a class: it must not vanish in silence
    sources = scanned()
    assert reasons(sources) == {b"cat/gone.jpg": "broken-link", b"cat/self.jpg": "broken-link"}
    assert sources.skipped == {"broken link": 1}


@pytest.mark.parametrize("follow", [False, True])
@pytest.mark.parametrize("target", [".", "..", "../.."])
def test_loops_are_cut(plant, scanned, tmp_path, target, follow):
    plant("cat/deep/a.jpg")
    (tmp_path / "src/cat/deep/loop").symlink_to(target)
    sources = scanned(follow_symlinks=follow)
    assert paths(sources) == [b"cat/deep/a.jpg"]
    assert reasons(sources) == {b"cat/deep/loop": "broken-link"}


def test_a_loop_by_way_of_outside_is_cut(plant, scanned, tmp_path):
    plant("cat/a.jpg")
    outside = plant("b.jpg", root="outside")
    (tmp_path / "src/cat/out").symlink_to(outside)
    (outside / "back").symlink_to(tmp_path / "src")
    sources = scanned(follow_symlinks=True)
    assert paths(sources) == [b"cat/a.jpg", b"cat/out/b.jpg"]
    assert reasons(sources) == {b"cat/out/back": "broken-link"}


def test_two_folders_that_link_to_each_other_are_cut(plant, scanned, tmp_path):
    plant("a/1.jpg", "b/2.jpg")
    (tmp_path / "src/a/to-b").symlink_to("../b")
    (tmp_path / "src/b/to-a").symlink_to("../a")
    sources = scanned()
    assert paths(sources) == [b"a/1.jpg", b"a/to-b/2.jpg", b"b/2.jpg", b"b/to-a/1.jpg"]
    assert reasons(sources) == {b"a/to-b/to-a": "broken-link", b"b/to-a/to-b": "broken-link"}


def test_a_link_to_itself_at_the_top_is_no_class(plant, scanned, tmp_path):
    plant("a.jpg")
    (tmp_path / "src/all").symlink_to(".")
    (tmp_path / "src/knot").symlink_to("knot")
    sources = scanned()
    assert (paths(sources), sources.count_labels().labelled) == ([b"a.jpg"], False)
    assert reasons(sources) == {b"all": "broken-link"}
    assert sources.skipped == {"broken link": 1}


def test_links_that_multiply_paths_end_in_an_error(tmp_path, scanned):
    # 24 folders, each with two links to the next: sixteen million paths to the last.
    for i in range(24):
        (tmp_path / f"src/{i}").mkdir(parents=True)
        for name in "ab" if i < 23 else "":
            (tmp_path / f"src/{i}/{name}").symlink_to(f"../{i + 1}")
    started = time.monotonic()
    with pytest.raises(UnsafeError, match="symbolic links lead to one folder again and again") as caught:
        scanned()
    assert time.monotonic() - started < 10
    assert caught.value.exit_code == 9


def test_hard_links_are_files(plant, scanned, tmp_path):
    plant("cat/a.jpg")
    os.link(tmp_path / "src/cat/a.jpg", tmp_path / "src/cat/b.jpg")
    assert paths(scanned()) == [b"cat/a.jpg", b"cat/b.jpg"]


# --- what is no file


@contextlib.contextmanager
def opened():
    """Collect the paths that this process opens."""
    seen = []
    _WATCHERS.append(seen)
    try:
        yield seen
    finally:
        _WATCHERS.remove(seen)


_WATCHERS: list[list[object]] = []


def _watch(event, arguments):
    if event == "open":
        for seen in _WATCHERS:
            seen.append(arguments[0])


@pytest.fixture(scope="module", autouse=True)
def audit():
    sys.addaudithook(_watch)  # it cannot be removed


def test_what_is_no_file_is_refused_without_opening(plant, scanned, tmp_path):
    top = plant("cat/a.jpg") / "cat"
    os.mkfifo(top / "fifo.jpg")
    os.mknod(top / "socket.jpg", stat.S_IFSOCK | 0o600)
    (top / "link.jpg").symlink_to("fifo.jpg")
    expected = {b"cat/fifo.jpg": "a FIFO", b"cat/socket.jpg": "a socket", b"cat/link.jpg": "a FIFO"}
    with contextlib.suppress(PermissionError):  # only root may make a device
        os.mknod(top / "device.jpg", stat.S_IFCHR | 0o600, os.makedev(1, 3))
        expected[b"cat/device.jpg"] = "a device"
    with opened() as seen:
        sources = scanned()
        os.close(os.open(top / "a.jpg", os.O_RDONLY))
    assert {r.path: r.detail for r in sources.refused} == expected
    assert set(reasons(sources).values()) == {"not-a-file"}
    assert [os.fspath(path) for path in seen] == [os.fspath(top / "a.jpg")]  # the watcher watches
    assert paths(sources) == [b"cat/a.jpg"]


def test_names_of_other_types_are_taken_with_convert(plant, scanned):
    plant("a/1.png", "a/2.GIF", "a/3.webp", "a/4.jpg", "a/5.tiff")
    assert paths(scanned()) == [b"a/4.jpg"]
    taken = scanned(convert=True)
    assert paths(taken) == [b"a/1.png", b"a/2.GIF", b"a/3.webp", b"a/4.jpg"]
    assert taken.skipped == {".tiff": 1}


def test_a_folder_with_an_images_name_is_a_folder(plant, scanned):
    plant("album.jpg/a.jpg")
    sources = scanned()
    assert (sources.classes, paths(sources)) == (("album.jpg",), [b"album.jpg/a.jpg"])


def test_a_closed_folder_is_refused_by_name(open_folder, unprivileged, jpeg, make_options):
    for name in ("open", "closed"):
        (open_folder / name).mkdir()
        (open_folder / name / "a.jpg").write_bytes(jpeg())
    (open_folder / "closed").chmod(0o600)
    (open_folder / "hidden-class").symlink_to("closed/x")
    with unprivileged():
        sources = scan_tree(os.fsencode(open_folder), make_options())
    assert (paths(sources), sources.classes) == ([b"open/a.jpg"], ("closed", "open"))
    assert reasons(sources) == {b"closed": "unreadable"}


def test_a_file_behind_a_closed_link_is_unreadable_not_missing(open_folder, unprivileged, jpeg, make_options):
    (open_folder / "vault").mkdir()
    (open_folder / "vault/a.jpg").write_bytes(jpeg())
    (open_folder / "b.jpg").symlink_to("vault/a.jpg")
    (open_folder / "vault").chmod(0)
    with unprivileged():
        sources = scan_tree(os.fsencode(open_folder), make_options(labels="none"))
    assert reasons(sources) == {b"b.jpg": "unreadable", b"vault": "unreadable"}


@pytest.mark.parametrize("labels", [None, "none"])
def test_a_source_folder_that_cannot_be_read_is_an_error(open_folder, unprivileged, make_options, labels):
    inner = open_folder / "closed"
    inner.mkdir(mode=0o700)
    inner.chmod(0)
    with unprivileged(), pytest.raises(ShardkitError, match="cannot read the source folder") as caught:
        scan_tree(os.fsencode(inner), make_options(labels=labels))
    assert caught.value.exit_code == 6


# --- depth


def dig(top, depth, length):
    """Make folders in one another and a JPEG in the deepest; return its relative path."""
    names = [f"{i:03d}".ljust(length, "d") for i in range(depth)]
    fd = os.open(top, os.O_RDONLY)
    for name in names:
        os.mkdir(name, dir_fd=fd)
        inner = os.open(name, os.O_RDONLY, dir_fd=fd)
        os.close(fd)
        fd = inner
    file = os.open("leaf.jpg", os.O_WRONLY | os.O_CREAT, dir_fd=fd)
    os.close(file)
    os.close(fd)
    return "/".join([*names, "leaf.jpg"]).encode()


def test_a_path_of_a_hundred_folders_is_walked(plant, scanned, tmp_path):
    plant("a.jpg")
    deep = dig(tmp_path / "src", 110, 8)
    assert sorted(paths(scanned(labels="none"))) == sorted([deep, b"a.jpg"])


def test_a_path_longer_than_the_system_takes_is_refused(plant, scanned, tmp_path):
    plant("a.jpg")
    deep = dig(tmp_path / "src", 24, 200)
    sources = scanned(labels="none")
    assert paths(sources) == [b"a.jpg"]
    ((path, reason),) = reasons(sources).items()
    assert reason == "unreadable"
    assert deep.startswith(path)
    assert "too long" in sources.refused[0].detail


def test_a_tree_costs_little_memory_a_file():
    status = os.stat(__file__)
    rows = scan.SourceRows(scan.TREE_SCHEMA)
    for i in range(100_000):
        rows.add(b"n%08d/n%08d.JPEG" % (i, i), 7, status)
    table = rows.table()
    assert table.num_rows == 100_000
    assert table.nbytes / table.num_rows < 30 + len(b"n00000000/n00000000.JPEG")
    assert all(column.num_chunks == 1 for column in table.columns)
