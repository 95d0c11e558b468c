"""The block devices behind a mount, found in pictures of /sys and on this machine."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from shardkit.diagnosing.facts import Controller
from shardkit.diagnosing.gather_storage import blocks_below, gather_storage
from shardkit.diagnosing.judge_storage import judge_storage
from shardkit.diagnosing.tree import Tree
from shardkit.storage.probe import Mount
from shardkit.testing.mounts import NoMountsError, loop_mount

FAST = {"scheduler": "[none] mq-deadline", "nr_requests": 1023, "rotational": 0, "read_ahead_kb": 128,
        "max_sectors_kb": 512, "max_hw_sectors_kb": 2048}  # fmt: skip
PCI = "sys/devices/pci0000:15/0000:15:01.0/0000:16:00.0"


def mounted(number, source="/dev/x"):
    return Mount(file_system="xfs", point="/data", source=source, number=number)


def below(picture, number, source="/dev/x"):
    return blocks_below(Tree(picture.root), mounted(number, source))


def nvme(picture, controller=0, *, pci=PCI, number="259:0"):
    place = f"{pci}/nvme/nvme{controller}/nvme{controller}n1"
    picture.disk(place, number, queue=FAST)
    picture.files(f"{pci}/nvme/nvme{controller}", transport="pcie", model="Fast One  ")
    picture.files(pci, numa_node=1)
    picture.link(f"{place}/device", f"{pci}/nvme/nvme{controller}")
    return place


def test_a_partition_is_seen_as_the_disk_that_it_is_on(picture):
    picture.partition(f"{nvme(picture)}/nvme0n1p2", "259:2")
    (disk,) = below(picture, "259:2")
    assert (disk.name, disk.kind, disk.detail, disk.scheduler) == ("nvme0n1", "nvme", "Fast One", "none")
    assert (disk.requests, disk.rotational, disk.max_sectors_kb, disk.max_hw_sectors_kb) == (1023, False, 512, 2048)
    chain = ("pci0000:15", "0000:15:01.0", "0000:16:00.0")
    assert disk.controllers == (Controller(name="nvme0", chain=chain, node=1, transport="pcie"),)


def test_a_raid_is_followed_to_its_disks(picture):
    for controller in (0, 1):
        pci = f"sys/devices/pci0000:{15 + controller}/0000:{15 + controller}:01.0"
        place = nvme(picture, controller, pci=pci, number=f"259:{controller}")
        picture.partition(f"{place}/nvme{controller}n1p1", f"259:1{controller}")
        picture.link(f"sys/devices/virtual/block/md0/slaves/nvme{controller}n1p1", f"{place}/nvme{controller}n1p1")
    picture.disk("sys/devices/virtual/block/md0", "9:0", queue={"rotational": 0})
    picture.files("sys/devices/virtual/block/md0/md", level="raid0")
    raid, *disks = below(picture, "9:0")
    assert (raid.name, raid.kind, raid.detail) == ("md0", "raid", "raid0")
    assert (raid.members, raid.controllers) == (("nvme0n1", "nvme1n1"), ())
    assert [disk.controllers[0].chain[0] for disk in disks] == ["pci0000:15", "pci0000:16"]


def test_a_volume_on_an_encrypted_disk_is_a_stack(picture):
    place = nvme(picture)
    picture.link("sys/devices/virtual/block/dm-0/slaves/nvme0n1", place)
    picture.files("sys/devices/virtual/block/dm-0/dm", uuid="CRYPT-LUKS2-0123-luks", name="luks")
    picture.disk("sys/devices/virtual/block/dm-1", "253:1", queue={"rotational": 0})
    picture.files("sys/devices/virtual/block/dm-1/dm", uuid="LVM-0123", name="vg-data")
    picture.link("sys/devices/virtual/block/dm-1/slaves/dm-0", "sys/devices/virtual/block/dm-0")
    assert [(block.name, block.detail) for block in below(picture, "253:1")] == [
        ("dm-1", "LVM vg-data"), ("dm-0", "CRYPT luks"), ("nvme0n1", "Fast One"),
    ]  # fmt: skip


def test_every_path_of_nvme_multipath_counts(picture):
    subsystem = "sys/devices/virtual/nvme-subsystem/nvme-subsys0"
    picture.disk(f"{subsystem}/nvme0n1", "259:0", queue=FAST)
    for controller, bus in ((0, "15"), (1, "97")):
        place = f"sys/devices/pci0000:{bus}/0000:{bus}:01.0/nvme/nvme{controller}"
        picture.files(place, transport="pcie")
        picture.files(f"sys/devices/pci0000:{bus}/0000:{bus}:01.0", numa_node=-1)
        picture.link(f"{subsystem}/nvme{controller}", place)
    (disk,) = below(picture, "259:0")
    assert [(part.name, part.chain[0], part.node) for part in disk.controllers] == [
        ("nvme0", "pci0000:15", None), ("nvme1", "pci0000:97", None),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "place", "kind"),
    [
        ("vda", "sys/devices/pci0000:00/0000:00:02.0/virtio1/block/vda", "virtio"),
        ("sda", "sys/devices/pci0000:00/0000:00:1f.2/ata1/host0/target0:0:0/0:0:0:0/block/sda", "disk"),
        ("loop3", "sys/devices/virtual/block/loop3", "loop"),
        ("zram0", "sys/devices/virtual/block/zram0", "virtual"),
    ],
)
def test_a_disk_has_its_kind(picture, name, place, kind):
    picture.disk(place, "8:0", queue={"rotational": 1})
    (disk,) = below(picture, "8:0")
    assert (disk.name, disk.kind, disk.rotational, disk.requests) == (name, kind, True, None)


def test_a_file_system_with_a_number_of_its_own_is_found_by_its_source(picture):
    picture.partition(f"{nvme(picture)}/nvme0n1p2", "259:2")
    assert [block.name for block in below(picture, "0:40", "/dev/nvme0n1p2")] == ["nvme0n1"]


@pytest.mark.parametrize("source", ["server:/export", "tmpfs", "/dev/gone", "/dev/../../etc"])
def test_what_is_no_block_device_has_none(picture, source):
    assert below(picture, "0:40", source) == ()


def test_devices_that_stand_on_each_other_come_to_an_end(picture):
    picture.disk("sys/devices/virtual/block/dm-0", "253:0", queue={})
    picture.link("sys/devices/virtual/block/dm-0/slaves/dm-0", "sys/devices/virtual/block/dm-0")
    assert [block.name for block in below(picture, "253:0")] == ["dm-0"]


def test_a_file_stands_for_its_folder(tmp_path):
    (tmp_path / "a.tar").write_bytes(b"x")
    facts = gather_storage(Tree(Path("/")), str(tmp_path))
    assert facts.probed is not None
    assert (facts.path, facts.probed.path) == (str(tmp_path), str(tmp_path / "a.tar"))


def test_the_shard_behind_a_link_is_examined_and_not_the_folder_of_the_links(tmp_path):
    (tmp_path / "store").mkdir()
    (tmp_path / "links").mkdir()
    shard, link = tmp_path / "store" / "a.tar", tmp_path / "links" / "a.tar"
    shard.write_bytes(b"x")
    link.symlink_to("../store/a.tar")
    (tmp_path / "links" / "index.arrow").write_bytes(b"x")
    for path in (link.parent, link):
        facts = gather_storage(Tree(Path("/")), str(path))
        assert facts.probed is not None
        assert (facts.asked, facts.probed.path) == (str(link), str(shard))
        assert next(iter(judge_storage(facts))).found == (
            f"{path}, " + (f"asked of {link}, " if path != link else "") + f"which lies at {shard}"
        )


def test_a_link_that_leads_nowhere_does_not_stand_for_its_folder(tmp_path):
    (tmp_path / "a.tar").symlink_to("gone.tar")
    (tmp_path / "b.tar").write_bytes(b"x")
    facts = gather_storage(Tree(Path("/")), str(tmp_path))
    assert facts.asked == str(tmp_path / "b.tar")


def test_what_may_not_be_looked_at_is_told_and_no_error(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for name in ("pipe", "gone"):
        facts = gather_storage(Tree(Path("/")), str(tmp_path / name))
        assert facts.probed is None
        assert str(tmp_path / name) in facts.refusal


def test_the_disk_behind_this_folder_is_the_one_that_lsblk_names(tmp_path, require_tool):
    facts = gather_storage(Tree(Path("/")), str(tmp_path))
    assert facts.probed is not None
    source = facts.probed.mount.source
    if not facts.blocks or not os.path.exists(source):
        pytest.skip("the temporary folder lies on no block device that is here")
    command = [require_tool("lsblk"), "-n", "-s", "-r", "-o", "KNAME,TYPE", source]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    names = [name for name, kind in (line.split() for line in told.splitlines()) if kind != "part"]
    assert [block.name for block in facts.blocks] == names


@pytest.mark.parametrize("below", [".", "n01440764"])
def test_single_images_are_counted_in_a_folder_or_in_its_first_one(tmp_path, below):
    (tmp_path / below).mkdir(exist_ok=True)
    for number in range(3):
        (tmp_path / below / f"{number}.JPEG").write_bytes(b"x")
    (tmp_path / below / "a.tar").write_bytes(b"x")
    assert gather_storage(Tree(Path("/")), str(tmp_path)).loose == 3
    assert gather_storage(Tree(Path("/")), str(tmp_path / below / "a.tar")).loose == 0


@pytest.fixture(scope="module")
def xfs(tmp_path_factory, require_tool):
    require_tool("mkfs.xfs")
    folder = tmp_path_factory.mktemp("xfs")
    try:
        with loop_mount(folder / "image", folder / "mounted", "xfs", size=320 << 20) as disk:
            yield disk
    except NoMountsError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize(
    ("options", "warned"),
    [
        ("defaults", set()),
        ("logbufs=2,strictatime", {"XFS log", "access times"}),
        ("logbsize=64k,nodiratime,strictatime,lazytime", set()),
        ("noatime", set()),
    ],
)
def test_a_real_xfs_has_warnings_for_the_options_that_cost(xfs, options, warned):
    xfs.remount(options)
    found = {line.name: line for line in judge_storage(gather_storage(Tree(Path("/")), str(xfs.path)))}
    assert found["file system"].found.startswith(f"xfs on {xfs.path}, ")
    assert {name for name in ("XFS log", "access times") if found[name].status == "warn"} == warned
    assert found["XFS log"].found.startswith("logbufs=2" if "logbufs=2" in options else "logbufs=8")
