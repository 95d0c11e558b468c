"""Which rows there are, what they are called, and that a row survives the way to its process."""

from __future__ import annotations

import json

import pytest

from shardkit.benching.case import KINDS, SHUFFLES, Case, plan, split_usable


def names(cases):
    return [case.name for case in cases]


def test_pipelines_are_every_way_with_every_decoder_in_every_order_and_auto():
    cases = plan(["pipeline"], device="cpu")
    assert len(cases) == (3 * 2 + 1) * len(SHUFFLES)
    assert names(cases)[:3] == ["auto, auto, none", "buffered, dali, none", "buffered, cpu, none"]
    assert len(plan(["pipeline"], device="cuda:1")) == (4 * 2 + 1) * len(SHUFFLES)
    assert {case.decoder for case in plan(["pipeline"], device="cuda")} == {"auto", "nvjpeg", "dali"}


def test_what_is_named_is_all_there_is():
    cases = plan(["read", "pipeline"], device="cpu", io=("direct",), decoders=("cpu",), shuffles=("window",), threads=3)
    assert names(cases) == ["direct, window", "direct, cpu, window, 3 threads"]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_kind_has_rows_and_no_two_have_one_name(device):
    for kind in KINDS:
        cases = plan([kind], device=device)
        assert cases
        assert {case.kind for case in cases} == {kind}
    cases = plan(KINDS, device=device)
    assert len({(case.kind, case.name) for case in cases}) == len(cases)


def test_the_rival_runs_with_several_numbers_of_threads_on_a_gpu():
    assert [case.threads for case in plan(["rival"], device="cuda")] == [2, 4, 8]
    assert [case.threads for case in plan(["rival"], device="cpu")] == [0]
    assert [case.threads for case in plan(["rival"], device="cuda", threads=5)] == [5]


def test_a_row_comes_back_from_json():
    options = (("cache_gpu", "16GiB"), ("staging", "pinned"))
    cases = [*plan(KINDS, device="cuda"), Case(kind="pipeline", io="gds", options=options)]
    for case in cases:
        assert Case.from_json(json.loads(json.dumps(case.to_json()))) == case
    assert cases[-1].name == "gds, cache_gpu=16GiB, staging=pinned"


def test_what_cannot_be_had_is_told_by_way_decoder_or_kind():
    cases = plan(["read", "decode", "pipeline", "train"], device="cpu", shuffles=("none",))
    refusals = {"uring": "no rings", "dali": "no DALI", "train": "no GPU"}
    usable, refused = split_usable(cases, refusals)
    assert [*usable, *refused] != []
    assert {case.name for case in usable} == {
        "auto, none", "buffered, none", "direct, none", "cpu", "auto, auto, none", "buffered, cpu, none",
        "direct, cpu, none",
    }  # fmt: skip
    assert {case.kind for case, why in refused.items() if why == "no GPU"} == {"train"}
    assert set(cases) == {*usable, *refused}
