"""Print the worked example of docs/format.md, a shard of one sample as a hex dump; --write puts it into the page."""

from __future__ import annotations

import argparse
from pathlib import Path

from shardkit.format.layout import SampleLayout, place_sample, shard_bytes
from shardkit.format.tar import BLOCK, encode_header, encode_padding, tail_bytes

PAGE = Path(__file__).parents[1] / "docs" / "format.md"
BEGIN, END = "<!-- worked example: begin -->\n", "<!-- worked example: end -->\n"

ALIGN = 4096
CLS = b"7"
JSON = b'{"source":"cat/tom.jpg","class":"cat"}'
# A grey baseline JPEG of 1 x 1 pixel: SOI, DQT, SOF0, DHT, SOS with one coded byte, EOI.
JPEG = bytes.fromhex(
    "ffd8"
    "ffdb004300" + "01" * 64 +
    "ffc0000b080001000101011100"
    "ffc400140001" + "00" * 15 + "00"
    "ffc400141001" + "00" * 15 + "00"
    "ffda0008010100003f00" "3f"
    "ffd9"
)  # fmt: skip


def build() -> tuple[bytes, SampleLayout]:
    place = place_sample(0, len(CLS), len(JSON), len(JPEG), ALIGN)
    parts = [
        encode_header("cat/tom.cls", len(CLS)), CLS, bytes(tail_bytes(len(CLS))),
        encode_header("cat/tom.json", len(JSON)), JSON, bytes(tail_bytes(len(JSON))),
        encode_padding(place.padding),
        encode_header("cat/tom.jpg", len(JPEG)), JPEG, bytes(tail_bytes(len(JPEG))),
    ]  # fmt: skip
    sample = b"".join(parts)
    return sample + bytes(shard_bytes(len(sample), ALIGN) - len(sample)), place


def regions(place: SampleLayout, size: int) -> list[tuple[int, str]]:
    """Return where each part begins, and what it is."""
    image_end = place.payload_offset + len(JPEG)
    return [
        (0, "ustar header of `cat/tom.cls`"),
        (place.cls_offset, f"its payload, {len(CLS)} byte, and NUL bytes to the next block"),
        (place.json_offset - BLOCK, "ustar header of `cat/tom.json`"),
        (place.json_offset, f"its payload, {len(JSON)} bytes, and NUL bytes"),
        (place.padding_offset, f"PAX header: P = {place.padding}"),
        (place.padding_offset + BLOCK, f"its record, P - 512 = {place.padding - BLOCK} bytes"),
        (place.payload_offset - BLOCK, "ustar header of `cat/tom.jpg`"),
        (place.payload_offset, f"its payload, {len(JPEG)} bytes, at a multiple of {ALIGN}"),
        (image_end, "NUL bytes to the next block"),
        (place.end, f"two zero blocks, then zeros to {size} = lcm(10240, {ALIGN})"),
    ]


def hexdump(data: bytes) -> list[str]:
    """Return lines of 16 bytes; `*` stands for lines that repeat the one before."""
    lines: list[str] = []
    before = b""
    for at in range(0, len(data), 16):
        row = data[at : at + 16]
        if row == before:
            if lines[-1] != "*":
                lines.append("*")
            continue
        text = "".join(chr(byte) if 0x20 <= byte < 0x7F else "." for byte in row)
        lines.append(f"{at:08x}  {row[:8].hex(' ')}  {row[8:].hex(' ')}  |{text}|")
        before = row
    return [*lines, f"{len(data):08x}"]


def example() -> str:
    shard, place = build()
    table = [f"| {at} | 0x{at:05x} | {what} |" for at, what in regions(place, len(shard))]
    return "\n".join(
        ["| offset | hex | what begins there |", "|--:|--:|---|", *table, "", "```text", *hexdump(shard), "```", ""]
    )


def with_example(page: str) -> str:
    before, _, rest = page.partition(BEGIN)
    return before + BEGIN + example() + END + rest.partition(END)[2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="put it into docs/format.md")
    if parser.parse_args().write:
        PAGE.write_text(with_example(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    else:
        print(example(), end="")


if __name__ == "__main__":
    main()
