"""The page as another parser reads it: nothing in it is anybody else's markup, and nothing has no end."""

from __future__ import annotations

import base64
import io
import json
import re
from html.parser import HTMLParser

import numpy as np
import pytest
from PIL import Image

import shardkit
from shardkit.escaping import escape
from shardkit.inspecting import html as html_module
from shardkit.inspecting import page as page_module
from shardkit.inspecting.charts import draw_classes, draw_measure
from shardkit.inspecting.html import attribute, table, text
from shardkit.inspecting.report import Measure
from shardkit.inspecting.thumbnails import THUMBNAIL_PIXELS
from shardkit.testing.damage import flip_byte
from shardkit.testing.datasets import draft_dataset
from shardkit.testing.hostile import HOSTILE_TEXTS

HTML = {
    *(
        "html",
        "head",
        "meta",
        "link",
        "title",
        "style",
        "body",
        "header",
        "main",
        "section",
        "footer",
        "h1",
        "h2",
        "h3",
    ),
    *("p", "div", "span", "small", "code", "bdi", "dl", "dt", "dd", "table", "thead", "tbody", "tr", "th", "td"),
    *("figure", "figcaption", "img", "svg", "g", "path", "text", "defs", "clippath", "rect", "use"),
}
ATTRIBUTES = {
    *("lang", "charset", "http-equiv", "content", "name", "rel", "href", "class", "style", "src", "width", "height"),
    *("alt", "role", "aria-label", "id", "d", "x", "y", "transform", "viewbox", "version", "xmlns", "xmlns:xlink"),
    *("clip-path", "xlink:href"),
}
VOID = {"meta", "link", "img"}


class Reader(HTMLParser):
    """Collects tags, attributes and texts, and checks that every element is closed."""

    def __init__(self):
        super().__init__()
        self.tags, self.attributes, self.texts, self.open, self.images = set(), [], [], [], []

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.attributes += attrs
        if tag == "img":
            self.images.append(dict(attrs))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.add(tag)
        self.attributes += attrs

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)


def read(path):
    reader = Reader()
    reader.feed(path.read_text("utf-8"))
    reader.close()
    assert reader.open == []
    return reader


def test_no_markup_comes_from_the_dataset(hostile_dataset, tmp_path):
    shardkit.inspect(hostile_dataset, html=tmp_path / "page.html", verify="index")
    page = read(tmp_path / "page.html")
    assert page.tags <= HTML
    names = {name for name, _ in page.attributes}
    assert names <= ATTRIBUTES
    for name, value in page.attributes:
        if name in ("src", "href", "xlink:href"):
            assert value.startswith(("data:", "#"))
    assert not re.search(r"url\((?!#)|@import", (tmp_path / "page.html").read_text())
    words = "".join(page.texts)
    alts = "".join(image["alt"] for image in page.images)
    for hostile in HOSTILE_TEXTS:
        assert (hostile if hostile.isprintable() else escape(hostile)) in words
        assert (hostile if hostile.isprintable() else escape(hostile)) in alts


def test_every_control_character_is_written_out(hostile_dataset, tmp_path):
    shardkit.inspect(hostile_dataset, html=tmp_path / "page.html", verify="index")
    page = (tmp_path / "page.html").read_bytes().decode("utf-8")
    assert {character for character in page if not character.isprintable()} <= {"\n"}


