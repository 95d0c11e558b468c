from __future__ import annotations

import ctypes
import gc
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardkit.errors import CapabilityError, ConfigError, StorageError
from shardkit.storage.buffers import BufferPool

PAGE = 4096


def address(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


@given(st.lists(st.integers(0, 3 << 20), min_size=1, max_size=6))
def test_a_lease_is_page_aligned_writable_and_as_long_as_asked(lengths):
    with BufferPool(64 << 20) as pool:
        leases = [pool.acquire(length) for length in lengths]
        for number, (lease, length) in enumerate(zip(leases, lengths, strict=True)):
            assert (lease.view.nbytes, lease.view.readonly, lease.view.format) == (length, False, "B")
            lease.view[:] = bytes([number]) * length
            assert not length or address(lease.view) % PAGE == 0
        for number, lease in enumerate(leases):  # none lies in another
            assert set(lease.view) <= {number}
            lease.release()
        assert pool.lent_bytes == 0


@given(st.integers(0, 1 << 30))
def test_sizes_are_rounded_up_by_a_page_or_an_eighth_at_most(length):
    with BufferPool(2 << 30) as pool, pool.acquire(length):
        assert length <= pool.lent_bytes < length + max(PAGE + 1, length // 8 + 1)


def test_released_memory_is_lent_again_without_zeroing():
    with BufferPool(8 << 20) as pool:
        with pool.acquire(1 << 20) as lease:
            first = address(lease.view)
            lease.view[:3] = b"abc"
        with pool.acquire((1 << 20) - 5) as lease:
            assert (address(lease.view), bytes(lease.view[:3])) == (first, b"abc")
        assert pool.mapped_bytes == 1 << 20


def test_the_budget_holds_for_what_is_lent_and_what_is_kept():
    with BufferPool(4 << 20) as pool:
        sizes = np.random.default_rng(0).integers(1, 2 << 20, 300).tolist()
        held = []
        for size in sizes:
            while held and pool.lent_bytes + size * 9 // 8 + PAGE > 4 << 20:
                held.pop(0).release()
            held.append(pool.acquire(size, timeout_s=5))
            assert pool.lent_bytes <= pool.mapped_bytes <= pool.budget_bytes
        for lease in held:
            lease.release()


def test_a_full_pool_waits_for_a_release():
    with BufferPool(1 << 20) as pool, ThreadPoolExecutor(1) as threads:
        first = pool.acquire(1 << 20)
        waiting = threads.submit(pool.acquire, 1 << 20, timeout_s=30)
        time.sleep(0.05)
        assert not waiting.done()
        first.release()
        waiting.result(timeout=30).release()


def test_a_wait_ends_with_an_error_that_tells_the_state():
    with BufferPool(1 << 20) as pool, pool.acquire(1 << 20):
        began = time.monotonic()
        with pytest.raises(StorageError, match="expected 4096 bytes; found 1048576 of 1048576 bytes lent, 0 released"):
            pool.acquire(1, timeout_s=0.05)
        assert 0.05 <= time.monotonic() - began < 5
        with pytest.raises(StorageError):
            pool.acquire(1, timeout_s=0)


def test_who_came_first_is_served_first_whatever_its_size():
    with BufferPool(1 << 20) as pool, ThreadPoolExecutor(2) as threads:
        half, rest = pool.acquire(1 << 19), pool.acquire(1 << 19)
        served = list[str]()

        def take(name: str, size: int) -> None:
            with pool.acquire(size, timeout_s=30):
                served.append(name)

        big = threads.submit(take, "big", 1 << 20)
        time.sleep(0.05)
        small = threads.submit(take, "small", 1)
        time.sleep(0.05)
        half.release()  # room for the small one only
        time.sleep(0.05)
        assert served == []
        rest.release()
        big.result(timeout=30)
        small.result(timeout=30)
        assert served == ["big", "small"]


def test_one_that_gives_up_does_not_hold_up_the_next():
    with BufferPool(1 << 20) as pool, ThreadPoolExecutor(2) as threads, pool.acquire(1 << 19):
        big = threads.submit(pool.acquire, 1 << 20, timeout_s=0.2)
        time.sleep(0.05)
        threads.submit(pool.acquire, 1, timeout_s=30).result(timeout=30).release()
        with pytest.raises(StorageError):
            big.result(timeout=30)


def test_close_wakes_who_waits_and_unmaps_what_is_free():
    pool = BufferPool(1 << 20)
    with ThreadPoolExecutor(3) as threads:
        lease = pool.acquire(1 << 20)
        waiting = [threads.submit(pool.acquire, 1) for _ in range(3)]
        time.sleep(0.05)
        pool.close()
        for each in waiting:
            with pytest.raises(ConfigError, match="pool is closed"):
                each.result(timeout=30)
    assert pool.mapped_bytes == 1 << 20
    lease.view[:3] = b"abc"  # a lease outlives the pool's end
    lease.release()
    assert pool.mapped_bytes == 0
    pool.close()
    with pytest.raises(ConfigError, match="pool is closed"):
        pool.acquire(1)


def test_release_may_be_repeated_and_takes_the_view_away():
    with BufferPool(1 << 20) as pool:
        lease = pool.acquire(10)
        view = lease.view
        lease.release()
        lease.release()
        assert (pool.lent_bytes, pool.mapped_bytes) == (0, PAGE)
        with pytest.raises(ConfigError, match="given back"):
            _ = lease.view
        with pytest.raises(ValueError, match="released"):
            view[0]


def test_release_from_many_threads_counts_once():
    def release(lease, start):
        start.wait()
        lease.release()

    with BufferPool(1 << 20) as pool, ThreadPoolExecutor(8) as threads:
        for _ in range(50):
            lease, start = pool.acquire(10), threading.Barrier(8)
            for done in [threads.submit(release, lease, start) for _ in range(8)]:
                done.result(timeout=30)
            assert pool.lent_bytes == 0


@pytest.mark.parametrize("make", [lambda view: view[5:9], lambda view: np.frombuffer(view, np.uint8)])
def test_memory_that_is_still_looked_at_is_not_lent_again(make):
    with BufferPool(1 << 20) as pool:
        lease = pool.acquire(1 << 20)
        lease.view[:10] = b"0123456789"
        kept = make(lease.view)
        lease.release()
        assert pool.mapped_bytes == 1 << 20
        with pytest.raises(StorageError, match="0 of 1048576 bytes lent, 1048576 released but still viewed"):
            pool.acquire(1, timeout_s=0.05)
        assert bytes(kept[-1:]) in (b"8", b"\0")
        del kept
        gc.collect()
        pool.acquire(1 << 20, timeout_s=0).release()


def test_who_waits_notices_that_the_last_view_is_gone():
    with BufferPool(1 << 20) as pool, ThreadPoolExecutor(1) as threads:
        lease = pool.acquire(1 << 20)
        kept = [lease.view[:1]]
        lease.release()
        waiting = threads.submit(pool.acquire, 1 << 20, timeout_s=30)
        time.sleep(0.05)
        assert not waiting.done()
        kept.clear()
        waiting.result(timeout=30).release()


def test_many_threads_share_a_small_budget():
    with BufferPool(1 << 20) as pool, ThreadPoolExecutor(8) as threads:

        def work(seed: int) -> None:
            random = np.random.default_rng(seed)
            for size in random.integers(1, 400_000, 60).tolist():
                with pool.acquire(size, timeout_s=60) as lease:
                    lease.view[:1] = lease.view[-1:] = bytes([seed])
                    time.sleep(0)
                    assert (lease.view[0], lease.view[-1]) == (seed, seed)
                    assert pool.mapped_bytes <= 1 << 20

        for done in [threads.submit(work, seed) for seed in range(8)]:
            done.result(timeout=60)
        assert pool.lent_bytes == 0


def test_a_lease_is_released_after_an_error():
    with BufferPool(1 << 20) as pool:
        with pytest.raises(RuntimeError, match="decode"), pool.acquire(10):
            raise RuntimeError("decode")
        assert pool.lent_bytes == 0


@pytest.mark.parametrize("length", [-1, (1 << 20) + 1])
def test_a_length_that_never_fits_is_refused_at_once(length):
    with BufferPool(1 << 20) as pool, pytest.raises(ConfigError):
        pool.acquire(length)


def test_a_budget_below_a_page_is_refused():
    with pytest.raises(ConfigError, match="at least one page"):
        BufferPool(PAGE - 1)


def test_memory_that_the_system_does_not_have_is_a_matter_of_capability():
    with BufferPool(1 << 62) as pool:
        with pytest.raises(CapabilityError, match="cannot map memory"):
            pool.acquire(1 << 60)
        assert (pool.lent_bytes, pool.mapped_bytes) == (0, 0)
        pool.acquire(1).release()
