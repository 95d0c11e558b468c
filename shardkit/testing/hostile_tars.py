"""Tars that are made to mislead, to overfill or to be run: one of each kind, and what `shardkit index` says to it."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import pickle
import tarfile
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

import numpy as np

from shardkit.testing.datasets import tiny_jpeg

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

__all__ = ["CANARY", "GOOD_KEYS", "HostileTar", "Verdict", "hostile_tars", "jpeg_bomb", "tar_member"]

Verdict: TypeAlias = str | None
"""`damaged-shard` (exit code 4) or `unsafe-shard` (9): nothing of the tar is taken. Any other reason code of `index`:
that member or sample is left out and counted (3). None: taken, and harmless (0)."""

CANARY = "canary-was-run"
"""Name of the file that comes to be, in the current folder, when a pickle or a command is run."""
GOOD_KEYS = ("good/a", "good/z")
"""Keys of the samples that stand before and after what is hostile, where the tar has them."""

_BLOCK = 512
_HUGE = 1 << 30
_DIALECTS: dict[str, Literal[0, 1, 2]] = {"ustar": 0, "gnu": 1, "pax": 2}


@dataclass(frozen=True, slots=True)
class HostileTar:
    """A tar and its verdict."""

    what: str
    """What is hostile, in a few words; unique."""
    parts: Sequence[bytes | int]
    """Its bytes; a number stands for a hole of so many zeros."""
    verdict: Verdict
    """What `shardkit index` says to it."""

    def write(self, path: Path) -> Path:
        """Write the tar; return its path."""
        with open(path, "wb") as file:
            for part in self.parts:
                if isinstance(part, bytes):
                    file.write(part)
                else:
                    file.seek(part, io.SEEK_CUR)
            file.truncate()
        return path


def tar_member(
    name: str, data: bytes = b"", *, kind: bytes = tarfile.REGTYPE, link: str = "", size: int | None = None,
    pax: Mapping[str, str] | None = None, dialect: Literal["pax", "gnu", "ustar"] = "pax",
) -> bytes:  # fmt: skip
    """Return one member as Python's tarfile writes it: its headers, the payload, and zeros up to a whole block.

    Args:
        name: lone surrogates stand for bytes that are not UTF-8.
        data: the payload.
        kind: the type flag.
        link: where a link leads.
        size: what the header states; the payload's by default.
        pax: records of its extended header.
        dialect: of tar.
    """
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.pax_headers = kind, link, dict(pax or {})
    info.size = len(data) if size is None else size
    return info.tobuf(_DIALECTS[dialect], "utf-8", "surrogateescape") + _rounded(data)


def jpeg_bomb() -> bytes:
    """Return a JPEG of a few hundred bytes that states 65,535 x 65,535 pixels, 12 GiB once decoded."""
    image = tiny_jpeg(1)
    frame = image.index(b"\xff\xc0")
    return image[: frame + 5] + b"\xff\xff\xff\xff" + image[frame + 9 :]


def hostile_tars() -> Iterator[HostileTar]:
    """Yield the tars of the table."""
    for table in (_links(), _kinds(), _extended(), _sizes(), _names(), _samples(), _payloads()):
        for what, (evil, verdict) in table.items():
            yield HostileTar(what, (_good(0), evil, _good(1), bytes(1024)), verdict)
    yield from _wholes()


class _Runs:
    """An object whose pickle runs a command when it is loaded."""

    def __reduce__(self) -> tuple[object, ...]:
        import os

        return os.system, (f"touch {CANARY}",)


_Table: TypeAlias = "dict[str, tuple[bytes, Verdict]]"


def _links() -> _Table:
    def link(kind: bytes, leads_to: str, name: str = "m.jpg") -> bytes:
        return tar_member(name, kind=kind, link=leads_to)

    symbolic, hard = tarfile.SYMTYPE, tarfile.LNKTYPE
    return {
        "symbolic link to /etc/passwd": (link(symbolic, "/etc/passwd"), "link"),
        "symbolic link upwards": (link(symbolic, "../../../../etc/passwd"), "link"),
        "symbolic link to a member": (link(symbolic, "good/a.jpg"), "link"),
        "symbolic link to itself": (link(symbolic, "m.jpg"), "link"),
        "symbolic link with a folder's name, then a file below": (
            link(symbolic, "/tmp", "good") + tar_member("good/m.jpg", tiny_jpeg(2)), "link",
        ),
        "hard link to /etc/passwd": (link(hard, "/etc/passwd"), "link"),
        "hard link upwards": (link(hard, "../x"), "link"),
        "hard link to a member": (link(hard, "good/a.jpg"), "link"),
        "hard link with a payload": (
            _patched(tar_member("m.jpg", b"data", kind=hard, link="good/a.jpg"), 124, b"00000000004\0"), "unsafe-shard",
        ),
        "symbolic link of 64 KiB": (link(symbolic, "d/" * 32_000), "link"),
    }  # fmt: skip


def _kinds() -> _Table:
    def kind(flag: bytes, name: str = "m.jpg") -> bytes:
        return _patched(tar_member(name, dialect="gnu"), 156, flag)

    sparse = {"GNU.sparse.size": "1000000", "GNU.sparse.numblocks": "1"}
    return {
        "character device": (kind(b"3"), "device"),
        "block device": (kind(b"4"), "device"),
        "FIFO": (kind(b"6"), "fifo"),
        "piece of another volume": (kind(b"M"), "continuation"),
        "unknown kind": (kind(b"Z"), "unknown-kind"),
        "folder that leads up": (tar_member("../../d", kind=tarfile.DIRTYPE), "parent-in-name"),
        "old GNU sparse": (kind(b"S"), "sparse"),
        "old GNU sparse with a map without end": (
            _patched(kind(b"S"), 482, b"\1") + (bytes(504) + b"\1" + bytes(7)) * 1100, "unsafe-shard",
        ),
        "PAX sparse 0.0": (
            tar_member("m.jpg", b"x", pax=sparse | {"GNU.sparse.offset": "0", "GNU.sparse.numbytes": "1"}), "sparse",
        ),
        "PAX sparse 0.1": (tar_member("m.jpg", b"x", pax=sparse | {"GNU.sparse.map": "0,1"}), "sparse"),
        "PAX sparse 1.0": (
            tar_member("GNUSparseFile.0/m.jpg", b"1\n0\n1\n" + bytes(506) + b"x", pax={
                "GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.name": "/etc/m.jpg",
                "GNU.sparse.realsize": "99999999999999",
            }), "sparse",
        ),
        "Solaris extended header that renames": (
            _extended_header(b"X", _record(b"path", b"../m.jpg")) + _image(), "parent-in-name",
        ),
    }  # fmt: skip


def _extended() -> _Table:
    image = _image()
    return {
        "PAX path upwards": (tar_member("m.jpg", tiny_jpeg(2), pax={"path": "../../m.jpg"}), "parent-in-name"),
        "PAX path that is absolute": (tar_member("m.jpg", tiny_jpeg(2), pax={"path": "/etc/m.jpg"}), "absolute-name"),
        "PAX path with a NUL": (_extended_header(b"x", _record(b"path", b"m.jpg\0/../x")) + image, "nul-in-name"),
        "PAX path of nothing": (_extended_header(b"x", _record(b"path", b"")) + image, "no-name"),
        "PAX size of another file": (_extended_header(b"x", b"12 size=512\n") + image, "unsafe-shard"),
        "PAX size below zero": (_extended_header(b"x", b"11 size=-1\n") + image, "damaged-shard"),
        "PAX size of 10^30": (_extended_header(b"x", _record(b"size", b"1" + b"0" * 30)) + image, "damaged-shard"),
        "PAX size over the file": (
            _extended_header(b"x", _record(b"size", b"99999999999")) + tar_member("m.jpg"), "damaged-shard",
        ),
        "PAX size in other digits": (_extended_header(b"x", _record(b"size", "٤".encode())) + image, "damaged-shard"),
        "PAX header of 1 GiB": (_extended_header(b"x", b"", _HUGE) + image, "unsafe-shard"),
        "PAX header of 8 GiB": (_extended_header(b"x", b"", 8**11 - 1) + image, "unsafe-shard"),
        "PAX record of 10^9 bytes": (_extended_header(b"x", b"999999999 path=m\n") + image, "damaged-shard"),
        "PAX record without an end": (_extended_header(b"x", b"9" * 30 + b" a=b\n") + image, "damaged-shard"),
        "PAX record of no bytes": (_extended_header(b"x", b"0 a=b\n") + image, "damaged-shard"),
        "two PAX headers": (_extended_header(b"x", b"6 a=b\n") * 2 + image, "unsafe-shard"),
        "global PAX path": (_extended_header(b"g", _record(b"path", b"m.jpg")) + image, "unsafe-shard"),
        "global PAX size": (_extended_header(b"g", b"12 size=512\n") + image, "unsafe-shard"),
        "a hundred global headers": (_extended_header(b"g", b"6 a=b\n") * 100 + image, "unsafe-shard"),
        "GNU long name of 1 GiB": (_extended_header(b"L", b"", _HUGE) + image, "unsafe-shard"),
        "GNU long link of 1 GiB": (_extended_header(b"K", b"", _HUGE) + image, "unsafe-shard"),
        "GNU long name below zero": (_patched(_extended_header(b"L", b""), 124, b"\xff" * 12) + image, "damaged-shard"),
        "GNU long name without an end": (_extended_header(b"L", b"a" * 512) + image, "unsafe-shard"),
        "GNU long name upwards": (_extended_header(b"L", b"../../m.jpg\0") + image, "parent-in-name"),
        "GNU and PAX name": (
            _extended_header(b"L", b"a.jpg\0") + _extended_header(b"x", _record(b"path", b"b.jpg")) + image,
            "unsafe-shard",
        ),
        "extended header of nothing": (_extended_header(b"x", b"6 a=b\n") + bytes(1024), "damaged-shard"),
    }  # fmt: skip


def _sizes() -> _Table:
    def sized(field: bytes) -> bytes:
        return _patched(tar_member("m.jpg", dialect="gnu"), 124, field)

    return {
        "size below zero": (sized(b"\xff" * 12), "damaged-shard"),
        "size of 2^80": (sized(b"\x80\0" + b"\xff" * 10), "damaged-shard"),
        "size of 2^63": (sized(b"\x80\0\0\0" + (1 << 63).to_bytes(8, "big")), "damaged-shard"),
        "size that leads back": (sized(b"\x80\0\0\0" + (2**64 - 512).to_bytes(8, "big")), "damaged-shard"),
        "size that is the largest": (sized(b"77777777777\0"), "damaged-shard"),
        "size that is no number": (sized(b"0x10\0\0\0\0\0\0\0\0"), "damaged-shard"),
        "size with a sign": (sized(b"-0000000001\0"), "damaged-shard"),
        "wrong checksum": (b"n" + tar_member("m.jpg")[1:], "damaged-shard"),
        "no checksum": (tar_member("m.jpg")[:148] + bytes(364), "damaged-shard"),
        "second size of a GNU header": (
            _patched(tar_member("m.jpg", dialect="gnu"), 483, b"00000000001\0"), "unsafe-shard",
        ),
    }  # fmt: skip


def _names() -> _Table:
    def named(name: str) -> bytes:
        return tar_member(name, tiny_jpeg(2), dialect="gnu")

    refused = {
        "name upwards": ("../../m.jpg", "parent-in-name"),
        "name upwards in its middle": ("a/../../m.jpg", "parent-in-name"),
        "absolute name": ("/etc/m.jpg", "absolute-name"), "absolute name of slashes": ("//m.jpg", "absolute-name"),
        "name of 100,000 bytes": ("m" * 100_000 + ".jpg", "long-name"),
        "name that is not UTF-8": ("m\udcff\udcfe.jpg", "bad-key"),
        "name of an encoded surrogate": ("m\udced\udca0\udc80.jpg", "bad-key"),
    }  # fmt: skip
    taken = {
        "name of control characters": "\x1b[2J\x1b]0;owned\x07\r\n\x7f\x85m.jpg",
        "name with overrides of direction": "\u202egpj\u2066.jpg",
        "name for a shell": f"$(touch {CANARY});`touch {CANARY}`.jpg",
        "name for an option": "--help.jpg", "name for a format": "%s%n{0!r}.jpg",
        "name for another system": "C:\\con\\m.jpg", "name of the work folder": ".shardkit/plan.jpg",
        "name of index files": "manifest/index/rejected.jpg", "name 2,000 folders deep": "d/" * 2000 + "m.jpg",
        "name for a page": "<script>alert(1)</script>\"'.jpg",
        "name that is a URL": "http://127.0.0.1:9/m.jpg", "name that is a command": f"pipe:touch {CANARY}.jpg",
    }  # fmt: skip
    raw = tar_member("m.jpg", tiny_jpeg(2), dialect="gnu")
    ustar = tar_member("m.jpg", tiny_jpeg(2), dialect="ustar")
    return {
        **{what: (named(name), verdict) for what, (name, verdict) in refused.items()},
        **{what: (named(name), None) for what, name in taken.items()},
        "name with a NUL inside": (_patched(raw, 0, b"m.jpg\0/../x"), "nul-in-name"),
        "prefix upwards": (_patched(ustar, 345, b"../.."), "parent-in-name"),
        "prefix that is absolute": (_patched(ustar, 345, b"/etc"), "absolute-name"),
        "prefix in a GNU header": (_patched(raw, 345, b"../.."), "ambiguous-name"),
        "no name": (_patched(raw, 0, bytes(100)), "no-name"),
    }


def _samples() -> _Table:
    def many(names: Sequence[str]) -> bytes:
        return b"".join(tar_member(name, tiny_jpeg(2) if name.endswith("jpg") else b"") for name in names)

    return {
        "5,000 members of one key": (many(["m.jpg", *(f"m.x{number}" for number in range(5000))]), None),
        "5,000 images of one name": (many(["m.jpg"] * 5000), "duplicate-member"),
        "2,000 samples of one key": (many(["m.jpg", "n.jpg"] * 2000), "duplicate-key"),
        "members that are not adjacent": (many(["m.jpg", "n.jpg", "m.json"]), "not-adjacent"),
        "two names of one folder": (many(["m.jpg", "m.JPG"]), "duplicate-member"),
        "20,000 folders": (tar_member("d", kind=tarfile.DIRTYPE) * 20_000, None),
        "no image": (many(["m.json"]), "no-image"),
        "image of no bytes": (tar_member("m.jpg"), "empty"),
    }


def _payloads() -> _Table:
    def beside(extension: str, data: bytes) -> bytes:
        return tar_member(f"m.{extension}", data) + _image()

    inner = tar_member("good/inner.jpg", tiny_jpeg(3)) + bytes(1024)
    loaded = pickle.dumps(_Runs())
    array = io.BytesIO()
    np.save(array, np.array([_Runs()], object), allow_pickle=True)
    deep = b'{"a": ' + b"[" * 1_000_000 + b"]" * 1_000_000 + b"}"
    metadata = {
        "json nested a million deep": deep, "json with a field twice": b'{"a": 1, "a": 2}',
        "json with NaN": b'{"a": NaN}',
        "json with 1e999": b'{"a": 1e999}', "json that is not UTF-8": b'{"a": "\xff"}', "json that is a list": b"[1]",
        "json with an integer of a million digits": b'{"a": ' + b"9" * 1_000_000 + b"}",
        "json with half a surrogate": b'{"a": "\\ud800"}', "json of nothing": b"", "json with a NUL": b'{"a": 1}\0',
    }  # fmt: skip
    labels = {
        "label below zero": b"-1", "label of 2^31": b"2147483648", "label of many digits": b"9" * 100_000,
        "label in other digits": "٤".encode(), "label with a NUL": b"1\0", "label of a pickle": loaded,
        "label that is an expression": b"__import__('os')", "label of nothing": b"",
    }  # fmt: skip
    return {
        **{what: (beside("json", data), None) for what, data in metadata.items()},
        **{what: (beside("cls", data), "bad-label") for what, data in labels.items()},
        **{f"a {name} member that runs": (beside(name, loaded), None) for name in ("pyd", "pickle", "pkl", "pth")},
        "a npy member that runs": (beside("npy", array.getvalue()), None),
        "an image that is a pickle": (tar_member("m.jpg", loaded), None),
        "an image that is a bomb": (tar_member("m.jpg", jpeg_bomb()), None),
        "an image of 0 x 0 pixels": (tar_member("m.jpg", jpeg_bomb().replace(b"\xff\xff\xff\xff", bytes(4))), None),
        "an image that is cut": (tar_member("m.jpg", tiny_jpeg(2)[:300]), None),
        "a tar within the tar": (beside("tar", inner), None),
        "an image that is a tar": (tar_member("m.jpg", inner), None),
    }  # fmt: skip


def _wholes() -> Iterator[HostileTar]:
    """Yield the files that are hostile as a whole."""
    first, second = _good(0), _good(1)
    plain = first + second
    for what, data, verdict in (
        ("empty file", b"", "damaged-shard"),
        ("file of 511 bytes", bytes(511), "damaged-shard"),
        ("file of zeros", bytes(1 << 20), "no-samples"),
        ("file of text", b"no tar at all\n" * 1000, "damaged-shard"),
        ("tar in gzip", gzip.compress(plain), "damaged-shard"),
        ("tar in bzip2", bz2.compress(plain), "damaged-shard"),
        ("tar in xz", lzma.compress(plain), "damaged-shard"),
        ("tar in zstd", b"\x28\xb5\x2f\xfd" + plain, "damaged-shard"),
        ("zip", b"PK\x03\x04" + plain, "damaged-shard"),
        ("tar that is cut in a payload", plain[: 512 * 4 + 300], "damaged-shard"),
        ("tar that is cut in a header", plain[: len(_good(0)) + 100], "damaged-shard"),
        ("tar behind zeros", bytes(1024) + plain, "damaged-shard"),
        ("tar behind a tar's end", plain + bytes(1024) + _image() + bytes(1024), "damaged-shard"),
        ("tar whose header became zeros", first + bytes(512) + second[512:] + bytes(1024), "damaged-shard"),
        ("tar whose last header became zeros", first + second[:1024] + bytes(512) + second[1536:], "damaged-shard"),
        ("bytes behind a tar's end", plain + bytes(10_000) + b"\1", "damaged-shard"),
        ("tar without an end", plain, None),
        ("tar of half an end", plain + bytes(512), None),
        ("tar of less than an end", plain + bytes(100), None),
        ("pickle", pickle.dumps(_Runs()) + bytes(2048), "damaged-shard"),
    ):
        yield HostileTar(what, (data,), verdict)
    head = tar_member("m.jpg", size=200 << 20)
    yield HostileTar("image of 200 MiB", (_good(0), head, 200 << 20, _good(1), bytes(1024)), "too-large")


def _good(number: int) -> bytes:
    key = GOOD_KEYS[number]
    return tar_member(f"{key}.cls", b"%d" % number) + tar_member(f"{key}.jpg", tiny_jpeg(number))


def _image() -> bytes:
    return tar_member("m.jpg", tiny_jpeg(2), dialect="ustar")


def _rounded(data: bytes) -> bytes:
    return data + bytes(-len(data) % _BLOCK)


def _patched(member: bytes, at: int, field: bytes) -> bytes:
    """Return a member with another field in its first header, and the checksum that belongs to it."""
    block = member[:at] + field + member[at + len(field) : _BLOCK]
    total = sum(block[:148]) + 8 * 0x20 + sum(block[156:])
    return block[:148] + b"%06o\0 " % total + block[156:] + member[_BLOCK:]


def _extended_header(kind: bytes, payload: bytes, size: int | None = None) -> bytes:
    block = tar_member("././@Header", size=min(len(payload) if size is None else size, 8**11 - 1), dialect="ustar")
    return _patched(block, 156, kind) + _rounded(payload)


def _record(keyword: bytes, value: bytes) -> bytes:
    rest = b" " + keyword + b"=" + value + b"\n"
    length = len(rest) + 1
    while len(b"%d" % length) + len(rest) != length:
        length += 1
    return b"%d" % length + rest