def test_the_policy_of_the_page_lets_nothing_in(hostile_dataset, tmp_path):
    shardkit.inspect(hostile_dataset, html=tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', page)[1]
    assert "default-src &#x27;none&#x27;; img-src data:" in policy
    assert "script-src" not in policy


def test_ids_are_unique(hostile_dataset, tmp_path):
    shardkit.inspect(hostile_dataset, html=tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    ids = re.findall(r' id="([^"]*)"', page)
    assert len(ids) == len(set(ids))
    assert set(re.findall(r'url\(#([^)]*)\)|href="#([^"]*)"', page)) <= {(one, "") for one in ids}


def test_thumbnails_are_small_and_what_is_in_the_shards(tmp_path, photo_tree):
    shardkit.pack(photo_tree, tmp_path / "ds", jobs=1)
    shardkit.inspect(tmp_path / "ds", html=tmp_path / "page.html", thumbnails=40)
    sizes = {}
    for path in photo_tree.rglob("*.jpg"):
        with Image.open(path) as image:
            sizes[path.relative_to(photo_tree).with_suffix("").as_posix()] = image.size
    images = read(tmp_path / "page.html").images
    assert len(images) == 40
    for image in images:
        small = Image.open(io.BytesIO(base64.b64decode(image["src"].removeprefix("data:image/jpeg;base64,"))))
        small.load()
        assert small.size == (int(image["width"]), int(image["height"]))
        assert max(small.size) <= THUMBNAIL_PIXELS
        wide, high = sizes[image["alt"].partition(",")[0]]
        assert abs(small.width / small.height - wide / high) < 0.02


def test_a_picture_is_turned_as_its_exif_says(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6
    (tmp_path / "src" / "a").mkdir(parents=True)
    Image.linear_gradient("L").resize((80, 40)).save(tmp_path / "src" / "a" / "x.jpg", exif=exif)
    shardkit.pack(tmp_path / "src", tmp_path / "ds", jobs=1)
    shardkit.inspect(tmp_path / "ds", html=tmp_path / "page.html")
    (image,) = read(tmp_path / "page.html").images
    assert (image["width"], image["height"]) == ("40", "80")
    small = Image.open(io.BytesIO(base64.b64decode(image["src"].partition(",")[2])))
    assert small.getexif().get(0x0112) is None
    assert small.convert("L").getpixel((35, 40)) < 40 < 200 < small.convert("L").getpixel((4, 40))


def test_reasons_do_not_tell_where_the_dataset_lies(tmp_path):
    folder = draft_dataset().write(tmp_path / "secret")
    for shard in folder.glob("*.tar"):
        for offset in range(4096, shard.stat().st_size, 4096):
            flip_byte(shard, offset)
    found = shardkit.inspect(folder, html=tmp_path / "page.html")
    assert found.page.failed == 6
    assert "secret" not in (tmp_path / "page.html").read_text()


def test_an_image_that_pillow_refuses_says_so(tmp_path):
    draft = draft_dataset()
    shard = draft.shards[0]
    row = shard.rows[0]
    shard.tar[row.offset : row.offset + row.size] = b"GIF89a".ljust(row.size, b"\0")
    from shardkit.format.checksum import crc32c

    crc = crc32c(bytes(shard.tar[row.offset : row.offset + row.size]))
    shard.rows[0] = row._replace(crc32c=crc)
    found = shardkit.inspect(draft.write(tmp_path / "ds"), html=tmp_path / "page.html")
    assert found.page.failed == 1
    assert "cannot be decoded: " in (tmp_path / "page.html").read_text()


def test_a_row_that_points_outside_its_shard_says_so(tmp_path):
    draft = draft_dataset()
    draft.shards[0].rows[0] = draft.shards[0].rows[0]._replace(offset=1 << 40)
    found = shardkit.inspect(draft.write(tmp_path / "ds"), html=tmp_path / "page.html")
    assert found.page.failed == 1
    assert "the index points outside its shard" in (tmp_path / "page.html").read_text()


def test_lists_have_an_end_and_say_how_much_is_left(tmp_path, monkeypatch):
    monkeypatch.setattr(page_module, "MAX_ROWS", 3)
    draft = draft_dataset()
    draft.refused = 5
    draft.rejected = b"".join(
        json.dumps({"path": f"p{i}", "reason": f"r{i}", "detail": "d"}).encode() + b"\n" for i in range(5)
    )
    shardkit.inspect(draft.write(tmp_path / "ds"), html=tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert "... and 2 more sources." in page
    assert "... and 3 more classes." in page
    assert ">p2<" in page
    assert ">p3<" not in page
    assert ">r3<" not in page


def bound(thumbnails):
    return 3_000_000 + 45_000 * thumbnails  # docs/inspect.md says so


def test_a_page_of_noise_keeps_its_bound(tmp_path):
    folder = tmp_path / "src" / "a"
    folder.mkdir(parents=True)
    random = np.random.default_rng(0)
    for number in range(20):  # 160 pixels a side: no shrinking makes them smoother
        pixels = random.integers(0, 2, (160, 160, 3)).astype(np.uint8) * 255
        Image.fromarray(pixels).save(folder / f"{number}.jpg", quality=100, subsampling=0)
    shardkit.pack(tmp_path / "src", tmp_path / "ds", jobs=1)
    empty, full = (
        shardkit.inspect(tmp_path / "ds", html=tmp_path / f"{thumbnails}.html", thumbnails=thumbnails).page
        for thumbnails in (0, 20)
    )
    assert (empty.failed, full.failed, full.thumbnails) == (0, 0, 20)
    assert 20 * 10_000 < full.bytes - empty.bytes < bound(20) - bound(0)


def test_a_page_of_long_texts_keeps_its_bound(tmp_path):
    long = "'" * 1000  # six characters each in the page
    draft = draft_dataset((300,))
    for i, row in enumerate(draft.shards[0].rows):
        draft.shards[0].rows[i] = row._replace(key=f"{long}{i}", source=long, label=i)
    draft.classes = tuple(f"{long}{i}" for i in range(300))
    lines = [json.dumps({"path": long, "reason": f"{long}{i}"[::-1], "detail": long}) + "\n" for i in range(300)]
    draft.rejected, draft.refused = "".join(lines).encode(), 300
    folder = draft.write(tmp_path / "ds")
    for thumbnails in (0, 300):
        found = shardkit.inspect(folder, html=tmp_path / f"{thumbnails}.html", thumbnails=thumbnails, verify="index")
        assert found.verification.total_findings > 200
        assert found.page.bytes == (tmp_path / f"{thumbnails}.html").stat().st_size
        assert 1_500_000 < found.page.bytes <= bound(thumbnails)


# --- texts


@pytest.mark.parametrize("hostile", HOSTILE_TEXTS)
def test_texts_and_attributes_cannot_leave_their_place(hostile):
    for made in (text(hostile), attribute(hostile), table((hostile,), [(hostile,)])):
        assert not re.search(r"<(script|img|/style|!--)", made)
    assert '"' not in attribute(hostile)
    assert "'" not in attribute(hostile)


def test_long_texts_are_cut_before_they_are_escaped():
    shown = text("<" * 1000)
    assert shown == "<bdi>" + "&lt;" * (html_module.MAX_TEXT - 1) + "…</bdi>"


# --- charts


def measure(edges, counts):
    return Measure(known=sum(counts), unknown=0, percentiles=(), edges=edges, counts=counts)


@pytest.mark.parametrize(
    ("name", "edges", "counts"),
    [
        ("bytes", (0, 1), (3,)),
        ("bytes", (0, 0), (3,)),
        ("bytes", (1, 2**32 - 1), (3,)),
        ("width", (7, 7), (3,)),
        ("width", (65534, 65535), (3,)),
        ("aspect", (1e-9, 1e9), (3,)),
        ("aspect", (1.0, 1.0), (3,)),
        ("aspect", (1.0, 1.0000001), (3,)),
        ("aspect", (0.1, 1.0, 9.0), (10**12, 1)),
    ],
)
def test_charts_of_any_range(name, edges, counts):
    chart = draw_measure(name, measure(edges, counts), lambda value: f"<{value:g}>")
    assert "var(--bar)" in chart
    assert not re.search(r"#[0-9a-f]{6}\b(?![^(]*\))", chart)
    labels = re.findall(r">(&lt;[^<]*)</text>", chart)
    assert 1 <= len(labels) <= 8


@pytest.mark.parametrize(("samples", "empty"), [([1], 0), ([5, 3, 1], 2), (list(range(3000, 0, -1)), 100_000)])
def test_charts_of_any_number_of_classes(samples, empty):
    chart = draw_classes("classes", samples, empty)
    assert chart.count("var(--bar)") <= 500
    assert len(chart) < 200_000
