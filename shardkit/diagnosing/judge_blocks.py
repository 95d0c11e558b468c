"""Verdicts about the block devices behind a path. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardkit.diagnosing.line import Line

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from shardkit.diagnosing.facts import Block, Controller

__all__ = ["bottom", "judge_block", "on_the_bus"]

REQUESTS = 128
"""Requests that a disk's queue takes: the loader's two rings keep 64 each in flight."""
_REQUEST_KB = 512
_DISKS = {"nvme", "disk", "virtio"}


def judge_block(block: Block) -> Iterator[Line]:
    """Yield a line for each thing that is known of one device."""
    yield _device(block)
    if block.kind not in _DISKS:
        return
    queue = f"/sys/block/{block.name}/queue"
    turns = block.rotational is True and block.kind == "disk"
    yield from _scheduler(block, queue, turns=turns)
    if block.requests is not None:
        few = block.requests < REQUESTS and not turns
        yield Line(
            f"queue {block.name}", "warn" if few else "ok", f"nr_requests {block.requests}",
            f"echo 1024 > {queue}/nr_requests (the driver caps it)" if few else "",
        )  # fmt: skip
    if block.max_sectors_kb is not None and block.max_hw_sectors_kb is not None:
        larger = min(block.max_hw_sectors_kb, 4096)
        small = block.max_sectors_kb < _REQUEST_KB and block.max_sectors_kb < larger
        yield Line(
            f"request size {block.name}", "warn" if small else "ok", f"max_sectors_kb {block.max_sectors_kb}",
            f"echo {larger} > {queue}/max_sectors_kb" if small else "",
        )  # fmt: skip
    if block.read_ahead_kb is not None:
        none = block.read_ahead_kb == 0
        yield Line(
            f"read-ahead {block.name}", "warn" if none else "info", f"read_ahead_kb {block.read_ahead_kb}"
            + (": buffered reads wait for every page" if none else ""),
            f"echo 128 > {queue}/read_ahead_kb" if none else "",
        )  # fmt: skip


def _device(block: Block) -> Line:
    name = f"device {block.name}"
    below = f", over {', '.join(block.members)}" if block.members else ""
    detail = f" {block.detail}" if block.detail else ""
    paths = [f"{part.name}{f' ({part.transport})' if part.transport else ''}" for part in block.controllers]
    if block.kind == "raid":
        parity = block.detail not in {"raid0", "raid1", "raid10", "linear"}
        note = ": fine to read; GPUDirect Storage by P2PDMA does not pass it" if not parity else ": parity"
        return Line(name, "info", f"{block.detail or 'RAID'}{below}{note}")
    if block.kind == "mapper":
        if block.detail.startswith("CRYPT"):
            return Line(
                name, "warn", f"{block.detail}{below}: the CPU decrypts every byte",
                "keep shards on a volume that is not encrypted, or on a disk that encrypts itself",
            )  # fmt: skip
        return Line(name, "info", f"device mapper{detail}{below}")
    nodes = sorted({part.node for part in block.controllers if part.node is not None})
    near = f", NUMA node {', '.join(map(str, nodes))}" if nodes else ""
    if block.kind == "virtio":
        return Line(name, "info", f"virtual disk (virtio): what it says about itself is the host's word{near}")
    if block.kind == "disk" and block.rotational:
        return Line(
            name, "warn", f"rotating disk{detail}: a hundred random reads a second{near}",
            "take shuffle='window', or move the dataset to NVMe",
        )  # fmt: skip
    kinds = {"nvme": "NVMe", "disk": "SSD", "loop": "loop over", "virtual": "no hardware"}
    hangs = f", {', '.join(paths)}" if block.kind == "nvme" and paths else ""
    return Line(
        name, "ok" if block.kind in {"nvme", "disk"} else "info", f"{kinds[block.kind]}{detail}{hangs}{near}{below}"
    )


def _scheduler(block: Block, queue: str, *, turns: bool) -> Iterator[Line]:
    if not block.scheduler:
        return
    name = f"scheduler {block.name}"
    if turns:
        slow = block.scheduler == "none"
        yield Line(
            name, "warn" if slow else "ok", block.scheduler, f"echo mq-deadline > {queue}/scheduler" if slow else ""
        )
    else:
        slow = block.scheduler != "none"
        found = f"{block.scheduler}: orders requests for a disk that does not care" if slow else block.scheduler
        yield Line(name, "warn" if slow else "ok", found, f"echo none > {queue}/scheduler" if slow else "")


def bottom(blocks: Sequence[Block]) -> tuple[Block, ...]:
    """Return the disks, without what is stacked on them."""
    return tuple(block for block in blocks if not block.members)


def on_the_bus(blocks: Sequence[Block]) -> tuple[Controller, ...]:
    """Return what the disks hang on, where its place on the PCI bus is known."""
    return tuple(part for block in bottom(blocks) for part in block.controllers if part.chain)
