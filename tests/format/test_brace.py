"""Brace expressions: bash says what they stand for, and none stands for more than the limit."""

from __future__ import annotations

import subprocess
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardkit.errors import UnsafeError
from shardkit.format.brace import expand_braces

SPECS = [
    "a.tar", "a-{08..10}.tar", "{x,y{1..2}}.tar", "{x}.tar", "{a,b}{1..3}", "{3..1}", "{0..10..5}", "{10..0..-5}", "{a",
    "a}",
    "{a,b", "x{,y}z", "{-2..02}", "{{a,b},{c,d}}", "{{a}}", "{1..1}", "{000..2}", "{a,b}}", "{{a,b}", "x{1..}", "{..2}",
]  # fmt: skip


def bash(spec):
    return subprocess.run(
        ["bash", "-c", f"printf '%s\\n' {spec}"], capture_output=True, text=True, check=True
    ).stdout.split("\n")[:-1]


@pytest.mark.parametrize("spec", SPECS)
def test_names_are_bashs(spec):
    assert expand_braces(spec) == bash(spec)


@settings(max_examples=150, deadline=None)
@given(st.text(alphabet="{},ab.013-", max_size=14))
def test_any_text_stands_for_at_least_one_name_and_ends(spec):
    try:
        names = expand_braces(spec, limit=200)
    except UnsafeError:
        return
    assert 1 <= len(names) <= 200


@pytest.mark.parametrize(
    "spec",
    [
        "{0..99999999999}", "{0..999}" * 5, "{a,b}" * 30, "{" * 50 + "a,b" + "}" * 50, "{a," * 30 + "b" + "}" * 30,
        "{" * 30_000 + "}" * 30_000, "x" * 100_000, "x" * 1000 + "{0..999999}",
    ],
)  # fmt: skip
def test_a_bomb_is_refused_at_once(spec):
    start = time.process_time()
    with pytest.raises(UnsafeError) as caught:
        expand_braces(spec)
    assert caught.value.exit_code == 9
    assert len(str(caught.value)) < 300
    assert time.process_time() - start < 1


def test_the_limit_is_a_number_of_names():
    assert len(expand_braces("{0..9}{0..9}", limit=100)) == 100
    with pytest.raises(UnsafeError):
        expand_braces("{0..9}{0..9}", limit=99)
