from __future__ import annotations

import ctypes
import gc
import itertools
import threading
import time
import tracemalloc
import weakref
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardkit.errors import CapabilityError, ConfigError, StorageError
from shardkit.storage.buffers import BufferPool, aligned_memory
from shardkit.storage.reader import address_of
from shardkit.testing.host_device import POISON, HostDevice

PAGE = 4096


def address(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


@given(st.lists(st.integers(0, 3 << 20), min_size=1, max_size=6))
def test_a_slice_is_page_aligned_writable_and_as_long_as_asked(lengths):
    with BufferPool(64 << 20) as pool:
        views = [pool.acquire(length) for length in lengths]
        for number, (view, length) in enumerate(zip(views, lengths, strict=True)):
            assert (view.nbytes, view.readonly, view.format) == (length, False, "B")
            view[:] = bytes([number]) * length
            assert not length or address(view) % PAGE == 0
        for number, view in enumerate(views):  # none lies in another
            assert set(view) <= {number}
        del view
        views.clear()
        assert pool.lent_bytes == 0


def test_the_ring_is_one_map_that_starts_at_two_mebibytes():
    with BufferPool(5 << 20) as pool:
        first, second = pool.acquire(PAGE), pool.acquire(PAGE)
        start = address(pool.memory)
        assert (start % (2 << 20), pool.memory.nbytes) == (0, 5 << 20)
        assert [address(first) - start, address(second) - start] == [0, PAGE]
        assert (bytes(pool.memory[:1]), first.nbytes) == (b"\0", PAGE)
        first[:2] = b"ab"
        assert bytes(pool.memory[:2]) == b"ab"


def test_slices_start_where_a_reader_wants_them_to():
    with BufferPool(1 << 20, align=64 << 10) as pool:
        views = [pool.acquire(1), pool.acquire(70_000), pool.acquire(1)]
        assert all(address(view) % (64 << 10) == 0 for view in views)
        assert pool.lent_bytes == 256 << 10


def test_a_budget_is_rounded_up_to_a_page():
    with BufferPool(PAGE + 1) as pool:
        assert pool.budget_bytes == pool.memory.nbytes == 2 * PAGE


def test_memory_that_came_back_is_lent_again_first():
    with BufferPool(8 << 20) as pool:
        view = pool.acquire(1 << 20)
        first = address(view)
        view[:3] = b"abc"
        del view
        view = pool.acquire((1 << 20) - 5)
        assert (address(view), bytes(view[:3])) == (first, b"abc")


@given(st.lists(st.tuples(st.integers(1, 40), st.booleans()), max_size=80))
def test_slices_never_overlap_and_the_budget_holds(moves):
    with BufferPool(100 * PAGE) as pool:
        held: list[memoryview] = []
        for pages, drop in moves:
            if drop and held:
                held.pop(pages % len(held))
                continue
            try:
                held.append(pool.acquire(pages * PAGE, timeout_s=0))
            except StorageError:
                continue
            places = sorted((address(view), view.nbytes) for view in held)
            assert all(a + n <= b for (a, n), (b, _) in itertools.pairwise(places))
            assert pool.lent_bytes == sum(view.nbytes for view in held) <= pool.budget_bytes
        held.clear()
        whole = pool.acquire(100 * PAGE, timeout_s=0)  # whatever the order was, it is one run again
        assert whole.nbytes == pool.budget_bytes


def test_a_full_pool_waits_for_memory_to_come_back():
    with BufferPool(1 << 20) as pool, ThreadPoolExecutor(1) as threads:
        held = [pool.acquire(1 << 20)]
        waiting = threads.submit(lambda: pool.acquire(1 << 20, timeout_s=30).nbytes)
        time.sleep(0.05)
        assert not waiting.done()
        held.clear()
        assert waiting.result(timeout=30) == 1 << 20


def test_a_wait_ends_with_an_error_that_tells_the_state():
    with BufferPool(1 << 20) as pool:
        held = pool.acquire(1 << 20)
        began = time.monotonic()
        with pytest.raises(StorageError, match="expected 4096 bytes; found 1048576 of 1048576 bytes are in use"):
            pool.acquire(1, timeout_s=0.05)
        assert 0.05 <= time.monotonic() - began < 5
        with pytest.raises(StorageError):
            pool.acquire(1, timeout_s=0)
        del held


def test_a_large_wish_is_not_starved_by_small_ones():
    with BufferPool(1 << 20) as pool, ThreadPoolExecutor(2) as threads:
        halves, served = [pool.acquire(1 << 19), pool.acquire(1 << 19)], list[str]()

        def take(name: str, size: int) -> None:
            view = pool.acquire(size, timeout_s=30)
            served.append(name)
            del view

        big = threads.submit(take, "big", 1 << 20)
        time.sleep(0.05)
        small = threads.submit(take, "small", 1)
        time.sleep(0.05)
        halves.pop()  # room for the small one only
        time.sleep(0.05)
        assert served == []
        halves.pop()
        big.result(timeout=30)
        small.result(timeout=30)
        assert served == ["big", "small"]


def test_one_that_gives_up_does_not_hold_up_the_next():
    with BufferPool(1 << 20) as pool, ThreadPoolExecutor(2) as threads:
        half = pool.acquire(1 << 19)
        big = threads.submit(pool.acquire, 1 << 20, timeout_s=0.2)
        time.sleep(0.05)
        assert threads.submit(lambda: pool.acquire(1, timeout_s=30).nbytes).result(timeout=30) == 1
        with pytest.raises(StorageError):
            big.result(timeout=30)
        del half


def test_a_wait_for_ones_turn_ends_in_time_too():
    with BufferPool(1 << 20) as pool, ThreadPoolExecutor(1) as threads:
        held = [pool.acquire(1 << 20)]
        first = threads.submit(lambda: pool.acquire(1, timeout_s=30).nbytes)
        time.sleep(0.05)
        with pytest.raises(StorageError, match=r"in 0\.05 s"):
            pool.acquire(1, timeout_s=0.05)
        held.clear()
        assert first.result(timeout=30) == 1


def test_close_wakes_who_waits_and_leaves_what_is_lent():
    pool = BufferPool(1 << 20)
    with ThreadPoolExecutor(3) as threads:
        view = pool.acquire(1 << 20)
        waiting = [threads.submit(pool.acquire, 1) for _ in range(3)]
        time.sleep(0.05)
        pool.close()
        for each in waiting:
            with pytest.raises(ConfigError, match="pool is closed"):
                each.result(timeout=30)
    view[:3] = b"abc"  # it outlives the pool's end
    assert (pool.lent_bytes, bytes(view[:3])) == (1 << 20, b"abc")
    del view
    assert pool.lent_bytes == 0
    pool.close()
    with pytest.raises(ConfigError, match="pool is closed"):
        pool.acquire(1)


def mapped_bytes() -> int:
    with open("/proc/self/statm") as text:
        return int(text.read().split()[0]) * PAGE


def test_the_map_goes_with_the_pool_and_its_last_view():
    before = mapped_bytes()
    pool = BufferPool(1 << 30)
    view = pool.acquire(10)
    pool.close()
    assert mapped_bytes() - before >= 1 << 30
    del view
    assert mapped_bytes() - before < 1 << 29


@pytest.mark.parametrize(
    "make",
    [
        lambda view: view[5:9],
        lambda view: np.frombuffer(view, np.uint8)[5:9],
        lambda view: np.frombuffer(view, np.uint8)[::2].reshape(-1, 8),
        lambda view: (ctypes.c_char * 9).from_buffer(view),
    ],
)
def test_memory_that_is_still_looked_at_is_not_lent_again(make):
    with BufferPool(1 << 20) as pool:
        view = pool.acquire(1 << 20)
        view[:10] = b"0123456789"
        kept = make(view)
        del view
        assert pool.lent_bytes == 1 << 20
        with pytest.raises(StorageError, match="1048576 of 1048576 bytes are in use"):
            pool.acquire(1, timeout_s=0.05)
        del kept
        gc.collect()
        assert pool.acquire(1 << 20, timeout_s=0).nbytes == 1 << 20


def test_many_threads_share_a_small_budget():
    with BufferPool(1 << 20) as pool, ThreadPoolExecutor(8) as threads:

        def work(seed: int) -> None:
            random = np.random.default_rng(seed)
            for size in random.integers(1, 400_000, 60).tolist():
                view = pool.acquire(size, timeout_s=60)
                view[:1] = view[-1:] = bytes([seed])
                time.sleep(0)
                assert (view[0], view[-1]) == (seed, seed)
                assert pool.lent_bytes <= 1 << 20
                del view

        for done in [threads.submit(work, seed) for seed in range(8)]:
            done.result(timeout=60)
        assert pool.lent_bytes == 0


def test_a_loan_may_end_in_a_finaliser_while_another_is_made():
    with BufferPool(8 << 20) as pool:
        stop = threading.Event()

        def churn() -> None:
            while not stop.is_set():
                cycle = [pool.acquire(PAGE, timeout_s=30)]
                cycle.append(cycle)  # only the garbage collector ends this loan

        with ThreadPoolExecutor(2) as threads:
            running = [threads.submit(churn) for _ in range(2)]
            end = time.monotonic() + 1
            while time.monotonic() < end:
                gc.collect()
            stop.set()
            for done in running:
                done.result(timeout=60)
        gc.collect()
        assert pool.lent_bytes == 0


def test_ten_thousand_loans_leave_nothing_behind():
    with BufferPool(1 << 20) as pool:
        pool.acquire(1000)
        tracemalloc.start()
        try:
            for _ in range(10_000):
                pool.acquire(1000)
            kept, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert kept < 10_000


@pytest.mark.parametrize("length", [-1, (1 << 20) + 1])
def test_a_length_that_never_fits_is_refused_at_once(length):
    with BufferPool(1 << 20) as pool, pytest.raises(ConfigError):
        pool.acquire(length)


def test_a_budget_below_a_page_is_refused():
    with pytest.raises(ConfigError, match="at least one page"):
        BufferPool(PAGE - 1)


def test_memory_that_the_system_does_not_have_is_a_matter_of_capability():
    with pytest.raises(CapabilityError, match="cannot map memory"):
        BufferPool(1 << 60)


# Memory of another making


def test_a_pool_of_device_memory_lends_it_and_never_touches_it():
    device = HostDevice()
    with BufferPool(1 << 20, memory=device.memory) as pool:
        views = [pool.acquire(5000), pool.acquire(1)]
        (start,) = device.allocations
        assert [address_of(view) - start for view in views] == [0, 2 * PAGE]
        with pytest.raises(StorageError):
            pool.acquire(1 << 20, timeout_s=0)
        views.clear()
        whole = pool.acquire(1 << 20, timeout_s=0)
        assert set(whole) == {POISON}
    pool.close()
    assert device.allocated_bytes == 1 << 20  # it is still looked at
    del whole
    assert device.allocations == {}


@pytest.mark.parametrize(
    ("asked", "given", "budget"),
    [(8 * PAGE, 8 * PAGE, 8), (8 * PAGE, 9 * PAGE, 8), (8 * PAGE, 5 * PAGE + 1, 5), (PAGE + 1, 8 * PAGE, 2)],
)
def test_the_budget_is_what_was_asked_for_or_what_there_is(asked, given, budget):
    with BufferPool(asked, memory=lambda _: aligned_memory(given, PAGE)) as pool:
        assert pool.budget_bytes == pool.memory.nbytes == budget * PAGE
        assert pool.acquire(budget * PAGE, timeout_s=0).nbytes == budget * PAGE


def test_memory_below_one_slice_is_refused():
    with pytest.raises(ConfigError, match="expected >= 65536; found 40960"):
        BufferPool(1 << 20, align=64 << 10, memory=lambda _: aligned_memory(10 * PAGE, PAGE))


def test_a_pool_asks_for_its_budget_in_whole_slices():
    asked = list[int]()
    BufferPool(100_000, align=64 << 10, memory=lambda size: asked.append(size) or aligned_memory(size, 64 << 10))
    assert asked == [128 << 10]


@pytest.mark.parametrize("size", [0, 1, 5000])
@pytest.mark.parametrize("align", [1, 64, PAGE, 2 << 20])
def test_memory_is_aligned_zeroed_and_writable(size, align):
    memory = aligned_memory(size, align)
    assert (memory.nbytes, memory.readonly, memory.format, address_of(memory) % align) == (size, False, "B", 0)
    assert bytes(memory) == bytes(size)


def test_what_ends_with_memory_ends_before_it_is_unmapped():
    memory = aligned_memory(5 * PAGE, PAGE)
    at, mapped = address_of(memory), list[bool]()

    def is_mapped() -> bool:
        present = (ctypes.c_ubyte * 5)()
        return ctypes.CDLL(None).mincore(ctypes.c_void_p(at), ctypes.c_size_t(5 * PAGE), present) == 0

    weakref.finalize(memory.obj, lambda: mapped.append(is_mapped()))
    part = np.frombuffer(memory, np.uint8)[3:5]
    del memory
    assert mapped == []
    del part
    assert (mapped, is_mapped()) == ([True], False)
