"""The page in headless Chromium: nothing fetched, nothing run, every picture there."""

from __future__ import annotations

import base64

import pytest

import shardkit
from shardkit.testing.damage import flip_byte
from shardkit.testing.datasets import draft_dataset

CONTRAST = """(() => {
  const light = text => text.match(/[0-9.]+/g).slice(0, 3).map(Number).map(v => v / 255)
    .map(v => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const paper = light(getComputedStyle(document.body).backgroundColor);
  const ratios = [...document.querySelectorAll('h1, p, dt, dd, td, th, figcaption, svg text, .none')].map(one => {
    const style = getComputedStyle(one);
    const ink = light(one.tagName === 'text' ? style.fill : style.color);
    return (Math.max(ink, paper) + 0.05) / (Math.min(ink, paper) + 0.05);
  });
  return [ratios.length, Math.min(...ratios), paper];
})()"""


@pytest.fixture(scope="module")
def page(tmp_path_factory, photo_tree):
    """A page of real photographs, and one refused source."""
    root = tmp_path_factory.mktemp("page")
    shardkit.pack(photo_tree, root / "ds", jobs=1)
    shardkit.inspect(root / "ds", html=root / "page.html", thumbnails=12)
    return root / "page.html"


def test_every_picture_shows_and_nothing_complains(browser, page):
    shown = browser.open(page)
    assert shown.complaints() == []
    sizes = shown.ask("[...document.images].map(one => [one.complete, one.naturalWidth, one.alt.length])")
    assert len(sizes) == 12
    assert all(complete and width > 0 and alt > 0 for complete, width, alt in sizes)
    charts = shown.ask("[...document.querySelectorAll('svg')].map(one => one.getBoundingClientRect().height)")
    assert len(charts) == 5
    assert min(charts) > 100
    assert shown.ask("document.querySelectorAll('script').length") == 0
    assert shown.ask("document.compatMode") == "CSS1Compat"


def test_bars_are_drawn_in_the_colour_of_the_page(browser, page):
    shown = browser.open(page)
    wanted = "getComputedStyle(document.querySelector('.bar')).backgroundColor"
    fills = "[...document.querySelectorAll('svg path')].map(one => getComputedStyle(one).fill)"
    assert shown.ask(f"{fills}.filter(fill => fill === {wanted}).length") > 20


@pytest.mark.parametrize("dark", [False, True])
def test_it_can_be_read_in_light_and_in_dark(browser, page, dark):
    count, least, paper = browser.open(page, dark=dark).ask(CONTRAST)
    assert count > 50
    assert least >= 4.5  # WCAG 2, level AA
    assert (paper < 0.2) == dark


@pytest.mark.parametrize("width", [320, 390, 1600])
def test_it_fits_the_width_of_a_phone(browser, page, width):
    shown = browser.open(page, width=width)
    assert shown.ask("document.documentElement.scrollWidth") <= width


@pytest.mark.parametrize("width", [320, 1200])
def test_hostile_texts_stay_texts(browser, hostile_dataset, tmp_path, width):
    found = shardkit.inspect(hostile_dataset, html=tmp_path / "page.html", verify="index")
    assert found.verification.total_findings
    shown = browser.open(tmp_path / "page.html", width=width)
    assert shown.complaints() == []
    assert shown.ask("document.images.length") == 12
    foreign = "script, iframe, a, object, embed, form, [onerror], [onmouseover], [srcset], img:not([src^='data:'])"
    assert shown.ask(f'document.querySelectorAll("{foreign}").length') == 0
    assert shown.ask("document.querySelectorAll('main > section').length") == 7
    words = shown.ask("document.body.textContent")
    for told in ("<script>alert(1)</script>", "&lt;b&gt; &amp;", r"\u202egpj.exe\u2066", r"\x1b[31mred", r"\ud800"):
        assert told in words
    assert not set(words) & {*"\u202e\u2066\x07\x1b\x00\x7f\x85"}
    assert shown.ask("document.documentElement.scrollWidth") <= width


def test_what_cannot_be_decoded_says_why(browser, tmp_path):
    folder = draft_dataset().write(tmp_path / "ds")
    with shardkit.open(folder) as dataset:
        offset = int(dataset.columns.numbers("offset")[1])
    flip_byte(folder / "tiny-000000.tar", offset + 30)
    found = shardkit.inspect(folder, html=tmp_path / "page.html")
    assert found.page.failed == 1
    shown = browser.open(tmp_path / "page.html")
    assert shown.complaints() == []
    assert shown.ask("document.images.length") == 5
    assert "an image is not what was packed" in shown.ask("document.querySelector('.none').textContent")


def test_the_browser_sees_what_it_must_not_find(browser, tmp_path):
    dot = base64.b64encode(b"no picture").decode()
    (tmp_path / "bad.html").write_text(
        f'<img src="http://127.0.0.1:9/a.png"><img src="data:image/png;base64,{dot}"><script>nothing()</script>'
        "<script>console.error(1)</script>"
    )
    shown = browser.open(tmp_path / "bad.html")
    complaints = shown.complaints()
    assert any("request: http://127.0.0.1:9/a.png" in one for one in complaints)
    assert any("console" in one for one in complaints)
    assert any("exceptionThrown" in one for one in complaints)
    assert shown.ask("[...document.images].map(one => one.naturalWidth)") == [0, 0]
