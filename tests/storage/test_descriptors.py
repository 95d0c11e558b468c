from __future__ import annotations

import os
import resource

import pytest

from shardkit.errors import CapabilityError
from shardkit.storage.descriptors import DescriptorCache, default_max_open
from shardkit.testing.reading import in_child


@pytest.fixture
def cache(tmp_path):
    paths = [tmp_path / f"{number}" for number in range(3)]
    for number, path in enumerate(paths):
        path.write_bytes(b"%d" % number)
    cache = DescriptorCache(paths, flags=0, max_open=1)
    yield cache
    cache.close()


def test_a_descriptor_on_loan_outlives_the_cache_that_lets_go_of_it(cache):
    for let_go in (lambda: cache.discard(0), cache.close):
        loan = cache.borrow(0)
        let_go()
        assert len(cache) == 0
        assert os.pread(loan.number, 1, 0) == b"0"
        cache.give_back(loan)
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(loan.number)


def test_borrowers_share_a_descriptor(cache):
    first, second = cache.borrow(1), cache.borrow(1)
    assert first is second
    cache.give_back(first)
    cache.discard(1)
    assert os.pread(second.number, 1, 0) == b"1"
    cache.give_back(second)


def test_a_child_does_not_wait_for_loans_of_threads_that_it_does_not_have(cache):
    loan = cache.borrow(0)
    assert in_child(lambda: os.pread(cache.borrow(2).number, 1, 0) == b"2")
    assert os.pread(loan.number, 1, 0) == b"0"
    cache.give_back(loan)


def test_the_size_at_the_first_opening_is_kept(cache):
    assert cache.size_at_open(0) is None
    cache.give_back(cache.borrow(0))
    assert cache.size_at_open(0) == 1


def test_a_forbidden_file_is_a_matter_of_capability(tmp_path, monkeypatch):
    def forbidden(*_):
        raise PermissionError(13, "Permission denied")

    (tmp_path / "a").write_bytes(b"a")
    monkeypatch.setattr(os, "open", forbidden)  # root may open everything
    with pytest.raises(CapabilityError, match="EACCES"):
        DescriptorCache([tmp_path / "a"], flags=0, max_open=1).borrow(0)


@pytest.mark.parametrize(("soft", "kept"), [(20, 16), (1024, 512), (1 << 20, 4096), (resource.RLIM_INFINITY, 4096)])
def test_half_of_the_limit_is_for_readers(monkeypatch, soft, kept):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, soft))
    assert default_max_open() == kept
