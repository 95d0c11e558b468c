"""How many batches a decoder works on, and when they are let in: not while a finished one is handed over."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field

import pytest

from shardkit.errors import StorageError
from shardkit.pipeline.run import Run


@dataclass
class Source:
    """Batches are numbers; `ready` says how many may be had without waiting."""

    count: int
    ready: int
    told: list
    fails: bool = False
    given: int = 0

    def get(self, *, wait):
        if not wait and not self.ready:
            return None
        if not self.count:
            if self.fails:
                raise StorageError("a read failed")
            return None
        self.count, self.ready = self.count - 1, max(self.ready - 1, 0)
        self.told.append(("in", self.given))
        self.given += 1
        return self.given - 1

    def check(self):
        pass


@dataclass
class Flying:
    number: int
    told: list = field(repr=False)
    over: bool = True

    def wait(self, look):
        self.told.append(("wait", self.number))
        return self.number


def run_of(told, *, count=9, ready=9, over=True, in_flight=3, fails=False):
    def hand(number):
        told.append(("hand", number))
        return -number

    source = Source(count, ready, told, fails)
    return source, Run(source, lambda number: Flying(number, told, over), in_flight=in_flight, hand=hand)


def test_a_finished_batch_is_handed_over_before_others_are_let_in():
    told = []
    source, run = run_of(told, ready=3)
    assert next(run) == 0
    assert told == [("in", 0), ("in", 1), ("in", 2), ("wait", 0), ("hand", 0)]
    told.clear()
    source.ready = 9
    assert next(run) == -1
    assert told == [("wait", 1), ("hand", 1), ("in", 3), ("in", 4)]


def test_while_a_batch_is_waited_for_the_decoder_has_what_it_can_take():
    told = []
    source, run = run_of(told, ready=0, over=False)
    next(run)
    assert told == [("in", 0), ("wait", 0), ("hand", 0)]  # only one was read
    source.ready, told[:] = 9, []
    next(run)
    assert told == [("in", 1), ("in", 2), ("in", 3), ("wait", 1), ("hand", 1), ("in", 4)]


def test_it_keeps_nothing_of_what_it_gave():
    class Pixels:
        pass

    gone = []
    source = Source(4, 4, [])
    run = Run(source, lambda number: Flying(number, []), in_flight=2, hand=lambda _: Pixels())
    for pixels in run:
        weakref.finalize(pixels, gone.append, 1)
        before = len(gone)
        del pixels
        assert len(gone) == before + 1


@pytest.mark.parametrize("over", [True, False])
def test_all_batches_come_in_order_and_never_more_than_the_decoder_takes(over):
    told, found = [], []
    _, run = run_of(told, over=over)
    for number in run:
        found.append(-number)
        taken = sum(word == "in" for word, _ in told)
        assert taken - len(found) <= 3
    assert found == list(range(9))
    with pytest.raises(StopIteration):
        next(run)


def test_an_error_of_the_source_comes_after_the_batches_before_it():
    told = []
    _, run = run_of(told, count=2, fails=True)
    assert [next(run), next(run)] == [0, -1]
    for _ in range(2):
        with pytest.raises(StorageError):
            next(run)
