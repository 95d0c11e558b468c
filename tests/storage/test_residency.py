from __future__ import annotations

import os

import pytest

from shardkit.storage.residency import cached_bytes, cached_share

MIB = 1 << 20


def sized(paths):
    return [(str(path), path.stat().st_size) for path in paths]


def read(path, offset, length):
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
        assert len(os.pread(descriptor, length, offset)) == length
    finally:
        os.close(descriptor)


def test_the_cached_bytes_of_a_range_are_counted(large_files):
    read(large_files[0], 10 * MIB, 3 * MIB)
    with large_files[0].open("rb") as file:
        if cached_bytes(file.fileno(), 0, 1) is None:
            pytest.skip("this kernel does not tell what is cached (Linux 6.5)")
        found = [cached_bytes(file.fileno(), *place) for place in ((0, 40 * MIB), (11 * MIB, MIB), (20 * MIB, MIB))]
    assert found == [3 * MIB, MIB, 0]


def test_a_kernel_that_does_not_know_the_question_is_no_error(large_files, without_cachestat):
    with large_files[0].open("rb") as file:
        assert cached_bytes(file.fileno(), 0, MIB) is None


@pytest.mark.parametrize("kernel", ["new", "old"])
def test_the_share_is_that_of_the_bytes(large_files, kernel, request):
    if kernel == "old":
        request.getfixturevalue("without_cachestat")
    assert cached_share(sized(large_files), seed=1) < 0.05  # asking may bring in a page
    large_files[0].read_bytes()
    assert 0.3 < cached_share(sized(large_files), seed=2) < 0.7
    large_files[1].read_bytes()
    assert cached_share(sized(large_files), seed=3) == 1.0


def test_asking_an_old_kernel_reads_a_page_at_most(large_files, without_cachestat, monkeypatch):
    assert cached_share(sized(large_files), seed=1) < 0.05  # asking may bring in a page
    monkeypatch.undo()
    held = []
    for path in large_files:
        with path.open("rb") as file:
            held.append(cached_bytes(file.fileno(), 0, 40 * MIB))
    if None in held:
        pytest.skip("this kernel does not tell what is cached (Linux 6.5)")
    assert sum(held) <= 64 * os.sysconf("SC_PAGE_SIZE")


def test_nothing_is_known_of_nothing(tmp_path):
    (tmp_path / "empty").touch()
    assert cached_share([], seed=1) is None
    assert cached_share(sized([tmp_path / "empty"]), seed=1) is None
    assert cached_share([(str(tmp_path / "gone"), 5000)], seed=1) is None
