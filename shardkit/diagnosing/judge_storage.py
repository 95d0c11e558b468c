"""Verdicts about what lies behind a path. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardkit.diagnosing.judge_blocks import judge_block
from shardkit.diagnosing.line import Line
from shardkit.storage.uring_causes import UNFIT

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from shardkit.diagnosing.facts import Storage
    from shardkit.storage.probe import Mount, PathFacts

__all__ = ["judge_storage", "network", "options_of"]

_NFS_BYTES = 1 << 20
_NFS_READ_AHEAD_KB = 1024
_LOG_BUFFERS = 8
_MANY_IMAGES = 64
_IN_MEMORY = {"tmpfs", "ramfs", "hugetlbfs"}
_CLUSTER = ("lustre", "gpfs", "beegfs", "wekafs", "ceph")


def judge_storage(storage: Storage) -> Iterator[Line]:
    """Yield a line for each thing that is known."""
    facts = storage.probed
    if facts is None:
        yield Line("path", "fail", storage.refusal or "not looked at", "name a file or folder that may be read")
        return
    asked = storage.asked or storage.path
    through = "" if asked == storage.path else f", asked of {asked}"
    lies = "" if facts.path == asked else f", which lies at {facts.path}"
    yield Line("path", "info", storage.path + through + lies)
    yield from _loose(storage)
    yield _file_system(facts.mount)
    yield from _mount_options(facts.mount)
    yield _direct(facts)
    yield from _network(storage, facts.mount)
    for block in storage.blocks:
        yield from judge_block(block)


def network(mount: Mount) -> bool:
    """Return whether other machines serve a file system."""
    return mount.file_system.startswith(("nfs", "cifs", "smb", "9p", *_CLUSTER))


def options_of(mount: Mount) -> Mapping[str, str]:
    """Return a mount's options with their values, "" for a mere word; the file system's own win."""
    return {name: value for name, _, value in (option.partition("=") for option in mount.options)}


def _file_system(mount: Mount) -> Line:
    kind = mount.file_system
    found = f"{kind} on {mount.point}, from {mount.source}"
    if kind == "overlay":
        return Line(
            "file system", "warn", f"{found}: a container's own layers, slower and of unknown place",
            "docker run -v /data:/data:ro, and keep the dataset there",
        )  # fmt: skip
    if kind.startswith(UNFIT):
        return Line(
            "file system", "warn", f"{found}: io_uring reads it wrongly, so it is not used",
            "a native mount of the same storage; else io='direct' or 'buffered'",
        )  # fmt: skip
    if kind in {"btrfs", "zfs"}:
        return Line(
            "file system", "warn", f"{found}: it checks or inflates what it reads, so direct reads copy all the same",
            "keep shards on XFS or ext4",
        )  # fmt: skip
    known = kind in {"xfs", "ext4", *_IN_MEMORY} or network(mount)
    return Line("file system", "ok" if known else "info", found)


def _mount_options(mount: Mount) -> Iterator[Line]:
    options = options_of(mount)
    yield Line("mount options", "info", ",".join(dict.fromkeys(mount.options)) or "not told")
    remount = f"mount -o remount,{{}} {mount.point}"
    yield from _access_times(mount, options, remount.format("noatime"))
    if mount.file_system == "xfs":
        yield _xfs_log(options)
    if mount.file_system == "ext4" and options.get("data", "ordered") != "ordered":
        yield Line(
            "ext4 journal", "warn", f"data={options['data']}: GPUDirect Storage needs data=ordered, and with "
            "data=journal direct reads fall back to the page cache",
            f"tune2fs -o journal_data_ordered {mount.source}, take data= out of /etc/fstab, and mount again",
        )  # fmt: skip
    if {"nobarrier"} & set(options) or options.get("barrier") == "0":
        yield Line(
            "write barriers", "warn", "off: gains nothing for reading, and a power cut can destroy the file system",
            remount.format("barrier"),
        )  # fmt: skip
    if {"sync", "dirsync"} & set(options):
        yield Line(
            "synchronous writes", "warn", "every write waits for the disk: pack is slow", remount.format("async")
        )
    if mount.file_system == "btrfs" and {"compress", "compress-force"} & set(options):
        yield Line("compression", "warn", "JPEGs do not get smaller", remount.format("compress=no"))


def _access_times(mount: Mount, options: Mapping[str, str], remedy: str) -> Iterator[Line]:
    name = "access times"
    if network(mount) or not options:
        return  # the server's affair; not told
    word = next((word for word in ("ro", "noatime", "relatime") if word in options), "")
    if not word or "strictatime" in options:
        if "lazytime" in options:
            yield Line(name, "ok", "of every read, but lazytime keeps them in memory")
        else:
            yield Line(name, "warn", "every read of a file is written down", remedy)
        return
    texts = {"ro": "none: read-only", "noatime": "none, of folders neither", "relatime": "once a day at most"}
    yield Line(name, "ok", f"{texts[word]}{', and lazytime keeps them in memory' if 'lazytime' in options else ''}")


def _xfs_log(options: Mapping[str, str]) -> Line:
    """Judge the buffers of the log, of which the kernel takes 8 unless it is told otherwise."""
    name, count = "XFS log", options.get("logbufs", "")
    found = ", ".join(f"{word}={options[word]}" for word in ("logbufs", "logbsize") if options.get(word))
    if count.isdigit() and int(count) < _LOG_BUFFERS and "ro" not in options:
        return Line(
            name, "warn", f"{found}: who makes files, as pack does, waits for the log; reads do not use it",
            "take logbufs= out of /etc/fstab (8 is the default), unmount and mount again",
        )  # fmt: skip
    return Line(name, "ok", found or "not told, so as the kernel chooses")


def _loose(storage: Storage) -> Iterator[Line]:
    if storage.loose >= _MANY_IMAGES:
        yield Line(
            "single images", "warn", "images lie here file by file: each costs a look-up and an open, and disks "
            "give a small part of their speed",
            "shardkit pack SRC DST, and train from DST",
        )  # fmt: skip


def _direct(facts: PathFacts) -> Line:
    name = "direct reads"
    if facts.direct_refusal is not None or facts.direct_align == 0:
        why = facts.direct_refusal or "statx (STATX_DIOALIGN) says that there are none"
        if facts.mount.file_system in _IN_MEMORY:
            return Line(name, "info", f"none ({why}), and none needed: it is memory")
        return Line(name, "warn", f"none: {why}", "keep shards on XFS or ext4; io='auto' takes 'buffered' here")
    if facts.direct_align is None:
        return Line(name, "ok", "O_DIRECT opens; the alignment is not stated (STATX_DIOALIGN), 4096 is taken")
    return Line(name, "ok", f"aligned to {facts.direct_align} bytes, says STATX_DIOALIGN")


def _network(storage: Storage, mount: Mount) -> Iterator[Line]:
    if mount.file_system.startswith("nfs"):
        yield from _nfs(mount)
        ahead = storage.read_ahead_kb
        if ahead is not None:
            path = f"/sys/class/bdi/{mount.number}/read_ahead_kb"
            small = ahead < _NFS_READ_AHEAD_KB
            yield Line(
                "read-ahead of the mount", "warn" if small else "ok", f"{ahead} KiB",
                f"echo 4096 > {path}" if small else "",
            )  # fmt: skip
    if mount.file_system == "lustre":
        count = storage.stripes
        if count is None:
            yield Line("Lustre stripes", "info", "not told: the tool lfs is not here")
        else:
            wide = count != 1
            yield Line(
                "Lustre stripes", "info" if wide else "warn", f"{count} target{'s' if wide else ''} a file",
                "" if wide else "lfs setstripe -c 4 on the folder before packing; many shards spread as well",
            )  # fmt: skip


def _nfs(mount: Mount) -> Iterator[Line]:
    options = options_of(mount)
    size = options.get("rsize", "")
    if size.isdigit():
        small = int(size) < _NFS_BYTES
        yield Line("NFS rsize", "warn" if small else "ok", size, "mount with rsize=1048576" if small else "")
    if options.get("proto", "").startswith("tcp"):
        connections = options.get("nconnect", "1")
        one = connections == "1"
        yield Line(
            "NFS connections", "warn" if one else "ok", f"nconnect={connections}: "
            f"{'one TCP connection carries everything' if one else 'TCP connections to the server'}",
            "mount with nconnect=8 (Linux 5.3), or proto=rdma where the network has it" if one else "",
        )  # fmt: skip
    elif options.get("proto", "").startswith("rdma"):
        yield Line("NFS connections", "ok", "RDMA")
