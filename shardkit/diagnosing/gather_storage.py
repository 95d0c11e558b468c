"""Facts about what lies behind a path: its mount, the block devices below it, and the buses that they hang on."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
from typing import TYPE_CHECKING

from shardkit.diagnosing.facts import Block, Controller, Storage
from shardkit.diagnosing.pci import chain_of
from shardkit.diagnosing.texts import chosen
from shardkit.errors import ShardkitError
from shardkit.storage.probe import probe

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardkit.diagnosing.tree import Tree
    from shardkit.storage.probe import Mount

__all__ = ["blocks_below", "gather_storage"]

_ENTRIES = 256
_JPEGS = (".jpg", ".jpeg")
_DEEPEST = 8
_LFS_S = 0.5
_CONTROLLER = re.compile(r"nvme\d+")


def gather_storage(tree: Tree, path: str) -> Storage:
    """Return the facts about a path of this machine, its block devices looked up in `tree`."""
    asked = _file_of(path)
    try:
        # A link and the folder that it stands in say nothing about where the bytes lie.
        facts = probe(os.path.realpath(asked) if os.path.islink(asked) else asked)
    except ShardkitError as error:
        return Storage(path=path, refusal=str(error))
    mount = facts.mount
    return Storage(
        path=path,
        asked=asked,
        probed=facts,
        blocks=blocks_below(tree, mount),
        loose=_loose(path),
        read_ahead_kb=tree.number(f"sys/class/bdi/{mount.number}/read_ahead_kb") if mount.number else None,
        stripes=_stripes(facts.path) if mount.file_system == "lustre" else None,
    )


def _file_of(path: str) -> str:
    """Return a file that stands for a folder, a shard if there is one, maybe a link to it.

    A nameless new file can only be made where one may write, and an index may lie elsewhere than its shards.
    """
    first = _first(path)
    shards = sorted((entry for entry in first if entry.name.endswith(".tar")), key=lambda entry: entry.name)
    # Other links, such as those of /proc, lead away from what the folder is.
    others = [entry for entry in first if not entry.is_symlink()]
    for entry in (*shards, *others):
        with contextlib.suppress(OSError):
            if entry.is_file() and os.access(entry.path, os.R_OK) and entry.stat().st_size:
                return entry.path
    return path


def _first(path: str) -> list[os.DirEntry[str]]:
    """Return a folder's first entries in its own order; none of what is no folder, or may not be listed."""
    try:
        with os.scandir(path) as entries:
            return [entry for _, entry in zip(range(_ENTRIES), entries, strict=False)]
    except OSError:
        return []


def _loose(path: str) -> int:
    """Return how many JPEG files are among a folder's first entries, or those of the first folder in it."""
    first = _first(path)
    folders = [entry.path for entry in first if entry.is_dir(follow_symlinks=False)]
    entries = _first(folders[0]) if folders and len(folders) == len(first) else first
    return sum(entry.name.lower().endswith(_JPEGS) for entry in entries)


def _stripes(path: str) -> int | None:
    """Return how many targets a file or folder is striped over, as Lustre's own tool says."""
    tool = shutil.which("lfs")
    if tool is None:
        return None
    try:
        done = subprocess.run(
            [tool, "getstripe", "-c", path], capture_output=True, text=True, timeout=_LFS_S, check=False
        )
        return int(done.stdout.split()[-1])
    except (OSError, ValueError, IndexError, subprocess.SubprocessError):
        return None


def blocks_below(tree: Tree, mount: Mount) -> tuple[Block, ...]:
    """Return the block devices behind a mount, the mounted one first; none for what is no block device."""
    first = tree.resolve(f"sys/dev/block/{mount.number}") if mount.number else ""
    if not first and mount.source.startswith("/dev/"):  # btrfs and others have a number of their own
        name = os.path.basename(tree.resolve(mount.source[1:]) or mount.source)
        first = tree.resolve(f"sys/class/block/{name}")
    return tuple({block.name: block for block in _walk(tree, first, _DEEPEST)}.values()) if first else ()


def _walk(tree: Tree, place: str, depth: int) -> Iterator[Block]:
    if tree.exists(f"{place}/partition"):
        place = os.path.dirname(place)
    members = tree.names(f"{place}/slaves")
    yield _block(tree, place, members)
    for member in members:
        below = tree.resolve(f"{place}/slaves/{member}")
        if below and depth:
            yield from _walk(tree, below, depth - 1)


def _block(tree: Tree, place: str, members: tuple[str, ...]) -> Block:
    name = os.path.basename(place)
    queue = f"{place}/queue"
    kind, detail = _kind(tree, place, name)
    turns = tree.number(f"{queue}/rotational")
    return Block(
        name=name,
        kind=kind,
        detail=detail,
        scheduler=chosen(tree.read(f"{queue}/scheduler")),
        requests=tree.number(f"{queue}/nr_requests"),
        rotational=None if turns is None else bool(turns),
        read_ahead_kb=tree.number(f"{queue}/read_ahead_kb"),
        max_sectors_kb=tree.number(f"{queue}/max_sectors_kb"),
        max_hw_sectors_kb=tree.number(f"{queue}/max_hw_sectors_kb"),
        members=tuple(_disk(tree, f"{place}/slaves/{member}") for member in members),
        controllers=() if members else tuple(_controllers(tree, place, name)),
    )


def _disk(tree: Tree, link: str) -> str:
    """Return the name of the disk that a link to it or to a partition of it means."""
    place = tree.resolve(link)
    if tree.exists(f"{place}/partition"):
        place = os.path.dirname(place)
    return os.path.basename(place or link)


def _kind(tree: Tree, place: str, name: str) -> tuple[str, str]:
    if name.startswith("nvme"):
        return "nvme", tree.read(f"{place}/device/model")
    if name.startswith("md"):
        return "raid", tree.read(f"{place}/md/level")
    if name.startswith("dm-"):
        uuid, called = tree.read(f"{place}/dm/uuid"), tree.read(f"{place}/dm/name")
        return "mapper", f"{uuid.partition('-')[0]} {called}".strip()
    if name.startswith("loop"):
        return "loop", tree.read(f"{place}/loop/backing_file")
    if name.startswith(("vd", "xvd")) or "/virtio" in place:
        return "virtio", ""
    if "/virtual/" in place:
        return "virtual", ""
    return "disk", tree.read(f"{place}/device/model")


def _controllers(tree: Tree, place: str, name: str) -> Iterator[Controller]:
    """Yield what a disk hangs on: with NVMe multipath every path to it, which its subsystem links to."""
    subsystem = os.path.dirname(place)
    if "/nvme-subsystem/" in f"{subsystem}/":
        links = [f"{subsystem}/{entry}" for entry in tree.names(subsystem) if _CONTROLLER.fullmatch(entry)]
        places = [(os.path.basename(link), tree.resolve(link)) for link in links]
    elif name.startswith("nvme"):
        places = [(os.path.basename(subsystem), subsystem)]
    else:
        places = [(name, place)]
    for called, where in places:
        chain = chain_of(where)
        yield Controller(
            name=called, chain=chain, node=_node(tree, where, chain), transport=tree.read(f"{where}/transport")
        )


def _node(tree: Tree, where: str, chain: tuple[str, ...]) -> int | None:
    """Return the NUMA node of a device on the PCI bus; the kernel writes -1 where it does not know."""
    addresses = chain[1:]
    if not addresses:
        return None
    end = where.index(addresses[-1]) + len(addresses[-1])
    node = tree.number(f"{where[:end]}/numa_node")
    return node if node is not None and node >= 0 else None
