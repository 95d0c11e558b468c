"""The checksums of the format, each named in one place.

CRC-32C (Castagnoli, RFC 3720 appendix B.4) guards every payload; a digest of the whole file guards every shard and
index: XXH3-128 against accidents, SHA-256 where the data is published. Both take any buffer without a copy.
"""

from __future__ import annotations

import hashlib
from typing import Protocol

import crc32c as _crc32c
import xxhash

from shardkit.errors import ConfigError

__all__ = ["DIGESTS", "Buffer", "Digest", "crc32c", "hash64", "hex_digest", "new_digest"]

Buffer = bytes | bytearray | memoryview

DIGESTS = ("xxh3-128", "sha256")
"""Names of the digest algorithms, the default first."""


class Digest(Protocol):
    """An incremental digest."""

    def update(self, data: Buffer, /) -> None:
        """Take further bytes; `data` is not retained."""

    def hexdigest(self) -> str:
        """Return the digest of all bytes so far, as lower-case hex."""


def crc32c(data: Buffer, value: int = 0) -> int:
    """Return the CRC-32C of `data`, continuing from `value`.

    >>> hex(crc32c(b"123456789"))
    '0xe3069283'
    """
    return _crc32c.crc32c(data, value)


def new_digest(algorithm: str) -> Digest:
    """Return an empty digest.

    Raises:
        ConfigError: `algorithm` is none of `DIGESTS`.
    """
    if algorithm == "xxh3-128":
        return xxhash.xxh3_128()
    if algorithm == "sha256":
        return hashlib.sha256()
    raise ConfigError("unknown digest algorithm", expected=" or ".join(DIGESTS), found=algorithm)


def hash64(data: Buffer) -> int:
    """Return the XXH3 64-bit hash of `data`, for tables and orders; not a checksum of anything stored."""
    return xxhash.xxh3_64_intdigest(data)


def hex_digest(algorithm: str, *parts: Buffer) -> str:
    """Return the digest of `parts`, one after another, as lower-case hex.

    >>> hex_digest("xxh3-128", b"")
    '99aa06d3014798d86001c324468d497f'
    """
    digest = new_digest(algorithm)
    for part in parts:
        digest.update(part)
    return digest.hexdigest()
