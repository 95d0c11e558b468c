"""Plan a tree of N synthetic files, in memory and time: what `shardkit pack` needs before it reads the first image.

    python scripts/bench_plan.py -n 10000000

No file is made: names and sizes are as a scan gives them. Printed are seconds and the peak of resident memory beyond
that of the interpreter with its imports, a file.
"""

from __future__ import annotations

import argparse
import os
import re
import tempfile
import time
from pathlib import Path

import pyarrow as pa

from shardkit.format.checksum import new_digest
from shardkit.packing.options import PackOptions
from shardkit.packing.plan import PLAN_SCHEMA, make_plan, plan_batches, update_identity
from shardkit.packing.scan import TREE_SCHEMA, SourceRows, Sources, _by_path


def peak() -> int:
    """Return the most bytes that this process had in memory so far."""
    found = re.search(r"VmHWM:\s*([0-9]+) kB", Path("/proc/self/status").read_text())
    return int(found[1]) * 1024 if found else 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-n", type=int, default=1_000_000)
    count = parser.parse_args().n
    base, status, start = peak(), os.stat("/"), time.perf_counter()
    rows = SourceRows(TREE_SCHEMA)
    for i in range(count):
        rows.add(b"n%08d/n%08d_%d.JPEG" % (i % 1000, i % 1000, i), i % 1000, status)
    sources = Sources(root=b"/", table=_by_path(rows.table()), classes=tuple(map(str, range(1000))))
    scanned = time.perf_counter()
    options = PackOptions(name="t", shard_size=1 << 28)
    plan = make_plan(sources, options)
    planned = time.perf_counter()
    digests = new_digest("xxh3-128"), new_digest("xxh3-128")
    with tempfile.TemporaryFile() as file, pa.ipc.new_file(file, PLAN_SCHEMA) as writer:
        for batch in plan_batches(sources, plan, options.key):
            writer.write_batch(batch)
            update_identity(batch, *digests)
    written = time.perf_counter()
    print(
        f"{count:,} files: rows {scanned - start:.1f} s, plan {planned - scanned:.1f} s, file {written - planned:.1f} s"
    )
    most = peak()
    print(f"{(most - base) / count:.0f} bytes a file beyond the interpreter, {most / 1e6:.0f} MB in all")


if __name__ == "__main__":
    main()
