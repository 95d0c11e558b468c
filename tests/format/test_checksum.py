from __future__ import annotations

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardkit.errors import ConfigError
from shardkit.format.checksum import DIGESTS, crc32c, hex_digest, new_digest


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"", 0),
        (bytes(32), 0x8A9136AA),
        (b"\xff" * 32, 0x62A8AB43),
        (bytes(range(32)), 0x46DD794E),
        (bytes(range(31, -1, -1)), 0x113FDB5C),
        (b"123456789", 0xE3069283),
    ],
)
def test_crc32c_gives_the_values_of_rfc_3720(data, expected):
    assert crc32c(data) == expected


def crc32c_bit_by_bit(data):
    register = 0xFFFFFFFF
    for byte in data:
        register ^= byte
        for _ in range(8):
            register = register >> 1 ^ (0x82F63B78 if register & 1 else 0)
    return register ^ 0xFFFFFFFF


@given(st.binary(max_size=300), st.integers(0, 300))
def test_crc32c_equals_its_definition_and_continues(data, cut):
    assert crc32c(data[cut:], crc32c(data[:cut])) == crc32c(data) == crc32c_bit_by_bit(data)


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_checksums_take_any_buffer_without_keeping_it(kind):
    buffer = kind(b"shardkit")
    assert crc32c(buffer) == crc32c(b"shardkit")
    assert [hex_digest(name, buffer) for name in DIGESTS] == [hex_digest(name, b"shardkit") for name in DIGESTS]


@pytest.mark.parametrize(
    ("data", "expected"),
    [(b"", "99aa06d3014798d86001c324468d497f"), (b"a", "a96faf705af16834e6c632b61e964e1f")],
)
def test_xxh3_128_gives_what_xxhsum_prints(data, expected):
    assert hex_digest("xxh3-128", data) == expected


@given(st.lists(st.binary(max_size=40), max_size=5))
def test_digest_of_parts_is_that_of_the_whole(parts):
    whole = b"".join(parts)
    assert hex_digest("sha256", *parts) == hashlib.sha256(whole).hexdigest()
    for name in DIGESTS:
        assert hex_digest(name, *parts) == hex_digest(name, whole)


def test_unknown_digest_is_refused_by_name():
    with pytest.raises(ConfigError, match=r"xxh3-128 or sha256.*md5"):
        new_digest("md5")
