"""Both searches for the end of entropy-coded data find what a look at each byte finds."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardkit.format import entropy_coded
from shardkit.format.entropy_coded import EntropyCodedData

DATA = st.lists(st.sampled_from([0x00, 0x01, 0xD0, 0xD7, 0xD8, 0xD9, 0xCF, 0xFF, 0xFF, 0xFF]), max_size=14).map(bytes)


def first_marker(data: bytes, pos: int) -> int:
    for at in range(pos, len(data) - 1):
        if data[at] == 0xFF and data[at + 1] not in (0x00, *range(0xD0, 0xD8), 0xFF):
            return at
    return -1


@pytest.mark.parametrize("short", [0, 3, 100])
@given(DATA, st.lists(st.integers(0, 15), min_size=1, max_size=4), st.integers(1, 5))
def test_the_first_marker_is_found(short, data, places, window):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(entropy_coded, "_SHORT_BYTES", short)
        patch.setattr(entropy_coded, "_WINDOW_BYTES", window)
        searched = EntropyCodedData(memoryview(data))
        assert [searched.marker_from(pos) for pos in sorted(places)] == [first_marker(data, p) for p in sorted(places)]
