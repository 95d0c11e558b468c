"""Spans: what a trace file says, what stays when there are too many, and what a range costs while nobody records."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from time import perf_counter

import pytest

from shardkit import tracing
from shardkit.errors import ConfigError, StorageError


def spans(tracer):
    return [event for event in tracer.events() if event["ph"] == "X"]


def names(tracer, kind):
    return {event["pid"] if kind == "process_name" else event["tid"]: event["args"]["name"]
            for event in tracer.events() if event["name"] == kind}  # fmt: skip


def test_a_written_trace_is_what_the_format_asks_for(tracer, tmp_path):
    with tracing.ranges("read", step=3, nbytes=4096), tracing.ranges("stage"):
        pass
    tracer.write(tmp_path / "trace.json")
    document = json.loads((tmp_path / "trace.json").read_text())
    assert document["otherData"] == {"spans": 2, "dropped": 0}
    assert all({"ph", "name", "pid", "tid", "args"} <= event.keys() for event in document["traceEvents"])
    outer, inner = (event for event in document["traceEvents"] if event["ph"] == "X")
    assert (outer["name"], outer["args"], outer["pid"]) == ("read", {"step": 3, "bytes": 4096}, os.getpid())
    assert (inner["name"], inner["args"]) == ("stage", {})
    assert 0 <= outer["ts"] <= inner["ts"]
    assert inner["ts"] + inner["dur"] <= outer["ts"] + outer["dur"] + 0.002  # microseconds, rounded to nanoseconds


def test_times_are_microseconds_since_the_start(tracer):
    now = perf_counter()
    tracing.span("past", now, now + 2.5)
    (event,) = spans(tracer)
    assert event["dur"] == 2_500_000
    assert 0 <= event["ts"] < 5_000_000


def test_the_step_of_the_innermost_range_is_known_inside_of_it(tracer):
    found = [tracing.current_step()]
    with tracing.ranges("read", step=3), tracing.ranges("stage"):
        found.append(tracing.current_step())
        with tracing.ranges("other", step=4):
            found.append(tracing.current_step())
        thread = threading.Thread(target=lambda: found.append(tracing.current_step()))
        thread.start()
        thread.join()
        found.append(tracing.current_step())
    assert [*found, tracing.current_step()] == [-1, 3, 4, -1, 3, -1]


def test_no_step_is_known_while_nobody_records():
    with tracing.ranges("read", step=3):
        assert tracing.current_step() == -1


def test_each_thread_is_a_row_with_its_name(tracer):
    def work():
        with tracing.ranges("work"):
            pass

    for name in ("shardkit-one", "shardkit-two"):  # one after the other: the system may give both the same identity
        thread = threading.Thread(target=work, name=name)
        thread.start()
        thread.join()
    rows = names(tracer, "thread_name")
    assert [rows[event["tid"]] for event in spans(tracer)] == ["shardkit-one", "shardkit-two"]


def test_a_span_of_a_device_lies_on_the_time_of_the_host(tracer):
    now = perf_counter()
    clock = tracing.DeviceClock("cuda:1", host_s=now)
    tracing.span("launch", now, now + 0.1)
    tracing.device_span(clock, "finish", "kernel", 0.5, 0.75, step=2, nbytes=9)
    host, device = spans(tracer)
    assert device["ts"] - host["ts"] == pytest.approx(500_000, abs=0.01)
    assert device["dur"] == pytest.approx(250_000, abs=0.01)
    assert device["args"] == {"step": 2, "bytes": 9}
    assert names(tracer, "process_name")[device["pid"]] == "cuda:1"
    assert names(tracer, "thread_name")[device["tid"]] == "finish"
    assert host["pid"] != device["pid"]


def test_the_newest_spans_stay_and_the_lost_ones_are_counted():
    tracer = tracing.start(capacity=10)
    for step in range(25):
        with tracing.ranges("decode", step=step):
            pass
    tracing.stop(tracer)
    assert [event["args"]["step"] for event in spans(tracer)] == list(range(15, 25))
    assert tracer.dropped == 15


def test_a_block_that_raises_is_recorded_and_its_numbers_may_come_late(tracer):
    def read():
        with tracing.ranges("read") as span:
            span.step, span.nbytes = 5, 70
            raise KeyError

    with pytest.raises(KeyError):
        read()
    assert spans(tracer)[0]["args"] == {"step": 5, "bytes": 70}


def test_each_tracer_has_the_spans_of_its_own_time():
    first = tracing.start()
    with tracing.ranges("one"):
        second = tracing.start()
    with tracing.ranges("two"):
        pass
    tracing.stop(first)
    tracing.stop(first)
    assert tracing.active()
    with tracing.ranges("three"):
        pass
    tracing.stop(second)
    assert not tracing.active()
    with tracing.ranges("four"):
        pass
    assert [event["name"] for event in spans(first)] == ["one", "two"]
    assert [event["name"] for event in spans(second)] == ["one", "two", "three"]


def test_threads_record_while_a_trace_is_read():
    tracer, done = tracing.start(capacity=200), threading.Event()

    def work():
        while not done.is_set():
            with tracing.ranges("work"):
                pass

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    try:
        counts = [len(spans(tracer)) for _ in range(20)]
    finally:
        done.set()
        for thread in threads:
            thread.join()
        tracing.stop(tracer)
    assert counts == sorted(counts)


def test_a_trace_that_cannot_be_written_names_the_file(tracer, tmp_path):
    with pytest.raises(StorageError, match=r"cannot write a trace: .*/gone/trace\.json"):
        tracer.write(tmp_path / "gone" / "trace.json")


def test_a_trace_has_room():
    with pytest.raises(ConfigError, match="capacity >= 1"):
        tracing.start(capacity=0)
    assert not tracing.active()


COST = """
from time import perf_counter
from shardkit import tracing

def microseconds(n=20_000):
    start = perf_counter()
    for step in range(n):
        with tracing.ranges("decode", step=step):
            pass
    return (perf_counter() - start) / n * 1e6

off = min(microseconds() for _ in range(15))
tracer = tracing.start()
on = min(microseconds() for _ in range(15))
tracing.stop(tracer)
again = min(microseconds() for _ in range(15))
print(off, on, again)
"""


def test_a_range_costs_next_to_nothing_while_nobody_records():
    off, on, again = map(float, python(COST).split())
    assert off < 0.6  # 0.22 on a quiet machine
    assert again < 0.6
    assert on < 6.0  # about 2 with NVTX, 1.5 without


def test_the_environment_asks_for_nvtx():
    pytest.importorskip("nvtx")
    code = "from shardkit import tracing; print(tracing._nvtx is not None, tracing.ranges('a') is tracing.ranges('a'))"
    assert python(code, SHARDKIT_NVTX="1") == "True False"
    assert python(code, SHARDKIT_NVTX="0") == "False True"
    assert python(code) == "False True"


def test_without_nvtx_spans_are_recorded_all_the_same():
    code = """
import sys
sys.modules["nvtx"] = None  # as if it were not installed
from shardkit import tracing
tracer = tracing.start()
with tracing.ranges("a"):
    pass
print([event["name"] for event in tracer.events() if event["ph"] == "X"])
try:
    tracing.use_nvtx()
except tracing.CapabilityError as error:
    print(error)
"""
    printed = python(code, SHARDKIT_NVTX="1")
    assert printed.startswith("['a']\n")
    assert "pip install nvtx" in printed


def python(code, **environment):
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **environment}, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()
