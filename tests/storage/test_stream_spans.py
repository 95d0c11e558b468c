"""Spans of a device's stream: at the right time on the host's clock, and nothing at all while nobody records."""

from __future__ import annotations

import time
from time import perf_counter

import pytest

from shardkit.errors import DeviceError
from shardkit.storage import stream_spans
from shardkit.storage.stream_spans import StreamSpans
from shardkit.testing.host_device import HostDevice


def spans_of(tracer):
    return [event for event in tracer.events() if event["ph"] == "X"]


def test_while_nobody_records_no_event_is_timed_and_nothing_is_kept():
    device = HostDevice()
    stream = device.stream()
    spans = StreamSpans(device, stream, "copy")
    begun = spans.begin()
    event = spans.end(begun, "copy")
    with pytest.raises(DeviceError, match="no time"):
        event.since(event)
    spans.note()
    assert begun is None
    assert device.calls == {"stream": 1, "record": 1}


def test_a_span_is_where_the_work_was_on_the_hosts_clock(tracer):
    device, began = HostDevice(7), perf_counter()
    spans = StreamSpans(device, device.stream(), "copy")
    before = perf_counter()
    begun = spans.begin()
    time.sleep(0.05)
    spans.end(begun, "work", step=3, nbytes=9).wait()
    after = perf_counter()
    time.sleep(0.05)  # when it is noted does not matter
    spans.note()
    (span,) = spans_of(tracer)
    assert (span["name"], span["cat"], span["args"]) == ("work", "device", {"step": 3, "bytes": 9})
    assert span["dur"] >= 50_000
    assert (before - began) * 1e6 - 1000 <= span["ts"]
    assert span["ts"] + span["dur"] <= (after - began) * 1e6 + 30_000
    names = {event["args"]["name"] for event in tracer.events() if event["ph"] == "M"}
    assert {"cuda:7", "copy"} <= names


def test_work_that_is_not_done_is_noted_later(tracer):
    device = HostDevice(lazy=True)
    spans = StreamSpans(device, device.stream(), "copy")
    event = spans.end(spans.begin(), "work")
    spans.note()
    assert spans_of(tracer) == []
    event.wait()
    spans.note()
    spans.note()
    assert len(spans_of(tracer)) == 1


def test_streams_of_one_name_are_rows_of_their_own(tracer):
    device = HostDevice()
    both = [StreamSpans(device, device.stream(), "decode") for _ in range(2)]
    for spans in both * 2:
        spans.end(spans.begin(), "decode").wait()
        spans.note()
    rows = [span["tid"] for span in spans_of(tracer)]
    assert len(rows) == 4
    assert len(set(rows)) == 2


@pytest.mark.parametrize(("tied_for_s", "ties"), [(1e9, 1), (-1.0, 3)])
def test_clocks_are_tied_again_after_a_while_and_not_each_time(tracer, monkeypatch, tied_for_s, ties):
    monkeypatch.setattr(stream_spans, "_TIED_FOR_S", tied_for_s)
    device = HostDevice()
    spans = StreamSpans(device, device.stream(), "copy")
    for _ in range(3):
        spans.end(spans.begin(), "work").wait()
        spans.note()
    assert device.calls["synchronize"] == ties * stream_spans._TRIES
    assert device.calls["stream"] == 2
