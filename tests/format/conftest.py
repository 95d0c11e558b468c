"""A writer of shards that knows nothing of packing: the format's functions and a loop."""

from __future__ import annotations

import io
import zlib
from dataclasses import dataclass, field

import pytest

from shardkit.format.dali_index import IndexedMember, encode_dali_index
from shardkit.format.layout import SampleLayout, place_sample, shard_bytes
from shardkit.format.tar import encode_header, encode_padding, tail_bytes


@dataclass
class Shard:
    """What a test needs to know of a shard that it has made."""

    data: bytes
    places: list[SampleLayout] = field(default_factory=list)
    members: list[list[IndexedMember]] = field(default_factory=list)
    contents: dict[str, bytes] = field(default_factory=dict)
    """Member name to payload, in stored order."""

    @property
    def idx(self) -> bytes:
        return encode_dali_index(self.members)


def write_shard(samples: list[tuple[str, bytes | None, bytes | None, bytes]], align: int) -> Shard:
    """Return a shard of samples (key, cls, json, jpg)."""
    out, shard = io.BytesIO(), Shard(b"")
    for key, cls, json, jpg in samples:
        sizes = [None if part is None else len(part) for part in (cls, json)]
        place = place_sample(out.tell(), *sizes, len(jpg), align)
        members = []
        for extension, payload, offset in (
            ("cls", cls, place.cls_offset), ("json", json, place.json_offset), ("jpg", jpg, place.payload_offset)
        ):  # fmt: skip
            if payload is None:
                continue
            if extension == "jpg":
                assert out.tell() == place.padding_offset
                out.write(encode_padding(place.padding))
            name = f"{key}.{extension}"
            out.write(encode_header(name, len(payload)))
            assert out.tell() == offset
            out.write(payload + bytes(tail_bytes(len(payload))))
            members.append(IndexedMember(extension, offset, len(payload), name))
            shard.contents[name] = payload
        assert out.tell() == place.end
        shard.places.append(place)
        shard.members.append(members)
    out.write(bytes(shard_bytes(out.tell(), align) - out.tell()))
    shard.data = out.getvalue()
    return shard


@pytest.fixture(scope="session", name="write_shard")
def write_shard_fixture():
    return write_shard


@pytest.fixture(scope="session")
def noise():
    """Return a function: `size` bytes that compress badly and differ from seed to seed."""

    def make(size: int, seed: int = 0) -> bytes:
        words = (zlib.crc32(b"%d %d" % (seed, i)).to_bytes(4, "little") for i in range(-(-size // 4)))
        return b"".join(words)[:size]

    return make
