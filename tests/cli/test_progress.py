"""The line on a terminal: the same words from every command, and nothing where nobody looks."""

from __future__ import annotations

import re

import pytest

from shardkit.cli._progress import ItemBar, Line


@pytest.fixture
def drawn(capsys):
    """Return a function that returns what was drawn since the last call, the last state of each line."""
    return lambda: [line.split("\r")[-1] for line in capsys.readouterr().err.split("\n")]


def test_a_line_ends_with_what_is_done(drawn):
    with Line("repair", shown=True) as line:
        line.begin(4_000_000)
        line.advance(1_000_000)
        line.note("7 findings")
        line.advance(3_000_000)
    first, rest = drawn()
    assert re.match(r"repair: 100%\|.*\| 4\.00M/4\.00M \[.*B/s, 7 findings\]", first)
    assert rest == ""


def test_a_line_of_files_has_no_total_and_no_thousands(drawn):
    with Line("export", shown=True) as line:
        line.begin(unit=" files", scaled=False)
        line.advance(1200)
    assert drawn()[0].startswith("export: 1200 files [")


@pytest.mark.parametrize(("refused", "told"), [((), "12/20 samples]"), ((3, 1), "12/20 samples, 4 refused]")])
def test_items_are_counted_and_refused_ones_where_somebody_counts_them(drawn, refused, told):
    with ItemBar(True, "pack") as bar:
        bar.begin(20, 1000)
        for number, items in enumerate((5, 7)):
            bar.advance(items, 500, *refused[number : number + 1])
    assert drawn()[0].endswith(told)


def test_a_run_may_begin_anew(drawn):
    with ItemBar(True, "index", "shards") as bar:
        bar.begin(3, 10)
        bar.advance(1, 5)
        bar.begin(2, 10)
        bar.advance(2, 10)
    first, second, rest = drawn()
    assert (first.endswith("1/3 shards]"), second.endswith("2/2 shards]"), rest) == (True, True, "")


def test_nothing_is_drawn_elsewhere(drawn):
    with ItemBar(False, "pack") as bar, Line("verify", shown=False) as line:
        line.begin(3)
        bar.begin(1, 1)
        bar.advance(1, 1, 0)
        line.note("1 findings")
        line.advance(3)
    assert drawn() == [""]
