"""Verdicts about mounts and the devices behind them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardkit.diagnosing.facts import Block, Storage
from shardkit.diagnosing.judge_blocks import bottom, judge_block
from shardkit.diagnosing.judge_storage import judge_storage
from shardkit.storage.probe import Mount, PathFacts


def storage(file_system="ext4", *options, align=512, refusal=None, number="8:1", **facts):
    mount = Mount(
        file_system=file_system, point="/data", source="/dev/sda1", options=("rw", "relatime", *options), number=number
    )
    return Storage(
        path="/data",
        probed=PathFacts(path="/data", mount=mount, direct_align=align, direct_refusal=refusal),
        **facts,
    )


def lines(facts):
    return {line.name: line for line in judge_storage(facts)}


def statuses(facts):
    return {name: line.status for name, line in lines(facts).items()}


def blocks(block):
    return {line.name: line for line in judge_block(block)}


def test_a_disk_that_is_set_up_has_no_warning(nvme_box):
    assert {line.status for line in judge_storage(nvme_box.storage)} == {"ok", "info"}


def test_a_disk_says_on_which_node_it_is(nvme_box):
    (disk,) = nvme_box.storage.blocks
    assert blocks(disk)["device nvme0n1"].found.endswith("NUMA node 0")
    apart = replace(disk, controllers=tuple(replace(one, node=None) for one in disk.controllers))
    assert "NUMA" not in blocks(apart)["device nvme0n1"].found


def test_a_path_that_may_not_be_looked_at_is_the_only_line():
    (line,) = judge_storage(Storage(path="/x", refusal="cannot look at a path: /x"))
    assert (line.name, line.status, line.found) == ("path", "fail", "cannot look at a path: /x")


def test_a_mount_of_nfs_with_what_one_gets_by_default_has_three_remedies(nfs_client):
    found = lines(nfs_client.storage)
    assert {name for name, line in found.items() if line.status == "warn"} == {
        "NFS rsize", "NFS connections", "read-ahead of the mount",
    }  # fmt: skip
    assert "rsize=1048576" in found["NFS rsize"].remedy
    assert "nconnect=8" in found["NFS connections"].remedy
    assert found["read-ahead of the mount"].remedy == "echo 4096 > /sys/class/bdi/0:52/read_ahead_kb"
    assert found["direct reads"].status == "ok"


@pytest.mark.parametrize(
    ("options", "name", "status"),
    [
        (("rsize=1048576", "proto=tcp", "nconnect=16"), "NFS rsize", "ok"),
        (("rsize=1048575",), "NFS rsize", "warn"),
        (("proto=tcp", "nconnect=16"), "NFS connections", "ok"),
        (("proto=tcp6",), "NFS connections", "warn"),
        (("proto=rdma",), "NFS connections", "ok"),
    ],
)
def test_a_mount_of_nfs_that_was_cared_for_is_fine(options, name, status):
    assert statuses(storage("nfs", *options))[name] == status


def test_a_containers_own_layers_are_no_place_for_data(container):
    line = lines(container.storage)["file system"]
    assert (line.status, "docker run -v" in line.remedy) == ("warn", True)


@pytest.mark.parametrize(
    ("file_system", "status"),
    [
        ("ext4", "ok"), ("xfs", "ok"), ("tmpfs", "ok"), ("nfs4", "ok"), ("lustre", "ok"), ("btrfs", "warn"),
        ("zfs", "warn"), ("fuse.sshfs", "warn"), ("virtiofs", "warn"), ("f2fs", "info"),
    ],
)  # fmt: skip
def test_a_file_system_has_its_verdict(file_system, status):
    assert statuses(storage(file_system))["file system"] == status


@pytest.mark.parametrize(
    ("file_system", "options", "name"),
    [
        ("ext4", ("data=writeback",), "ext4 journal"),
        ("ext4", ("data=journal",), "ext4 journal"),
        ("ext4", ("nobarrier",), "write barriers"),
        ("ext4", ("barrier=0",), "write barriers"),
        ("xfs", ("sync",), "synchronous writes"),
        ("xfs", ("strictatime",), "access times"),
        ("btrfs", ("compress=zstd:3",), "compression"),
    ],
)
def test_an_option_that_costs_is_told_with_its_remedy(file_system, options, name):
    assert statuses(storage(file_system, *options))[name] == "warn"
    assert statuses(storage(file_system, "data=ordered", "barrier=1")).get(name, "ok") == "ok"


@pytest.mark.parametrize(
    ("options", "status", "says"),
    [
        (("rw", "noatime"), "ok", "none, of folders neither"),
        (("rw", "nodiratime", "relatime"), "ok", "once a day at most"),
        (("rw", "relatime", "lazytime"), "ok", "once a day at most, and lazytime keeps them in memory"),
        (("rw", "lazytime"), "ok", "of every read, but lazytime keeps them in memory"),
        (("rw",), "warn", "every read of a file is written down"),
        (("rw", "nodiratime"), "warn", "every read of a file is written down"),
        (("ro",), "ok", "none: read-only"),
    ],
)
def test_access_times_cost_only_where_they_are_written(options, status, says):
    line = lines(mounted_with("ext4", options))["access times"]
    assert (line.status, line.found) == (status, says)
    assert line.remedy == ("mount -o remount,noatime /data" if status == "warn" else "")


@pytest.mark.parametrize(("file_system", "options"), [("ext4", ()), ("nfs4", ("rw",))])
def test_access_times_that_are_not_this_machines_are_not_judged(file_system, options):
    assert "access times" not in statuses(mounted_with(file_system, options))


@pytest.mark.parametrize(
    ("options", "status", "says"),
    [
        (("rw", "relatime", "logbufs=8", "logbsize=32k"), "ok", "logbufs=8, logbsize=32k"),
        (("rw", "relatime", "logbufs=2", "logbsize=32k"), "warn", "logbufs=2, logbsize=32k: who makes files"),
        (("ro", "relatime", "logbufs=2"), "ok", "logbufs=2"),
        (("rw", "relatime"), "ok", "not told"),
    ],
)
def test_the_log_of_xfs_should_have_all_its_buffers(options, status, says):
    line = lines(mounted_with("xfs", options))["XFS log"]
    assert (line.status, line.found.startswith(says)) == (status, True)
    assert ("/etc/fstab" in line.remedy) == (status == "warn")
    assert "XFS log" not in statuses(mounted_with("ext4", options))


def mounted_with(file_system, options):
    facts = storage(file_system)
    mount = replace(facts.probed.mount, options=options)
    return replace(facts, probed=replace(facts.probed, mount=mount))


@pytest.mark.parametrize(("count", "told"), [(0, False), (63, False), (64, True)])
def test_images_in_files_of_their_own_are_a_warning(count, told):
    found = lines(storage(loose=count)).get("single images")
    assert (found is not None) == told
    assert found is None or (found.status, "shardkit pack" in found.remedy) == ("warn", True)


@pytest.mark.parametrize(
    ("facts", "status", "says"),
    [
        ({"align": 4096}, "ok", "4096"),
        ({"align": None}, "ok", "not stated"),
        ({"align": 0}, "warn", "STATX_DIOALIGN"),
        ({"align": None, "refusal": "EINVAL (Invalid argument)"}, "warn", "EINVAL"),
        ({"file_system": "tmpfs", "align": None, "refusal": "EINVAL (Invalid argument)"}, "info", "it is memory"),
    ],
)
def test_direct_reads_are_as_statx_and_open_say(facts, status, says):
    line = lines(storage(**facts))["direct reads"]
    assert (line.status, says in line.found) == (status, True)


@pytest.mark.parametrize(("stripes", "status"), [(None, "info"), (1, "warn"), (4, "info"), (-1, "info")])
def test_a_file_of_lustre_should_lie_on_several_targets(stripes, status):
    assert statuses(storage("lustre", stripes=stripes))["Lustre stripes"] == status


def test_a_slow_queue_has_the_commands_that_speed_it_up():
    block = Block(
        name="nvme0n1", kind="nvme", scheduler="mq-deadline", requests=127, rotational=False, max_sectors_kb=128,
        max_hw_sectors_kb=2048, read_ahead_kb=0,
    )  # fmt: skip
    found = blocks(block)
    assert {line.status for name, line in found.items() if name != "device nvme0n1"} == {"warn"}
    queue = "/sys/block/nvme0n1/queue"
    assert [line.remedy for line in found.values() if line.remedy] == [
        f"echo none > {queue}/scheduler", f"echo 1024 > {queue}/nr_requests (the driver caps it)",
        f"echo 2048 > {queue}/max_sectors_kb", f"echo 128 > {queue}/read_ahead_kb",
    ]  # fmt: skip


def test_what_the_hardware_limits_is_no_fault():
    small = Block(name="nvme0n1", kind="nvme", max_sectors_kb=128, max_hw_sectors_kb=128)
    assert blocks(small)["request size nvme0n1"].status == "ok"


def test_a_disk_that_turns_wants_a_scheduler_and_windows():
    disk = Block(name="sda", kind="disk", rotational=True, scheduler="none", requests=64)
    found = blocks(disk)
    assert "window" in found["device sda"].remedy
    assert found["scheduler sda"].remedy == "echo mq-deadline > /sys/block/sda/queue/scheduler"
    assert found["queue sda"].status == "ok"
    assert blocks(replace(disk, scheduler="mq-deadline"))["scheduler sda"].status == "ok"


def test_a_virtual_disk_that_says_it_turns_is_not_believed():
    found = blocks(Block(name="vda", kind="virtio", rotational=True, scheduler="none"))
    assert {line.status for line in found.values()} <= {"info", "ok"}


def test_devices_on_others_have_no_queue_of_their_own():
    raid = Block(name="md0", kind="raid", detail="raid0", members=("a", "b"), scheduler="mq-deadline", requests=1)
    crypt = Block(name="dm-0", kind="mapper", detail="CRYPT luks", members=("md0",))
    assert list(blocks(raid)) == ["device md0"]
    assert blocks(raid)["device md0"].status == "info"
    assert blocks(crypt)["device dm-0"].status == "warn"
    assert bottom((crypt, raid, Block(name="a", kind="nvme"))) == (Block(name="a", kind="nvme"),)
